"""Summary: the samples of one alternative's runs as series, and each series boot by boot.

A series never mixes units, variants, sizes, nodes, devices or placement states.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.findings import Gap
from homenode.measure.results.model import (
    UNKNOWN_SWITCHES,
    UNSETTLED,
    Origin,
    Run,
    RunHead,
    Sample,
    SeriesId,
    Statistic,
)
from homenode.metrics import METRICS, POWER, Metric, find_metric
from homenode.objective import Objective
from homenode.units import format_bytes

MIN_UNDISTURBED = 3
"""Disturbed samples are omitted while at least this many others are there in a boot."""

_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal samples."""


class SeriesKey(SeriesId, frozen=True, gc=False):
    worst: bool = False  # the slowest of several devices, by boot


_SHARED = attrgetter(*SeriesId.__struct_fields__)
"""The fields of a figure's key, of a longer key."""


class Series(Struct, frozen=True, kw_only=True, dict=True):
    """One series of one alternative. Without slots, so that values derived from the medians are
    cached."""

    key: SeriesKey
    medians: tuple[float, ...]  # median of each boot, above 0
    # mean variance of a boot's median as its samples give it, on the logarithmic scale; 0 if
    # they cannot
    inner_variance: float
    samples: int  # how many were used
    low: float  # lowest value that was used
    high: float  # highest value that was used
    replicated: bool  # the medians are of measured boots, not of published results
    devices: frozenset[Bdf]  # devices of which the slowest was taken
    # of each boot, (experiment, round), None if it is of no round
    blocks: tuple[tuple[str, int] | None, ...] = ()
    # of each boot, in seconds or as its place in the order; None if unknown
    times: tuple[float | None, ...] = ()
    is_range: bool = False  # only low and high were printed; `value` is their middle
    # of each boot, the slowest device over the faster half, which a boot that is fast or slow as a
    # whole does not change; () of few devices
    shares: tuple[float, ...] = ()
    device_spread: float = 0.0  # standard deviation of the faster half's logarithms, over boots

    @cached_property
    def value(self) -> float:
        """Geometric mean of the boots."""
        return math.exp(statistics.fmean(self.logs))

    @cached_property
    def logs(self) -> tuple[float, ...]:
        return tuple(map(math.log, self.medians))

    @cached_property
    def variance(self) -> float:
        """The variance of the logarithms of two or more boots."""
        return sample_variance(self.logs)


_Block = tuple[str, int] | None


class _Boot(NamedTuple):
    samples: list[Sample]
    block: _Block
    time: float | None


_Boots = dict[tuple[str, int], _Boot]
"""The boots of a series, by identity: (name of the run or boot, number)."""


def collect_series(runs: Sequence[Run]) -> dict[SeriesKey, Series]:
    """Return every series of the runs of one alternative, without rejected results and those during
    which a vCPU moved."""
    names = Counter(run.head.name for run in runs)
    # Under plain tuples: a key of each is made once.
    by_fields: dict[tuple[Any, ...], _Boots] = {}
    for place, run in enumerate(runs):
        head = run.head
        block, time = _find_block(head), head.started_s if head.place is None else float(head.place)
        run_name = run.head.name if names[run.head.name] == 1 else f"{run.head.name}\n{place}"
        for fields, samples in run.groups.items():
            if fields.state != UNSETTLED:
                boot = _boot(run.head.boots, run_name, fields.boot)
                boots = by_fields.setdefault(_SHARED(fields), {})
                boot_entry = boots.get(boot)
                together = [] if boot_entry is None else boot_entry.samples
                together += samples
                boots[boot] = _Boot(together, block, time)
    in_use = {SeriesKey(*fields): boots for fields, boots in by_fields.items()}
    if len(runs) > 1:
        in_use = {key: _drop_copies(boots) for key, boots in in_use.items()}
    series = {key: _build_series(key, boots) for key, boots in in_use.items()}
    return series | _select_slowest(in_use)


