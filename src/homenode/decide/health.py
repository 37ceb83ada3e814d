"""Health: findings on a machine's links from its results, and the objectives that they block."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from homenode.findings import Finding, Severity, finding
from homenode.measure.results.model import (
    COLLECTIVE_GPUS,
    FLAT_WITHIN,
    MIN_RATE_BYTES_PER_S,
    Origin,
    Run,
    RunHead,
    SweepFit,
    fit_flat,
    fit_sweep,
)
from homenode.metrics import format_value
from homenode.objective import Objective
from homenode.units import parse_whole

LOW_COPY_BYTES_PER_S = 8e9
"""Copies between host and GPU below this: what PCIe Gen 2 x16, or Gen 3 x8, can carry at most.
Every x16 link since 2012 carries twice as much."""


USES_HOST_LINKS = frozenset({Objective.MULTI_GPU, Objective.GPU_COPY})
"""Objectives that a slow link between host and GPUs makes worthless to compare."""


def find_blocking(findings: Iterable[Finding], objective: Objective) -> tuple[Finding, ...]:
    """Return critical findings on links that an objective uses."""
    if objective not in USES_HOST_LINKS:
        return ()
    critical = (finding for finding in findings if finding.severity is Severity.CRITICAL)
    is_collective = objective is Objective.MULTI_GPU
    return tuple(f for f in critical if is_collective or f.id != "collective-flat-curve")


def check_results(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """Return findings on a machine's links from its results, unless another layout refutes them."""
    real = [run for run in runs if run.head.origin not in (Origin.EMULATED, Origin.SYNTHESISED)]
    return (*_check_flat_curves(real), *_check_low_copies(real), *_check_peer_copies(real))


_Points = list[tuple[int, float]]
_HALVES = ("in-place", "out-of-place")  # of one sweep


def list_sweeps(runs: Sequence[Run]) -> dict[str, tuple[_Points, float]]:
    """Return the medians by size, ascending, of each metric and variant; and the bytes on the bus
    for each byte of a message."""
    by_size: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for key, samples in run.groups.items():
            is_copy = key.metric in ("h2d-bandwidth", "d2h-bandwidth")
            if key.size_bytes is not None and (is_copy or key.metric.endswith("-busbw")):
                words = [word for word in (key.variant or "").split(", ") if word not in _HALVES]
                sizes = by_size.setdefault(", ".join(filter(None, (key.metric, *words))), {})
                sizes.setdefault(key.size_bytes, []).extend(sample.value for sample in samples)
    gpus = max((_count_gpus(run.head) for run in runs), default=0)
    factor = 2 * (gpus - 1) / gpus if gpus > 1 else 1.0
    return {
        name: (
            sorted((size, statistics.median(values)) for size, values in sizes.items()),
            factor if name.startswith("allreduce") else 1.0,
        )
        for name, sizes in by_size.items()
    }


def _count_gpus(head: RunHead) -> int:
    """Count the GPUs of a collective; imported runs do not list them, but have the tool's count."""
    counts = (condition.value for condition in head.conditions if condition.name == COLLECTIVE_GPUS)
    return max(len(head.gpus), *(parse_whole(count) or 0 for count in counts), 0)


def fit_sweeps(runs: Sequence[Run]) -> dict[str, SweepFit]:
    """Fit start-up time, rate and knee of each sweep, by metric and variant."""
    fits = {name: fit_sweep(*sweep) for name, sweep in list_sweeps(runs).items()}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _check_flat_curves(runs: Sequence[Run]) -> Iterator[Finding]:
    sweeps = [
        (run, points, factor)
        for run in runs
        for name, (points, factor) in list_sweeps([run]).items()
        if "-busbw" in name
    ]
    for run, points, factor in sweeps:
        fit = fit_flat(points, factor)
        if fit is None:
            continue
        ceiling = fit.rate_bytes_per_s * (1 + FLAT_WITHIN)
        switches = run.head.switches
        other_curves = [curve for other, curve, _ in sweeps if other.head.switches != switches]
        if any(rate > ceiling for curve in other_curves for _, rate in curve):
            continue
        yield finding(
            "collective-flat-curve",
            f"{run.head.system}/{run.head.name}",
            expected=f"{MIN_RATE_BYTES_PER_S / 1e9:g} GB/s at least, as one lane of PCIe 3.0",
            observed=fit.text,
            source="sweep over message sizes",
        )


