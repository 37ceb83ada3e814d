"""The loop of every experiment: what it begins, takes again, waits for and gives up on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from homenode.errors import NoAnswerError
from homenode.measure.experiment import AT_ONCE, WaitPolicy, run_tasks
from homenode.measure.progress import UNSETTLED, Pace, Progress, TaskState, TaskStatus

SOON = WaitPolicy(poll_s=0.001, blocked_s=0.02)


@dataclass
class Place:
    """An executor whose tasks end as the test says."""

    # the states that a task comes to, one for each time that it is begun
    ends: dict[str, list[TaskState]]
    at_once: int = 1  # how many are begun together
    silent: int = 0  # looks that are not answered
    states: dict[str, TaskState] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    needs_somebody: bool = False

    def poll(self) -> Progress:
        if self.silent:
            self.silent -= 1
            raise NoAnswerError("squeue: Connection refused")
        return Progress(
            tuple(
                TaskStatus(
                    name,
                    0,
                    self.states.get(name, TaskState.WAITING),
                    needs_somebody=self.needs_somebody and name in self.states,
                )
                for name in self.ends
            )
        )

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks:
            assert task.state not in UNSETTLED
            del self.states[task.id]

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        for task in tasks[: self.at_once]:
            self.begun.append(task.id)
            self.states[task.id] = self.ends[task.id].pop(0)


DONE, FAILED, PENDING = TaskState.DONE, TaskState.FAILED, TaskState.PENDING


@pytest.mark.parametrize("at_once", [1, 5])
def test_every_task_is_begun_once_and_in_order_and_one_that_fails_costs_no_other(
    at_once: int,
) -> None:
    place = Place({"a": [DONE], "b": [FAILED], "c": [DONE]}, at_once)
    seen: list[Progress] = []
    ended = run_tasks(place, seen.append)
    assert place.begun == ["a", "b", "c"]
    assert [one.state for one in ended.tasks] == [DONE, FAILED, DONE]
    assert seen[-1] == ended
    assert [progress.ended_count for progress in seen] == ([0, 1, 2, 3] if at_once == 1 else [0, 3])


def test_what_failed_before_is_tried_again_once_where_that_is_asked_for() -> None:
    place = Place({"a": [FAILED, FAILED, DONE], "b": [DONE]})
    run_tasks(place, lambda progress: None)
    assert run_tasks(place, lambda progress: None).count(FAILED) == 1
    assert place.begun == ["a", "b"]
    assert run_tasks(place, lambda progress: None, retry=True).count(FAILED) == 1
    assert place.begun == ["a", "b", "a"]
    assert run_tasks(place, lambda progress: None, retry=True).count(DONE) == 2


def test_a_queue_that_is_silent_for_a_while_is_waited_for() -> None:
    place = Place({"a": [FAILED, DONE]}, states={"a": FAILED}, silent=3)
    place.ends["a"].pop(0)
    seen: list[Progress] = []
    ended = run_tasks(place, seen.append, WaitPolicy(poll_s=0.001, blocked_s=60.0), retry=True)
    assert ended.count(DONE) == 1, "what failed before is still taken again"
    assert [one.silent_s > 0 for one in seen] == [True] * 3 + [False] * 2


def test_a_queue_that_stays_silent_ends_it() -> None:
    place = Place({"a": [DONE]}, silent=10**9)
    with pytest.raises(NoAnswerError):
        run_tasks(place, lambda progress: None, SOON)


def test_what_waits_for_somebody_is_waited_for_no_longer_than_patience_lasts() -> None:
    place = Place({"a": [PENDING], "b": [DONE]}, needs_somebody=True)
    ended = run_tasks(place, lambda progress: None, SOON)
    assert [one.state for one in ended.tasks] == [PENDING, DONE]
    assert ended.is_blocked


def test_no_longer_is_waited_than_asked_for() -> None:
    place = Place({"a": [PENDING]})
    ended = run_tasks(place, lambda progress: None, WaitPolicy(poll_s=0.001, wait_s=0.01))
    assert not ended.is_settled
    assert not ended.is_blocked


def test_an_interrupt_is_nobodys_failure() -> None:
    def stop(progress: Progress) -> None:
        if progress.ended_count:
            raise KeyboardInterrupt

    place = Place({"a": [DONE], "b": [DONE]})
    with pytest.raises(KeyboardInterrupt):
        run_tasks(place, stop, AT_ONCE)
    assert place.begun == ["a"]


def test_the_time_left_is_learnt_from_what_was_taken() -> None:
    pace = Pace()
    assert pace.seconds_for(["pin"]) is None
    assert pace.seconds_for([]) == 0.0
    pace.took("pin", 60.0)
    pace.took("default", 30.0)
    assert pace.seconds_for(["pin", "default"]) == 90.0
    assert pace.seconds_for(["pin-numa"]) == 45.0, "as the others on average"
