"""Experiment: variants in seeded rounds, the state of each task, and the loop that runs them. [I/O]

`bench` is one command after the other on a machine, `trial` one boot after the other of a VM,
`slurm study` jobs in a queue (decision 0019). Their differences are in their executors.

Variants are tests, layouts of a VM or bindings of jobs. A round has each variant once. Drift (heat,
neighbours) then affects every variant equally, and after-effects of a variant affect another
variant in each round. Controls run before the first round and after every round, so that they
bracket each round.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from homenode import formats
from homenode.errors import NoAnswerError, UsageError, out_of_range
from homenode.safe.record_directory import JOURNAL, RecordDirectory

MAX_ROUNDS = 1000

CONTROL_MOVES = 0.03
"""A control that differs by more than this between its two sides of a round marks the round."""


class ScheduledTask(Struct, frozen=True, order=True):
    """A variant in one round."""

    number: int  # the task's place in the schedule, from 0
    round: int  # from 0; a control of round -1 precedes the first
    variant: str
    is_control: bool = False


class Schedule(Struct, frozen=True):
    """The tasks in order. The same variants, rounds and seed produce the same schedule."""

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
    """Return a schedule with every variant once in each round, in random order, with controls
    around each round.

    >>> [s.variant for s in schedule(["a", "b"], ["c"], 1, seed=1).tasks].count("c")
    2

    called, option: the user's words for variants and rounds. Raises UsageError for a name twice,
    none at all, or rounds out of range.
    """
    names = [*variants, *controls]
    if not names or len(set(names)) != len(names):
        duplicates = sorted({name for name in names if names.count(name) > 1})
        problem = f"{', '.join(duplicates)} twice" if duplicates else "none"
        raise UsageError(f"{called}: expected one or more, each once, found {problem}")
    if not 1 <= rounds <= limit:
        raise out_of_range(option, str(rounds), 1, limit)
    order: list[tuple[int, str, bool]] = [(-1, name, True) for name in controls]
    for number in range(rounds):
        order += [(number, name, False) for name in order_by_seed(variants, seed, number)]
        order += [(number, name, True) for name in controls]
    return Schedule(seed, tuple(ScheduledTask(at, *task) for at, task in enumerate(order)))


def order_by_seed(names: Iterable[str], seed: int, round: int) -> tuple[str, ...]:
    """Return the names in an order that depends on nothing but them, the seed and the round. The
    same on every machine and Python: a schedule can be computed again to resume it."""
    return tuple(
        sorted(names, key=lambda n: hashlib.sha256(f"{seed}\0{round}\0{n}".encode()).digest())
    )


def list_remaining(
    schedule: Schedule, done_tasks: Collection[tuple[int, str]]
) -> tuple[ScheduledTask, ...]:
    """The remaining tasks of an interrupted run. done_tasks: (round, variant) of finished tasks."""
    scheduled_keys = {(task.round, task.variant) for task in schedule.tasks}
    foreign = sorted(set(done_tasks) - scheduled_keys)
    if foreign:
        raise UsageError(
            f"--resume: expected a run of this schedule, found {foreign[0][1]} "
            f"of round {foreign[0][0]}",
            hint="use the same --tests, --repeat and --seed, or start a new run",
        )
    return tuple(task for task in schedule.tasks if (task.round, task.variant) not in done_tasks)


def find_moved_rounds(
    schedule: Schedule, values: dict[tuple[int, str], float]
) -> tuple[tuple[int, str, float], ...]:
    """Return the rounds whose controls moved: (round, control, ratio after to before). values:
    median of each control by (round, test). A round without both sides is not judged."""
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


class TaskState(StrEnum):
    """State of a task: a command of the suite, a boot of a trial, a job of a study."""

    WAITING = "waiting"
    REJECTED = "rejected"  # by libvirt, or by a queue
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
    id: str
    part: int  # part of a job that measures several, from 0
    state: TaskState
    job: str | None = None  # its number in the queue
    reason: str = ""  # why it is not done, "" if nothing gives one
    needs_somebody: bool = False  # it waits for an operator
    is_behind: bool = False  # it waits for others of this experiment

    @property
    def name(self) -> str:
        return self.id if self.part == 0 else f"{self.id} task {self.part}"


class Progress(Struct, frozen=True):
    """Every task, in order."""

    tasks: tuple[TaskStatus, ...]
    now: str = ""  # what runs
    seconds_left: float | None = None  # as far as is known, None if nothing is
    silent_s: float = 0.0  # how long the queue has not answered, 0 if it does

    def count(self, state: TaskState) -> int:
        return sum(task.state is state for task in self.tasks)

    @property
    def ended_count(self) -> int:
        return sum(task.state not in UNSETTLED for task in self.tasks)

    @property
    def total(self) -> int:
        return len(self.tasks)

    @property
    def is_settled(self) -> bool:
        """Whether no task makes progress by itself any more."""
        return self.ended_count == self.total

    @property
    def is_blocked(self) -> bool:
        """Whether every remaining task waits for an operator: a drained node, a hold."""
        tasks = [task for task in self.tasks if task.state in UNSETTLED]
        stuck_tasks = [task for task in tasks if task.needs_somebody]
        # What waits is not submitted: the queue takes no more before some have ended.
        queued_tasks = [task for task in tasks if task.is_behind or task.state is TaskState.WAITING]
        return bool(stuck_tasks) and len(tasks) == len(stuck_tasks) + len(queued_tasks)

    def list_missing(self) -> tuple[TaskStatus, ...]:
        """Return the tasks without results."""
        return tuple(task for task in self.tasks if task.state is not TaskState.DONE)


class Pace:
    """Durations of tasks by variant: the last duration, before that the planned one.

    >>> pace = Pace({"stream": 2.0})
    >>> pace.took("stream", 3.0)
    >>> pace.seconds_for(["stream", "stream", "latency"])
    9.0
    """

    def __init__(self, planned_seconds: Mapping[str, float] | None = None) -> None:
        self._seconds = dict(planned_seconds or {})

    def took(self, variant: str, seconds: float) -> None:
        self._seconds[variant] = seconds

    def seconds_for(self, variants: Iterable[str]) -> float | None:
        """Return the sum of their seconds; a variant with unknown seconds counts as the mean of the
        others. None if all are unknown."""
        planned_seconds = [self._seconds.get(variant) for variant in variants]
        if planned_seconds and not self._seconds:
            return None
        mean = fmean(self._seconds.values()) if self._seconds else 0.0
        return sum(mean if seconds is None else seconds for seconds in planned_seconds) + 0.0


H = TypeVar("H")
L = TypeVar("L")


class ExperimentJournal(RecordDirectory, Generic[H, L]):
    """The directory of an experiment: a head with the orders, and lines of one type. A line is on
    disk before it takes effect. Other arguments: of RecordDirectory."""

    __slots__ = ("_head", "_kind", "_line")

    def __init__(
        self,
        path: Path,
        kind: str,
        head: type[H],
        line: type[L],
        *,
        journal: str = JOURNAL,
        **more: Any,
    ) -> None:
        super().__init__(path, journal=journal, **more)
        self._kind, self._head, self._line = kind, head, line

    def begin_with(self, head: H) -> None:
        """Write the orders. Raises HostError if a journal exists."""
        self.begin(formats.read_head_line(self._kind, head))

    def add(self, line: L) -> None:
        """Write a line and sync it to disk. Raises HostError."""
        self.append(formats.line(line))

    def contents(self) -> tuple[H, tuple[L, ...]]:
        """The whole journal. Raises InputError for a missing journal, or one of another version."""
        source, content = str(self.journal_path), self.read_journal()
        return formats.decode_journal(content, self._kind, self._head, self._line, source)


class Executor(Protocol):
    """Runs the tasks of one experiment."""

    def poll(self) -> Progress:
        """Return the state of each task. Events that a kill left unrecorded are recorded; nothing
        is started. Raises NoAnswerError if the state cannot be queried now."""

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        """Mark these tasks as not started: they had failed before this call."""

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        """Start pending tasks in this order: one to its end, or as many as a queue accepts."""


class WaitPolicy(Struct, frozen=True):
    """Time limits for waiting."""

    poll_s: float = 5.0  # between two polls
    # time that an experiment waits if all tasks wait for an operator, or the queue does not answer
    blocked_s: float = 600.0


AT_ONCE = WaitPolicy(poll_s=0.0)
"""Policy of an executor whose task has ended when `start` returns."""


def run_tasks(
    executor: Executor,
    on_progress: Callable[[Progress], None],
    patience: WaitPolicy = AT_ONCE,
    *,
    retry: bool = False,
) -> Progress:
    """Run the remaining tasks until all are finished or failed, or the time limit is reached.
    retry: also tasks that failed before. Raises NoAnswerError if a queue stays silent, and fatal
    errors of the executor."""
    blocked_since: float | None = None
    silent_since: float | None = None
    progress = Progress(())
    while True:
        now = time.monotonic()
        try:
            progress = executor.poll()
            if retry and (failed_tasks := _list_failed(progress)):
                executor.retry(failed_tasks)
                progress = executor.poll()
            retry, silent_since = False, None
            on_progress(progress)
            if progress.is_settled:
                return progress
            executor.start([task for task in progress.tasks if task.state is TaskState.WAITING])
        except NoAnswerError:
            silent_since = silent_since or now
            if now - silent_since > patience.blocked_s:
                raise
            progress = replace(progress, silent_s=max(now - silent_since, 1e-9))
            on_progress(progress)
        blocked_since = (blocked_since or now) if progress.is_blocked else None
        if blocked_since is not None and now - blocked_since > patience.blocked_s:
            return progress
        if patience.poll_s:
            time.sleep(patience.poll_s)


def _list_failed(progress: Progress) -> list[TaskStatus]:
    """Return failed tasks of jobs that have no running task any more."""
    alive = {task.id for task in progress.tasks if task.state in UNSETTLED}
    return [task for task in progress.list_missing() if task.id not in alive]
