"""Maps: copies of a cluster node by NUMA node and GPU; what is slower than on the other nodes.

A copy is local where memory was bound to the GPU's home node; if nothing shows the home, it is the
node that copies are clearly fastest from. Each place is compared with itself on three nodes at
least: of two that differ, it is unknown which is slow. A slow node spoils two pairs of a ring, so
pairs are compared with the better ones, not with the median.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean, median

import msgspec
from msgspec import Struct

from homenode.cluster.slurm.study.evidence import Collective, JobEvidence, device_of, measured_homes
from homenode.cluster.slurm.study.experiments import Mode
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run, RunHead, Sample
from homenode.measure.results.vantage import Vantage

COPIES = ("h2d-bandwidth", "d2h-bandwidth", "h2d-latency")
"""What depends on where host memory is; shown as matrices."""


class StudyMatrix(Struct, frozen=True, kw_only=True):
    """One metric on one cluster node."""

    node: str
    metric: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]
    # shape (rows, columns), [NUMA node][GPU], the median of the samples in bytes/s or ns; None
    # where not measured
    cells: tuple[tuple[float | None, ...], ...]
    homes: tuple[int | None, ...]  # NUMA node of each GPU
    homes_measured: bool  # they were derived from these figures
    # local, remote: means over the cells of GPUs' own and of other nodes; None where there are none
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
    node_maps = []
    for node in dict.fromkeys(job.node for job in exclusive):
        node_jobs = [job for job in exclusive if job.node == node]
        homes = homes_of(node_jobs)
        derived = bool(homes) and any(job.homes_measured or not job.homes for job in node_jobs)
        for metric in COPIES:
            matrix = _matrix(node, metric, node_jobs, homes, derived)
            if matrix is not None:
                node_maps.append(matrix)
    return tuple(node_maps)


def homes_of(jobs: Iterable[JobEvidence]) -> dict[str, int]:
    """NUMA node of each GPU of one cluster node: as its jobs say, else by measuring."""
    node_jobs = list(jobs)
    return dict(home for job in node_jobs for home in job.homes) or measured_homes(node_jobs)


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
    cells = {place: median(group) for place, group in values.items()}
    rows = tuple(sorted({row for row, _ in cells}))
    columns = tuple(sorted({column for _, column in cells}))
    sided = [(row == homes[gpu], value) for (row, gpu), value in cells.items() if gpu in homes]
    local, remote = (
        [value for is_near, value in sided if is_near is side] for side in (True, False)
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
    gpus = list(dict.fromkeys(device_of(sample) for _, sample in part))
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
            sample, boot=0, device=None, node=None, peer=None, index=gpus.index(device_of(sample))
        )
        for _, sample in part
    )
    return Run(head, tuple(samples))


LEAST_NODES = 3
SLOW = 0.10
"""So much below the median is slow: twice what matters for a copy."""


class Outlier(Struct, frozen=True, kw_only=True):
    """A node, or one of its links, that measures unlike the others."""

    node: str  # of the cluster
    part: str  # the node itself, or a link of it
    metric: str
    value: float  # in the metric's unit; usual is the median of the same place on all nodes
    usual: float  # in the metric's unit; usual is the median of the same place on all nodes


def slow_nodes_and_links(matrices: Iterable[StudyMatrix]) -> tuple[Outlier, ...]:
    """A GPU that is slow from every NUMA node has a slow link; most GPUs slow: the node is."""
    outliers: list[Outlier] = []
    by_metric: dict[str, list[StudyMatrix]] = {}
    for matrix in matrices:
        by_metric.setdefault(matrix.metric, []).append(matrix)
    for metric, group in by_metric.items():
        if len({matrix.node for matrix in group}) >= LEAST_NODES:
            outliers += _metric_outliers(metric, group)
    return tuple(outliers)


def _metric_outliers(metric: str, matrices: list[StudyMatrix]) -> Iterator[Outlier]:
    places: dict[tuple[int, str], list[float]] = {}
    for matrix in matrices:
        for place, value in _cells(matrix):
            places.setdefault(place, []).append(value)
    usual = {
        place: median(values) for place, values in places.items() if len(values) >= LEAST_NODES
    }
    for matrix in matrices:
        cells = {place: value for place, value in _cells(matrix) if place in usual}
        bad = {
            place: (value, usual[place])
            for place, value in cells.items()
            if _is_slow(metric, value, usual[place])
        }
        measured = {gpu for _, gpu in cells}
        slow = _fully_slow(cells, bad, 1)
        if slow and len(slow) * 2 > len(measured):
            part = f"the node: {len(slow)} of {len(measured)} GPUs"
            odd = {part: [cell for cells in slow.values() for cell in cells]}
        else:
            odd = {f"the link of {gpu}": members for gpu, members in slow.items()}
            # With one GPU, or from one NUMA node, the two cannot be distinguished.
            rows = _fully_slow(cells, bad, 0) if len(measured) > 1 else {}
            odd |= {f"NUMA node {row}: from there": members for row, members in rows.items()}
        for part, members in odd.items():
            value, like = max(members, key=lambda cell: abs(cell[0] / cell[1] - 1))
            yield Outlier(node=matrix.node, part=part, metric=metric, value=value, usual=like)


def _fully_slow(
    cells: Mapping[tuple[int, str], float],
    bad: Mapping[tuple[int, str], tuple[float, float]],
    part: int,
) -> dict[int | str, list[tuple[float, float]]]:
    """Slow cells of rows (part 0) or columns (1) in which all cells are slow."""
    slow: dict[int | str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(place[part] for place in cells):
        places = [place for place in cells if place[part] == name]
        if all(place in bad for place in places):
            slow[name] = [bad[place] for place in places]
    return slow


def _cells(matrix: StudyMatrix) -> Iterator[tuple[tuple[int, str], float]]:
    for row, values in zip(matrix.rows, matrix.cells, strict=True):
        for column, value in zip(matrix.columns, values, strict=True):
            if value is not None:
                yield (row, column), value


def _is_slow(metric: str, value: float, usual: float) -> bool:
    if metric.endswith("latency"):
        return value > usual * (1 + SLOW)
    return value < usual * (1 - SLOW)


def slow_in_collective(collective: Collective) -> tuple[Outlier, ...]:
    """Nodes that are slow alone, then links: pairs that are slow while their nodes are not."""
    metric = "allreduce-busbw-peak"
    outliers: list[Outlier] = []

    def add(node: str, part: str, value: float, usual: float) -> None:
        outliers.append(Outlier(node=node, part=part, metric=metric, value=value, usual=usual))

    slow: set[str] = set()
    if len(collective.nodes) >= LEAST_NODES:
        usual = median(value for _, value in collective.nodes)
        for node, value in collective.nodes:
            if _is_slow(metric, value, usual):
                slow.add(node)
                add(node, "the node: all-reduce on it alone", value, usual)
    if len(collective.pairs) < LEAST_NODES:
        return tuple(outliers)
    values = sorted(value for *_, value in collective.pairs)
    usual = values[-max(1, len(values) // 4)]
    bad = [
        (a, b, v)
        for a, b, v in collective.pairs
        if _is_slow(metric, v, usual) and not {a, b} & slow
    ]
    ends = Counter(node for a, b, _ in bad for node in (a, b))
    both = {node for node, count in ends.items() if count > 1}
    for node in sorted(both):
        worst = min(v for a, b, v in bad if node in (a, b))
        add(node, "its link to the other nodes", worst, usual)
    for a, b, value in bad:
        if not {a, b} & both:
            add(a, f"the link between {a} and {b}", value, usual)
    return tuple(outliers)
