"""CellSizes: how unlike the cells of a guest are, and the splits whose cells are most alike.

Where no cell may share a socket with another, a socket has as many cores as divide each cell: cells
of 11 and 10 make 21 sockets of one core, cells of 14 and 7 three of seven.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import gcd, isqrt
from typing import NamedTuple


class GroupRange(NamedTuple):
    """At least and at most so many groups on a node, in steps of so many."""

    least: int
    most: int
    step: int = 1


class CellSizes(NamedTuple):
    """What the sizes of cells come to, whichever node has which; of two the lesser is the better.
    The terms of the cost have the same names."""

    lopsided_split: int
    guest_sockets: int
    unevenness: int


class CellSplits(NamedTuple):
    """Splits that come to the same sizes: all ways in which the ranges, one for each node, come to
    the groups of the VM."""

    sizes: CellSizes
    ranges: tuple[GroupRange, ...]


def cell_sizes(split: Sequence[int], *, counts_sockets: bool) -> CellSizes:
    """Of groups on each node. counts_sockets: no cell may share a socket with another.

    >>> tuple(cell_sizes((14, 7), counts_sockets=True)), cell_sizes((4,), counts_sockets=False)[2]
    ((0, 3, 245), 16)
    """
    return CellSizes(
        int(max(split) > 2 * min(split)),
        sum(split) // gcd(*split) if counts_sockets else 0,
        sum(groups * groups for groups in split),
    )


def least_uneven(most: Sequence[int], groups: int, *, counts_sockets: bool) -> CellSplits | None:
    """The splits of least CellSizes over nodes that hold so many groups each; None where these
    nodes cannot all be used.

    >>> [tuple(one) for one in least_uneven((16, 16), 21, counts_sockets=False).ranges]
    [(10, 11, 1), (10, 11, 1)]
    >>> [tuple(one) for one in least_uneven((16, 16), 21, counts_sockets=True).ranges]
    [(7, 14, 7), (7, 14, 7)]
    """
    found: CellSplits | None = None
    # Of splits in steps of a size the levelled ones are the least uneven, and the larger the step
    # the fewer the sockets.
    for step in _divisors(groups) if counts_sockets else (1,):
        if groups // step < len(most):
            continue
        splits = _levelled([one // step for one in most], groups // step, step)
        if splits is None:
            continue
        split = [one.least for one in splits]
        more = (groups - sum(split)) // step
        for i, one in enumerate(splits):
            if more and one.most > one.least:
                split[i], more = one.most, more - 1
        sizes = cell_sizes(split, counts_sockets=counts_sockets)
        if found is None or not sizes.lopsided_split:
            found = CellSplits(sizes, splits)
        if not sizes.lopsided_split:
            break
    return found


def _levelled(most: Sequence[int], total: int, step: int) -> tuple[GroupRange, ...] | None:
    """The splits, in steps, that fill all nodes to one level as far as they go, and at least to
    one step; None where there are none."""
    if min(most) < 1 or sum(most) < total or total < len(most):
        return None
    low, over = divmod(total, len(most))
    if min(most) >= low + (over > 0):
        return (GroupRange(low * step, (low + (over > 0)) * step, step),) * len(most)
    low = fill_level([0] * len(most), most, total)
    more = sum([min(one, low) for one in most]) < total
    return tuple(
        GroupRange(min(one, low) * step, min(one, low + more) * step, step) for one in most
    )


def fill_level(least: Sequence[int], most: Sequence[int], total: int, step: int = 1) -> int:
    """The highest level, in steps, to which all can be filled at least, each from its least to its
    most, that comes to no more than the total.

    >>> fill_level((0, 0, 4), (8, 1, 8), 8)
    3
    """

    def filled(level: int) -> int:
        return sum([min(max(low, level), high) for low, high in zip(least, most, strict=True)])

    levels = range(0, max(most, default=0) + 1, step)
    return levels[bisect_right(levels, total, key=filled) - 1]


def even_split(ranges: Sequence[GroupRange], total: int) -> tuple[int, ...]:
    """The even-most split: all filled to one level as far as they go, extras on the first.

    >>> even_split([GroupRange(0, 8), GroupRange(0, 1), GroupRange(0, 8)], 8)
    (4, 1, 3)
    """
    least, most = [one.least for one in ranges], [one.most for one in ranges]
    if sum(least) == total:
        return tuple(least)
    step = ranges[0].step
    level = fill_level(least, most, total, step)
    split = [min(max(low, level), high) for low, high in zip(least, most, strict=True)]
    over = total - sum(split)
    for i, high in enumerate(most):
        if over and split[i] == level and level < high:
            split[i] += step
            over -= step
    return tuple(split)


def _divisors(number: int) -> tuple[int, ...]:
    """Descending."""
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}, reverse=True))
