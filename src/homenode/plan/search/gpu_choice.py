"""GpuChoice: the GPUs of each node that a set of nodes could be given, before ties are broken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.plan.search.problem import Home


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """A choice of GPUs that is complete but for ties: `sure`, and so many of each tied set."""

    sure: int
    tied: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class HomeGpus:
    """The GPUs (bits) of one home that may be chosen, by the functions that each brings."""

    home: Home | None
    by_weight: tuple[tuple[int, int], ...]
    count: int

    def first(self, number: int) -> tuple[int, int, tuple[int, int] | None]:
        """(sure GPUs, their weight with the tied ones, (tied GPUs, how many of them))."""
        sure, weight = 0, 0
        for each, gpus in self.by_weight:
            here = gpus.bit_count()
            if here > number:
                return sure, weight + each * number, (gpus, number) if number else None
            sure |= gpus
            weight += each * here
            number -= here
        return sure, weight, None


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
