"""Study collect: a study's raw files as evidence, and as runs in its results folder. [I/O]

The files come from jobs of this user; still, sizes are bounded and links are not followed.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from homenode.errors import HomenodeError, InputError
from homenode.gap import Gap
from homenode.measure.app_metric import figure_of
from homenode.measure.bindings.collective import Collective, collective_of
from homenode.measure.bindings.evidence import JobEvidence, evidence_of
from homenode.measure.bindings.experiments import Experiment, Mode, StudyWishes
from homenode.measure.bindings.folder import attempts
from homenode.measure.bindings.progress import Study
from homenode.measure.orders import AppOrder
from homenode.results.model import Sample
from homenode.results.store import FILE, run_folder, write_run
from homenode.slurm.job_allocation import NodeMachine, node_machine
from homenode.sources import load_host

MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Collected:
    """runs: how many were written, or lay there. gaps: what is open, with the job's name.

    unmeasured: (job, what it did not measure) of jobs that ended and lack what was asked for.
    """

    jobs: tuple[JobEvidence, ...]
    collective: Collective | None
    runs: int
    gaps: tuple[Gap, ...]
    unmeasured: tuple[tuple[str, str], ...] = ()


def collect(folder: Path, study: Study) -> Collected:
    """The evidence of every task that is done; its runs are written where they are not there."""
    found = read_evidence(folder, study)
    runs = 0
    gaps = list(found.gaps)
    for one in found.jobs:
        if one.run is None or not one.run.samples:
            continue
        runs += 1
        try:
            head = one.run.head
            if not (run_folder(folder / "results", head.system, head.name) / FILE).exists():
                write_run(folder / "results", one.run)
        except HomenodeError as error:
            gaps.append(Gap(one.name, error.message))
    return replace(found, runs=runs, gaps=tuple(gaps))


def read_evidence(folder: Path, study: Study) -> Collected:
    """The evidence of every task that is done. Nothing is written."""
    jobs: list[JobEvidence] = []
    gaps: list[Gap] = []
    collective = None
    unmeasured: list[tuple[str, str]] = []
    machines = _Machines(folder, study)
    for experiment in study.experiments:
        for task in range(experiment.jobs):
            attempt = _done(folder, experiment.id, task)
            if attempt is None:
                continue
            texts = _texts(attempt)
            if experiment.mode is Mode.COLLECTIVE:
                gpus = experiment.gpus * len(experiment.nodes)
                collective = collective_of(texts, gpus)
                continue
            name = f"{experiment.id}-task{task}-{attempt.name}"
            app = _app(study.wishes, texts, name, gaps)
            app = tuple(replace(sample, node=experiment.numa) for sample in app)
            one = evidence_of(experiment, name, texts, machines.of(experiment), app)
            jobs.append(one)
            lacking = _lacking(folder, study.wishes, one, app)
            if lacking:
                unmeasured.append((name, lacking))
    by_reason: dict[Gap, list[str]] = {}
    for one in jobs:
        for gap in one.gaps:
            by_reason.setdefault(gap, []).append(one.name)
    for gap, names in by_reason.items():
        who = names[0] if len(names) == 1 else f"{len(names)} jobs"
        gaps.append(Gap(f"{who}: {gap.subject}", gap.reason))
    return Collected(tuple(jobs), collective, 0, tuple(gaps), tuple(unmeasured))


def _lacking(folder: Path, wishes: StudyWishes, job: JobEvidence, app: tuple[Sample, ...]) -> str:
    """What a job that ended did not measure though it was asked for: "" where nothing lacks.

    Copies may lack where the others are there: a node may have no nvbandwidth.
    """
    has_copies = len(job.samples) > len(app)
    bench = list((folder / "results").glob(f"*/{job.name}-cpus/{FILE}")) if wishes.tests else []
    lacking = []
    if wishes.app and not app:
        lacking.append(f"no figure of {Path(wishes.app[0]).name}")
    if wishes.tests and not bench:
        lacking.append(f"no results of {', '.join(wishes.tests)}")
    if not has_copies and not app and not bench:
        lacking.insert(0, "no copies")
        return "; ".join(lacking)
    return "; ".join(lacking[:1]) if wishes.app and not app else ""


class _Machines:
    """What each cluster node is: as described, or as its look job captured it."""

    def __init__(self, folder: Path, study: Study) -> None:
        self._folder, self._study = folder, study
        self._known: dict[str, NodeMachine | None] = {}

    def of(self, experiment: Experiment) -> NodeMachine | None:
        node = experiment.nodes[0]
        if node not in self._known:
            self._known[node] = self._load(node)
        return self._known[node]

    def _load(self, node: str) -> NodeMachine | None:
        source = self._study.host
        if source is None:
            attempt = _done(self._folder, f"look-{node}", 0)
            source = None if attempt is None else str(attempt / "host.tar.gz")
        if source is None:
            return None
        try:
            return node_machine(load_host(source))
        except InputError:
            # It was there when the study began; the rest of the report does not need it.
            return None


def _done(folder: Path, experiment: str, task: int) -> Path | None:
    """The latest attempt that wrote all of its files."""
    done = [one for one in attempts(folder, experiment, task) if (one / "done").exists()]
    return done[-1] if done else None


def _texts(attempt: Path) -> dict[str, str]:
    """Files that cannot be read are as those that are not there, and said so beside them."""
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


def _app(
    wishes: StudyWishes, texts: dict[str, str], name: str, gaps: list[Gap]
) -> tuple[Sample, ...]:
    """The figure of the user's own program in this job."""
    if not wishes.app or wishes.metric is None or "app.txt" not in texts:
        return ()
    program = Path(wishes.app[0]).name
    order = AppOrder(wishes.app, wishes.metric, wishes.lower_is_better)
    try:
        value = figure_of(order, texts["app.txt"])
    except HomenodeError as error:
        gaps.append(Gap(f"{name}: {program}", error.message))
        return ()
    kind, unit = ("app-time", "ns") if wishes.lower_is_better else ("app-rate", "units_per_s")
    scale = 1e9 if wishes.lower_is_better else 1.0
    return (Sample(f"{kind}:{program}", unit, value * scale),)
