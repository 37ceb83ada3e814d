"""Pictures of a machine: charts of its results, with their captions."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from homenode.decide.alternative import Alternative
from homenode.decide.compare import is_whole
from homenode.decide.comparison import Effect, Outcome
from homenode.decide.matrices import Axis, CopyLocality, MatrixKey, MatrixPlace, ResultMatrix
from homenode.decide.ranking import OTHER_NODE, OWN_NODE
from homenode.decide.summary import Series, SeriesKey, choose_shown, headline_series
from homenode.decide.switch_effects import judge_outcome
from homenode.doc import Picture
from homenode.machine.pci import DeviceKind
from homenode.measure.importers.sysbench import DEVIATION
from homenode.metrics import METRICS, Metric, find_metric, format_bounds, format_change
from homenode.show.bars import (
    Bar,
    BarGroup,
    ForestRow,
    build_bar_chart,
    build_forest_chart,
    choose_axis_end,
    format_size,
)
from homenode.show.curves import Curve, Matrix, SizeRange, build_curve_chart, heat_map
from homenode.show.report.machine import ANY_LAYOUT, ReportedMachine

MAX_CURVES = 8
"""Maximum in one chart."""

MAX_EFFECTS = 14
"""Maximum in one forest plot; primary metrics first."""

MAX_HEAT_MAPS = 24
"""Limit of heat maps for one machine."""

_ABOUT_SIZES = {
    "memory-latency": "time of one dependent load, by the size of its working set",
}
"""Captions of curves that show something other than the metric's single result."""

SeriesOf = Mapping[str, Mapping[SeriesKey, Series]]


def make_bar(label: str, series: Series, number: int, base: Series | None = None) -> Bar:
    """Return the bar of a result with its range and its change against the base."""
    low, high = (series.low, series.high) if series.samples > 1 else (None, None)
    note = ""
    if base is not None and base is not series:
        metric = find_metric(series.key.metric)
        is_lower_better = metric is not None and metric.lower_is_better
        note = format_change(series.value / base.value, lower_is_better=is_lower_better)
    return Bar(label, series.value, low, high, number, note=note, is_range=series.is_range)


def build_metric_bars(machine: ReportedMachine, metric: Metric) -> tuple[tuple[Bar, ...], str]:
    """The bars of a metric of a machine, in one unit; changes are against the first layout."""
    bars = [
        (label, series, number)
        for label, number, by_key in machine.list_layouts()
        if (series := choose_shown(by_key, metric)) is not None
    ]
    unit = bars[0][1].key.unit if bars else metric.unit
    bars = [bar for bar in bars if bar[1].key.unit == unit]
    base = bars[0][1] if bars and machine.chosen else None
    return tuple(make_bar(*bar, base) for bar in bars), unit


def build_bar_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart for each metric with an overall result, and which direction is better."""
    for metric in METRICS.values():
        bars, unit = build_metric_bars(machine, metric)
        if bars:
            note = f"{metric.better}; {metric.about}"
            if any(bar.note for bar in bars):
                note += f"; against {bars[0].label}"
            svg = build_bar_chart(metric.title, unit, [BarGroup("", bars)])
            yield Picture(metric.title, svg, (note,))


def build_forest_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart for each alternative against the baseline, then against bare metal."""
    for comparison in filter(None, (machine.comparison, machine.bare)):
        charts: dict[str, list[ForestRow]] = {}
        for label in comparison.alternatives:
            effects = [effect for effect in comparison.effects if effect.alternative == label]
            ranking = sorted(filter(is_whole, effects), key=lambda effect: not effect.primary)
            if ranking:
                charts[label] = [_forest_row(e, comparison.bare) for e in ranking[:MAX_EFFECTS]]
        if machine.is_published and not any(r.low for rows in charts.values() for r in rows):
            continue  # the bars show the same multiples, and no result has an interval
        end = choose_axis_end([row for rows in charts.values() for row in rows])
        for label, rows in charts.items():
            note = f"effects, with {comparison.confidence:.0%} intervals"
            if any(row.low is None for row in rows):
                note += "; hollow: one result each, no interval"
            title = f"{label} against {comparison.baseline}"
            yield Picture(title, build_forest_chart(title, rows, end), (note,))


