"""Solve: the nodes, the groups on each and the GPUs of least cost, for one search problem.

The first terms of the cost depend on the set of nodes alone, once each set is given the GPUs that
suit it best. So sets of nodes are compared by these first (candidates.py lists them), and only the
best are worked out: the split over the nodes, then the GPUs. docs/decisions/0010.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, islice
from math import comb
from operator import add, itemgetter
from typing import NamedTuple

from homenode.plan.search.candidates import Candidates
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.cost import Cost
from homenode.plan.search.distances import members
from homenode.plan.search.first_terms import FirstTerms
from homenode.plan.search.gpu_choice import GpuSelection, gpu_choices
from homenode.plan.search.problem import SearchProblem, Split
from homenode.plan.search.split import least_split

MOST_RUNNERS_UP = 3

MOST_WORKED_OUT = 300
"""Sets of nodes that are equally good by the first terms and are worked out."""

MOST_SPLITS = 70
"""Splits of one set of nodes that are asked one by one for their GPUs."""


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


_COSTS_OF_EQUALITY = (
    "device_class",
    "packages_spanned",
    "gpus_away_from_home",
    "nodes_spanned",
)
"""Terms of which equal cells may cost no more than unequal ones, as far as the policy has them."""


def solve(problem: SearchProblem) -> Solution | None:
    """The solution of least cost, or None where none fits. Same problem, same solution.

    Equal cells are preferred while they cost no class of device distance, no package, no GPU its
    home and no further node. Where they do, they are a runner-up.
    """
    if sum(problem.capacities) < problem.groups:
        return None
    terms = FirstTerms(problem)
    equal = _Search(terms, equal=True)
    preferred = equal.best if problem.equal else None
    uneven = _Search(terms, equal=False)
    if preferred is None:
        return uneven.best
    if uneven.cannot_undercut(preferred.best.cost) or not uneven.ranked:
        return preferred
    costs = zip(problem.first, equal.ranked[0][0], uneven.ranked[0][0], strict=True)
    if all(mine <= least for name, mine, least in costs if name in _COSTS_OF_EQUALITY):
        return preferred
    found = uneven.best
    assert found is not None, "the nodes of equal cells hold the VM"
    runners = (preferred.best, *found.runners_up)
    return Solution(found.best, found.optimal, runners[:MOST_RUNNERS_UP])


def may_be_nearer(problem: SearchProblem, cost: Cost) -> bool:
    """Whether the problem may have a placing of nearer devices or of fewer packages than this; a
    few sums, without a search."""
    return not _Search(FirstTerms(problem), equal=False).cannot_be_nearer(cost)


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
        for bound, sets in self.candidates.groups(self.terms.least_class):
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

    def cannot_be_nearer(self, cost: Cost) -> bool:
        """Whether no split could cost fewer packages, nearer devices or more homes; a few sums."""
        if cost.gpus_away_from_home:
            return False
        bound, _ = next(self.candidates.groups(self.terms.least_class), ((), ()))
        return bound == (cost.device_class, cost.packages_spanned)

    def cannot_undercut(self, cost: Cost) -> bool:
        """Whether no split could cost less of what equal cells may not; a few sums."""
        return cost.nodes_spanned == self.candidates.least_nodes() and self.cannot_be_nearer(cost)

    # The rest: the split and the GPUs of one set of nodes.

    @cached_property
    def best(self) -> Solution | None:
        ranked = self.ranked
        if not ranked:
            return None
        least = ranked[0][0]
        tied = [nodes for terms, nodes in ranked if terms == least]
        others = [nodes for _, nodes in ranked[len(tied) :]]
        if self.problem.even_splits and len(tied) > 1:
            sizes = {nodes: self.candidates.splits(nodes).sizes for nodes in tied}
            tied.sort(key=sizes.__getitem__)
            most = sum(sizes[nodes] == sizes[tied[0]] for nodes in tied)
            tied, others = tied[:most], tied[most:] + others
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
            else self.candidates.splits(nodes).ranges
        )
        named = [self.terms.named_rows[node] for node in positions]
        compares = "device_distance" in problem.rest
        groups = self.terms.home_groups(nodes)
        asks_gpus = compares and problem.options.count
        nearest: int | None = None
        least: list[tuple[GpuSelection, list[int], tuple[GroupRange, ...]]] = []
        for some, split in _few_splits(ranges, problem.groups) if asks_gpus else ((ranges, None),):
            selections, is_complete = gpu_choices(self.terms, groups, nodes, positions, split)
            self.exact &= is_complete
            for gpus in selections:
                weights = list(map(add, named, gpus.rows)) if compares else [0] * len(some)
                distance = _least_distance(some, weights, problem.groups)
                if nearest is None or distance < nearest:
                    least, nearest = [], distance
                if distance == nearest:
                    least.append((gpus, weights, some))
        return [
            Choice(nearest or 0, gpus, _nearest(some, weights, problem.groups))
            for gpus, weights, some in least
        ]

    def work_out(self, nodes: int, choices: Sequence[Choice]) -> Placing:
        """The best placing on one set of nodes, of choices that are equally near. What GPU sets
        lose comes before the terms of the split, so that few splits are compared."""
        problem = self.problem
        positions = tuple(members(nodes))
        nearness = (self.terms.device_class(nodes), self.terms.away(nodes))
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


def _few_splits(
    ranges: tuple[GroupRange, ...], groups: int
) -> Iterator[tuple[tuple[GroupRange, ...], list[int] | None]]:
    """The splits one by one where they are few, as ranges and as groups: the GPUs that are nearest
    to each are known at once, and those that are nearest to one of many are not. Else the ranges as
    they are, and None."""
    low = [one.least for one in ranges]
    wide = [i for i, one in enumerate(ranges) if one.most > one.least]
    more, step = (groups - sum(low)) // ranges[0].step, ranges[0].step
    if any(ranges[i].most - low[i] > step for i in wide) or comb(len(wide), more) > MOST_SPLITS:
        yield ranges, None
        return
    lowest = [GroupRange(one, one) for one in low]
    highest = [GroupRange(one.most, one.most) for one in ranges]
    for chosen in combinations(wide, more):
        split, its_ranges = low.copy(), lowest.copy()
        for i in chosen:
            split[i], its_ranges[i] = ranges[i].most, highest[i]
        yield tuple(its_ranges), split


def _least_distance(ranges: Sequence[GroupRange], weights: Sequence[int], groups: int) -> int:
    """The least sum of groups times weight."""
    total, left = 0, groups
    for (least, *_), weight in zip(ranges, weights, strict=True):
        total += least * weight
        left -= least
    for weight, one in sorted(zip(weights, ranges, strict=True)) if left else ():
        more = min(one.most - one.least, left)
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
    narrowed = [one._replace(most=one.least) for one in ranges]
    for weight in sorted(set(weights)):
        if not left:
            break
        here = [i for i, other in enumerate(weights) if other == weight]
        space = sum(ranges[i].most - ranges[i].least for i in here)
        for i in here:
            narrowed[i] = ranges[i]._replace(least=ranges[i].most) if space <= left else ranges[i]
        left -= min(space, left)
    return tuple(narrowed)


def _distinct(found: Sequence[Placing]) -> list[Placing]:
    """The best placing of each set of nodes but the first one's, in the order given."""
    by_nodes: dict[tuple[int, ...], Placing] = {}
    for placing in found:
        by_nodes.setdefault(placing.cost.nodes, placing)
    return list(by_nodes.values())[1:]
