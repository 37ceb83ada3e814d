"""Study figures: jobs of a study as matrices by node and GPU, and as means by how they were bound.

A copy is local where the memory was bound to the GPU's home node. Where nobody tells of a GPU's
home, it is the node that copies are clearly fastest from: derived by measuring, and said so.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev

from homenode.results.model import Sample
from homenode.slurm.study import Mode
from homenode.slurm.study_evidence import JobEvidence

METRICS = ("h2d-bandwidth", "d2h-bandwidth", "h2d-latency")
"""What depends on where host memory is; shown as matrices."""

CLEARLY = 1.2
"""A node is a GPU's home by measuring where its copies are this many times the next best."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One metric on one cluster node. cells: shape (rows, columns), [NUMA node][GPU], the mean of
    the samples in bytes/s or ns; None where not measured. homes: NUMA node of each GPU.
    homes_measured: they were derived from these figures.
    """

    node: str
    metric: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    homes: tuple[int | None, ...]
    homes_measured: bool


@dataclass(frozen=True, slots=True)
class Mean:
    """Of count figures, each of one GPU in one job. deviation: of the population; None for one."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric, over all nodes. local, remote: of whole nodes, bound. alone, together: of shared
    jobs as Slurm placed them. slices: by gres, of MIG instances. None where not measured.
    """

    metric: str
    local: Mean | None
    remote: Mean | None
    alone: Mean | None
    together: Mean | None
    slices: tuple[tuple[str, Mean], ...]

    @property
    def ratio(self) -> float | None:
        """Local to remote for bandwidths, remote to local for latencies: what locality is worth."""
        if self.local is None or self.remote is None:
            return None
        a, b = self.local.mean, self.remote.mean
        return b / a if self.metric.endswith("latency") else a / b

    @property
    def shared(self) -> Mean | None:
        """Of shared jobs with neighbours, else without."""
        return self.together or self.alone


def device_of(sample: Sample) -> str:
    """What a GPU is called: its address, else the tool's number."""
    return f"GPU {sample.index}" if sample.device is None else str(sample.device)


def matrices(jobs: Iterable[JobEvidence]) -> tuple[Matrix, ...]:
    """For each cluster node and metric, where more was bound than nothing."""
    exclusive = [job for job in jobs if job.mode is Mode.EXCLUSIVE]
    found = []
    for node in dict.fromkeys(job.node for job in exclusive):
        own = [job for job in exclusive if job.node == node]
        told = dict(home for job in own for home in job.homes)
        measured = {} if told else _measured_homes(own)
        for metric in METRICS:
            matrix = _matrix(node, metric, own, told or measured, not told and bool(measured))
            if matrix is not None:
                found.append(matrix)
    return tuple(found)


def _matrix(
    node: str, metric: str, jobs: list[JobEvidence], homes: Mapping[str, int], measured: bool
) -> Matrix | None:
    cells: dict[tuple[int, str], list[float]] = {}
    for row, sample in _bound(jobs, metric):
        cells.setdefault((row, device_of(sample)), []).append(sample.value)
    rows = tuple(sorted({row for row, _ in cells}))
    columns = tuple(sorted({column for _, column in cells}))
    if not cells:
        return None
    values = tuple(
        tuple(fmean(cells[row, column]) if (row, column) in cells else None for column in columns)
        for row in rows
    )
    return Matrix(node, metric, rows, columns, values, tuple(map(homes.get, columns)), measured)


def _bound(jobs: Iterable[JobEvidence], metric: str) -> Iterator[tuple[int, Sample]]:
    """(NUMA node, sample) of a metric's plain variant."""
    for job in jobs:
        for sample in job.samples:
            if sample.metric == metric and sample.variant is None and sample.node is not None:
                yield sample.node, sample


def _measured_homes(jobs: list[JobEvidence]) -> dict[str, int]:
    rates: dict[str, dict[int, list[float]]] = {}
    for row, sample in _bound(jobs, "h2d-bandwidth"):
        rates.setdefault(device_of(sample), {}).setdefault(row, []).append(sample.value)
    homes = {}
    for device, of_row in rates.items():
        ordered = sorted(((fmean(values), row) for row, values in of_row.items()), reverse=True)
        if len(ordered) > 1 and ordered[0][0] > CLEARLY * ordered[1][0]:
            homes[device] = ordered[0][1]
    return homes


def comparisons(jobs: tuple[JobEvidence, ...]) -> tuple[Comparison, ...]:
    """Every metric of host copies that was measured, over all nodes."""
    found = []
    for metric in METRICS:
        local: list[float] = []
        remote: list[float] = []
        for matrix in matrices(jobs):
            if matrix.metric == metric:
                for row, home, value in _cells(matrix):
                    (local if row == home else remote).append(value)
        slices: dict[str, list[float]] = {}
        for job in jobs:
            if job.gres != "gpu":
                slices.setdefault(job.gres, []).extend(_plain(job, metric))
        one = Comparison(
            metric,
            mean_of(local),
            mean_of(remote),
            mean_of(_of_mode(jobs, Mode.ALONE, metric)),
            mean_of(_of_mode(jobs, Mode.TOGETHER, metric)),
            tuple((gres, mean) for gres, v in slices.items() if (mean := mean_of(v)) is not None),
        )
        if any((one.local, one.remote, one.alone, one.together, one.slices)):
            found.append(one)
    return tuple(found)


def _cells(matrix: Matrix) -> Iterator[tuple[int, int, float]]:
    """(NUMA node, the GPU's home, value) of cells whose GPU has a known home."""
    for row, values in zip(matrix.rows, matrix.cells, strict=True):
        for home, value in zip(matrix.homes, values, strict=True):
            if value is not None and home is not None:
                yield row, home, value


def _of_mode(jobs: Iterable[JobEvidence], mode: Mode, metric: str) -> list[float]:
    return [
        value
        for job in jobs
        if job.mode is mode and job.gres == "gpu"
        for value in _plain(job, metric)
    ]


def _plain(job: JobEvidence, metric: str) -> list[float]:
    return [s.value for s in job.samples if s.metric == metric and s.variant is None]


def values_of(jobs: Iterable[JobEvidence], metric: str, *modes: Mode) -> list[float]:
    """All plain figures of a metric in jobs of these modes."""
    return [value for job in jobs if job.mode in modes for value in _plain(job, metric)]


def mean_of(values: list[float]) -> Mean | None:
    """None where there is nothing to take the mean of."""
    if not values:
        return None
    return Mean(fmean(values), pstdev(values) if len(values) > 1 else None, len(values))
