"""Candidates: the sets of nodes that can hold a VM, in an order that lets a search stop early.

Of each package and of all packages: up to MOST_LISTED_NODES nodes, every set. Beyond, sets that are
grown from each node outwards: the nearest nodes, package by package. Where the distances are
hierarchical these are the clusters of the hierarchy; that nothing better exists is then known only
from branching.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import combinations

from homenode.plan.bit_sets import members
from homenode.plan.search.cell_sizes import (
    CellSizes,
    CellSplits,
    GroupRange,
    cell_sizes,
    even_split,
    least_uneven,
)
from homenode.plan.search.problem import SearchProblem, Work

MOST_LISTED_NODES = 8
MOST_PREFIXES = 3  # numbers of nodes, from the least that will do, that are tried in one order
PARTS_OF_MEMORY = 4  # orders of nodes from what they hold of the groups to what of the pages

# Steps, next to those for each node:
STEPS_OF_ORDER = 10  # to grow sets in one order
STEPS_OF_SET = 20  # to look at one set

Bounded = tuple[tuple[int, ...], Iterable[int]]
"""Lower bound of the first terms of the sets that follow, and the sets."""


class Candidates:
    """Sets of nodes (bits) that hold the VM. equal: with the same number of groups on each.

    exact: every set was listed so far. Once the work is spent, those that were found must do.
    """

    def __init__(self, problem: SearchProblem, work: Work, *, equal: bool) -> None:
        self.problem, self.work, self.equal = problem, work, equal
        self.exact = True
        self.most_nodes = min(problem.most_nodes, problem.groups)
        self._known: dict[int, bool] = {}
        self._has_found = False
        self._capacity = problem.capacities
        self._splits: dict[int, CellSplits] = {}
        self._orders_from: dict[int, tuple[list[int], list[int]]] = {}
        unreachable = problem.distances.unreachable
        self._unreachable = unreachable if any(unreachable) else ()

    def groups(self) -> Iterator[Bounded]:
        """The sets, in groups of ascending lower bound: those of each package that holds the VM
        alone, and those of all packages, which are at least as many as hold it together."""
        problem = self.problem
        if next(self.counts(problem.eligible), None) is None:
            return  # no number of nodes holds the VM
        if problem.first[:2] != ("device_class", "packages_spanned"):
            yield (), self._sets(problem.eligible)
            return
        device_class, held = problem.devices.least_class, problem.groups_of_package
        of_package, owned = problem.distances.nodes_of_package, 0
        bounded = [
            ((device_class(1 << one), 1), of_package[one] & problem.eligible)
            for one, groups in held.items()
            if groups >= problem.groups
        ]
        for number, groups in enumerate(sorted(held.values(), reverse=True), 1):
            owned += groups
            if number > 1 and owned >= problem.groups:
                packages = sum([1 << one for one, groups in held.items() if groups])
                bounded.append(((device_class(packages), number), problem.eligible))
                break
        for bound, nodes in sorted(bounded):
            yield bound, self._sets(nodes)

    def any_set(self) -> Iterator[int]:
        """A set that holds the VM, if there is one: a few sums where distances forbid nothing."""
        if sum(self._capacity) < self.problem.groups:
            return
        nodes, owned = 0, 0
        for node in () if self._unreachable else self._by_capacity:
            nodes |= 1 << node
            owned += self._capacity[node]
            if owned >= self.problem.groups and self.holds(nodes):
                yield nodes
        yield from self._sets(self.problem.eligible)

    def splits(self, nodes: int) -> CellSplits:
        """The splits over the chosen nodes (bits) that may be the best, whatever the devices: the
        least uneven ones, or all where the devices come first."""
        if nodes not in self._splits:
            self._splits[nodes] = self._splits_over(members(nodes))
        return self._splits[nodes]

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
        ranges = tuple([GroupRange(1, min(most, capacity)) for capacity in capacities])
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
        most = max(even_split([GroupRange(0, one) for one in room], left))
        more = [min(most, one) for one in room]
        fewer = more if sum(more) == left else [min(most - 1, one) for one in room]
        return tuple(
            GroupRange(core + a, core + b) for core, a, b in zip(least, fewer, more, strict=True)
        )

    def _capacities(self, nodes: Sequence[int]) -> tuple[int, ...]:
        problem = self.problem
        if not problem.device_pages:
            return tuple([self._capacity[node] for node in nodes])
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
        return problem.holds_memory(nodes) and problem.has_slots(nodes)

    @cached_property
    def _able_to(self) -> Callable[[int], int]:
        """The nodes that can have an equal share among so many, memory devices aside."""
        groups, most = self.problem.groups, list(enumerate(self._capacity))
        return cache(lambda number: sum([1 << n for n, one in most if one >= groups // number]))

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
                lots = [lot for lot in self._apart if lot & able]
                if (len(lots) if self._unreachable else able.bit_count()) >= number:
                    yield number, able

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

    def _sets(self, nodes: int) -> Iterator[int]:
        """The sets of these nodes that hold the VM, smaller ones first."""
        if self.problem.shares and self._most_cores(nodes) == nodes and self.holds(nodes):
            yield nodes  # no other set has as many whole cores
            return
        if nodes.bit_count() > MOST_LISTED_NODES:
            yield from self._grown(nodes)
            return
        # Of nodes that are alike the first ones are chosen: others cost the same but for the index.
        earlier_equals = self.problem.earlier_equals
        alike = [(1 << node, one) for node in members(nodes) if (one := earlier_equals[node])]
        for number, able in self.counts(nodes):
            for chosen in combinations([1 << node for node in members(able)], number):
                some = sum(chosen)
                if any(some & node and not some & earlier for node, earlier in alike):
                    continue
                if some not in self._known:
                    self._known[some] = self.holds(some)
                    if self._known[some]:
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
        known = self._known
        if self.problem.shares and (most := self._most_cores(nodes)) and self.holds(most):
            known[most] = self._has_found = True
            yield most
        by_able = self._by_able(nodes) if self.equal else {}
        for order in self._orders(nodes):
            if self._has_found and self.work.left <= 0:
                return
            self.work.spend(STEPS_OF_ORDER + len(order))
            for grown in (
                self._equal_prefixes(order, by_able) if self.equal else self._prefixes(order)
            ):
                if grown not in known:
                    self.work.spend(STEPS_OF_SET + len(order) // 2)
                    known[grown] = self.holds(grown)
                    if known[grown]:
                        self._has_found = True
                        yield grown

    def _orders(self, nodes: int) -> Iterator[Sequence[int]]:
        for seed in members(nodes):
            if self.work.left <= 0:
                break
            if not self.problem.earlier_equals[seed]:
                for order in self._outwards(seed):
                    its = [node for node in order if nodes >> node & 1 and node != seed]
                    yield [seed, *its]
        every = [self._by_weight] * any(self._pulled) + [self._by_capacity]
        if wanted := self.problem.pages_together or self.problem.pages_anywhere:
            for part in range(1, PARTS_OF_MEMORY + 1):
                both = [
                    part * (memory.pages or 0) * self.problem.groups
                    + (PARTS_OF_MEMORY - part) * groups * wanted
                    for memory, groups in zip(self.problem.memory, self._capacity, strict=True)
                ]
                every.append(sorted(self._by_capacity, key=lambda node: -both[node]))
        for order in every:
            yield [node for node in order if nodes >> node & 1]

    def _outwards(self, seed: int) -> tuple[list[int], list[int]]:
        """All nodes that can hold a group by their distance from one: package by package, and one
        by one. Orders of fewer nodes are parts of these: packages are taken whole."""
        known = self._orders_from.get(seed)
        if known is None:
            distance = self.problem.distances.between[seed].__getitem__
            in_package = self._in_package
            nearest = {one: min(map(distance, its)) for one, its in in_package.items()}
            by_package: list[int] = []
            for one in sorted(in_package, key=nearest.__getitem__):
                by_package += sorted(in_package[one], key=distance)
            own = self.problem.distances.packages[seed]
            by_package.sort(key=lambda node: self.problem.distances.packages[node] != own)
            known = by_package, sorted(self._by_package, key=distance)
            self._orders_from[seed] = known
        return known

    @cached_property
    def _pulled(self) -> list[int]:
        """The GPUs of each node that the VM gets or may get, negated."""
        devices = self.problem.devices
        pulled = [0] * len(self.problem.supplies)
        homes = [one.home.node for one in devices.named if one.is_gpu]
        if devices.options.count:
            gpus = {number for group in devices.options.groups for number in members(group)}
            of_gpus = (devices.gpu_homes[number] for number in gpus)
            homes += [home.node for home in of_gpus if home is not None]
        for bit in homes:
            if bit:
                pulled[bit.bit_length() - 1] -= 1
        return pulled

    @cached_property
    def _by_weight(self) -> list[int]:
        problem, sign = self.problem, 1 if self.problem.pack else -1
        weight = [
            (
                self._pulled[node],
                sign * supply.whole_cores,
                sign * (problem.memory[node].pages or 0),
                node,
            )
            for node, supply in enumerate(problem.supplies)
        ]
        return sorted(members(problem.eligible), key=weight.__getitem__)

    # Sorting keeps the order of equals, so each order of nodes starts from one of these.

    @cached_property
    def _by_capacity(self) -> list[int]:
        return sorted(self._by_weight, key=lambda node: -self._capacity[node])

    @cached_property
    def _by_package(self) -> list[int]:
        return sorted(self._by_weight, key=self.problem.distances.packages.__getitem__)

    @cached_property
    def _in_package(self) -> dict[int, list[int]]:
        """The nodes of each package, the packages that hold the most first."""
        packages, found = self.problem.distances.packages, dict[int, list[int]]()
        for node in self._by_weight if self.equal else self._by_capacity:
            found.setdefault(packages[node], []).append(node)
        held = self.problem.groups_of_package
        return {one: found[one] for one in sorted(found, key=lambda one: (-held[one], one))}

    def _equal_prefixes(
        self, order: Sequence[int], by_able: Mapping[int, Sequence[int]]
    ) -> Iterator[int]:
        """The first nodes of the order that can have an equal share among so many, for each number
        of nodes. A node that an earlier one cannot reach is passed over."""
        for able, numbers in by_able.items():
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

    def _by_able(self, nodes: int) -> dict[int, list[int]]:
        """By those of these nodes that may be among so many, each such number, ascending."""
        numbers: dict[int, list[int]] = {}
        for number, able in self.counts(nodes):
            numbers.setdefault(able, []).append(number)
        return numbers

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
