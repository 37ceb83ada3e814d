"""Progress: how far each task of an experiment is, and how long the rest takes."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from statistics import fmean

from msgspec import Struct


class TaskState(StrEnum):
    """How far a task is: a command of the suite, a boot of a trial, a job of a study."""

    WAITING = "waiting"
    REFUSED = "refused"  # by libvirt, or by a queue
    PENDING = "pending"  # in a queue
    RUNNING = "running"
    DONE = "done"
    INCOMPLETE = "incomplete"  # measured, but a test failed in every round
    MISMATCHED = "mismatched"  # the guest was not as planned: nothing was measured
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # with its node, or by its queue


UNSETTLED = frozenset({TaskState.WAITING, TaskState.PENDING, TaskState.RUNNING})


class TaskStatus(Struct, frozen=True):
    """One task."""

    id: str
    part: int  # of several that one job measures at once, from 0
    state: TaskState
    job: str | None = None  # its number in the queue
    reason: str = ""  # why it is not done, "" where nothing gives one
    needs_somebody: bool = False  # it does not begin by itself
    is_behind: bool = False  # it waits for others of this experiment

    @property
    def name(self) -> str:
        return self.id if self.part == 0 else f"{self.id} task {self.part}"


class Progress(Struct, frozen=True):
    """Every task, in order."""

    tasks: tuple[TaskStatus, ...]
    now: str = ""  # what runs
    seconds_left: float | None = None  # as far as is known, None where nothing is
    silent_s: float = 0.0  # how long the queue has not answered, 0 where it does

    def count(self, state: TaskState) -> int:
        return sum(task.state is state for task in self.tasks)

    @property
    def ended_count(self) -> int:
        """Tasks that came to an end, whichever."""
        return sum(task.state not in UNSETTLED for task in self.tasks)

    @property
    def total(self) -> int:
        return len(self.tasks)

    @property
    def is_settled(self) -> bool:
        """True where nothing more happens by itself."""
        return self.ended_count == self.total

    @property
    def is_blocked(self) -> bool:
        """True where everything that is left waits for somebody: a drained node, a hold."""
        unsettled = [task for task in self.tasks if task.state in UNSETTLED]
        stuck = [task for task in unsettled if task.needs_somebody]
        # What waits is not submitted: the queue takes no more before some have ended.
        behind = [task for task in unsettled if task.is_behind or task.state is TaskState.WAITING]
        return bool(stuck) and len(unsettled) == len(stuck) + len(behind)

    def missing(self) -> tuple[TaskStatus, ...]:
        """Tasks without results."""
        return tuple(task for task in self.tasks if task.state is not TaskState.DONE)


class Pace:
    """How long tasks take, by variant: as the last one of it took, before that as planned.

    >>> pace = Pace({"stream": 2.0})
    >>> pace.took("stream", 3.0)
    >>> pace.seconds_for(["stream", "stream", "latency"])
    9.0
    """

    def __init__(self, planned: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(planned or {})

    def took(self, variant: str, seconds: float) -> None:
        self._seconds[variant] = seconds

    def seconds_for(self, variants: Iterable[str]) -> float | None:
        """Of these, one after the other; one that is unknown takes the mean of the others. None
        where nothing is known of any."""
        planned = [self._seconds.get(variant) for variant in variants]
        if planned and not self._seconds:
            return None
        mean = fmean(self._seconds.values()) if self._seconds else 0.0
        return sum(mean if seconds is None else seconds for seconds in planned) + 0.0
