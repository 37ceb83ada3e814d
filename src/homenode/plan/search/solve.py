"""Solve: the nodes, the groups on each and the GPUs of least cost, for one search problem.

The first terms of the cost depend on the set of nodes alone, once each set is given the GPUs that
suit it best. So sets of nodes are compared by these first (candidates.py lists them), and only the
best are worked out: the split over the nodes, then the GPUs. docs/decisions/0010.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    if not Candidates(problem, equal=False).can_hold():
        return None
    if not problem.equal:
        return _Search(problem, equal=False).best()
    found = _Search(problem, equal=True).best()
    if found is not None and _is_local(found.best.cost):
        return found
    uneven = _Search(problem, equal=False)
    if found is not None and uneven.cannot_beat(found.best.cost):
        return found
    nearness = uneven.least_nearness()
    if nearness is None:
        return found
    if found is not None:
        cost = found.best.cost
        costs = (cost.device_class, cost.packages_spanned, cost.gpus_away_from_home)
        if all(mine <= theirs for mine, theirs in zip(costs, nearness, strict=True)):
            return found
    return uneven.best()


def may_be_nearer(problem: SearchProblem, cost: Cost) -> bool:
    """Whether the problem may have a placing of nearer devices or of fewer packages than this; a
    few sums, without a search."""
    return not _Search(problem, equal=False).cannot_beat(cost)


def _is_local(cost: Cost) -> bool:
    """Whether nothing can be nearer: one package, and all devices and GPUs at home in it."""
    near = cost.device_class <= LOCAL_DISTANCE and cost.gpus_away_from_home == 0
    return cost.packages_spanned == 1 and near


def fits(problem: SearchProblem) -> bool:
    """Whether any set of nodes holds the VM; a few sums, without comparing."""
    return next(Candidates(problem, equal=False).any_set(), None) is not None


def solve_fixed(problem: SearchProblem, splits: Iterable[Split]) -> Solution | None:
    """The best of these splits, with the GPUs that suit it best."""
    search = _Search(problem, equal=False)
    found = []
    for split in splits:
        nodes = sum(1 << node for node, _ in split)
        first = search.first_terms(nodes)
        if first is not None:
            for placing in search._work_out(nodes, None, [groups for _, groups in split]):
                found.append((first, search._rest_of(placing.cost), placing))
    found.sort(key=lambda item: item[:2])
    if not found:
        return None
    placings = [placing for *_, placing in found]
    runners = tuple(_distinct(placings, placings[0])[:MOST_RUNNERS_UP])
    return Solution(placings[0], True if search.exact else None, runners)


class _Search:
    """One search, over equal splits or over all."""

    def __init__(self, problem: SearchProblem, *, equal: bool) -> None:
        self.problem = problem
        self.equal = equal
        self.exact = True
        self.candidates = Candidates(problem, equal=equal)
        options = problem.options
        by_home: dict[int, tuple[Home | None, dict[int, int]]] = {}
        for gpu in options.gpus:
            if options.open >> gpu.number & 1:
                home = problem.gpu_homes[gpu.number]
                weights = by_home.setdefault(id(home), (home, {}))[1]
                weights[gpu.weight] = weights.get(gpu.weight, 0) | 1 << gpu.number
        self.homes = tuple(
            HomeGpus(home, tuple(sorted(weights.items()))) for home, weights in by_home.values()
        )
        self.partitions = self._partitions()
        self._classes: dict[int, tuple[int, int | None]] = {}
        named = Counter(one.home.node for one in problem.named if one.is_gpu)
        self._named_gpu_homes = tuple(named.items())
        self._ranked: list[tuple[tuple[int, ...], int]] | None = None
        self._named_rows = tuple(
            sum(device.home.to_node[node] for device in problem.named)
            for node in range(len(problem.supplies))
        )

    def _partitions(self) -> tuple[tuple[int, tuple[tuple[Home | None, int], ...]], ...]:
        """(GPUs, (home, functions there) …) of each set that may be chosen."""
        sets = self.problem.options.partitions
        if sets is None:
            return ()
        result = []
        for gpus in sets:
            there: dict[int, tuple[Home | None, int]] = {}
            for number in members(gpus):
                home = self.problem.gpu_homes[number]
                weight = self.problem.options.gpus[number].weight
                there[id(home)] = (home, there.get(id(home), (home, 0))[1] + weight)
            result.append((gpus, tuple(there.values())))
        return tuple(result)

    # The first terms: what a set of nodes comes to with the GPUs that suit it best.

    def device_class(self, packages: int) -> int:
        """The class of the worst device, for a set of packages (bits)."""
        known = self._classes.get(packages)
        if known is None:
            known = self._device_class(packages)
            self._classes[packages] = known
        return known[0]

    def _limit(self, packages: int) -> int | None:
        """The greatest class of a chosen GPU; None without a choice."""
        self.device_class(packages)
        return self._classes[packages][1]

    def _device_class(self, packages: int) -> tuple[int, int | None]:
        problem = self.problem

        def nearest(home: Home | None) -> int:
            return 0 if home is None else min(home.to_package[p] for p in members(packages))

        pulling = {id(one.home): one.home for one in problem.named if one.pulls}
        worst = max(map(nearest, pulling.values()), default=0)
        count = problem.options.count
        if not count:
            return worst, None
        if self.partitions:
            limit = min(max(nearest(home) for home, _ in homes) for _, homes in self.partitions)
            return max(worst, limit), max(worst, limit)
        for limit, home in sorted(
            ((nearest(one.home), one) for one in self.homes), key=lambda item: item[0]
        ):
            count -= home.count
            if count <= 0:
                # What named devices cost anyway costs nothing more.
                return max(worst, limit), max(worst, limit)
        return worst, worst

    def away(self, nodes: int, packages: int) -> int:
        """GPUs away from home, for a set of nodes (bits) in these packages (bits)."""
        problem = self.problem
        away = sum(count for home, count in self._named_gpu_homes if not home & nodes)
        count = problem.options.count
        if not count:
            return away
        if self.partitions:
            return away + min(
                self._set_away(gpus, nodes) for gpus in self._near_partitions(packages)
            )
        at_home = sum(one.count for one in self.homes if one.home is None or one.home.node & nodes)
        return away + max(0, count - at_home)

    def _near_partitions(self, packages: int) -> Iterator[int]:
        limit = self._limit(packages) or 0
        for gpus, homes in self.partitions:
            if all(
                home is None or min(home.to_package[p] for p in members(packages)) <= limit
                for home, _ in homes
            ):
                yield gpus

    def _set_away(self, gpus: int, nodes: int) -> int:
        homes = (self.problem.gpu_homes[number] for number in members(gpus))
        return sum(home is not None and not home.node & nodes for home in homes)

    def first_terms(
        self, nodes: int, most: tuple[int, ...] | None = None
    ) -> tuple[int, ...] | None:
        """The first terms of a set of nodes; None where a GPU must not be away and is, and where
        they are more than `most`."""
        candidates, problem = self.candidates, self.problem
        packages = candidates.packages_of(nodes)
        away = self.away(nodes, packages) if problem.named or problem.options.count else 0
        if away and problem.requires_home:
            return None
        result = []
        for name in problem.first:
            if name == "device_class":
                result.append(self.device_class(packages))
            elif name == "packages_spanned":
                result.append(packages.bit_count())
            elif name == "gpus_away_from_home":
                result.append(away)
            elif name == "node_distance":
                result.append(candidates.distance(nodes))
            else:
                number = nodes.bit_count()
                result.append(-number if name == "minus_nodes_spanned" else number)
            if most is not None and tuple(result) > most[: len(result)]:
                return None
        return tuple(result)

    def ranked(self) -> list[tuple[tuple[int, ...], int]]:
        """(first terms, nodes) of sets of nodes that hold the VM, the least first: at least all of
        the least terms."""
        if self._ranked is None:
            found = []
            least: list[tuple[int, ...]] = []
            for bound, sets in self.candidates.groups(self.device_class):
                if least and bound > least[0][: len(bound)]:
                    break
                for nodes in sets:
                    most = least[-1] if len(least) > MOST_RUNNERS_UP else None
                    terms = self.first_terms(nodes, most)
                    if terms is not None:
                        found.append((terms, nodes))
                        insort(least, terms)
                        del least[MOST_RUNNERS_UP + 1 :]
            found.sort()
            self._ranked = found
        return self._ranked

    def least_nearness(self) -> tuple[int, int, int] | None:
        """(device class, packages, GPUs away) of the best set of nodes; None where none fits."""
        ranked = self.ranked()
        if not ranked:
            return None
        if "device_class" not in self.problem.first:
            found = self.best()
            cost = None if found is None else found.best.cost
            return cost and (cost.device_class, cost.packages_spanned, cost.gpus_away_from_home)
        nodes = ranked[0][1]
        packages = self.candidates.packages_of(nodes)
        return (
            self.device_class(packages), packages.bit_count(), self.away(nodes, packages),
        )  # fmt: skip

    def cannot_beat(self, cost: Cost) -> bool:
        """Whether no split could cost fewer packages, nearer devices or more homes."""
        bound, _ = next(self.candidates.groups(self.device_class), ((), ()))
        here = cost.device_class, cost.packages_spanned
        return bound == here and cost.gpus_away_from_home == 0

    # The rest: the split and the GPUs of one set of nodes.

    def best(self) -> Solution | None:
        ranked = self.ranked()
        if not ranked:
            return None
        least = ranked[0][0]
        tied = [nodes for terms, nodes in ranked if terms == least]
        if len(tied) > MOST_WORKED_OUT:
            tied = tied[:MOST_WORKED_OUT]
            self.exact = False
        done: list[tuple[tuple[object, ...], Placing]] = []
        bound: int | None = None
        for nodes in tied:
            for placing in self._work_out(nodes, bound):
                done.append((self._rest_of(placing.cost), placing))
                if "device_distance" in self.problem.rest:
                    bound = (
                        placing.cost.device_distance
                        if bound is None
                        else min(bound, placing.cost.device_distance)
                    )
        if not done:
            return None
        done.sort(key=lambda item: item[0])
        best = done[0][1]
        runners = _distinct([placing for _, placing in done], best)
        for _, nodes in ranked:
            if len(runners) >= MOST_RUNNERS_UP:
                break
            if nodes not in tied:
                more = list(self._work_out(nodes, None))
                more.sort(key=lambda placing: self._rest_of(placing.cost))
                runners += _distinct(more[:1], best)
        is_exact = self.exact and self.candidates.exact
        if not is_exact:
            is_exact = self.candidates.is_least(best.cost) and len(tied) <= MOST_WORKED_OUT
        return Solution(best, True if is_exact else None, tuple(runners[:MOST_RUNNERS_UP]))

    def _rest_of(self, cost: Cost) -> tuple[object, ...]:
        return tuple(getattr(cost, name) for name in self.problem.rest)

    def _work_out(
        self, nodes: int, bound: int | None, fixed: Sequence[int] = ()
    ) -> Iterator[Placing]:
        """The best placings on one set of nodes; none where all cost more than `bound` in
        device_distance. fixed: the groups of each node, where they are given."""
        problem = self.problem
        positions = tuple(members(nodes))
        packages = self.candidates.packages_of(nodes)
        nearness = (self.device_class(packages), self.away(nodes, packages))
        ranges = (
            tuple(GroupRange(groups, groups) for groups in fixed)
            if fixed
            else self.candidates.ranges(positions)
        )
        found: list[tuple[int, GpuSelection, tuple[GroupRange, ...]]] = []
        for gpus, rows in self._gpu_choices(nodes, packages, ranges):
            weighted = [
                self._named_rows[node] + row for node, row in zip(positions, rows, strict=True)
            ]
            narrowed, distance = _nearest(ranges, weighted, problem.groups)
            if "device_distance" not in problem.rest:
                narrowed, distance = ranges, 0
            found.append((distance, gpus, narrowed))
        if not found:
            return
        least = min(distance for distance, *_ in found)
        if bound is not None and least > bound:
            return
        for distance, gpus, narrowed in found:
            if distance != least:
                continue
            chosen = problem.options.least_lost(gpus.sure, gpus.tied)
            if not problem.options.has_gpus:
                lost = (nodes & problem.gpu_nodes).bit_count()
                chosen = chosen._replace(sets_lost=lost)
            split, exact = least_split(problem, positions, narrowed)
            self.exact &= chosen.is_complete and exact
            cost = problem.cost(split, chosen, nearness, distance)
            yield Placing(split, chosen.gpus, cost)

    def _gpu_choices(
        self, nodes: int, packages: int, ranges: Sequence[GroupRange]
    ) -> Iterator[tuple[GpuSelection, tuple[int, ...]]]:
        """Choices of GPUs as near as can be, each with its functions' distance to each node."""
        problem = self.problem
        positions = tuple(members(nodes))
        nothing = (0,) * len(positions)
        if not problem.options.count:
            yield GpuSelection(0), nothing
            return
        if self.partitions:
            weights = dict(self.partitions)
            near = list(self._near_partitions(packages))
            least = min(self._set_away(gpus, nodes) for gpus in near)
            for gpus in near:
                if self._set_away(gpus, nodes) == least:
                    yield GpuSelection(gpus), distance_rows(weights[gpus], positions)
            return
        limit = self._limit(packages) or 0
        at_home = [one for one in self.homes if one.home is None or one.home.node & nodes]
        others = [
            one
            for one in self.homes
            if one not in at_home
            and one.home is not None
            and min(one.home.to_package[p] for p in members(packages)) <= limit
        ]
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


def _distinct(found: Sequence[Placing], best: Placing) -> list[Placing]:
    """The best placing of each other set of nodes, in the order given."""
    by_nodes: dict[tuple[int, ...], Placing] = {}
    for placing in found:
        if placing.cost.nodes != best.cost.nodes:
            by_nodes.setdefault(placing.cost.nodes, placing)
    return list(by_nodes.values())
