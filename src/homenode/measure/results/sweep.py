"""Sweep: start-up time, rate and knee of rates over sizes, by least squares.

A transfer of s bytes takes a start-up time and s over the rate, so that its rate climbs to half at
the knee, start-up time times rate, whatever the sizes are. A fixed size in bytes cannot show that a
curve is flat: eight GPUs with 20 us and 8.4 GB/s are at 90 % of their rate from 1 MiB on, and
healthy.
"""

import math
import operator
from collections.abc import Sequence

from msgspec import Struct

from homenode.units import MIB, format_bytes

MIN_RATE_BYTES_PER_S = 1e9
"""A lane of PCIe 3.0. Rates of healthy collectives through host memory are 2 to 20 GB/s; eight
RTX 5090 behind Gen 2 links had 0.53 GB/s (the study)."""

MIN_RATE_PRINTED = 5e7
"""Two decimals of GB/s are off by a tenth and more below this."""

MIN_POINTS = 4
FLAT_WITHIN = 0.10
BEYOND_KNEE = 16  # times the knee: there the start-up time costs 6 % of the rate


class SweepFit(Struct, frozen=True, kw_only=True):
    """The curve time = start-up time + size over rate."""

    start_s: float
    rate_bytes_per_s: float
    knee_bytes: float
    spread: float  # root mean square of what it leaves, as a part of each rate

    @property
    def text(self) -> str:
        """ "20 us + 8.6 GB/s, knee at 180 KiB"."""
        start, rate = self.start_s * 1e6, self.rate_bytes_per_s / 1e9
        return f"{start:.3g} us + {rate:.3g} GB/s, knee at {_round_bytes(self.knee_bytes)}"


def fit_sweep(points: Sequence[tuple[int, float]], factor: float = 1.0) -> SweepFit | None:
    """The fit of (size, rate) in bytes and bytes/s; None for too few, or a rate never reached.

    factor: bytes on the bus for each byte of a message: 2 (n - 1) / n of an all-reduce of n GPUs.
    1 over the rate is linear in 1 over the size; each point weighs as much as its relative error.
    """
    clear = [(size, rate) for size, rate in points if rate >= MIN_RATE_PRINTED]
    if len(clear) < MIN_POINTS:
        return None
    top = max(rate for _, rate in clear)
    first = min(size for size, _ in clear)
    rates = [rate / top for _, rate in clear]
    parts = [rate / top * first / size for size, rate in clear]
    square, cross = math.fsum(u * u for u in rates), math.fsum(map(operator.mul, rates, parts))
    parts_square = math.fsum(v * v for v in parts)
    determinant = square * parts_square - cross * cross
    if determinant <= 1e-12 * square * parts_square:
        return None
    level = (math.fsum(rates) * parts_square - math.fsum(parts) * cross) / determinant
    slope = (math.fsum(parts) * square - math.fsum(rates) * cross) / determinant
    if slope < 0:
        level, slope = math.fsum(rates) / square, 0.0
    if level <= 0:
        return None
    residuals = [1 - level * u - slope * v for u, v in zip(rates, parts, strict=True)]
    knee, rate = first * slope / level, top / level
    return SweepFit(
        start_s=knee * factor / rate,
        rate_bytes_per_s=rate,
        knee_bytes=knee,
        spread=math.sqrt(math.fsum(residual * residual for residual in residuals) / len(residuals)),
    )


def fit_flat(points: Sequence[tuple[int, float]], factor: float = 1.0) -> SweepFit | None:
    """Return the fit of a curve that meets a ceiling no start-up time explains; None of any other.

    The largest size is far beyond the knee, no size is faster than the fitted rate, and one lane
    would carry more.
    """
    fit = fit_sweep(points, factor)
    if fit is None or fit.rate_bytes_per_s >= MIN_RATE_BYTES_PER_S:
        return None
    largest = max(size for size, _ in points)
    fastest = max(rate for _, rate in points)
    is_reached = largest >= max(MIB, BEYOND_KNEE * fit.knee_bytes)
    return fit if is_reached and fastest <= fit.rate_bytes_per_s * (1 + FLAT_WITHIN) else None


def _round_bytes(size: float) -> str:
    """Return the bytes with two digits, in a unit that divides them.

    >>> _round_bytes(184_320.0), _round_bytes(0.0)
    ('180 KiB', '0 B')
    """
    unit = 1024 ** min(3, max(0, int(math.log(size, 1024)))) if size >= 1 else 1
    value = size / unit
    digits = 10 ** max(0, int(math.log10(value)) - 1) if value >= 1 else 1
    return format_bytes(round(value / digits) * digits * unit)