_PEERS_SHARE = 0.7
"""A GPU that copies less than this share of what its peers copy is behind another link."""


def _check_peer_copies(runs: Sequence[Run]) -> Iterator[Finding]:
    """Find GPUs, of three or more, whose copies are far below the others' in every layout."""
    for metric, direction in _COPIES.items():
        shares = [(run, _compute_peer_shares(run, metric)) for run in runs]
        healthy = {
            place
            for _, by_place in shares
            for place, (value, usual) in by_place.items()
            if value >= _PEERS_SHARE * usual
        }
        for run, peers in shares:
            for place, (value, usual) in peers.items():
                if value < _PEERS_SHARE * usual and place not in healthy:
                    gpu, _, _ = place
                    yield finding(
                        "h2d-low",
                        f"{run.head.system}/{run.head.name}, GPU {gpu}, {direction}",
                        expected=f"{usual / 1e9:.1f} GB/s, as its peers",
                        observed=f"{value / 1e9:.1f} GB/s",
                        severity=Severity.WARNING,
                        cost=f"{(1 - value / usual) * 100:.0f} % below its peers",
                        source="copies from and to host memory",
                    )


_Shares = dict[tuple[object, ...], tuple[float, float]]


def _compute_peer_shares(run: Run, metric: str) -> _Shares:
    """Return the copies of each GPU, by size and node, and the median of at least two peers; else
    NaN, which compares false."""
    values: dict[tuple[object, object], dict[object, list[float]]] = {}
    for key, samples in run.groups.items():
        if key.metric == metric and key.variant is None:
            of_gpu = values.setdefault((key.size_bytes, key.node), {})
            place = key.position if key.device is None else key.device
            of_gpu.setdefault(place, []).extend(sample.value for sample in samples)
    medians = {
        direction: {gpu: statistics.median(rates) for gpu, rates in of_gpu.items()}
        for direction, of_gpu in values.items()
    }
    return {
        (gpu, *direction): (
            median,
            statistics.median(v for other, v in of_gpu.items() if other != gpu)
            if len(of_gpu) > 2
            else math.nan,
        )
        for direction, of_gpu in medians.items()
        for gpu, median in of_gpu.items()
    }


_COPIES = {"h2d-bandwidth": "host to device", "d2h-bandwidth": "device to host"}


class LayoutLinks(NamedTuple):
    """Facts on links from the runs of a layout, run by run."""

    label: str
    copies: Mapping[str, Sequence[_Shares]]  # by metric
    sweeps: Sequence[Mapping[str, tuple[_Points, float]]]
    pooled: Mapping[str, tuple[_Points, float]]  # sweeps of all runs together


def collect_layout_links(label: str, runs: Sequence[Run]) -> LayoutLinks:
    copies = {metric: [_compute_peer_shares(run, metric) for run in runs] for metric in _COPIES}
    return LayoutLinks(label, copies, [list_sweeps([run]) for run in runs], list_sweeps(runs))


