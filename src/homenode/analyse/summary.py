"""Summary: the samples of an alternative as series, and each series boot by boot.

What a series never mixes: units, variants, sizes, nodes, devices, placement states.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from homenode.analyse.alternative import Alternative
from homenode.bdf import Bdf
from homenode.metrics import Metric, metric_of
from homenode.results.model import UNSETTLED, RunHead, Sample, Statistic

LEAST_UNDISTURBED = 3
"""Disturbed samples are left out while at least this many others are there in a boot."""

_LEAST, _MOST = 1e-12, 1e30
"""No unit of ours leads beyond these; arithmetic on what lies between cannot overflow."""

_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal samples."""


class SeriesKey(NamedTuple):
    """What samples must share to be one series. worst: the slowest of several devices, by boot."""

    metric: str
    unit: str
    variant: str | None
    size_bytes: int | None
    node: int | None
    peer_node: int | None
    device: Bdf | None
    peer: Bdf | None
    state: str | None
    worst: bool


@dataclass(frozen=True, slots=True)
class Series:
    """One series of one alternative.

    medians: of each boot, above 0. inner_variance: mean variance of a boot's median as its samples
    give it, on the logarithmic scale; 0 where they cannot. samples: how many were used. low, high:
    of everything that was used. replicated: the medians are of boots that were really made, not of
    figures that somebody printed. devices: whose the slowest was taken of. blocks: of each boot,
    (experiment, round), None where it is of no round. is_range: somebody printed low and high, and
    `value` is nothing but their middle.
    """

    key: SeriesKey
    medians: tuple[float, ...]
    inner_variance: float
    samples: int
    low: float
    high: float
    replicated: bool
    devices: frozenset[Bdf]
    blocks: tuple[tuple[str, int] | None, ...] = ()
    is_range: bool = False

    @property
    def value(self) -> float:
        """Geometric mean of the boots."""
        return math.exp(statistics.fmean(map(math.log, self.medians)))


_Block = tuple[str, int] | None


class _Sampled(NamedTuple):
    boot: tuple[str, int]
    sample: Sample
    block: _Block


def is_refused(sample: Sample) -> bool:
    """A figure that no machine gives: every metric is a rate or a time, above zero and bounded."""
    return not _LEAST < sample.value < _MOST


def series_of(alternative: Alternative) -> dict[SeriesKey, Series]:
    """Every series of an alternative's runs.

    Left out are figures that are refused, and those during which a PU was moved.
    """
    made: dict[tuple[object, ...], list[_Sampled]] = {}
    names = Counter(run.head.name for run in alternative.runs)
    for place, run in enumerate(alternative.runs):
        block = _block(run.head)
        own = run.head.name if names[run.head.name] == 1 else f"{run.head.name}\n{place}"
        for sample in run.samples:
            if not is_refused(sample) and sample.state != UNSETTLED:
                boot = _boot(run.head.boots, own, sample)
                made.setdefault(_key(sample), []).append(_Sampled(boot, sample, block))
    in_use = {SeriesKey(*key): samples for key, samples in made.items()}  # type: ignore[arg-type]
    if len(names) < len(alternative.runs):
        in_use = {key: _once(samples) for key, samples in in_use.items()}
    found = {key: _series(key, samples) for key, samples in in_use.items()}
    return found | _slowest(in_use)


def headline(series: Iterable[SeriesKey], metric: Metric) -> tuple[SeriesKey, ...]:
    """The series that speak for a metric: one, or one for each placement state.

    The variant that the metric calls its headline, else series without a variant; over all sizes,
    nodes and devices.
    """
    whole = [
        key
        for key in series
        if key.metric == metric.id
        and (key.size_bytes, key.node, key.peer_node, key.device, key.peer) == (None,) * 5
    ]
    if metric.worst_device and any(key.worst for key in whole):
        whole = [key for key in whole if key.worst]
    for variant in (metric.headline, None):
        chosen = tuple(key for key in whole if key.variant == variant)
        if chosen:
            return chosen
    return ()


def _once(in_use: Sequence[_Sampled]) -> list[_Sampled]:
    """Without boots of which none is given the identity, and that a run of the same name has figure
    by figure: somebody gave, or imported, it twice.
    """
    figures: dict[tuple[str, int], list[float]] = {}
    for boot, sample, _ in in_use:
        figures.setdefault(boot, []).append(sample.value)
    first: dict[tuple[str, int, tuple[float, ...]], tuple[str, int]] = {}
    for boot, values in figures.items():
        first.setdefault((boot[0].partition("\n")[0], boot[1], tuple(values)), boot)
    kept = set(first.values())
    return [one for one in in_use if one.boot in kept or one.boot[1] < 0]


