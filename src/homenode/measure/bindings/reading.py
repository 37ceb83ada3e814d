"""Study reading: evidence from whatever a user has of a study: its folder, runs, or logs. [I/O]

The files come from jobs of this user; still, sizes are bounded and links are not followed.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from homenode.errors import HomenodeError, InputError
from homenode.gap import Gap
from homenode.measure.bindings.collective import Collective, collective_of
from homenode.measure.bindings.evidence import (
    JobEvidence,
    evidence_of,
    evidence_of_logs,
    evidence_of_runs,
    parse_record,
)
from homenode.measure.bindings.experiments import Experiment, Mode
from homenode.measure.bindings.folder import JOURNAL, attempts, read_journal
from homenode.measure.bindings.progress import Study
from homenode.measure.imported.files import find_folders
from homenode.measure.run_folder import HOST, gaps_of_run
from homenode.results.store import FILE, load_runs, read_run
from homenode.slurm.job_allocation import NodeMachine, node_machine
from homenode.sources import load_host
from homenode.topology import Host

MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StudySources:
    """missing: jobs without results. unmeasured: (job, what it was asked for and has no figure of).

    gaps: what is open, with the job's name.
    """

    jobs: tuple[JobEvidence, ...] = ()
    collective: Collective | None = None
    missing: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
    unmeasured: tuple[tuple[str, str], ...] = ()


def read_sources(folders: Iterable[Path]) -> StudySources:
    """All of them together. Raises InputError for what is no study, runs or logs."""
    found = StudySources()
    seen = set()
    for folder in folders:
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        if not folder.exists():
            raise InputError(f"{folder}: expected a study's folder, found nothing")
        if (folder / JOURNAL).is_file():
            one = read_study(folder.resolve(), read_journal(folder))
        else:
            one = _of_others(folder)
        found = StudySources(
            found.jobs + one.jobs,
            one.collective or found.collective,
            found.missing + one.missing,
            found.gaps + one.gaps,
            found.unmeasured + one.unmeasured,
        )
    return found


def read_study(folder: Path, study: Study) -> StudySources:
    """The evidence of every task that is done, and what is missing by what the folder gives; the
    queue is not asked."""
    jobs: list[JobEvidence] = []
    gaps: list[Gap] = []
    collective = None
    unmeasured: list[tuple[str, str]] = []
    hosts = _Hosts(folder, study)
    runs = _runs_by_name(folder / "results")
    for experiment in study.experiments:
        for task in range(experiment.jobs):
            attempt = _done(folder, experiment.id, task)
            if attempt is None:
                continue
            texts = _texts(attempt)
            if experiment.mode is Mode.COLLECTIVE:
                collective = collective_of(texts, experiment.gpus * len(experiment.nodes))
                continue
            name = f"{experiment.id}-task{task}-{attempt.name}"
            try:
                one = _evidence(experiment, name, texts, runs, hosts)
            except HomenodeError as error:
                gaps.append(Gap(name, error.message))
                unmeasured.append((name, "its results cannot be read"))
                continue
            jobs.append(one)
            app = study.options.app
            if app and not any(s.metric.startswith("app-") for s in one.samples):
                unmeasured.append((name, f"no figure of {Path(app[0]).name}"))
    gaps += _joined(jobs)
    missing = tuple(_missing(folder, study))
    return StudySources(tuple(jobs), collective, missing, tuple(gaps), tuple(unmeasured))


def _evidence(
    experiment: Experiment,
    name: str,
    texts: Mapping[str, str],
    runs: Mapping[str, Path],
    hosts: "_Hosts",
) -> JobEvidence:
    """Raises InputError where the run of a job that is done is not there or is none."""
    if name not in runs:
        raise InputError(f"results/*/{name}/{FILE}: expected a run, found none")
    folder = runs[name]
    run = read_run(folder)
    host, machine = hosts.of(experiment, folder)
    record = parse_record(texts, experiment.gpus)
    one = evidence_of(experiment, run, record, host, machine)
    return replace(one, gaps=(*one.gaps, *gaps_of_run(folder)))


def _runs_by_name(results: Path) -> dict[str, Path]:
    return {path.parent.name: path.parent for path in sorted(results.glob(f"*/*/{FILE}"))}


def _joined(jobs: Iterable[JobEvidence]) -> Iterable[Gap]:
    """What is open, once for all jobs of which it is."""
    names: dict[Gap, list[str]] = {}
    for one in jobs:
        for gap in one.gaps:
            names.setdefault(gap, []).append(one.name)
    for gap, of in names.items():
        who = of[0] if len(of) == 1 else f"{len(of)} jobs"
        yield Gap(f"{who}: {gap.subject}", gap.reason)


class _Hosts:
    """What each cluster node is: as its jobs captured it when they measured; for what Slurm says,
    as the user described it."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._folder, self._study = folder, study
        self._known: dict[str, tuple[Host | None, NodeMachine | None]] = {}

    def of(self, experiment: Experiment, run: Path) -> tuple[Host | None, NodeMachine | None]:
        node = experiment.nodes[0]
        if node not in self._known:
            captured = _host(run / HOST)
            described = captured if self._study.host is None else _host(self._study.host)
            machine = captured if captured is not None and captured.pci_devices else described
            self._known[node] = captured, None if machine is None else node_machine(machine)
        return self._known[node]


def _host(source: Path | str) -> Host | None:
    """None where it cannot be read: the rest of the report does not need it."""
    with contextlib.suppress(InputError):
        return load_host(str(source))
    return None


def _done(folder: Path, experiment: str, task: int) -> Path | None:
    """The latest attempt that wrote all of its files."""
    done = [one for one in attempts(folder, experiment, task) if (one / "done").exists()]
    return done[-1] if done else None


def _texts(attempt: Path) -> dict[str, str]:
    """Files that cannot be read are as those that are not there, and a NAME.err says so."""
    found = {}
    for path in sorted(attempt.iterdir()):
        try:
            if path.is_symlink() or not path.is_file() or path.suffix == ".gz":
                continue
            with path.open("rb") as file:
                found[path.name] = file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError as error:
            found[f"{path.name}.err"] = f"cannot be read: {error.strerror}"
    return found


def _missing(folder: Path, study: Study) -> list[str]:
    """Tasks without results."""
    found = []
    refused, jobs = dict(study.refused), study.latest_jobs()
    for one in study.everything():
        for task in range(one.jobs):
            tries = attempts(folder, one.id, task)
            if any((attempt / "done").exists() for attempt in tries):
                continue
            name = one.id if one.jobs == 1 else f"{one.id} task {task}"
            if one.id in refused:
                found.append(f"{name}: refused: {refused[one.id]}")
            elif tries:
                found.append(f"{name}: began, and did not end (job {tries[-1].name})")
            else:
                job = jobs.get(one.id)
                found.append(f"{name}: " + (f"job {job} did not begin" if job else "not submitted"))
    if not study.experiments:
        found.append("all measuring jobs: they are planned when every node was looked at")
    return found


def _of_others(folder: Path) -> StudySources:
    """Runs of jobs or of homenode import below a folder, or the logs themselves."""
    found = evidence_of_logs(find_folders(folder).folders)
    gaps: tuple[Gap, ...] = ()
    if folder.is_dir() and not found:
        loaded = load_runs(folder)
        gaps = tuple(Gap(one.path, one.reason) for one in loaded.skipped if loaded.runs)
        found = evidence_of_runs(loaded.runs)
    return StudySources(found, gaps=gaps)
