"""Family: placings of a VM that a proof excludes together, and what none of them can undercut.

It shares no code with the search. The bounds and their names: docs/formats/proof.md.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from itertools import combinations
from typing import Any

from homenode.plan.proof.statement import Device, Facts, Goal, Step

UNREACHABLE, LOCAL, AWAY = 255, 10, "gpus_away_from_home"


class Family:
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

    def branches(self, vertex: str) -> tuple["Family", "Family"]:
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

    def with_nodes(self, nodes: Sequence[int]) -> "Family":
        """The placings on a set of nodes."""
        one = copy(self)
        one.low = [self.unit * (node in nodes) for node in range(len(self.low))]
        return one.settle()

    def settle(self) -> "Family":
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

    def of_devices(self, cost: Callable[[Device], int]) -> list[int]:
        """A cost of each of the own devices, and the least ones of those still to choose."""
        own, more = ([cost(self.facts.devices[n]) for n in some] for some in (self.own, self.more))
        return own + sorted(more)[: self.facts.device_count - len(own)]

    def of_row(self, node: int, row: Sequence[int]) -> Sequence[int]:
        """What a node may cost, by the row for 1, 2, … groups, of which the last is for more."""
        return row[max(self.low[node], self.unit) - 1 : self.high[node]] or row[-1:]

    def device_class(self, device: Device) -> int:
        packages = {self.facts.packages[node] for node in self.inside}
        rows = [self.facts.homes[home].distances for home in device.homes]
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
        far, packages, own = facts.distances, facts.packages, [facts.devices[n] for n in self.own]
        if name in step.costs:
            return self.least(lambda node: min(self.of_row(node, step.costs[name][node])))
        if name == "vcpus_beyond_cores":
            return max(0, step.groups + self.least(lambda node: -self.whole[node]))
        if name == "device_class":
            return max([0, *self.of_devices(self.device_class)])
        if name == "packages_spanned":
            known = self.packages.union(packages[node] for node in must)
            room = sum(self.high[node] for node in inside if packages[node] in known)
            return len(known) + (room < step.groups)
        if name == AWAY:
            return sum(self.of_devices(lambda one: one.node not in (None, *inside)))
        if name == "nodes_spanned":
            return self.size
        if name == "minus_nodes_spanned":
            return -self.size
        if name == "node_distance":
            rows = [sorted(far[a][b] for b in inside if b != a) for a in must or inside]
            near = [row[self.size - 2] if self.size > 1 else LOCAL for row in rows]
            pairs = [far[a][b] for a, b in combinations(must, 2)]
            return max([max(near) if must else min(near), *pairs])
        if name == "guest_sockets":
            return step.sockets * step.groups // self.unit
        if name == "lopsided_split":
            return int(max(self.parts()) > 2 * min(self.parts()))
        if name == "unevenness":
            return sum(part * part for part in self.parts())
        if name == "device_distance":
            row = [sum(device.distances[node] for device in own) for node in range(len(far))]
            more = self.of_devices(lambda one: self.spread(one.distances))[len(own) :]
            return self.spread(row) + sum(more)
        if name == "gpu_link_groups":
            links = {device.link for device in own} - {None}
            others = {facts.devices[gpu].link for gpu in self.more}
            return max(len(links), int(len(own) < facts.device_count and None not in others))
        if name == "gpu_sets_lost":
            begun = [one for one in facts.gpu_sets if not {*self.own}.isdisjoint(one)]
            return sum(not {*self.own, *self.more}.issuperset(one) for one in begun)
        if name == "unequal_llcs":
            ways = [{*self.of_row(node, step.llc_parts[node])} - {0} for node in must]
            return int(ways != [] and not set.intersection(*ways))
        if name == "gpus_without_nic":
            return sum(self.of_devices(lambda one: int(one.is_alone)))
        if name == "nodes":
            return tuple(facts.nodes[node] for node in sorted(must + self.may[: self.free]))
        if name == "split":
            return tuple(-self.high[node] for node in must)
        positions = self.of_devices(lambda one: -1 if one.position is None else one.position)
        return tuple(sorted({*positions} - {-1}))
