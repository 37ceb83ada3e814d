"""Study directory: scripts, journal and raw files, on a file system that all nodes share. [I/O]

    study.jsonl   the journal: a head, then a line for each event, written before it counts
    host.json     the nodes' hosts from --host
    jobs/ log/    the scripts, and what the jobs printed
    raw/EXPERIMENT/task-N/JOB.RESTART/   what a job wrote down; `done` is its last file
    results/      runs, which homenode bench writes in the jobs

The files come from jobs of this user; still, sizes are bounded and links are not followed.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode import formats
from homenode.cluster.slurm.job_allocation import NodeMachine, node_machine
from homenode.cluster.slurm.study.evidence import (
    JobEvidence,
    StudySources,
    build_evidence,
    find_sharing,
    gpu_hours,
    list_log_evidence,
    list_run_evidence,
    parse_collective,
    parse_record,
)
from homenode.cluster.slurm.study.experiments import (
    MAX_JOBS,
    NAME,
    Experiment,
    NodeSharing,
    Study,
    format_script_name,
    render_script,
)
from homenode.errors import HomenodeError, HostError, InputError, find_near, not_found
from homenode.findings import Gap
from homenode.machine.topology import Host
from homenode.measure.experiment import ExperimentJournal
from homenode.measure.imported_files import find_directories
from homenode.measure.results.store import FILE, load_runs, read_run
from homenode.measure.run_directory import HOST, list_run_gaps
from homenode.safe.durable import open_directory, replace_file
from homenode.safe.input_files import open_below
from homenode.text import command_line
from homenode.units import parse_whole
from homenode.vm.sources import load_host, parse_host

JOURNAL = "study.jsonl"
DESCRIBED = "host.json"
KIND = "slurm-study"
HELD_S = 15.0
"""The sbatch of a homenode that was killed holds the study; so long it is waited for: Slurm's own
MessageTimeout, after which sbatch gives up, is 10 s."""

_FULL = "the jobs go on without homenode; free some space and start the command again"
_ATTEMPT = re.compile(r"(\d{1,12})\.(\d{1,6})", re.ASCII)


class StudyEntry(Struct, frozen=True, omit_defaults=True):
    """A line: the planned experiments, or an event of an experiment."""

    experiments: tuple[Experiment, ...] = ()
    submitted: str | None = None  # an experiment, with its job's id
    job: str | None = None
    rejected: str | None = None  # an experiment, with sbatch's reason
    reason: str | None = None
    again: str | None = None  # an experiment whose submission is missing in the journal


class StudyDirectory(ExperimentJournal[Study, StudyEntry]):
    """The directory of one study, locked by this process until it is closed. owned: descriptors for
    programs that must end before another process continues the study."""

    __slots__ = ("_done", "_held_s", "_lock", "owned")

    def __init__(self, path: Path, held_s: float = HELD_S) -> None:
        path = path.resolve()
        super().__init__(
            path,
            KIND,
            Study,
            StudyEntry,
            journal=JOURNAL,
            private=False,
            hint=lambda number: _FULL,
        )
        self._held_s = held_s
        self._lock = ExitStack()
        self.owned: tuple[int, ...] = ()
        self._done: dict[tuple[str, int], float | None] = {}

    def create(self, study: Study, described_host: Host | None = None) -> Study:
        """Create the directory with its first lines. described_host: the host that the user named.
        Raises HostError if it cannot.

        The journal's first line is written last: without it the directory is created again.
        """
        if "%" in str(self.path) or not str(self.path).isprintable():
            raise HostError(f"{self.path}: expected a path without % that can be printed")
        with self.convert_errors():
            for name in ("jobs", "log", "raw", "results"):
                os.close(open_directory(self.path, name))
            for name in ("raw", "results"):
                if any((self.path / name).iterdir()):
                    raise HostError(
                        f"{self.path / name}: this directory is not empty, and no study here "
                        "lists its files",
                        hint="choose another directory with -o",
                    )
        self._open()
        if self.has_journal:
            raise HostError(f"{self.path}: another study has just begun in it")
        self._reject_other_scripts(study)
        self.write_scripts(study, study.all_experiments())
        if described_host is not None:
            self.write(DESCRIBED, formats.encode("host", described_host).encode(), 0o644)
        self.begin_with(study)
        return study

    def load(self) -> Study:
        """Return the study of its journal, and lock its directory. Raises InputError for an invalid
        journal, HostError if another process holds it."""
        self._open()
        study = self.study()
        absent = (
            experiment
            for experiment in study.all_experiments()
            if not (self.path / format_script_name(experiment)).exists()
        )
        self.write_scripts(study, tuple(absent))
        return study

    def write_dry_run(self, study: Study) -> None:
        """Write the scripts without starting the study. Raises HostError."""
        with self.convert_errors():
            for name in ("jobs", "log"):  # Slurm does not create the directory of --output
                os.close(open_directory(self.path, name))
        self._reject_other_scripts(study)
        self.write_scripts(study, study.all_experiments())

    def _reject_other_scripts(self, study: Study) -> None:
        """Raise HostError if jobs/ has scripts of jobs that this study does not have."""
        names = {format_script_name(experiment) for experiment in study.all_experiments()}
        paths = sorted((self.path / "jobs").glob("*.sbatch"))
        if others := [path for path in paths if f"jobs/{path.name}" not in names]:
            raise HostError(
                f"{others[0]}: a script of another study or dry run"
                + (f", and {len(others) - 1} more" if len(others) > 1 else ""),
                hint="remove them, or choose another directory with -o",
            )

    def write_scripts(self, study: Study, experiments: tuple[Experiment, ...]) -> None:
        """Write the scripts of these experiments. Raises HostError."""
        with self.convert_errors():
            for experiment in experiments:
                script = render_script(experiment, study.options, study.id)
                path = self.path / format_script_name(experiment)
                replace_file(path, script.encode(), 0o755, synced=False)

    def note(self, study: Study, entry: StudyEntry) -> Study:
        """Record an event and return the updated study. Raises HostError."""
        self.add(entry)
        return _apply(study, entry, str(self.journal_path))

    def collect_outcomes(
        self, study: Study
    ) -> tuple[Mapping[tuple[str, int], float | None], Mapping[tuple[str, int], str]]:
        """Finished tasks with their seconds; exit statuses of the other tasks' last attempts."""
        exits: dict[tuple[str, int], str] = {}
        for experiment in study.all_experiments():
            for task in range(experiment.jobs):
                if (experiment.id, task) in self._done:
                    continue  # what is done stays done: a large study is not walked each time
                tries = find_attempts(self.path, experiment.id, task)
                if (attempt := find_done_attempt(self.path, experiment.id, task)) is not None:
                    self._done[experiment.id, task] = _read_duration(attempt)
                elif tries and (status := _exit_status(tries[-1])) is not None:
                    exits[experiment.id, task] = status
        return self._done, exits

    def close(self) -> None:
        self._lock.close()
        self.owned = ()

    def study(self) -> Study:
        """Return the study of its journal, without locking it. Raises InputError."""
        study, entries = self.contents()
        source = str(self.journal_path)
        _check(study.all_experiments(), f"{source}:1")
        for entry in entries:
            study = _apply(study, entry, source)
        return study

    def _open(self) -> None:
        if not self.owned:
            lock = self.hold_lock(
                "in use by another homenode slurm study",
                "wait for it, or end it: the jobs go on without it",
                wait_s=self._held_s,
            )
            self.owned = (self._lock.enter_context(lock),)


