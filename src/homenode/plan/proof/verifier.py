"""Verifier: whether the proof that a stored plan carries is true, by arithmetic of its own.

It shares no code with the search. Format, bounds and their names: docs/formats/proof.md.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from itertools import combinations
from math import gcd
from typing import Any

from homenode.plan.proof.statement import Facts, Goal, PlanDocument, Proof, Search, Step, terms_of

UNREACHABLE, LOCAL, AWAY = 255, 10, "gpus_away_from_home"
EQUALITY = {"device_class", "packages_spanned", AWAY, "nodes_spanned"}
RULES = {"host's reserved memory", "host's last core", "uneven memory", "memory from other nodes"}


class FalseProofError(Exception):
    """Says what of a proof is false."""


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise FalseProofError(what)


class Placings:
    """Placings on `size` nodes with `low` to `high` groups on each, multiples of `unit`; with all
    of `own` devices and some of `more`; with nodes of all `packages`."""

    def __init__(
        self, facts: Facts, step: Step, choice: Sequence[int], size: int, unit: int, *, equal: bool
    ) -> None:
        self.facts, self.step, self.size, self.unit = facts, step, size, unit
        self.whole = [min(one) for one in zip(step.whole_cores, step.room, strict=True)]
        self.low = [0] * len(step.room)
        most = unit if equal else step.groups
        self.high = [min(most, room) // unit * unit for room in step.room]
        self.packages, self.own, self.more = frozenset[int](), list(facts.given), list(choice)
        self.settle()

    def branches(self, vertex: str) -> tuple["Placings", "Placings"]:
        """The placings with a package, a GPU, or more than so many groups on a node, and those
        without."""
        kind, number, groups = (*vertex.split(), "0")[:3]
        one, most, yes, no = int(number), int(groups), copy(self), copy(self)
        if kind == "package":
            yes.packages, packages = self.packages | {one}, self.facts.packages
            no.high = [high * (packages[node] != one) for node, high in enumerate(self.high)]
        elif kind == "gpu":
            yes.own, no.more = [*self.own, one], [other for other in self.more if other != one]
            yes.more = no.more
        else:
            yes.low, no.high = list(self.low), list(self.high)
            yes.low[one] = max(self.low[one], most // self.unit * self.unit + self.unit)
            no.high[one] = min(self.high[one], most // self.unit * self.unit)
        return yes.settle(), no.settle()

    def with_nodes(self, nodes: Sequence[int]) -> "Placings":
        """The placings on a set of nodes."""
        one = copy(self)
        one.low = [self.unit * (node in nodes) for node in range(len(self.low))]
        return one.settle()

    def settle(self) -> "Placings":
        """Find the nodes that the sets must and may have, how many of these, and their groups."""
        nodes, far = range(len(self.low)), self.facts.distances
        self.must = must = [node for node in nodes if self.low[node]]
        self.free = self.size - len(must)
        near = [node for node in nodes if self.high[node] > self.low[node] == 0 < self.free]
        self.may = [n for n in near if all(far[n][other] < UNREACHABLE for other in must)]
        self.inside = must + self.may
        left = self.facts.device_count - len(self.own)
        if left in (0, len(self.more)):
            self.own, self.more = self.own + self.more[:left], []
        self.held = sorted((self.high[node] for node in self.may), reverse=True)[: self.free]
        self.spare = self.step.groups - sum(self.low) - self.free * self.unit
        self.surplus = sum(self.high[n] for n in must) + sum(self.held) - self.step.groups
        at_least = [
            high - self.surplus if node in must else 0 for node, high in enumerate(self.high)
        ]
        self.high = [
            min(one, max(self.unit, self.low[n]) + self.spare) for n, one in enumerate(self.high)
        ]
        self.low = [max(one) for one in zip(self.low, at_least, strict=True)]
        return self

    def rejection(self) -> str | None:
        """Why no placing of the family is possible; None where one may be."""
        facts, step, must, high = self.facts, self.step, self.must, self.high
        if any(facts.distances[a][b] == UNREACHABLE for a, b in combinations(must, 2)):
            return "distance"
        if not self.packages <= {facts.packages[node] for node in self.inside}:
            return "capacity"
        is_so = all(self.low[node] <= high[node] for node in must)
        if not is_so or len(self.held) != self.free or min(self.spare, self.surplus) < 0:
            return "capacity"
        others, more = self.may, self.free
        if step.memory == "anywhere":
            others = [node for node in range(len(high)) if node not in must]
            more = max(self.size, facts.most_nodes) - len(must)
        pages = [step.pages if free is None else free for free in step.free_pages]
        held = sorted((pages[node] for node in others), reverse=True)[:more]
        is_short = sum(pages[node] for node in must) + sum(held) < step.pages
        if is_short and step.memory in ("together", "anywhere"):
            return "memory"
        is_away = facts.locality == "require" and self.bound(AWAY)
        if is_away or len(self.own) + len(self.more) < facts.device_count:
            return "locality"
        return "sharing" if step.shares and self.shares_too_soon() else None

    def shares_too_soon(self) -> bool:
        """Whether more vCPUs share the cores of a node than of one that has room."""
        own, high, room = [max(1, one) for one in self.whole], self.high, self.step.room
        others = [max(0, high[n] - own[n] + 1) for n in self.must if high[n] < room[n]]
        return any(self.low[n] - own[n] > one for n in self.must for one in others)

    def compare(self, goal: Goal) -> tuple[int, str]:
        """(1 where all placings cost more than the goal, 0 where none costs less, else -1; the term
        that decides it, or "tie")."""
        for name, wanted in goal:
            value = self.bound(name)
            if value != wanted:
                return (1 if value > wanted else -1), name
        return 0, "tie"

    def least(self, cost: Callable[[int], int]) -> int:
        """The least sum of a cost of each node."""
        return sum(map(cost, self.must)) + sum(sorted(map(cost, self.may))[: self.free])

    def of_devices(self, cost: Callable[[int], int]) -> list[int]:
        """A cost of each of the own devices, and the least ones of those still to choose."""
        left = self.facts.device_count - len(self.own)
        return [*map(cost, self.own), *sorted(map(cost, self.more))[:left]]

    def of_row(self, node: int, row: Sequence[int]) -> Sequence[int]:
        """What a node may cost, by the row for 1, 2, … groups, of which the last is for more."""
        return row[max(self.low[node], self.unit) - 1 : self.high[node]] or row[-1:]

    def device_class(self, device: int) -> int:
        packages = {self.facts.packages[node] for node in self.inside}
        rows = [self.facts.homes[home].distances for home in self.facts.devices[device].homes]
        return max((min(row[package] for package in packages) for row in rows), default=0)

    def spread(self, far: Sequence[int]) -> int:
        """The least sum of groups times distance."""
        left = self.step.groups - sum(self.low)
        total = sum(low * far[node] for node, low in enumerate(self.low))
        for node in sorted(self.inside, key=far.__getitem__):
            more = min(left, self.high[node] - self.low[node])
            left, total = left - more, total + more * far[node]
        return total

    def parts(self) -> list[int]:
        """The groups on each node, as alike as can be."""
        groups, unit = self.step.groups, self.unit
        ranges = [(self.low[node], self.high[node]) for node in self.must]
        ranges += [(unit, most) for most in self.held]

        def filled(level: int) -> list[int]:
            return [min(max(fewest, level), most) for fewest, most in ranges]

        levels = range(0, groups + 1, unit)
        level = levels[bisect_right(levels, groups, key=lambda one: sum(filled(one))) - 1]
        parts = filled(level)
        for at, more in enumerate(filled(level + unit)):
            parts[at] = more if sum(parts) < groups else parts[at]
        return parts

    def bound(self, name: str) -> Any:
        """What no placing can undercut in a term."""
        facts, step, must, inside = self.facts, self.step, self.must, self.inside
        far, packages, devices, own = facts.distances, facts.packages, facts.devices, self.own
        if name in step.costs:
            return self.least(lambda node: min(self.of_row(node, step.costs[name][node])))
        if name in SHORT:
            return SHORT[name](self)
        if name == "packages_spanned":
            known = self.packages.union(packages[node] for node in must)
            room = sum(self.high[node] for node in inside if packages[node] in known)
            return len(known) + (room < step.groups)
        if name == "node_distance":
            rows = [sorted(far[a][b] for b in inside if b != a) for a in must or inside]
            near = [row[self.size - 2] if self.size > 1 else LOCAL for row in rows]
            pairs = [far[a][b] for a, b in combinations(must, 2)]
            return max([max(near) if must else min(near), *pairs])
        if name == "device_distance":
            row = [sum(devices[one].distances[node] for one in own) for node in range(len(far))]
            more = self.of_devices(lambda one: self.spread(devices[one].distances))[len(own) :]
            return self.spread(row) + sum(more)
        if name == "gpu_link_groups":
            links, others = ({devices[one].link for one in some} for some in (own, self.more))
            return max(len(links - {None}), len(own) < facts.device_count and None not in others)
        if name == "gpu_sets_lost":
            begun = [one for one in facts.gpu_sets if not {*own}.isdisjoint(one)]
            return sum(not {*own, *self.more}.issuperset(one) for one in begun)
        assert name == "unequal_llcs"
        ways = [{*self.of_row(node, step.llc_parts[node])} - {0} for node in must]
        return int(ways != [] and not set.intersection(*ways))

    def is_away(self, device: int) -> bool:
        return self.facts.devices[device].node not in (None, *self.inside)

    def position(self, device: int) -> int:
        number = self.facts.devices[device].position
        return NO_GPU if number is None else number


NO_GPU = -1
SHORT: dict[str, Callable[[Placings], Any]] = {
    "vcpus_beyond_cores": lambda of: max(0, of.step.groups + of.least(lambda n: -of.whole[n])),
    "device_class": lambda of: max([0, *of.of_devices(of.device_class)]),
    AWAY: lambda of: sum(of.of_devices(of.is_away)),
    "nodes_spanned": lambda of: of.size,
    "minus_nodes_spanned": lambda of: -of.size,
    "guest_sockets": lambda of: of.step.sockets * of.step.groups // of.unit,
    "lopsided_split": lambda of: int(max(of.parts()) > 2 * min(of.parts())),
    "unevenness": lambda of: sum(part * part for part in of.parts()),
    "gpus_without_nic": lambda of: sum(of.of_devices(lambda n: of.facts.devices[n].is_alone)),
    "nodes": lambda of: tuple(of.facts.nodes[n] for n in sorted(of.must + of.may[: of.free])),
    "split": lambda of: tuple(-of.high[node] for node in of.must),
    "gpus": lambda of: tuple(sorted({*of.of_devices(of.position)} - {NO_GPU})),
}


def roots(facts: Facts, step: Step, *, equal: bool) -> list[Placings]:
    """All placings of a step: a family for each choice of devices, number of nodes and, for equal
    cells and where sockets are counted, divisor of the parts; the first one last."""
    groups, most = step.groups, min(facts.most_nodes, step.groups, len(facts.nodes))
    return [
        Placings(facts, step, choice, size, unit, equal=equal)
        for choice in reversed(facts.choices)
        for size in range(most, 0, -1)
        for unit in (range(1, groups // size + 1) if equal or step.sockets else (1,))
        if groups % unit == 0 and (not equal or unit * size == groups)
    ]


def walk(facts: Facts, step: Step, search: Search, goal: Goal, *, ties: bool) -> None:
    """Check a tree: every leaf is impossible or costs more than the goal; with ties, no less."""
    families = roots(facts, step, equal=search.splits == "equal")
    for place, vertex in enumerate(search.tree):
        where = f"{', '.join(step.fallbacks[0]) or step.outcome}, {search.splits}, vertex {place}"
        expect(families, f"{where}: expected the end of the tree, found {vertex!r}")
        family = families.pop()
        if " " in vertex:
            families += reversed(family.branches(vertex))
            continue
        reason = family.rejection()
        standing, found = (1, reason) if reason else family.compare(goal)
        is_so = found == vertex and standing >= 1 - ties
        expect(is_so, f"{where}: expected {vertex!r} to exclude a family, found {found}")
    expect(not families, f"expected a tree of all placings, found {len(families)} left out")


def verify(plan: PlanDocument, proof: Proof) -> None:
    """Raises FalseProofError where the proof does not show what conclusions() says."""
    facts, steps, cost = proof.facts, proof.steps, [(one.name, one.value) for one in plan.cost]
    at = [number for number, step in enumerate(steps) if step.outcome == "chosen"]
    expect(len(at) == 1, f"expected one step that is chosen, found {len(at)}")
    step = steps[at[0]]
    (first, rest), found = terms_of(plan, step), [name for name, _ in cost]
    expect(found == first + rest, f"expected the terms {first + rest}, found {found}")
    expect(0 < proof.terms <= len(cost), f"expected 1 to {len(cost)} terms, found {proof.terms}")
    check_chosen(plan, facts, step, cost)
    main = "equal" if step.equal and len({*plan.value("split")}) == 1 else "any"
    searches: dict[str, Search] = {search.splits: search for search in step.searches}
    wanted = {main, "any", "equal"} if step.equal and not step.reason else {main}
    expect(searches.keys() == wanted, f"expected searches of {sorted(wanted)} splits")
    walk(facts, step, searches.pop(main), cost[: proof.terms], ties=True)
    for search in searches.values():
        check_preference(facts, step, search, cost[: len(first)], main)
    earlier = [one for other in steps[: at[0]] for one in other.fallbacks]
    expect(plan.gave_way in step.fallbacks, f"expected a chosen step for {plan.gave_way}")
    for one in RULES.intersection(plan.gave_way):
        left = [other for other in plan.gave_way if other != one]
        expect(left in earlier, f"expected an earlier step {left}, found none")
    near = cost[: first.index("nodes_spanned") if plan.policy == "cores-first" else step.shares]
    for number, other in enumerate(steps):
        if number != at[0]:
            check_step(facts, other, near, "worse" if number < at[0] else "not-better")


def check_chosen(plan: PlanDocument, facts: Facts, step: Step, cost: Goal) -> None:
    """The plan's placing is one of those that are compared, and costs what it says."""
    nodes, split = plan.value("nodes"), plan.value("split")
    expect({*plan.nodes} == {*nodes} <= {*facts.nodes}, f"expected the nodes {nodes}")
    is_so = len({*nodes}) == len(split) and max(split) < 0
    expect(is_so, f"expected a part of each node, found {split}")
    parts, owned = dict(zip(nodes, split, strict=True)), {one.bdf for one in plan.devices}
    named = {facts.devices[one].bdf for one in facts.given} - {""}
    gpus = {n for n, one in enumerate(facts.devices) if one.bdf in owned - named}
    key = len(nodes), gcd(*split) if step.sockets else 1
    ways = [one for one in roots(facts, step, equal=False) if (one.size, one.unit) == key]
    ways = [one for one in ways if gpus <= {*one.own, *one.more}]
    is_so = ways and named <= owned and len({*facts.given, *gpus}) == facts.device_count
    expect(is_so, "expected the GPUs of one choice")
    ways[0].low = [-parts.get(node, 0) for node in facts.nodes]
    ways[0].high = [min(one) for one in zip(ways[0].high, ways[0].low, strict=True)]
    ways[0].own, ways[0].more = sorted({*facts.given, *gpus}), []
    reason = ways[0].settle().rejection()
    expect(reason is None, f"expected a placing that is possible, found {reason}")
    for name, wanted in cost:
        found = ways[0].bound(name)
        expect(found == wanted, f"expected {name} {found}, found {wanted}")


