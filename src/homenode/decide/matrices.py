"""Matrices: figures by where they were taken: nodes and GPUs, nodes, GPUs, PUs."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.decide.alternative import Alternative
from homenode.measure.results.model import SampleKey

_PAIR = re.compile(r"(\d{1,6}) to (\d{1,6})", re.ASCII)
_SEVERAL = ("memory binding", "several nodes")


class Axis(StrEnum):
    """What a row or a column is."""

    NODE = "node"
    GPU = "GPU"
    PU = "PU"


class MatrixPlace(NamedTuple):
    """A row or a column. number: of a node or PU, or a GPU's in its tool's order."""

    axis: Axis
    number: int
    address: Bdf | None

    @property
    def name(self) -> str:
        """As people call it."""
        return str(self.number) if self.address is None else str(self.address)


class MatrixKey(NamedTuple):
    """Which figures are one matrix."""

    metric: str
    unit: str
    variant: str | None
    rows: Axis
    columns: Axis


class FigureMatrix(Struct, frozen=True, kw_only=True):
    """Medians by (row, column). rows, columns: ascending."""

    key: MatrixKey
    rows: tuple[MatrixPlace, ...]
    columns: tuple[MatrixPlace, ...]
    cells: Mapping[tuple[MatrixPlace, MatrixPlace], float]


class CopyLocality(Struct, frozen=True, kw_only=True):
    """What being near is worth: means over a node x GPU matrix.

    local, remote: over GPUs' own and other nodes; remote None where no figure is of another node.
    cells: how many figures either mean is of. stated: how it is known which node is near.
    """

    alternative: str
    key: MatrixKey
    local: float
    remote: float | None
    cells: tuple[int, int]
    stated: str

    @property
    def ratio(self) -> float | None:
        """Local over remote; of a latency remote over local: above 1 is in favour of local."""
        if self.remote is None:
            return None
        return self.remote / self.local if self.key.unit == "ns" else self.local / self.remote


def matrices_of(alternative: Alternative) -> tuple[FigureMatrix, ...]:
    """Every matrix of an alternative's runs; figures that are refused are left out."""
    found: dict[MatrixKey, dict[tuple[MatrixPlace, MatrixPlace], list[float]]] = {}
    pairs_of_gpus: dict[MatrixKey, dict[int, list[float]]] = {}
    for run in alternative.runs:
        for one, samples in run.groups.items():
            values = [sample.value for sample in samples]
            if (placed := _placed(one)) is not None:
                axes, place = placed
                key = MatrixKey(one.metric, one.unit, axes.variant, axes.rows, axes.columns)
                found.setdefault(key, {}).setdefault(place, []).extend(values)
            elif one.metric == "p2p-bandwidth" and one.position is not None:
                key = MatrixKey(one.metric, one.unit, one.variant, Axis.GPU, Axis.GPU)
                pairs_of_gpus.setdefault(key, {}).setdefault(one.position, []).extend(values)
    for key, by_index in pairs_of_gpus.items():
        if (cells := _square(by_index)) is not None:
            found.setdefault(key, cells)
    return tuple(_matrix(key, cells) for key, cells in found.items() if _is_matrix(cells))


def localities(
    alternative: Alternative,
    node_of: Mapping[Bdf, int],
    known: Sequence[FigureMatrix] | None = None,
) -> tuple[CopyLocality, ...]:
    """Local and remote means of each node x GPU matrix.

    node_of: the node of each GPU, as far as a topology gives it; for the others the node with the
    fastest copies from host to device counts as near. Runs whose memory was bound to several nodes
    have no remote side: their job was where the scheduler put it. known: its matrices, where they
    were made already.
    """
    matrices = [
        one
        for one in (matrices_of(alternative) if known is None else known)
        if (one.key.rows, one.key.columns) == (Axis.NODE, Axis.GPU)
    ]
    conditions = [c for run in alternative.runs for c in run.head.conditions]
    as_bound = any((one.name, one.value) == _SEVERAL for one in conditions)
    nearest = _nearest(matrices, node_of)
    return tuple(
        _locality(alternative.label, one, nearest, as_bound, bool(node_of)) for one in matrices
    )


class _Axes(NamedTuple):
    rows: Axis
    columns: Axis
    variant: str | None


