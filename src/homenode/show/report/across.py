"""Across: all machines together: a summary, effects of each switch, shared charts, links."""

from collections.abc import Iterator, Mapping, Sequence

from homenode.decide.comparison import Outcome
from homenode.decide.ranking import MetricRank
from homenode.decide.summary import Series, SeriesKey, choose_headline, find_only_variant
from homenode.decide.switch_effects import StudySwitch, SwitchEffect
from homenode.doc import Cell, Picture, Span, Table, Words
from homenode.metrics import METRICS, Metric, format_bounds, format_change, format_value
from homenode.show.bars import (
    Bar,
    BarGroup,
    build_bar_chart,
    choose_scale,
    format_range,
    format_short,
)
from homenode.show.report.machine import ReportedMachine
from homenode.show.report.pictures import SeriesOf, build_metric_bars
from homenode.text import plural

_TONES = {"better": "\u25b2 ", "worse": "\u25bc ", "mixed": "\u25b2\u25bc "}


def build_summary_table(
    machines: Sequence[ReportedMachine], anchors: Sequence[str], *, paper: bool
) -> Table:
    """Return a row for each alternative of each machine, a column for each metric measured."""
    series = [machine.series for machine in machines]
    metrics = [
        metric
        for metric in METRICS.values()
        if any(
            _find_value(entry, metric) is not None
            for by_label in series
            for entry in by_label.values()
        )
    ]
    units = {metric.id: _column_unit(metric, series) for metric in metrics}
    # A word joiner behind the slash keeps a unit on one line.
    names = {key: unit.replace("/", "/\u2060") for key, (_, unit) in units.items()}
    headings = tuple(f"{metric.title}, {names[metric.id]}" for metric in metrics)
    rows: list[tuple[Cell, ...]] = []
    for machine, by_label, anchor in zip(machines, series, anchors, strict=True):
        best = {metric.id: _best_alternative(machine, metric) for metric in metrics}
        for position, alternative in enumerate(machine.alternatives):
            label, by_key = alternative.label, by_label[alternative.label]
            cells = [_format_result(by_key, m, units[m.id], best[m.id] == label) for m in metrics]
            if not any(cell.lines[0] for cell in cells):
                continue
            heads = [run.head for run in alternative.runs]
            vcpus = sorted({head.vcpus for head in heads if head.vcpus is not None})
            boots = max((len(s.medians) for s in by_key.values() if s.replicated), default=0)
            origins = ", ".join(sorted({str(head.origin) for head in heads}))
            name = Span(machine.name, link=anchor)
            rows.append(
                (
                    Cell((name,), order=f"{machine.name} {position:04d}"),
                    Cell((label,), order=label),
                    Cell((", ".join(map(str, vcpus)),), order=float(vcpus[0]) if vcpus else None),
                    *cells,
                    Cell((origins,), order=str(heads[0].origin)),
                    Cell((str(boots) if boots else "",), order=float(boots)),
                )
            )
    columns = ("system", "layout", "vCPUs", *headings, "results", "boots")
    if not any(row[-1].lines[0] for row in rows):  # published only: the number of boots is unknown
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    about = (
        "One row for each layout of each machine; compare only rows of one machine. \u25cf better "
        "than every other layout of its machine, by a recommendation."
    )
    return Table(
        heads=columns,
        rows=tuple(rows),
        numeric=("vCPUs", "boots", *headings),
        name="Summary of all machines and layouts",
        caption=about if paper else f"{about} Press a column's name to sort.",
        look="summary",
        is_sortable=True,
    )


def build_effects_table(machines: Sequence[ReportedMachine]) -> Table | None:
    """Return the effect of each switch on each metric, over all machines; None without
    measurements. A row for each metric that some switch was measured on."""
    effects_by_key: dict[tuple[str, StudySwitch], list[SwitchEffect]] = {}
    for machine in machines:
        for effect in machine.effects:
            effects_by_key.setdefault((effect.effect.metric, effect.switch), []).append(effect)
    rows = []
    for metric in METRICS.values():
        title: list[Words] = [metric.title]
        title.append(Span(metric.better, "dim small"))
        if any((metric.id, switch) in effects_by_key for switch in StudySwitch):
            cells = (_effect_cell(effects_by_key.get((metric.id, s), ())) for s in StudySwitch)
            rows.append((Cell(tuple(title)), *cells))
    if not rows:
        return None
    return Table(
        heads=("metric", *(switch.value for switch in StudySwitch)),
        rows=tuple(rows),
        name="Effects and risks by metric and switch",
    )


def _column_unit(metric: Metric, series: Sequence[SeriesOf]) -> tuple[float, str]:
    values = [_find_value(entry, metric) for by_label in series for entry in by_label.values()]
    return choose_scale(metric.unit, [value for value in values if value is not None])


