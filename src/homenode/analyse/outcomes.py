"""Outcomes: what each effect comes to, once its p value is corrected for those beside it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from homenode.analyse.comparison import Effect, Outcome
from homenode.analyse.correction import Tested, corrected
from homenode.analyse.intervals import CONFIDENCE, Interval
from homenode.metrics import Metric, metric_of
from homenode.objective import Objective


class Found(NamedTuple):
    """An effect that nobody has judged yet, with what its interval rests on."""

    effect: Effect
    interval: Interval | None


def metric_of_effect(effect: Effect) -> Metric:
    """The metric of an effect; effects are only made of metrics that are known."""
    metric = metric_of(effect.metric)
    assert metric is not None
    return metric


def is_large(effect: Effect) -> bool:
    """Whether an effect is as large as one that an operator would change a layout for."""
    return 1 - min(effect.gain, 1 / effect.gain) >= metric_of_effect(effect).matters


def judged(found: Sequence[Found]) -> Iterator[Effect]:
    """Effects with corrected p values and outcomes; primary ones are corrected by objective."""
    families: dict[Objective | None, dict[int, Tested]] = {}
    for place, (effect, interval) in enumerate(found):
        if effect.primary and interval is not None:
            metric = metric_of_effect(effect)
            family = (*metric.primary, *metric.stands_in, None)[0]
            tested = Tested(effect.alternative, effect.metric, interval)
            families.setdefault(family, {})[place] = tested
    adjusted: dict[int, float] = {}
    for family_found in families.values():
        adjusted.update(zip(family_found, corrected(tuple(family_found.values())), strict=True))
    for place, (effect, _) in enumerate(found):
        p = adjusted.get(place)
        yield replace(effect, p_adjusted=p, outcome=_outcome(effect, effect.p if p is None else p))


def _outcome(effect: Effect, p: float | None) -> Outcome:
    if effect.doubts or p is None or effect.low is None or effect.high is None:
        return Outcome.CANNOT_TELL
    if p < 1 - CONFIDENCE:
        return Outcome.BETTER if effect.gain > 1 else Outcome.WORSE
    room = 1 + metric_of_effect(effect).matters
    if 1 / room < effect.low and effect.high < room:
        return Outcome.NO_DIFFERENCE
    return Outcome.CANNOT_TELL