def choose_headline(series: Iterable[SeriesKey], metric: Metric) -> tuple[SeriesKey, ...]:
    """Return the series that represent a metric: one, or one for each placement state, over all
    sizes, nodes and devices, of the metric's headline variant, else without a variant."""
    over_all = [key for key in series if key.metric == metric.id and key.is_over_all]
    if metric.worst_device and any(key.worst for key in over_all):
        over_all = [key for key in over_all if key.worst]
    for variant in (metric.headline, None):
        keys = tuple(key for key in over_all if key.variant == variant)
        if keys:
            return keys
    return ()


def headline_series(series: Mapping[SeriesKey, Series], metric: Metric) -> Series | None:
    """The series that represents a metric; among placement states the one with the most samples."""
    candidates = [series[key] for key in choose_headline(series, metric)]
    return max(candidates, key=lambda one: one.samples, default=None)


def format_places(series: Iterable[SeriesKey], metric: Metric) -> str | None:
    """Return the places of a metric's results, as an example: "triad of node 1"; None without
    series."""
    keys = [key for key in series if key.metric == metric.id]
    if not keys:
        return None
    key = min(keys, key=lambda key: (key.variant != metric.headline, str(key)))
    size = None if key.size_bytes is None else format_bytes(key.size_bytes)
    parts = ("node", key.node), ("threads on node", key.peer_node), ("size", size)
    places = [f"{name} {value}" for name, value in parts if value is not None]
    return " of ".join(filter(None, (key.variant, *places))) or "single devices"


def find_only_variant(series: Iterable[SeriesKey], metric: Metric) -> tuple[SeriesKey, ...]:
    """The only series over all nodes, devices and sizes, if there is one: "FP16 as printed"."""
    keys_over_all = tuple(key for key in series if key.metric == metric.id and key.is_over_all)
    return keys_over_all if len(keys_over_all) == 1 else ()


def choose_shown(series: Mapping[SeriesKey, Series], metric: Metric) -> Series | None:
    """Return the series that represents a metric, or its only one, for display only."""
    variant_keys = find_only_variant(series, metric)
    return headline_series(series, metric) or (series[variant_keys[0]] if variant_keys else None)


_WORK = {
    "gpu-bandwidth": ("h2d-bandwidth", "GB"),
    "gpu-copy": ("d2d-bandwidth", "GB"),
    "gpu-peer": ("p2p-bandwidth", "GB"),
    "nccl": ("allreduce-busbw-peak", "GB"),
    "app": ("app-rate", "event"),
}
"""Test of bench -> the metric of its work, and what that counts."""


def power_by_test(series: Mapping[SeriesKey, Series]) -> dict[str, float]:
    """Watts of a GPU while each test ran: the median over GPUs and boots. By "TEST, J/GB" and
    "app, J/event": joules of a GPU for a GB, and of all GPUs for an event of the user's program."""
    drawn_watts: dict[str, list[float]] = {}
    total: dict[str, float] = {}
    for key, key_series in series.items():
        if key.metric == POWER and not key.worst:
            test = key.variant or ""
            drawn_watts.setdefault(test, []).extend(key_series.medians)
            total[test] = total.get(test, 0.0) + key_series.value
    watts_by_test = {}
    for test, watts in drawn_watts.items():
        watts_by_test[test] = statistics.median(watts)
        name, _, binding = test.replace(": ", " from ").partition(" from ")
        metric, unit = _WORK.get(name, (None, ""))
        rates = [
            key_series.value
            for key, key_series in series.items()
            if metric is not None
            and key.metric.partition(":")[0] == metric
            and not key.worst
            and (binding or None) in (key.variant, None if key.node is None else f"node {key.node}")
        ]
        if rates:
            spent = total[test] if unit == "event" else watts_by_test[test]
            scale = 1e9 if unit == "GB" else 1.0
            watts_by_test[f"{test}, J/{unit}"] = spent / (statistics.median(rates) / scale)
    return watts_by_test