def _block(head: RunHead) -> _Block:
    known = head.experiment is not None and head.block is not None
    return (head.experiment or "", head.block or 0) if known else None


def _boot(boots: Sequence[str], own: str, sample: Sample) -> tuple[str, int]:
    """Which boot, across runs: two runs of one boot are one replicate."""
    if sample.boot < len(boots):
        return boots[sample.boot], -1
    return own, sample.boot


def _key(sample: Sample) -> tuple[object, ...]:
    """A SeriesKey as a plain tuple, which is made in a quarter of the time; they are equal."""
    return (
        sample.metric,
        sample.unit,
        sample.variant,
        sample.size_bytes,
        sample.node,
        sample.peer_node,
        sample.device,
        sample.peer,
        sample.state,
        False,
    )


def _series(key: SeriesKey, in_use: Sequence[_Sampled]) -> Series:
    boots: dict[tuple[str, int], list[Sample]] = {}
    blocks: dict[tuple[str, int], _Block] = {}
    for boot, sample, block in in_use:
        boots.setdefault(boot, []).append(sample)
        blocks[boot] = block
    kept = [_undisturbed(samples) for samples in boots.values()]
    values = [[sample.value for sample in samples] for samples in kept]
    everything = [value for boot in values for value in boot]
    return Series(
        key,
        tuple(map(statistics.median, values)),
        _inner_variance(values),
        len(everything),
        min(everything),
        max(everything),
        all(sample.statistic is Statistic.SAMPLE for boot in kept for sample in boot),
        frozenset(),
        tuple(blocks.values()),
        any(sample.statistic is Statistic.LOW for boot in kept for sample in boot),
    )


def _undisturbed(samples: list[Sample]) -> list[Sample]:
    quiet = [sample for sample in samples if not sample.disturbed]
    return quiet if len(quiet) >= LEAST_UNDISTURBED else samples


def _inner_variance(boots: Sequence[Sequence[float]]) -> float:
    known = [
        _MEDIAN_VARIANCE * sample_variance([math.log(value) for value in boot]) / len(boot)
        for boot in boots
        if len(boot) > 1
    ]
    return statistics.fmean(known) if known else 0.0


def sample_variance(values: Sequence[float]) -> float:
    """Of two or more values. In floats: statistics.variance adds fractions, 20 times slower.

    >>> sample_variance([1.0, 2.0, 4.0])
    2.3333333333333335
    """
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _slowest(in_use: dict[SeriesKey, list[_Sampled]]) -> dict[SeriesKey, Series]:
    """For metrics in which the slowest device counts: its median of each boot.

    A device is known by its address, or by its position where a tool printed no address.
    """
    groups: dict[SeriesKey, dict[object, list[_Sampled]]] = {}
    for key, samples in in_use.items():
        metric = metric_of(key.metric)
        if metric is None or not metric.worst_device or key.node is not None:
            continue
        folded = key._replace(device=None, peer=None, worst=True)
        for one in samples:
            device = (key.device, key.peer, one.sample.index)
            if device != (None, None, None):
                groups.setdefault(folded, {}).setdefault(device, []).append(one)
    return {key: _folded(key, devices) for key, devices in groups.items()}


def _folded(key: SeriesKey, devices: dict[object, list[_Sampled]]) -> Series:
    metric = metric_of(key.metric)
    take_worst = max if metric is not None and metric.lower_is_better else min
    by_boot: dict[tuple[str, int], list[float]] = {}
    blocks: dict[tuple[str, int], _Block] = {}
    variances = []
    samples = 0
    for in_use in devices.values():
        boots: dict[tuple[str, int], list[Sample]] = {}
        for boot, sample, block in in_use:
            boots.setdefault(boot, []).append(sample)
            blocks[boot] = block
        kept = {boot: _undisturbed(found) for boot, found in boots.items()}
        values = {boot: [one.value for one in found] for boot, found in kept.items()}
        for boot, found_values in values.items():
            by_boot.setdefault(boot, []).append(statistics.median(found_values))
            samples += len(found_values)
        variances.append(_inner_variance(list(values.values())))
    medians = tuple(take_worst(found) for found in by_boot.values())
    every = [one.sample for in_use in devices.values() for one in in_use]
    return Series(
        key,
        medians,
        statistics.fmean(variances),
        samples,
        min(sample.value for sample in every),
        max(sample.value for sample in every),
        all(sample.statistic is Statistic.SAMPLE for sample in every),
        frozenset(sample.device for sample in every if sample.device is not None),
        tuple(blocks[boot] for boot in by_boot),
    )
