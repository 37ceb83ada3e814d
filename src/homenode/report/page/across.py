"""Across: what machines are compared in: one chart for each metric, one axis; their links."""

from collections.abc import Iterator, Mapping, Sequence

from homenode.analyse.summary import Series, SeriesKey
from homenode.analyse.words import figure_text, multiple_text
from homenode.doc import Picture, Table
from homenode.metrics import METRICS, Metric
from homenode.pci import DeviceKind
from homenode.report.charts.bars import Bar, BarGroup, bar_chart, chart_scale, range_figures
from homenode.report.page.machine import Machine
from homenode.report.page.pictures import better_text, metric_bars
from homenode.wording import plural

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
"""Of PCIe, by GT/s of a lane."""

MOST_BARS = 60
"""In one chart."""


def across_pictures(machines: Sequence[Machine]) -> Iterator[Picture]:
    """Charts of several machines on one axis; none where there is but one."""
    for metric in map(METRICS.__getitem__, BY_LAYOUT):
        groups = [
            (machine, bars)
            for machine in machines
            if len(bars := metric_bars(machine, metric)[0]) > 1 and _has_unit(machine, metric)
        ]
        if len(groups) < 2 or sum(len(bars) for _, bars in groups) > MOST_BARS:
            continue
        note = f"{better_text(metric)}; x: of the machine's first layout"
        title = metric.title
        if metric.id == _COLLECTIVE:
            groups.sort(key=lambda pair: len(_gpu_nodes(pair[0])) > 1)
            title += ": GPUs on one node, GPUs across nodes"
            if any(machine.is_published for machine, _ in groups):
                note += "; nodes as the machine is described: only of the H200 a source says them"
        drawn = [BarGroup(_group_name(machine, metric), bars) for machine, bars in groups]
        yield Picture(title, bar_chart(title, metric.unit, drawn), (note,))
    for metric in map(METRICS.__getitem__, REFERENCE):
        picture = _against_reference(machines, metric)
        if picture is not None:
            yield picture


def link_speeds(machines: Sequence[Machine]) -> Table:
    """Generation of the links and rate of copies of each machine that has copies, as printed or as
    measured."""
    rows = []
    for machine in machines:
        copies = [_copies(machine, METRICS[f"{way}-bandwidth"]) for way in ("h2d", "d2h")]
        if any(copies):
            rows.append((machine.name, _links(machine) or "unknown", *copies))
    ways = ("host to device", "device to host")
    return Table(
        heads=("machine", "PCIe generation", *ways),
        rows=tuple(rows),
        numeric=ways,
        name="PCIe links and copies by machine",
        caption="The smallest and the largest value that was measured or published.",
    )


def _has_unit(machine: Machine, metric: Metric) -> bool:
    return any(
        key.metric == metric.id and key.unit == metric.unit
        for one in machine.chosen
        for key in machine.series[one.label]
    )


def _group_name(machine: Machine, metric: Metric) -> str:
    if metric.id != _COLLECTIVE:
        return machine.name
    nodes = _gpu_nodes(machine)
    if not nodes:
        return f"{machine.name}, nodes of its GPUs unknown"
    return f"{machine.name}, GPUs on {plural(len(nodes), 'node')}"


def _gpu_nodes(machine: Machine) -> frozenset[int]:
    """Host nodes of the guest's GPUs; of a published machine as it is described."""
    if machine.host is None:
        return frozenset(
            gpu.node
            for run in machine.runs
            for gpu in run.head.gpus
            if gpu.node is not None and run.head.host_addresses
        )
    count = None if machine.published is None else machine.published.gpus
    cards = [
        gpu for gpu in machine.host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None
    ]
    return frozenset(int(gpu.node) for gpu in cards[:count] if gpu.node is not None)


def _against_reference(machines: Sequence[Machine], metric: Metric) -> Picture | None:
    """Machines against the first that has a figure; faster is above 1 whatever the metric."""
    found = []
    for machine in machines:
        series = _any_series(machine, metric)
        if series is not None:
            found.append((machine.name, series))
    if len(found) < 2:
        return None
    name, reference = found[0]
    bars = []
    for place, (machine_name, series) in enumerate(found):
        ratio = series.value / reference.value
        faster = 1 / ratio if metric.lower_is_better else ratio
        note = "reference" if place == 0 else f"{multiple_text(faster)} {name}"
        low, high = (series.low, series.high) if series.samples > 1 else (None, None)
        bars.append(
            Bar(
                machine_name,
                series.value,
                low,
                high,
                1,
                note=note,
                text=_range_text(series, metric.unit),
            )
        )
    title = f"{metric.title}: machines against {name}"
    variants = ", ".join(dict.fromkeys(s.key.variant or "" for _, s in found)).strip(", ")
    note = f"{better_text(metric)}; x: throughput over {name}'s; {variants or metric.about}"
    svg = bar_chart(title, metric.unit, [BarGroup("", tuple(bars))])
    return Picture(title, svg, (note,))


def _any_series(machine: Machine, metric: Metric) -> Series | None:
    """The machine's figure: of the layout with the most samples; a control moves with none."""
    found: list[Series] = []
    for one in machine.every:
        of: Mapping[SeriesKey, Series] = machine.series[one.label]
        found += [
            series
            for key, series in of.items()
            if key.metric == metric.id and key.unit == metric.unit and key.is_over_all
        ]
    return max(found, key=lambda series: (series.key.worst, series.samples), default=None)


def _copies(machine: Machine, metric: Metric) -> str:
    """The range over layouts and GPUs; as printed where somebody printed it for all layouts."""
    printed = [
        text
        for publication in machine.sources
        for figure in publication.figures
        if (figure.system, figure.metric, figure.variant) == (machine.name, metric.id, None)
        for choice, text in figure.texts
        if choice == "any"
    ]
    if printed:
        return printed[0]
    series = [
        found
        for one in machine.every
        for key, found in machine.series[one.label].items()
        if key.metric == metric.id
        and key.unit == metric.unit
        and key.size_bytes is None
        and key.variant is None
    ]
    if not series:
        return ""
    low, high = min(one.low for one in series), max(one.high for one in series)
    return _two(low, high, metric.unit)


def _range_text(series: Series, unit: str) -> str:
    return _two(series.low, series.high, unit)


def _two(low: float, high: float, unit: str) -> str:
    if low == high:
        return figure_text(low, unit)
    divisor, name = chart_scale(unit, [high])
    return f"{range_figures(low / divisor, high / divisor)} {name}"


def _links(machine: Machine) -> str:
    if machine.published is not None and machine.published.pcie is not None:
        return machine.published.pcie
    if machine.host is None:
        return ""
    speeds = {
        (gpu.link.current_gt_per_s, gpu.link.current_width)
        for gpu in machine.host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None
        and gpu.link is not None
        and gpu.link.current_gt_per_s is not None
    }
    names = [
        f"Gen {_GENERATION.get(speed or 0.0, '?')} x{width}"
        for speed, width in sorted(speeds, key=str)
    ]
    described = ", as described" if machine.host.assumed and names else ""
    return ", ".join(names) + described
