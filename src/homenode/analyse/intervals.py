"""Intervals: how far two alternatives are apart, by what their boots tell.

The boot is the unit of replication: a boot's samples are condensed to their median, and the medians
are compared on the logarithmic scale by a t-interval. Why this and not a bootstrap, and the error
rates it holds, are in docs/decisions/0003-intervals.md.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from homenode.analyse.student import f_upper_p, t_quantile, two_sided_p
from homenode.analyse.summary import Series, sample_variance

CONFIDENCE = 0.95
LEAST_BOOTS = 2
"""Of each side; with one there is no telling a layout from a boot."""

UNEQUAL_BELOW = 0.03
"""Variances are taken for unequal where chance explains their ratio less often than this."""

UNEQUAL_BELOW_OF_TWO = 0.20
"""Likewise of two alternatives alone: so few boots seldom show that one side varies more."""

CLEARLY_MORE = 2.2
"""Of several that are taken for equal, one with this many times the pooled variance keeps its own:
F tests of three boots miss most that vary five times as much."""

_LONGEST = 300.0
"""An interval that reaches further than e^300 says nothing anyway."""

RESOLUTION = 1e-4
"""No figure of this field repeats better; keeps equal medians from claiming certainty."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The ratio of two alternatives, the second over the first.

    low, high: bounds of the ratio at `confidence`. p: how likely a ratio at least this far from 1
    is by chance, uncorrected. error: standard error of the ratio's logarithm. freedom: degrees of
    freedom that it rests on.
    """

    ratio: float
    low: float
    high: float
    p: float
    error: float
    freedom: float
    confidence: float


def interval(
    first: Series,
    second: Series,
    confidence: float = CONFIDENCE,
    *,
    beside: Sequence[Series] = (),
) -> Interval | None:
    """The ratio with its interval; None where there are too few boots to give one.

    beside: the same series of the other alternatives. They say nothing of the ratio, but how much
    boots vary, where they vary alike: with several alternatives three boots of each are enough.
    """
    if not (first.replicated and second.replicated):
        return None
    if min(len(first.medians), len(second.medians)) < LEAST_BOOTS:
        return None
    own = [_own(series) for series in (first, second, *_usable(beside))]
    variance_of = _variances(tuple(sorted(own)))
    one, other = variance_of[own[0]], variance_of[own[1]]
    difference = _mean_log(second) - _mean_log(first)
    error, freedom = _standard_error((one, other), (len(first.medians), len(second.medians)))
    reach = t_quantile(confidence, freedom) * error
    return Interval(
        math.exp(difference),
        math.exp(max(difference - reach, -_LONGEST)),
        math.exp(min(difference + reach, _LONGEST)),
        two_sided_p(difference / error, freedom),
        error,
        freedom,
        confidence,
    )


class _Variance(NamedTuple):
    """Of an alternative's boots. freedom: degrees of freedom it rests on. pooled: with others."""

    value: float
    freedom: float
    pooled: bool


def _usable(beside: Iterable[Series]) -> list[Series]:
    return [one for one in beside if one.replicated and len(one.medians) >= LEAST_BOOTS]


def _mean_log(series: Series) -> float:
    return math.fsum(map(math.log, series.medians)) / len(series.medians)


def _own(series: Series) -> _Variance:
    """Variance of the boots' medians, never below what the samples within boots already explain."""
    logs = [math.log(median) for median in series.medians]
    value = max(sample_variance(logs), series.inner_variance, RESOLUTION**2)
    return _Variance(value, len(logs) - 1.0, False)


@lru_cache(maxsize=256)
def _variances(own: tuple[_Variance, ...]) -> dict[_Variance, _Variance]:
    """What to take for each one's own variance: one for all that could vary alike, and its own for
    any that does not. Kept, as each of several alternatives asks for the same ones.

    An unpinned guest can vary ten times as much between boots as a pinned one, and pooling it would
    find differences that are none. The one that fits the others least is put apart, until the rest
    could be equal (F tests, corrected for their number).
    """
    alike = list(range(len(own)))
    while len(alike) > 1:
        fits = {place: _fit(own[place], [own[i] for i in alike if i != place]) for place in alike}
        level = UNEQUAL_BELOW if len(alike) > 2 else UNEQUAL_BELOW_OF_TWO
        worst = min(alike, key=lambda place: fits[place])
        if fits[worst] * len(alike) / 2 >= level:
            break
        alike = [] if len(alike) == 2 else [place for place in alike if place != worst]
    found = dict(zip(own, own, strict=True))
    if alike:
        together = _pooled([own[place] for place in alike])
        found |= {own[i]: _lent(own[i], together, several=len(alike) > 2) for i in alike}
    return found


def _lent(own: _Variance, together: _Variance, *, several: bool) -> _Variance:
    """The variance of those that are alike; its own where that is clearly more."""
    if several and own.value > CLEARLY_MORE * together.value:
        return together._replace(value=own.value)
    return together


def _pooled(variances: Sequence[_Variance]) -> _Variance:
    freedom = math.fsum(one.freedom for one in variances)
    return _Variance(math.fsum(one.value * one.freedom for one in variances) / freedom, freedom,
                     True)  # fmt: skip


def _fit(one: _Variance, others: Sequence[_Variance]) -> float:
    """How likely variances at least this far apart are by chance."""
    large, small = sorted((one, _pooled(others)), key=lambda part: -part.value)
    return min(1.0, 2 * f_upper_p(large.value / small.value, large.freedom, small.freedom))


def _standard_error(
    variances: tuple[_Variance, _Variance], counts: tuple[int, int]
) -> tuple[float, float]:
    """Standard error of the difference, and its degrees of freedom: Student's where both sides'
    rest on the pooled ones, else Welch's."""
    (a, b), (m, n) = variances, counts
    one, other = a.value / m, b.value / n
    apart = one + other
    if a.pooled and b.pooled:
        return math.sqrt(apart), a.freedom
    return math.sqrt(apart), apart**2 / (one**2 / a.freedom + other**2 / b.freedom)