def _exit_status(attempt: Path) -> str | None:
    """The exit status of an ended script, with the reason of homenode or the shell, else None."""
    status = _start_of(attempt / "exit", 10)
    if status is None:
        return None
    texts = (_start_of(attempt / f"{name}.err", 1 << 16) for name in ("bench.txt", "host.tar.gz"))
    errors = "\n".join(filter(None, texts)).splitlines()
    status = status.strip()
    reason = next((line for line in errors if line.startswith(_PREFIX)), "")
    if not reason and errors:
        reason = f"{_NOT_STARTED if status in _DID_NOT_START else ''}{errors[-1]}"
    return f"{status}: {reason.removeprefix(_PREFIX)[:300]}".rstrip(": ")


_PREFIX = "homenode: "
_NOT_STARTED = (
    "homenode did not start, which needs its virtual environment and Python 3.11 or later on the "
    "node: "
)
_DID_NOT_START = ("1", "126", "127")
"""Exit statuses, without results or a line of homenode's, of a Python that cannot import it and of
a shell that finds no interpreter or file."""


def _read_duration(attempt: Path) -> float | None:
    """Return the duration of a finished job, by its own clock."""
    times = {name: _start_of(attempt / name, 20) or "" for name in ("started", "ended")}
    hours = gpu_hours(times, gpus=1)
    return None if hours is None else 3600 * hours


def _start_of(path: Path, max_bytes: int) -> str | None:
    try:
        with open_below(path.parent, path.name) as file:
            return file.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return None


