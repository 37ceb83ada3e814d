"""Branching: better sets of nodes than one that is known, where there are too many to list.

A depth-first branch and bound over the nodes. A family of sets has some nodes for certain and so
many more out of others; what none of its sets can undercut is compared term by term with the best
known cost. Where the budget does not end it, no set is better.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import combinations
from typing import Any

from homenode.machine.topology import LOCAL_DISTANCE
from homenode.plan.bit_sets import members
from homenode.plan.search.candidates import Candidates
from homenode.plan.search.cell_sizes import CellSizes, cell_sizes, least_uneven
from homenode.plan.search.problem import Work
from homenode.plan.search.supply import are_unequal

# Steps, next to those for each node, package and home that is looked at:
STEPS_OF_FAMILY = 12  # to compare one
STEPS_OF_TERM = 3  # of it, next to those for some nodes:
NODES_OF_STEP = 16
STEPS_OF_SET = 40  # to work out one set of nodes, without its GPUs and its split
STEPS_OF_PACKAGES = 5  # to count those near to devices
STEPS_OF_SIZES = 100  # to level the cells over the nodes that hold the most
STEPS_OF_HOME = 6  # to bound the distances to one home of GPUs

Key = tuple[Any, ...]
WorkOut = Callable[[int, Key], Key | None]


class _Sums:
    """Sums of one value of each node over the sets of a family."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = values
        self._totals = {0: 0}

    def least(self, chosen: int, may: int, left: int) -> int:
        """Of these nodes and of the `left` others (all bits) with the least values."""
        value, total = self.values.__getitem__, self._totals.get(chosen)
        if total is None:
            total = self._totals[chosen] = sum(map(value, members(chosen)))
        return total + sum(sorted(map(value, members(may)))[:left]) if left else total


