"""Comparison: effects with intervals, or "cannot tell", and every caveat with its fix.

P values hold over all pairs of alternatives, and are corrected for several primary metrics of one
objective. Of two metrics an alternative must differ on both together (F) before it may differ on
one (closed testing); of more: Bonferroni. Why, and the error rates: docs/developer/statistics.md.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, toml
from msgspec.structs import replace

from homenode.decide.distributions import f_upper_p
from homenode.decide.intervals import CONFIDENCE, Interval
from homenode.findings import Caveat, Gap
from homenode.measure.results.model import SeriesId, SweepFit
from homenode.metrics import Metric, find_metric
from homenode.objective import Objective
from homenode.package_data import read_package_text


class Outcome(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no-difference"  # none that matters: the whole interval is within what does not
    CANNOT_TELL = "cannot-tell"


class EvidenceLevel(StrEnum):
    """Strength of the evidence for an answer, strongest first."""

    MEASURED = "measured"  # intervals over three boots or more of each
    NO_DIFFERENCE = "no-difference"  # the same, and they exclude a difference that matters
    PROVISIONAL = "provisional"  # fewer boots, printed values, or an order that drift can explain:
    # only if the difference is far larger than between boots of one layout
    RULE = "rule"  # of plan/auto: results show neither a difference nor equality

    @property
    def rank(self) -> int:
        """0 for the strongest."""
        return list(EvidenceLevel).index(self)


FEW_BOOTS, PRINTED, ORDER, NO_ORDER, STATES = (
    "few-boots",
    "published-results",
    "blocked-order",
    "unknown-order",
    "boots-apart",
)
WEAKENING = frozenset({FEW_BOOTS, PRINTED, ORDER, NO_ORDER})
"""Caveats that leave no interval to trust, but differences far beyond any between boots."""

SLOW_IN_ONE, NODELESS = "slow-in-one-layout", "gpus-without-node"


class CaveatTexts(Struct, frozen=True, forbid_unknown_fields=True):
    """Default texts of the caveats with an id."""

    blocks: bool
    cause: str = ""
    fix: str = ""


_TEXTS = toml.decode(read_package_text("decide", "caveats.toml"), type=dict[str, CaveatTexts])


def make_caveat(
    id: str,
    subject: str,
    detail: str,
    *,
    blocks: bool | None = None,
    cause: str | None = None,
    fix: str | None = None,
) -> Caveat:
    """Return a caveat with the texts of its id, except the given ones."""
    texts = _TEXTS.get(id) or CaveatTexts(blocks=False)
    return Caveat(
        id=id,
        subject=subject,
        detail=detail,
        blocks=texts.blocks if blocks is None else blocks,
        cause=texts.cause if cause is None else cause,
        fix=texts.fix if fix is None else fix,
    )


def join_subjects(caveats: Iterable[Caveat]) -> tuple[Caveat, ...]:
    """Join equal caveats on several subjects into one."""
    subjects: dict[Caveat, dict[str, None]] = {}
    for caveat in caveats:
        subjects.setdefault(replace(caveat, subject=""), {})[caveat.subject] = None
    return tuple(replace(caveat, subject="; ".join(names)) for caveat, names in subjects.items())


class Effect(SeriesId, frozen=True, kw_only=True, gc=False):
    """One series of one alternative against the same series of the baseline."""

    slowest_device: bool  # the slowest of several devices, boot by boot
    lower_is_better: bool
    primary: bool  # the metric decides for the objective; if False, it is exploratory
    baseline: str
    alternative: str
    baseline_value: float  # geometric means of boot medians
    value: float  # geometric means of boot medians
    ratio: float  # value over baseline_value
    low: float | None  # its interval, None without one
    high: float | None  # its interval, None without one
    # p, p_adjusted: uncorrected, and corrected for the primary metrics; None without interval,
    # p_adjusted also for exploratory metrics
    p: float | None
    p_adjusted: float | None
    boots: tuple[int, int]  # (baseline, other)
    samples: tuple[int, int]  # (baseline, other)
    level: EvidenceLevel
    outcome: Outcome
    caveats: tuple[str, ...]  # ids of effects that block this effect
    system: str = ""  # the machine, where several were compared, each with itself; else ""

    @property
    def gain(self) -> float:
        """The gain of the alternative, a ratio above 1 if it is better, whatever the metric's
        direction."""
        return 1 / self.ratio if self.lower_is_better else self.ratio


class Comparison(Struct, frozen=True, kw_only=True):
    """The `comparison` format."""

    # whose primary metrics decide; None = those of every objective, each for itself
    objective: str | None
    bare: bool  # the baseline is the host itself, and ratios are parts of bare metal
    confidence: float  # confidence level of every interval
    baseline: str  # label of the first machine; effects name the others
    alternatives: tuple[str, ...]  # labels of the first machine; effects name those of others
    effects: tuple[Effect, ...]
    caveats: tuple[Caveat, ...]
    skipped: tuple[Gap, ...] = ()  # directories that were omitted
    power: Mapping[str, Mapping[str, float]] = {}  # median watts of a GPU, by alternative and test
    # of rates over sizes, by alternative and metric
    sweeps: Mapping[str, Mapping[str, SweepFit]] = {}


class UnjudgedEffect(NamedTuple):
    """An effect without an outcome yet, with the data of its interval."""

    effect: Effect
    interval: Interval | None
    # the ratio above 1 by which the two boots that are nearest to each other differ, one of each
    # side; below 1 where boots of the two overlap
    apart: float
    # the ratio for the slowest device over the faster half of its own boot, beyond chance: above 1
    # if the alternative is better, below 1 if worse, 1 if that cannot be told
    within: float = 1.0


def get_effect_metric(effect: Effect) -> Metric:
    """Return the metric of an effect; effects exist only for known metrics."""
    metric = find_metric(effect.metric)
    assert metric is not None
    return metric


def is_large(effect: Effect) -> bool:
    """Return whether an effect is large enough for a change of the layout."""
    return 1 - min(effect.gain, 1 / effect.gain) >= get_effect_metric(effect).matters


def judge_effects(candidates: Sequence[UnjudgedEffect]) -> Iterator[Effect]:
    """Effects with corrected p values and outcomes; primary ones are corrected by objective."""
    alternatives = 1 + len({candidate.effect.alternative for candidate in candidates})
    families: dict[Objective | None, dict[int, MetricTest]] = {}
    for place, (effect, interval, *_) in enumerate(candidates):
        if effect.primary and interval is not None:
            metric = get_effect_metric(effect)
            family = (*metric.primary, *metric.stands_in, None)[0]
            metric_test = MetricTest(effect.alternative, effect.metric, interval, sum(effect.boots))
            families.setdefault(family, {})[place] = metric_test
    adjusted_ps: dict[int, float] = {}
    for tested_at in families.values():
        corrected_ps = adjust_p_values(tuple(tested_at.values()), math.comb(alternatives, 2))
        adjusted_ps.update(zip(tested_at, corrected_ps, strict=True))
    for place, candidate in enumerate(candidates):
        p = adjusted_ps.get(place)
        effect = replace(candidate.effect, p_adjusted=p)
        outcome = _choose_outcome(effect, effect.p if p is None else p, candidate)
        yield replace(effect, outcome=outcome, level=_choose_level(effect))


def _choose_outcome(effect: Effect, p: float | None, candidate: UnjudgedEffect) -> Outcome:
    if set(effect.caveats) - WEAKENING:
        return Outcome.CANNOT_TELL
    direction = Outcome.BETTER if effect.gain > 1 else Outcome.WORSE
    if effect.caveats:
        is_within = candidate.within > 1 if direction is Outcome.BETTER else candidate.within < 1
        is_apart = candidate.apart >= get_effect_metric(effect).boot_variation
        return direction if is_apart or is_within else Outcome.CANNOT_TELL
    if p is None or effect.low is None or effect.high is None:
        return Outcome.CANNOT_TELL
    if p < 1 - CONFIDENCE:
        return direction
    space = 1 + get_effect_metric(effect).matters
    if 1 / space < effect.low and effect.high < space:
        return Outcome.NO_DIFFERENCE
    return Outcome.CANNOT_TELL


def _choose_level(effect: Effect) -> EvidenceLevel:
    return EvidenceLevel.PROVISIONAL if WEAKENING & set(effect.caveats) else EvidenceLevel.MEASURED


ALIKE_FROM = 0.15
"""Two metrics' errors are pooled where chance explains their ratio at least this often."""