def _format_result(
    series: Mapping[SeriesKey, Series], metric: Metric, unit: tuple[float, str], is_best: bool
) -> Cell:
    shown_series = _choose_series(series, metric)
    if shown_series is None:
        parts = _list_parts(series, metric)
        if not parts:
            return Cell(("",))
        low, high = min(part.value for part in parts), max(part.value for part in parts)
        return Cell((format_range(low / unit[0], high / unit[0]),), order=low)
    text = format_short(shown_series.value / unit[0])
    if shown_series.is_range:
        text = format_range(shown_series.low / unit[0], shown_series.high / unit[0])
    return Cell((text,), "best" if is_best else "", shown_series.value)


def _find_value(series: Mapping[SeriesKey, Series], metric: Metric) -> float | None:
    shown_series = _choose_series(series, metric)
    if shown_series is None:
        return max((part.value for part in _list_parts(series, metric)), default=None)
    return shown_series.value


def _choose_series(series: Mapping[SeriesKey, Series], metric: Metric) -> Series | None:
    """Return the series that represents a metric; of placement states that with most samples.
    Values in another unit (ratios to an unprinted reference) do not fit in a column."""
    keys = choose_headline(series, metric) or find_only_variant(series, metric)
    candidates = [series[key] for key in keys if key.unit == metric.unit]
    return max(candidates, key=lambda candidate: candidate.samples, default=None)


def _list_parts(series: Mapping[SeriesKey, Series], metric: Metric) -> list[Series]:
    """Return series of single nodes and GPUs, if no series is over all of them."""
    return [
        key_series
        for key, key_series in series.items()
        if (key.metric, key.unit, key.variant) == (metric.id, metric.unit, metric.headline)
        and key.node is not None
        and key.device is not None
    ]


def _best_alternative(machine: ReportedMachine, metric: Metric) -> str | None:
    """Return the alternative that is clearly better than every other, or None. Results that are
    emulated, of a faulty machine, or of too few boots have no best."""
    for recommendation in machine.recommendations:
        results = recommendation.list_results(metric.id)
        are_worse = [result.position is MetricRank.WORSE for result in results[1:]]
        if recommendation.choice is not None and are_worse and all(are_worse):
            return results[0].alternative
    return None


def _effect_cell(effects: Sequence[SwitchEffect]) -> Cell:
    """Return the effect of a switch on a metric: the range of changes, the worst significant loss
    with its machine, and the number of machines without results."""
    if not effects:
        return Cell((Span("not measured", "dim"),), "none")
    decided_effects = [effect for effect in effects if effect.outcome is not Outcome.CANNOT_TELL]
    ratios = [effect.effect.ratio for effect in decided_effects or effects]
    is_lower_better = effects[0].effect.lower_is_better
    change = format_bounds(min(ratios), max(ratios), lower_is_better=is_lower_better)
    if not decided_effects:
        return Cell((Span(f"cannot tell ({change})", "tone neutral"),))
    losses = [effect for effect in decided_effects if effect.outcome is Outcome.WORSE]
    gains = [effect for effect in decided_effects if effect.outcome is Outcome.BETTER]
    tone = "mixed" if losses and gains else "worse" if losses else "better" if gains else "neutral"
    lines: list[Words] = [
        (
            Span(f"{_TONES.get(tone, '')}{change}", f"tone {tone}"),
            Span(f" ({plural(len(decided_effects), 'machine')})", "dim small"),
        )
    ]
    if losses:
        worst_loss = min(losses, key=lambda loss: loss.effect.gain)
        loss = format_change(worst_loss.effect.ratio, lower_is_better=is_lower_better)
        lines.append(Span(f"risk: {loss} on {worst_loss.machine}", "risk small"))
    else:
        lines.append(Span("no risk shown", "dim small"))
    if unclear := len(effects) - len(decided_effects):
        lines.append(Span(f"{unclear} more cannot tell", "dim small"))
    return Cell(tuple(lines))


BY_LAYOUT = (
    "memory-bandwidth",
    "memory-latency",
    "allreduce-busbw-peak",
    "allreduce-busbw-mean",
    "cpu-throughput",
    "cpu-per-thread",
)
"""Metrics that layouts change, in the order of the study."""

REFERENCE = ("matmul-time", "matmul-rate")
"""Metrics that no layout changes: machines are compared with the first."""

