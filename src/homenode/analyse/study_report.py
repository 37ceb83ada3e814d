"""Study report: what a study of bindings and queues came to, as one value."""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.analyse.study_verdicts import Locality, WorkVerdict, locality_of, verdicts
from homenode.gap import Gap
from homenode.measure.bindings.collective import Collective
from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.experiments import Mode
from homenode.measure.bindings.figures import (
    Comparison,
    Matrix,
    Mean,
    comparisons,
    matrices,
    mean_of,
    shape_of,
    values_of,
)
from homenode.measure.bindings.outliers import Outlier, slow_in_collective, slow_nodes_and_links
from homenode.measure.bindings.power import Power
from homenode.measure.bindings.record import nearness
from homenode.measure.imported.runs import CPU_ONLY, GPU_UNKNOWN


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job: where it was and what it cost. None where it was not recorded.

    met: jobs that measured at the same time, of how many. others: other people's on the node.
    """

    name: str
    node: str
    mode: Mode
    gpus: int
    locality: Locality
    why: str
    queue_wait_s: float | None
    gpu_hours: float | None
    met: str | None
    others: int | None


@dataclass(frozen=True, slots=True)
class NicLine:
    """How near a GPU's nearest NIC is."""

    node: str
    gpu: str
    nic: str
    nearness: str


@dataclass(frozen=True, slots=True)
class PowerLine:
    """Of one metric and queue. device: "GPU" or "packages". None where nothing moved."""

    metric: str
    mode: Mode
    device: str
    watts: Mean
    joules_per_gb: Mean


@dataclass(frozen=True, slots=True)
class StudyReport:
    """replayed: what stand-ins for measuring tools said; such figures mean nothing.

    systems: kinds of GPU; figures over all nodes mean little where there are several.
    between_gpus: mean over all jobs. missing: jobs without results, and why.
    """

    source: str
    replayed: tuple[str, ...]
    nodes: tuple[str, ...]
    systems: tuple[str, ...]
    matrices: tuple[Matrix, ...]
    comparisons: tuple[Comparison, ...]
    between_gpus: Mean | None
    own_program: tuple[tuple[str, str, Mean], ...]
    jobs: tuple[JobLine, ...]
    verdicts: tuple[WorkVerdict, ...]
    outliers: tuple[Outlier, ...]
    collective: Collective | None
    nics: tuple[NicLine, ...]
    power: tuple[PowerLine, ...]
    missing: tuple[str, ...]
    gaps: tuple[Gap, ...]


def study_report(
    source: str,
    jobs: tuple[JobEvidence, ...],
    collective: Collective | None,
    missing: tuple[str, ...],
    gaps: tuple[Gap, ...],
) -> StudyReport:
    """The report of this evidence. source: the folder, in the user's words."""
    found, compared = matrices(jobs), comparisons(jobs)
    outliers = slow_nodes_and_links(found)
    if collective is not None:
        outliers += slow_in_collective(collective)
    said = [job.replayed for job in jobs] + [collective.replayed if collective else None]
    return StudyReport(
        source,
        tuple(dict.fromkeys(one for one in said if one is not None)),
        tuple(dict.fromkeys(job.node for job in jobs)),
        tuple(sorted({job.system for job in jobs if job.system} - {CPU_ONLY, GPU_UNKNOWN})),
        found,
        compared,
        mean_of(values_of(jobs, "p2p-bandwidth", *Mode)),
        tuple(_own_program(jobs)),
        tuple(_line(job) for job in jobs),
        verdicts(jobs, compared),
        outliers,
        collective,
        tuple(_nics(jobs)),
        tuple(_power(jobs)),
        missing,
        (*gaps, *(collective.gaps if collective is not None else ())),
    )


def _line(job: JobEvidence) -> JobLine:
    locality, why = locality_of(job)
    record = job.record
    return JobLine(
        job.name,
        job.node,
        job.mode,
        job.gpus,
        locality,
        why,
        None if record is None else record.queue_wait_s,
        None if record is None else record.gpu_hours,
        None if record is None else record.met,
        None if record is None else record.others,
    )


def _own_program(jobs: tuple[JobEvidence, ...]) -> Iterator[tuple[str, str, Mean]]:
    """(metric, how it was bound, mean) of the user's own program."""
    found: dict[tuple[str, str], list[float]] = {}
    for job in jobs:
        for sample in job.samples:
            if sample.metric.startswith(("app-rate:", "app-time:")):
                how = shape_of(job)
                if job.mode is Mode.EXCLUSIVE:
                    how = f"exclusive, bound to node {sample.node}"
                found.setdefault((sample.metric, how), []).append(sample.value)
    for (metric, how), values in sorted(found.items()):
        mean = mean_of(values)
        if mean is not None:
            yield metric, how, mean


def _nics(jobs: tuple[JobEvidence, ...]) -> Iterator[NicLine]:
    seen = set()
    for job in jobs:
        if job.record is None or not job.record.nics:
            continue
        for gpu in job.record.gpus:
            if (job.node, gpu.bdf) in seen:
                continue
            seen.add((job.node, gpu.bdf))
            order = ("same switch", "same root complex", "same node", "another node", "unknown")
            near = min(job.record.nics, key=lambda nic: order.index(nearness(gpu, nic)))
            yield NicLine(job.node, str(gpu.bdf), near.name, nearness(gpu, near))


def _power(jobs: tuple[JobEvidence, ...]) -> Iterator[PowerLine]:
    found: dict[tuple[str, Mode, str], list[Power]] = {}
    for job in jobs:
        for one in job.power:
            device = "packages" if one.device is None else "GPU"
            found.setdefault((one.metric, job.mode, device), []).append(one)
    for (metric, mode, device), of in found.items():
        watts, joules = mean_of([p.watts for p in of]), mean_of([p.joules_per_gb for p in of])
        if watts is not None and joules is not None:
            yield PowerLine(metric, mode, device, watts, joules)
