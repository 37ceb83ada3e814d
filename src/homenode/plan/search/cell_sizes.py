"""CellSplits: the splits of a VM over nodes whose cells are most alike."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class GroupRange(NamedTuple):
    """At least and at most so many groups on a node."""

    lowest: int
    highest: int


class CellSplits(NamedTuple):
    """Splits that are as uneven as each other: all ways in which the ranges, one for each node,
    come to the groups of the VM."""

    unevenness: int  # as in the cost; 0 if the devices come first
    ranges: tuple[GroupRange, ...]


def least_uneven(limits: Sequence[int], groups: int) -> CellSplits:
    """The least uneven splits over nodes that hold so many groups each, together as many as the
    groups at least: all nodes filled to one level, as far as they go.

    >>> [tuple(one) for one in least_uneven((16, 4, 16), 21).ranges]
    [(8, 9), (4, 4), (8, 9)]
    """
    low, over = divmod(groups, len(limits))
    if min(limits) < low + (over > 0):
        low = fill_level([0] * len(limits), limits, groups)
        over = groups - sum([min(limit, low) for limit in limits])
    ranges = tuple([GroupRange(min(top, low), min(top, low + (over > 0))) for top in limits])
    squares = sum([least * least for least, _ in ranges])
    return CellSplits(squares + over * (2 * low + 1), ranges)


def fill_level(least: Sequence[int], limits: Sequence[int], total: int) -> int:
    """The highest level to which all can be filled at least, each from its least to its most, that
    comes to no more than the total.

    >>> fill_level((0, 0, 4), (8, 1, 8), 8)
    3
    """

    def total_at(level: int) -> int:
        return sum([min(max(low, level), high) for low, high in zip(least, limits, strict=True)])

    return bisect_right(range(max(limits, default=0) + 1), total, key=total_at) - 1


def even_split(ranges: Sequence[GroupRange], total: int) -> tuple[int, ...]:
    """The even-most split: all filled to one level as far as they go, extras on the first.

    >>> even_split([GroupRange(0, 8), GroupRange(0, 1), GroupRange(0, 8)], 8)
    (4, 1, 3)
    """
    least, limits = [bounds.lowest for bounds in ranges], [bounds.highest for bounds in ranges]
    if sum(least) == total:
        return tuple(least)
    level = fill_level(least, limits, total)
    split = [min(max(low, level), high) for low, high in zip(least, limits, strict=True)]
    over = total - sum(split)
    for i, high in enumerate(limits):
        if over and split[i] == level and level < high:
            split[i] += 1
            over -= 1
    return tuple(split)
