"""Tables of a report: the summary of all machines, and what each switch does to each metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homenode.analyse.comparison import Outcome
from homenode.analyse.ranking import Position
from homenode.analyse.summary import Series, SeriesKey, headline
from homenode.analyse.switch_effects import Switch, SwitchEffect
from homenode.analyse.words import multiple_text, range_text
from homenode.metrics import METRICS, Metric
from homenode.report.charts.bars import chart_scale, range_figures, short_figure
from homenode.report.page.machine import Machine

_AUTHOR_COLUMN = {"cells": Switch.CELLS.value}
"""Columns of published summaries that are called otherwise here."""

_AUTHOR_TEXTS = ("pinning", "cells", "siblings", "risk")

SeriesOf = Mapping[str, Mapping[SeriesKey, Series]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table that can be sorted. order: what it is sorted by; None comes last."""

    text: str
    order: float | str | None
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. numeric: by column, whether it holds figures. anchors: of the first cell's link."""

    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]
    anchors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EffectCell:
    """What a switch does to a metric over all machines.

    text: the range of changes. tone: better, worse, mixed or neutral. risk: the worst loss that
    matters, with its machine; None where none is shown. machines: behind the range. open: of how
    many machines nothing is known.
    """

    text: str
    tone: str
    risk: str | None
    machines: int
    open: int


@dataclass(frozen=True, slots=True)
class EffectRow:
    """One metric; cells by switch, None where nothing was measured.

    authors: rows of publications' own summaries: (publication, label, texts by column name).
    """

    metric: Metric
    cells: tuple[EffectCell | None, ...]
    authors: tuple[tuple[str, str, dict[str, str]], ...] = ()


def summary_table(machines: Sequence[Machine], anchors: Sequence[str]) -> Table:
    """A row for each alternative of each machine, a column for each metric that anybody has."""
    shown = [
        metric
        for metric in METRICS.values()
        if any(
            _value(one, metric) is not None
            for machine in machines
            for one in machine.series.values()
        )
    ]
    series = [machine.series for machine in machines]
    units = {metric.id: _column_unit(metric, series) for metric in shown}
    columns = ["system", "layout", "vCPUs", "figures", "boots"]
    numeric = [False, False, True, False, True, *(True for _ in shown)]
    rows: list[tuple[Cell, ...]] = []
    links: list[str] = []
    for machine, by_label, anchor in zip(machines, series, anchors, strict=True):
        best = {metric.id: _best(machine, metric) for metric in shown}
        for position, one in enumerate(machine.every):
            found = by_label[one.label]
            heads = [run.head for run in one.runs]
            vcpus = sorted({head.vcpus for head in heads if head.vcpus is not None})
            boots = max((len(s.medians) for s in found.values() if s.replicated), default=0)
            cells = [
                Cell(machine.name, f"{machine.name} {position:04d}"),
                Cell(one.label, one.label),
                Cell(", ".join(map(str, vcpus)), float(vcpus[0]) if vcpus else None),
                Cell(", ".join(sorted({str(head.origin) for head in heads})), str(heads[0].origin)),
                Cell(str(boots) if boots else "", float(boots)),
            ]
            cells += [
                _figure(found, metric, units[metric.id], best[metric.id] == one.label)
                for metric in shown
            ]
            if any(cell.text for cell in cells[len(numeric) - len(shown) :]):
                rows.append(tuple(cells))
                links.append(anchor)
    columns += [f"{metric.title}, {_unbroken(units[metric.id][1])}" for metric in shown]
    return Table(tuple(columns), tuple(numeric), tuple(rows), tuple(links))


def _unbroken(unit: str) -> str:
    """No line ends within a unit: after its slash stands a word joiner."""
    return unit.replace("/", "/\u2060")


def effect_rows(machines: Sequence[Machine]) -> tuple[EffectRow, ...]:
    """Metrics that some switch was measured on, or that a publication sums up, in their order."""
    publications = {one.id: one for machine in machines for one in machine.sources}
    found: dict[tuple[str, Switch], list[SwitchEffect]] = {}
    for machine in machines:
        for one in machine.effects:
            found.setdefault((one.effect.metric, one.switch), []).append(one)
    rows = []
    for metric in METRICS.values():
        cells = tuple(_effect_cell(metric, found.get((metric.id, switch), ())) for switch in Switch)
        authors = tuple(
            (
                publication.id,
                one.label,
                {_AUTHOR_COLUMN.get(name, name): getattr(one, name) for name in _AUTHOR_TEXTS},
            )
            for publication in publications.values()
            for one in publication.effects
            if one.metric == metric.id
        )
        if authors or any(cell is not None for cell in cells):
            rows.append(EffectRow(metric, cells, authors))
    return tuple(rows)