_COLLECTIVE = "allreduce-busbw-peak"
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Generation of PCIe, by GT/s of a lane."""

MAX_BARS = 60
"""Maximum in one chart."""


def build_across_pictures(machines: Sequence[ReportedMachine]) -> Iterator[Picture]:
    """Yield charts of several machines on one axis; none for a single machine."""
    for metric in map(METRICS.__getitem__, BY_LAYOUT):
        groups = [
            (machine, bars)
            for machine in machines
            if len(bars := build_metric_bars(machine, metric)[0]) > 1 and _has_unit(machine, metric)
        ]
        if len(groups) < 2 or sum(len(bars) for _, bars in groups) > MAX_BARS:
            continue
        note = f"{metric.better}; against the machine's first layout"
        title = metric.title
        if metric.id == _COLLECTIVE:
            groups.sort(key=lambda pair: len(_list_gpu_nodes(pair[0])) > 1)
            title += ": GPUs on one node, GPUs across nodes"
        bar_groups = [BarGroup(_group_name(machine, metric), bars) for machine, bars in groups]
        yield Picture(title, build_bar_chart(title, metric.unit, bar_groups), (note,))
    for metric in map(METRICS.__getitem__, REFERENCE):
        picture = _draw_comparison(machines, metric)
        if picture is not None:
            yield picture


def link_speeds(machines: Sequence[ReportedMachine]) -> Table:
    """Return link generation and copy rate of each machine with copies, as printed or measured."""
    rows = []
    for machine in machines:
        copies = [
            _format_copies(machine, METRICS[f"{direction}-bandwidth"])
            for direction in ("h2d", "d2h")
        ]
        if any(copies):
            rows.append((machine.name, _format_links(machine) or "unknown", *copies))
    ways = ("host to device", "device to host")
    return Table(
        heads=("machine", "PCIe generation", *ways),
        rows=tuple(rows),
        numeric=ways,
        name="PCIe links and copies by machine",
        caption="The smallest and the largest value that was measured or published.",
    )


def _has_unit(machine: ReportedMachine, metric: Metric) -> bool:
    return any(
        key.metric == metric.id and key.unit == metric.unit
        for alternative in machine.chosen
        for key in machine.series[alternative.label]
    )


def _group_name(machine: ReportedMachine, metric: Metric) -> str:
    if metric.id != _COLLECTIVE:
        return machine.name
    nodes = _list_gpu_nodes(machine)
    if not nodes:
        return f"{machine.name}, nodes of its GPUs unknown"
    return f"{machine.name}, GPUs on {plural(len(nodes), 'node')}"


def _list_gpu_nodes(machine: ReportedMachine) -> frozenset[int]:
    """Return the host nodes of the guest's GPUs."""
    if machine.host is None:
        return frozenset(
            gpu.node
            for run in machine.runs
            for gpu in run.head.gpus
            if gpu.node is not None and run.head.host_addresses
        )
    return frozenset(int(gpu.node) for gpu in machine.host.whole_gpus if gpu.node is not None)


def _draw_comparison(machines: Sequence[ReportedMachine], metric: Metric) -> Picture | None:
    """Compare machines with the first that has a result; above 1 is better for every metric."""
    measured = []
    for machine in machines:
        series = _find_series(machine, metric)
        if series is not None:
            measured.append((machine.name, series))
    if len(measured) < 2:
        return None
    name, reference = measured[0]
    bars = []
    for place, (machine_name, series) in enumerate(measured):
        ratio = series.value / reference.value
        faster = 1 / ratio if metric.lower_is_better else ratio
        note = "reference" if place == 0 else format_change(faster, name)
        low, high = (series.low, series.high) if series.samples > 1 else (None, None)
        bars.append(
            Bar(
                machine_name,
                series.value,
                low,
                high,
                1,
                note=note,
                text=_format_range(series.low, series.high, metric.unit),
            )
        )
    title = f"{metric.title}: machines against {name}"
    variants = ", ".join(dict.fromkeys(s.key.variant or "" for _, s in measured)).strip(", ")
    note = f"{metric.better}; throughput against {name}; {variants or metric.about}"
    svg = build_bar_chart(title, metric.unit, [BarGroup("", tuple(bars))])
    return Picture(title, svg, (note,))


def _find_series(machine: ReportedMachine, metric: Metric) -> Series | None:
    """The machine's result from the layout with the most samples; controls ignore layouts."""
    candidates: list[Series] = []
    for alternative in machine.alternatives:
        by_key: Mapping[SeriesKey, Series] = machine.series[alternative.label]
        candidates += [
            series
            for key, series in by_key.items()
            if key.metric == metric.id and key.unit == metric.unit and key.is_over_all
        ]
    return max(candidates, key=lambda series: (series.key.worst, series.samples), default=None)


def _format_copies(machine: ReportedMachine, metric: Metric) -> str:
    """Return the range over layouts and GPUs."""
    series = [
        of_key
        for _, _, by_key in machine.list_layouts()
        for key, of_key in by_key.items()
        if key.metric == metric.id
        and key.unit == metric.unit
        and key.size_bytes is None
        and key.variant is None
    ]
    if not series:
        return ""
    low, high = min(copies.low for copies in series), max(copies.high for copies in series)
    return _format_range(low, high, metric.unit)


def _format_range(low: float, high: float, unit: str) -> str:
    if low == high:
        return format_value(low, unit)
    divisor, name = choose_scale(unit, [high])
    return f"{format_range(low / divisor, high / divisor)} {name}"


def _format_links(machine: ReportedMachine) -> str:
    if machine.host is None:
        return ""
    speeds = {
        (gpu.link.current_gt_per_s, gpu.link.current_width)
        for gpu in machine.host.whole_gpus
        if gpu.link is not None and gpu.link.current_gt_per_s is not None
    }
    names = [
        f"Gen {_GENERATION.get(speed or 0.0, '?')} x{'?' if width is None else width}"
        for speed, width in sorted(speeds, key=str)
    ]
    suffix = ", as described" if machine.host.assumed and names else ""
    return ", ".join(names) + suffix