class Branching:
    """One search for better sets. names: terms that are compared, those of the set of nodes alone
    or all up to its indices.

    work_out: what a set of nodes (bits) comes to by these terms, None where it cannot be chosen or
    is certain to be worse than the best known cost.
    is_complete: whether the last search ended within its work. nodes: the best set that it found.
    """

    def __init__(
        self,
        candidates: Candidates,
        names: Sequence[str],
        work_out: WorkOut,
        work: Work,
    ) -> None:
        self.candidates, self.problem, self.work = candidates, candidates.problem, work
        self.devices = self.problem.devices
        self.names, self.work_out = names, work_out
        self.is_complete, self.nodes = True, 0
        self._best: Key = ()
        self._nodes, self._number, self._class = range(len(self.problem.supplies)), 0, 0
        self._additive: dict[str, _Sums | None] = {}
        self._sizes: dict[tuple[int, ...], CellSizes] = {}

    def better(self, best: Key, nodes: int = 0) -> Key:
        """The least cost, of all sets and the best known one (empty: none); ties go to that one.
        nodes: that one (bits)."""
        self._best = best
        if self.work.left <= 0:
            self.is_complete = False
            return best
        if nodes:
            self.climb(best, nodes, 1)
            best = self._best
        bounds = []
        for number, able in self.candidates.counts(self.problem.eligible):
            self._number, low = number, tuple[Any, ...]()
            for name in self.problem.first:
                low += (self._least(name, 0, able, number),)
                if best and low > best[: len(low)]:
                    break
            else:
                bounds.append((low, number, able))
        for _, number, able in sorted(bounds):
            self._turn_to(number)
            if not self._visit(0, able, number):
                self.is_complete = False
                break
        return self._best

    def climb(self, best: Key, nodes: int, depth: int) -> Key:
        """The best of the sets next to these nodes (bits), of those next to it, and so on until
        none is better: with up to `depth` of the nodes in exchange for as many others, one less or
        one more."""
        self._best, self.nodes, most = (
            best,
            nodes,
            dict(self.candidates.counts(self.problem.eligible)),
        )
        number, exchanged = nodes.bit_count(), 1
        while exchanged <= min(depth, number):
            before = self._best
            for left in (exchanged - 1, exchanged, exchanged + 1):
                self._turn_to(number - exchanged + left)
                able = most.get(self._number, 0)
                for some in combinations(members(self.nodes), exchanged if able else number + 1):
                    kept = self.nodes & ~sum([1 << node for node in some])
                    if not kept & ~able and not self._visit(kept, able & ~self.nodes, left):
                        return self._best
                    if self._best != before:
                        break
                if self._best != before:
                    break
            exchanged = 1 if self._best != before else exchanged + 1
            number = self.nodes.bit_count()
        return self._best

    def _turn_to(self, number: int) -> None:
        """Sets of so many nodes are looked at now."""
        if number != self._number and self.candidates.equal:
            self._additive = {}  # shares are others
        self._number = number

    def _visit(self, chosen: int, may: int, left: int) -> bool:
        """Looks at the sets of `chosen` and `left` nodes of `may`; False where the budget ended."""
        unreachable, order = self.problem.distances.unreachable, self._order
        position = 0
        while True:
            if self.work.left <= 0:
                return False
            self.work.spend(STEPS_OF_FAMILY + may.bit_count() // 4)
            narrowed = self._narrowed(chosen, may, left)
            if narrowed is None:
                return True
            if not left:
                return self._look_at(chosen)
            may = narrowed
            while not may >> order[position] & 1:
                position += 1
            node = order[position]
            may &= ~(1 << node)
            earlier = self.problem.earlier_equals[node]
            # Of nodes that are alike the first ones are chosen.
            if earlier & ~(chosen | may):
                continue
            if not self._visit(chosen | 1 << node, may & ~unreachable[node], left - 1):
                return False

    def _look_at(self, nodes: int) -> bool:
        alike = self.problem.earlier_equals
        if any(alike[node] & ~nodes for node in members(nodes)):
            return True
        if self.candidates.holds(nodes):
            self.work.spend(STEPS_OF_SET)
            found = self.work_out(nodes, self._best)
            if found is not None and (not self._best or found < self._best):
                self._best, self.nodes = found, nodes
        return True

    @cached_property
    def _order(self) -> list[int]:
        """The nodes of devices first, then those that hold the most."""
        of_devices, capacity = self.devices.home_nodes, self.problem.capacities
        pages = [one.pages or 0 for one in self.problem.memory]
        return sorted(
            range(len(capacity)),
            key=lambda n: (not of_devices >> n & 1, -capacity[n], -pages[n], n),
        )

    # Bounds.

    def _narrowed(self, chosen: int, may: int, left: int) -> int | None:
        """Those of `may` that a better set can have; None where no set of the family is better."""
        if may.bit_count() < left:
            return None
        if any(most.least(chosen, may, left) > -wanted for most, wanted in self._needs):
            return None
        if not self._best:
            return may
        for name, value in zip(self.names, self._best, strict=True):
            self.work.spend(STEPS_OF_TERM + len(self._nodes) // NODES_OF_STEP)
            low = self._least(name, chosen, may, left)
            if low > value:
                return None
            # So far no set is better: one that is must not be worse here.
            if name == "packages_spanned":
                packages = self.problem.distances.packages_of(chosen)
                if packages.bit_count() == value:
                    of_package = self.problem.distances.nodes_of_package
                    may &= sum([of_package[package] for package in members(packages)])
            elif name == "node_distance":
                for node in members(chosen):
                    may &= ~self._farther(value)[node]
            if may.bit_count() < left:
                return None
            if low != value:
                return may
        return None

    def _least(self, name: str, chosen: int, may: int, left: int) -> Any:
        """What no set of the family can undercut in one term."""
        problem, number = self.problem, self._number
        distances = problem.distances
        if name not in self._additive:
            values = self._values_of_nodes(name)
            self._additive[name] = _Sums(values) if values else None
        if (sums := self._additive[name]) is not None:
            return sums.least(chosen, may, left)
        if name == "device_class":
            self._class = self._least_class(chosen, may, left)
            return self._class
        if name == "packages_spanned":
            return self._least_packages(chosen, may)
        if name == "gpus_away_from_home":
            return self._least_away(chosen, may, left)
        if name in ("nodes_spanned", "minus_nodes_spanned"):
            return number if name == "nodes_spanned" else -number
        if name == "node_distance":
            return distances.worst(chosen) if chosen else self._least_distance(may, left)
        if name in CellSizes._fields:
            return getattr(self._least_sizes(chosen, may, left), name)
        if name == "device_distance":
            return self._least_device_distance(chosen, may, left)
        if name == "nodes":
            nodes = sorted([*members(chosen), *members(may)[:left]])
            return tuple([problem.supplies[node].cores.index for node in nodes])
        if name == "unequal_llcs":
            return self._least_unequal(chosen, may, left)
        if name == "vcpus_beyond_cores":
            return max(0, problem.groups + self._whole.least(chosen, may, left))
        return self._constant.get(name, 0)

    def _values_of_nodes(self, name: str) -> list[int]:
        """The least that each node can come to in a term that is a sum over the nodes; none of
        other terms."""
        problem, sign = self.problem, 1 if self.problem.pack else -1
        if name == "balance_cores":
            return [sign * one.whole_cores for one in problem.supplies]
        if name == "balance_memory":
            return [sign * problem.page_bytes * (one.pages or 0) for one in problem.memory]
        has_gpus = problem.devices.options.has_gpus
        if name == "gpu_nodes_used" or (name == "gpu_sets_lost" and not has_gpus):
            return [problem.devices.gpu_nodes >> node & 1 for node in self._nodes]
        if not self.candidates.equal:
            return [1] * len(self._nodes) if name == "llcs_spanned" else []
        each = problem.groups // self._number
        if name == "pages_to_reserve":
            return [problem.short_pages(node, each) for node in self._nodes]
        if name not in ("llcs_spanned", "unisolated_cores"):
            return []
        groups = [min(each, one.groups) for one in problem.supplies]
        costs = map(problem.cost_of, self._nodes, groups)
        return [one.llcs if name == "llcs_spanned" else one.unisolated for one in costs]

    @cached_property
    def _needs(self) -> list[tuple[_Sums, int]]:
        """(what each node has, negated, and what the nodes need together): groups, pages, slots."""
        problem, wanted = self.problem, self.problem.pages_together
        needs = [(_Sums([-groups for groups in problem.capacities]), problem.groups)]
        if wanted:
            pages = [wanted if one.pages is None else one.pages for one in problem.memory]
            needs.append((_Sums([-count for count in pages]), wanted))
        if (slots := problem.slots) is not None:  # a node of a certain device has its own bus
            own = _Sums([int(node in slots.certain) for node in slots.nodes])
            needs.append((own, -slots.free - len(slots.cells_with_bus)))
        return needs

    @cached_property
    def _held(self) -> Callable[[int, int], _Sums]:
        """Groups that each node holds beyond so many, and at most so many."""
        capacities = self.problem.capacities
        return cache(lambda low, most: _Sums([max(0, min(most, one) - low) for one in capacities]))

    @cached_property
    def _whole(self) -> _Sums:
        return _Sums([-cores for cores in self.problem.whole_cores])

    @cached_property
    def _constant(self) -> dict[str, int]:
        """What no choice of GPUs can undercut, whatever the nodes."""
        options = self.devices.options
        if not options.count:
            return {}
        found = [options.least_lost(0, ((group, options.count),)) for group in options.groups]
        if not all(one.is_complete for one in found):
            return {}
        links, lost = min((one.link_groups, one.sets_lost) for one in found)
        return {"gpu_link_groups": links, "gpu_sets_lost": lost}

    @cached_property
    def _farther(self) -> Callable[[int], list[int]]:
        """For each node, the nodes that are farther from it than a limit."""
        between = [list(enumerate(row)) for row in self.problem.distances.between]
        return cache(
            lambda limit: [sum([1 << one for one, far in row if far > limit]) for row in between]
        )

    def _least_class(self, chosen: int, may: int, left: int) -> int:
        """So few more packages as nodes are near to only so many devices."""
        distances = self.problem.distances
        own = distances.packages_of(chosen)
        others = distances.packages_of(may) & ~own
        low = self.devices.least_class(own | others)
        best = self._best[self.names.index("device_class")] if self._best else low
        # Only whether it may be better than the best one, or as good, is of interest.
        for limit in (best - 1, best):
            if left >= others.bit_count() or self._packages_for(limit, own, others) <= left:
                return low if limit < best else max(low, limit)
        return max(low, best + 1)

    def _packages_for(self, limit: int, own: int, others: int) -> int:
        """How many other packages (bits), at least, a set with its own ones needs for all devices
        to be of this class; more than there are where it cannot be."""
        homes, gpus_near = self.devices.within(limit)
        more = members(others)
        self.work.spend(STEPS_OF_PACKAGES + len(homes) + len(more))
        apart, taken = 0, 0
        for near in homes:  # those that no package is near to together need one each
            if not near & own:
                if not near & others:
                    return len(more) + 1
                if not near & taken:
                    apart, taken = apart + 1, taken | near
        gpus, number = 0, 0
        for package in members(own):
            gpus |= gpus_near[package]
        wanted = self.devices.options.count - gpus.bit_count()
        if wanted > 0:
            for some in sorted([(gpus_near[one] & ~gpus).bit_count() for one in more])[::-1]:
                number, wanted = number + 1, wanted - some
                if wanted <= 0:
                    break
            else:
                return len(more) + 1
        return max(apart, number)

    def _least_packages(self, chosen: int, may: int) -> int:
        """So few as hold the groups, and as are near to the devices."""
        problem, distances, number = self.problem, self.problem.distances, self._number
        if len(distances.nodes_of_package) == len(distances.packages):
            return number
        own, of_package = distances.packages_of(chosen), distances.nodes_of_package
        others = distances.packages_of(may) & ~own
        # The nodes hold a level each, and what they hold beyond is in their packages, all of them.
        most = problem.groups // number if self.candidates.equal else problem.groups
        found, levels = 0, {0} if chosen else {0, *self._held(0, most).values}
        for level in levels:
            held = self._held(level, most)
            left = problem.groups - level * number
            left -= sum(
                [held.least(of_package[one] & (chosen | may), 0, 0) for one in members(own)]
            )
            each = [held.least(of_package[one] & may, 0, 0) for one in members(others)]
            for count, more in enumerate(sorted(each, reverse=True), 1):
                if left > 0:
                    found, left = max(found, count), left - more
        if "device_class" in self.names:  # which is compared before, so it is no worse
            found = max(found, self._packages_for(self._class, own, others))
        return own.bit_count() + found

    def _least_distance(self, may: int, left: int) -> int:
        """Within which no node of these has too few others for a set of so many."""
        between, nodes = self.problem.distances.between, members(may)
        if left < 2:
            return LOCAL_DISTANCE
        rows = ([between[node][other] for other in nodes if other != node] for node in nodes)
        return min([sorted(row)[left - 2] for row in rows])

    def _least_away(self, chosen: int, may: int, left: int) -> int:
        named, groups = self._at_home
        away = named[0] + named[1].least(chosen, may, left)
        count = self.devices.options.count
        if not groups:
            return away
        return away + min(
            max(0, count - any_ + own.least(chosen, may, left)) for any_, own in groups
        )

    @cached_property
    def _at_home(self) -> tuple[tuple[int, _Sums], list[tuple[int, _Sums]]]:
        """(GPUs that the VM gets in any case, those of each node negated), and the same of each
        group of GPUs: (of no known node, of each node)."""
        nodes = range(len(self.problem.supplies))
        named = [one.home.node for one in self.devices.named if one.is_gpu]
        of_named = _Sums([-sum(home >> node & 1 for home in named) for node in nodes])
        groups = []
        for group in self.devices.groups:
            own = [-sum(each for each, homes in group.nodes if homes >> node & 1) for node in nodes]
            groups.append((group.homeless, _Sums(own)))
        return (len(named), of_named), groups

    def _least_sizes(self, chosen: int, may: int, left: int) -> CellSizes:
        """Of cells on the nodes that hold the most."""
        problem = self.problem
        # Otherwise it is the unevenness alone that is compared.
        counts = problem.counts_sockets and problem.even_splits
        key: tuple[int, ...] = (self._number,)
        if not self.candidates.equal:
            capacity = problem.capacities
            most = sorted([capacity[node] for node in members(may)], reverse=True)[:left]
            key = tuple(sorted([*most, *(capacity[node] for node in members(chosen))]))
        if key not in self._sizes:
            self.work.spend(STEPS_OF_SIZES)
            self._sizes[key] = CellSizes(0, 0, 0)
            if self.candidates.equal:
                each = (problem.groups // self._number,) * self._number
                self._sizes[key] = cell_sizes(each, counts_sockets=counts)
            elif splits := least_uneven(key, problem.groups, counts_sockets=counts):
                self._sizes[key] = splits.sizes
        return self._sizes[key]

    def _least_unequal(self, chosen: int, may: int, left: int) -> int:
        """1 where it is certain that LLCs get unequal numbers of groups."""
        problem = self.problem
        if self.candidates.equal:
            each = problem.groups // self._number
            costs = [problem.cost_of(node, each) for node in members(chosen)]
            return are_unequal(costs) if costs else 0
        if (chosen | may) & ~self._of_one_llc or not problem.even_splits:
            return 0
        # Each cell is on one LLC, and how unlike the cells are was compared before.
        squares = self._least_sizes(chosen, may, left).unevenness
        return int(squares * self._number != problem.groups**2)

    @cached_property
    def _of_one_llc(self) -> int:
        """Nodes (bits) whose groups are all of one LLC."""
        problem = self.problem
        held = [(node, one.groups) for node, one in enumerate(problem.supplies) if one.groups]
        return sum([1 << node for node, most in held if problem.cost_of(node, most).llcs == 1])

    def _least_device_distance(self, chosen: int, may: int, left: int) -> int:
        """Of devices that the VM gets in any case, and of the nearest GPUs, each by itself."""
        problem, number = self.problem, self._number
        share = 1
        if self.candidates.equal:
            share = problem.groups // number
        elif problem.even_splits and not problem.counts_sockets:
            least = min([problem.capacities[node] for node in members(chosen | may)])
            if least * number >= problem.groups:
                share = problem.groups // number
        over = problem.groups - share * number

        def of(row: _Sums) -> int:
            distance = share * row.least(chosen, may, left)
            if over:
                distance += over * min(map(row.values.__getitem__, members(chosen | may)))
            return distance

        named, groups = self._rows
        self.work.spend(sum(map(len, groups)) * STEPS_OF_HOME)
        least_of = []
        for group in groups:
            costs = sorted(
                (weight * distance, count)
                for row, by_weight in group
                for distance in (of(row),)
                for weight, count in by_weight
            )
            wanted, total = problem.devices.options.count, 0
            for cost, count in costs:
                total += cost * min(count, wanted)
                wanted -= min(count, wanted)
            least_of.append(total)
        return of(named) + min(least_of, default=0)

    @cached_property
    def _rows(self) -> tuple[_Sums, list[list[tuple[_Sums, list[tuple[int, int]]]]]]:
        """Distances to each node of what the VM gets in any case, and of each home of each group of
        GPUs, with (functions that each GPU brings, GPUs)."""
        nowhere = (0,) * len(self.problem.supplies)
        return _Sums(self.devices.named_rows), [
            [
                (
                    _Sums(nowhere if one.home is None else one.home.to_node),
                    [(weight, gpus.bit_count()) for weight, gpus in one.by_weight],
                )
                for one in group.homes
            ]
            for group in self.devices.groups
        ]
