"""GpuSelection: the GPUs that a set of nodes could be given, before ties are broken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.plan.search.distances import members
from homenode.plan.search.first_terms import FirstTerms, GpuGroup, HomeGpus
from homenode.plan.search.problem import Home

MOST_GPU_VECTORS = 400
"""Numbers of GPUs by node that are compared for one set of nodes whose split is free."""

MOST_GROUP_VECTORS = 2_000
"""The same where GPUs are chosen within one package or NVLink partition, for each of these."""


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """A choice of GPUs that is complete but for ties: `sure`, and so many of each tied set.

    rows: for each node of the set, the distances of the GPUs' functions to it, in sum.
    """

    sure: int
    tied: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]


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
    terms: FirstTerms, nodes: int, split: Sequence[int] | None
) -> tuple[list[GpuSelection], bool]:
    """(choices of GPUs as near as can be, whether these are all). split: groups on each node, None
    where that is left open."""
    count = terms.problem.options.count
    positions = tuple(members(nodes))
    if not count:
        return [GpuSelection(0, (), (0,) * len(positions))], True
    groups = terms.near_groups(nodes)
    away = [group.away(count, nodes) for group in groups]
    least = min(away)
    found: list[GpuSelection] = []
    is_complete = True
    for group, number in zip(groups, away, strict=True):
        if number == least:
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
    certain, homes = terms.near_homes(group, nodes)
    left = problem.options.count - sum(one.count for one in certain)
    if left < 0:
        certain, homes, left = [], certain, problem.options.count
    if problem.options.any_gpus or "device_distance" in problem.rest:
        if split is not None:
            return [_nearest_gpus(certain, homes, left, positions, split)], True
    else:
        # No GPU of those that may go together is nearer than another to this policy.
        return [_nearest_gpus(certain, homes, left, positions, (0,) * len(positions))], True
    most = MOST_GPU_VECTORS if problem.options.any_gpus else MOST_GROUP_VECTORS
    found: list[GpuSelection] = []
    for numbers in vectors([one.count for one in homes], left):
        if len(found) == most:
            return found, False
        found.append(
            _selection((*certain, *homes), (*(one.count for one in certain), *numbers), positions)
        )
    return found, True


def _selection(
    homes: Sequence[HomeGpus], numbers: Sequence[int], positions: Sequence[int]
) -> GpuSelection:
    """So many GPUs of each home."""
    sure, tied, used = 0, [], []
    for one, number in zip(homes, numbers, strict=True):
        mine, weight, some = one.first(number)
        sure |= mine
        used.append((one.home, weight))
        if some is not None:
            tied.append(some)
    return GpuSelection(sure, tuple(tied), distance_rows(used, positions))


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
    tied: tuple[tuple[int, int], ...] = ()
    for distance in sorted(by_distance) if left else ():
        here, wanted = 0, left
        for home, weight, gpus in by_distance[distance]:
            here |= gpus
            number = min(left, gpus.bit_count())
            used.append((home, weight * number))
            left -= number
        if here.bit_count() > wanted:
            tied = ((here, wanted),)
            break
        sure |= here
        if not left:
            break
    return GpuSelection(sure, tied, distance_rows(used, positions))
