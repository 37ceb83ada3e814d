"""NodeSets: the sets of nodes that can hold a VM, in an order that lets a search stop early.

Up to MAX_LISTED_NODES nodes of a package, or of all packages, every set is listed. Beyond that
sets grow from each node outwards: the nearest nodes, package by package. With hierarchical
distances these are the clusters; it is then unknown whether a better set exists.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import combinations
from typing import NamedTuple

from homenode.cpuset import list_members
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.supply import GroupRange, split_evenly

MAX_LISTED_NODES = 16

Bounded = tuple[tuple[int, ...], Iterable[int]]
"""Lower bound of the first terms of the sets that follow, and the sets."""

Counts = tuple[tuple[int, int], ...]
"""(set size, nodes that may be in a set of that size), ascending."""


class CellSplits(NamedTuple):
    """Equally uneven splits: all choices in the ranges of each node that sum to the VM's groups."""

    unevenness: int  # as in the cost; 0 if the devices come first
    ranges: tuple[GroupRange, ...]


def least_uneven(limits: Sequence[int], groups: int, *, whole_sockets: bool) -> CellSplits:
    """Return the least uneven splits over nodes with these capacities, which hold the groups
    together: all nodes are filled to one level, as far as they go. whole_sockets: minimise the
    guest's sockets first. If cells may not share a socket, a socket has as many cores as divide
    each cell: cells of 11 and 10 make 21 sockets of one core, cells of 14 and 7 three of seven.

    >>> [tuple(one) for one in least_uneven((16, 4, 16), 21, whole_sockets=False).ranges]
    [(8, 9, 1), (4, 4, 1), (8, 9, 1)]
    >>> [tuple(one) for one in least_uneven((24, 16, 24), 56, whole_sockets=True).ranges]
    [(16, 24, 8), (16, 16, 8), (16, 24, 8)]
    """
    step = _find_largest_socket(limits, groups) if whole_sockets else 1
    limits, groups = [limit // step for limit in limits], groups // step
    split = split_evenly([GroupRange(0, limit) for limit in limits], groups)
    level = low = max(split)
    if any(number < min(top, level) for number, top in zip(split, limits, strict=True)):
        low -= 1
    ranges = [GroupRange(min(top, low) * step, min(top, level) * step, step) for top in limits]
    return CellSplits(sum([number**2 for number in split]) * step * step, tuple(ranges))


def _find_largest_socket(limits: Sequence[int], groups: int) -> int:
    """Return the most groups per socket if each node gets at least one whole socket."""
    for size in range(min(groups // len(limits), *limits), 1, -1):
        if groups % size == 0 and sum([limit // size for limit in limits]) * size >= groups:
            return size
    return 1


class NodeSets:
    """The sets of nodes (bits) that hold the VM. equal: with the same number of groups on each.
    exact: every set has been listed so far."""

    def __init__(self, problem: SearchProblem, *, equal: bool) -> None:
        self.problem, self.equal = problem, equal
        self.exact = True
        self.most_nodes = min(problem.most_nodes, problem.groups)
        self._capacity = problem.capacities
        unreachable = problem.distances.unreachable
        self._unreachable = unreachable if any(unreachable) else ()

    def groups(self) -> Iterator[Bounded]:
        """Yield the sets in groups of ascending lower bound; a set may be in two groups.

        A group has a set size, within a package that holds the VM alone, or over all packages.
        Policies that do not compare packages first have no groups by package. With too many nodes,
        all sets of two and more are one group; if vCPUs share cores, all sets are.
        """
        problem = self.problem
        lots: list[tuple[tuple[int, ...], int]] = [((), problem.eligible)]
        if problem.first[:2] == ("device_class", "packages_spanned"):
            lots = list(self._package_sets())
        bounded_groups: list[tuple[tuple[int, ...], int, Counts]] = []
        for bound, nodes in lots:
            if "vcpus_beyond_cores" in problem.first:
                bounded_groups.append((bound, nodes, ()))
                continue
            terms = problem.first[len(bound) :][:2]
            counts = tuple(self.counts(nodes))
            groups: list[Counts] = [(count,) for count in counts]
            if nodes.bit_count() > MAX_LISTED_NODES:
                groups = [
                    tuple(c for c in counts if c[0] == 1),
                    tuple(c for c in counts if c[0] > 1),
                ]
            for group in filter(None, groups):
                least = {"nodes_spanned": group[0][0], "minus_nodes_spanned": -group[-1][0]}
                least["gpus_away_from_home"] = 0
                least_terms = [least[name] for name in terms if name in least]
                bounded_groups.append(((*bound, *least_terms), nodes, group))
        for bound, nodes, counts in sorted(bounded_groups):
            yield bound, self._list_sets(nodes, counts)

    def _package_sets(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (least device class and packages, nodes) for each package that holds the VM alone,
        and for all."""
        problem = self.problem
        device_class, groups_held = problem.devices.least_class, problem.groups_of_package
        of_package, owned = problem.distances.nodes_of_package, 0
        for package, groups in groups_held.items():
            if groups >= problem.groups:
                yield (device_class(1 << package), 1), of_package[package] & problem.eligible
        for number, groups in enumerate(sorted(groups_held.values(), reverse=True), 1):
            owned += groups
            if number > 1 and owned >= problem.groups:
                packages = sum([1 << package for package, groups in groups_held.items() if groups])
                yield (device_class(packages), number), problem.eligible
                return

    def any_set(self) -> Iterator[int]:
        """Yield a set that holds the VM, if any exists; cheap if all nodes reach each other."""
        if sum(self._capacity) < self.problem.groups:
            return
        nodes, owned = 0, 0
        largest = sorted(
            list_members(self.problem.eligible), key=lambda node: -self._capacity[node]
        )
        for node in () if self._unreachable else largest:
            nodes |= 1 << node
            owned += self._capacity[node]
            if owned >= self.problem.groups and self.holds(nodes):
                yield nodes
        yield from self._list_sets(self.problem.eligible, ())

    def splits(self, nodes: int) -> CellSplits:
        """Return the splits over the chosen nodes (bits) that may be best for some devices: the
        least uneven splits, or all if devices come first."""
        problem, positions = self.problem, list_members(nodes)
        number = len(positions)
        if self.equal:
            share = problem.groups // number
            return CellSplits(
                share * share * number,
                (GroupRange(share, share, share),) * number,
            )
        if problem.shares:
            return CellSplits(0, self._shared_ranges(positions))
        capacities = self._list_capacities(positions)
        if problem.even_splits:
            whole_sockets = "guest_sockets" in problem.later
            return least_uneven(capacities, problem.groups, whole_sockets=whole_sockets)
        limit = problem.groups - number + 1
        return CellSplits(0, tuple([GroupRange(1, min(limit, size)) for size in capacities]))

    def _shared_ranges(self, nodes: Sequence[int]) -> tuple[GroupRange, ...]:
        """Return ranges with all whole cores of each node, and the other groups split evenly."""
        groups = self.problem.groups
        limits = self._list_capacities(nodes)
        least = [
            max(1, min(self.problem.whole_cores[node], limit))
            for node, limit in zip(nodes, limits, strict=True)
        ]
        if sum(least) >= groups:
            return tuple(GroupRange(1, core) for core in least)
        room = [limit - core for limit, core in zip(limits, least, strict=True)]
        excess = groups - sum(least)
        top = max(split_evenly([GroupRange(0, space) for space in room], excess))
        upper = [min(top, space) for space in room]
        lower = upper if sum(upper) == excess else [min(top - 1, space) for space in room]
        return tuple(
            GroupRange(core + a, core + b) for core, a, b in zip(least, lower, upper, strict=True)
        )

    def _list_capacities(self, nodes: Sequence[int]) -> tuple[int, ...]:
        problem = self.problem
        if not problem.device_pages:
            return tuple([self._capacity[node] for node in nodes])
        owned = problem.devices_of_cells(len(nodes))
        return tuple(problem.capacity(n, pages) for n, pages in zip(nodes, owned, strict=True))

    # Which sets hold the VM.

    def holds(self, nodes: int) -> bool:
        problem = self.problem
        number = nodes.bit_count()
        if number > self.most_nodes:
            return False
        if self.equal and (problem.groups % number or nodes & ~self._able_to(number)):
            return False
        if self._unreachable and any(
            self._unreachable[node] & nodes for node in list_members(nodes)
        ):
            return False
        if not self.equal or problem.device_pages:
            capacities = self._list_capacities(tuple(list_members(nodes)))
            if self.equal and min(capacities) < problem.groups // number:
                return False
            if min(capacities) < 1 or sum(capacities) < problem.groups:
                return False
        return problem.holds_memory(nodes)

    @cached_property
    def _able_to(self) -> Callable[[int], int]:
        """Return the nodes that can have an equal share in a set of this size."""
        groups, limits = self.problem.groups, list(enumerate(self._capacity))
        return cache(lambda number: sum([1 << n for n, size in limits if size >= groups // number]))

    def counts(self, nodes: int) -> Iterator[tuple[int, int]]:
        """Yield (possible set size, nodes that may be in a set of that size), ascending."""
        capacity = self._capacity
        limits = sorted((capacity[node] for node in list_members(nodes)), reverse=True)
        owned = 0
        for number, limit in enumerate(limits, 1):
            owned += limit
            if number > self.most_nodes:
                return
            if not self.equal:
                if owned >= self.problem.groups:
                    yield number, nodes
            elif self.problem.groups % number == 0:
                able = nodes & self._able_to(number)
                if able.bit_count() >= number:
                    yield number, able

    def _list_sets(self, nodes: int, counts: Counts) -> Iterator[int]:
        """Yield the sets of this many nodes that hold the VM; () = any number, small first."""
        if self.problem.shares and self._most_cores(nodes) == nodes and self.holds(nodes):
            yield nodes  # no other set has as many whole cores
            return
        if nodes.bit_count() > MAX_LISTED_NODES and [size for size, _ in counts] != [1]:
            yield from self._grow_sets(nodes)
            return
        # Of equal nodes the first are chosen: other choices differ only in the index.
        earlier_equals = self.problem.earlier_equals
        equals = {1 << node: twin for node in list_members(nodes) if (twin := earlier_equals[node])}
        for size, able in counts or self.counts(nodes):
            for chosen_bits in combinations([1 << node for node in list_members(able)], size):
                some = sum(chosen_bits)
                if all(some & equals.get(node, some) for node in chosen_bits) and self.holds(some):
                    yield some

    def _most_cores(self, nodes: int) -> int:
        """Return the nodes with the most whole cores together."""
        cores = self.problem.whole_cores
        having = sorted((n for n in list_members(nodes) if cores[n]), key=lambda n: (-cores[n], n))
        return sum(1 << node for node in having[: self.most_nodes])

    def _grow_sets(self, nodes: int) -> Iterator[int]:
        """Yield sets grown from each of these nodes outwards, and from the nodes with the most
        devices, groups and pages: for each set size the first suitable nodes of an order. A node
        that an earlier node cannot reach is skipped."""
        numbers = list(self.counts(nodes))
        if not numbers:
            return  # no number of these nodes holds the VM
        self.exact = False
        tried_sets = set[int]()
        if self.problem.shares and (largest := self._most_cores(nodes)) and self.holds(largest):
            tried_sets.add(largest)
            yield largest
        for order in self._list_orders(nodes):
            for number, able in numbers:
                grown_set = self._first_nodes(order, number, able)
                if grown_set and grown_set not in tried_sets:
                    tried_sets.add(grown_set)
                    if self.holds(grown_set):
                        yield grown_set

    def _first_nodes(self, order: Sequence[int], number: int, able: int) -> int:
        """Return the first suitable nodes of an order that reach each other (bits); 0 = too few."""
        chosen_bits, unreachable = 0, self._unreachable
        for node in order:
            if able >> node & 1 and not (unreachable and unreachable[node] & chosen_bits):
                chosen_bits |= 1 << node
                number -= 1
                if not number:
                    return chosen_bits
        return 0

    def _list_orders(self, nodes: int) -> Iterator[Sequence[int]]:
        """Yield the nodes by distance from each node, package by package; then by their capacities.
        At equal distance the largest come first, or the cheapest."""
        problem, positions, packages = (
            self.problem,
            list_members(nodes),
            self.problem.distances.packages,
        )
        cheapest = sorted(positions, key=self._weights.__getitem__)
        largest = sorted(cheapest, key=lambda node: -self._capacity[node])
        for seed in positions:
            if problem.earlier_equals[seed]:
                continue
            row, nearest = problem.distances.between[seed], dict[int, int]()
            for node in positions:
                nearest[packages[node]] = min(row[node], nearest.get(packages[node], row[node]))
            keys = {}
            for node in positions:
                package = packages[node]
                room = -problem.groups_of_package[package]
                is_other = package != packages[seed]
                keys[node] = (node != seed, is_other, nearest[package], room, package, row[node])
            yield sorted(largest, key=keys.__getitem__)
            yield sorted(cheapest, key=keys.__getitem__)
        roomiest = sorted(positions, key=lambda node: -(problem.memory[node].pages or 0))
        for order in (cheapest, largest, roomiest):
            yield order
            passed_counts, turns = Counter[int](), dict[int, int]()
            for node in order:  # a node of each package in turn
                turns[node] = passed_counts[packages[node]]
                passed_counts[packages[node]] += 1
            yield sorted(order, key=turns.__getitem__)

    @cached_property
    def _weights(self) -> list[tuple[int, int, int]]:
        """Each node's own part of the cost: unused or missing GPUs, then the terms of --balance."""
        problem, devices = self.problem, self.problem.devices
        avoided_nodes = ~devices.home_nodes if devices.options.has_gpus else devices.gpu_nodes
        sign = 1 if problem.pack else -1
        return [
            (avoided_nodes >> node & 1, sign * supply.whole_cores, sign * (memory.pages or 0))
            for node, (supply, memory) in enumerate(
                zip(problem.supplies, problem.memory, strict=True)
            )
        ]
