"""Outcomes: what each effect comes to, once its p value is corrected for those next to it."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from homenode.decide.comparison import (
    WEAKENING,
    Effect,
    EvidenceLevel,
    Outcome,
)
from homenode.decide.correction import MetricTest, adjust_p_values
from homenode.decide.intervals import CONFIDENCE, Interval
from homenode.metrics import Metric, metric_of
from homenode.objective import Objective


class UnjudgedEffect(NamedTuple):
    """An effect that no one has judged yet, with what its interval rests on."""

    effect: Effect
    interval: Interval | None
    # the ratio above 1 by which the two boots that are nearest to each other differ, one of each
    # side; below 1 where boots of the two overlap
    apart: float
    # the same of the slowest device over the faster half of its own boot, over what chance adds
    # there, above 1 where the alternative is better, and below where it is worse; 1 where that
    # cannot be told
    within: float = 1.0


def metric_of_effect(effect: Effect) -> Metric:
    """The metric of an effect; effects are only made of metrics that are known."""
    metric = metric_of(effect.metric)
    assert metric is not None
    return metric


def is_large(effect: Effect) -> bool:
    """Whether an effect is as large as one that an operator would change a layout for."""
    return 1 - min(effect.gain, 1 / effect.gain) >= metric_of_effect(effect).matters


def judge_effects(candidates: Sequence[UnjudgedEffect]) -> Iterator[Effect]:
    """Effects with corrected p values and outcomes; primary ones are corrected by objective."""
    alternatives = 1 + len({candidate.effect.alternative for candidate in candidates})
    families: dict[Objective | None, dict[int, MetricTest]] = {}
    for place, (effect, interval, *_) in enumerate(candidates):
        if effect.primary and interval is not None:
            metric = metric_of_effect(effect)
            family = (*metric.primary, *metric.stands_in, None)[0]
            tested = MetricTest(effect.alternative, effect.metric, interval, sum(effect.boots))
            families.setdefault(family, {})[place] = tested
    adjusted: dict[int, float] = {}
    for family_found in families.values():
        adjusted.update(
            zip(
                family_found,
                adjust_p_values(tuple(family_found.values()), math.comb(alternatives, 2)),
                strict=True,
            )
        )
    for place, candidate in enumerate(candidates):
        p = adjusted.get(place)
        effect = structs.replace(candidate.effect, p_adjusted=p)
        outcome = _outcome(effect, effect.p if p is None else p, candidate)
        yield structs.replace(effect, outcome=outcome, level=_level(effect))


def _outcome(effect: Effect, p: float | None, candidate: UnjudgedEffect) -> Outcome:
    if set(effect.doubts) - WEAKENING:
        return Outcome.CANNOT_TELL
    direction = Outcome.BETTER if effect.gain > 1 else Outcome.WORSE
    if effect.doubts:
        is_within = candidate.within > 1 if direction is Outcome.BETTER else candidate.within < 1
        is_apart = candidate.apart >= metric_of_effect(effect).boot_variation
        return direction if is_apart or is_within else Outcome.CANNOT_TELL
    if p is None or effect.low is None or effect.high is None:
        return Outcome.CANNOT_TELL
    if p < 1 - CONFIDENCE:
        return direction
    space = 1 + metric_of_effect(effect).matters
    if 1 / space < effect.low and effect.high < space:
        return Outcome.NO_DIFFERENCE
    return Outcome.CANNOT_TELL


def _level(effect: Effect) -> EvidenceLevel:
    return EvidenceLevel.PROVISIONAL if WEAKENING & set(effect.doubts) else EvidenceLevel.MEASURED