def build_curve_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield charts of latency over working sets, and collectives over message sizes."""
    for metric_id in ("memory-latency", "allreduce-busbw", *_list_other_curves(machine.series)):
        metric = find_metric(metric_id)
        groups: dict[str | None, list[Curve]] = {}
        for label, number, series in machine.list_layouts():
            for variant, points in list_curve_points(series, metric_id).items():
                groups.setdefault(variant, []).append(Curve(label, points, number))
        for variant, curves in groups.items():
            name = metric_id if metric is None else metric.title.removesuffix(" of a size")
            title = f"{name} by size" + (f", {variant}" if variant else "")
            levels = list_cache_levels(machine) if metric_id == "memory-latency" else ()
            about = _ABOUT_SIZES.get(metric_id, "" if metric is None else metric.about)
            unit = "bytes_per_s" if metric is None else metric.unit
            svg = build_curve_chart(title, unit, curves[:MAX_CURVES], levels)
            yield Picture(title, svg, (about,) if about else ())


def build_heat_pictures(
    machine: ReportedMachine, matrices: Mapping[str, Sequence[ResultMatrix]]
) -> Iterator[Picture]:
    """Yield matrices of nodes, GPUs and CPUs; matrices of one metric share a colour scale.
    matrices: of each alternative, by its label."""
    pairs = [
        (label, matrix) for label, _, _ in machine.list_layouts() for matrix in matrices[label]
    ]
    ends: dict[tuple[str, str | None], tuple[float, float]] = {}
    for _, matrix in pairs:
        values = matrix.cells.values()
        kind = (matrix.key.metric, matrix.key.variant)
        low, high = ends.get(kind, (min(values), max(values)))
        ends[kind] = min(low, *values), max(high, *values)
    pairs.sort(key=lambda pair: _matrix_order(pair[1]))  # matrices of one metric side by side
    for label, matrix in pairs[:MAX_HEAT_MAPS]:
        yield _heat_picture(label, matrix, ends[matrix.key.metric, matrix.key.variant])


def build_mean_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield charts for a machine whose source prints only the means of near and far."""
    series = [machine.series.get(label, {}) for label in (OWN_NODE, OTHER_NODE)]
    cards = [] if machine.host is None else list(machine.host.devices_of_kind(DeviceKind.GPU))
    nodes = sorted({card.node for card in cards if card.node is not None})
    for metric in METRICS.values():
        means = [mean.value for by_key in series if (mean := headline_series(by_key, metric))]
        if len(set(means)) < 2 or len(nodes) < 2:
            continue
        local, remote = means
        rows = tuple(tuple(local if c.node == node else remote for c in cards) for node in nodes)
        names = tuple(map(str, range(len(cards))))
        drawn_matrix = Matrix("node", "GPU", tuple(map(str, nodes)), names, rows)
        title = f"{metric.title}, node and GPU"
        note = f"{metric.better}; the source prints the two means, and no single cell"
        yield Picture(title, heat_map(title, metric.unit, drawn_matrix), (note,))


def build_locality_pictures(localities: Sequence[CopyLocality]) -> Iterator[Picture]:
    """Compare local with remote access, a chart for each metric."""
    charts: dict[MatrixKey, list[Bar]] = {}
    for locality in localities:
        bars = charts.setdefault(locality.key, [])
        side = "as bound" if locality.as_bound else "local"
        for name, mean, colour in ((side, locality.local, 1), ("remote", locality.remote, 3)):
            if mean is not None:
                bars.append(Bar(f"{locality.alternative}, {name}", mean, None, None, colour))
    for key, bars in charts.items():
        metric = find_metric(key.metric)
        name = key.metric if metric is None else metric.title
        title = ", ".join(filter(None, (name, key.variant)))
        note = "" if metric is None else metric.better
        svg = build_bar_chart(title, key.unit, [BarGroup("", tuple(bars))])
        yield Picture(f"{title}: near and far", svg, (note,) if note else ())


