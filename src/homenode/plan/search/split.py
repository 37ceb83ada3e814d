"""Split: how many sibling groups each of the chosen nodes gets, where that is left open."""

from collections.abc import Sequence
from typing import NamedTuple

from homenode.plan.search.problem import SearchProblem, Split

MOST_SUMS = 60_000
"""Sums that are compared for one split; beyond, the even split is used."""


class GroupRange(NamedTuple):
    """At least and at most so many groups on a node."""

    least: int
    most: int


def least_split(
    problem: SearchProblem, nodes: Sequence[int], ranges: Sequence[GroupRange]
) -> tuple[Split, bool]:
    """(the split within these ranges of least cost, whether all were compared).

    Cores outside isolcpus first, then LLCs, then huge pages to reserve, then evenness; of equals
    the one with the larger parts on the lower nodes.
    """
    left = problem.groups - sum(one.least for one in ranges)
    even = _even(ranges, left)
    if not left or sum(one.most > one.least for one in ranges) < 2:
        return tuple(zip(nodes, even, strict=True)), True
    if _sums(problem, nodes, even) == _bound(problem, nodes):
        return tuple(zip(nodes, even, strict=True)), True
    work = sum(one.most - one.least + 1 for one in ranges) * (left + 1)
    if work > MOST_SUMS:
        return tuple(zip(nodes, even, strict=True)), False
    # groups beyond the least -> (unisolated, LLCs, short pages, squares, negated split)
    best: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, 0, ())}
    for node, one in zip(nodes, ranges, strict=True):
        following: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {}
        for groups in range(one.least, one.most + 1):
            cost = problem.cost_of(node, groups)
            short = problem.short_pages(node, groups)
            for used, value in best.items():
                more = used + groups - one.least
                if more > left:
                    continue
                candidate = (
                    value[0] + cost.unisolated,
                    value[1] + cost.llcs,
                    value[2] + short,
                    value[3] + groups * groups,
                    (*value[4], -groups),
                )
                if more not in following or candidate < following[more]:
                    following[more] = candidate
        best = following
    return tuple(zip(nodes, (-groups for groups in best[left][4]), strict=True)), True


def _even(ranges: Sequence[GroupRange], left: int) -> tuple[int, ...]:
    """The even-most split: all filled to one level as far as they go, extras on the first."""
    split = [one.least for one in ranges]
    if not left:
        return tuple(split)
    total = sum(split) + left
    low, high = min(split), max(one.most for one in ranges)
    while low < high:
        level = (low + high + 1) // 2
        if sum(min(max(one.least, level), one.most) for one in ranges) <= total:
            low = level
        else:
            high = level - 1
    split = [min(max(one.least, low), one.most) for one in ranges]
    over = total - sum(split)
    for i, one in enumerate(ranges):
        if over and split[i] == low and split[i] < one.most:
            split[i] += 1
            over -= 1
    return tuple(split)


def _sums(
    problem: SearchProblem, nodes: Sequence[int], split: Sequence[int]
) -> tuple[int, int, int]:
    costs = [problem.cost_of(node, groups) for node, groups in zip(nodes, split, strict=True)]
    short = sum(problem.short_pages(node, n) for node, n in zip(nodes, split, strict=True))
    return sum(c.unisolated for c in costs), sum(c.llcs for c in costs), short


def _bound(problem: SearchProblem, nodes: Sequence[int]) -> tuple[int, int, int]:
    """What no split over these nodes can undercut."""
    sizes: list[int] = []
    isolated, pools = 0, 0
    for node in nodes:
        by_llc: dict[int, int] = {}
        for tier in problem.supplies[node].whole.tiers:
            isolated += tier.total * tier.isolated
            for llc, groups in tier.llcs:
                by_llc[llc] = by_llc.get(llc, 0) + groups
        sizes += by_llc.values()
        pools += problem.memory[node].pool_pages
    unisolated = max(0, problem.groups - isolated) if problem.hosts_isolation else 0
    llcs, owned = 0, 0
    for size in sorted(sizes, reverse=True):
        if owned >= problem.groups:
            break
        owned += size
        llcs += 1
    short = max(0, problem.pages - pools) if problem.huge and problem.pages else 0
    return unisolated, max(llcs, len(nodes)), short