def _drop_copies(boots: _Boots) -> _Boots:
    """Remove boots without identity that equal another boot value by value, because a run was given
    or imported twice. A few values may agree by chance, so then the run's name must agree too."""
    first: dict[tuple[str, int, tuple[float, ...]], tuple[str, int]] = {}
    for (name, number), boot in boots.items():
        values = tuple(sample.value for sample in boot.samples)
        run = "" if len(values) > 2 else name.partition("\n")[0]
        first.setdefault((run, number, values), (name, number))
    first_boots = set(first.values())
    return {key: boot for key, boot in boots.items() if key in first_boots or key[1] < 0}


def _find_block(head: RunHead) -> _Block:
    is_known = head.experiment is not None and head.block is not None
    return (head.experiment or "", head.block or 0) if is_known else None


def _boot(boots: Sequence[str], run_name: str, number: int) -> tuple[str, int]:
    """Return the boot's identity across runs: two runs of one boot are one replicate."""
    if number < len(boots):
        return boots[number], -1
    return run_name, number


def _build_series(key: SeriesKey, boots: _Boots) -> Series:
    samples_by_boot = [_drop_disturbed(boot.samples) for boot in boots.values()]
    values = [[sample.value for sample in samples] for samples in samples_by_boot]
    everything = [value for boot in values for value in boot]
    statistics_used = {sample.statistic for samples in samples_by_boot for sample in samples}
    return Series(
        key=key,
        medians=tuple(map(statistics.median, values)),
        inner_variance=_compute_inner_variance(values),
        samples=len(everything),
        low=min(everything),
        high=max(everything),
        replicated=statistics_used <= {Statistic.SAMPLE},
        devices=frozenset(),
        blocks=tuple(boot.block for boot in boots.values()),
        times=tuple(boot.time for boot in boots.values()),
        is_range=Statistic.LOW in statistics_used,
    )


def _drop_disturbed(samples: Sequence[Sample]) -> Sequence[Sample]:
    quiet = [sample for sample in samples if not sample.disturbed]
    return quiet if len(quiet) >= MIN_UNDISTURBED else samples


def _compute_inner_variance(boots: Sequence[Sequence[float]]) -> float:
    variances = [
        _MEDIAN_VARIANCE * sample_variance(list(map(math.log, boot))) / len(boot)
        for boot in boots
        if len(boot) > 1
    ]
    return statistics.fmean(variances) if variances else 0.0


def sample_variance(values: Sequence[float]) -> float:
    """Return the variance of two or more values. In floats: statistics.variance adds fractions, 20
    times slower.

    >>> sample_variance([1.0, 2.0, 4.0])
    2.3333333333333335
    """
    mean = math.fsum(values) / len(values)
    return math.fsum([(value - mean) ** 2 for value in values]) / (len(values) - 1)


def _select_slowest(in_use: Mapping[SeriesKey, _Boots]) -> dict[SeriesKey, Series]:
    """Return the slowest device's median of each boot, for metrics in which it counts. A device is
    identified by its address, or by its position if a tool printed no address."""
    groups: dict[SeriesKey, dict[object, _Boots]] = {}
    for key, boots in in_use.items():
        folded_key = _make_key_over_devices(key)
        if folded_key is None:
            continue
        for name, (samples, block, time) in boots.items():
            by_index: dict[int | None, list[Sample]] = {}
            for sample in samples:
                by_index.setdefault(sample.index, []).append(sample)
            for index, device_samples in by_index.items():
                if (device := (key.device, key.peer, index)) != (None, None, None):
                    of_device = groups.setdefault(folded_key, {}).setdefault(device, {})
                    of_device[name] = _Boot(device_samples, block, time)
    return {key: _fold_devices(key, devices) for key, devices in groups.items()}


