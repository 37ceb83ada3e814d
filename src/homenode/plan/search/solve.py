"""Solve: the nodes, the groups on each and the GPUs of least cost, for one search problem.

The first terms of the cost depend on the set of nodes alone, once each set is given the GPUs that
suit it best. So sets of nodes are compared by these first (candidates.py lists them), and only the
best are worked out: the split over the nodes, then the GPUs. docs/decisions/0010.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import add, itemgetter
from typing import NamedTuple

from homenode.plan.search.candidates import Candidates
from homenode.plan.search.cost import Cost
from homenode.plan.search.distances import members
from homenode.plan.search.first_terms import FirstTerms
from homenode.plan.search.gpu_choice import GpuSelection, gpu_choices
from homenode.plan.search.problem import SearchProblem, Split
from homenode.plan.search.split import GroupRange, least_split
from homenode.topology import LOCAL_DISTANCE

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
            placing = search.work_out(nodes, choices)
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
        done = [self.work_out(*item) for item in near]
        done.sort(key=self.rest_of)
        is_exact = self.exact and self.candidates.exact
        if not is_exact:
            is_exact = self.candidates.is_least(done[0].cost) and len(tied) <= MOST_WORKED_OUT
        runners = _distinct(done)
        more = (nodes for nodes in (*(nodes for nodes, _ in choices[len(near) :]), *others))
        for nodes in islice(more, max(0, MOST_RUNNERS_UP - len(runners))):
            runners.append(self.work_out(nodes, self.choices(nodes)))
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
        is_fixed = all(one.least == one.most for one in ranges)
        split = tuple(one.least for one in ranges) if is_fixed else None
        selections, is_complete = gpu_choices(self.terms, nodes, split)
        self.exact &= is_complete
        if "device_distance" not in problem.rest:
            return [Choice(0, gpus, ranges) for gpus in selections]
        named = [self.terms.named_rows[node] for node in positions]
        least: list[tuple[GpuSelection, list[int]]] = []
        nearest: int | None = None
        for gpus in selections:
            weights = list(map(add, named, gpus.rows))
            distance = _least_distance(ranges, weights, problem.groups)
            if nearest is None or distance < nearest:
                least, nearest = [], distance
            if distance == nearest:
                least.append((gpus, weights))
        return [
            Choice(nearest or 0, gpus, _nearest(ranges, weights, problem.groups))
            for gpus, weights in least
        ]

    def work_out(self, nodes: int, choices: Sequence[Choice]) -> Placing:
        """The best placing on one set of nodes, of choices that are equally near. What GPU sets
        lose comes before the terms of the split, so that few splits are compared."""
        problem = self.problem
        positions = tuple(members(nodes))
        packages = problem.distances.packages_of(nodes)
        nearness = (self.terms.device_class(packages), self.terms.away(nodes))
        chosen = [problem.options.least_lost(gpus.sure, gpus.tied) for _, gpus, _ in choices]
        self.exact &= all(one.is_complete for one in chosen)
        fewest = min((one.link_groups, one.sets_lost) for one in chosen)
        splits: dict[tuple[GroupRange, ...], Split] = {}
        found = []
        for (distance, _, ranges), gpus in zip(choices, chosen, strict=True):
            if (gpus.link_groups, gpus.sets_lost) != fewest:
                continue
            if ranges not in splits:
                splits[ranges], is_exact = least_split(problem, positions, ranges)
                self.exact &= is_exact
            if not problem.options.has_gpus:
                gpus = gpus._replace(sets_lost=(nodes & problem.gpu_nodes).bit_count())
            split = splits[ranges]
            cost = problem.cost(split, gpus, nearness, distance)
            found.append(Placing(split, gpus.gpus, cost))
        return min(found, key=self.rest_of)


def _least_distance(ranges: Sequence[GroupRange], weights: Sequence[int], groups: int) -> int:
    """The least sum of groups times weight."""
    total, left = 0, groups
    for (least, _), weight in zip(ranges, weights, strict=True):
        total += least * weight
        left -= least
    for weight, (least, most) in sorted(zip(weights, ranges, strict=True)) if left else ():
        more = min(most - least, left)
        total += more * weight
        left -= more
        if not left:
            break
    return total


def _nearest(
    ranges: Sequence[GroupRange], weights: Sequence[int], groups: int
) -> tuple[GroupRange, ...]:
    """The ranges narrowed to the splits of least sum of groups times weight."""
    left = groups - sum(one.least for one in ranges)
    if not left:
        return tuple(ranges)
    narrowed = [GroupRange(one.least, one.least) for one in ranges]
    for weight in sorted(set(weights)):
        if not left:
            break
        here = [i for i, other in enumerate(weights) if other == weight]
        space = sum(ranges[i].most - ranges[i].least for i in here)
        for i in here:
            narrowed[i] = GroupRange(ranges[i].most, ranges[i].most) if space <= left else ranges[i]
        left -= min(space, left)
    return tuple(narrowed)


def _distinct(found: Sequence[Placing]) -> list[Placing]:
    """The best placing of each set of nodes but the first one's, in the order given."""
    by_nodes: dict[tuple[int, ...], Placing] = {}
    for placing in found:
        by_nodes.setdefault(placing.cost.nodes, placing)
    return list(by_nodes.values())[1:]
