"""Sequence: rounds of an experiment, ordered one by one after a look at those before. [I/O]

A round is a block, as in every schedule: what is still in question once, in a random order. After
each round somebody looks at the figures, says what stays in question and whether it is decided.
The look is written down before what follows from it, so that a sequence that was killed goes on
with the same decisions. What is looked at, and at which error, is docs/decisions/0023.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from homenode.measure.experiment import AT_ONCE, Executor, Patience, run_tasks
from homenode.measure.progress import Progress, TaskState, TaskStatus
from homenode.measure.schedule import ScheduledTask, seeded_order

MOST_ROUNDS = 8
"""Unless somebody says otherwise."""

LEAST_VARIANTS = 2
"""To compare."""


class SequenceEnd(StrEnum):
    """Why no further round was begun."""

    DECIDED = "decided"  # every variant is shown to be worse, or as good as the best
    TIME_UP = "time-up"  # a further round would have ended after the time that was given
    MOST_ROUNDS = "most-rounds"  # the looks between which the error is shared out are used up
    STOPPED = "stopped"  # no figure would mean anything: an emulated guest, a sick link, a mark
    NOTHING_LEFT = "nothing-left"  # fewer than two variants that could be measured


class RoundLook(Struct, frozen=True, kw_only=True):
    """What was decided after so many rounds. kept: what the next round has, in the first round's
    order. seconds: that the sequence had taken by then."""

    rounds: int
    kept: tuple[str, ...]
    ended: SequenceEnd | None = None
    seconds: float = 0.0


Decide = Callable[[tuple[str, ...]], tuple[tuple[str, ...], SequenceEnd | None]]
"""Of what the last round had: what stays in question, and why the sequence ends."""


class SequentialExecutor(Executor, Protocol):
    """An executor whose schedule grows by a round with each look: see sequential_tasks."""

    def variants(self) -> tuple[str, ...]:
        """Those of the first round, once its tasks are known."""

    def place_of(self, task: TaskStatus) -> tuple[int, str]:
        """Its round and variant. A round may have several tasks of one, on several machines."""

    def looks(self) -> Sequence[RoundLook]:
        """Those that are written down."""

    def add_look(self, look: RoundLook) -> None:
        """Write one down; it is on the disk when this returns."""


def sequential_tasks(
    variants: Sequence[str], seed: int, looks: Sequence[RoundLook]
) -> tuple[ScheduledTask, ...]:
    """The first round, and one more for each look that did not end the sequence.

    >>> looks = (RoundLook(rounds=1, kept=("a", "b")), RoundLook(rounds=2, kept=("b",)))
    >>> [(one.round, one.variant) for one in sequential_tasks("abc", 1, looks)][-3:]
    [(1, 'a'), (1, 'b'), (2, 'b')]
    """
    rounds = [tuple(variants), *(look.kept for look in latest(looks) if look.ended is None)]
    order = [
        (number, name)
        for number, names in enumerate(rounds)
        for name in seeded_order(names, seed, number)
    ]
    return tuple(ScheduledTask(at, number, name) for at, (number, name) in enumerate(order))


def latest(looks: Sequence[RoundLook]) -> tuple[RoundLook, ...]:
    """The last look after each round: more time may have been given since an earlier one."""
    return tuple({look.rounds: look for look in looks}.values())


def run_sequence(
    executor: SequentialExecutor,
    decide: Decide,
    on_progress: Callable[[Progress], None],
    *,
    rounds: int = MOST_ROUNDS,
    within_s: float | None = None,
    patience: Patience = AT_ONCE,
    clock: Callable[[], float] = time.monotonic,
) -> RoundLook | None:
    """Run rounds until it is decided, the time is up, or there were as many as there may be.

    within_s: of all calls together; a round is begun where one like the last would end by then.
    None = as long as it takes. A task that fails is tried once more; a variant of which all tasks
    of a round fail again is left out of the rounds that follow. A sequence that ended as its time
    was up goes on where there is more now. Returns the last look, with no end where patience ended
    before: None where it did in the first round. Raises what run_tasks does.
    """
    looks = latest(executor.looks())
    if looks and looks[-1].ended is SequenceEnd.NOTHING_LEFT:
        looks = looks[:-1]  # its round is tried again
    if looks and looks[-1].ended is SequenceEnd.TIME_UP:
        more = replace(looks[-1], ended=None)
        more = _in_time(more, more.seconds / more.rounds, within_s)
        if more.ended is None:
            executor.add_look(more)
            looks = (*looks[:-1], more)
    while not (looks and looks[-1].ended is not None):
        before_s, begun = (looks[-1].seconds if looks else 0.0), clock()
        failed = _run_round(executor, len(looks), on_progress, patience)
        if failed is None:
            break
        kept, took_s = looks[-1].kept if looks else executor.variants(), clock() - begun
        look = RoundLook(
            rounds=len(looks) + 1,
            kept=tuple(name for name in kept if name not in failed),
            seconds=before_s + took_s,
        )
        if len(look.kept) < LEAST_VARIANTS:
            look = replace(look, ended=SequenceEnd.NOTHING_LEFT)
        else:
            found, ended = decide(look.kept)
            if ended is None and look.rounds >= rounds:
                ended = SequenceEnd.MOST_ROUNDS
            look = replace(look, kept=found, ended=ended)
        look = _in_time(look, took_s * len(look.kept) / max(1, len(kept)), within_s)
        executor.add_look(look)
        looks = (*looks, look)
    return looks[-1] if looks else None


def _in_time(look: RoundLook, round_s: float, within_s: float | None) -> RoundLook:
    """The look, ended where the next round would not be over in time."""
    if look.ended is None and within_s is not None and look.seconds + round_s > within_s:
        return replace(look, ended=SequenceEnd.TIME_UP)
    return look


def _run_round(
    executor: SequentialExecutor,
    number: int,
    on_progress: Callable[[Progress], None],
    patience: Patience,
) -> frozenset[str] | None:
    """The variants of which nothing could be measured in the latest round; None where patience
    ended before its tasks did."""

    def missing(progress: Progress) -> list[TaskStatus]:
        return [task for task in progress.missing() if executor.place_of(task)[0] == number]

    progress = run_tasks(executor, on_progress, patience)
    if progress.is_settled and (failed := missing(progress)):
        executor.again(failed)
        progress = run_tasks(executor, on_progress, patience)
    if not progress.is_settled:
        return None
    done = {executor.place_of(task) for task in progress.tasks if task.state is TaskState.DONE}
    left = {executor.place_of(task) for task in missing(progress)} - done
    return frozenset(variant for _, variant in left)