def _fold_devices(key: SeriesKey, devices: Mapping[object, _Boots]) -> Series:
    metric = find_metric(key.metric)
    take_worst = max if metric is not None and metric.lower_is_better else min
    by_boot: dict[tuple[str, int], list[float]] = {}
    blocks: dict[tuple[str, int], _Boot] = {}
    variances = []
    everything: list[float] = []
    for boots in devices.values():
        values = [
            [sample.value for sample in _drop_disturbed(boot.samples)] for boot in boots.values()
        ]
        for (name, boot), found_values in zip(boots.items(), values, strict=True):
            by_boot.setdefault(name, []).append(statistics.median(found_values))
            blocks[name] = boot
            everything += found_values
        variances.append(_compute_inner_variance(values))
    medians = tuple(take_worst(medians_of_boot) for medians_of_boot in by_boot.values())
    halves = [
        _select_faster_half(medians_of_boot, take_worst) for medians_of_boot in by_boot.values()
    ]
    shares: tuple[float, ...] = ()
    spread = 0.0
    if all(len(half) >= MIN_HALF for half in halves):
        pairs = zip(medians, halves, strict=True)
        shares = tuple(median / statistics.geometric_mean(half) for median, half in pairs)
        spread = max(statistics.stdev(map(math.log, half)) for half in halves)
    all_samples = [
        sample for boots in devices.values() for boot in boots.values() for sample in boot.samples
    ]
    return Series(
        key=key,
        medians=medians,
        inner_variance=statistics.fmean(variances),
        samples=len(everything),
        low=min(everything),
        high=max(everything),
        replicated=all(sample.statistic is Statistic.SAMPLE for sample in all_samples),
        devices=frozenset(sample.device for sample in all_samples if sample.device is not None),
        blocks=tuple(blocks[boot].block for boot in by_boot),
        times=tuple(blocks[boot].time for boot in by_boot),
        shares=shares,
        device_spread=spread,
    )


MIN_HALF = 2
"""Minimum number of devices from whose scatter the chance difference is estimated."""


def _select_faster_half(medians: Sequence[float], take_worst: Callable[..., float]) -> list[float]:
    """Return the faster half of a boot's devices: never the slowest two of four."""
    ordered_medians = sorted(medians, reverse=take_worst is min)
    return ordered_medians[: len(ordered_medians) // 2]


def find_unused_results(runs: Sequence[Run], objectives: Sequence[Objective]) -> Iterator[Gap]:
    """Yield runs of other tools without a layout, and results of single parts, which decide for
    none of these objectives."""
    for run in runs:
        name = f"{run.head.system}/{run.head.name}"
        is_foreign = run.head.origin is Origin.IMPORTED and run.head.arrangement is None
        if is_foreign and run.head.switches == UNKNOWN_SWITCHES:
            yield Gap(name, "its layout is not known (homenode import --layout NAME=PRESET)")
            continue
        series = _list_keys(run) if run.head.origin is not Origin.PUBLISHED else set()
        for metric in METRICS.values():
            part = None if choose_headline(series, metric) else format_places(series, metric)
            if part and not set(objectives).isdisjoint((*metric.primary, *metric.stands_in)):
                yield Gap(f"{name}: {metric.title}", f"{part} alone is not enough for a decision")


def _list_keys(run: Run) -> set[SeriesKey]:
    keys = {SeriesKey(*_SHARED(key)) for key in run.groups if key.state != UNSETTLED}
    placed_keys = {key for key in run.groups if (key.device, key.position) != (None, None)}
    folded_keys = {_make_key_over_devices(SeriesKey(*_SHARED(key))) for key in placed_keys}
    return keys | {key for key in folded_keys if key is not None}


def _make_key_over_devices(key: SeriesKey) -> SeriesKey | None:
    """Return the key of the slowest device's series; None if it does not exist."""
    metric = find_metric(key.metric)
    if metric is None or not metric.worst_device or key.node is not None:
        return None
    return structs.replace(key, device=None, peer=None, peer_node=None, worst=True)
