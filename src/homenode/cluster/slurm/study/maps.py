"""Maps: copies of a cluster node by NUMA node and GPU; places that are slower than on other nodes.

A copy is local if memory was bound to the GPU's home node; if the home is unknown, it is the node
from which copies are clearly fastest. Each place is compared over at least three cluster nodes,
because of two it is unknown which is slow.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median

import msgspec
from msgspec import Struct

from homenode.cluster.slurm.study.evidence import JobEvidence, find_measured_homes, name_device
from homenode.cluster.slurm.study.experiments import NodeSharing
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run, RunHead, Sample
from homenode.measure.results.vantage import Vantage

COPIES = ("h2d-bandwidth", "d2h-bandwidth", "h2d-latency")
"""Metrics that depend on the node of host memory; shown as matrices."""


class StudyMatrix(Struct, frozen=True, kw_only=True):
    """A metric on one cluster node."""

    node: str
    metric: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]
    # shape (rows, columns), [NUMA node][GPU], the median of the samples in bytes/s or ns; None
    # if not measured
    cells: tuple[tuple[float | None, ...], ...]
    homes: tuple[int | None, ...]  # NUMA node of each GPU
    homes_measured: bool  # they were derived from these results
    # local, remote: means over the cells of GPUs' own and of other nodes; None without any
    local: float | None = None
    remote: float | None = None

    @property
    def ratio(self) -> float | None:
        """The benefit of locality: local to remote bandwidth, remote to local latency."""
        if self.local is None or self.remote is None:
            return None
        is_time = self.metric.endswith("latency")
        return self.remote / self.local if is_time else self.local / self.remote


def build_study_matrices(jobs: Iterable[JobEvidence]) -> tuple[StudyMatrix, ...]:
    """Return a matrix for each cluster node and metric with jobs bound to NUMA nodes."""
    exclusive = [job for job in jobs if job.mode is NodeSharing.EXCLUSIVE]
    node_maps = []
    for node in dict.fromkeys(job.node for job in exclusive):
        node_jobs = [job for job in exclusive if job.node == node]
        homes = find_homes(node_jobs)
        derived = bool(homes) and any(job.homes_measured or not job.homes for job in node_jobs)
        for metric in COPIES:
            matrix = _build_matrix(node, metric, node_jobs, homes, derived)
            if matrix is not None:
                node_maps.append(matrix)
    return tuple(node_maps)


def find_homes(jobs: Iterable[JobEvidence]) -> dict[str, int]:
    """The NUMA node of each GPU of one cluster node: from its jobs, else from measurements."""
    node_jobs = list(jobs)
    return dict(home for job in node_jobs for home in job.homes) or find_measured_homes(node_jobs)


def _build_matrix(
    node: str, metric: str, jobs: Iterable[JobEvidence], homes: Mapping[str, int], measured: bool
) -> StudyMatrix | None:
    values: dict[tuple[int, str], list[float]] = {}
    for job in jobs:
        for sample in job.samples:
            row = job.find_node(sample)
            if sample.metric == metric and sample.variant is None and row is not None:
                values.setdefault((row, name_device(sample)), []).append(sample.value)
    if not values:
        return None
    cells = {place: median(group) for place, group in values.items()}
    rows = tuple(sorted({row for row, _ in cells}))
    columns = tuple(sorted({column for _, column in cells}))
    pairs = [(row == homes[gpu], value) for (row, gpu), value in cells.items() if gpu in homes]
    local, remote = (
        [value for is_near, value in pairs if is_near is side] for side in (True, False)
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


def label_runs(
    jobs: Iterable[JobEvidence], label_of: Callable[[JobEvidence, Sample], str | None]
) -> tuple[Run, ...]:
    """Return runs that are comparable like those of layouts: the label of `label_of` is the
    arrangement. A round on a cluster node is a boot, with all jobs of the label; in a study without
    rounds each job is a boot. The slowest GPU counts, whichever GPUs Slurm gave a job."""
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
    gpus = list(dict.fromkeys(name_device(sample) for _, sample in part))
    head = RunHead(
        f"{boot}, {label}",
        first.system,
        first.origin,
        Vantage.JOB,
        UNKNOWN_SWITCHES,
        arrangement=label,
        boots=(boot,),
        unusable=tuple(dict.fromkeys(reason for member in heads for reason in member.unusable)),
        started_s=min(starts, default=None),
        ended_s=max(ends, default=None),
        experiment=first.experiment,
        block=first.block,
    )
    samples = (
        msgspec.structs.replace(
            sample, boot=0, device=None, node=None, peer=None, index=gpus.index(name_device(sample))
        )
        for _, sample in part
    )
    return Run(head, tuple(samples))


MIN_NODES = 3
SLOW = 0.10
"""Share below the median that counts as slow: twice the relevant difference of a copy."""


class Outlier(Struct, frozen=True, kw_only=True):
    """Copies of one cluster node that are slower than the same copies on other nodes."""

    node: str  # name of the cluster node
    part: str  # the GPU and the NUMA node, or how many of them
    metric: str
    value: float  # value of the slowest place, in the metric's unit
    usual: float  # the median of that place on all nodes


def find_slow_copies(matrices: Iterable[StudyMatrix]) -> tuple[Outlier, ...]:
    """An outlier for each node and metric with slow places, if three nodes have the place."""
    values: dict[tuple[str, int, str], dict[str, float]] = {}
    for matrix in matrices:
        for row, cells in zip(matrix.rows, matrix.cells, strict=True):
            for gpu, value in zip(matrix.columns, cells, strict=True):
                if value is not None:
                    values.setdefault((matrix.metric, row, gpu), {})[matrix.node] = value
    slow: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for (metric, row, gpu), value_of_node in values.items():
        usual = median(value_of_node.values())
        limit = usual * (1 + SLOW if metric.endswith("latency") else 1 - SLOW)
        for node, value in value_of_node.items():
            is_slow = value > limit if metric.endswith("latency") else value < limit
            if is_slow and len(value_of_node) >= MIN_NODES:
                place = f"{gpu} from NUMA node {row}"
                slow.setdefault((node, metric), []).append((value, usual, place))
    outliers = []
    for (node, metric), places in slow.items():
        value, usual, part = max(places, key=lambda place: abs(place[0] / place[1] - 1))
        part += f" and {len(places) - 1} more" if len(places) > 1 else ""
        outliers.append(Outlier(node=node, part=part, metric=metric, value=value, usual=usual))
    return tuple(outliers)
