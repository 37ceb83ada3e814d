"""Tables of a report: the summary of all machines, and what each switch does to each metric."""

from collections.abc import Mapping, Sequence

from homenode.analyse.comparison import Outcome
from homenode.analyse.ranking import Position
from homenode.analyse.summary import Series, SeriesKey, headline
from homenode.analyse.switch_effects import Switch, SwitchEffect
from homenode.analyse.words import multiple_text, range_text
from homenode.doc import Cell, Span, Table, Words
from homenode.metrics import METRICS, Metric
from homenode.report.charts.bars import chart_scale, range_figures, short_figure
from homenode.report.page.machine import Machine
from homenode.wording import plural

_AUTHOR_COLUMN = {"cells": Switch.CELLS.value}
"""Columns of published summaries that are called otherwise here."""

_AUTHOR_TEXTS = ("pinning", "cells", "siblings")

_TONES = {"better": "\u25b2 ", "worse": "\u25bc ", "mixed": "\u25b2\u25bc "}

SeriesOf = Mapping[str, Mapping[SeriesKey, Series]]


def summary_table(machines: Sequence[Machine], anchors: Sequence[str], *, paper: bool) -> Table:
    """A row for each alternative of each machine, a column for each metric that anybody has."""
    series = [machine.series for machine in machines]
    shown = [
        metric
        for metric in METRICS.values()
        if any(_value(one, metric) is not None for of in series for one in of.values())
    ]
    units = {metric.id: _column_unit(metric, series) for metric in shown}
    figures = tuple(f"{metric.title}, {_unbroken(units[metric.id][1])}" for metric in shown)
    rows: list[tuple[Cell, ...]] = []
    for machine, by_label, anchor in zip(machines, series, anchors, strict=True):
        best = {metric.id: _best(machine, metric) for metric in shown}
        for position, one in enumerate(machine.every):
            found = by_label[one.label]
            cells = [
                _figure(found, metric, units[metric.id], best[metric.id] == one.label)
                for metric in shown
            ]
            if not any(cell.lines[0] for cell in cells):
                continue
            heads = [run.head for run in one.runs]
            vcpus = sorted({head.vcpus for head in heads if head.vcpus is not None})
            boots = max((len(s.medians) for s in found.values() if s.replicated), default=0)
            origins = ", ".join(sorted({str(head.origin) for head in heads}))
            rows.append(
                (
                    Cell(
                        (Span(machine.name, link=anchor),), order=f"{machine.name} {position:04d}"
                    ),
                    Cell((one.label,), order=one.label),
                    Cell((", ".join(map(str, vcpus)),), order=float(vcpus[0]) if vcpus else None),
                    Cell((origins,), order=str(heads[0].origin)),
                    Cell((str(boots) if boots else "",), order=float(boots)),
                    *cells,
                )
            )
    about = (
        "One row for each layout of each machine; compare only rows of one machine. \u25cf better "
        "than every other layout of its machine, by a verdict."
    )
    return Table(
        heads=("system", "layout", "vCPUs", "figures", "boots", *figures),
        rows=tuple(rows),
        numeric=("vCPUs", "boots", *figures),
        name="Summary of all machines and layouts",
        caption=about if paper else f"{about} Press a column's name to sort.",
        look="summary",
        is_sortable=True,
    )


def _unbroken(unit: str) -> str:
    """No line ends within a unit: after its slash stands a word joiner."""
    return unit.replace("/", "/\u2060")


def effects_table(machines: Sequence[Machine]) -> Table | None:
    """What each switch does to each metric, over all machines; None where no one measured any.

    A row for each metric that some switch was measured on, or that a publication sums up.
    """
    publications = {one.id: one for machine in machines for one in machine.sources}
    found: dict[tuple[str, Switch], list[SwitchEffect]] = {}
    for machine in machines:
        for effect in machine.effects:
            found.setdefault((effect.effect.metric, effect.switch), []).append(effect)
    rows = []
    for metric in METRICS.values():
        quotes: dict[str, list[str]] = {}
        title: list[Words] = [metric.title]
        title.append(Span(f"{'less' if metric.lower_is_better else 'more'} is better", "dim small"))
        for publication in publications.values():
            for one in publication.effects:
                if one.metric == metric.id:
                    said = f'{publication.id}: {one.label}, risk "{one.risk}"'
                    title.append(Span(said, "dim small"))
                    for name in _AUTHOR_TEXTS:
                        text = getattr(one, name)
                        quotes.setdefault(_AUTHOR_COLUMN.get(name, name), []).append(text)
        if quotes or any((metric.id, switch) in found for switch in Switch):
            cells = (
                _effect_cell(found.get((metric.id, one), ()), quotes.get(one.value, ()))
                for one in Switch
            )
            rows.append((Cell(tuple(title)), *cells))
    if not rows:
        return None
    return Table(
        heads=("metric", *(switch.value for switch in Switch)),
        rows=tuple(rows),
        name="Effects and risks by metric and switch",
    )


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
            return Cell(("",))
        low, high = min(one.value for one in parts), max(one.value for one in parts)
        return Cell((range_figures(low / unit[0], high / unit[0]),), order=low)
    text = short_figure(found.value / unit[0])
    if found.is_range:
        text = range_figures(found.low / unit[0], found.high / unit[0])
    return Cell((text,), "best" if is_best else "", found.value)


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


def _effect_cell(effects: Sequence[SwitchEffect], quotes: Sequence[str]) -> Cell:
    """What a switch does to a metric: the range of changes, the worst loss that matters with its
    machine, of how many machines nothing is known, and what publications say."""
    said = tuple(Span(f'"{quote}"', "small quote") for quote in quotes)
    if not effects:
        text = "no figures by layout" if quotes else "not measured"
        return Cell((Span(text, "dim"), *said), "" if quotes else "none")
    stated = [one for one in effects if one.judged is not Outcome.CANNOT_TELL]
    ratios = sorted(one.effect.ratio for one in stated or effects)
    if not stated:
        return Cell((Span(f"cannot tell ({_range(ratios)})", "tone neutral"), *said))
    losses = [one for one in stated if one.judged is Outcome.WORSE]
    gains = [one for one in stated if one.judged is Outcome.BETTER]
    tone = "mixed" if losses and gains else "worse" if losses else "better" if gains else "neutral"
    lines: list[Words] = [
        (
            Span(f"{_TONES.get(tone, '')}{_range(ratios)}", f"tone {tone}"),
            Span(f" ({plural(len(stated), 'machine')})", "dim small"),
        )
    ]
    if losses:
        worst = min(losses, key=lambda one: one.effect.gain)
        loss = f"risk: {multiple_text(worst.effect.ratio)} on {worst.machine}"
        lines.append(Span(loss, "risk small"))
    else:
        lines.append(Span("no risk shown", "dim small"))
    if unclear := len(effects) - len(stated):
        lines.append(Span(f"{unclear} more cannot tell", "dim small"))
    return Cell((*lines, *said))


def _range(ratios: Sequence[float]) -> str:
    low, high = multiple_text(ratios[0]), multiple_text(ratios[-1])
    return low if low == high else range_text(ratios[0], ratios[-1])