def check_preference(facts: Facts, step: Step, search: Search, cost: Goal, main: str) -> None:
    """Equal cells are chosen where they cost no more of EQUALITY than the best of all splits."""
    goal = [(name, least) for (name, _), least in zip(cost, search.first, strict=False)]
    if search.least is None:
        is_so = main == "any" and not goal
        expect(is_so, "expected a set of nodes of least first terms, found none")
    else:
        ways = roots(facts, step, equal=search.splits == "equal")
        ways = [one.with_nodes(search.least) for one in ways if one.size == len(search.least)]
        is_so = any(one.rejection() is None and one.compare(goal)[0] == 0 for one in ways)
        expect(is_so and len(goal) == len(cost), f"expected first terms of nodes {search.least}")
        near = [(own, dict(goal)[name]) for name, own in cost if name in EQUALITY]
        costs = [own - least if main == "equal" else least - own for own, least in near]
        expect((max(costs) > 0) == (main == "any"), "expected equal cells where they cost no more")
    walk(facts, step, search, goal, ties=search.least is not None)


def check_step(facts: Facts, step: Step, near: Goal, outcome: str) -> None:
    """A fallback that is not chosen is left out for a reason, as far as its step says one."""
    name = ", ".join(step.fallbacks[0]) or "nothing gives way"
    if step.outcome == "host-core":
        expect(step.cores_left - step.groups < step.cores_kept, f"{name}: expected too few cores")
    elif step.outcome != "unproved":
        goal = [] if step.outcome == "no-set" else near
        is_so = step.outcome == "no-set" or (step.outcome == outcome and goal)
        expect(is_so, f"{name}: found {step.outcome}")
        expect([one.splits for one in step.searches] == ["any"], f"{name}: expected one search")
        walk(facts, step, step.searches[0], goal, ties=step.outcome == "not-better")
