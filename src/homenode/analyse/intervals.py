"""Intervals: how far two alternatives are apart, by what their boots tell.

The boot is the unit of replication: a boot's samples are condensed to their median, and the medians
are compared on the logarithmic scale by a t-interval. Why this and not a bootstrap, and the error
rates it holds, are in docs/decisions/0003-intervals.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.analyse.student import f_upper_p, t_quantile, two_sided_p
from homenode.analyse.summary import Series, sample_variance

CONFIDENCE = 0.95
LEAST_BOOTS = 2
"""Of each side; with one there is no telling a layout from a boot."""

UNEQUAL_BELOW = 0.2
"""Variances are taken for unequal where chance explains their ratio less often than this."""

_LONGEST = 300.0
"""An interval that reaches further than e^300 says nothing anyway."""

RESOLUTION = 1e-4
"""No figure of this field repeats better; keeps equal medians from claiming certainty."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The ratio of two alternatives, the second over the first.

    low, high: bounds of the ratio at `confidence`. p: how likely a ratio at least this far from 1
    is by chance, uncorrected. freedom: degrees of freedom that the interval rests on.
    """

    ratio: float
    low: float
    high: float
    p: float
    freedom: float
    confidence: float


def interval(first: Series, second: Series, confidence: float = CONFIDENCE) -> Interval | None:
    """The ratio with its interval; None where there are too few boots to give one."""
    if not (first.replicated and second.replicated):
        return None
    if min(len(first.medians), len(second.medians)) < LEAST_BOOTS:
        return None
    logs = [math.log(median) for median in first.medians]
    others = [math.log(median) for median in second.medians]
    difference = math.fsum(others) / len(others) - math.fsum(logs) / len(logs)
    variances = (_variance(logs, first), _variance(others, second))
    error, freedom = _standard_error(variances, (len(logs), len(others)))
    reach = t_quantile(confidence, freedom) * error
    return Interval(
        math.exp(difference),
        math.exp(max(difference - reach, -_LONGEST)),
        math.exp(min(difference + reach, _LONGEST)),
        two_sided_p(difference / error, freedom),
        freedom,
        confidence,
    )


def _variance(logs: Sequence[float], series: Series) -> float:
    """Variance of the boots' medians, never below what the samples within boots already explain."""
    return max(sample_variance(logs), series.inner_variance, RESOLUTION**2)


def _standard_error(variances: tuple[float, float], counts: tuple[int, int]) -> tuple[float, float]:
    """Standard error of the difference, and its degrees of freedom.

    Pooled (Student) while the variances could be equal, else apart (Welch): an unpinned guest can
    vary ten times as much between boots as a pinned one, and pooling would then find differences
    that are none.
    """
    (a, b), (m, n) = variances, counts
    if _could_be_equal(variances, counts):
        freedom = float(m + n - 2)
        pooled = ((m - 1) * a + (n - 1) * b) / freedom
        return math.sqrt(pooled * (1 / m + 1 / n)), freedom
    apart = a / m + b / n
    return math.sqrt(apart), apart**2 / ((a / m) ** 2 / (m - 1) + (b / n) ** 2 / (n - 1))


def _could_be_equal(variances: tuple[float, float], counts: tuple[int, int]) -> bool:
    large, small = (0, 1) if variances[0] >= variances[1] else (1, 0)
    ratio = variances[large] / variances[small]
    return 2 * f_upper_p(ratio, counts[large] - 1, counts[small] - 1) > UNEQUAL_BELOW


def holm(ps: Sequence[float]) -> tuple[float, ...]:
    """The p values corrected for being several (Holm), in the same order.

    >>> holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)
    """
    adjusted = [0.0] * len(ps)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        least = max(least, min(1.0, ps[place] * (len(ps) - rank)))
        adjusted[place] = least
    return tuple(adjusted)
