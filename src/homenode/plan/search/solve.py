"""Solve: find the nodes, their groups and the GPUs of least cost for one search problem.

The first terms of the cost depend on the set of nodes alone, if each set gets its best GPUs. So
sets of nodes (listed by node_sets.py) are compared by these terms first. For the sets with the
least terms the split and the GPUs are computed, in the order of a lower bound of their cost, until
no other set can cost less. Decision 0010.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import list_members
from homenode.plan.devices.options import GpuChoice
from homenode.plan.placement import Cost
from homenode.plan.search.gpu_choice import NearestChoice, NearestGpus
from homenode.plan.search.node_sets import Bounded, NodeSets
from homenode.plan.search.problem import SearchProblem, Split
from homenode.plan.search.split import find_least_split
from homenode.plan.search.supply import GroupRange

MAX_RUNNERS_UP = 3


class Candidate(Struct, frozen=True, kw_only=True):
    """A possible placement."""

    split: Split
    gpus: int  # bits of problem.devices.options.gpus that were chosen
    cost: Cost

    @property
    def nodes(self) -> int:
        return sum(1 << node for node, _ in self.split)


class Solution(Struct, frozen=True, kw_only=True):
    """The candidate of least cost."""

    best: Candidate
    optimal: bool | None  # None if not all candidates were compared
    # returns other sets of nodes, best first, at most MAX_RUNNERS_UP
    runners_up: Callable[[], Sequence[Candidate]]


_COSTS_OF_EQUALITY = frozenset(
    "device_class packages_spanned gpus_away_from_home nodes_spanned minus_nodes_spanned".split()
)
"""Terms of the policy in which equal cells may not cost more than unequal cells."""


def solve(problem: SearchProblem) -> tuple[Solution | None, bool]:
    """Return (the solution of least cost or None; whether it is certain that nothing fits).

    Equal cells are preferred if they do not worsen the class of device distance, the packages, the
    GPUs at home or the number of nodes. Else they are a runner-up.
    """
    if sum(problem.capacities) < problem.groups:
        return None, True
    uneven = _Search(problem, equal=False)
    solution = _prefer_equal(problem, uneven)
    return solution, solution is not None or uneven.knows_refusal


def _prefer_equal(problem: SearchProblem, uneven: "_Search") -> Solution | None:
    """Return the solution with equal cells, if they cost no more than allowed; else of all cells.
    Sets of nodes are compared first, so that only one of the two is computed."""
    even_search = _Search(problem, equal=True)
    if not problem.equal or not even_search.node_sets_by_terms:
        solution = uneven.solution()
        is_sure = not problem.equal or even_search.knows_refusal
        return solution if is_sure or solution is None else replace(solution, optimal=None)
    least, nodes = even_search.node_sets_by_terms[0]
    if nodes.bit_count() == 1 and least[: len(uneven.bound)] <= uneven.bound:
        return even_search.solution()  # one node is always equal, several nodes are not nearer
    is_sure = uneven.node_sets.exact
    first = uneven.node_sets_by_terms[0][0] if uneven.node_sets_by_terms else least
    costs = zip(problem.first, least, first, strict=True)
    if all(cost <= other for name, cost, other in costs if name in _COSTS_OF_EQUALITY):
        preferred = even_search.solution()
        return preferred if is_sure or preferred is None else replace(preferred, optimal=None)
    solution = uneven.solution()
    assert solution is not None, "the nodes of equal guest NUMA nodes hold the VM"

    def runners_up() -> tuple[Candidate, ...]:
        equal_candidate = even_search.best_on(nodes)  # it may be the same if a search ended early
        unequal = [
            candidate
            for candidate in solution.runners_up()
            if candidate.cost != equal_candidate.cost
        ]
        first = () if equal_candidate.cost == solution.best.cost else (equal_candidate,)
        return (*first, *unequal)[:MAX_RUNNERS_UP]

    is_known = solution.optimal if even_search.node_sets.exact else None
    return replace(solution, optimal=is_known, runners_up=runners_up)


def may_be_nearer(problem: SearchProblem, cost: Cost) -> bool:
    """Whether the problem may have a candidate with nearer devices or fewer packages; no search."""
    return not _Search(problem, equal=False).cannot_be_nearer(cost._asdict())


def fits(problem: SearchProblem) -> bool:
    """Return whether any set of nodes holds the VM, without comparing sets."""
    return any(True for _ in NodeSets(problem, equal=False).any_set())


def solve_fixed(problem: SearchProblem, splits: Iterable[Split]) -> Solution | None:
    """Return the best of these splits with its best GPUs."""
    search = _Search(problem, equal=False)
    node_sets_by_terms = []
    for split in splits:
        nodes = sum(1 << node for node, _ in split)
        first = problem.first_terms(nodes)
        if first is not None:
            candidate = search.work_out(
                nodes, search.nearest.choices(nodes, _make_exact_ranges(split))
            )
            node_sets_by_terms.append((first, search.rest_of(candidate.cost), candidate))
    node_sets_by_terms.sort(key=lambda item: item[:2])
    if not node_sets_by_terms:
        return None
    candidates = [candidate for *_, candidate in node_sets_by_terms]
    is_exact = search.exact and search.nearest.exact
    best_of: dict[int, Candidate] = {}
    for candidate in candidates:
        best_of.setdefault(candidate.nodes, candidate)
    return Solution(
        best=candidates[0],
        optimal=True if is_exact else None,
        runners_up=lambda: list(best_of.values())[1 : 1 + MAX_RUNNERS_UP],
    )


def without_first_gpu(
    problem: SearchProblem, best: Candidate, *, keeps_split: bool
) -> Candidate | None:
    """Return the best candidate on the same nodes without the first chosen GPU, or None.
    keeps_split: keep the split, as the user gave the cells."""
    options, gpu = problem.devices.options, best.gpus & -best.gpus
    fewer = options.among(group & ~gpu for group in options.groups) if gpu else None
    if fewer is None:
        return None
    problem = replace(problem, devices=replace(problem.devices, options=fewer))
    nodes = best.nodes
    if problem.first_terms(nodes) is None:
        return None
    is_equal = problem.equal and len({groups for _, groups in best.split}) == 1
    search = _Search(problem, equal=is_equal)
    ranges = _make_exact_ranges(best.split) if keeps_split else search.ranges(nodes)
    return search.work_out(nodes, search.nearest.choices(nodes, ranges))


def _make_exact_ranges(split: Split) -> tuple[GroupRange, ...]:
    return tuple([GroupRange(groups, groups) for _, groups in split])


class _Search:
    """A search over equal or all splits. exact: no candidate has been skipped so far."""

    def __init__(self, problem: SearchProblem, *, equal: bool) -> None:
        self.problem, self.exact = problem, True
        self.node_sets = NodeSets(problem, equal=equal)
        self.nearest = NearestGpus(problem)
        self._terms_of_nodes: dict[int, tuple[int, ...]] = {}
        self._least: list[tuple[int, ...]] = []  # terms of the best and its runners-up
        self._ranked = 0  # number of groups of sets whose terms are known

    @cached_property
    def node_sets_by_terms(self) -> list[tuple[tuple[int, ...], int]]:
        """Return (first terms, nodes) of sets that hold the VM, the least first: at least all sets
        with the least terms."""
        return self._rank_node_sets(only_least=True)

    def _rank_node_sets(self, *, only_least: bool) -> list[tuple[tuple[int, ...], int]]:
        """Rank sets of nodes; unless only_least, with all sets whose terms the runners-up have."""
        terms_of_nodes, least = self._terms_of_nodes, self._least
        for bound, sets in self._groups[self._ranked :]:
            limit = least[-1] if len(least) > MAX_RUNNERS_UP else ()
            reached_limit = least[0] if only_least and least else limit
            if reached_limit and bound > reached_limit[: len(bound)]:
                break
            self._ranked += 1
            for nodes in sets:
                terms = None if nodes in terms_of_nodes else self.problem.first_terms(nodes, limit)
                if terms is not None:
                    terms_of_nodes[nodes] = terms
                    insort(least, terms)
                    del least[MAX_RUNNERS_UP + 1 :]
                    limit = least[-1] if len(least) > MAX_RUNNERS_UP else ()
        return sorted((terms, nodes) for nodes, terms in terms_of_nodes.items())

    @property
    def knows_refusal(self) -> bool:
        """Whether it is certain that no set of nodes holds the VM."""
        return bool(self.node_sets_by_terms) or self.node_sets.exact

    def cannot_be_nearer(self, cost: Mapping[str, int]) -> bool:
        """Whether no split could cost fewer packages, nearer devices or more homes; a few sums."""
        if cost.get("gpus_away_from_home"):
            return False
        classes = tuple([cost.get(n) for n in ("device_class", "packages_spanned")])
        return self.bound[:2] == classes

    @cached_property
    def bound(self) -> tuple[int, ...]:
        """Return a lower bound of the first terms, without a search."""
        return self._groups[0][0] if self._groups else ()

    @cached_property
    def _groups(self) -> Sequence[Bounded]:
        return tuple(self.node_sets.groups())

    # Below: the split and the GPUs of one set of nodes.

    def solution(self) -> Solution | None:
        """Return the candidate of least cost. Not cached, as its runners-up use this search."""
        node_sets_by_terms = self.node_sets_by_terms
        if not node_sets_by_terms:
            return None
        tied = [nodes for terms, nodes in node_sets_by_terms if terms == node_sets_by_terms[0][0]]
        bounds: list[tuple[tuple[Any, ...], int]] = [((), nodes) for nodes in tied]
        if tied[0].bit_count() > 1 or self.problem.devices.options.count:
            bounds = sorted((self._least_key(nodes), nodes) for nodes in tied)
        results: list[tuple[tuple[Any, ...], Candidate]] = []
        least: tuple[Any, ...] = ()
        for bound, nodes in bounds:
            if results and bound > least:
                break
            candidate = self.best_on(nodes)
            results.append((self._key(candidate.cost), candidate))
            least = min(least or results[-1][0], results[-1][0])
        candidates = [candidate for _, candidate in sorted(results, key=lambda item: item[0])]
        is_exact = self.node_sets.exact and self.exact and self.nearest.exact
        sets = [nodes for _, nodes in (*bounds[len(results) :], *node_sets_by_terms[len(tied) :])]
        return Solution(
            best=candidates[0],
            optimal=True if is_exact else None,
            runners_up=lambda: self._runners_up(candidates, sets),
        )

    @cached_property
    def _key(self) -> Callable[[Cost], tuple[Any, ...]]:
        """Return the terms of a cost in order, up to the node indices, for sets of equal size, so
        that minus_nodes_spanned is ignored."""
        names = [name for name in (*self.problem.first, *self.problem.later) if name[:5] != "minus"]
        return attrgetter(*names[: names.index("nodes") + 1])

    @cached_property
    def rest_of(self) -> Callable[[Cost], tuple[object, ...]]:
        """Return the terms of a cost after the first terms."""
        return attrgetter(*self.problem.later)

    def _least_key(self, nodes: int) -> tuple[Any, ...]:
        """Return a lower bound of all candidates on these nodes (bits): each node has its least
        number of groups, and the GPUs are the nearest and split no set."""
        problem, splits = self.problem, self.node_sets.splits(nodes)
        ranges = [bounds.lowest for bounds in splits.ranges]
        split = tuple(zip(list_members(nodes), ranges, strict=True))
        nearness = (problem.devices.device_class(nodes), problem.devices.away(nodes))
        gpus = GpuChoice(0, self._gpu_nodes(nodes), is_complete=True)
        cost = problem.cost(
            split, gpus, nearness, self.nearest.least_distance(nodes, splits.ranges)
        )
        sockets = problem.groups // splits.ranges[0].step
        return self._key(cost._replace(unevenness=splits.unevenness, guest_sockets=sockets))

    def _gpu_nodes(self, nodes: int) -> int:
        """Return the nodes with free GPUs that a VM without GPUs takes."""
        devices = self.problem.devices
        return 0 if devices.options.has_gpus else (nodes & devices.gpu_nodes).bit_count()

    def ranges(self, nodes: int) -> tuple[GroupRange, ...]:
        """Return the splits over these nodes (bits) that may be best."""
        return self.node_sets.splits(nodes).ranges

    def _runners_up(self, candidates: Sequence[Candidate], sets: Sequence[int]) -> list[Candidate]:
        """Return the best other sets of nodes: computed sets, then further sets, best first."""
        runners = list(candidates[1 : 1 + MAX_RUNNERS_UP])
        tried_nodes = {candidate.nodes for candidate in candidates}
        if len(runners) + len(sets) < MAX_RUNNERS_UP:
            sets = [*sets, *(nodes for _, nodes in self._rank_node_sets(only_least=False))]
        for nodes in dict.fromkeys(sets):
            if len(runners) < MAX_RUNNERS_UP and nodes not in tried_nodes:
                runners.append(self.best_on(nodes))
        return runners

    def best_on(self, nodes: int) -> Candidate:
        """Return the best candidate on one set of nodes (bits)."""
        return self.work_out(nodes, self.nearest.choices(nodes, self.ranges(nodes)))

    def work_out(self, nodes: int, choices: Sequence[NearestChoice]) -> Candidate:
        """Return the best candidate on one set of nodes among equally near choices. Lost GPU sets
        come before the terms of the split, so few splits are compared."""
        problem = self.problem
        positions = list_members(nodes)
        nearness = (problem.devices.device_class(nodes), problem.devices.away(nodes))
        chosen_gpus = [
            problem.devices.options.choose_least_lost(choice.sure, choice.tied)
            for choice in choices
        ]
        self.exact &= all(choice.is_complete for choice in chosen_gpus)
        fewest = min(choice.sets_lost for choice in chosen_gpus)
        candidates = []
        for (distance, _, _, ranges), gpus in zip(choices, chosen_gpus, strict=True):
            if gpus.sets_lost == fewest:
                split, is_exact = find_least_split(problem, positions, ranges)
                self.exact &= is_exact
                lost = gpus._replace(sets_lost=gpus.sets_lost + self._gpu_nodes(nodes))
                cost = problem.cost(split, lost, nearness, distance)
                candidates.append(Candidate(split=split, gpus=gpus.gpus, cost=cost))
        return min(candidates, key=lambda candidate: self.rest_of(candidate.cost))