def _apply(study: Study, entry: StudyEntry, place: str) -> Study:
    match entry:
        case StudyEntry(experiments=planned) if planned:
            _check(planned, place)
            return replace(study, experiments=planned)
        case StudyEntry(submitted=str(experiment), job=str(job)) if parse_whole(job) is not None:
            return replace(study, jobs=(*study.jobs, (experiment, job)))
        case StudyEntry(rejected=str(experiment), reason=str(reason)):
            return replace(study, rejected=(*study.rejected, (experiment, reason)))
        case StudyEntry(again=str(experiment)):
            return replace(
                study,
                repeated=(*study.repeated, experiment),
                jobs=tuple(row for row in study.jobs if row[0] != experiment),
                rejected=tuple(row for row in study.rejected if row[0] != experiment),
            )
    raise InputError(f"{place}: expected what became of an experiment, found {entry}"[:300])


def _check(experiments: tuple[Experiment, ...], place: str) -> None:
    """Raise InputError for names that lead out of the directory, and for too many jobs."""
    for experiment in experiments:
        if not (
            NAME.fullmatch(experiment.id)
            and experiment.nodes
            and all(NAME.fullmatch(node) for node in experiment.nodes)
            and 0 < experiment.jobs <= MAX_JOBS
        ):
            raise InputError(f"{place}: expected an experiment, found {experiment.id[:60]!r}")


def find_attempts(directory: Path, experiment: str, task: int) -> tuple[Path, ...]:
    """Return the directories of a task's attempts, the oldest first."""
    root = directory / "raw" / experiment / f"task-{task}"
    try:
        entries = [
            (name, path) for path in root.iterdir() if (name := _ATTEMPT.fullmatch(path.name))
        ]
        directories = [
            (int(name[1]), int(name[2]), path) for name, path in entries if path.is_dir()
        ]
    except OSError:
        return ()
    return tuple(path for *_, path in sorted(directories))


MAX_FILE_BYTES = 16 << 20


def read_sources(directories: Iterable[Path]) -> StudySources:
    """Return the evidence of all sources. Raises InputError for a directory without any."""
    total = StudySources()
    seen_sources = set()
    for directory in directories:
        if directory.resolve() in seen_sources:
            continue
        seen_sources.add(directory.resolve())
        if not directory.exists():
            match = find_near(directory.name, [path.name for path in directory.parent.glob("*/")])
            hint = command_line("homenode", "slurm", "study", "-o", directory, "--dry-run")
            if match is not None:
                hint = command_line("homenode", "slurm", "report", directory.with_name(match))
            raise not_found(str(directory), "directory", hint)
        if (directory / JOURNAL).is_file():
            sources = read_study(directory.resolve(), StudyDirectory(directory).study())
        else:
            sources = _read_foreign_sources(directory)
        total = StudySources(
            jobs=total.jobs + sources.jobs,
            collective=sources.collective or total.collective,
            missing=total.missing + sources.missing,
            gaps=total.gaps + sources.gaps,
            unmeasured=total.unmeasured + sources.unmeasured,
        )
    return total


def read_study(directory: Path, study: Study) -> StudySources:
    """Return the evidence of every finished task, and the missing tasks according to the directory;
    the queue is not queried."""
    jobs: list[JobEvidence] = []
    gaps: list[Gap] = []
    collective = None
    unmeasured: list[tuple[str, str]] = []
    hosts = _Hosts(directory, study)
    paths = sorted((directory / "results").glob(f"*/*/{FILE}"))
    runs = {path.parent.name: path.parent for path in paths}
    for experiment in study.experiments:
        for task in range(experiment.jobs):
            attempt = find_done_attempt(directory, experiment.id, task)
            if attempt is None:
                continue
            texts = _read_texts(attempt)
            if experiment.mode is NodeSharing.COLLECTIVE:
                collective = parse_collective(texts, experiment.gpus * len(experiment.nodes))
                continue
            name = f"{experiment.id}-task{task}-{attempt.name}"
            try:
                evidence = _read_evidence(experiment, name, texts, runs, hosts)
            except HomenodeError as error:
                gaps.append(Gap(name, error.message))
                unmeasured.append((name, "its results cannot be read"))
                continue
            jobs.append(evidence)
            app = study.options.app
            if app and not any(s.metric.startswith("app-") for s in evidence.samples):
                unmeasured.append((name, f"no result of {Path(app[0]).name}"))
    gaps += _list_shared_gaps(jobs)
    return StudySources(
        jobs=tuple(jobs),
        collective=collective,
        missing=tuple(_list_missing_results(directory, study)),
        gaps=tuple(gaps),
        unmeasured=tuple(unmeasured),
    )


