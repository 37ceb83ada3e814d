"""Health: what figures of a machine say against recommending anything for it.

A link at a fraction of its speed makes every layout slow, and their comparison worthless.
"""

import statistics
from collections.abc import Iterator, Sequence

from homenode.findings import Finding, finding
from homenode.measure.results.flat_curve import FLAT_FROM_BYTES, flat_from
from homenode.measure.results.model import Origin, Run
from homenode.units import format_bytes

LOW_COPY_BYTES_PER_S = 8e9
"""Copies between host and GPU below this: what PCIe Gen 2 x16, or Gen 3 x8, can carry at most.
Every x16 link since 2012 carries twice as much."""


def figure_findings(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """What figures of a machine say about its links, whatever the layout."""
    real = [run for run in runs if run.head.origin not in (Origin.EMULATED, Origin.SYNTHESISED)]
    return (*_flat_curves(real), *_low_copies(real))


def _flat_curves(runs: Sequence[Run]) -> Iterator[Finding]:
    for run in runs:
        by_size: dict[int, list[float]] = {}
        for key, samples in run.groups.items():
            if key.metric.endswith("-busbw") and key.size_bytes is not None:
                values = [one.value for one in samples]
                by_size.setdefault(key.size_bytes, []).extend(values)
        points = sorted((size, statistics.median(values)) for size, values in by_size.items())
        if not points:
            continue
        peak = max(rate for _, rate in points)
        start = flat_from(points, peak)
        if start is not None:
            yield finding(
                "collective-flat-curve",
                f"{run.head.system}/{run.head.name}",
                expected=f"a bus bandwidth that climbs beyond {format_bytes(FLAT_FROM_BYTES)}",
                observed=f"{peak / 1e9:.2f} GB/s from {format_bytes(start)} on",
                source="sweep over message sizes",
            )


def _low_copies(runs: Sequence[Run]) -> Iterator[Finding]:
    for metric, what in (("h2d-bandwidth", "host to device"), ("d2h-bandwidth", "device to host")):
        for run in runs:
            by_gpu: dict[object, list[float]] = {}
            for key, samples in run.groups.items():
                if key.metric == metric and key.variant is None and key.size_bytes is None:
                    values = [one.value for one in samples]
                    by_gpu.setdefault(key.device or key.position, []).extend(values)
            medians = [statistics.median(values) for values in by_gpu.values()]
            low = [value for value in medians if value < LOW_COPY_BYTES_PER_S]
            if low:
                yield finding(
                    "h2d-low",
                    f"{run.head.system}/{run.head.name}, {what}",
                    expected=f"{LOW_COPY_BYTES_PER_S / 1e9:g} GB/s at least, as any x16 link "
                    "since Gen 3",
                    observed=f"{min(low) / 1e9:.1f} GB/s ({len(low)} of {len(medians)} GPUs)",
                    source="copies from and to pinned host memory",
                )
