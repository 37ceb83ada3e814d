"""Study figures: jobs of a study as matrices by node and GPU, and as means by how they were bound.

A copy is local where the memory was bound to the GPU's home node. Where nobody tells of a GPU's
home, it is the node that copies are clearly fastest from: derived by measuring, and said so.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev

from homenode.measure.bindings.evidence import JobEvidence
from homenode.measure.bindings.experiments import Mode
from homenode.results.model import Sample
from homenode.wording import plural

METRICS = ("h2d-bandwidth", "d2h-bandwidth", "h2d-latency")
"""What depends on where host memory is; shown as matrices."""

CLEARLY = 1.2
"""A node is a GPU's home by measuring where its copies are this many times the next best."""


_MET = re.compile(r"(\d{1,4}) of (\d{1,4})", re.ASCII)


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
    """One metric, over all nodes. local, remote: of whole nodes, bound; None where not measured.

    shared: of shared jobs as Slurm placed them, by shape, alone and together; slices: the same of
    MIG instances.
    """

    metric: str
    local: Mean | None
    remote: Mean | None
    shared: tuple[tuple[str, Mean], ...]
    slices: tuple[tuple[str, Mean], ...]

    @property
    def ratio(self) -> float | None:
        """Local to remote for bandwidths, remote to local for latencies: what locality is worth."""
        if self.local is None or self.remote is None:
            return None
        a, b = self.local.mean, self.remote.mean
        return b / a if self.metric.endswith("latency") else a / b


def shape_of(job: JobEvidence) -> str:
    """How a shared job is called in comparisons.

    "1 GPU, alone", "2 GPUs, together", "slice gpu:1g.10gb, together"; "1 GPU, 2 of 4 together"
    where the others came too late.
    """
    met = None if job.record is None else job.record.met
    if job.mode is Mode.TOGETHER and met is not None:
        found = _MET.fullmatch(met)
        if found is not None and found[1] != found[2]:
            return f"{_what(job)}, {met} together"
    return f"{_what(job)}, {job.mode}"


def _what(job: JobEvidence) -> str:
    return f"slice {job.gres}" if job.gres != "gpu" else plural(job.gpus, "GPU")


def device_of(sample: Sample) -> str:
    """What a GPU is called: its address, else the tool's number."""
    return f"GPU {sample.index}" if sample.device is None else str(sample.device)


def matrices(jobs: Iterable[JobEvidence]) -> tuple[Matrix, ...]:
    """For each cluster node and metric, where more was bound than nothing."""
    exclusive = [job for job in jobs if job.mode is Mode.EXCLUSIVE]
    found = []
    for node in dict.fromkeys(job.node for job in exclusive):
        own = [job for job in exclusive if job.node == node]
        homes = dict(home for job in own for home in job.homes)
        derived = not homes or any(job.homes_measured for job in own)
        homes = homes or measured_homes(own)
        for metric in METRICS:
            matrix = _matrix(node, metric, own, homes, derived and bool(homes))
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


def measured_homes(jobs: list[JobEvidence]) -> dict[str, int]:
    """NUMA node of each GPU that is clearly fastest from one."""
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
        shapes = {
            is_slice: _by_shape([job for job in jobs if (job.gres != "gpu") is is_slice], metric)
            for is_slice in (False, True)
        }
        one = Comparison(metric, mean_of(local), mean_of(remote), shapes[False], shapes[True])
        if one.local or one.remote or one.shared or one.slices:
            found.append(one)
    return tuple(found)


def _by_shape(jobs: Iterable[JobEvidence], metric: str) -> tuple[tuple[str, Mean], ...]:
    values: dict[str, list[float]] = {}
    for job in jobs:
        if job.mode in (Mode.ALONE, Mode.TOGETHER):
            values.setdefault(shape_of(job), []).extend(_plain(job, metric))
    return tuple((name, mean) for name, of in values.items() if (mean := mean_of(of)) is not None)


def _cells(matrix: Matrix) -> Iterator[tuple[int, int, float]]:
    """(NUMA node, the GPU's home, value) of cells whose GPU has a known home."""
    for row, values in zip(matrix.rows, matrix.cells, strict=True):
        for home, value in zip(matrix.homes, values, strict=True):
            if value is not None and home is not None:
                yield row, home, value


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
