"""GpuSelection: the GPUs that a set of nodes could be given, before ties are broken."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from homenode.plan.search.first_terms import FirstTerms, GpuGroup, HomeGpus
from homenode.plan.search.problem import Home

MOST_GPU_VECTORS = 400
"""Numbers of GPUs by node that are compared for one set of nodes whose split is free."""

MOST_GROUP_VECTORS = 2_000
"""The same where GPUs are chosen within one package or NVLink partition, for each of these."""


class GpuSelection(NamedTuple):
    """A choice of GPUs that is complete but for ties.

    parts: (GPUs for certain, (tied GPUs, how many of them) or None). rows: for each node of the
    set, the distances of the GPUs' functions to it, in sum.
    """

    parts: Sequence[tuple[int, tuple[int, int] | None]]
    rows: tuple[int, ...]

    @property
    def sure(self) -> int:
        return sum(gpus for gpus, _ in self.parts)

    @property
    def tied(self) -> tuple[tuple[int, int], ...]:
        return tuple(tied for _, tied in self.parts if tied is not None)


def distance_rows(
    homes: Sequence[tuple[Home | None, int]], positions: Sequence[int]
) -> tuple[int, ...]:
    """For each node, the distances of these functions to it, in sum."""
    rows = [0] * len(positions)
    for home, weight in homes:
        if home is not None and weight:
            for i, node in enumerate(positions):
                rows[i] += weight * home.to_node[node]
    return tuple(rows)


def vectors(most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to take `total` from groups of so many.

    >>> list(vectors([1, 2], 2))
    [(1, 1), (0, 2)]
    """
    if not most:
        if not total:
            yield ()
        return
    rest = sum(most[1:])
    for number in range(min(most[0], total), max(0, total - rest) - 1, -1):
        for others in vectors(most[1:], total - number):
            yield (number, *others)


def gpu_choices(
    terms: FirstTerms,
    groups: Sequence[GpuGroup],
    nodes: int,
    positions: Sequence[int],
    split: Sequence[int] | None,
) -> tuple[list[GpuSelection], bool]:
    """(choices of GPUs as near as can be, whether these are all). groups: FirstTerms.home_groups of
    these nodes (bits), of which these are the positions. split: groups on each of them, None where
    that is left open."""
    count = terms.problem.options.count
    if not count:
        return [GpuSelection((), (0,) * len(positions))], True
    if "device_distance" not in terms.problem.rest:
        # No GPU of those that may go together is nearer than another to this policy.
        every = (sum(gpus for one in group.homes for _, gpus in one.by_weight) for group in groups)
        return [GpuSelection([(0, (gpus, count))], (0,) * len(positions)) for gpus in every], True
    found: list[GpuSelection] = []
    is_complete = True
    for group in groups:
        some, are_all = _choices_of(terms, group, nodes, positions, split)
        found += some
        is_complete &= are_all
    return found, is_complete


def _choices_of(
    terms: FirstTerms,
    group: GpuGroup,
    nodes: int,
    positions: Sequence[int],
    split: Sequence[int] | None,
) -> tuple[list[GpuSelection], bool]:
    """The same, of one group."""
    problem = terms.problem
    certain, homes = group.near(nodes)
    left = problem.options.count
    for one in certain:
        left -= one.count
    if left < 0:
        certain, homes, left = [], certain, problem.options.count
    if split is not None:
        return [_nearest_gpus(certain, homes, left, positions, split)], True
    homes = _merged(homes, positions)
    most = MOST_GPU_VECTORS if problem.options.any_gpus else MOST_GROUP_VECTORS
    # Of each home none of its GPUs, one, two … and the rows of these.
    firsts = [[one.first(number) for number in range(one.count + 1)] for one in homes]
    parts = [[(sure, tied) for sure, _, tied in some] for some in firsts]
    rows = [
        [distance_rows([(one.home, weight)], positions) for _, weight, _ in some]
        for one, some in zip(homes, firsts, strict=True)
    ]
    all_of = [one.first(one.count) for one in certain]
    certain_rows = distance_rows(
        [(one.home, weight) for one, (_, weight, _) in zip(certain, all_of, strict=True)], positions
    )
    certain_part = sum(sure for sure, _, _ in all_of), None
    found: list[GpuSelection] = []
    for numbers in vectors([one.count for one in homes], left):
        if len(found) == most:
            return found, False
        mine = [some[number] for some, number in zip(rows, numbers, strict=True)]
        found.append(
            GpuSelection(
                (certain_part, *[some[n] for some, n in zip(parts, numbers, strict=True)]),
                tuple(map(sum, zip(certain_rows, *mine, strict=True))),
            )
        )
    return found, True


def _merged(homes: Sequence[HomeGpus], positions: Sequence[int]) -> list[HomeGpus]:
    """The homes, as one those that are as far from each of these nodes."""
    alike: dict[tuple[int, ...] | None, list[HomeGpus]] = {}
    for one in homes:
        row = None if one.home is None else tuple([one.home.to_node[node] for node in positions])
        alike.setdefault(row, []).append(one)
    result = []
    for some in alike.values():
        weights: dict[int, int] = {}
        for weight, gpus in (each for one in some for each in one.by_weight):
            weights[weight] = weights.get(weight, 0) | gpus
        count = sum(one.count for one in some)
        result.append(HomeGpus(some[0].home, (), tuple(sorted(weights.items())), count))
    return result


def _nearest_gpus(
    certain: Sequence[HomeGpus],
    homes: Sequence[HomeGpus],
    left: int,
    positions: Sequence[int],
    split: Sequence[int],
) -> GpuSelection:
    """All GPUs of the certain homes and the nearest of the others, `left` of them."""
    sure, used = 0, []
    for one in certain:
        mine, weight, _ = one.first(one.count)
        sure |= mine
        used.append((one.home, weight))
    by_distance: dict[int, list[tuple[Home | None, int, int]]] = {}
    for one in homes:
        distance = 0
        if one.home is not None:
            row = one.home.to_node
            distance = sum([n * row[p] for n, p in zip(split, positions, strict=True)])
        for weight, gpus in one.by_weight:
            by_distance.setdefault(weight * distance, []).append((one.home, weight, gpus))
    tied: tuple[int, int] | None = None
    for distance in sorted(by_distance) if left else ():
        here, wanted = 0, left
        for home, weight, gpus in by_distance[distance]:
            here |= gpus
            number = min(left, gpus.bit_count())
            used.append((home, weight * number))
            left -= number
        if here.bit_count() > wanted:
            tied = here, wanted
            break
        sure |= here
        if not left:
            break
    return GpuSelection(((sure, tied),), distance_rows(used, positions))
