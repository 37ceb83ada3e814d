"""CellSplits: the splits of a VM over nodes whose cells are most alike.

Where no cell may share a socket with another, a socket has as many cores as divide each cell: cells
of 11 and 10 make 21 sockets of one core, cells of 14 and 7 three of seven.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class GroupRange(NamedTuple):
    """At least and at most so many groups on a node, in steps of so many."""

    lowest: int
    highest: int
    step: int = 1


class CellSplits(NamedTuple):
    """Splits that are as uneven as each other: all ways in which the ranges, one for each node,
    come to the groups of the VM."""

    unevenness: int  # as in the cost; 0 if the devices come first
    ranges: tuple[GroupRange, ...]


def least_uneven(limits: Sequence[int], groups: int, *, whole_sockets: bool) -> CellSplits:
    """The least uneven splits over nodes that hold so many groups each, together as many as the
    groups at least: all nodes filled to one level, as far as they go. whole_sockets: of those that
    make the fewest sockets, in steps of one.

    >>> [tuple(one) for one in least_uneven((16, 4, 16), 21, whole_sockets=False).ranges]
    [(8, 9, 1), (4, 4, 1), (8, 9, 1)]
    >>> [tuple(one) for one in least_uneven((24, 16, 24), 56, whole_sockets=True).ranges]
    [(16, 24, 8), (16, 16, 8), (16, 24, 8)]
    """
    step = _largest_socket(limits, groups) if whole_sockets else 1
    limits, groups = [limit // step for limit in limits], groups // step
    split = even_split([GroupRange(0, limit) for limit in limits], groups)
    level = low = max(split)
    if any(number < min(top, level) for number, top in zip(split, limits, strict=True)):
        low -= 1
    ranges = [GroupRange(min(top, low) * step, min(top, level) * step, step) for top in limits]
    return CellSplits(sum([number**2 for number in split]) * step * step, tuple(ranges))


def _largest_socket(limits: Sequence[int], groups: int) -> int:
    """The most groups of a socket if each node gets whole ones, one at least."""
    for size in range(min(groups // len(limits), *limits), 1, -1):
        if groups % size == 0 and sum([limit // size for limit in limits]) * size >= groups:
            return size
    return 1


def fill_level(least: Sequence[int], limits: Sequence[int], total: int, step: int = 1) -> int:
    """The highest level, in steps, to which all can be filled at least, each from its least to its
    most, that comes to no more than the total.

    >>> fill_level((0, 0, 4), (8, 1, 8), 8)
    3
    """

    def total_at(level: int) -> int:
        return sum([min(max(low, level), high) for low, high in zip(least, limits, strict=True)])

    levels = range(0, max(limits, default=0) + 1, step)
    return levels[bisect_right(levels, total, key=total_at) - 1]


def even_split(ranges: Sequence[GroupRange], total: int) -> tuple[int, ...]:
    """The even-most split: all filled to one level as far as they go, extras on the first.

    >>> even_split([GroupRange(0, 8), GroupRange(0, 1), GroupRange(0, 8)], 8)
    (4, 1, 3)
    """
    least, limits = [bounds.lowest for bounds in ranges], [bounds.highest for bounds in ranges]
    if sum(least) == total:
        return tuple(least)
    step = ranges[0].step
    level = fill_level(least, limits, total, step)
    split = [min(max(low, level), high) for low, high in zip(least, limits, strict=True)]
    over = total - sum(split)
    for i, high in enumerate(limits):
        if over and split[i] == level and level < high:
            split[i] += step
            over -= step
    return tuple(split)
