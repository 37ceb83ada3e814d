"""Split: the number of sibling groups on each of the chosen nodes.

The split of least cost, or the splits for cells that the user gives one by one (--guest-node).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise

from homenode.plan.search.problem import SearchProblem, Split
from homenode.plan.search.supply import GroupRange, split_evenly
from homenode.vm.model import VmCell

MAX_ASSIGNMENTS = 5_040  # of cells to nodes: seven different cells on seven nodes
MAX_SUMS = 60_000  # compared for one split; beyond that the even split is used


def find_least_split(
    problem: SearchProblem, nodes: Sequence[int], ranges: Sequence[GroupRange]
) -> tuple[Split, bool]:
    """Return (the split of least cost within these ranges, whether all were compared).

    Cores outside isolcpus first, then LLCs, then huge pages to reserve, then evenness; ties go to
    the split with larger parts on lower nodes.
    """
    spread = problem.groups - sum([bounds.lowest for bounds in ranges])
    even = split_evenly(ranges, problem.groups)
    if not spread or sum(bounds.highest > bounds.lowest for bounds in ranges) < 2:
        return tuple(zip(nodes, even, strict=True)), True
    least = _sum_costs(problem, nodes, [bounds.lowest for bounds in ranges])
    if _sum_costs(problem, nodes, even) == least:  # more groups cost no less
        return tuple(zip(nodes, even, strict=True)), True
    choices = [range(bounds.lowest, bounds.highest + 1, bounds.step) for bounds in ranges]
    if sum(map(len, choices)) * (spread + 1) > MAX_SUMS:
        return tuple(zip(nodes, even, strict=True)), False
    return tuple(zip(nodes, _find_cheapest_split(problem, nodes, choices), strict=True)), True


def _find_cheapest_split(
    problem: SearchProblem, nodes: Sequence[int], choices: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return the groups of each node that sum to the VM's groups at the least cost; each node gets
    one of its choices. The terms of a split are compared as a tuple, the split last."""
    groups = problem.groups
    upper, lower = groups - sum(map(min, choices)), groups - sum(map(max, choices))
    best: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {0: (0, 0, 0, 0, ())}
    for node, numbers in zip(reversed(nodes), reversed(choices), strict=True):
        upper, lower = upper + min(numbers), lower + max(numbers)
        following: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {}
        for number in numbers:
            cost, short = problem.cost_of(node, number), problem.short_pages(node, number)
            for used, (unisolated, llcs, pages, squares, split) in best.items():
                if not lower <= used + number <= upper:
                    continue
                value = (
                    unisolated + cost.unisolated,
                    llcs + cost.llcs,
                    pages + short,
                    squares + number * number,
                    (-number, *split),
                )
                if used + number not in following or value < following[used + number]:
                    following[used + number] = value
        best = following
    return tuple([-number for number in best[groups][-1]])


def _sum_costs(
    problem: SearchProblem, nodes: Sequence[int], split: Sequence[int]
) -> tuple[int, int, int]:
    """Return the sums of unisolated cores, LLCs and short pages."""
    costs = [problem.cost_of(node, groups) for node, groups in zip(nodes, split, strict=True)]
    short = sum(problem.short_pages(node, n) for node, n in zip(nodes, split, strict=True))
    return sum(c.unisolated for c in costs), sum(c.llcs for c in costs), short


# Cells that the user gives.


