"""Candidates: the sets of nodes that can hold a VM, in an order that lets a search stop early.

Up to MOST_LISTED_NODES nodes, every set. Beyond, sets that are grown from each node outwards: the
nearest nodes, package by package. Where the distances are hierarchical these are the clusters of
the hierarchy; that nothing better exists is then known only where a lower bound is met.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, islice

from homenode.plan.search.cost import Cost
from homenode.plan.search.distances import members
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.split import GroupRange
from homenode.topology import LOCAL_DISTANCE

MOST_LISTED_NODES = 8
MOST_PACKAGES = 8
MOST_PREFIXES = 3
"""Numbers of nodes, from the least that will do, that are tried in one order."""

Bounded = tuple[tuple[int, ...], Iterable[int]]
"""Lower bound of the first terms of the sets that follow, and the sets."""


class Candidates:
    """Sets of nodes (bits) that hold the VM. equal: with the same number of groups on each.

    exact: every set was listed so far.
    """

    def __init__(self, problem: SearchProblem, *, equal: bool) -> None:
        self.problem = problem
        self.equal = equal
        self.exact = True
        self._capacity = tuple(problem.capacity(node) for node in range(len(problem.supplies)))
        self._eligible = sum(1 << node for node, groups in enumerate(self._capacity) if groups)
        self._package_bits = tuple(1 << package for package in problem.packages)
        self._able: dict[int, int] = {}
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._levels: tuple[int, ...] = ()

    @cached_property
    def _unreachable(self) -> tuple[int, ...]:
        return self.problem.unreachable()

    @cached_property
    def _is_split(self) -> bool:
        return any(self._unreachable)

    @cached_property
    def _earlier(self) -> tuple[int, ...]:
        return _earlier_equals(self.problem, self._capacity)

    def packages_of(self, nodes: int) -> int:
        """Packages (bits) of a set of nodes."""
        result = 0
        for node in members(nodes):
            result |= self._package_bits[node]
        return result

    def groups(self, device_class: Callable[[int], int]) -> Iterator[Bounded]:
        """The sets, in groups of ascending lower bound. device_class: of packages (bits)."""
        if not self._can_hold(self._eligible):
            return
        if self.problem.first[:2] != ("device_class", "packages_spanned"):
            yield (), self._sets(self._eligible, 0)
            return
        of_package: dict[int, int] = {}
        for node in members(self._eligible):
            package = self.problem.packages[node]
            of_package[package] = of_package.get(package, 0) | 1 << node
        packages = sorted(of_package)
        many = len(packages) > MOST_PACKAGES
        bounded: list[tuple[tuple[int, int], int, int]] = []
        for number in range(1, 2 if many else len(packages) + 1):
            for chosen in combinations(packages, number):
                nodes = sum(of_package[package] for package in chosen)
                if self._can_hold(nodes):
                    bits = sum(1 << package for package in chosen)
                    bounded.append(((device_class(bits), number), nodes, bits))
        bounded.sort()
        for bound, nodes, bits in bounded:
            yield bound, self._sets(nodes, bits)
        if many:
            bits = sum(1 << package for package in packages)
            yield (device_class(bits), 2), self._grown(self._eligible)

    def can_hold(self) -> bool:
        """Whether cores and memory suffice, each taken by itself."""
        return self._can_hold(self._eligible)

    def any_set(self) -> Iterator[int]:
        """A set that holds the VM, if there is one: a few sums where distances forbid nothing."""
        if not self._can_hold(self._eligible):
            return
        if self._is_split:
            yield from self._sets(self._eligible, 0)
            return
        by_capacity = sorted(members(self._eligible), key=lambda n: (-self._capacity[n], n))
        for number in self._counts(self._eligible):
            nodes = sum(1 << node for node in by_capacity[:number])
            if self._holds(nodes):
                yield nodes
        yield from self._sets(self._eligible, 0)

    def ranges(self, nodes: Sequence[int]) -> tuple[GroupRange, ...]:
        """How many groups each of the chosen nodes may get."""
        if self.equal:
            each = self.problem.groups // len(nodes)
            return (GroupRange(each, each),) * len(nodes)
        most = self.problem.groups - len(nodes) + 1
        return tuple(GroupRange(1, min(most, capacity)) for capacity in self._capacities(nodes))

    def _capacities(self, nodes: Sequence[int]) -> tuple[int, ...]:
        problem = self.problem
        if not problem.device_pages:
            return tuple(self._capacity[node] for node in nodes)
        held = problem.devices_of_cells(len(nodes))
        return tuple(problem.capacity(n, more) for n, more in zip(nodes, held, strict=True))

    def distance(self, nodes: int) -> int:
        """The worst distance between two nodes of a set."""
        if nodes & nodes - 1 == 0:
            return LOCAL_DISTANCE
        if nodes.bit_count() <= 4:
            return self.problem.distance(tuple(members(nodes)))
        levels = self._distances()
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self._within(nodes, levels[middle]):
                high = middle
            else:
                low = middle + 1
        return levels[low]

    def _distances(self) -> tuple[int, ...]:
        if not self._levels:
            between = self.problem.between
            self._levels = tuple(sorted({d for i, row in enumerate(between) for d in row[i + 1 :]}))
        return self._levels

    def _within(self, nodes: int, limit: int) -> bool:
        if limit not in self._neighbours:
            self._neighbours[limit] = tuple(
                sum(1 << other for other, d in enumerate(row) if d <= limit or other == node)
                for node, row in enumerate(self.problem.between)
            )
        near = self._neighbours[limit]
        return all(not nodes & ~near[node] for node in members(nodes))

    # Which sets hold the VM.

    def _can_hold(self, nodes: int) -> bool:
        """Whether some of these nodes can, memory and cores taken by themselves."""
        held = sum(self._capacity[node] for node in members(nodes))
        return held >= self.problem.groups

    def _holds(self, nodes: int) -> bool:
        problem = self.problem
        number = nodes.bit_count()
        if number > problem.most_nodes or number > problem.groups:
            return False
        if self.equal and (problem.groups % number or nodes & ~self._able_to(number)):
            return False
        positions = tuple(members(nodes))
        if not self._capable(positions):
            return False
        if self._is_split and any(self._unreachable[node] & nodes for node in positions):
            return False
        return problem.holds_together(positions) and problem.holds_with_others(nodes)

    def _able_to(self, number: int) -> int:
        """The nodes that can have an equal share among so many, memory devices aside."""
        if number not in self._able:
            each = self.problem.groups // number
            self._able[number] = sum(
                1 << n for n, most in enumerate(self._capacity) if most >= each
            )
        return self._able[number]

    def _capable(self, positions: tuple[int, ...]) -> bool:
        """Whether the nodes have the cores, and next to them the memory."""
        problem = self.problem
        number = len(positions)
        if self.equal and not problem.device_pages:
            return True
        capacities = self._capacities(positions)
        if self.equal:
            return min(capacities) >= problem.groups // number
        return min(capacities) >= 1 and sum(capacities) >= problem.groups

    def _counts(self, nodes: int) -> Iterator[int]:
        """Numbers of nodes that may do, ascending."""
        problem = self.problem
        most = min(problem.most_nodes, problem.groups, nodes.bit_count())
        for number in range(1, most + 1):
            if not self.equal or problem.groups % number == 0:
                yield number

    def _sets(self, nodes: int, packages: int) -> Iterator[int]:
        """The sets of these nodes that hold the VM and span all these packages (bits)."""
        if nodes.bit_count() > MOST_LISTED_NODES:
            yield from self._grown(nodes)
            return
        counts = frozenset(self._counts(nodes))
        chosen = nodes
        while chosen:
            if (
                chosen.bit_count() in counts
                and not (self.equal and chosen & ~self._able_to(chosen.bit_count()))
                and self._takes_first_equals(chosen)
                and (not packages or self.packages_of(chosen) == packages)
                and self._holds(chosen)
            ):
                yield chosen
            chosen = chosen - 1 & nodes

    def _takes_first_equals(self, nodes: int) -> bool:
        """Whether of nodes that are alike in everything the first ones are taken: other sets of
        them cost the same but for their numbers."""
        return all(not self._earlier[node] & ~nodes for node in members(nodes))

    def _grown(self, nodes: int) -> Iterator[int]:
        """Sets that are grown from each of these nodes outwards, in several orders; distinct."""
        self.exact = False
        seen: set[int] = set()
        for order in self._orders(nodes):
            for grown in self._prefixes(order):
                if grown not in seen:
                    seen.add(grown)
                    if self._holds(grown):
                        yield grown

    def _orders(self, nodes: int) -> Iterator[Sequence[int]]:
        problem, capacity = self.problem, self._capacity
        whole = tuple(members(nodes))
        in_package: dict[int, int] = {}
        for node in whole:
            package = problem.packages[node]
            in_package[package] = in_package.get(package, 0) + capacity[node]
        pulled = [0] * len(problem.supplies)
        homes = [one.home.node for one in problem.named if one.is_gpu]
        homes += [
            there.node
            for gpu in problem.options.gpus
            if problem.options.open >> gpu.number & 1
            and problem.options.count
            and (there := problem.gpu_homes[gpu.number]) is not None
        ]
        for bit in homes:
            if bit:
                pulled[bit.bit_length() - 1] -= 1
        sign = 1 if problem.pack else -1
        weight = [
            (pulled[node], sign * supply.whole_cores, sign * (supply.memory.pages or 0), node)
            for node, supply in enumerate(problem.supplies)
        ]
        for seed in whole:
            if self._earlier[seed]:
                continue
            row = problem.between[seed]
            home = problem.packages[seed]
            nearest: dict[int, int] = {}
            for node in whole:
                package = problem.packages[node]
                nearest[package] = min(row[node], nearest.get(package, row[node]))

            def by_package(
                node: int, home: int = home, nearest: dict[int, int] = nearest,
                row: tuple[int, ...] = row, seed: int = seed,
            ) -> tuple[object, ...]:  # fmt: skip
                package = problem.packages[node]
                return (
                    node != seed, package != home, nearest[package], -in_package[package], package,
                    row[node], -capacity[node] if not self.equal else 0, weight[node],
                )  # fmt: skip

            yield sorted(whole, key=by_package)

            def by_distance(
                node: int, row: tuple[int, ...] = row, seed: int = seed
            ) -> tuple[object, ...]:
                return node != seed, row[node], problem.packages[node], weight[node]

            yield sorted(whole, key=by_distance)
        if any(pulled):
            yield sorted(whole, key=lambda node: weight[node])
        yield sorted(whole, key=lambda node: (-capacity[node], weight[node]))

    def _prefixes(self, order: Sequence[int]) -> Iterator[int]:
        """The first nodes of the order that can hold the VM, for each number of nodes. A node that
        an earlier one cannot reach is passed over."""
        problem = self.problem
        if self.equal:
            for number in self._counts(self._eligible):
                able = self._able_to(number)
                fitting = (node for node in order if able >> node & 1)
                chosen = sum(1 << node for node in islice(self._reachable(fitting), number))
                if chosen.bit_count() == number:
                    yield chosen
            return
        chosen, held, found = 0, 0, 0
        for node in islice(self._reachable(order), problem.most_nodes):
            chosen |= 1 << node
            held += self._capacity[node]
            if held >= problem.groups:
                yield self._tightened(chosen, held)
                yield chosen
                found += 1
            if found == MOST_PREFIXES:
                return

    def _reachable(self, order: Iterable[int]) -> Iterator[int]:
        """The nodes of the order that all the ones before them can reach."""
        chosen = 0
        for node in order:
            if not (self._is_split and self._unreachable[node] & chosen):
                chosen |= 1 << node
                yield node

    def _tightened(self, nodes: int, held: int) -> int:
        """The set without nodes that it can do without, the smallest first."""
        for node in sorted(members(nodes), key=lambda n: (self._capacity[n], -n)):
            if held - self._capacity[node] >= self.problem.groups:
                held -= self._capacity[node]
                nodes &= ~(1 << node)
        return nodes

    # Lower bounds.

    def least_packages(self) -> int:
        """A number of packages that no set of nodes can undercut."""
        held: dict[int, int] = {}
        for node in members(self._eligible):
            package = self.problem.packages[node]
            held[package] = held.get(package, 0) + self._capacity[node]
        left = self.problem.groups
        for number, groups in enumerate(sorted(held.values(), reverse=True), 1):
            left -= groups
            if left <= 0:
                return number
        return len(held)

    def is_least(self, cost: Cost) -> bool:
        """Whether the cost meets a lower bound in every term but the indices."""
        problem = self.problem
        if problem.named or problem.options.count or "minus_nodes_spanned" in problem.first:
            return False
        capacities = sorted((self._capacity[n] for n in members(self._eligible)), reverse=True)
        nodes, left = 0, problem.groups
        while left > 0:
            left -= capacities[nodes]
            nodes += 1
        number = cost.nodes_spanned
        free = sorted(
            (problem.supplies[n].whole_cores for n in members(self._eligible)),
            reverse=not problem.pack,
        )
        balance = sum(free[:number]) * (1 if problem.pack else -1)
        return (
            cost.packages_spanned == self.least_packages()
            and number == nodes
            and cost.node_distance == self._least_distance(number)
            and cost.gpu_sets_lost == 0
            and cost.unisolated_cores == 0
            and cost.llcs_spanned == number
            and cost.pages_to_reserve == 0
            and cost.balance_cores == balance
        )

    def _least_distance(self, number: int) -> int:
        """A distance within which no node has too few others for a set of `number` nodes."""
        if number == 1:
            return LOCAL_DISTANCE
        best = self._distances()[-1]
        for node in members(self._eligible):
            row = sorted(
                self.problem.between[node][o] for o in members(self._eligible) if o != node
            )
            if len(row) >= number - 1:
                best = min(best, row[number - 2])
        return best


def _earlier_equals(problem: SearchProblem, capacity: Sequence[int]) -> tuple[int, ...]:
    """For each node, the last node before it (as a bit) that is alike in all that a search
    compares; 0 where there is none. Nodes that devices lie on are like no other."""
    homes = {id(one.home): one.home for one in problem.named}
    if problem.options.count:
        homes |= {id(home): home for home in problem.gpu_homes if home is not None}
    of_devices = sum({home.node for home in homes.values()})
    result: list[int] = []
    last: dict[tuple[object, ...], list[int]] = {}
    for node, supply in enumerate(problem.supplies):
        earlier = 0
        if not of_devices >> node & 1 and len(supply.parts) == 1 and not problem.device_pages:
            key = (
                problem.packages[node], problem.gpu_nodes >> node & 1, capacity[node],
                supply.groups, supply.whole_cores, supply.memory.pages, supply.memory.pool_pages,
                tuple(home.to_node[node] for home in homes.values()),
                tuple((t.isolated, tuple(g for _, g in t.llcs)) for t in supply.whole.tiers),
            )  # fmt: skip
            like = last.setdefault(key, [])
            for position, other in enumerate(like):
                if _swappable(problem.between, other, node):
                    earlier = 1 << other
                    like[position] = node
                    break
            else:
                like.append(node)
        result.append(earlier)
    return tuple(result)


def _swappable(between: Sequence[Sequence[int]], a: int, b: int) -> bool:
    """Whether two nodes are as far from every other node."""
    if between[a] == between[b]:
        return True
    first, second = list(between[a]), list(between[b])
    first[a], first[b] = first[b], first[a]
    return first == second
