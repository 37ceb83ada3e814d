"""Verifier: whether the proof that a stored plan carries is true, by arithmetic of its own.

It shares no code with the search. Format, bounds and their names: docs/formats/proof.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import combinations
from math import gcd
from typing import Any

from homenode.plan.proof.statement import Device, Facts, Goal, PlanDocument, Proof, Step, expect

UNREACHABLE, AWAY, FAR = 255, "gpus_away_from_home", "node_distance"
EQUALITY = {"device_class", "packages_spanned", AWAY, "nodes_spanned", "minus_nodes_spanned"}
RULES = {"host's reserved memory", "host's last core", "uneven memory", "memory from other nodes"}


class Placings:
    """Placings on `size` nodes with `low` to `high` groups on each, multiples of `unit`; with all
    of `own` devices and some of `more`; with nodes of all `packages`."""

    def __init__(self, facts: Facts, step: Step, choice: list[int], size: int, unit: int) -> None:
        self.facts, self.step, self.size, self.unit = facts, step, size, unit
        self.low, self.high = [0] * len(step.room), [room // unit * unit for room in step.room]
        self.packages, self.own, self.more = frozenset[int](), list(facts.given), list(choice)
        self.settle()

    def branches(self, vertex: str) -> tuple["Placings", "Placings"]:
        """The placings with a package, a GPU, or more than so many groups on a node; the others."""
        kind, number, groups = (*vertex.split(), "0")[:3]
        one, most, yes, no = int(number), int(groups), copy(self), copy(self)
        if kind == "package":
            yes.packages, packages = self.packages | {one}, self.facts.packages
            no.high = [high * (packages[node] != one) for node, high in enumerate(self.high)]
        elif kind == "gpu":
            yes.own = [*self.own, one]
            yes.more = no.more = [other for other in self.more if other != one]
        else:
            yes.low, no.high = list(self.low), list(self.high)
            yes.low[one] = max(self.low[one], most // self.unit * self.unit + self.unit)
            no.high[one] = min(self.high[one], most // self.unit * self.unit)
        return yes.settle(), no.settle()

    def settle(self) -> "Placings":
        """Find the nodes that the sets must and may have, and how many of these."""
        far, high = self.facts.distances, self.high
        self.must = must = [node for node, low in enumerate(self.low) if low]
        self.free, self.wanted = self.size - len(must), self.facts.device_count - len(self.own)
        others = [n for n, low in enumerate(self.low) if high[n] > low == 0 < self.free]
        self.may = [n for n in others if all(far[n][one] < UNREACHABLE for one in must)]
        self.inside, self.more = must + self.may, self.more if self.wanted else []
        self.spare = self.step.groups - sum(self.low) - self.free * self.unit
        self.least_of = [max(low, self.unit) for low in self.low]
        self.high = [min(high[n], least + self.spare) for n, least in enumerate(self.least_of)]
        return self

    def rejection(self) -> str | None:
        """Why no placing of the family is possible; None where one may be."""
        facts, step, must, low, high = self.facts, self.step, self.must, self.low, self.high
        if any(facts.distances[a][b] == UNREACHABLE for a, b in combinations(must, 2)):
            return "distance"
        is_so = all(low[node] <= high[node] for node in must) and 0 <= self.free <= len(self.may)
        is_so = is_so and self.spare >= 0 <= -step.groups - self.least(lambda node: -high[node])
        if not is_so or not self.packages <= {facts.packages[node] for node in self.inside}:
            return "capacity"
        pages = [step.pages if free is None else free for free in step.free_pages]
        others, more = self.may, self.free
        if step.memory == "anywhere":
            others = [node for node in range(len(low)) if node not in must]
            more = max(self.size, facts.most_nodes) - len(must)
        held = sorted((pages[node] for node in others), reverse=True)[:more]
        if sum(held) + sum(pages[node] for node in must) < step.pages and step.memory != "follows":
            return "memory"
        is_away = facts.locality == "require" and self.bound(AWAY)
        if is_away or not 0 <= self.wanted <= len(self.more):
            return "locality"
        own = [max(1, cores) for cores in step.cores]
        least = [max(0, high[n] - own[n] + 1) for n in must if high[n] < step.room[n]]
        # The cores of a node are shared while another one has room to share less.
        is_so = any(low[n] - own[n] > one for n in must for one in least)
        return "sharing" if step.shares and is_so else None

    def compare(self, goal: Goal) -> tuple[int, str]:
        """(1: all placings cost more than the goal; 0: none costs less; else -1; by which term)."""
        for name, wanted in goal:
            value = self.bound(name)
            if value != wanted:
                return (1 if value > wanted else -1), name
        return 0, "tie"

    def bound(self, name: str) -> Any:
        """What no placing can undercut in a term."""
        rows = self.step.costs.get(name, [])
        return self.least(lambda n: min(self.of_row(n, rows[n]))) if rows else TERMS[name](self)

    def least(self, cost: Callable[[int], int]) -> int:
        """The least sum of a cost of each node."""
        return sum(map(cost, self.must)) + sum(sorted(map(cost, self.may))[: max(0, self.free)])

    def of_row(self, node: int, row: Sequence[int]) -> Sequence[int]:
        """What a node may cost, by the row for 1, 2, … groups, of which the last is for more."""
        return row[self.least_of[node] - 1 : self.high[node]] or row[-1:]

    def of_devices(self, cost: Callable[[Device], Any]) -> list[Any]:
        """A cost of each of the own devices, and the least ones of those still to choose."""
        own, more = ([cost(self.facts.devices[n]) for n in some] for some in (self.own, self.more))
        return own + sorted(more)[: self.wanted]

    def device_class(self, device: Device) -> int:
        rows = [self.facts.homes[home].distances for home in device.homes]
        return max((min(row[node] for node in self.inside) for row in rows), default=0)

    def device_distance(self) -> int:
        """That of the own devices together, and of each other one by itself."""
        devices, nodes = self.facts.devices, range(len(self.low))
        row = [sum(devices[one].distances[node] for one in self.own) for node in nodes]
        more = sorted(self.distance(devices[one].distances) for one in self.more)
        return self.distance(row) + sum(more[: self.wanted])

    def distance(self, row: Sequence[int]) -> int:
        more = [(row[n], self.high[n] - self.low[n]) for n in self.inside]
        return cheapest([(row[n], self.low[n]) for n in self.must] + sorted(more), self.step.groups)

    def unevenness(self) -> int:
        """The sum of squares: the second group of a node adds 3, the third one 5, and so on."""
        held = sorted((self.high[node] for node in self.may), reverse=True)[: self.free]
        ends = [(self.low[n], self.high[n]) for n in self.must] + [(self.unit, n) for n in held]
        more = sorted((2 * part + 1, 1) for low, high in ends for part in range(low, high))
        return sum(low * low for low, _ in ends) + cheapest(more, self.spare)

    def packages_spanned(self) -> int:
        packages = self.facts.packages
        known = self.packages.union(packages[node] for node in self.must)
        room = sum(self.high[node] for node in self.inside if packages[node] in known)
        return len(known) + (room < self.step.groups)

    def node_distance(self) -> int:
        """Of the pairs known, and from a node to the last of the nearest that are as many."""
        far, must, inside = self.facts.distances, self.must, self.inside
        worst = [sorted(far[a][b] for b in inside)[self.size - 1] for a in must or inside]
        return max([*worst, *(far[a][b] for a, b in combinations(must, 2))]) if must else min(worst)

    def unequal_llcs(self) -> bool:
        ways = [{*self.of_row(node, self.step.llc_parts[node])} - {0} for node in self.must]
        return ways != [] and not set.intersection(*ways)


def cheapest(portions: Iterable[tuple[int, int]], wanted: int) -> int:
    """What so many groups cost that are taken in order from (cost of a group, groups)."""
    total = 0
    for cost, groups in portions:
        taken = min(wanted, groups)
        wanted, total = wanted - taken, total + taken * cost
    return total


TERMS: dict[str, Callable[[Placings], Any]] = {
    "vcpus_beyond_cores": lambda of: max(0, of.step.groups + of.least(lambda n: -of.step.cores[n])),
    "device_class": lambda of: max([0, *of.of_devices(of.device_class)]),
    "packages_spanned": Placings.packages_spanned,
    AWAY: lambda of: sum(of.of_devices(lambda one: one.node not in (None, *of.inside))),
    "nodes_spanned": lambda of: of.size,
    "minus_nodes_spanned": lambda of: -of.size,
    FAR: Placings.node_distance,
    "lopsided_split": lambda of: max(of.low) > 2 * min([of.high[n] for n in of.must] or of.high),
    "guest_sockets": lambda of: of.step.sockets * of.step.groups // of.unit,
    "unevenness": Placings.unevenness,
    "device_distance": Placings.device_distance,
    "gpu_link_groups": lambda of: sum(bool({*of.own} & {*one}) for one in of.facts.link_groups),
    "gpu_sets_lost": lambda of: sum(
        bool({*of.own} & {*one} and {*one} - {*of.own, *of.more}) for one in of.facts.gpu_sets
    ),
    "unequal_llcs": Placings.unequal_llcs,
    "gpus_without_nic": lambda of: sum(of.of_devices(lambda one: one.is_alone)),
    "nodes": lambda of: tuple(of.facts.nodes[n] for n in sorted(of.must + of.may[: of.free])),
    "split": lambda of: tuple(-of.high[node] for node in of.must),
    "gpus": lambda of: tuple(sorted({*of.of_devices(lambda one: one.position)} - {None})),
}


def roots(facts: Facts, step: Step, *, equal: bool) -> list[Placings]:
    """All placings of a step: a family for each choice of devices, number of nodes and, for equal
    cells and where sockets are counted, divisor of the parts; the first one last."""
    groups, most = step.groups, min(facts.most_nodes, step.groups, len(facts.nodes))
    return [
        Placings(facts, step, choice, size, unit)
        for choice in reversed(facts.choices)
        for size in range(most, 0, -1)
        for unit in (range(1, groups // size + 1) if equal or step.sockets else (1,))
        if groups % unit == 0 and (not equal or unit * size == groups)
    ]


def walk(facts: Facts, step: Step, goals: Mapping[str, tuple[Goal, bool]]) -> None:
    """Check the trees of a step, with (goal, whether ties will do) for each kind of splits."""
    expect({one.splits for one in step.searches} == {*goals}, f"expected searches of {[*goals]}")
    for search in step.searches:
        (goal, ties), name = goals[search.splits], f"{step.outcome}, {search.splits} splits"
        families = roots(facts, step, equal=search.splits == "equal")
        for place, vertex in enumerate(search.tree):
            expect(families, f"{name}: expected a tree of {place} vertices, found more")
            family = families.pop()
            if " " in vertex:
                families += reversed(family.branches(vertex))
                continue
            reason = family.rejection()
            standing, term = (1, reason) if reason else family.compare(goal)
            is_so = term == vertex and standing >= 1 - ties
            expect(is_so, f"{name}, vertex {place}: expected {vertex} to exclude it, found {term}")
        expect(not families, f"{name}: expected all placings, found {len(families)} left out")


def verify(plan: PlanDocument, proof: Proof) -> None:
    """Raises FalseProofError where the proof does not show what conclusions() says."""
    facts, step, cost = proof.facts, proof.chosen, [(one.name, one.value) for one in plan.cost]
    names, before = [name for name, _ in cost], proof.steps[: proof.steps.index(proof.chosen)]
    check_placing(plan, facts, step, cost)
    # Equal cells are chosen where they cost no more of EQUALITY than the best of all splits.
    is_equal = step.equal and len({*plan.value("split")}) == 1
    main, second = ("equal", "any") if is_equal else ("any", "equal")
    goals: dict[str, tuple[Goal, bool]] = {main: (cost[: proof.terms], True)}
    if step.equal and not step.reason:
        compared = EQUALITY | {FAR} if is_equal and step.compares_far else EQUALITY
        goals[second] = [one for one in cost if one[0] in compared], is_equal
    walk(facts, step, goals)
    for rule in RULES.intersection(plan.gave_way):
        kept = [one for one in plan.gave_way if one != rule]
        expect(any(kept in step.fallbacks for step in before), f"expected an earlier step {kept}")
    near = cost[: names.index("nodes_spanned") if plan.policy == "cores-first" else step.shares]
    for other in proof.steps:
        if other.outcome in ("no-set", "worse", "not-better"):
            ties, goal = other.outcome == "not-better", [] if other.outcome == "no-set" else near
            expect(not ties or (goal and other not in before), "expected no ties before the step")
            walk(facts, other, {"any": (goal, ties)})


def check_placing(plan: PlanDocument, facts: Facts, step: Step, cost: Goal) -> None:
    """The plan's placing is one of those that are compared, and costs what it says."""
    parts = dict(zip(plan.value("nodes"), plan.value("split"), strict=True))
    owned, named = {one.bdf for one in plan.devices}, {facts.devices[n].bdf for n in facts.given}
    own = {n for n, one in enumerate(facts.devices) if n in facts.given or one.bdf in owned}
    key = len(parts), gcd(*parts.values()) if step.sockets else 1, facts.device_count
    ways = [one for one in roots(facts, step, equal=False) if own <= {*one.own, *one.more}]
    ways = [one for one in ways if (one.size, one.unit, len(own)) == key]
    expect(ways and named <= {*owned, ""}, "expected the nodes and GPUs of one family")
    one = ways[0]
    one.own, one.low = sorted(own), [-parts.get(node, 0) for node in facts.nodes]
    found = one.settle().rejection() or one.compare(cost)[1]
    expect(found == "tie", f"expected the plan's own placing at its cost, found {found}")
