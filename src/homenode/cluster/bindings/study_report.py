"""Study report: what a study of bindings and queues came to, as one value."""

from collections.abc import Iterator

from msgspec import Struct

from homenode.cluster.bindings.evidence import Collective, JobEvidence
from homenode.cluster.bindings.experiments import Mode
from homenode.cluster.bindings.study_maps import StudyMatrix, matrices
from homenode.cluster.bindings.study_outliers import (
    Outlier,
    slow_in_collective,
    slow_nodes_and_links,
)
from homenode.cluster.bindings.study_verdicts import (
    CopySpread,
    JobLocality,
    WorkVerdict,
    comparisons,
    locality_of,
    spreads,
    verdicts,
)
from homenode.decide.comparison import Comparison
from homenode.gap import Gap
from homenode.measure.results.model import CPU_ONLY, GPU_UNKNOWN


class JobLine(Struct, frozen=True, kw_only=True):
    """One job: where it was and what it cost. None where it was not recorded.

    met: jobs that measured at the same time, of how many. others: other people's on the node.
    """

    name: str
    node: str
    mode: Mode
    gpus: int
    locality: JobLocality
    why: str
    queue_wait_s: float | None
    gpu_hours: float | None
    met: str | None
    others: int | None


class NicLine(Struct, frozen=True, kw_only=True):
    """How near a GPU's nearest NIC is."""

    node: str
    gpu: str
    nic: str
    nearness: str


class StudyReport(Struct, frozen=True, kw_only=True):
    """replayed: what stand-ins for measuring tools said; such figures mean nothing.

    systems: kinds of GPU; figures over all nodes mean little where there are several. comparisons:
    of copies by where memory was, and of all else by how jobs were bound. spreads: of copies, by
    how they were made. setup: hardware and tools, (what, which).
    missing: jobs without results, and why.
    """

    source: str
    replayed: tuple[str, ...]
    nodes: tuple[str, ...]
    systems: tuple[str, ...]
    matrices: tuple[StudyMatrix, ...]
    comparisons: tuple[Comparison, ...]
    jobs: tuple[JobLine, ...]
    verdicts: tuple[WorkVerdict, ...]
    outliers: tuple[Outlier, ...]
    collective: Collective | None
    nics: tuple[NicLine, ...]
    missing: tuple[str, ...]
    gaps: tuple[Gap, ...]
    spreads: tuple[CopySpread, ...] = ()
    setup: tuple[tuple[str, str], ...] = ()


def study_report(
    source: str,
    jobs: tuple[JobEvidence, ...],
    collective: Collective | None,
    missing: tuple[str, ...],
    gaps: tuple[Gap, ...],
) -> StudyReport:
    """The report of this evidence. source: the folder, in the user's words."""
    found = matrices(jobs)
    outliers = slow_nodes_and_links(found)
    if collective is not None:
        outliers += slow_in_collective(collective)
    said = [job.replayed for job in jobs] + [collective.replayed if collective else None]
    return StudyReport(
        source=source,
        replayed=tuple(dict.fromkeys(one for one in said if one is not None)),
        nodes=tuple(dict.fromkeys(job.node for job in jobs)),
        systems=tuple(sorted({job.run.head.system for job in jobs} - {CPU_ONLY, GPU_UNKNOWN})),
        matrices=found,
        comparisons=tuple(comparisons(jobs)),
        jobs=tuple(_line(job) for job in jobs),
        verdicts=verdicts(jobs, found),
        outliers=outliers,
        collective=collective,
        nics=tuple(
            dict.fromkeys(
                NicLine(node=job.node, gpu=str(one.gpu), nic=str(one.nic), nearness=one.nearness)
                for job in jobs
                for one in job.nics
            )
        ),
        missing=missing,
        gaps=(*gaps, *(collective.gaps if collective is not None else ())),
        spreads=spreads(jobs),
        setup=tuple(_setup(jobs)),
    )


_TOLD_OF_SETUP = ("driver", "kernel", "microcode", "governor", "clock")


def _setup(jobs: tuple[JobEvidence, ...]) -> Iterator[tuple[str, str]]:
    """Hardware and tools, as the runs say them; several values where jobs had not the same."""
    systems = sorted({job.run.head.system for job in jobs} - {CPU_ONLY, GPU_UNKNOWN})
    if systems:
        yield "GPU", ", ".join(systems)
    kinds = sorted({job.run.head.host_kind for job in jobs if job.run.head.host_kind})
    if kinds:
        yield "machine", "; ".join(kinds)
    whole = [job for job in jobs if job.mode is Mode.EXCLUSIVE]
    if whole:
        yield "GPUs per node", str(max(job.gpus for job in whole))
        nodes = sorted({job.bound_to for job in whole if job.bound_to is not None})
        yield "NUMA nodes bound to", ", ".join(map(str, nodes)) or "none"
    shapes = sorted({job.shape for job in jobs if job.mode is not Mode.EXCLUSIVE})
    if shapes:
        yield "shared jobs", "; ".join(shapes)
    stated: dict[str, dict[str, None]] = {}
    for job in jobs:
        for one in job.run.head.conditions:
            if one.name.startswith("tool ") or one.name in _TOLD_OF_SETUP:
                stated.setdefault(one.name.removeprefix("tool "), {})[one.value] = None
    for name, values in stated.items():
        yield name, ", ".join(values)


def _line(job: JobEvidence) -> JobLine:
    locality, why = locality_of(job)
    record = job.record
    return JobLine(
        name=job.name,
        node=job.node,
        mode=job.mode,
        gpus=job.gpus,
        locality=locality,
        why=why,
        queue_wait_s=record.queue_wait_s,
        gpu_hours=record.gpu_hours,
        met=record.met,
        others=record.others,
    )
