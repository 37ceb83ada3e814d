"""Grade: one word for a system, from its verdicts: can it be run as it is, and as what."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from homenode.analyse.verdict import Verdict


class Grade(StrEnum):
    """How a system stands, the best first."""

    GOOD = "good"  # one layout serves every objective that was decided
    DEPENDS = "depends"  # decided, but objectives want different layouts
    REVIEW = "review"  # something about its pins or its figures is to be looked at first
    UNKNOWN = "cannot tell"  # no objective could be decided
    NOT_READY = "not ready"  # its figures are excluded until something is repaired


@dataclass(frozen=True, slots=True)
class Graded:
    """A system's grade and the reason in one sentence."""

    grade: Grade
    reason: str


def grade_of(verdicts: Sequence[Verdict]) -> Graded:
    """The grade of one system's verdicts.

    >>> grade_of(())
    Graded(grade=<Grade.UNKNOWN: 'cannot tell'>, reason='no figure decides for any objective')
    """
    if not verdicts:
        return Graded(Grade.UNKNOWN, "no figure decides for any objective")
    excluded = [one for one in verdicts if one.statement.startswith("excluded")]
    if excluded:
        made_up = any(doubt.id == "no-real-machine" for doubt in excluded[0].doubts)
        reason = excluded[0].statement.removeprefix("excluded: ")
        return Graded(Grade.UNKNOWN if made_up else Grade.NOT_READY, reason)
    decided = [one for one in verdicts if one.choice is not None]
    review = [doubt for one in verdicts for doubt in one.doubts if doubt.id == "pin-regression"]
    if review:
        first = review[0]
        return Graded(Grade.REVIEW, f"review the pins of {first.subject}: {first.detail}")
    if not decided:
        return Graded(Grade.UNKNOWN, verdicts[0].statement)
    serving = _serving_all(decided)
    if serving is not None:
        told = ", ".join(one.objective for one in decided)
        return Graded(Grade.GOOD, f"{serving} serves {told}")
    wanted: dict[str, list[str]] = {}
    for one in decided:
        wanted.setdefault(one.choice or "", []).append(one.objective)
    told = "; ".join(f"{choice} for {', '.join(uses)}" for choice, uses in wanted.items())
    return Graded(Grade.DEPENDS, told)


def _serving_all(decided: Sequence[Verdict]) -> str | None:
    """The alternative that is the choice, or no worse, for every objective; the most chosen one."""
    common = set.intersection(*({one.choice or "", *one.also} for one in decided))
    chosen = [one.choice for one in decided]
    return max(sorted(common), key=chosen.count, default=None)