def _forest_row(effect: Effect, is_bare: bool) -> ForestRow:
    metric = find_metric(effect.metric)
    parts = [effect.metric if metric is None else metric.title, effect.variant, effect.state]
    if effect.slowest_device:
        parts.insert(1, "slowest GPU")
    low, high = effect.low, effect.high
    tooltip = format_change(effect.ratio, lower_is_better=effect.lower_is_better)
    if low is not None and high is not None:
        ends = format_bounds(low, high, lower_is_better=effect.lower_is_better)
        tooltip += f" [{ends}]"
        if effect.lower_is_better:
            low, high = 1 / high, 1 / low
    if is_bare:
        tooltip = f"{effect.gain:.1%} of bare metal"
    outcome = judge_outcome(effect)
    colour = {Outcome.BETTER: "better", Outcome.WORSE: "worse"}.get(outcome, "neutral")
    return ForestRow(", ".join(filter(None, parts)), effect.gain, low, high, tooltip, colour)


def list_curve_points(
    series: Mapping[SeriesKey, Series], metric: str
) -> dict[str | None, tuple[tuple[float, float], ...]]:
    """Return points of curves by variant, only for all nodes and devices together."""
    curves: dict[str | None, list[tuple[float, float]]] = {}
    for key, of_size in series.items():
        place = (key.node, key.peer_node, key.device, key.peer)
        if key.metric == metric and key.size_bytes and place == (None,) * 4:
            curves.setdefault(key.variant, []).append((float(key.size_bytes), of_size.value))
    return {name: tuple(sorted(points)) for name, points in curves.items() if len(points) > 1}


def _list_other_curves(series: SeriesOf) -> list[str]:
    """Return the measured collectives besides all-reduce."""
    names = {key.metric for by_key in series.values() for key in by_key}
    return sorted(name for name in names - {"allreduce-busbw"} if name.endswith("-busbw"))


def list_cache_levels(machine: ReportedMachine) -> tuple[SizeRange, ...]:
    """Return size ranges of the caches, from the first alternative with known capacities."""
    for _, _, series in machine.list_layouts():
        capacities = sorted(
            (capacity.value, key.variant or "")
            for key, capacity in series.items()
            if key.metric == "cache-capacity"
        )
        if capacities:
            sizes = [key.size_bytes for key in series if key.metric == "memory-latency"]
            largest = float(max(filter(None, sizes), default=0))
            ends = [0.0, *(size for size, _ in capacities), max(largest, capacities[-1][0])]
            names = [name.upper() for _, name in capacities] + ["DRAM"]
            return tuple(
                SizeRange(name, max(low, 1.0), high)
                for name, low, high in zip(names, ends[:-1], ends[1:], strict=True)
            )
    return ()


def _matrix_order(matrix: ResultMatrix) -> tuple[int, str]:
    ids = list(METRICS)
    metric = matrix.key.metric
    return ids.index(metric) if metric in ids else len(ids), matrix.key.variant or ""


def _heat_picture(label: str, matrix: ResultMatrix, ends: tuple[float, float]) -> Picture:
    metric = find_metric(matrix.key.metric)
    name = matrix.key.metric if metric is None else metric.title
    parts = (name, matrix.key.variant, "" if label == ANY_LAYOUT else label)
    title = ", ".join(filter(None, parts))
    direction = "" if metric is None else f"{metric.better}; "
    axes = f"{_name_axis(matrix, rows=True)} down, {_name_axis(matrix, rows=False)} across"
    drawn_matrix = Matrix(
        _name_axis(matrix, rows=True),
        _name_axis(matrix, rows=False),
        _shorten_names(matrix.rows),
        _shorten_names(matrix.columns),
        tuple(
            tuple(matrix.cells.get((row, column)) for column in matrix.columns)
            for row in matrix.rows
        ),
    )
    svg = heat_map(title, matrix.key.unit, drawn_matrix, ends)
    return Picture(title, svg, (f"{direction}{axes}",))


def _name_axis(matrix: ResultMatrix, *, rows: bool) -> str:
    axis = matrix.key.rows if rows else matrix.key.columns
    if axis is Axis.NODE and matrix.key.columns is Axis.NODE:
        return "node of the threads" if rows else "node of the memory"
    return {Axis.NODE: "node", Axis.GPU: "GPU", Axis.CPU: "CPU"}[axis]


