"""Correction of p values for several primary metrics of one objective.

The p values hold over all pairs of alternatives. Of two metrics an alternative must differ on both
together (F) before it may differ on one (closed testing); of more: Bonferroni. Why, and the error
rates: docs/developer/statistics.md.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from homenode.decide.distributions import f_upper_p
from homenode.decide.intervals import Interval

ALIKE_FROM = 0.15
"""Two metrics' errors are pooled where chance explains their ratio at least this often."""

UNLIKE_SIDES = 1.5
"""Power of the part of the freedom that Satterthwaite leaves, which counts once more: the freedom
is estimated as well, and of two metrics that vary together twice from the same boots."""

LESS_FREEDOM = 0.75
"""What is left of the freedom where they are not: the mean of two squares of t has longer tails."""


class MetricTest(NamedTuple):
    """One primary metric of an alternative against the baseline."""

    alternative: str
    metric: str
    interval: Interval
    boots: int  # of both


def adjust_p_values(tested: Sequence[MetricTest], pairs: int) -> tuple[float, ...]:
    """Adjusted p values in the same order; of one objective. pairs: of alternatives."""
    by_alternative: dict[str, list[int]] = {}
    for place, test in enumerate(tested):
        by_alternative.setdefault(test.alternative, []).append(place)
    metrics = {test.metric for test in tested}
    if len(metrics) != 2 or any(len(places) > 2 for places in by_alternative.values()):
        return tuple(min(1.0, test.interval.p * len(metrics)) for test in tested)
    adjusted = [1.0] * len(tested)
    for places in by_alternative.values():
        together = min(1.0, _together([tested[place] for place in places]) * pairs)
        for place in places:
            adjusted[place] = max(together, tested[place].interval.p)
    return tuple(adjusted)


def _together(tested: Sequence[MetricTest]) -> float:
    """Return how likely differences this large on all of them are by chance (F). If one side varies
    more than the other, less of the freedom counts than Satterthwaite's."""
    intervals = [test.interval for test in tested]
    if len(intervals) == 1:
        return intervals[0].p
    logs = [math.log(interval.ratio) for interval in intervals]
    total = math.fsum(interval.freedom for interval in intervals)
    part = min(1.0, total / math.fsum(test.boots - 2 for test in tested))
    freedom = total * part**UNLIKE_SIDES
    small, *_, large = sorted(intervals, key=lambda one: one.error)
    unlike = 2 * f_upper_p((large.error / small.error) ** 2, large.freedom, small.freedom)
    if unlike >= ALIKE_FROM:
        variance = math.fsum(interval.error**2 * interval.freedom for interval in intervals) / total
        f = math.fsum(log**2 for log in logs) / len(logs) / variance
        return f_upper_p(f, len(logs), freedom)
    squares = [(log / interval.error) ** 2 for log, interval in zip(logs, intervals, strict=True)]
    return f_upper_p(math.fsum(squares) / len(squares), len(squares), freedom * LESS_FREEDOM)


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
