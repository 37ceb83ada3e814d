"""Study reading: evidence from whatever a user has of a study: its folder, runs, or logs. [I/O]"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from homenode.errors import InputError
from homenode.gap import Gap
from homenode.measure.bindings.collect import read_evidence
from homenode.measure.bindings.collective import Collective
from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.folder import JOURNAL, attempts, read_journal
from homenode.measure.bindings.imported import evidence_of_logs, evidence_of_runs
from homenode.measure.bindings.progress import Study
from homenode.measure.imported.files import find_folders
from homenode.results.store import load_runs


@dataclass(frozen=True, slots=True)
class StudySources:
    """missing: jobs without results."""

    jobs: tuple[JobEvidence, ...]
    collective: Collective | None
    missing: tuple[str, ...]
    gaps: tuple[Gap, ...]


def read_sources(folders: Iterable[Path]) -> StudySources:
    """All of them together. Raises InputError for what is none of the three."""
    jobs: list[JobEvidence] = []
    missing: list[str] = []
    gaps: list[Gap] = []
    collective: Collective | None = None
    seen = set()
    for folder in folders:
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        if not folder.exists():
            raise InputError(f"{folder}: expected a study's folder, found nothing")
        if (folder / JOURNAL).is_file():
            study = read_journal(folder)
            found = read_evidence(folder.resolve(), study)
            jobs += found.jobs
            gaps += found.gaps
            missing += _missing(folder, study)
            collective = found.collective or collective
        else:
            jobs += _of_others(folder, gaps)
    return StudySources(tuple(jobs), collective, tuple(missing), tuple(gaps))


def _missing(folder: Path, study: Study) -> list[str]:
    """Tasks without results, by what the folder tells; the queue is not asked."""
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


def _of_others(folder: Path, gaps: list[Gap]) -> tuple[JobEvidence, ...]:
    """Runs of homenode import below a folder, or the logs themselves."""
    found = evidence_of_logs(find_folders(folder).folders)
    if folder.is_dir() and not found:
        loaded = load_runs(folder)
        gaps += [Gap(one.path, one.reason) for one in loaded.skipped if loaded.runs]
        found = evidence_of_runs(loaded.runs)
    return found