UNLIKE_SIDES = 1.5
"""Power of the part of the freedom that Satterthwaite leaves, which counts once more: the freedom
is estimated as well, and of two metrics that vary together twice from the same boots."""

LESS_FREEDOM = 0.75
"""Share of the freedom that remains if not: the mean of two squares of t has longer tails."""


class MetricTest(NamedTuple):
    """One primary metric of an alternative against the baseline."""

    alternative: str
    metric: str
    interval: Interval
    boots: int  # number of boots of both sides


def adjust_p_values(tests: Sequence[MetricTest], pairs: int) -> tuple[float, ...]:
    """Return the adjusted p values in the same order; of one objective. pairs: of alternatives."""
    by_alternative: dict[str, list[int]] = {}
    for place, test in enumerate(tests):
        by_alternative.setdefault(test.alternative, []).append(place)
    metrics = {test.metric for test in tests}
    if len(metrics) != 2 or any(len(places) > 2 for places in by_alternative.values()):
        return tuple(min(1.0, test.interval.p * len(metrics)) for test in tests)
    adjusted_ps = [1.0] * len(tests)
    for places in by_alternative.values():
        joint_p = min(1.0, _compute_joint_p([tests[place] for place in places]) * pairs)
        for place in places:
            adjusted_ps[place] = max(joint_p, tests[place].interval.p)
    return tuple(adjusted_ps)


