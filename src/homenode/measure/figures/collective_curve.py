"""Collective curve: what a sweep over message sizes says: its peak, its start, and a flat one."""

from collections.abc import Sequence

from msgspec import Struct

from homenode.catalogue import finding
from homenode.findings import Finding, Severity
from homenode.machine.tools.nccl_tests import NcclRow, NcclTests
from homenode.measure.results.flat_curve import FLAT_FROM_BYTES, flat_from
from homenode.units import format_bytes


class CollectiveCurve(Struct, frozen=True):
    """half_peak_bytes: the first size with half of the peak. flat_from_bytes: where a plateau
    begins that begins too early, None where none does."""

    peak_bytes_per_s: float
    half_peak_bytes: int
    flat_from_bytes: int | None


def curve_of(run: NcclTests) -> CollectiveCurve | None:
    """The curve of a run, of the better half at each size; None where nothing was moved."""
    points = _points(run.rows)
    if not points:
        return None
    peak = max(rate for _, rate in points)
    half = next(size for size, rate in points if rate >= peak / 2)
    return CollectiveCurve(peak, half, flat_from(points, peak))


def flat_curve(run: NcclTests, subject: str) -> Finding | None:
    """The finding of a curve that meets a hard ceiling. subject: the run, in the user's words."""
    curve = curve_of(run)
    if curve is None or curve.flat_from_bytes is None:
        return None
    return finding(
        "collective-flat-curve",
        subject,
        expected=f"a bus bandwidth that climbs beyond {format_bytes(FLAT_FROM_BYTES)}",
        observed=f"{curve.peak_bytes_per_s / 1e9:.2f} GB/s from "
        f"{format_bytes(curve.flat_from_bytes)} on",
        severity=Severity.WARNING,
        source="sweep over message sizes",
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
