"""DistanceMatrix: distances between nodes, and between packages, as the planner reads them.

A pair's distance is the worse of its two directions. 255 means unreachable (ACPI 6.5, 5.2.17): such
nodes are never used for the same VM.
"""

from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct

from homenode.machine.topology import LOCAL_DISTANCE, Host
from homenode.plan.bit_sets import members

UNREACHABLE = 255


class DistanceMatrix(Struct, frozen=True, dict=True):
    """Distances between sets of nodes."""

    # shape (nodes, nodes), symmetric, in the order of host.nodes; SLIT
    between: tuple[tuple[int, ...], ...]
    # package of each node; a node in no single package is its own package. Sets of nodes are bits
    # here.
    packages: tuple[int, ...]

    @cached_property
    def _spreads(self) -> dict[int, tuple[int, int]]:
        """The cache of spread()."""
        return {}

    @cached_property
    def nodes_of_package(self) -> dict[int, int]:
        nodes: dict[int, int] = {}
        for position, package in enumerate(self.packages):
            nodes[package] = nodes.get(package, 0) | 1 << position
        return nodes

    @cached_property
    def _from_packages(self) -> dict[int, dict[int, int]]:
        """Return the least distance between nodes of two packages; 10 within a package."""
        result = {}
        for home, nodes in self.nodes_of_package.items():
            rows = [self.between[node] for node in members(nodes)]
            least: dict[int, int] = {}
            for row in rows:
                for package, distance in zip(self.packages, row, strict=True):
                    least[package] = min(distance, least.get(package, distance))
            least[home] = LOCAL_DISTANCE
            result[home] = least
        return result

    def to_packages(self, position: int) -> dict[int, int]:
        """Return the package-level distance from a node to each package: 10 to its own, else the
        least distance between nodes of the two packages."""
        return self._from_packages[self.packages[position]]

    def among(self, positions: Sequence[int]) -> "DistanceMatrix":
        """Return the matrix of these nodes alone, their packages numbered from 0."""
        number: dict[int, int] = {}
        for position in positions:
            number.setdefault(self.packages[position], len(number))
        between = self.between
        if len(positions) < len(between):
            between = tuple(tuple(between[a][b] for b in positions) for a in positions)
        return DistanceMatrix(between, tuple(number[self.packages[p]] for p in positions))

    @cached_property
    def unreachable(self) -> tuple[int, ...]:
        """Return the nodes that each node cannot reach."""
        return tuple(
            sum(1 << other for other, distance in enumerate(row) if distance == UNREACHABLE)
            if UNREACHABLE in row
            else 0
            for row in self.between
        )

    def packages_of(self, nodes: int) -> int:
        """Return the packages (bits) of a set of nodes; packages are numbered from 0."""
        if len(self.nodes_of_package) == len(self.packages):
            return nodes
        of_package = self.nodes_of_package.items()
        return sum([1 << package for package, mask in of_package if mask & nodes])

    def spread(self, nodes: int) -> tuple[int, int]:
        """Return (the worst distance between two nodes of a set, 10 for one node; the sum over all
        pairs, 0 for one node)."""
        if nodes not in self._spreads:
            row_of, positions = self.between, members(nodes)
            pairs = [
                list(map(row_of[node].__getitem__, positions[:i]))
                for i, node in enumerate(positions)
            ][1:]
            self._spreads[nodes] = (
                max(map(max, pairs), default=LOCAL_DISTANCE),
                sum(map(sum, pairs)),
            )
        return self._spreads[nodes]


def distance_matrix(host: Host) -> DistanceMatrix:
    """Return the distances of a host, symmetric and complete."""
    packages = tuple(
        -1 - position if node.package is None else int(node.package)
        for position, node in enumerate(host.nodes)
    )
    return DistanceMatrix(host.mutual_distances, packages)
