"""Study run: makes a study, and runs its jobs in a Slurm queue. [I/O]

The executor of `slurm study`: a task is one job, or one of a job array. Nothing depends on this
process: jobs wait for each other through Slurm, and write their own files. It may be stopped and
started again at any time. The directory decides: a task is finished when its last file exists. The
queue forgets jobs after minutes, and a restarted controller may have lost them.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from homenode.cluster.arguments import StudyOptions
from homenode.cluster.slurm import client
from homenode.cluster.slurm.squeue import JobState, QueuedJob, needs_somebody
from homenode.cluster.slurm.study.directory import (
    StudyDirectory,
    StudyEntry,
    find_attempts,
    find_done_attempt,
)
from homenode.cluster.slurm.study.experiments import (
    Experiment,
    Study,
    capture_experiments,
    choose_bound_nodes,
    choose_nodes,
    describe_nodes,
    format_script_name,
    job_name,
    plan_experiments,
    plan_shared_jobs,
)
from homenode.errors import InputError, NoAnswerError, ToolError, UsageError
from homenode.machine.topology import Host
from homenode.measure.experiment import UNSETTLED, Pace, Progress, TaskState, TaskStatus
from homenode.vm.sources import load_host

MAX_ATTEMPTS = 3
"""Attempts at an experiment that was lost through no fault of its own."""


class QueueFullError(ToolError):
    """Slurm accepts no more jobs of this user until some have ended."""


def make_study(
    options: StudyOptions,
    host: str | None,
    described_host: Host | None,
    id: str,
    *,
    is_described: bool = False,
) -> Study:
    """Create a study of these nodes. host: the named source and its host; None = a job captures
    each node first. is_described: Slurm is not queried, and nodes are taken from the host.
    Impossible requests are rejected before Slurm is queried. Raises UsageError, NoAnswerError,
    ToolError."""
    if described_host is not None and not choose_bound_nodes(described_host, options):
        raise UsageError(f"{host}: no NUMA node with CPUs and memory")
    if is_described and described_host is not None:
        nodes = describe_nodes(described_host, options)
    else:
        nodes = client.ask_nodes()
    exclusive, shared_nodes = choose_nodes(nodes, options)
    study = Study(id=id, options=options, exclusive=exclusive, shared=shared_nodes, host=host)
    for node in shared_nodes:
        tuple(plan_shared_jobs(node, options))  # before a job captures the nodes
    if described_host is None:
        return replace(study, looks=capture_experiments(exclusive))
    hosts = {node.name: described_host for node in (*exclusive, *shared_nodes)}
    return replace(study, experiments=plan_experiments(exclusive, shared_nodes, hosts, options))


class SlurmQueue:
    """The jobs of one study. See Executor. grace_s: how long files of a job that has ended may take
    to arrive."""

    def __init__(self, directory: StudyDirectory, study: Study, grace_s: float) -> None:
        self.study = study
        self._directory = directory
        self._grace_s = grace_s
        self._has_looked = False
        self._ended_since: dict[str, float] = {}
        self._queued: tuple[QueuedJob, ...] = ()
        self._seconds: Mapping[tuple[str, int], float | None] = {}

    def poll(self) -> Progress:
        self._queued = client.ask_queue()
        for experiment, job in find_unrecorded(self.study, self._queued):
            self._note(StudyEntry(submitted=experiment, job=job))
        tasks = self._list_tasks()
        self._clear_finished(tasks)
        # Lost ones are repeated: a node failed, or the controller lost its state. What was
        # cancelled or failed stays as it is until the user starts the command again.
        alive = {task.id for task in tasks if task.state in UNSETTLED}
        lost = [task for task in tasks if task.state is TaskState.LOST and task.id not in alive]
        if repeated_tasks := [task for task in lost if self._count_attempts(task) < MAX_ATTEMPTS]:
            self.retry(repeated_tasks)
            tasks = self._list_tasks()
        if self.study.looks and not self.study.experiments:
            self._plan_when_looked_at(tasks)
            tasks = self._list_tasks()
        self._has_looked = True
        return Progress(tasks, seconds_left=self._seconds_left(tasks))

    def retry(self, tasks: Sequence[TaskStatus]) -> None:
        """Cancel the jobs of these tasks that Slurm still has."""
        waiting = self._find_jobs(JobState.PENDING)
        for name in dict.fromkeys(task.id for task in tasks):
            if name in waiting:
                client.cancel(waiting[name])
            self._note(StudyEntry(again=name))

    def start(self, tasks: Sequence[TaskStatus]) -> None:
        waiting = {task.id for task in tasks}
        # Slurm rejects waiting for a job that it no longer lists; such a job has ended.
        alive = self._find_jobs(JobState.PENDING, JobState.RUNNING)
        find_predecessors = self._make_follower_finder(alive)
        for experiment in self.study.all_experiments():
            if experiment.id in waiting:
                try:
                    job = self._submit(experiment, alive, find_predecessors(experiment))
                except QueueFullError:
                    return  # the remaining jobs are submitted when some have ended
                if job is not None:
                    alive[experiment.id] = job

    def _note(self, entry: StudyEntry) -> None:
        self.study = self._directory.note(self.study, entry)

    def _list_tasks(self) -> tuple[TaskStatus, ...]:
        """Return every task. A job that has just ended counts as running, because its files may
        still arrive. Jobs that ended before the first poll have written all their files."""
        self._seconds, exits = self._directory.collect_outcomes(self.study)
        now = time.monotonic()
        first = now if self._has_looked else -math.inf
        tasks = []
        for task in list_statuses(self.study, self._queued, self._seconds, exits):
            if task.state in (TaskState.LOST, TaskState.FAILED):
                if now - self._ended_since.setdefault(task.name, first) < self._grace_s:
                    task = replace(task, state=TaskState.RUNNING)
            else:
                self._ended_since.pop(task.name, None)
            tasks.append(task)
        return tuple(tasks)

    def _seconds_left(self, tasks: Iterable[TaskStatus]) -> float | None:
        """Return the time that the busiest node still needs, by the times of similar jobs."""
        pace = Pace()
        for (name, _), seconds in self._seconds.items():
            if seconds is not None:
                pace.took(_remove_round(name), seconds)
        unsettled_ids = {task.id for task in tasks if task.state in UNSETTLED}
        variants_of_node: dict[str, list[str]] = {}
        for experiment in self.study.all_experiments():
            for node in experiment.nodes if experiment.id in unsettled_ids else ():
                variants_of_node.setdefault(node, []).append(_remove_round(experiment.id))
        estimates = [pace.seconds_for(of_node) for of_node in variants_of_node.values()]
        known_seconds = [seconds for seconds in estimates if seconds is not None]
        return max(known_seconds, default=0.0) if len(known_seconds) == len(estimates) else None

    def _count_attempts(self, task: TaskStatus) -> int:
        """Return the attempts that began to write, or are in the journal."""
        began = len(find_attempts(self._directory.path, task.id, task.part))
        return max(began, self.study.count_attempts(task.id))

    def _clear_finished(self, tasks: Iterable[TaskStatus]) -> None:
        """Cancel jobs that have written all their results but would be started again. A controller
        that lost its state starts or holds them, so later jobs would never start."""
        unfinished_ids = {task.id for task in tasks if task.state is not TaskState.DONE}
        for name, job in self._find_jobs(JobState.PENDING).items():
            if name not in unfinished_ids:
                client.cancel(job)

    def _find_jobs(self, *states: JobState) -> dict[str, str]:
        """Return the latest job of each experiment that is in one of these states, in whole or in
        part. Names are compared too, because a controller that lost its state reuses numbers."""
        rows = {(row.job, row.name) for row in self._queued if row.state in states}
        return {
            experiment: job
            for experiment, job in self.study.latest_jobs().items()
            if (job, job_name(self.study.id, experiment)) in rows
        }

    def _plan_when_looked_at(self, tasks: Iterable[TaskStatus]) -> None:
        if any(task.state is not TaskState.DONE for task in tasks):
            return
        study = self.study
        planned = plan_experiments(study.exclusive, study.shared, self._read_hosts(), study.options)
        self._directory.write_scripts(study, planned)
        self._note(StudyEntry(experiments=planned))

    def _read_hosts(self) -> Mapping[str, Host]:
        hosts = {}
        for look in self.study.looks:
            attempt = find_done_attempt(self._directory.path, look.id, 0)
            assert attempt is not None, "all nodes are captured"
            try:
                hosts[look.nodes[0]] = load_host(str(attempt / "host.tar.gz"))
            except InputError as error:
                raise InputError(
                    error.message,
                    hint=f"remove {attempt.parent}, and run the command again to capture it again",
                ) from None
        return hosts

    def _submit(
        self, experiment: Experiment, alive: Mapping[str, str], predecessors: Iterable[str]
    ) -> str | None:
        """Raises QueueFullError if Slurm accepts no more jobs while some of the study wait."""
        names = dict.fromkeys((*experiment.after, *predecessors))
        after = tuple(alive[name] for name in names if name in alive)
        try:
            job = client.submit(
                self._directory.path, format_script_name(experiment), after, self._directory.owned
            )
        except NoAnswerError:
            raise
        except ToolError as error:
            if client.is_full(error.message) and alive:
                raise QueueFullError(error.message) from None
            self._note(StudyEntry(rejected=experiment.id, reason=error.message))
            return None
        self._note(StudyEntry(submitted=experiment.id, job=job))
        return job

    def _make_follower_finder(self, alive: Iterable[str]) -> Callable[[Experiment], Iterator[str]]:
        """Return the experiments that follow another on its nodes and are already queued or
        running. A resubmitted job finds them in the queue, and waits until they end."""
        places = {
            experiment.id: place for place, experiment in enumerate(self.study.all_experiments())
        }
        nodes = {experiment.id: experiment.nodes for experiment in self.study.all_experiments()}
        on_node: dict[str, list[str]] = {}
        for name in sorted(set(alive) & places.keys(), key=lambda name: places[name]):
            for node in nodes[name]:
                on_node.setdefault(node, []).append(name)

        def behind(experiment: Experiment) -> Iterator[str]:
            for node in experiment.nodes:
                yield from (n for n in on_node.get(node, ()) if places[n] > places[experiment.id])

        return behind


def _remove_round(experiment: str) -> str:
    return experiment.rpartition("-r")[0] or experiment


def list_statuses(
    study: Study,
    queued_jobs: tuple[QueuedJob, ...],
    done_tasks: Collection[tuple[str, int]],
    exits: Mapping[tuple[str, int], str],
) -> Iterator[TaskStatus]:
    """Yield every task's status. exits: exit statuses of unfinished scripts."""
    of_job: dict[tuple[str, str], list[QueuedJob]] = {}
    for entry in queued_jobs:
        # By name too: a controller that lost its state gives numbers again, to other jobs.
        of_job.setdefault((entry.job, entry.name), []).append(entry)
    rejections, jobs = dict(study.rejected), study.latest_jobs()
    for experiment in study.all_experiments():
        name = experiment.id
        job = jobs.get(name)
        for part in range(experiment.jobs):
            if (name, part) in done_tasks:
                yield TaskStatus(name, part, TaskState.DONE, job)
            elif job is None and name in rejections:
                yield TaskStatus(name, part, TaskState.REJECTED, job, rejections[name])
            elif job is None:
                yield TaskStatus(name, part, TaskState.WAITING)
            else:
                rows = of_job.get((job, job_name(study.id, name)), [])
                yield _find_status(name, part, job, rows, exits.get((name, part)))


