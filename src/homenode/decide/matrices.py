"""Matrices: results by place: nodes and GPUs, nodes, GPUs, CPUs."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.decide.alternative import Alternative
from homenode.measure.results.model import SampleKey
from homenode.measure.results.vantage import Vantage
from homenode.metrics import format_value

_PAIR = re.compile(r"(\d{1,6}) to (\d{1,6})", re.ASCII)
_SEVERAL = ("memory binding", "several nodes")


class Axis(StrEnum):
    """Kind of a row or a column."""

    NODE = "node"
    GPU = "GPU"
    CPU = "CPU"


class MatrixPlace(NamedTuple):
    axis: Axis
    number: int  # number of a node or CPU, or the position of a GPU in the tool's order
    address: Bdf | None

    @property
    def name(self) -> str:
        return str(self.number) if self.address is None else str(self.address)


class MatrixKey(NamedTuple):
    metric: str
    unit: str
    variant: str | None
    rows: Axis
    columns: Axis


class ResultMatrix(Struct, frozen=True, kw_only=True):
    """Medians by (row, column)."""

    key: MatrixKey
    rows: tuple[MatrixPlace, ...]  # ascending
    columns: tuple[MatrixPlace, ...]  # ascending
    cells: Mapping[tuple[MatrixPlace, MatrixPlace], float]


class CopyLocality(Struct, frozen=True, kw_only=True):
    """Benefit of locality: means of copies between the host and its GPUs."""

    alternative: str
    key: MatrixKey
    # local, remote: over copies with the GPU's own and another node; None without copies
    local: float | None
    remote: float | None
    cells: tuple[int, int]  # number of results in each mean
    basis: str  # how it is known which copies are near
    as_bound: bool = False  # the scheduler chose the job's place, and every copy counts as local

    @property
    def ratio(self) -> float | None:
        """Local over remote, for a latency remote over local: above 1 is in favour of local."""
        if self.remote is None or self.local is None:
            return None
        return self.remote / self.local if self.key.unit == "ns" else self.local / self.remote


def build_matrices(alternative: Alternative) -> tuple[ResultMatrix, ...]:
    """Return every matrix of an alternative's runs, without rejected results."""
    samples_by_key: dict[MatrixKey, dict[tuple[MatrixPlace, MatrixPlace], list[float]]] = {}
    pairs_of_gpus: dict[MatrixKey, dict[int, list[float]]] = {}
    for run in alternative.runs:
        for sample_key, samples in run.groups.items():
            values = [sample.value for sample in samples]
            if (placed := _find_matrix_place(sample_key)) is not None:
                key, place = placed
                samples_by_key.setdefault(key, {}).setdefault(place, []).extend(values)
            elif sample_key.metric == "p2p-bandwidth" and sample_key.position is not None:
                key = _make_key(sample_key, Axis.GPU, Axis.GPU)
                pairs_of_gpus.setdefault(key, {}).setdefault(sample_key.position, []).extend(values)
    for key, by_index in pairs_of_gpus.items():
        if (cells := _number_pairs(by_index)) is not None:
            samples_by_key.setdefault(key, cells)
    return tuple(
        _build_matrix(key, cells) for key, cells in samples_by_key.items() if len(cells) > 1
    )


def compare_localities(
    alternatives: Sequence[Alternative], node_of: Mapping[Bdf, int]
) -> tuple[CopyLocality, ...]:
    """Return local and remote means of copies, by alternative and metric.

    node_of: the host's node of each GPU; a guest's nodes count only as it saw them. Local is the
    node with the fastest copies from host to device; if each GPU was copied to from one node, the
    faster of two groups of values. Runs bound to several nodes have no remote side.
    """
    copy_localities = []
    for alternative in alternatives:
        matrices = _collect_copies(alternative)
        as_bound = any(
            (c.name, c.value) == _SEVERAL for run in alternative.runs for c in run.head.conditions
        )
        node_of_gpu = _map_gpu_nodes(alternative, node_of)
        nearest = _find_copy_nodes(matrices, node_of_gpu)
        for key, figures in matrices.items():
            sides, basis = _find_sides(figures, nearest, node_of_gpu)
            if as_bound:
                sides, basis = dict.fromkeys(figures, True), "as the job was bound"
            if sides:
                it = _compare_locality(alternative.label, key, figures, sides, basis)
                copy_localities.append(structs.replace(it, as_bound=as_bound))
    return tuple(copy_localities)


