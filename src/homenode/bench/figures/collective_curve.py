"""Collective curve: what a sweep over message sizes says: its peak, its start, and a flat one.

A healthy curve climbs for tens of megabytes, while set-up costs are spread over more bytes. One
that is flat from kilobytes on has met a limit that size does not change: a link trained at a low
speed, or one root complex that all GPUs share. Source: the study's 8 RTX 5090 behind Gen 2 links,
0.53 GB/s from 64 KiB to 1 GiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.findings import Finding, Severity
from homenode.tools.nccl_tests_records import NcclRow, NcclTests
from homenode.units import MIB, format_bytes

FLAT_FROM_BYTES = MIB
"""A plateau that begins at or below this size begins too early."""

FLAT_WITHIN = 0.10
"""Of the peak: what still counts as flat."""

FLAT_SPAN = 64
"""Largest to first size of a plateau: six doublings or more."""


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """peak_size_bytes: where the peak is. half_peak_bytes: the first size with half of it.

    smallest_ns: time of the smallest message, None where the sweep has none. flat_from_bytes: where
    a plateau begins that begins too early, None where none does.
    """

    peak_bytes_per_s: float
    peak_size_bytes: int
    half_peak_bytes: int
    smallest_ns: float | None
    flat_from_bytes: int | None


def curve_of(run: NcclTests) -> CollectiveCurve | None:
    """The curve of a run, of the better half at each size; None where nothing was moved."""
    points = _points(run.rows)
    if not points:
        return None
    peak_size, peak = max(points, key=lambda point: (point[1], -point[0]))
    half = next(size for size, rate in points if rate >= peak / 2)
    small = min((row for row in run.rows if row.size_bytes > 0), key=lambda row: row.size_bytes)
    smallest = min(half.time_ns for half in small.halves())
    return CollectiveCurve(peak, peak_size, half, smallest or None, _flat_from(points, peak))


def flat_curve(run: NcclTests, subject: str) -> Finding | None:
    """The finding of a curve that meets a hard ceiling. subject: the run, in the user's words."""
    curve = curve_of(run)
    if curve is None or curve.flat_from_bytes is None:
        return None
    return Finding(
        "collective-flat-curve",
        Severity.WARNING,
        subject,
        f"a bus bandwidth that climbs beyond {format_bytes(FLAT_FROM_BYTES)}",
        f"{curve.peak_bytes_per_s / 1e9:.2f} GB/s from {format_bytes(curve.flat_from_bytes)} on",
        "large messages are no faster than small ones",
        "homenode doctor: link speeds under load, and which GPUs share a root complex",
        "sweep over message sizes",
    )


def _points(rows: Sequence[NcclRow]) -> list[tuple[int, float]]:
    """(size, bus bandwidth), ascending, without rates that two decimals cut to zero."""
    found: dict[int, float] = {}
    for row in rows:
        for half in row.halves():
            if half.bus_bytes_per_s > 0 and row.size_bytes > 0:
                best = max(found.get(row.size_bytes, 0.0), half.bus_bytes_per_s)
                found[row.size_bytes] = best
    return sorted(found.items())


def _flat_from(points: Sequence[tuple[int, float]], peak: float) -> int | None:
    """The first size from which every figure up to the largest size is near the peak."""
    start = len(points)
    while start > 0 and points[start - 1][1] >= peak * (1 - FLAT_WITHIN):
        start -= 1
    if start == len(points):
        return None
    first, last = points[start][0], points[-1][0]
    return first if first <= FLAT_FROM_BYTES and last >= first * FLAT_SPAN else None
