"""Near: distances between nodes, and from devices to nodes, as the planner reads them.

A pair counts with the worse of its two directions. 255 means unreachable (ACPI 6.5, 5.2.17): such
nodes never serve one VM together. Where the host tells no distances, nodes are as far apart as
Linux says then: 10 to itself, 20 to any other (include/linux/topology.h, REMOTE_DISTANCE).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.topology import LOCAL_DISTANCE, Host

REMOTE_DISTANCE = 20
UNREACHABLE = 255


@dataclass(frozen=True, slots=True)
class Near:
    """between: shape (nodes, nodes), symmetric, in the order of host.nodes; SLIT.

    packages: a number per node; a node without one package is a package of its own.
    """

    between: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]

    def classes_to(self, position: int, nodes: Sequence[int]) -> tuple[int, ...]:
        """Package-level distance from one node to each of `nodes`: 10 within its package, else the
        least distance between a node of the one package and a node of the other."""
        home = self.packages[position]
        members = [i for i, package in enumerate(self.packages) if package == home]
        least: dict[int, int] = {home: LOCAL_DISTANCE}
        for other, package in enumerate(self.packages):
            if package != home:
                distance = min(self.between[member][other] for member in members)
                least[package] = min(distance, least.get(package, distance))
        return tuple(least[self.packages[node]] for node in nodes)


def near(host: Host) -> Near:
    """Distances of a host, symmetric and complete."""
    count = len(host.nodes)
    told = host.distances
    if told is None:
        between = tuple(
            tuple(LOCAL_DISTANCE if i == j else REMOTE_DISTANCE for j in range(count))
            for i in range(count)
        )
    else:
        columns = tuple(zip(*told, strict=True))
        between = tuple(
            tuple(map(max, row, column)) for row, column in zip(told, columns, strict=True)
        )
    packages = tuple(
        -1 - position if node.package is None else int(node.package)
        for position, node in enumerate(host.nodes)
    )
    return Near(between, packages)


class Steps:
    """Counts the steps of one search against its budget. The only thing here that changes."""

    __slots__ = ("left", "ran_out")

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.ran_out = False

    def spend(self, steps: int) -> None:
        """Counts steps that are taken in any case, so that fewer are left for branches."""
        self.left -= steps

    def take(self, steps: int) -> bool:
        """True where any step was left."""
        if self.left <= 0:
            self.ran_out = True
            return False
        self.left -= steps
        return True


def members(mask: int) -> Iterator[int]:
    """The positions of the set bits, ascending."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit


def neighbours(between: Sequence[Sequence[int]], within: int) -> tuple[int, ...]:
    """For each node, the others (bits) that are no farther than `within`."""
    result = []
    for node, row in enumerate(between):
        mask = 0
        for other, distance in enumerate(row):
            if distance <= within:
                mask |= 1 << other
        result.append(mask & ~(1 << node))
    return tuple(result)


def cliques(linked: Sequence[int], among: int, least: int, steps: Steps) -> Iterator[int]:
    """Every largest set of `least` nodes or more of `among` in which all are linked, as bits.

    Where distances are hierarchical these are the groups of the hierarchy, found in one pass; else
    Bron and Kerbosch's search with a pivot, as far as the steps last.
    """
    rest = among
    while rest:
        node = (rest & -rest).bit_length() - 1
        group, grown = 0, 1 << node
        while grown != group:
            new = grown & ~group
            group = grown
            for member in members(new):
                grown |= linked[member] & among
        rest &= ~group
        if group.bit_count() < least:
            continue
        if _all_linked(linked, group):
            yield group
        else:
            yield from _grow(linked, 0, group, 0, least, steps)


def _all_linked(linked: Sequence[int], nodes: int) -> bool:
    return all(not nodes & ~(linked[node] | 1 << node) for node in members(nodes))


def _grow(
    linked: Sequence[int], chosen: int, open_: int, done: int, least: int, steps: Steps
) -> Iterator[int]:
    size = open_.bit_count()
    if chosen.bit_count() + size < least or not steps.take(1 + size):
        return
    if _all_linked(linked, open_):
        # All at once, unless a node that was dealt with before belongs to them too.
        if not any(not open_ & ~linked[node] for node in members(done)):
            yield chosen | open_
        return
    pivot = max(members(open_ | done), key=lambda node: (linked[node] & open_).bit_count())
    for node in members(open_ & ~linked[pivot]):
        bit = 1 << node
        yield from _grow(
            linked, chosen | bit, open_ & linked[node], done & linked[node], least, steps
        )
        open_ &= ~bit
        done |= bit
