"""ExplicitCells: guest cells that the user gives one by one (--cell), on nodes of the host."""

from collections.abc import Iterator, Sequence
from itertools import islice, permutations

from homenode.errors import UsageError
from homenode.plan.options import CellRequest
from homenode.plan.request import GuestRequest
from homenode.plan.search.problem import SearchProblem
from homenode.vm.layout import GuestCells

MOST_ASSIGNMENTS = 5_040
"""Ways to put the cells on nodes that are compared: all for seven cells on seven nodes."""


def check_cells(request: GuestRequest) -> None:
    """Raises UsageError where the cells and the rest of the request contradict each other."""
    cells = request.options.explicit_cells
    if request.layout.cells is not GuestCells.MIRRORED:
        raise UsageError(
            f"--cell: expected a layout with guest cells, found {request.layout.name}",
            hint="take pin-numa or pin-numa-pci",
        )
    for name, given, total in (
        ("vCPUs", sum(cell.vcpus for cell in cells), request.vcpus),
        ("bytes of memory", sum(cell.memory_bytes for cell in cells), request.memory_bytes),
    ):
        if given != total:
            raise UsageError(
                f"--cell: expected cells of {total} {name} in all, found {given}",
                hint="let the cells add up, or leave --vcpus and --memory out",
            )


def assignments(
    problem: SearchProblem, cells: Sequence[CellRequest], groups: Sequence[int], page_bytes: int
) -> Iterator[tuple[int, ...]]:
    """Node positions of the cells, for each way that holds them; cells that name no node get nodes
    of their own."""
    number = {supply.cores.index: i for i, supply in enumerate(problem.supplies)}
    named = [None if cell.node is None else number.get(cell.node) for cell in cells]
    for cell, position in zip(cells, named, strict=True):
        if cell.node is not None and position is None:
            raise UsageError(
                f"--cell node={cell.node}: expected a node with PUs ({', '.join(map(str, number))})"
            )
    open_cells = [i for i, position in enumerate(named) if position is None]
    open_nodes = [i for i in range(len(problem.supplies)) if i not in named]
    pages = [-(-cell.memory_bytes // page_bytes) for cell in cells]
    for chosen in islice(permutations(open_nodes, len(open_cells)), MOST_ASSIGNMENTS):
        nodes = list(named)
        for i, node in zip(open_cells, chosen, strict=True):
            nodes[i] = node
        filled = tuple(node for node in nodes if node is not None)
        if _holds(problem, filled, groups, pages):
            yield filled


def _holds(
    problem: SearchProblem, nodes: Sequence[int], groups: Sequence[int], pages: Sequence[int]
) -> bool:
    for node in set(nodes):
        supply = problem.supplies[node]
        here = [i for i, other in enumerate(nodes) if other == node]
        if sum(groups[i] for i in here) > supply.groups:
            return False
        space = problem.memory[node].pages
        if space is not None and sum(pages[i] for i in here) > space:
            return False
    return len(set(nodes)) <= problem.most_nodes


def pages_within(total: int, weights: Sequence[int], space: Sequence[int]) -> tuple[int, ...]:
    """Pages of each cell: as the weights, as far as each has room, and at least one.

    >>> pages_within(36, (10, 10), (6, 30)), pages_within(7, (4, 4), (4, 3))
    ((6, 30), (4, 3))
    """
    shares = [1] * len(weights)
    left = total - len(weights)
    open_cells = [i for i, most in enumerate(space) if most > 1]
    while left > 0 and open_cells:
        weight = sum(weights[i] for i in open_cells)
        before = left
        for i in open_cells:
            goal = max(1, min(space[i], total * weights[i] // sum(weights)))
            more = min(
                space[i] - shares[i], left, max(goal - shares[i], before * weights[i] // weight)
            )
            shares[i] += more
            left -= more
        if left == before:
            shares[open_cells[0]] += 1
            left -= 1
        open_cells = [i for i in open_cells if shares[i] < space[i]]
    return tuple(shares)