def _placed(one: SampleKey) -> tuple[_Axes, tuple[MatrixPlace, MatrixPlace]] | None:
    if one.size_bytes is not None:
        return None
    has_gpu = one.device is not None or one.position is not None
    if one.node is not None and one.peer_node is not None:
        nodes = MatrixPlace(Axis.NODE, one.node, None), MatrixPlace(Axis.NODE, one.peer_node, None)
        return _Axes(Axis.NODE, Axis.NODE, one.variant), nodes
    if one.node is not None and has_gpu and one.peer is None:
        gpu = MatrixPlace(Axis.GPU, one.position or 0, one.device)
        return _Axes(Axis.NODE, Axis.GPU, one.variant), (
            MatrixPlace(Axis.NODE, one.node, None),
            gpu,
        )
    if one.device is not None and one.peer is not None:
        pair = MatrixPlace(Axis.GPU, 0, one.device), MatrixPlace(Axis.GPU, 0, one.peer)
        return _Axes(Axis.GPU, Axis.GPU, one.variant), pair
    if one.metric == "core-to-core-latency" and one.variant is not None:
        found = _PAIR.fullmatch(one.variant)
        if found is not None:
            pu, other = (MatrixPlace(Axis.PU, int(part), None) for part in found.groups())
            return _Axes(Axis.PU, Axis.PU, None), (pu, other)
    return None


def _square(
    by_index: Mapping[int, list[float]],
) -> dict[tuple[MatrixPlace, MatrixPlace], list[float]] | None:
    """Pairs numbered row by row, of as many GPUs as leave exactly the diagonal free."""
    for count in range(2, 65):
        full = set(range(count * count))
        if set(by_index) in (full - {n * (count + 1) for n in range(count)}, full):
            return {
                (
                    MatrixPlace(Axis.GPU, index // count, None),
                    MatrixPlace(Axis.GPU, index % count, None),
                ): found
                for index, found in by_index.items()
            }
    return None


def _is_matrix(cells: Mapping[tuple[MatrixPlace, MatrixPlace], list[float]]) -> bool:
    return len(cells) > 1


def _matrix(
    key: MatrixKey, cells: Mapping[tuple[MatrixPlace, MatrixPlace], list[float]]
) -> FigureMatrix:
    medians = {place: statistics.median(values) for place, values in cells.items()}
    if key.rows is Axis.PU:  # a hand-over has no direction
        medians = {(b, a): value for (a, b), value in medians.items()} | medians
    return FigureMatrix(
        key=key,
        rows=_sorted(row for row, _ in medians),
        columns=_sorted(column for _, column in medians),
        cells=medians,
    )


def _sorted(places: Iterable[MatrixPlace]) -> tuple[MatrixPlace, ...]:
    unlike = set(places)
    return tuple(sorted(unlike, key=lambda one: (str(one.address or ""), one.number)))


def _nearest(
    matrices: Iterable[FigureMatrix], node_of: Mapping[Bdf, int]
) -> dict[MatrixPlace, int]:
    nearest: dict[MatrixPlace, int] = {}
    for matrix in matrices:
        for gpu in matrix.columns:
            if gpu.address is not None and gpu.address in node_of:
                nearest[gpu] = node_of[gpu.address]
    for matrix in matrices:
        if matrix.key.metric != "h2d-bandwidth":
            continue
        for gpu in matrix.columns:
            by_node = {
                row.number: matrix.cells[row, gpu]
                for row in matrix.rows
                if (row, gpu) in matrix.cells
            }
            if len(by_node) > 1:
                nearest.setdefault(gpu, max(by_node, key=lambda node: by_node[node]))
    return nearest


def _locality(
    label: str,
    matrix: FigureMatrix,
    nearest: Mapping[MatrixPlace, int],
    as_bound: bool,
    by_host: bool,
) -> CopyLocality:
    sides = list(_sides(matrix, nearest, as_bound))
    local = [value for value, is_local in sides if is_local]
    remote = [value for value, is_local in sides if not is_local]
    if not local or as_bound or not remote:
        everything = [value for value, _ in sides]
        stated = "as the job was bound"
        mean = statistics.fmean(everything)
        return CopyLocality(
            alternative=label,
            key=matrix.key,
            local=mean,
            remote=None,
            cells=(len(everything), 0),
            stated=stated,
        )
    stated = "by the host's topology" if by_host else "by the figures: the node with fastest copies"
    return CopyLocality(
        alternative=label,
        key=matrix.key,
        local=statistics.fmean(local),
        remote=statistics.fmean(remote),
        cells=(len(local), len(remote)),
        stated=stated,
    )


def _sides(
    matrix: FigureMatrix, nearest: Mapping[MatrixPlace, int], as_bound: bool
) -> Iterator[tuple[float, bool]]:
    for (row, gpu), value in matrix.cells.items():
        yield value, as_bound or nearest.get(gpu) == row.number
