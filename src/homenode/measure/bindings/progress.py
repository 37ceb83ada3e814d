"""Study progress: how far each task of a study is, from what the queue and its folder say.

What counts is the folder: a task is done when its last file is there. The queue forgets jobs after
minutes, and a controller that is restarted may have none of them; files stay.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from homenode.measure.bindings.experiments import Experiment, StudyOptions
from homenode.measure.bindings.scripts import job_name
from homenode.tools.sinfo import ClusterNode
from homenode.tools.squeue import JobState, QueuedJob, needs_somebody


class TaskState(StrEnum):
    """How far a task is."""

    WAITING = "not submitted"
    REFUSED = "refused"  # by sbatch
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # with its node, or by Slurm


UNSETTLED = frozenset({TaskState.WAITING, TaskState.PENDING, TaskState.RUNNING})


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that a study's journal holds.

    whole, shared: the nodes of both queues. host: the description of a node that the user named;
    None where look jobs capture each. experiments: in the order of submission; () until the nodes
    are known. jobs: (experiment, job id) in the order of submission. refused: (experiment, why).
    repeated: experiments whose earlier jobs do not count any more, once for each time.
    """

    id: str
    options: StudyOptions
    whole: tuple[ClusterNode, ...]
    shared: tuple[ClusterNode, ...]
    host: str | None
    looks: tuple[Experiment, ...]
    experiments: tuple[Experiment, ...] = ()
    jobs: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    repeated: tuple[str, ...] = ()

    def everything(self) -> tuple[Experiment, ...]:
        return (*self.looks, *self.experiments)

    def latest_jobs(self) -> dict[str, str]:
        """The latest job of each experiment that has one."""
        return dict(self.jobs)

    def attempts_of(self, experiment: str) -> int:
        """How often it was submitted."""
        return self.repeated.count(experiment) + sum(name == experiment for name, _ in self.jobs)


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task. reason: why it is not done, "" where Slurm gives none."""

    experiment: str
    task: int
    state: TaskState
    job: str | None
    reason: str

    @property
    def name(self) -> str:
        return self.experiment if self.task == 0 else f"{self.experiment} task {self.task}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Every task, in order. silent_s: how long the controller has not answered, 0 where it does."""

    tasks: tuple[TaskStatus, ...]
    silent_s: float = 0.0

    def count(self, state: TaskState) -> int:
        return sum(task.state is state for task in self.tasks)

    @property
    def is_settled(self) -> bool:
        """True where nothing more happens by itself."""
        return not any(task.state in UNSETTLED for task in self.tasks)

    @property
    def is_complete(self) -> bool:
        return all(task.state is TaskState.DONE for task in self.tasks)

    @property
    def is_blocked(self) -> bool:
        """True where everything that is left waits for somebody: a drained node, a hold."""
        left = [task for task in self.tasks if task.state in UNSETTLED]
        waiting = [task for task in left if task.state is TaskState.PENDING]
        stuck = [task for task in waiting if needs_somebody(task.reason)]
        behind = [task for task in waiting if task.reason.startswith("Dependency")]
        # Not submitted: Slurm takes no more before some have ended.
        behind += [task for task in left if task.state is TaskState.WAITING]
        return bool(stuck) and len(left) == len(stuck) + len(behind)

    def missing(self) -> tuple[TaskStatus, ...]:
        """Tasks without results."""
        return tuple(task for task in self.tasks if task.state is not TaskState.DONE)


def progress_of(
    study: Study,
    queued: tuple[QueuedJob, ...],
    done: Collection[tuple[str, int]],
    exits: Mapping[tuple[str, int], str],
) -> Progress:
    """The status of every task. done: tasks whose files are complete. exits: exit statuses of
    scripts that ended without being done."""
    of_job: dict[tuple[str, str], list[QueuedJob]] = {}
    for one in queued:
        # By name too: a controller that lost its state gives numbers again, to other jobs.
        of_job.setdefault((one.job, one.name), []).append(one)
    refused, jobs = dict(study.refused), study.latest_jobs()
    found = []
    for experiment in study.everything():
        job = jobs.get(experiment.id)
        for task in range(experiment.jobs):
            key = (experiment.id, task)
            if key in done:
                state, reason = TaskState.DONE, ""
            elif job is None and experiment.id in refused:
                state, reason = TaskState.REFUSED, refused[experiment.id]
            elif job is None:
                state, reason = TaskState.WAITING, ""
            else:
                rows = of_job.get((job, job_name(study.id, experiment.id)), [])
                state, reason = _of_job(job, task, rows, exits.get(key))
            found.append(TaskStatus(experiment.id, task, state, job, reason))
    return Progress(tuple(found))


def _of_job(
    job: str, task: int, rows: list[QueuedJob], exit_status: str | None
) -> tuple[TaskState, str]:
    row = next((one for one in rows if one.task == task), None)
    row = row or next((one for one in rows if one.task is None), None)
    left = "" if exit_status in (None, "0") else f"its script ended with exit status {exit_status}"
    if row is None:
        return TaskState.LOST, left or f"Slurm no longer knows job {job}, and it left no results"
    if row.state is JobState.PENDING and "requeued held" in row.reason:
        # Slurm gave up on starting it, after a node or the controller was lost, and holds it.
        return TaskState.LOST, row.reason
    if row.state is JobState.PENDING:
        return TaskState.PENDING, row.reason
    if row.state is JobState.RUNNING:
        return TaskState.RUNNING, ""
    if row.state is JobState.COMPLETED:
        return TaskState.FAILED, left or "it ended without an error and left no results"
    how = row.said if row.reason == "" else f"{row.said}, {row.reason}"
    if row.state is JobState.CANCELLED:
        return TaskState.CANCELLED, how
    state = TaskState.LOST if row.state is JobState.LOST else TaskState.FAILED
    return state, f"{how}; {left}" if left else how


def unrecorded(study: Study, queued: tuple[QueuedJob, ...]) -> Iterator[tuple[str, str]]:
    """(experiment, job) of jobs in the queue that the journal does not know.

    sbatch was asked, and homenode ended, or the answer was lost, before the id was written down.
    """
    names = {job_name(study.id, one.id): one.id for one in study.everything()}
    known = {job for _, job in study.jobs}
    alive = (JobState.PENDING, JobState.RUNNING)
    found = {one.job: names[one.name] for one in queued if one.name in names and one.state in alive}
    for job, experiment in sorted(found.items(), key=lambda item: int(item[0])):
        if job not in known:
            yield experiment, job
