"""DetailPictures: what one machine shows next to whole metrics: kernels, levels, threads, GPUs."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from homenode.analyse.alternative import Alternative
from homenode.analyse.words import figure_text
from homenode.doc import Picture
from homenode.measure.figures.processors import DEVIATION
from homenode.metrics import METRICS, Metric
from homenode.report.charts.bars import Bar, BarGroup, bar_chart, size_text
from homenode.report.page.machine import Machine
from homenode.report.page.pictures import (
    bar_of,
    better_text,
    cache_levels,
    curve_points,
)
from homenode.report.palette import series_number

MOST_DEVICES = 32
"""Bars of single GPUs in one chart."""

KERNELS = ("copy", "scale", "add", "triad")
"""Of STREAM, in its order."""

SIZE_LEVELS = (
    ("L1, 4-32 KiB", 4 << 10, 32 << 10),
    ("L2, 64-512 KiB", 64 << 10, 512 << 10),
    ("L3, 1-32 MiB", 1 << 20, 32 << 20),
    ("DRAM, 256-512 MiB", 256 << 20, 512 << 20),
)
"""Working sets that stand for a level where no capacity is known: those of the study."""


def kernel_pictures(machine: Machine) -> Iterator[Picture]:
    """All kernels of STREAM by layout, on all memory and on the memory of each node."""
    by_node: dict[int | None, dict[str, list[Bar]]] = {}
    for position, one in enumerate(machine.every):
        for key, series in machine.series[one.label].items():
            if (
                key.metric == "memory-bandwidth"
                and key.variant in KERNELS
                and key.peer_node is None
                and key.size_bytes is None
            ):
                kernels = by_node.setdefault(key.node, {})
                kernels.setdefault(key.variant or "", []).append(
                    bar_of(one.label, series, position)
                )
    whole = by_node.pop(None, {})
    if len(whole) > 1:
        groups = [BarGroup(k, tuple(whole[k])) for k in KERNELS if k in whole]
        title = "STREAM: every kernel"
        note = "more is better; all vCPUs on all memory"
        yield Picture(title, bar_chart(title, "bytes_per_s", groups), (note,))
    groups = [
        BarGroup(f"memory of node {node}, {kernel}", tuple(kernels[kernel]))
        for node, kernels in sorted(by_node.items(), key=lambda pair: pair[0] or 0)
        for kernel in KERNELS[-1:]
        if kernel in kernels
    ]
    if groups:
        title = "STREAM by node"
        note = "more is better; all vCPUs, with their memory bound to one node of the guest"
        yield Picture(title, bar_chart(title, "bytes_per_s", groups), (note,))


def profile_picture(machine: Machine) -> Iterator[Picture]:
    """Latency from L1 to DRAM: the least and the greatest within each level."""
    levels: dict[str, list[Bar]] = {}
    for position, one in enumerate(machine.every):
        series = machine.series[one.label]
        for key, found in series.items():
            if key.metric == "memory-latency" and found.is_range and key.variant is not None:
                levels.setdefault(key.variant, []).append(bar_of(one.label, found, position))
        points = [point for of in curve_points(series, "memory-latency").values() for point in of]
        for name, low, high in _size_levels(machine) if points else ():
            values = [value for size, value in points if low <= size <= high]
            if values:
                number = series_number(one.label, position)
                bar = Bar(one.label, max(values), min(values), max(values), number, is_range=True)
                levels.setdefault(name, []).append(bar)
    if len(levels) > 1:
        title = "Latency profile, L1 to DRAM"
        groups = [BarGroup(name, tuple(bars)) for name, bars in levels.items()]
        note = "less is better; least to greatest of the working sets of a level; axis logarithmic"
        yield Picture(title, bar_chart(title, "ns", groups, log=True), (note,))


def _size_levels(machine: Machine) -> tuple[tuple[str, float, float], ...]:
    """(name, least, most bytes) of working sets, by the machine's caches where they are known."""
    known = cache_levels(machine)
    if not known:
        return SIZE_LEVELS
    return tuple(
        (f"{one.name}, to {size_text(one.high_bytes)}", one.low_bytes * 1.01, one.high_bytes)
        for one in known
    )