def _compute_joint_p(tests: Sequence[MetricTest]) -> float:
    """Return the probability of such differences on all metrics by chance (F). If one side varies
    more than the other, fewer degrees of freedom count than Satterthwaite's."""
    intervals = [test.interval for test in tests]
    if len(intervals) == 1:
        return intervals[0].p
    logs = [math.log(interval.ratio) for interval in intervals]
    total = math.fsum(interval.freedom for interval in intervals)
    part = min(1.0, total / math.fsum(test.boots - 2 for test in tests))
    freedom = total * part**UNLIKE_SIDES
    small, *_, large = sorted(intervals, key=lambda one: one.error)
    unlike = 2 * f_upper_p((large.error / small.error) ** 2, large.freedom, small.freedom)
    if unlike >= ALIKE_FROM:
        variance = math.fsum(interval.error**2 * interval.freedom for interval in intervals) / total
        f = math.fsum(log**2 for log in logs) / len(logs) / variance
        return f_upper_p(f, len(logs), freedom)
    squares = [(log / interval.error) ** 2 for log, interval in zip(logs, intervals, strict=True)]
    return f_upper_p(math.fsum(squares) / len(squares), len(squares), freedom * LESS_FREEDOM)


def correct_by_holm(ps: Sequence[float]) -> tuple[float, ...]:
    """Return the p values corrected for their number (Holm), in the same order.

    >>> correct_by_holm([0.01, 0.04, 0.03])
    (0.03, 0.06, 0.06)
    """
    adjusted_ps = [0.0] * len(ps)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        least = max(least, min(1.0, ps[place] * (len(ps) - rank)))
        adjusted_ps[place] = least
    return tuple(adjusted_ps)
