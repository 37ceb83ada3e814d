"""Study run: makes a study, submits its jobs and waits for them, whatever happens. [I/O]

Nothing depends on this process: jobs wait for each other through Slurm, and write their own files.
It may be stopped and started again at any time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from homenode.errors import InputError, NoAnswerError, ToolError, UsageError
from homenode.measure.bindings import queue_client
from homenode.measure.bindings.experiments import (
    Experiment,
    StudyOptions,
    choose_nodes,
    described_nodes,
    experiments_for,
    look_experiments,
    nodes_to_bind_to,
)
from homenode.measure.bindings.folder import StudyFolder, attempts, done_attempt
from homenode.measure.bindings.progress import (
    UNSETTLED,
    Progress,
    Study,
    TaskState,
    TaskStatus,
    progress_of,
    unrecorded,
)
from homenode.measure.bindings.queue_client import is_full
from homenode.measure.bindings.scripts import job_name, script_name
from homenode.sources import load_host
from homenode.tools.squeue import JobState, QueuedJob
from homenode.topology import Host

MAX_ATTEMPTS = 3
"""Of an experiment that was lost through no fault of its own."""

_SETTLED_BADLY = frozenset(
    {TaskState.FAILED, TaskState.CANCELLED, TaskState.LOST, TaskState.REFUSED}
)


class QueueFullError(ToolError):
    """Slurm takes no more jobs of this user until some have ended."""


@dataclass(frozen=True, slots=True)
class Patience:
    """poll_s: between two looks at the queue. blocked_s: how long the study waits where everything
    waits for somebody, or the controller is silent. wait_s: in all; None = as long as it takes.
    grace_s: how long files of a job that has ended may take to arrive.
    """

    poll_s: float = 5.0
    blocked_s: float = 600.0
    wait_s: float | None = None
    grace_s: float = 20.0


def made_study(
    options: StudyOptions,
    host: str | None,
    described: Host | None,
    id: str,
    *,
    is_described: bool = False,
) -> Study:
    """A study of these nodes. host: what was named as such, and what that is; None = a job on each
    looks first. is_described: Slurm is not asked, and nodes are what the host says.

    What the host cannot do is refused before Slurm is asked for anything. Raises UsageError,
    NoAnswerError, ToolError.
    """
    if described is not None and not nodes_to_bind_to(described, options):
        raise UsageError(f"{host}: expected NUMA nodes with CPUs and memory, found none")
    if is_described and described is not None:
        found = described_nodes(described, options)
    else:
        found = queue_client.nodes()
    whole, shared = choose_nodes(found, options)
    if described is None:
        return Study(id, options, whole, shared, None, look_experiments(whole))
    hosts = {node.name: described for node in (*whole, *shared)}
    planned = experiments_for(whole, shared, hosts, options)
    return Study(id, options, whole, shared, host, (), planned)


class StudyRun:
    """One run of `homenode slurm study` over a folder."""

    def __init__(
        self,
        folder: StudyFolder,
        study: Study,
        patience: Patience,
        observe: Callable[[Progress], None],
    ) -> None:
        self.study = study
        self._folder = folder
        self._patience = patience
        self._observe = observe
        self._ended_since: dict[tuple[str, int], float] = {}
        self._progress = Progress(())

    def go(self, *, retry: bool) -> Progress:
        """Until every task is done or has failed, or patience ends.

        retry: submit again what had failed before. Raises NoAnswerError where the controller stays
        silent, ToolError where Slurm's programs are missing.
        """
        begin = time.monotonic()
        blocked_since: float | None = None
        silent_since: float | None = None
        while True:
            now = time.monotonic()
            try:
                progress = self._step(retry=retry)
                retry, silent_since = False, None
            except NoAnswerError:
                silent_since = silent_since or now
                progress = replace(self._progress, silent_s=now - silent_since)
                if now - silent_since > self._patience.blocked_s:
                    raise
            self._observe(progress)
            self._progress = progress
            if progress.silent_s == 0 and progress.is_settled and self._is_planned():
                return progress
            blocked_since = (blocked_since or now) if progress.is_blocked else None
            if blocked_since is not None and now - blocked_since > self._patience.blocked_s:
                return progress
            if self._patience.wait_s is not None and now - begin > self._patience.wait_s:
                return progress
            time.sleep(self._patience.poll_s)

    def _is_planned(self) -> bool:
        """False where the look jobs are done and the rest is still to be written."""
        if self.study.experiments or not self.study.looks:
            return True
        looks = {one.id for one in self.study.looks}
        return any(
            task.state is not TaskState.DONE
            for task in self._progress.tasks
            if task.experiment in looks
        )

    def _step(self, *, retry: bool) -> Progress:
        queued = queue_client.jobs()
        for experiment, job in unrecorded(self.study, queued):
            self.study = self._folder.submitted(self.study, experiment, job)
        progress = self._look(queued)
        self._clear_finished(progress, queued)
        if retry:
            self._again(_of_settled(progress, _SETTLED_BADLY), queued)
            progress = self._look(queued)
        lost = _of_settled(self._with_grace(progress), frozenset({TaskState.LOST}))
        if to_repeat := [task for task in lost if self._attempts(task) < MAX_ATTEMPTS]:
            self._again(to_repeat, queued)
            progress = self._look(queued)
        if self.study.looks and not self.study.experiments:
            self._plan_when_looked_at(progress)
            progress = self._look(queued)
        if self._submit_waiting(progress, queued):
            progress = self._look(queue_client.jobs())
        return self._with_grace(progress)

    def _look(self, queued: tuple[QueuedJob, ...]) -> Progress:
        done, exits = self._folder.done_and_exits(self.study)
        return progress_of(self.study, queued, done, exits)

    def _with_grace(self, progress: Progress) -> Progress:
        """A job that has just ended is mistaken for running: its files may be on their way."""
        now = time.monotonic()
        tasks = []
        for task in progress.tasks:
            key = (task.experiment, task.task)
            if task.state in (TaskState.LOST, TaskState.FAILED):
                since = self._ended_since.setdefault(key, now)
                if now - since < self._patience.grace_s:
                    task = replace(task, state=TaskState.RUNNING)
            else:
                self._ended_since.pop(key, None)
            tasks.append(task)
        return Progress(tuple(tasks))

    def _attempts(self, task: TaskStatus) -> int:
        """Attempts that began to write, or that the journal knows."""
        began = len(attempts(self._folder.path, task.experiment, task.task))
        return max(began, self.study.attempts_of(task.experiment))

    def _again(self, tasks: Iterable[TaskStatus], queued: tuple[QueuedJob, ...]) -> None:
        """Take experiments for not submitted; what Slurm still holds of them is cancelled."""
        waiting = self._queued(queued, JobState.PENDING)
        for name in dict.fromkeys(task.experiment for task in tasks):
            if name in waiting:
                queue_client.cancel(waiting[name])
            self.study = self._folder.again(self.study, name)

    def _clear_finished(self, progress: Progress, queued: tuple[QueuedJob, ...]) -> None:
        """Cancel jobs that have left all of their results, and that Slurm would start again.

        A controller that lost its state does so, or holds them: what comes after would never start.
        """
        unfinished = {task.experiment for task in progress.missing()}
        for name, job in self._queued(queued, JobState.PENDING).items():
            if name not in unfinished:
                queue_client.cancel(job)

    def _queued(self, queued: tuple[QueuedJob, ...], *states: JobState) -> dict[str, str]:
        """The latest job of each experiment where it is in one of these states, in whole or in
        part. By name too: a controller that lost its state gives numbers again."""
        rows = {(row.job, row.name) for row in queued if row.state in states}
        return {
            experiment: job
            for experiment, job in self.study.latest_jobs().items()
            if (job, job_name(self.study.id, experiment)) in rows
        }

    def _plan_when_looked_at(self, progress: Progress) -> None:
        looks = {one.id for one in self.study.looks}
        if any(t.state is not TaskState.DONE for t in progress.tasks if t.experiment in looks):
            return
        hosts = self._hosts()
        planned = experiments_for(self.study.whole, self.study.shared, hosts, self.study.options)
        self.study = self._folder.planned(self.study, planned)

    def _hosts(self) -> Mapping[str, Host]:
        found = {}
        for look in self.study.looks:
            done = done_attempt(self._folder.path, look.id, 0)
            assert done is not None, "all looks are done"
            try:
                found[look.nodes[0]] = load_host(str(done / "host.tar.gz"))
            except InputError as error:
                raise InputError(
                    error.message,
                    hint=f"remove {done.parent}, and start the command again: it looks again",
                ) from None
        return found

    def _submit_waiting(self, progress: Progress, queued: tuple[QueuedJob, ...]) -> bool:
        """Submit what is not; whether anything was."""
        waiting = {task.experiment for task in progress.tasks if task.state is TaskState.WAITING}
        # Slurm refuses to wait for a job that it has forgotten; such a job has ended.
        alive = self._queued(queued, JobState.PENDING, JobState.RUNNING)
        behind = self._behind(alive)
        submitted = False
        for one in self.study.everything():
            if one.id in waiting:
                try:
                    job = self._submit(one, alive, behind(one))
                except QueueFullError:
                    break  # the rest goes in when some have ended
                if job is not None:
                    submitted = True
                    alive[one.id] = job
        return submitted

    def _submit(
        self, one: Experiment, alive: Mapping[str, str], behind: Iterable[str]
    ) -> str | None:
        """Raises QueueFullError where Slurm takes no more, and jobs of this study are under way."""
        names = dict.fromkeys((*one.after, *behind))
        after = tuple(alive[name] for name in names if name in alive)
        try:
            job = queue_client.submit(
                self._folder.path, script_name(one), after, self._folder.owned
            )
        except NoAnswerError:
            raise
        except ToolError as error:
            if is_full(error.message) and alive:
                raise QueueFullError(error.message) from None
            self.study = self._folder.refused(self.study, one.id, error.message)
            return None
        self.study = self._folder.submitted(self.study, one.id, job)
        return job

    def _behind(self, alive: Iterable[str]) -> Callable[[Experiment], Iterator[str]]:
        """Of an experiment, those after it on its nodes that are under way all the same.

        One that is submitted again finds them in the queue, and is not alone before they end.
        """
        places = {one.id: place for place, one in enumerate(self.study.everything())}
        nodes = {one.id: one.nodes for one in self.study.everything()}
        on_node: dict[str, list[str]] = {}
        for name in sorted(set(alive) & places.keys(), key=lambda name: places[name]):
            for node in nodes[name]:
                on_node.setdefault(node, []).append(name)

        def behind(one: Experiment) -> Iterator[str]:
            for node in one.nodes:
                yield from (n for n in on_node.get(node, ()) if places[n] > places[one.id])

        return behind


def _of_settled(progress: Progress, states: frozenset[TaskState]) -> tuple[TaskStatus, ...]:
    """Tasks in these states, of experiments of which nothing is under way any more.

    Lost ones are repeated: a node failed, or the controller lost its state. Cancelled and failed
    ones stay as they are until the user starts the command again.
    """
    alive = {task.experiment for task in progress.tasks if task.state in UNSETTLED}
    return tuple(
        task for task in progress.tasks if task.state in states and task.experiment not in alive
    )
