"""DistanceMatrix: distances between nodes, and between packages, as the planner reads them.

A pair counts with the worse of its two directions. 255 means unreachable (ACPI 6.5, 5.2.17): such
nodes never serve one VM together. Where the host has no SLIT, nodes are as far apart as Linux says
then: 10 to itself, 20 to any other (include/linux/topology.h, REMOTE_DISTANCE).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.topology import LOCAL_DISTANCE, Host

REMOTE_DISTANCE = 20
UNREACHABLE = 255


@dataclass(frozen=True, slots=True)
class DistanceMatrix:
    """between: shape (nodes, nodes), symmetric, in the order of host.nodes; SLIT.

    packages: a number per node; a node without one package is a package of its own.
    """

    between: tuple[tuple[int, ...], ...]
    packages: tuple[int, ...]

    def to_packages(self, position: int) -> dict[int, int]:
        """Package-level distance from one node to each package: 10 to its own, else the least
        distance between a node of the one package and a node of the other."""
        home = self.packages[position]
        rows = [self.between[i] for i, package in enumerate(self.packages) if package == home]
        least: dict[int, int] = {}
        for other, package in enumerate(self.packages):
            distance = min(row[other] for row in rows)
            least[package] = min(distance, least.get(package, distance))
        least[home] = LOCAL_DISTANCE
        return least

    def among(self, positions: Sequence[int]) -> "DistanceMatrix":
        """The same of these nodes alone, their packages numbered from 0."""
        number: dict[int, int] = {}
        for position in positions:
            number.setdefault(self.packages[position], len(number))
        return DistanceMatrix(
            tuple(tuple(self.between[a][b] for b in positions) for a in positions),
            tuple(number[self.packages[p]] for p in positions),
        )


def distance_matrix(host: Host) -> DistanceMatrix:
    """Distances of a host, symmetric and complete."""
    count = len(host.nodes)
    slit = host.distances
    if slit is None:
        between = tuple(
            tuple(LOCAL_DISTANCE if i == j else REMOTE_DISTANCE for j in range(count))
            for i in range(count)
        )
    else:
        columns = tuple(zip(*slit, strict=True))
        between = tuple(
            tuple(map(max, row, column)) for row, column in zip(slit, columns, strict=True)
        )
    packages = tuple(
        -1 - position if node.package is None else int(node.package)
        for position, node in enumerate(host.nodes)
    )
    return DistanceMatrix(between, packages)


def members(mask: int) -> Iterator[int]:
    """The positions of the set bits, ascending.

    >>> list(members(0b1010))
    [1, 3]
    """
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
