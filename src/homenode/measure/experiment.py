"""Experiment: a schedule of tasks on an executor: its journal, and the loop that runs it. [I/O]

`bench` is one command after the other on a machine, `trial` one boot after the other of a VM,
`slurm study` jobs in a queue (decision 0019). What differs lies in their executors.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from homenode import formats
from homenode.errors import NoAnswerError
from homenode.measure.progress import UNSETTLED, Progress, TaskState, TaskStatus
from homenode.safe.record_folder import JOURNAL, RecordFolder

H = TypeVar("H")
L = TypeVar("L")


class ExperimentJournal(RecordFolder, Generic[H, L]):
    """The folder of an experiment: a head, what was ordered, and lines of one type.

    A line is on the disk before what it says counts. Other arguments: of RecordFolder.
    """

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
        """Write what was ordered. Raises HostError where there is a journal."""
        self.begin(formats.head_line(self._kind, head))

    def add(self, line: L) -> None:
        """Write a line; it is on the disk when this returns. Raises HostError."""
        self.append(formats.line(line))

    def contents(self) -> tuple[H, tuple[L, ...]]:
        """Everything that is written. Raises InputError for no journal, or another version's."""
        source, content = str(self.journal_path), self.journal()
        return formats.decode_journal(content, self._kind, self._head, self._line, source)


class Executor(Protocol):
    """Where the tasks of one experiment run."""

    def poll(self) -> Progress:
        """How far each task is. What a kill left unwritten is written down; nothing is begun.

        Raises NoAnswerError where that cannot be asked now.
        """

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        """Take these for not begun: they had failed before this call."""

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        """Begin what waits, in this order: the first to its end, or as many as a queue takes."""


class WaitPolicy(Struct, frozen=True):
    """How long an experiment waits."""

    poll_s: float = 5.0  # between two looks
    # how long an experiment waits where everything waits for somebody, or the queue is silent
    blocked_s: float = 600.0
    wait_s: float | None = None  # in all; None = as long as it takes


AT_ONCE = WaitPolicy(poll_s=0.0)
"""Of an executor that is through with a task when `start` returns."""


def run_tasks(
    executor: Executor,
    on_progress: Callable[[Progress], None],
    patience: WaitPolicy = AT_ONCE,
    *,
    retry: bool = False,
) -> Progress:
    """Run what is left, until every task is done or has failed, or patience ends.

    retry: also what failed before. Raises NoAnswerError where a queue stays silent, and whatever
    the executor cannot go on after.
    """
    begun = time.monotonic()
    blocked_since: float | None = None
    silent_since: float | None = None
    progress = Progress(())
    while True:
        now = time.monotonic()
        try:
            progress = executor.poll()
            if retry and (failed := _settled_badly(progress)):
                executor.retry(failed)
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
        if patience.wait_s is not None and now - begun > patience.wait_s:
            return progress
        if patience.poll_s:
            time.sleep(patience.poll_s)


def _settled_badly(progress: Progress) -> list[TaskStatus]:
    """What failed, of jobs of which nothing is under way any more."""
    alive = {task.id for task in progress.tasks if task.state in UNSETTLED}
    return [task for task in progress.missing() if task.id not in alive]
