"""Split: how many sibling groups each of the chosen nodes gets, where that is left open."""

from collections.abc import Sequence

from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.problem import SearchProblem, Split
from homenode.plan.search.supply import are_unequal

MOST_SUMS = 60_000
"""Sums that are compared for one split; beyond, the even split is used."""


def least_split(
    problem: SearchProblem, nodes: Sequence[int], ranges: Sequence[GroupRange]
) -> tuple[Split, bool]:
    """(the split within these ranges of least cost, whether all were compared).

    Cores outside isolcpus first, then LLCs, then as many groups on each of them, then huge pages to
    reserve, then evenness; of equals the one with the larger parts on the lower nodes.
    """
    left = problem.groups - sum(one.least for one in ranges)
    even = _even(ranges, left)
    if not left or sum(one.most > one.least for one in ranges) < 2:
        return tuple(zip(nodes, even, strict=True)), True
    sums = _sums(problem, nodes, even)
    if not sums[2] and (*sums[:2], sums[3]) == _bound(problem, nodes):
        return tuple(zip(nodes, even, strict=True)), True
    every = [tuple(range(one.least, one.most + 1, one.step)) for one in ranges]
    work = sum(map(len, every)) * (left + 1)
    if work > MOST_SUMS:
        return tuple(zip(nodes, even, strict=True)), False
    by_size = [_by_size(problem, node, some) for node, some in zip(nodes, every, strict=True)]
    sizes = sorted(set(by_size[0]).intersection(*by_size[1:]))
    alike = [_least(problem, nodes, [one[size] for one in by_size]) for size in sizes]
    best = min(
        (unisolated, llcs, unequal, short, squares, split)
        for unequal, ways in enumerate((alike, [_least(problem, nodes, every)]))
        for unisolated, llcs, short, squares, split in filter(None, ways)
    )
    return tuple(zip(nodes, (-groups for groups in best[-1]), strict=True)), True


_Sums = tuple[int, int, int, int, tuple[int, ...]]
"""Unisolated, LLCs, short pages, squares, negated split."""

_WIDTHS = (32, 32, 80, 48)
"""Bits of these sums but for the split, where they are digits of one number."""


def _least(
    problem: SearchProblem, nodes: Sequence[int], choices: Sequence[Sequence[int]]
) -> _Sums | None:
    """The least sums where each node gets one of these numbers of groups, None where no way comes
    to the groups of the VM. All sums of a way are digits of one number, the split the last."""
    groups, digit = problem.groups, problem.groups.bit_length()
    most, fewest = groups - sum(map(min, choices)), groups - sum(map(max, choices))
    best = {0: 0}
    for place, node, some in zip(range(len(nodes))[::-1], nodes, choices, strict=True):
        most, fewest = most + min(some), fewest + max(some)
        following: dict[int, int] = {}
        for number in some:
            cost = problem.cost_of(node, number)
            short = problem.short_pages(node, number)
            own = 0
            sums = (cost.unisolated, cost.llcs, short, number * number)
            for width, one in zip(_WIDTHS, sums, strict=True):
                own = own << width | one
            own = own << digit * len(nodes) | groups - number << digit * place
            for used, value in best.items():
                more = used + number
                if fewest <= more <= most and (
                    more not in following or value + own < following[more]
                ):
                    following[more] = value + own
        best = following
    found = best.get(groups)
    return None if found is None else _sums_in(found, groups, len(nodes))


def _sums_in(number: int, groups: int, count: int) -> _Sums:
    """The sums that are the digits of a number. groups: of the VM; count: so many nodes."""
    digit, split = groups.bit_length(), []
    for place in range(count)[::-1]:
        split.append((number >> digit * place & (1 << digit) - 1) - groups)
    number >>= digit * count
    sums = []
    for width in reversed(_WIDTHS):
        sums.append(number & (1 << width) - 1)
        number >>= width
    squares, short, llcs, unisolated = sums
    return unisolated, llcs, short, squares, tuple(split)


def _by_size(problem: SearchProblem, node: int, numbers: Sequence[int]) -> dict[int, list[int]]:
    """Those of these numbers of groups that give as many to each LLC, by how many these are."""
    found: dict[int, list[int]] = {}
    for groups in numbers:
        size = problem.cost_of(node, groups).per_llc
        if size:
            found.setdefault(size, []).append(groups)
    return found


def _even(ranges: Sequence[GroupRange], left: int) -> tuple[int, ...]:
    """The even-most split: all filled to one level as far as they go, extras on the first."""
    split = [one.least for one in ranges]
    if not left:
        return tuple(split)
    step = ranges[0].step
    total = sum(split) + left
    low, high = min(split) // step, max(one.most for one in ranges) // step
    while low < high:
        level = (low + high + 1) // 2
        if sum(min(max(one.least, level * step), one.most) for one in ranges) <= total:
            low = level
        else:
            high = level - 1
    low *= step
    split = [min(max(one.least, low), one.most) for one in ranges]
    over = total - sum(split)
    for i, one in enumerate(ranges):
        if over and split[i] == low and split[i] < one.most:
            split[i] += step
            over -= step
    return tuple(split)


def _sums(
    problem: SearchProblem, nodes: Sequence[int], split: Sequence[int]
) -> tuple[int, int, int, int]:
    """Unisolated, LLCs, whether these are unequal, short pages."""
    costs = [problem.cost_of(node, groups) for node, groups in zip(nodes, split, strict=True)]
    short = sum(problem.short_pages(node, n) for node, n in zip(nodes, split, strict=True))
    return sum(c.unisolated for c in costs), sum(c.llcs for c in costs), are_unequal(costs), short


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
