"""Study outliers: the node or the link that is slower than its like on the other nodes.

Like is compared with like: the same NUMA node and the same GPU on every cluster node. Three nodes
at least: of two that differ, it is unknown which is slow. A slow node spoils two pairs of a ring,
and of three pairs that is most of them: pairs are compared with the better ones, not the median.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

from msgspec import Struct

from homenode.cluster.bindings.evidence import Collective
from homenode.cluster.bindings.study_maps import StudyMatrix

LEAST_NODES = 3
SLOW = 0.10
"""So much below the median is slow: twice what matters for a copy."""


class Outlier(Struct, frozen=True, kw_only=True):
    """node: of the cluster. what: the node itself, or a link of it. value, usual: in the metric's
    unit; usual is the median of the same place on all nodes.
    """

    node: str
    what: str
    metric: str
    value: float
    usual: float


def slow_nodes_and_links(matrices: Iterable[StudyMatrix]) -> tuple[Outlier, ...]:
    """A GPU that is slow from every NUMA node has a slow link; most GPUs slow: the node is.

    A NUMA node from which every GPU is slow, while they are not from others, is slow itself.
    """
    found: list[Outlier] = []
    by_metric: dict[str, list[StudyMatrix]] = {}
    for matrix in matrices:
        by_metric.setdefault(matrix.metric, []).append(matrix)
    for metric, of in by_metric.items():
        if len({matrix.node for matrix in of}) >= LEAST_NODES:
            found += _of_metric(metric, of)
    return tuple(found)


def _of_metric(metric: str, matrices: list[StudyMatrix]) -> Iterator[Outlier]:
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
        slow = _wholly(cells, bad, 1)
        rows = _wholly(cells, bad, 0)
        if slow and len(slow) * 2 > len(measured):
            value, like = _worst([cell for cells in slow.values() for cell in cells])
            what = f"the node: {len(slow)} of {len(measured)} GPUs"
            yield Outlier(node=matrix.node, what=what, metric=metric, value=value, usual=like)
            continue
        for gpu, of in slow.items():
            value, like = _worst(of)
            what = f"the link of {gpu}"
            yield Outlier(node=matrix.node, what=what, metric=metric, value=value, usual=like)
        # With one GPU, or from one NUMA node, the two cannot be distinguished.
        if len(measured) > 1:
            for row, of in rows.items():
                value, like = _worst(of)
                what = f"NUMA node {row}: from there"
                yield Outlier(node=matrix.node, what=what, metric=metric, value=value, usual=like)


def _wholly(
    cells: Mapping[tuple[int, str], float],
    bad: Mapping[tuple[int, str], tuple[float, float]],
    part: int,
) -> dict[int | str, list[tuple[float, float]]]:
    """Slow cells of rows (part 0) or columns (1) in which all cells are slow."""
    found: dict[int | str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(place[part] for place in cells):
        of = [place for place in cells if place[part] == name]
        if all(place in bad for place in of):
            found[name] = [bad[place] for place in of]
    return found


def _cells(matrix: StudyMatrix) -> Iterator[tuple[tuple[int, str], float]]:
    for row, values in zip(matrix.rows, matrix.cells, strict=True):
        for column, value in zip(matrix.columns, values, strict=True):
            if value is not None:
                yield (row, column), value


def _is_slow(metric: str, value: float, usual: float) -> bool:
    if metric.endswith("latency"):
        return value > usual * (1 + SLOW)
    return value < usual * (1 - SLOW)


def _worst(cells: list[tuple[float, float]]) -> tuple[float, float]:
    return max(cells, key=lambda cell: abs(cell[0] / cell[1] - 1))


def slow_in_collective(found: Collective) -> tuple[Outlier, ...]:
    """Nodes that are slow alone, then links: pairs that are slow while their nodes are not."""
    outliers = []
    metric = "allreduce-busbw-peak"
    slow: set[str] = set()
    if len(found.nodes) >= LEAST_NODES:
        usual = median(value for _, value in found.nodes)
        for node, value in found.nodes:
            if _is_slow(metric, value, usual):
                slow.add(node)
                outliers.append(
                    Outlier(
                        node=node,
                        what="the node: all-reduce on it alone",
                        metric=metric,
                        value=value,
                        usual=usual,
                    )
                )
    if len(found.pairs) < LEAST_NODES:
        return tuple(outliers)
    values = sorted(value for *_, value in found.pairs)
    usual = values[-max(1, len(values) // 4)]
    bad = [(a, b, v) for a, b, v in found.pairs if _is_slow(metric, v, usual) and not {a, b} & slow]
    ends = [node for a, b, _ in bad for node in (a, b)]
    both = {node for node in ends if ends.count(node) > 1}
    for node in sorted(both):
        value = min(v for a, b, v in bad if node in (a, b))
        outliers.append(
            Outlier(
                node=node,
                what="its link to the other nodes",
                metric=metric,
                value=value,
                usual=usual,
            )
        )
    for a, b, value in bad:
        if not {a, b} & both:
            outliers.append(
                Outlier(
                    node=a,
                    what=f"the link between {a} and {b}",
                    metric=metric,
                    value=value,
                    usual=usual,
                )
            )
    return tuple(outliers)
