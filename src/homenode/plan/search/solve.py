"""Solve: the nodes, the groups on each and the GPUs of least cost, for one search problem.

The first terms of the cost depend on the set of nodes alone, once each set is given the GPUs that
suit it best. So sets of nodes are compared by these first (candidates.py lists them), and only the
best are worked out: the split over the nodes, then the GPUs. Decision 0010.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.plan.bit_sets import members
from homenode.plan.devices.options import DeviceOptions
from homenode.plan.search.candidates import Candidates
from homenode.plan.search.cell_sizes import GroupRange
from homenode.plan.search.cost import Cost
from homenode.plan.search.cost import terms as cost_terms
from homenode.plan.search.gpu_choice import Choice, NearestGpus, steps_of_distances
from homenode.plan.search.problem import SearchProblem, Split, Work
from homenode.plan.search.split import least_split

MOST_RUNNERS_UP = 3

STEPS_OF_COST = 20  # to work out one choice of GPUs and groups, next to those for each node
STEPS_TO_EXPLAIN = 20_000  # for the runners-up, which no plan depends on


class Placing(Struct, frozen=True, kw_only=True):
    """One candidate. gpus: bits of problem.devices.options.gpus that were chosen."""

    split: Split
    gpus: int
    cost: Cost

    @property
    def nodes(self) -> int:
        """As bits."""
        return sum(1 << node for node, _ in self.split)


class Solution(Struct, frozen=True, kw_only=True):
    """The placing of least cost. optimal: None where not all were compared.

    runners_up: works out other sets of nodes, best first, at most MOST_RUNNERS_UP.
    """

    best: Placing
    optimal: bool | None
    runners_up: Callable[[], Sequence[Placing]]


_COSTS_OF_EQUALITY = frozenset(
    "device_class packages_spanned gpus_away_from_home nodes_spanned minus_nodes_spanned".split()
)
"""Terms of which equal cells may cost no more than unequal ones, as far as the policy has them."""


def solve(problem: SearchProblem, work: Work) -> tuple[Solution | None, bool]:
    """(the solution of least cost, None where none was found; whether it is known that none fits
    where none was found). Same problem and work, same solution.

    Equal cells are preferred while they cost no class of device distance, no package, no GPU its
    home and no further node, nor, where many are wanted, one fewer. Else they are a runner-up.
    """
    if sum(problem.capacities) < problem.groups:
        return None, True
    uneven = _Search(problem, work, equal=False)
    found = _preferred(problem, work, uneven)
    return found, found is not None or uneven.knows_refusal


def _preferred(problem: SearchProblem, work: Work, uneven: "_Search") -> Solution | None:
    """The solution with equal cells, where these cost no more than they may; else that of all. The
    sets of nodes are compared first, so that only one of the two is worked out."""
    equal = _Search(problem, work, equal=True)
    if not problem.equal or not equal.ranked:
        found = uneven.solution()
        is_sure = not problem.equal or equal.knows_refusal
        return found if is_sure or found is None else replace(found, optimal=None)
    is_sure = uneven.candidates.exact
    first = uneven.ranked[0][0] if uneven.ranked else equal.ranked[0][0]
    costs = zip(problem.first, equal.ranked[0][0], first, strict=True)
    if all(mine <= other for name, mine, other in costs if name in _COSTS_OF_EQUALITY):
        preferred = equal.solution()
        return preferred if is_sure or preferred is None else replace(preferred, optimal=None)
    found = uneven.solution()
    assert found is not None, "the nodes of equal cells hold the VM"

    def runners_up() -> tuple[Placing, ...]:
        alike = equal.any_placing()  # where the search ended, it may have come to the same one
        others = [one for one in found.runners_up() if one.cost != alike.cost]
        first = () if alike.cost == found.best.cost else (alike,)
        return (*first, *others)[:MOST_RUNNERS_UP]

    is_known = found.optimal if equal.candidates.exact else None
    return replace(found, optimal=is_known, runners_up=runners_up)


def may_be_nearer(problem: SearchProblem, cost: Cost) -> bool:
    """Whether the problem may have a placing of nearer devices or of fewer packages than this; a
    few sums, without a search."""
    return not _Search(problem, Work(0), equal=False).cannot_be_nearer(cost._asdict())


def fits(problem: SearchProblem) -> bool:
    """Whether any set of nodes holds the VM; a few sums, without comparing."""
    return any(True for _ in Candidates(problem, equal=False).any_set())


def solve_fixed(problem: SearchProblem, splits: Iterable[Split], work: Work) -> Solution | None:
    """The best of these splits, with the GPUs that suit it best."""
    search = _Search(problem, work, equal=False)
    found = []
    for split in splits:
        nodes = sum(1 << node for node, _ in split)
        first = problem.first_terms(nodes) if problem.has_slots(nodes) else None
        if first is not None:
            placing = search.work_out(nodes, search.nearest.choices(nodes, _fixed(split)))
            found.append((first, search.rest_of(placing), placing))
    found.sort(key=lambda item: item[:2])
    if not found:
        return None
    placings = [placing for *_, placing in found]
    is_exact = search.exact and search.nearest.exact
    best_of: dict[int, Placing] = {}
    for placing in placings:
        best_of.setdefault(placing.nodes, placing)
    return Solution(
        best=placings[0],
        optimal=True if is_exact else None,
        runners_up=lambda: list(best_of.values())[1 : 1 + MOST_RUNNERS_UP],
    )


def without_first_gpu(
    problem: SearchProblem, best: Placing, *, keeps_split: bool
) -> Placing | None:
    """The best on the same nodes without the first of the GPUs that were chosen; None where there
    is none. keeps_split: cells are given one by one; else it may be another one."""
    options, without = problem.devices.options, best.gpus & -best.gpus
    fewer = options.among(one & ~without for one in options.groups) if without else None
    return best_on(problem, best, fewer, keeps_split=keeps_split) if fewer else None


def best_on(
    problem: SearchProblem, other: Placing, options: DeviceOptions, *, keeps_split: bool
) -> Placing | None:
    """The best on the nodes of another placing, of these GPUs; None where these are too far."""
    problem = replace(problem, devices=replace(problem.devices, options=options))
    nodes = other.nodes
    if problem.first_terms(nodes) is None:
        return None
    is_equal = problem.equal and len({groups for _, groups in other.split}) == 1
    search = _Search(problem, Work(STEPS_TO_EXPLAIN), equal=is_equal)
    ranges = _fixed(other.split) if keeps_split else search.ranges(nodes)
    return search.work_out(nodes, search.nearest.choices(nodes, ranges))


def _fixed(split: Split) -> tuple[GroupRange, ...]:
    return tuple([GroupRange(groups, groups) for _, groups in split])


class _Search:
    """One search, over equal splits or over all. knows_refusal: where no set of nodes was found,
    none holds the VM."""

    def __init__(self, problem: SearchProblem, work: Work, *, equal: bool) -> None:
        self.problem, self.work = problem, work
        self.equal = equal
        self.exact = True
        self.knows_refusal = True
        self.candidates = Candidates(problem, equal=equal)
        self.nearest = NearestGpus(problem, work)
        self._placings: dict[tuple[Any, ...], Placing] = {}

    @cached_property
    def ranked(self) -> list[tuple[tuple[int, ...], int]]:
        """(first terms, nodes) of sets of nodes that hold the VM, the least first: at least all of
        the least terms."""
        found: list[tuple[tuple[int, ...], int]] = []
        least: list[tuple[int, ...]] = []
        for bound, sets in self.candidates.groups():
            if least and bound > least[0][: len(bound)]:
                break
            for nodes in sets:
                terms = self.problem.first_terms(
                    nodes, least[-1] if len(least) > MOST_RUNNERS_UP else ()
                )
                if terms is not None:
                    found.append((terms, nodes))
                    insort(least, terms)
                    del least[MOST_RUNNERS_UP + 1 :]
        self.knows_refusal = bool(found) or self.candidates.exact
        found.sort()
        return found

    def cannot_be_nearer(self, cost: Mapping[str, int]) -> bool:
        """Whether no split could cost fewer packages, nearer devices or more homes; a few sums."""
        if cost.get("gpus_away_from_home"):
            return False
        bound, _ = next(self.candidates.groups(), ((), ()))
        return bound == tuple([cost.get(name) for name in ("device_class", "packages_spanned")])

    # The rest: the split and the GPUs of one set of nodes.

    def solution(self) -> Solution | None:
        """The placing of least cost. Not kept: its runners-up ask this search."""
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
        each = steps_of_distances(tied[0].bit_count(), len(self.problem.devices.gpu_homes))
        affordable = 1 + max(0, self.work.left) // each
        are_all = len(tied) <= affordable
        others, tied = tied[affordable:] + others, tied[:affordable]
        bounds: dict[int, int] = {}
        if len(tied) > 1:
            bounds = {nodes: self.nearest.bound(nodes, self.ranges(nodes)) for nodes in tied}
            tied.sort(key=bounds.__getitem__)
        done: list[Placing] = []
        far: list[int] = []
        best: tuple[Any, ...] = ()
        for nodes in tied:
            is_far = bool(done) and bounds[nodes] > self._placings[best].cost.device_distance
            is_over = bool(done) and self.work.left <= 0
            self.exact &= is_far or not is_over
            key = None if is_far or is_over else self._cost_on(nodes, best)
            if key is None:
                far.append(nodes)
            else:
                done.append(self._placings[key])
                best = min(best or key, key)
        done.sort(key=self.key)
        far.sort(key=bounds.__getitem__)
        is_exact = are_all and self.candidates.exact and self.exact and self.nearest.exact
        placing = self._placings[best]
        return Solution(
            best=placing,
            optimal=True if is_exact else None,
            runners_up=lambda: self._runners_up(placing.nodes, done, [*far, *others]),
        )

    def any_placing(self) -> Placing:
        """On nodes of the least first terms."""
        nodes = self.ranked[0][1]
        return self.work_out(nodes, self.nearest.choices(nodes, self.ranges(nodes)))

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The terms in their order, up to the indices of the nodes."""
        names = (*self.problem.first, *self.problem.rest)
        return names[: names.index("nodes") + 1]

    def key(self, placing: Placing) -> tuple[Any, ...]:
        """What it costs, up to the indices of its nodes."""
        return tuple([term.value for term in cost_terms(placing.cost, self._names)])

    def _cost_on(self, nodes: int, most: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What the best placing on these nodes (bits) costs; None where it is more than `most`."""
        known, farthest = self.problem.first_terms(nodes, most), None
        if known is None:
            return None
        if self.problem.even_splits:
            self.work.spend(STEPS_OF_COST + nodes.bit_count())
            known += self.candidates.splits(nodes).sizes
        if most and most[: len(known)] < known:
            return None
        if known == most[: len(known)] and "device_distance" in self._names:
            farthest = most[self._names.index("device_distance")]
        choices = self.nearest.choices(nodes, self.ranges(nodes), farthest)
        if not choices:
            return None
        placing = self.work_out(nodes, choices)
        key = self.key(placing)
        known_one = self._placings.setdefault(key, placing)
        self._placings[key] = min(placing, known_one, key=self.rest_of)
        return key

    def ranges(self, nodes: int) -> tuple[GroupRange, ...]:
        """The splits over these nodes (bits) that may be the best."""
        return self.candidates.splits(nodes).ranges

    def _runners_up(
        self, best: int, done: Sequence[Placing], others: Sequence[int]
    ) -> list[Placing]:
        """Sets of nodes next to the best one: those worked out, then others, best first."""
        runners = [one for one in done if one.nodes != best][:MOST_RUNNERS_UP]
        nearest = self.nearest = NearestGpus(self.problem, Work(STEPS_TO_EXPLAIN))
        for nodes in [one for one in others if one != best][: MOST_RUNNERS_UP - len(runners)]:
            runners.append(self.work_out(nodes, nearest.choices(nodes, self.ranges(nodes))))
        return runners

    @cached_property
    def rest_of(self) -> Callable[[Placing], tuple[object, ...]]:
        """The terms of a placing that come after the first ones."""
        terms = itemgetter(*(Cost._fields.index(name) for name in self.problem.rest))
        return lambda placing: terms(placing.cost)

    def work_out(self, nodes: int, choices: Sequence[Choice]) -> Placing:
        """The best placing on one set of nodes, of choices that are equally near. What GPU sets
        lose comes before the terms of the split, so that few splits are compared."""
        problem = self.problem
        positions = tuple(members(nodes))
        nearness = (problem.devices.device_class(nodes), problem.devices.away(nodes))
        chosen = [problem.devices.options.least_lost(one.sure, one.tied) for one in choices]
        self.exact &= all(one.is_complete for one in chosen)
        fewest = min((one.link_groups, one.sets_lost) for one in chosen)
        splits: dict[tuple[GroupRange, ...], Split] = {}
        found = []
        for (distance, _, _, ranges), gpus in zip(choices, chosen, strict=True):
            if (gpus.link_groups, gpus.sets_lost) != fewest:
                continue
            if ranges not in splits:
                splits[ranges], is_exact = least_split(problem, positions, ranges, self.work)
                self.exact &= is_exact
            if not problem.devices.options.has_gpus:
                gpus = gpus._replace(sets_lost=(nodes & problem.devices.gpu_nodes).bit_count())
            split = splits[ranges]
            self.work.spend(STEPS_OF_COST + 2 * len(split))
            cost = problem.cost(split, gpus, nearness, distance)
            found.append(Placing(split=split, gpus=gpus.gpus, cost=cost))
        return min(found, key=self.rest_of)