def _find_matrix_place(key: SampleKey) -> tuple[MatrixKey, tuple[MatrixPlace, MatrixPlace]] | None:
    if key.size_bytes is not None:
        return None
    has_gpu = key.device is not None or key.position is not None
    if key.node is not None and key.peer_node is not None:
        nodes = MatrixPlace(Axis.NODE, key.node, None), MatrixPlace(Axis.NODE, key.peer_node, None)
        return _make_key(key, Axis.NODE, Axis.NODE), nodes
    if key.node is not None and has_gpu and key.peer is None:
        gpu = MatrixPlace(Axis.GPU, key.position or 0, key.device)
        return _make_key(key, Axis.NODE, Axis.GPU), (MatrixPlace(Axis.NODE, key.node, None), gpu)
    if key.device is not None and key.peer is not None:
        pair = MatrixPlace(Axis.GPU, 0, key.device), MatrixPlace(Axis.GPU, 0, key.peer)
        return _make_key(key, Axis.GPU, Axis.GPU), pair
    if key.metric == "core-to-core-latency" and key.variant is not None:
        match = _PAIR.fullmatch(key.variant)
        if match is not None:
            pu, other = (MatrixPlace(Axis.CPU, int(part), None) for part in match.groups())
            return MatrixKey(key.metric, key.unit, None, Axis.CPU, Axis.CPU), (pu, other)
    return None


