"""Solve: the nodes, the groups on each and the GPUs of least cost, for one search problem.

The first terms of the cost depend on the set of nodes alone, once each set is given the GPUs that
suit it best. So sets of nodes are compared by these first (candidates.py lists them), and only the
best are worked out: the split over the nodes, then the GPUs. docs/decisions/0010.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from homenode.plan.search.candidates import Candidates
from homenode.plan.search.cost import Cost
from homenode.plan.search.distances import members
from homenode.plan.search.gpu_choice import GpuSelection, HomeGpus, distance_rows, vectors
from homenode.plan.search.problem import Home, SearchProblem, Split
from homenode.plan.search.split import GroupRange, least_split
from homenode.topology import LOCAL_DISTANCE

MOST_GPU_VECTORS = 400
"""Numbers of GPUs by node that are compared for one set of nodes whose split is free."""

MOST_RUNNERS_UP = 3

MOST_WORKED_OUT = 300
"""Sets of nodes that are equally good by the first terms and are worked out."""


@dataclass(frozen=True, slots=True)
class Placing:
    """One candidate. gpus: bits of problem.options.gpus that were chosen."""

    split: Split
    gpus: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class Solution:
    """The placing of least cost. optimal: None where not all were compared.

    runners_up: other sets of nodes, best first.
    """

    best: Placing
    optimal: bool | None
    runners_up: tuple[Placing, ...]


def solve(problem: SearchProblem) -> Solution | None:
    """The solution of least cost, or None where none fits. Same problem, same solution.

    Equal cells are preferred while they cost no class of device distance, no package and no GPU
    its home.
    """
    if sum(problem.capacities) < problem.groups:
        return None
    terms = FirstTerms(problem)
    found = _Search(terms, equal=True).best if problem.equal else None
    if found is not None and _is_local(found.best.cost):
        return found
    uneven = _Search(terms, equal=False)
    if found is None:
        return uneven.best
    nearness = uneven.least_nearness(found.best.cost)
    cost = found.best.cost
    costs = cost.device_class, cost.packages_spanned, cost.gpus_away_from_home
    if all(mine <= theirs for mine, theirs in zip(costs, nearness, strict=True)):
        return found
    return uneven.best


def may_be_nearer(problem: SearchProblem, cost: Cost) -> bool:
    """Whether the problem may have a placing of nearer devices or of fewer packages than this; a
    few sums, without a search."""
    return not _Search(FirstTerms(problem), equal=False).cannot_beat(cost)


def _is_local(cost: Cost) -> bool:
    """Whether nothing can be nearer: one package, and all devices and GPUs at home in it."""
    near = cost.device_class <= LOCAL_DISTANCE and cost.gpus_away_from_home == 0
    return cost.packages_spanned == 1 and near


def fits(problem: SearchProblem) -> bool:
    """Whether any set of nodes holds the VM; a few sums, without comparing."""
    return next(Candidates(problem, equal=False).any_set(), None) is not None


def solve_fixed(problem: SearchProblem, splits: Iterable[Split]) -> Solution | None:
    """The best of these splits, with the GPUs that suit it best."""
    terms = FirstTerms(problem)
    search = _Search(terms, equal=False)
    found = []
    for split in splits:
        nodes = sum(1 << node for node, _ in split)
        first = terms.of(nodes)
        if first is not None:
            choices = search.choices(nodes, [groups for _, groups in split])
            for placing in search.work_out(nodes, choices):
                found.append((first, search.rest_of(placing), placing))
    found.sort(key=lambda item: item[:2])
    if not found:
        return None
    placings = [placing for *_, placing in found]
    runners = tuple(_distinct(placings)[:MOST_RUNNERS_UP])
    return Solution(placings[0], True if search.exact else None, runners)


class Choice(NamedTuple):
    """A choice of GPUs for a set of nodes, and the groups that keep the devices nearest."""

    device_distance: int
    gpus: GpuSelection
    ranges: tuple[GroupRange, ...]


class FirstTerms:
    """What a set of nodes comes to with the GPUs that suit it best: the terms that the set alone
    decides. homes: GPUs to choose from by home. partitions: (GPUs, (home, functions there) …) of
    each set that may be chosen."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        options = problem.options
        self.homes: tuple[HomeGpus, ...] = ()
        self.partitions: tuple[tuple[int, tuple[tuple[Home | None, int], ...]], ...] = ()
        if options.count:
            self.homes = _homes(problem)
            self.partitions = tuple(
                (gpus, _functions_at(problem, gpus)) for gpus in options.partitions or ()
            )
        self._classes: dict[int, tuple[int, int]] = {}
        named: dict[int, int] = {}
        for one in problem.named:
            if one.is_gpu:
                named[one.home.node] = named.get(one.home.node, 0) + 1
        self._named_nowhere = named.pop(0, 0)
        self._named_homes = _by_count(named)
        self._open_homes = _by_count(
            {one.home.node: one.count for one in self.homes if one.home is not None}
        )
        self._homeless = sum(one.count for one in self.homes if one.home is None)
        self._compares_devices = bool(problem.named or options.count)
        self.named_rows = tuple(
            sum(device.home.to_node[node] for device in problem.named)
            for node in range(len(problem.supplies))
        )

    def device_class(self, packages: int) -> int:
        """The class of the worst device, for a set of packages (bits)."""
        return self._class_and_limit(packages)[0]

    def _class_and_limit(self, packages: int) -> tuple[int, int]:
        """(class of the worst device, greatest class of a chosen GPU)."""
        if not self._compares_devices:
            return 0, 0
        known = self._classes.get(packages)
        if known is None:
            known = self._classes[packages] = self._device_class(packages)
        return known

    def _device_class(self, packages: int) -> tuple[int, int]:
        problem = self.problem
        chosen = tuple(members(packages))

        def nearest(home: Home | None) -> int:
            return 0 if home is None else min(home.to_package[package] for package in chosen)

        pulling = {id(one.home): one.home for one in problem.named if one.pulls}
        worst = max(map(nearest, pulling.values()), default=0)
        count = problem.options.count
        if not count:
            return worst, worst
        # What named devices cost anyway costs nothing more.
        if self.partitions:
            least = min(max(nearest(home) for home, _ in homes) for _, homes in self.partitions)
            return max(worst, least), max(worst, least)
        for limit, number in sorted((nearest(one.home), one.count) for one in self.homes):
            count -= number
            if count <= 0:
                return max(worst, limit), max(worst, limit)
        return worst, worst

    def away(self, nodes: int) -> int:
        """GPUs away from home, for a set of nodes (bits)."""
        away = self._named_nowhere
        for each, homes in self._named_homes:
            away += each * (homes & ~nodes).bit_count()
        count = self.problem.options.count
        if not count:
            return away
        if self.partitions:
            return away + min(self.set_away(gpus, nodes) for gpus in self.near_partitions(nodes))
        here = sum(each * (homes & nodes).bit_count() for each, homes in self._open_homes)
        return away + max(0, count - self._homeless - here)

    def near_homes(self, nodes: int) -> tuple[list[HomeGpus], list[HomeGpus]]:
        """(GPUs to choose from at home on these nodes or anywhere, others that are near enough)."""
        packages = self.problem.distances.packages_of(nodes)
        limit = self._class_and_limit(packages)[1]
        chosen = tuple(members(packages))
        at_home, others = [], []
        for one in self.homes:
            if one.home is None or one.home.node & nodes:
                at_home.append(one)
            elif min(one.home.to_package[package] for package in chosen) <= limit:
                others.append(one)
        return at_home, others

    def near_partitions(self, nodes: int) -> Iterator[int]:
        """Sets that may be chosen and are near enough."""
        packages = self.problem.distances.packages_of(nodes)
        limit = self._class_and_limit(packages)[1]
        chosen = tuple(members(packages))
        for gpus, homes in self.partitions:
            if all(
                home is None or min(home.to_package[package] for package in chosen) <= limit
                for home, _ in homes
            ):
                yield gpus

    def set_away(self, gpus: int, nodes: int) -> int:
        homes = (self.problem.gpu_homes[number] for number in members(gpus))
        return sum(home is not None and not home.node & nodes for home in homes)

    def of(self, nodes: int, most: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """The first terms of a set of nodes; None where a GPU must not be away and is, and where
        they are more than `most`."""
        problem = self.problem
        packages = problem.distances.packages_of(nodes)
        away = self.away(nodes) if self._compares_devices else 0
        if away and problem.requires_home:
            return None
        result: list[int] = []
        is_tied = bool(most)
        for i, name in enumerate(problem.first):
            if name == "nodes_spanned":
                value = nodes.bit_count()
            elif name == "node_distance":
                value = problem.distances.worst(nodes)
            elif name == "device_class":
                value = self.device_class(packages)
            elif name == "packages_spanned":
                value = packages.bit_count()
            elif name == "gpus_away_from_home":
                value = away
            else:
                value = -nodes.bit_count()
            if is_tied and value != most[i]:
                if value > most[i]:
                    return None
                is_tied = False
            result.append(value)
        return tuple(result)


def _homes(problem: SearchProblem) -> tuple[HomeGpus, ...]:
    """The GPUs to choose from, by home."""
    by_home: dict[int, tuple[Home | None, dict[int, int]]] = {}
    for gpu in problem.options.gpus:
        if problem.options.open >> gpu.number & 1:
            home = problem.gpu_homes[gpu.number]
            weights = by_home.setdefault(id(home), (home, {}))[1]
            weights[gpu.weight] = weights.get(gpu.weight, 0) | 1 << gpu.number
    return tuple(
        HomeGpus(home, tuple(sorted(weights.items())), sum(g.bit_count() for g in weights.values()))
        for home, weights in by_home.values()
    )


def _functions_at(problem: SearchProblem, gpus: int) -> tuple[tuple[Home | None, int], ...]:
    """Functions that these GPUs bring, by home."""
    there: dict[int, tuple[Home | None, int]] = {}
    for number in members(gpus):
        home = problem.gpu_homes[number]
        weight = problem.options.gpus[number].weight
        there[id(home)] = (home, there.get(id(home), (home, 0))[1] + weight)
    return tuple(there.values())


def _by_count(count_of_node: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """(count, nodes with so many) from the count of each node (a bit)."""
    nodes: dict[int, int] = {}
    for node, count in count_of_node.items():
        nodes[count] = nodes.get(count, 0) | node
    return tuple(nodes.items())


class _Search:
    """One search, over equal splits or over all."""

    def __init__(self, terms: FirstTerms, *, equal: bool) -> None:
        self.problem = terms.problem
        self.terms = terms
        self.equal = equal
        self.exact = True
        self.candidates = Candidates(terms.problem, equal=equal)

    @cached_property
    def ranked(self) -> list[tuple[tuple[int, ...], int]]:
        """(first terms, nodes) of sets of nodes that hold the VM, the least first: at least all of
        the least terms."""
        found = []
        least: list[tuple[int, ...]] = []
        for bound, sets in self.candidates.groups(self.terms.device_class):
            if least and bound > least[0][: len(bound)]:
                break
            for nodes in sets:
                terms = self.terms.of(nodes, least[-1] if len(least) > MOST_RUNNERS_UP else ())
                if terms is not None:
                    found.append((terms, nodes))
                    insort(least, terms)
                    del least[MOST_RUNNERS_UP + 1 :]
        found.sort()
        return found

    def least_nearness(self, cost: Cost) -> tuple[int, int, int]:
        """(device class, packages, GPUs away) of the best set of nodes, or this cost's where none
        can be less."""
        here = cost.device_class, cost.packages_spanned, cost.gpus_away_from_home
        if self.cannot_beat(cost):
            return here
        if "device_class" not in self.problem.first:
            found = self.best
            if found is None:
                return here
            best = found.best.cost
            return best.device_class, best.packages_spanned, best.gpus_away_from_home
        if not self.ranked:
            return here
        nodes = self.ranked[0][1]
        packages = self.problem.distances.packages_of(nodes)
        return self.terms.device_class(packages), packages.bit_count(), self.terms.away(nodes)

    def cannot_beat(self, cost: Cost) -> bool:
        """Whether no split could cost fewer packages, nearer devices or more homes."""
        if cost.gpus_away_from_home:
            return False
        bound, _ = next(self.candidates.groups(self.terms.device_class), ((), ()))
        return bound == (cost.device_class, cost.packages_spanned)

    # The rest: the split and the GPUs of one set of nodes.

    @cached_property
    def best(self) -> Solution | None:
        ranked = self.ranked
        if not ranked:
            return None
        least = ranked[0][0]
        tied = [nodes for terms, nodes in ranked if terms == least]
        others = [nodes for _, nodes in ranked[len(tied) :]]
        if len(tied) > MOST_WORKED_OUT:
            others = tied[MOST_WORKED_OUT:] + others
            tied = tied[:MOST_WORKED_OUT]
            self.exact = False
        choices = [(nodes, self.choices(nodes)) for nodes in tied]
        choices.sort(key=lambda item: item[1][0].device_distance)
        nearest = choices[0][1][0].device_distance
        near = [item for item in choices if item[1][0].device_distance == nearest]
        done = [placing for item in near for placing in self.work_out(*item)]
        done.sort(key=self.rest_of)
        is_exact = self.exact and self.candidates.exact
        if not is_exact:
            is_exact = self.candidates.is_least(done[0].cost) and len(tied) <= MOST_WORKED_OUT
        runners = _distinct(done)
        more = (nodes for nodes in (*(nodes for nodes, _ in choices[len(near) :]), *others))
        for nodes in islice(more, max(0, MOST_RUNNERS_UP - len(runners))):
            runners.append(min(self.work_out(nodes, self.choices(nodes)), key=self.rest_of))
        return Solution(done[0], True if is_exact else None, tuple(runners[:MOST_RUNNERS_UP]))

    @cached_property
    def rest_of(self) -> Callable[[Placing], tuple[object, ...]]:
        """The terms of a placing that come after the first ones."""
        terms = itemgetter(*(Cost._fields.index(name) for name in self.problem.rest))
        return lambda placing: terms(placing.cost)

    def choices(self, nodes: int, fixed: Sequence[int] = ()) -> list[Choice]:
        """The nearest choices of GPUs and groups for one set of nodes. fixed: the groups of each
        node, where they are given."""
        problem = self.problem
        positions = tuple(members(nodes))
        ranges = (
            tuple(GroupRange(groups, groups) for groups in fixed)
            if fixed
            else self.candidates.ranges(positions)
        )
        if "device_distance" not in problem.rest:
            return [Choice(0, gpus, ranges) for gpus, _ in self._gpu_choices(nodes, ranges)]
        found: list[Choice] = []
        for gpus, rows in self._gpu_choices(nodes, ranges):
            weights = [
                self.terms.named_rows[node] + row for node, row in zip(positions, rows, strict=True)
            ]
            narrowed, distance = _nearest(ranges, weights, problem.groups)
            if found and distance < found[0].device_distance:
                found.clear()
            if not found or distance == found[0].device_distance:
                found.append(Choice(distance, gpus, narrowed))
        return found

    def work_out(self, nodes: int, choices: Sequence[Choice]) -> Iterator[Placing]:
        """The best placing on one set of nodes for each of these choices."""
        problem = self.problem
        positions = tuple(members(nodes))
        packages = problem.distances.packages_of(nodes)
        nearness = (self.terms.device_class(packages), self.terms.away(nodes))
        for distance, gpus, ranges in choices:
            chosen = problem.options.least_lost(gpus.sure, gpus.tied)
            if not problem.options.has_gpus:
                lost = (nodes & problem.gpu_nodes).bit_count()
                chosen = chosen._replace(sets_lost=lost)
            split, exact = least_split(problem, positions, ranges)
            self.exact &= chosen.is_complete and exact
            cost = problem.cost(split, chosen, nearness, distance)
            yield Placing(split, chosen.gpus, cost)

    def _gpu_choices(
        self, nodes: int, ranges: Sequence[GroupRange]
    ) -> Iterator[tuple[GpuSelection, tuple[int, ...]]]:
        """Choices of GPUs as near as can be, each with its functions' distance to each node."""
        problem = self.problem
        positions = tuple(members(nodes))
        nothing = (0,) * len(positions)
        if not problem.options.count:
            yield GpuSelection(0), nothing
            return
        terms = self.terms
        if terms.partitions:
            functions = dict(terms.partitions)
            near = [(gpus, terms.set_away(gpus, nodes)) for gpus in terms.near_partitions(nodes)]
            least = min(away for _, away in near)
            for gpus, away in near:
                if away == least:
                    yield GpuSelection(gpus), distance_rows(functions[gpus], positions)
            return
        at_home, others = terms.near_homes(nodes)
        count = problem.options.count
        here = sum(one.count for one in at_home)
        certain, open_homes, left = (
            (at_home, others, count - here) if here <= count else ([], at_home, count)
        )
        if all(one.least == one.most for one in ranges):
            groups = tuple(one.least for one in ranges)
            yield self._nearest_gpus(certain, open_homes, left, positions, groups)
            return
        for tries, numbers in enumerate(vectors([one.count for one in open_homes], left)):
            if tries == MOST_GPU_VECTORS:
                self.exact = False
                return
            sure, tied, homes = 0, [], []
            for one, number in (
                *((one, one.count) for one in certain),
                *zip(open_homes, numbers, strict=True),
            ):
                mine, weight, some = one.first(number)
                sure |= mine
                homes.append((one.home, weight))
                if some is not None:
                    tied.append(some)
            yield GpuSelection(sure, tuple(tied)), distance_rows(homes, positions)

    def _nearest_gpus(
        self,
        certain: Sequence[HomeGpus],
        homes: Sequence[HomeGpus],
        count: int,
        positions: Sequence[int],
        groups: Sequence[int],
    ) -> tuple[GpuSelection, tuple[int, ...]]:
        """All GPUs of the certain homes and the `count` nearest of the others, for a known split;
        with their functions' distance to each node."""
        sure, used = 0, []
        for one in certain:
            mine, weight, _ = one.first(one.count)
            sure |= mine
            used.append((one.home, weight))
        by_distance: dict[int, list[tuple[Home | None, int, int]]] = {}
        for one in homes:
            distance = 0
            if one.home is not None:
                row = one.home.to_node
                distance = sum(n * row[p] for n, p in zip(groups, positions, strict=True))
            for weight, gpus in one.by_weight:
                by_distance.setdefault(weight * distance, []).append((one.home, weight, gpus))
        tied: tuple[tuple[int, int], ...] = ()
        for distance in sorted(by_distance):
            here = 0
            for home, weight, gpus in by_distance[distance]:
                here |= gpus
                used.append((home, weight * min(count, gpus.bit_count())))
                count -= min(count, gpus.bit_count())
            wanted = self.problem.options.count - sure.bit_count()
            if here.bit_count() > wanted:
                tied = ((here, wanted),)
                break
            sure |= here
            if not count:
                break
        return GpuSelection(sure, tied), distance_rows(used, positions)


def _nearest(
    ranges: Sequence[GroupRange], weights: Sequence[int], groups: int
) -> tuple[tuple[GroupRange, ...], int]:
    """The ranges narrowed to the splits of least sum of groups times weight, and that sum."""
    left = groups - sum(one.least for one in ranges)
    total = sum(one.least * weight for one, weight in zip(ranges, weights, strict=True))
    if not left:
        return tuple(ranges), total
    narrowed = [GroupRange(one.least, one.least) for one in ranges]
    for weight in sorted(set(weights)):
        if not left:
            break
        here = [i for i, other in enumerate(weights) if other == weight]
        room = sum(ranges[i].most - ranges[i].least for i in here)
        for i in here:
            narrowed[i] = GroupRange(ranges[i].most, ranges[i].most) if room <= left else ranges[i]
        total += min(room, left) * weight
        left -= min(room, left)
    return tuple(narrowed), total


def _distinct(found: Sequence[Placing]) -> list[Placing]:
    """The best placing of each set of nodes but the first one's, in the order given."""
    by_nodes: dict[tuple[int, ...], Placing] = {}
    for placing in found:
        by_nodes.setdefault(placing.cost.nodes, placing)
    return list(by_nodes.values())[1:]