def fairness_picture(machine: Machine) -> Iterator[Picture]:
    """Events of each thread: the mean with the spread over threads, by layout."""
    bars: list[Bar] = []
    for position, one in enumerate(machine.every):
        series = machine.series[one.label]
        each = [
            f.value
            for key, f in series.items()
            if key.metric == "cpu-per-thread" and (key.variant or "").startswith("PU ")
        ]
        means = [
            f.value
            for key, f in series.items()
            if key.metric == "cpu-per-thread" and key.variant is None
        ]
        parts = [
            f.value
            for key, f in series.items()
            if (key.metric, key.variant) == ("cpu-fairness", DEVIATION)
        ]
        if len(each) > 1:
            mean, spread = statistics.fmean(each), statistics.stdev(each)
        elif means and parts:
            mean = means[0]
            spread = mean * statistics.fmean(parts)
        else:
            continue
        number = series_number(one.label, position)
        note = f"\u00b1 {spread / mean:.1%}"
        bars.append(Bar(one.label, mean, max(mean - spread, 0.0), mean + spread, number, note=note))
    if bars:
        title = "Fairness over threads"
        note = "events per second of a thread: mean \u00b1 standard deviation over threads"
        svg = bar_chart(title, "events_per_s", [BarGroup("", tuple(bars))])
        yield Picture(title, svg, (note,))


def device_pictures(machine: Machine) -> Iterator[Picture]:
    """Every GPU's copies under each layout, near and far from its node where that is known."""
    figures = [(one, _device_figures(one)) for one in machine.every]
    for metric in METRICS.values():
        groups: list[BarGroup] = []
        said: list[str] = []
        for one, of_metric in figures:
            by_device = of_metric.get(metric.id, {})
            if not 1 < len(by_device) <= MOST_DEVICES:
                continue
            near = _near_devices(machine, one, metric.id)
            groups.append(BarGroup(one.label, tuple(_device_bars(by_device, near))))
            said += _near_and_far(one.label, by_device, near, metric)
        if groups and sum(len(group.bars) for group in groups) <= 2 * MOST_DEVICES:
            title = f"{metric.title}, GPU by GPU"
            note = "; ".join((better_text(metric), *said))
            yield Picture(title, bar_chart(title, metric.unit, groups), (note,))


_BY_DEVICE = frozenset(m.id for m in METRICS.values() if m.worst_device and not m.control)


def _device_figures(one: Alternative) -> dict[str, dict[object, list[float]]]:
    """Figures of single GPUs, by metric: of no pair, node or size."""
    found: dict[str, dict[object, list[float]]] = {}
    for run in one.runs:
        for key, samples in run.groups.items():
            if key.metric not in _BY_DEVICE or key.node is not None:
                continue
            device = key.position if key.device is None else key.device
            others = (key.peer, key.size_bytes, key.variant)
            if device is not None and others == (None, None, None):
                values = [one.value for one in samples]
                found.setdefault(key.metric, {}).setdefault(device, []).extend(values)
    return found


def _near_devices(machine: Machine, one: Alternative, metric: str) -> frozenset[object] | None:
    """GPUs whose thread was on their own node; None = unknown."""
    names = {run.head.name for run in one.runs}
    for publication in machine.sources:
        for figure in publication.figures:
            if (figure.system, figure.metric) == (machine.runs[0].head.system, metric):
                for choice, devices in figure.near:
                    if choice in names:
                        return frozenset(devices)
    return None


def _device_bars(
    by_device: Mapping[object, Sequence[float]], near: frozenset[object] | None
) -> Iterator[Bar]:
    for device, values in sorted(by_device.items(), key=lambda pair: str(pair[0]).zfill(16)):
        is_far = near is not None and device not in near
        note = "" if near is None else "far" if is_far else "near"
        label = f"GPU {device}" if isinstance(device, int) else str(device)
        yield Bar(
            label,
            statistics.median(values),
            min(values),
            max(values),
            3 if is_far else 1,
            note=note,
        )


def _near_and_far(
    label: str,
    by_device: Mapping[object, Sequence[float]],
    near: frozenset[object] | None,
    metric: Metric,
) -> Iterator[str]:
    sides: dict[bool, list[float]] = {True: [], False: []}
    for device, values in by_device.items():
        sides[near is not None and device in near] += values[:1]
    if near is None or not (sides[True] and sides[False]):
        return
    close, far = statistics.fmean(sides[True]), statistics.fmean(sides[False])
    yield (
        f"{label}: far {figure_text(far, metric.unit)}, near {figure_text(close, metric.unit)} in "
        f"the mean, {far / close - 1:+.0%}"
    )