def find_slow_in_one(slow: LayoutLinks, fast: LayoutLinks) -> Iterator[str]:
    """Yield GPUs that copy slowly, and collectives with a ceiling, in only one layout, by its
    label: a card that became slow while one layout ran resembles an effect of the layout."""
    yield from _format_slow_copies(slow, fast)
    label, other_label = slow.label, fast.label
    tops = {name: max(rate for _, rate in points) for name, (points, _) in fast.pooled.items()}
    for sweeps in slow.sweeps:
        for name, (points, factor) in sweeps.items():
            fit = fit_flat(points, factor) if "-busbw" in name else None
            if fit and tops.get(name, 0.0) > fit.rate_bytes_per_s * (1 + FLAT_WITHIN):
                rate, top = _format_rate(fit.rate_bytes_per_s), _format_rate(tops[name])
                reached_text = f"{top} is reached in {other_label}"
                yield f"no size of {name} passes {rate} in {label}, and {reached_text}"


def _format_slow_copies(slow_side: LayoutLinks, fast_side: LayoutLinks) -> Iterator[str]:
    label, other_label = slow_side.label, fast_side.label
    slow: dict[object, tuple[float, str]] = {}
    for metric, direction in _COPIES.items():
        healthy: dict[tuple[object, ...], float] = {}
        for copies in fast_side.copies[metric]:
            healthy |= {
                place: copies[place][0] for place in copies.keys() - _find_slow_gpus(copies)
            }
        for copies in slow_side.copies[metric]:
            for place in sorted(_find_slow_gpus(copies) & healthy.keys(), key=str):
                rate, usual = copies[place][0], healthy[place]
                text = (
                    f"{_format_rate(rate)} {direction} in {label} and "
                    f"{_format_rate(usual)} in {other_label}"
                )
                slow[place[0]] = min(slow.get(place[0], (math.inf, "")), (rate / usual, text))
    if slow:
        first, *slower = sorted(slow, key=lambda gpu: slow[gpu][0])
        peers_text = f"; GPU {', '.join(map(str, slower))} likewise" if slower else ""
        yield f"GPU {first} copies {slow[first][1]}{peers_text}"


def _format_rate(bytes_per_s: float) -> str:
    return format_value(bytes_per_s, "bytes_per_s")


def _find_slow_gpus(copies: _Shares) -> set[tuple[object, ...]]:
    """Return GPUs below the rate of any link, and GPUs far below the others, if fewer than half:
    half of them are far from the memory."""
    unlike = {place for place, (rate, usual) in copies.items() if rate < _PEERS_SHARE * usual}
    gpus = {place[0] for place in copies}
    if 2 * len({place[0] for place in unlike}) >= len(gpus):
        unlike = set()
    aggregates = {place for place in copies if place[1] is None}
    return unlike | {place for place in aggregates if copies[place][0] < LOW_COPY_BYTES_PER_S}


def _check_low_copies(runs: Sequence[Run]) -> Iterator[Finding]:
    for metric, direction in _COPIES.items():
        copies = [(run, medians) for run in runs if (medians := _list_copies(run, metric))]
        for run, medians in copies:
            low = [value for value in medians if value < LOW_COPY_BYTES_PER_S]
            switches = run.head.switches
            other_rates = (rates for other, rates in copies if other.head.switches != switches)
            if low and not any(min(rates) >= LOW_COPY_BYTES_PER_S for rates in other_rates):
                yield finding(
                    "h2d-low",
                    f"{run.head.system}/{run.head.name}, {direction}",
                    expected=f"{LOW_COPY_BYTES_PER_S / 1e9:g} GB/s at least, as any x16 link "
                    "since Gen 3",
                    observed=f"{min(low) / 1e9:.1f} GB/s ({len(low)} of {len(medians)} GPUs)",
                    source="copies from and to pinned host memory",
                )


def _list_copies(run: Run, metric: str) -> list[float]:
    """Return the medians of a run's GPUs."""
    by_gpu: dict[object, list[float]] = {}
    for key, samples in run.groups.items():
        if key.metric == metric and key.variant is None and key.size_bytes is None:
            values = [sample.value for sample in samples]
            by_gpu.setdefault(key.device or key.position, []).extend(values)
    return [statistics.median(values) for values in by_gpu.values()]