def _number_pairs(
    by_index: Mapping[int, list[float]],
) -> dict[tuple[MatrixPlace, MatrixPlace], list[float]] | None:
    """Return the pairs numbered row by row, of as many GPUs as leave exactly the diagonal free."""
    for count in range(2, 65):
        full = set(range(count * count))
        if set(by_index) in (full - {n * (count + 1) for n in range(count)}, full):
            return {
                (
                    MatrixPlace(Axis.GPU, index // count, None),
                    MatrixPlace(Axis.GPU, index % count, None),
                ): values
                for index, values in by_index.items()
            }
    return None


def _build_matrix(
    key: MatrixKey, cells: Mapping[tuple[MatrixPlace, MatrixPlace], list[float]]
) -> ResultMatrix:
    medians = {place: statistics.median(values) for place, values in cells.items()}
    if key.rows is Axis.CPU:  # a hand-over has no direction
        medians = {(b, a): value for (a, b), value in medians.items()} | medians
    return ResultMatrix(
        key=key,
        rows=_sort_places(row for row, _ in medians),
        columns=_sort_places(column for _, column in medians),
        cells=medians,
    )


def _sort_places(places: Iterable[MatrixPlace]) -> tuple[MatrixPlace, ...]:
    return tuple(sorted(set(places), key=lambda one: (str(one.address or ""), one.number)))


def _make_key(key: SampleKey, rows: Axis, columns: Axis) -> MatrixKey:
    return MatrixKey(key.metric, key.unit, key.variant, rows, columns)


_Place = tuple[int | None, MatrixPlace]
_Figures = dict[_Place, float]
"""Medians of copies by the node that they came from, None = unknown, and the GPU."""


def _collect_copies(alternative: Alternative) -> dict[MatrixKey, _Figures]:
    """Return copies of two or more places. The node is that of bound memory, else of the tool's
    thread; if some copies have a known node, the others have no place."""
    figures_by_key: dict[MatrixKey, _Figures] = {}
    for sample_key, value in alternative.copies.items():
        node = sample_key.peer_node if sample_key.node is None else sample_key.node
        key = _make_key(sample_key, Axis.NODE, Axis.GPU)
        gpu = MatrixPlace(Axis.GPU, sample_key.position or 0, sample_key.device)
        figures_by_key.setdefault(key, {})[node, gpu] = value
    for key, figures in figures_by_key.items():
        if any(node is not None for node, _ in figures):
            figures_by_key[key] = {
                place: value for place, value in figures.items() if place[0] is not None
            }
    return {key: figures for key, figures in figures_by_key.items() if len(figures) > 1}


def find_far_copies(alternative: Alternative) -> Iterator[tuple[str, str]]:
    """Yield (metric, GPUs with slower copies, as if from another node) of unbound copies that fall
    into two groups. If the nodes of GPUs and threads are known, local copies do not count."""
    nodes = _map_gpu_nodes(alternative, {})
    by_key: dict[MatrixKey, dict[tuple[Bdf | None, int | None], float]] = {}
    for sample_key, value in alternative.copies.items():
        is_near = sample_key.device in nodes and nodes[sample_key.device] == sample_key.peer_node
        if sample_key.node is None and not is_near:
            key = _make_key(sample_key, Axis.NODE, Axis.GPU)
            by_key.setdefault(key, {})[sample_key.device, sample_key.position] = value
    for key, values in by_key.items():
        if (gap := _find_gap(values.values())) is not None:
            low = [value for value in values.values() if value < gap]
            high = [value for value in values.values() if value >= gap]
            fast, slow = (low, high) if key.unit == "ns" else (high, low)
            means = (format_value(statistics.fmean(side), key.unit) for side in (slow, fast))
            name = " ".join(filter(None, (key.metric, key.variant)))
            counts = f"{len(slow)} of {len(values)} GPUs"
            yield key.metric, f"{name}: {counts} {', the others '.join(means)}"


def _map_gpu_nodes(alternative: Alternative, node_of: Mapping[Bdf, int]) -> dict[Bdf, int]:
    """Return the nodes of GPUs in the numbers of the results: a guest's differ from the host's."""
    heads = [run.head for run in alternative.runs]
    seen = {gpu.device: gpu.node for head in heads for gpu in head.gpus if gpu.node is not None}
    in_guest = any(head.vantage is Vantage.GUEST for head in heads)
    return seen if in_guest else seen | dict(node_of)


def _find_copy_nodes(
    copies: Mapping[MatrixKey, _Figures], node_of: Mapping[Bdf, int]
) -> dict[MatrixPlace, int]:
    """Return the node of each GPU from a topology, or from copies of several nodes."""
    nearest: dict[MatrixPlace, int] = {}
    for key, figures in copies.items():
        by_gpu: dict[MatrixPlace, dict[int, float]] = {}
        for (node, gpu), value in figures.items():
            if gpu.address is not None and gpu.address in node_of:
                nearest[gpu] = node_of[gpu.address]
            elif node is not None:
                by_gpu.setdefault(gpu, {})[node] = value
        if key.metric == "h2d-bandwidth":
            for gpu, by_node in by_gpu.items():
                if len(by_node) > 1:
                    nearest.setdefault(gpu, max(by_node, key=lambda node: by_node[node]))
    return nearest


def _find_sides(
    figures: _Figures, nearest: Mapping[MatrixPlace, int], node_of: Mapping[Bdf, int]
) -> tuple[dict[_Place, bool], str]:
    """Return whether each copy is local; empty if any is unknown."""
    if any(node is None or gpu not in nearest for node, gpu in figures):
        return {}, ""
    by_host = all(gpu.address is not None and gpu.address in node_of for _, gpu in figures)
    basis = "by the host's topology" if by_host else "by the results: the node with fastest copies"
    return {place: nearest[place[1]] == place[0] for place in figures}, basis


MIN_APART = 1.08
"""Copies with a far node have been 1.2 to 4.7 times slower; GPUs of one node differ by 3 %."""


def _find_gap(values: Iterable[float]) -> float | None:
    """Return a value between two groups of two values or more: the widest gap parts them, if it is
    as wide as twice what either group spans. One slow GPU is rather a slow link."""
    logs = sorted(map(math.log, values))
    if len(logs) < 4:
        return None
    at = max(range(2, len(logs) - 1), key=lambda n: logs[n] - logs[n - 1])
    low, high = logs[:at], logs[at:]
    gap = high[0] - low[-1]
    if gap < max(math.log(MIN_APART), 2 * (low[-1] - low[0]), 2 * (high[-1] - high[0])):
        return None
    return math.exp((high[0] + low[-1]) / 2)


def _compare_locality(
    label: str, key: MatrixKey, figures: _Figures, sides: Mapping[_Place, bool], basis: str
) -> CopyLocality:
    local = [value for place, value in figures.items() if sides[place]]
    remote = [value for place, value in figures.items() if not sides[place]]
    return CopyLocality(
        alternative=label,
        key=key,
        local=statistics.fmean(local) if local else None,
        remote=statistics.fmean(remote) if remote else None,
        cells=(len(local), len(remote)),
        basis=basis,
    )
