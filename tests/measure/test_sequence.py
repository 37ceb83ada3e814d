"""A sequence of rounds on any executor: what it begins, leaves out, ends with, and goes on from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from homenode.measure.progress import Progress, TaskState, TaskStatus
from homenode.measure.sequence import (
    Decide,
    RoundLook,
    SequenceEnd,
    latest,
    run_sequence,
    sequential_tasks,
)

LAYOUTS = ("default", "pin", "pin-numa")


@dataclass
class Queue:
    """An executor that takes all that waits at once, as a queue does; a task is over when it is
    looked at again. fails: names of tasks that end badly, as often as they stand there. killed:
    begin no more tasks after so many. at_s: a clock, which a task moves on by ten seconds."""

    names: tuple[str, ...] = LAYOUTS
    fails: list[str] = field(default_factory=list)
    killed: int | None = None
    states: dict[str, TaskState] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    written: list[RoundLook] = field(default_factory=list)
    at_s: float = 0.0

    def _name(self, number: int) -> str:
        task = sequential_tasks(self.names, 1, self.written)[number]
        return f"{task.variant} {task.round}"

    def look(self) -> Progress:
        for one, state in self.states.items():
            if state is TaskState.RUNNING:
                failed = self._name(int(one)) in self.fails
                if failed:
                    self.fails.remove(self._name(int(one)))
                self.states[one] = TaskState.FAILED if failed else TaskState.DONE
        tasks = sequential_tasks(self.names, 1, self.written)
        waiting = TaskState.WAITING
        return Progress(
            tuple(
                TaskStatus(f"{o.number}", 0, self.states.get(f"{o.number}", waiting)) for o in tasks
            )
        )

    def again(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks:
            del self.states[task.id]

    def begin(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks:
            if self.killed is not None and len(self.begun) >= self.killed:
                raise KeyboardInterrupt
            self.begun.append(self._name(int(task.id)))
            self.states[task.id] = TaskState.RUNNING
            self.at_s += 10.0

    def variants(self) -> tuple[str, ...]:
        return self.names

    def place_of(self, task: TaskStatus) -> tuple[int, str]:
        variant, number = self._name(int(task.id)).split()
        return int(number), variant

    def looks(self) -> Sequence[RoundLook]:
        return self.written

    def add_look(self, look: RoundLook) -> None:
        self.written.append(look)


def out(rounds: int, *names: str) -> Decide:
    """Leaves the names out after so many rounds, and has decided where one is left."""
    asked = 0

    def decide(kept: tuple[str, ...]) -> tuple[tuple[str, ...], SequenceEnd | None]:
        nonlocal asked
        asked += 1
        left = tuple(name for name in kept if asked < rounds or name not in names)
        return left, SequenceEnd.DECIDED if len(left) == 1 else None

    return decide


def never(kept: tuple[str, ...]) -> tuple[tuple[str, ...], SequenceEnd | None]:
    return kept, None


def run(place: Queue, decide: Decide, rounds: int = 8, within_s: float | None = None) -> RoundLook:
    found = run_sequence(
        place,
        decide,
        lambda progress: None,
        rounds=rounds,
        within_s=within_s,
        clock=lambda: place.at_s,
    )
    assert found is not None
    return found


def test_rounds_have_what_is_in_question_and_end_when_it_is_decided() -> None:
    place = Queue()
    ended = run(place, out(2, "default", "pin"))
    assert (ended.ended, ended.rounds, ended.kept) == (SequenceEnd.DECIDED, 2, ("pin-numa",))
    assert sorted(place.begun) == sorted(f"{name} {n}" for name in LAYOUTS for n in (0, 1))


def test_what_is_left_out_is_begun_no_more() -> None:
    place = Queue()
    ended = run(place, out(2, "default"), rounds=4)
    assert ended.ended is SequenceEnd.MOST_ROUNDS
    assert [one for one in place.begun if one.startswith("default")] == ["default 0", "default 1"]
    assert len(place.begun) == 3 + 3 + 2 + 2


def test_a_round_that_would_end_too_late_is_not_begun() -> None:
    place = Queue()
    ended = run(place, never, within_s=75.0)
    assert (ended.ended, ended.rounds, place.at_s) == (SequenceEnd.TIME_UP, 2, 60.0)
    assert run(place, never, within_s=75.0) == ended
    assert place.at_s == 60.0
    more = run(place, never, within_s=100.0)
    assert (more.rounds, place.at_s) == (3, 90.0)


def test_a_variant_that_fails_twice_is_left_out_and_the_others_go_on() -> None:
    place = Queue(fails=["pin 1", "default 2", "default 2"])
    ended = run(place, never, rounds=4)
    assert place.begun.count("pin 1") == 2
    assert (ended.rounds, ended.kept) == (4, ("pin", "pin-numa"))
    assert "default 3" not in place.begun


def test_a_round_of_which_nothing_could_be_measured_is_tried_again_by_the_next_call() -> None:
    place = Queue(fails=[f"{name} 0" for name in LAYOUTS * 2])
    assert run(place, never).ended is SequenceEnd.NOTHING_LEFT
    assert run(place, never, rounds=2).ended is SequenceEnd.MOST_ROUNDS
    assert [look.rounds for look in latest(place.written)] == [1, 2]


@pytest.mark.parametrize("killed", range(10))
def test_a_sequence_that_was_killed_goes_on_with_the_same_decisions(killed: int) -> None:
    whole = Queue()
    run(whole, out(2, "default"), rounds=4)
    place = Queue(killed=killed)
    decide = out(2, "default")
    with pytest.raises(KeyboardInterrupt):
        run(place, decide, rounds=4)
    place.killed = None
    run(place, decide, rounds=4)
    assert place.begun == whole.begun
    assert [(o.rounds, o.kept, o.ended) for o in place.written] == [
        (o.rounds, o.kept, o.ended) for o in whole.written
    ]