def _shorten_names(places: Sequence[MatrixPlace]) -> tuple[str, ...]:
    """Shorten names for a column: of addresses only the parts that differ.

    >>> from homenode.bdf import Bdf
    >>> gpus = [MatrixPlace(Axis.GPU, 0, Bdf(0, bus, n, 0)) for bus, n in ((0x19, 0), (0x3B, 0))]
    >>> _shorten_names(gpus)
    ('19', '3b')
    >>> _shorten_names([gpus[0], MatrixPlace(Axis.GPU, 0, Bdf(0, 0x19, 1, 0))])
    ('19:00', '19:01')
    """
    if len(places) < 2 or any(place.address is None for place in places):
        return tuple(place.name for place in places)
    parts = [place.name.replace(".", ":").split(":") for place in places]
    differ = [index for index in range(4) if len({part[index] for part in parts}) > 1]
    first = differ[0] if differ[0] <= 1 else 1
    return tuple(":".join(part[first : differ[-1] + 1]) for part in parts)


MAX_DEVICES = 32
"""Bars of single GPUs in one chart."""

KERNELS = ("copy", "scale", "add", "triad")
"""STREAM's kernels, in its order."""

SIZE_LEVELS = (
    ("L1, 4-32 KiB", 4 << 10, 32 << 10),
    ("L2, 64-512 KiB", 64 << 10, 512 << 10),
    ("L3, 1-32 MiB", 1 << 20, 32 << 20),
    ("DRAM, 256-512 MiB", 256 << 20, 512 << 20),
)
"""Working sets of a level whose capacity is unknown, as in the study."""


def build_kernel_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield charts of all STREAM kernels by layout, on all memory and on each node's."""
    by_node: dict[int | None, dict[str, list[Bar]]] = {}
    for label, number, by_key in machine.list_layouts():
        for key, series in by_key.items():
            is_stream = key.metric == "memory-bandwidth" and key.variant in KERNELS
            if is_stream and (key.peer_node, key.size_bytes) == (None, None):
                bars = by_node.setdefault(key.node, {}).setdefault(key.variant or "", [])
                bars.append(make_bar(label, series, number))
    all_nodes = by_node.pop(None, {})
    if len(all_nodes) > 1:
        groups = [BarGroup(k, tuple(all_nodes[k])) for k in KERNELS if k in all_nodes]
        title = "STREAM: every kernel"
        note = "more is better; all vCPUs on all memory"
        yield Picture(title, build_bar_chart(title, "bytes_per_s", groups), (note,))
    groups = [
        BarGroup(f"memory of node {node}, {kernel}", tuple(kernels[kernel]))
        for node, kernels in sorted(by_node.items(), key=lambda pair: pair[0] or 0)
        for kernel in KERNELS[-1:]
        if kernel in kernels
    ]
    if groups:
        title = "STREAM by node"
        note = "more is better; all vCPUs, with their memory bound to one node of the guest"
        yield Picture(title, build_bar_chart(title, "bytes_per_s", groups), (note,))


