"""Sequential: what is left in question after a round of a sequence, and what it came to.

The answer is that of `recommend` on the same runs; see rounds.py for how looks share the error.
"""

from collections.abc import Sequence

from msgspec import Struct

from homenode.decide.alternative import alternatives
from homenode.decide.ranking import Position
from homenode.decide.rounds import first_look, reached
from homenode.decide.statement import effect_text, sentence_of
from homenode.decide.trial_conclusion import Conclusion
from homenode.decide.verdict import ReasonId, Verdict, verdict
from homenode.measure.layouts.journal import Head, State
from homenode.measure.results.model import Run, SequentialPlan
from homenode.measure.sequence import RoundLook, SequenceEnd
from homenode.objective import Objective
from homenode.wording import command_line, plural

_NOTHING_TO_SEE = (ReasonId.REFUSED, ReasonId.NO_FIGURES, ReasonId.ONE_ALTERNATIVE)

_OPEN = (ReasonId.UNDECIDED, ReasonId.MAY_BE_BETTER)


def look_at(
    runs: Sequence[Run], kept: tuple[str, ...], objective: Objective
) -> tuple[tuple[str, ...], SequenceEnd | None]:
    """What of a round's layouts the next one has, and why there is none; see measure.sequence.

    runs: of all rounds. A layout, or an arrangement of jobs, goes on until it is shown to be worse
    on a metric of the objective, and best on none. It is decided where each of those that are left
    is as good as the best, or shown to be worse on one metric and the best on another.
    """
    every = alternatives(runs)
    found = verdict("", every, objective)
    if found.stopped or any(found.why(reason) is not None for reason in _NOTHING_TO_SEE):
        return kept, SequenceEnd.STOPPED
    plan = next(run.head.sequence for run in runs if run.head.sequence is not None)
    if max(reached(run.head for run in runs).values(), default=0) < first_look(plan):
        return kept, None
    name_of = {one.label: one.arrangement or one.switches.name for one in every}
    at: dict[Position, set[str]] = {position: set() for position in Position}
    for one in found.results:
        at[one.position].add(name_of[one.alternative])
    worse = at[Position.WORSE] - at[Position.BEST]
    left = tuple(name for name in kept if name not in worse)
    open_still = at[Position.UNSHOWN] | at[Position.UNDECIDED] | at[Position.UNKNOWN]
    return left, None if open_still & set(left) else SequenceEnd.DECIDED


class SequentialAnswer(Struct, frozen=True, kw_only=True):
    """What a sequence came to. measured: what it was of, and how many. command: that runs the
    verdict's layout, None where it has none; undo: that takes it back, None where it is of
    arrangements: nothing was changed then. resume: that goes on with the sequence."""

    plan: SequentialPlan
    look: RoundLook
    measured: str
    verdict: Verdict
    resume: str
    command: str | None = None
    undo: str | None = None

    @property
    def sentence(self) -> str:
        """What to run, how sure that is, and how to undo it."""
        rounds = f"{self.measured} in {plural(self.look.rounds, 'round')}"
        objective, chosen = self.verdict.objective, self.verdict.choice
        unchanged = "; the VM is as it was" if self.undo else ""
        if self.undo:
            chosen = self.verdict.layout if self.command else None
        if self.look.ended in (SequenceEnd.STOPPED, SequenceEnd.NOTHING_LEFT):
            few = "fewer than two alternatives could be measured"
            stopped = self.look.ended is SequenceEnd.STOPPED
            why = sentence_of(self.verdict) if stopped else f"{few}: {self.resume} tries again"
            return f"Nothing is decided for {objective}: {why}{unchanged}."
        if chosen is None:
            answer = f"Nothing is shown for {objective} after {rounds}: "
            return f"{answer}{sentence_of(self.verdict)}{unchanged}{self._more}."
        sure = f"wrong by chance in at most {100 * self.plan.error:.2g} % of trials"
        if self.look.ended is not SequenceEnd.DECIDED:
            others = [one.alternative or "" for one in self.verdict.reasons if one.id in _OPEN]
            sure = f"not decided against {', '.join(others)}" if others else "not decided"
        strength = "" if self.verdict.level is None else f"{self.verdict.level}, "
        do = f": {self.command}; {self.undo} takes it back" if self.undo else ""
        effect = effect_text(self.verdict)
        return (
            f"Run {chosen} for {objective}: {effect} ({strength}{sure}; {rounds}){do}{self._more}."
        )

    @property
    def _more(self) -> str:
        more = self.look.ended is SequenceEnd.TIME_UP
        return f"; {self.resume} --within TIME goes on" if more else ""


def sequential_answer(found: Conclusion, head: Head, state: State) -> SequentialAnswer | None:
    """The answer of a trial that was a sequence; None of any other, and of emulated guests."""
    if head.sequence is None or not state.looks or found.emulated:
        return None
    commands = (one.command for one in found.advice if one.objective is head.objective)
    return SequentialAnswer(
        plan=head.sequence,
        look=state.looks[-1],
        measured=plural(len(state.with_figures), "boot"),
        verdict=next(one for one in found.verdicts.verdicts if one.objective is head.objective),
        command=next(commands, None),
        undo=command_line("homenode", "restore", head.argument, "--connect", head.connect),
        resume=command_line("homenode", "trial", "resume", head.id),
    )


def arrangement_answer(
    runs: Sequence[Run], look: RoundLook | None, objective: Objective, called: str, resume: str
) -> SequentialAnswer | None:
    """The answer of a sequence of arrangements: bindings, shapes of jobs; None without a look or a
    run. called: what each run is."""
    plan = next((run.head.sequence for run in runs if run.head.sequence is not None), None)
    if plan is None or look is None:
        return None
    found = verdict("", alternatives(runs), objective)
    count = plural(len(runs), called)
    return SequentialAnswer(plan=plan, look=look, measured=count, verdict=found, resume=resume)
