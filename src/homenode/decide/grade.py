"""Grade: one word for a machine, from its verdicts: can it be run as it is, and as what."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from homenode.decide.recommendation import ReasonId, Recommendation
from homenode.decide.sentences import sentence_of


class Grade(StrEnum):
    """How a machine stands, the best first."""

    GOOD = "good"  # one layout is best, or no worse, for everything that figures decide
    DEPENDS = "depends"  # decided, but objectives want different layouts
    REVIEW = "review"  # its pins are to be looked at first
    UNKNOWN = "cannot tell"  # no figure decides
    NOT_READY = "not ready"  # something is to be repaired first


class Graded(Struct, frozen=True):
    """A machine's grade and the reason in one sentence."""

    grade: Grade
    reason: str


def grade_of(verdicts: Sequence[Recommendation]) -> Graded:
    """The grade of one machine's verdicts.

    >>> grade_of(())
    Graded(grade=<Grade.UNKNOWN: 'cannot tell'>, reason='no figure decides for any objective')
    """
    for reason, grade in (
        (ReasonId.HEALTH, Grade.NOT_READY),
        (ReasonId.UNUSABLE, Grade.NOT_READY),
    ):
        for one in verdicts:
            if one.why(reason) is not None:
                return Graded(grade, sentence_of(one))
    decided = [one for one in verdicts if one.choice is not None and one.tells]
    for one in verdicts:
        regressed = one.why(ReasonId.PIN_REGRESSION)
        if regressed is not None:
            label, ratio = regressed.alternative, regressed.ratio or 1.0
            return Graded(
                Grade.REVIEW, f"check the pinning of {label}: {ratio:.2f} x the unpinned throughput"
            )
    if not decided:
        refused = [one for one in verdicts if one.why(ReasonId.REFUSED) is not None]
        undecided = [one for one in verdicts if one.choice is None]
        grade = Grade.NOT_READY if refused else Grade.UNKNOWN
        shown = (*refused, *undecided)
        stated = sentence_of(shown[0]) if shown else "no figure decides for any objective"
        return Graded(grade, stated)
    serving = _serving_all(decided)
    if serving is not None:
        best = [one.objective for one in decided if one.choice == serving and not one.also]
        equal = [one.objective for one in decided if one.objective not in best]
        said = [f"is best for {', '.join(best)}"] if best else []
        said += [f"is no worse for {', '.join(equal)}"] if equal else []
        return Graded(Grade.GOOD, f"{serving} {'; '.join(said)}")
    wanted: dict[str, list[str]] = {}
    for one in decided:
        wanted.setdefault(one.choice or "", []).append(one.objective)
    stated = "; ".join(f"{choice} for {', '.join(uses)}" for choice, uses in wanted.items())
    return Graded(Grade.DEPENDS, stated)


def _serving_all(decided: Sequence[Recommendation]) -> str | None:
    """The alternative that is the choice, or no worse, for every objective; the most chosen one."""
    common = set.intersection(*({one.choice or "", *one.also} for one in decided))
    chosen = [one.choice for one in decided]
    return max(sorted(common), key=chosen.count, default=None)
