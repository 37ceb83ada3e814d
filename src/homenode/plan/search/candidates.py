"""Candidates: the sets of nodes that can hold a VM, in an order that lets a search stop early.

Up to MOST_LISTED_NODES nodes, every set. Beyond, sets that are grown from each node outwards: the
nearest nodes, package by package. Where the distances are hierarchical these are the clusters of
the hierarchy; that nothing better exists is then known only where a lower bound is met, or from
branching.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations

from homenode.plan.bit_sets import members
from homenode.plan.search.cell_sizes import (
    CellSizes,
    CellSplits,
    GroupRange,
    cell_sizes,
    least_uneven,
)
from homenode.plan.search.cost import Cost
from homenode.plan.search.problem import SearchProblem
from homenode.plan.search.supply import even_parts
from homenode.topology import LOCAL_DISTANCE

MOST_LISTED_NODES = 8
MOST_PACKAGES = 8
MOST_PREFIXES = 3
"""Numbers of nodes, from the least that will do, that are tried in one order."""

MOST_FRUITLESS = 1_000
"""Orders that are grown one after the other without a set that holds the VM; then only those of
all packages are left to try."""

Bounded = tuple[tuple[int, ...], Iterable[int]]
"""Lower bound of the first terms of the sets that follow, and the sets."""


class Candidates:
    """Sets of nodes (bits) that hold the VM. equal: with the same number of groups on each.

    exact: every set was listed so far. most_nodes: larger sets are left out; a search lowers it
    once they cannot be of use.
    """

    def __init__(self, problem: SearchProblem, *, equal: bool) -> None:
        self.problem = problem
        self.equal = equal
        self.exact = True
        self.most_nodes = min(problem.most_nodes, problem.groups)
        self._capacity = problem.capacities
        self._able: dict[int, int] = {}
        self._splits: dict[int, CellSplits] = {}
        self._limits_memory = bool(problem.pages_together or problem.pages_anywhere)
        unreachable = problem.distances.unreachable
        self._fruitless = 0
        self._unreachable = unreachable if any(unreachable) else ()

    def groups(self, device_class: Callable[[int], int]) -> Iterator[Bounded]:
        """The sets, in groups of ascending lower bound. device_class: of packages (bits)."""
        problem = self.problem
        if next(self.counts(problem.eligible), None) is None:
            return  # no number of nodes holds the VM
        if problem.first[:2] != ("device_class", "packages_spanned"):
            yield (), self._sets(problem.eligible, 0)
            return
        capacity = {package: n for package, n in problem.groups_of_package.items() if n}
        packages = sorted(capacity)
        many = len(packages) > MOST_PACKAGES
        bounded: list[tuple[tuple[int, int], int, int]] = []
        for number in range(1, 2 if many else len(packages) + 1):
            for chosen in combinations(packages, number):
                if sum(capacity[package] for package in chosen) >= problem.groups:
                    bits = sum(1 << package for package in chosen)
                    nodes = sum(problem.distances.nodes_of_package[package] for package in chosen)
                    bound = device_class(bits), number
                    bounded.append((bound, nodes & problem.eligible, bits))
        if many:
            bits = sum(1 << package for package in packages)
            bounded.append(((device_class(bits), 2), problem.eligible, bits))
        bounded.sort()
        every = max(bits for _, _, bits in bounded) if bounded else 0
        for bound, nodes, bits in bounded:
            if self._fruitless > MOST_FRUITLESS and bits != every:
                continue
            is_rest = many and bits.bit_count() > 1
            yield bound, self._grown(nodes) if is_rest else self._sets(nodes, bits)

    def any_set(self) -> Iterator[int]:
        """A set that holds the VM, if there is one: a few sums where distances forbid nothing."""
        eligible, capacity = self.problem.eligible, self._capacity
        if sum(capacity) < self.problem.groups:
            return
        if not self._unreachable:
            nodes, owned = 0, 0
            for node in sorted(members(eligible), key=lambda n: (-capacity[n], n)):
                nodes |= 1 << node
                owned += capacity[node]
                if owned >= self.problem.groups and self.holds(nodes):
                    yield nodes
        yield from self._sets(eligible, 0)

    def splits(self, nodes: int) -> CellSplits:
        """The splits over the chosen nodes (bits) that may be the best, whatever the devices: the
        least uneven ones, or all where the devices come first."""
        known = self._splits.get(nodes)
        if known is None:
            known = self._splits[nodes] = self._splits_over(tuple(members(nodes)))
        return known

    def _splits_over(self, nodes: Sequence[int]) -> CellSplits:
        problem, number = self.problem, len(nodes)
        if self.equal:
            each = problem.groups // number
            sizes = cell_sizes((each,) * number, counts_sockets=problem.counts_sockets)
            return CellSplits(sizes, (GroupRange(each, each),) * number)
        if problem.shares:
            return CellSplits(CellSizes(0, 0, 0), self._shared_ranges(nodes))
        capacities = self._capacities(nodes)
        if problem.even_splits:
            splits = least_uneven(capacities, problem.groups, counts_sockets=problem.counts_sockets)
            assert splits is not None, "these nodes hold the VM"
            return splits
        most = problem.groups - number + 1
        ranges = tuple(GroupRange(1, min(most, capacity)) for capacity in capacities)
        return CellSplits(CellSizes(0, 0, 0), ranges)

    def _shared_ranges(self, nodes: Sequence[int]) -> tuple[GroupRange, ...]:
        """All whole cores of each node, and of what is left to each as much as to the others."""
        groups = self.problem.groups
        limits = self._capacities(nodes)
        least = [
            max(1, min(self.problem.whole_cores[node], limit))
            for node, limit in zip(nodes, limits, strict=True)
        ]
        if sum(least) >= groups:
            return tuple(GroupRange(1, core) for core in least)
        room = [limit - core for limit, core in zip(limits, least, strict=True)]
        left = groups - sum(least)
        most = max(even_parts(room, left))
        more = [min(most, one) for one in room]
        fewer = more if sum(more) == left else [min(most - 1, one) for one in room]
        return tuple(
            GroupRange(core + a, core + b) for core, a, b in zip(least, fewer, more, strict=True)
        )

    def _capacities(self, nodes: Sequence[int]) -> tuple[int, ...]:
        problem = self.problem
        if not problem.device_pages:
            return tuple(self._capacity[node] for node in nodes)
        owned = problem.devices_of_cells(len(nodes))
        return tuple(problem.capacity(n, more) for n, more in zip(nodes, owned, strict=True))

    # Which sets hold the VM.

    def holds(self, nodes: int) -> bool:
        problem = self.problem
        number = nodes.bit_count()
        if number > self.most_nodes:
            return False
        if self.equal and (problem.groups % number or nodes & ~self._able_to(number)):
            return False
        if self._unreachable and any(self._unreachable[node] & nodes for node in members(nodes)):
            return False
        if not self.equal or problem.device_pages:
            capacities = self._capacities(tuple(members(nodes)))
            if self.equal and min(capacities) < problem.groups // number:
                return False
            if min(capacities) < 1 or sum(capacities) < problem.groups:
                return False
        if not self._limits_memory:
            return True
        return problem.holds_together(tuple(members(nodes))) and problem.holds_with_others(nodes)

    def _able_to(self, number: int) -> int:
        """The nodes that can have an equal share among so many, memory devices aside."""
        if number not in self._able:
            each = self.problem.groups // number
            self._able[number] = sum(
                1 << n for n, most in enumerate(self._capacity) if most >= each
            )
        return self._able[number]

    def counts(self, nodes: int) -> Iterator[tuple[int, int]]:
        """(a number of these nodes that may do, those of them that may be among so many),
        ascending."""
        capacity = self._capacity
        most = sorted((capacity[node] for node in members(nodes)), reverse=True)
        if self._unreachable:
            its = [members(lot & nodes) for lot in self._apart if lot & nodes]
            most = sorted((max(capacity[node] for node in one) for one in its), reverse=True)
        owned = 0
        for number, more in enumerate(most, 1):
            owned += more
            if number > self.most_nodes:
                return
            if not self.equal:
                if owned >= self.problem.groups:
                    yield number, nodes
            elif self.problem.groups % number == 0:
                able = nodes & self._able_to(number)
                if self._most_together(able) >= number:
                    yield number, able

    def _most_together(self, nodes: int) -> int:
        """No more of these nodes reach each other."""
        if not self._unreachable:
            return nodes.bit_count()
        return sum(lot & nodes != 0 for lot in self._apart)

    @cached_property
    def _apart(self) -> tuple[int, ...]:
        """All nodes in lots of which no two reach each other, so that a set has one of each."""
        lots: list[int] = []
        for node, unreachable in enumerate(self._unreachable):
            for at, lot in enumerate(lots):
                if not lot & ~unreachable:
                    lots[at] |= 1 << node
                    break
            else:
                lots.append(1 << node)
        return tuple(lots)

    def _sets(self, nodes: int, packages: int) -> Iterator[int]:
        """The sets of these nodes that hold the VM and span all these packages (bits), smaller ones
        first."""
        if self.problem.shares and self._most_cores(nodes) == nodes and self.holds(nodes):
            yield nodes  # no other set has as many whole cores
            return
        if nodes.bit_count() > MOST_LISTED_NODES:
            yield from self._grown(nodes)
            return
        distances = self.problem.distances
        in_packages = [distances.nodes_of_package[package] for package in members(packages)]
        # Of nodes that are alike the first ones are chosen: others cost the same but for the index.
        earlier_equals = self.problem.earlier_equals
        alike = [(1 << node, one) for node in members(nodes) if (one := earlier_equals[node])]
        for number, able in self.counts(nodes):
            for chosen in combinations([1 << node for node in members(able)], number):
                some = sum(chosen)
                if (
                    all(some & its for its in in_packages)
                    and not any(some & node and not some & earlier for node, earlier in alike)
                    and self.holds(some)
                ):
                    yield some

    def _most_cores(self, nodes: int) -> int:
        """Those of these nodes that have the most whole cores together."""
        cores = self.problem.whole_cores
        having = sorted((n for n in members(nodes) if cores[n]), key=lambda n: (-cores[n], n))
        return sum(1 << node for node in having[: self.most_nodes])

    def _grown(self, nodes: int) -> Iterator[int]:
        """Sets that are grown from each of these nodes outwards, in several orders; distinct."""
        if next(self.counts(nodes), None) is None:
            return  # no number of these nodes holds the VM
        self.exact = False
        seen: set[int] = set()
        if self.problem.shares and (most := self._most_cores(nodes)) and self.holds(most):
            seen.add(most)
            yield most
        for order in self._orders(nodes):
            self._fruitless += 1
            for grown in self._equal_prefixes(order) if self.equal else self._prefixes(order):
                if grown not in seen:
                    seen.add(grown)
                    if self.holds(grown):
                        self._fruitless = 0
                        yield grown

    def _orders(self, nodes: int) -> Iterator[Sequence[int]]:
        problem, capacity, distances = self.problem, self._capacity, self.problem.distances
        pulled = [0] * len(problem.supplies)
        homes = [one.home.node for one in problem.named if one.is_gpu]
        for number in members(problem.options.open if problem.options.count else 0):
            home = problem.gpu_homes[number]
            if home is not None:
                homes.append(home.node)
        for bit in homes:
            if bit:
                pulled[bit.bit_length() - 1] -= 1
        sign = 1 if problem.pack else -1
        weight = [
            (
                pulled[node],
                sign * supply.whole_cores,
                sign * (problem.memory[node].pages or 0),
                node,
            )
            for node, supply in enumerate(problem.supplies)
        ]
        by_weight = sorted(members(nodes), key=weight.__getitem__)
        by_capacity = sorted(by_weight, key=lambda node: -capacity[node])
        # Sorting keeps the order of equals, so each order below starts from one of these.
        by_package = sorted(by_weight, key=distances.packages.__getitem__)
        in_package: dict[int, list[int]] = {}
        for node in by_weight if self.equal else by_capacity:
            in_package.setdefault(distances.packages[node], []).append(node)
        packages = sorted(
            in_package, key=lambda one: (-sum(capacity[node] for node in in_package[one]), one)
        )
        for seed in members(nodes):
            if problem.earlier_equals[seed]:
                continue
            distance = distances.between[seed].__getitem__
            nearest = {one: min(map(distance, in_package[one])) for one in packages}
            order: list[int] = []
            for one in _with_first(
                distances.packages[seed], sorted(packages, key=nearest.__getitem__)
            ):
                its = in_package[one]
                order += its if len(its) == 1 else sorted(its, key=distance)
            yield _with_first(seed, order)
            yield _with_first(seed, sorted(by_package, key=distance))
            if pulled[seed]:  # as many nodes of GPUs as it may take, and then the others
                own, left = [seed], problem.options.count + pulled[seed]
                for node in sorted(by_package, key=distance):
                    if left > 0 and pulled[node] and node != seed:
                        own.append(node)
                        left += pulled[node]
                rest = sorted(by_package, key=lambda node: -pulled[node])
                yield own + [node for node in sorted(rest, key=distance) if node not in own]
        if any(pulled):
            yield by_weight
        yield by_capacity

    def _equal_prefixes(self, order: Sequence[int]) -> Iterator[int]:
        """The first nodes of the order that can have an equal share among so many, for each number
        of nodes. A node that an earlier one cannot reach is passed over."""
        for able, numbers in self._by_able:
            chosen, number = 0, 0
            for node in order:
                if able >> node & 1 and not (
                    self._unreachable and self._unreachable[node] & chosen
                ):
                    chosen |= 1 << node
                    number += 1
                    if number in numbers:
                        yield chosen
                        if number == numbers[-1]:
                            break

    @cached_property
    def _by_able(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Nodes that may be among so many, and each such number, ascending."""
        numbers: dict[int, list[int]] = {}
        for number, able in self.counts(self.problem.eligible):
            numbers.setdefault(able, []).append(number)
        return tuple((able, tuple(its)) for able, its in numbers.items())

    def _prefixes(self, order: Sequence[int]) -> Iterator[int]:
        """The first nodes of the order that hold the VM, for each number of nodes; also without
        those that they can do without. A node that an earlier one cannot reach is passed over."""
        groups, unreachable = self.problem.groups, self._unreachable
        spreads = "minus_nodes_spanned" in self.problem.first
        chosen, owned, number = 0, 0, 0
        found: list[int] = []
        for node in order:
            if unreachable and unreachable[node] & chosen:
                continue
            chosen |= 1 << node
            owned += self._capacity[node]
            number += 1
            if owned >= groups:
                found += [chosen] if spreads else [self._tightened(chosen, owned), chosen]
            if number == self.most_nodes or (not spreads and len(found) == 2 * MOST_PREFIXES):
                break
        yield from reversed(found) if spreads else found

    def _tightened(self, nodes: int, owned: int) -> int:
        """The set without nodes that it can do without, the smallest first."""
        over = owned - self.problem.groups
        for node in self._smallest_first:
            if nodes >> node & 1:
                over -= self._capacity[node]
                if over < 0:
                    break
                nodes &= ~(1 << node)
        return nodes

    @cached_property
    def _smallest_first(self) -> tuple[int, ...]:
        nodes = range(len(self._capacity))
        return tuple(sorted(nodes, key=lambda node: (self._capacity[node], -node)))

    # Lower bounds.

    def least_packages(self) -> int:
        """A number of packages that no set of nodes can undercut."""
        owned = sorted(self.problem.groups_of_package.values(), reverse=True)
        left = self.problem.groups
        for number, groups in enumerate(owned, 1):
            left -= groups
            if left <= 0:
                return number
        return len(owned)

    def least_nodes(self) -> int:
        """A number of nodes that no set can undercut."""
        left = self.problem.groups
        for number, groups in enumerate(sorted(self._capacity, reverse=True), 1):
            left -= groups
            if left <= 0:
                return number
        return len(self._capacity)

    def is_least(self, cost: Cost) -> bool:
        """Whether the cost meets a lower bound in every term but the indices."""
        problem = self.problem
        has_devices = bool(problem.named or problem.options.count)
        if has_devices or problem.shares or "minus_nodes_spanned" in problem.first:
            return False
        number = cost.nodes_spanned
        free = sorted(
            (problem.supplies[n].whole_cores for n in members(self.problem.eligible)),
            reverse=not problem.pack,
        )
        balance = sum(free[:number]) * (1 if problem.pack else -1)
        if problem.even_splits:
            even = least_uneven(
                (problem.groups,) * number, problem.groups, counts_sockets=problem.counts_sockets
            )
            if even is None or even.sizes != tuple(
                getattr(cost, one) for one in even.sizes._fields
            ):
                return False
        return (
            cost.packages_spanned == self.least_packages()
            and number == self.least_nodes()
            and cost.node_distance == self._least_distance(number)
            and cost.gpu_sets_lost == 0
            and cost.unisolated_cores == 0
            and cost.llcs_spanned == number
            and not cost.unequal_llcs
            and cost.pages_to_reserve == 0
            and cost.balance_cores == balance
        )

    def _least_distance(self, number: int) -> int:
        """A distance within which no node has too few others for a set of `number` nodes."""
        if number == 1:
            return LOCAL_DISTANCE
        distances, eligible = self.problem.distances, tuple(members(self.problem.eligible))
        best = distances.levels[-1]
        for node in eligible:
            row = sorted(distances.between[node][other] for other in eligible if other != node)
            if len(row) >= number - 1:
                best = min(best, row[number - 2])
        return best


def _with_first(first: int, order: list[int]) -> list[int]:
    order.remove(first)
    order.insert(0, first)
    return order