def _find_status(
    name: str, part: int, job: str, rows: list[QueuedJob], exit_status: str | None
) -> TaskStatus:
    row = next((entry for entry in rows if entry.task == part), None)
    row = row or next((entry for entry in rows if entry.task is None), None)
    ending = (
        "" if exit_status in (None, "0") else f"its script ended with exit status {exit_status}"
    )

    def status(state: TaskState, reason: str = "") -> TaskStatus:
        return TaskStatus(name, part, state, job, reason)

    if row is None:
        return status(
            TaskState.LOST, ending or f"Slurm no longer lists job {job}, which wrote no results"
        )
    if row.state is JobState.PENDING and "requeued held" in row.reason:
        # Slurm gave up on starting it, after a node or the controller was lost, and holds it.
        return status(TaskState.LOST, row.reason)
    if row.state is JobState.PENDING:
        return replace(
            status(TaskState.PENDING, row.reason),
            needs_somebody=needs_somebody(row.reason),
            is_behind=row.reason.startswith("Dependency"),
        )
    if row.state is JobState.RUNNING:
        return status(TaskState.RUNNING)
    if row.state is JobState.COMPLETED:
        return status(TaskState.FAILED, ending or "it ended without an error and left no results")
    how = row.state_name if row.reason == "" else f"{row.state_name}, {row.reason}"
    if row.state is JobState.CANCELLED:
        return status(TaskState.CANCELLED, how)
    state = TaskState.LOST if row.state is JobState.LOST else TaskState.FAILED
    return status(state, f"{how}; {ending}" if ending else how)


def find_unrecorded(study: Study, jobs: tuple[QueuedJob, ...]) -> Iterator[tuple[str, str]]:
    """Yield (experiment, job) of queued jobs that are not in the journal: homenode ended, or
    sbatch's answer was lost, before the id was recorded."""
    names = {job_name(study.id, planned.id): planned.id for planned in study.all_experiments()}
    recorded_jobs = {job for _, job in study.jobs}
    alive = (JobState.PENDING, JobState.RUNNING)
    queued_jobs = {
        row.job: names[row.name] for row in jobs if row.name in names and row.state in alive
    }
    for job, experiment in sorted(queued_jobs.items(), key=lambda item: int(item[0])):
        if job not in recorded_jobs:
            yield experiment, job
