"""Schedule: the order in which variants are measured: interleaved, seeded, in rounds.

Variants are tests, layouts of a VM or bindings of jobs. A round holds each of them once. What
drifts (heat, neighbours) then meets every variant alike, and what one leaves behind meets another
one each round. Controls stand before the first round and after every round, so that a round is
bracketed by them.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from homenode.errors import UsageError, out_of_range

MAX_ROUNDS = 1000

CONTROL_MOVES = 0.03
"""A control that differs by more than this between its two sides of a round marks the round."""


class ScheduledTask(Struct, frozen=True, order=True):
    """One variant in one round."""

    number: int  # the task's place in the schedule, from 0
    round: int  # from 0; a control of round -1 stands before the first
    variant: str
    is_control: bool = False


class Schedule(Struct, frozen=True):
    """What is run, in order. The same variants, rounds and seed give the same schedule."""

    seed: int
    tasks: tuple[ScheduledTask, ...]


def schedule(
    variants: Sequence[str],
    controls: Sequence[str],
    rounds: int,
    seed: int,
    *,
    called: str = "tests",
    option: str = "--repeat",
    limit: int = MAX_ROUNDS,
) -> Schedule:
    """Every variant once in each round, in an order of its own; controls in theirs around it.

    >>> [s.variant for s in schedule(["a", "b"], ["c"], 1, seed=1).tasks].count("c")
    2

    called, option: how the user names variants and rounds. Raises UsageError for a name twice, none
    at all, or rounds out of range.
    """
    names = [*variants, *controls]
    if not names or len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        problem = f"{', '.join(twice)} twice" if twice else "none"
        raise UsageError(f"{called}: expected one or more, each once, found {problem}")
    if not 1 <= rounds <= limit:
        raise out_of_range(option, str(rounds), 1, limit)
    order: list[tuple[int, str, bool]] = [(-1, name, True) for name in controls]
    for number in range(rounds):
        order += [(number, name, False) for name in seeded_order(variants, seed, number)]
        order += [(number, name, True) for name in controls]
    return Schedule(seed, tuple(ScheduledTask(at, *task) for at, task in enumerate(order)))


def seeded_order(names: Iterable[str], seed: int, round: int) -> tuple[str, ...]:
    """The names in an order that depends on nothing but them, the seed and the round.

    The same on every machine and Python: a schedule can be computed again to resume it.
    """
    return tuple(
        sorted(names, key=lambda n: hashlib.sha256(f"{seed}\0{round}\0{n}".encode()).digest())
    )


def left_of(schedule: Schedule, done: Collection[tuple[int, str]]) -> tuple[ScheduledTask, ...]:
    """What a run that was cut short has still to do. done: (round, variant) of what is measured."""
    scheduled = {(task.round, task.variant) for task in schedule.tasks}
    foreign = sorted(set(done) - scheduled)
    if foreign:
        raise UsageError(
            f"--resume: expected a run of this schedule, found {foreign[0][1]} "
            f"of round {foreign[0][0]}",
            hint="give the same --tests, --repeat and --seed, or start a new run",
        )
    return tuple(task for task in schedule.tasks if (task.round, task.variant) not in done)


def moved_rounds(
    schedule: Schedule, values: dict[tuple[int, str], float]
) -> tuple[tuple[int, str, float], ...]:
    """Rounds whose controls moved: (round, control, ratio after to before).

    values: median of each control by (round, test). A round without both sides is not judged.
    """
    moves = []
    controls = dict.fromkeys(task.variant for task in schedule.tasks if task.is_control)
    rounds = dict.fromkeys(task.round for task in schedule.tasks if task.round >= 0)
    for number in rounds:
        for control in controls:
            before, after = values.get((number - 1, control)), values.get((number, control))
            if before is None or after is None or before <= 0 or after <= 0:
                continue
            ratio = after / before
            if max(ratio, 1 / ratio) > 1 + CONTROL_MOVES:
                moves.append((number, control, ratio))
    return tuple(moves)