def splits_of_cells(
    problem: SearchProblem, cells: Sequence[VmCell], groups: Sequence[int], page_bytes: int
) -> tuple[dict[Split, tuple[int, ...]], bool]:
    """Return (the splits that hold cells of these sizes, with the node of each cell; whether all
    are listed). Cells without a given node get separate nodes, near devices first; of equal cells
    the first get the lower nodes."""
    number = {supply.cores.index: i for i, supply in enumerate(problem.supplies)}
    pages = [-(-cell.memory_bytes // page_bytes) for cell in cells]
    named = {i: number[node] for i, cell in enumerate(cells) for node in cell.host_nodes}

    def holds(node: int, cell_numbers: Iterable[int]) -> bool:
        some, space = list(cell_numbers), problem.memory[node].pages
        has_cores = sum(groups[i] for i in some) <= problem.supplies[node].groups
        return has_cores and (space is None or sum(pages[i] for i in some) <= space)

    kinds = {i: (groups[i], pages[i]) for i in range(len(cells)) if i not in named}
    loose = sorted(kinds, key=kinds.__getitem__)
    is_held = all(holds(n, (i for i in named if named[i] == n)) for n in set(named.values()))
    if not is_held or len({*named.values()}) + len(loose) > problem.most_nodes:
        return {}, True
    rows, gpus = problem.devices.named_rows, problem.devices.gpu_nodes
    order = sorted(
        set(range(len(problem.supplies))) - set(named.values()),
        key=lambda node: (rows[node], not gpus >> node & 1, node),
    )
    options = [[node for node in order if holds(node, (i,))] for i in loose]
    are_equal = [kinds[i] == kinds[j] for i, j in pairwise(loose)]
    choices = list(islice(_list_choices(options, [*are_equal, False]), MAX_ASSIGNMENTS + 1))
    ways: dict[Split, tuple[int, ...]] = {}
    for choice in choices[:MAX_ASSIGNMENTS]:
        assigned_kinds = sorted(zip((kinds[i] for i in loose), choice, strict=True))
        nodes = named | {i: node for i, (_, node) in zip(loose, assigned_kinds, strict=True)}
        by_node = Counter[int]()
        for i, node in nodes.items():
            by_node[node] += groups[i]
        ways.setdefault(tuple(sorted(by_node.items())), tuple(nodes[i] for i in range(len(cells))))
    return ways, len(choices) <= MAX_ASSIGNMENTS


def _list_choices(
    options: Sequence[list[int]], are_equal: Sequence[bool]
) -> Iterator[tuple[int, ...]]:
    """Yield all choices of a different item for each. are_equal: whether a row equals the next;
    equal rows choose in ascending order."""
    if not options:
        yield ()
        return
    equal_count = next(i for i, is_like in enumerate(are_equal) if not is_like)
    for place, node in enumerate(options[0]):
        choices = [options[0][place + 1 :]] * equal_count
        remaining = choices + [
            [other for other in nodes if other != node] for nodes in options[equal_count + 1 :]
        ]
        if _can_differ(remaining):
            for following in _list_choices(remaining, are_equal[1:]):
                yield node, *following


def _can_differ(options: Sequence[list[int]]) -> bool:
    """Return whether each can get a different choice."""
    if all(len(nodes) > i for i, nodes in enumerate(sorted(options, key=len))):
        return True
    taken_counts: dict[int, int] = {}

    def take(i: int, seen_numbers: set[int]) -> bool:
        for node in options[i]:
            if node not in seen_numbers:
                seen_numbers.add(node)
                if node not in taken_counts or take(taken_counts[node], seen_numbers):
                    taken_counts[node] = i
                    return True
        return False

    return all(take(i, set()) for i in range(len(options)))


def split_pages(total: int, weights: Sequence[int], space: Sequence[int]) -> tuple[int, ...]:
    """Return the pages of each cell: by weight, within its room, and at least one.

    >>> split_pages(36, (10, 10), (6, 30)), split_pages(7, (4, 4), (4, 3))
    ((6, 30), (4, 3))
    >>> split_pages(4, (1, 1), (2, 2)), split_pages(4, (100, 1, 1), (9, 9, 9))
    ((2, 2), (2, 1, 1))
    >>> split_pages(3, (1, 1), (2, 2)), split_pages(3, (1, 1), (1, 2))
    ((2, 1), (1, 2))
    >>> split_pages(9, (1, 2), (9, 9)), split_pages(20, (1, 3, 6), (20, 20, 5))
    ((3, 6), (4, 11, 5))
    """
    shares = [1] * len(weights)
    pages = total - len(weights)
    open_cells = [i for i, limit in enumerate(space) if limit > 1]
    while pages > 0 and open_cells:
        weight = sum(weights[i] for i in open_cells)
        before = pages
        for i in open_cells:
            goal = max(1, min(space[i], total * weights[i] // sum(weights)))
            added_pages = min(
                space[i] - shares[i], pages, max(goal - shares[i], before * weights[i] // weight)
            )
            shares[i] += added_pages
            pages -= added_pages
        if pages == before:
            shares[open_cells[0]] += 1
            pages -= 1
        open_cells = [i for i in open_cells if shares[i] < space[i]]
    return tuple(shares)
