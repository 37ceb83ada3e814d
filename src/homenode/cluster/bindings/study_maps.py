"""Study maps: copies of a cluster node by NUMA node and GPU, and jobs as runs that compare.

A copy is local where memory was bound to the GPU's home node. Where nothing says a GPU's home, it
is the node that copies are clearly fastest from: derived by measuring, and said so.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median

import msgspec
from msgspec import Struct

from homenode.cluster.bindings.evidence import JobEvidence, device_of, measured_homes
from homenode.cluster.bindings.experiments import Mode
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run, RunHead, Sample
from homenode.measure.results.vantage import Vantage

COPIES = ("h2d-bandwidth", "d2h-bandwidth", "h2d-latency")
"""What depends on where host memory is; shown as matrices."""


class StudyMatrix(Struct, frozen=True, kw_only=True):
    """One metric on one cluster node. cells: shape (rows, columns), [NUMA node][GPU], the median of
    the samples in bytes/s or ns; None where not measured. homes: NUMA node of each GPU.
    homes_measured: they were derived from these figures. local, remote: means over the cells of
    GPUs' own and of other nodes; None where there are none.
    """

    node: str
    metric: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    homes: tuple[int | None, ...]
    homes_measured: bool
    local: float | None = None
    remote: float | None = None

    @property
    def ratio(self) -> float | None:
        """Local to remote for bandwidths, remote to local for latencies: what locality is worth."""
        if self.local is None or self.remote is None:
            return None
        is_time = self.metric.endswith("latency")
        return self.remote / self.local if is_time else self.local / self.remote


def matrices(jobs: Iterable[JobEvidence]) -> tuple[StudyMatrix, ...]:
    """For each cluster node and metric, where jobs were bound to NUMA nodes."""
    exclusive = [job for job in jobs if job.mode is Mode.EXCLUSIVE]
    found = []
    for node in dict.fromkeys(job.node for job in exclusive):
        own = [job for job in exclusive if job.node == node]
        homes = homes_of(own)
        derived = bool(homes) and any(job.homes_measured or not job.homes for job in own)
        for metric in COPIES:
            matrix = _matrix(node, metric, own, homes, derived)
            if matrix is not None:
                found.append(matrix)
    return tuple(found)


def homes_of(jobs: Iterable[JobEvidence]) -> dict[str, int]:
    """NUMA node of each GPU of one cluster node: as its jobs say, else by measuring."""
    own = list(jobs)
    return dict(home for job in own for home in job.homes) or measured_homes(own)


def _matrix(
    node: str, metric: str, jobs: Iterable[JobEvidence], homes: Mapping[str, int], measured: bool
) -> StudyMatrix | None:
    values: dict[tuple[int, str], list[float]] = {}
    for job in jobs:
        for sample in job.samples:
            row = job.node_of(sample)
            if sample.metric == metric and sample.variant is None and row is not None:
                values.setdefault((row, device_of(sample)), []).append(sample.value)
    if not values:
        return None
    cells = {place: median(of) for place, of in values.items()}
    rows = tuple(sorted({row for row, _ in cells}))
    columns = tuple(sorted({column for _, column in cells}))
    known = [(row == homes[gpu], value) for (row, gpu), value in cells.items() if gpu in homes]
    local, remote = (
        [value for is_near, value in known if is_near is side] for side in (True, False)
    )
    return StudyMatrix(
        node=node,
        metric=metric,
        rows=rows,
        columns=columns,
        cells=tuple(tuple(cells.get((row, column)) for column in columns) for row in rows),
        homes=tuple(map(homes.get, columns)),
        homes_measured=measured,
        local=fmean(local) if local else None,
        remote=fmean(remote) if remote else None,
    )


def runs_by(
    jobs: Iterable[JobEvidence], label_of: Callable[[JobEvidence, Sample], str | None]
) -> tuple[Run, ...]:
    """Runs that compare as those of layouts: what `label_of` calls a sample is its arrangement.

    A round on a cluster node is a boot, with all jobs that have the label; of a study without
    rounds each job is one. The slowest GPU counts, whichever GPUs Slurm gave a job.
    """
    parts: dict[tuple[str, str], list[tuple[JobEvidence, Sample]]] = {}
    for job in jobs:
        head = job.run.head
        in_round = head.experiment is not None and head.block is not None
        boot = f"{head.experiment} round {head.block}" if in_round else job.name
        for sample in job.samples:
            label = label_of(job, sample)
            if label is not None:
                parts.setdefault((label, boot), []).append((job, sample))
    return tuple(_run(label, boot, part) for (label, boot), part in parts.items())


def _run(label: str, boot: str, part: list[tuple[JobEvidence, Sample]]) -> Run:
    heads = [job.run.head for job, _ in part]
    first = heads[0]
    starts = [head.started_s for head in heads if head.started_s is not None]
    ends = [head.ended_s for head in heads if head.ended_s is not None]
    gpus = list(dict.fromkeys(device_of(one) for _, one in part))
    head = RunHead(
        f"{boot}, {label}",
        first.system,
        first.origin,
        Vantage.JOB,
        UNKNOWN_SWITCHES,
        arrangement=label,
        boots=(boot,),
        unusable=tuple(dict.fromkeys(reason for one in heads for reason in one.unusable)),
        started_s=min(starts, default=None),
        ended_s=max(ends, default=None),
        experiment=first.experiment,
        block=first.block,
    )
    samples = (
        msgspec.structs.replace(
            one, boot=0, device=None, node=None, peer=None, index=gpus.index(device_of(one))
        )
        for _, one in part
    )
    return Run(head, tuple(samples))