def _read_evidence(
    experiment: Experiment,
    name: str,
    texts: Mapping[str, str],
    runs: Mapping[str, Path],
    hosts: "_Hosts",
) -> JobEvidence:
    """Raises InputError if the run of a finished job is missing or invalid."""
    if name not in runs:
        raise InputError(f"results/*/{name}/{FILE}: no such file")
    directory = runs[name]
    run = read_run(directory)
    host, machine = hosts.lookup(experiment, directory)
    record = parse_record(texts, experiment.gpus)
    evidence = build_evidence(experiment, run, record, host, machine)
    return replace(evidence, gaps=(*evidence.gaps, *list_run_gaps(directory)))


def _list_shared_gaps(jobs: Iterable[JobEvidence]) -> Iterable[Gap]:
    """Yield unknown facts, each once for all its jobs."""
    names: dict[Gap, list[str]] = {}
    for job in jobs:
        for gap in job.gaps:
            names.setdefault(gap, []).append(job.name)
    for gap, job_names in names.items():
        who = job_names[0] if len(job_names) == 1 else f"{len(job_names)} jobs"
        yield Gap(f"{who}: {gap.subject}", gap.reason)


class _Hosts:
    """The host of each cluster node: captured by its jobs, or described by the user."""

    def __init__(self, directory: Path, study: Study) -> None:
        self._directory, self._study = directory, study
        self._known: dict[str, tuple[Host | None, NodeMachine | None]] = {}

    def lookup(self, experiment: Experiment, run: Path) -> tuple[Host | None, NodeMachine | None]:
        node = experiment.nodes[0]
        if node not in self._known:
            host = None
            with contextlib.suppress(InputError):  # the rest of the report does without
                host = load_host(str(run / HOST))
            described_host = host if self._study.host is None else self._read_described()
            machine = host if host is not None and host.pci_devices else described_host
            self._known[node] = host, None if machine is None else node_machine(machine)
        return self._known[node]

    def _read_described(self) -> Host | None:
        """Read the host description that was saved when the study began."""
        content = StudyDirectory(self._directory).read(DESCRIBED)
        with contextlib.suppress(InputError):  # likewise
            if content is not None:
                return parse_host(content.decode("utf-8", "surrogateescape"), DESCRIBED)
        return None


def find_done_attempt(directory: Path, experiment: str, task: int) -> Path | None:
    """Return the latest attempt that wrote all its files."""
    done_attempts = [
        attempt
        for attempt in find_attempts(directory, experiment, task)
        if (attempt / "done").exists()
    ]
    return done_attempts[-1] if done_attempts else None


def _read_texts(attempt: Path) -> dict[str, str]:
    """Return the texts of files; unreadable files count as missing, with the reason in NAME.err."""
    texts = {}
    for path in sorted(attempt.iterdir()):
        try:
            if path.is_symlink() or not path.is_file() or path.suffix == ".gz":
                continue
            with open_below(attempt, path.name) as file:
                texts[path.name] = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError as error:
            texts[f"{path.name}.err"] = f"cannot be read: {error.strerror}"
    return texts


def _list_missing_results(directory: Path, study: Study) -> list[str]:
    lines = []
    rejections, jobs = dict(study.rejected), study.latest_jobs()
    for experiment in study.all_experiments():
        for task in range(experiment.jobs):
            if find_done_attempt(directory, experiment.id, task) is not None:
                continue
            tries = find_attempts(directory, experiment.id, task)
            name = experiment.id if experiment.jobs == 1 else f"{experiment.id} task {task}"
            if experiment.id in rejections:
                lines.append(f"{name}: rejected: {rejections[experiment.id]}")
            elif tries:
                status = _exit_status(tries[-1])
                how = (
                    "began, and did not end"
                    if status is None
                    else f"its script ended with exit status {status}"
                )
                lines.append(f"{name}: {how} (job {tries[-1].name})")
            else:
                job = jobs.get(experiment.id)
                lines.append(f"{name}: " + (f"job {job} did not begin" if job else "not submitted"))
    if not study.experiments:
        lines.append("all measuring jobs: they are planned after every node was captured")
    return lines


def _read_foreign_sources(directory: Path) -> StudySources:
    """Return the runs of jobs or of homenode import below a directory, or the logs themselves."""
    sources = find_directories(directory)
    jobs = list_log_evidence(sources.directories)
    names = {job.name for job in jobs}
    logs = [name for source in sources.directories for name in source.texts if name not in names]
    gaps = [*sources.skipped, *(Gap(name, "no result of nvbandwidth in it") for name in logs)]
    gaps = [gap for gap in gaps if find_sharing(Path(gap.subject).stem) is not None]
    if directory.is_dir() and not jobs:
        loaded_runs = load_runs(directory)
        jobs = list_run_evidence(loaded_runs.runs)
        gaps = [*loaded_runs.skipped] if jobs else gaps
    return StudySources(jobs=jobs, gaps=tuple(gaps))