def _column_unit(metric: Metric, series: Sequence[SeriesOf]) -> tuple[float, str]:
    values = [_value(one, metric) for by_label in series for one in by_label.values()]
    return chart_scale(metric.unit, [value for value in values if value is not None])


def _figure(
    series: Mapping[SeriesKey, Series], metric: Metric, unit: tuple[float, str], is_best: bool
) -> Cell:
    found = _series(series, metric)
    if found is None:
        parts = _parts(series, metric)
        if not parts:
            return Cell("", None)
        low, high = min(one.value for one in parts), max(one.value for one in parts)
        return Cell(range_figures(low / unit[0], high / unit[0]), low)
    text = short_figure(found.value / unit[0])
    if found.is_range:
        text = range_figures(found.low / unit[0], found.high / unit[0])
    return Cell(text, found.value, is_best)


def _value(series: Mapping[SeriesKey, Series], metric: Metric) -> float | None:
    found = _series(series, metric)
    if found is None:
        return max((one.value for one in _parts(series, metric)), default=None)
    return found.value


def _series(series: Mapping[SeriesKey, Series], metric: Metric) -> Series | None:
    """The series that stands for a metric; of placement states the one with the most samples.

    Figures in another unit (parts of a reference that was not printed) have no place in a column.
    """
    keys = headline(series, metric) or _only_variant(series, metric)
    found = [series[key] for key in keys if key.unit == metric.unit]
    return max(found, key=lambda one: one.samples, default=None)


def _parts(series: Mapping[SeriesKey, Series], metric: Metric) -> list[Series]:
    """Series of single nodes and GPUs, where none is over all: a job bound to each in turn."""
    return [
        one
        for key, one in series.items()
        if (key.metric, key.unit, key.variant) == (metric.id, metric.unit, metric.headline)
        and key.node is not None
        and key.device is not None
    ]


def _only_variant(series: Mapping[SeriesKey, Series], metric: Metric) -> tuple[SeriesKey, ...]:
    """The one series over all nodes, devices and sizes, where there is one: "FP16 as printed"."""
    found = tuple(key for key in series if key.metric == metric.id and key.is_over_all)
    return found if len(found) == 1 else ()


def _best(machine: Machine, metric: Metric) -> str | None:
    """The alternative that a verdict found better than every other; None where one is as good.

    Nothing is best of figures that are emulated, of a sick machine, or of too few boots.
    """
    for verdict in machine.verdicts:
        results = verdict.on(metric.id)
        others = [one.position is Position.WORSE for one in results[1:]]
        if verdict.choice is not None and others and all(others):
            return results[0].alternative
    return None


def _effect_cell(metric: Metric, effects: Sequence[SwitchEffect]) -> EffectCell | None:
    if not effects:
        return None
    stated = [one for one in effects if one.judged is not Outcome.CANNOT_TELL]
    unclear = len(effects) - len(stated)
    if not stated:
        ratios = sorted(one.effect.ratio for one in effects)
        return EffectCell(f"cannot tell ({_range(ratios)})", "neutral", None, 0, unclear)
    ratios = sorted(one.effect.ratio for one in stated)
    losses = [one for one in stated if one.judged is Outcome.WORSE]
    gains = [one for one in stated if one.judged is Outcome.BETTER]
    tone = "mixed" if losses and gains else "worse" if losses else "better" if gains else "neutral"
    risk = None
    if losses:
        worst = min(losses, key=lambda one: one.effect.gain)
        risk = f"{multiple_text(worst.effect.ratio)} on {worst.machine}"
    return EffectCell(_range(ratios), tone, risk, len(stated), unclear)


def _range(ratios: Sequence[float]) -> str:
    low, high = multiple_text(ratios[0]), multiple_text(ratios[-1])
    return low if low == high else range_text(ratios[0], ratios[-1])