def build_product_picture(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart of matrix products on the slowest GPU, by data type."""
    by_type: dict[str, list[Bar]] = {}
    for label, number, by_key in machine.list_layouts():
        for key in sorted(by_key, key=str):
            if key.metric == "matmul-rate" and key.worst and key.variant:
                bar = make_bar(label, by_key[key], number)
                by_type.setdefault(key.variant, []).append(bar)
    if by_type:
        title, groups = "Matrix products", [BarGroup(k, tuple(v)) for k, v in by_type.items()]
        svg = build_bar_chart(title, "flop_per_s", groups)
        yield Picture(f"{title} by data type", svg, ("more is better; the slowest GPU",))


def profile_picture(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart of latency from L1 to DRAM: the range within each level."""
    levels: dict[str, list[Bar]] = {}
    for label, number, by_key in machine.list_layouts():
        for key, series in by_key.items():
            if key.metric == "memory-latency" and series.is_range and key.variant is not None:
                levels.setdefault(key.variant, []).append(make_bar(label, series, number))
        curves = list_curve_points(by_key, "memory-latency")
        points = [point for curve in curves.values() for point in curve]
        for name, low, high in _size_levels(machine) if points else ():
            values = [value for size, value in points if low <= size <= high]
            if values:
                low, high = min(values), max(values)
                bar = Bar(label, high, low, high, number, is_range=True)
                levels.setdefault(name, []).append(bar)
    if len(levels) > 1:
        title = "Latency profile, L1 to DRAM"
        groups = [BarGroup(name, tuple(bars)) for name, bars in levels.items()]
        note = "less is better; least to greatest of the working sets of a level; axis logarithmic"
        yield Picture(title, build_bar_chart(title, "ns", groups, log=True), (note,))


def _size_levels(machine: ReportedMachine) -> tuple[tuple[str, float, float], ...]:
    """Return (name, least, most bytes) of working sets, by the machine's caches if known."""
    levels = list_cache_levels(machine)
    if not levels:
        return SIZE_LEVELS
    names = (f"{level.name}, to {format_size(level.high_bytes)}" for level in levels)
    return tuple(
        (name, level.low_bytes * 1.01, level.high_bytes)
        for name, level in zip(names, levels, strict=True)
    )


def build_fairness_picture(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart of events per thread: mean and spread over threads, by layout."""
    bars: list[Bar] = []
    for label, number, by_key in machine.list_layouts():
        values = [(key.metric, key.variant or "", result.value) for key, result in by_key.items()]
        medians = [
            v for metric, name, v in values if metric == "cpu-per-thread" and name[:4] == "CPU "
        ]
        means = [v for metric, name, v in values if metric == "cpu-per-thread" and not name]
        parts = [v for metric, name, v in values if (metric, name) == ("cpu-fairness", DEVIATION)]
        if len(medians) > 1:
            mean, spread = statistics.fmean(medians), statistics.stdev(medians)
        elif means and parts:
            mean = means[0]
            spread = mean * statistics.fmean(parts)
        else:
            continue
        note = f"\u00b1 {spread / mean:.1%}"
        bars.append(Bar(label, mean, max(mean - spread, 0.0), mean + spread, number, note=note))
    if bars:
        title = "Fairness over threads"
        note = "events per second of a thread: mean \u00b1 standard deviation over threads"
        svg = build_bar_chart(title, "events_per_s", [BarGroup("", tuple(bars))])
        yield Picture(title, svg, (note,))


def build_device_pictures(machine: ReportedMachine) -> Iterator[Picture]:
    """Yield a chart of every GPU's copies under each layout."""
    figures = [(alternative, _device_results(alternative)) for alternative in machine.alternatives]
    for metric in METRICS.values():
        groups: list[BarGroup] = []
        for alternative, of_metric in figures:
            by_device = of_metric.get(metric.id, {})
            if 1 < len(by_device) <= MAX_DEVICES:
                groups.append(BarGroup(alternative.label, tuple(_device_bars(by_device))))
        if groups and sum(len(group.bars) for group in groups) <= 2 * MAX_DEVICES:
            title = f"{metric.title}, GPU by GPU"
            svg = build_bar_chart(title, metric.unit, groups)
            yield Picture(title, svg, (metric.better,))


_BY_DEVICE = frozenset(m.id for m in METRICS.values() if m.worst_device and not m.control)


def _device_results(alternative: Alternative) -> dict[str, dict[object, list[float]]]:
    """Return results of single GPUs, by metric: without pairs, nodes or sizes."""
    values_by_device: dict[str, dict[object, list[float]]] = {}
    for run in alternative.runs:
        for key, samples in run.groups.items():
            if key.metric not in _BY_DEVICE or key.node is not None:
                continue
            device = key.position if key.device is None else key.device
            rest_of_key = (key.peer, key.size_bytes, key.variant)
            if device is not None and rest_of_key == (None, None, None):
                values = [sample.value for sample in samples]
                values_by_device.setdefault(key.metric, {}).setdefault(device, []).extend(values)
    return values_by_device


def _device_bars(by_device: Mapping[object, Sequence[float]]) -> Iterator[Bar]:
    for device, values in sorted(by_device.items(), key=lambda pair: str(pair[0]).zfill(16)):
        label = f"GPU {device}" if isinstance(device, int) else str(device)
        yield Bar(label, statistics.median(values), min(values), max(values), 1)
