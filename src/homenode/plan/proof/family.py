"""Family: placings of a VM that a proof excludes together, and what none of them can undercut.

It shares no code with the search. The bounds and their names: docs/formats/proof.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import accumulate, combinations
from typing import Any

from homenode.plan.proof.statement import Facts, Step

UNREACHABLE, LOCAL = 255, 10
HOME, EVENNESS = ["gpus_away_from_home"], ["lopsided_split", "guest_sockets", "unevenness"]
Goal = Sequence[tuple[str, Any]]


class FalseProofError(Exception):
    """Says what of a proof is false."""


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise FalseProofError(what)


class Family:
    """Placings on all nodes of `must` and some of `may`, with `low` to `high` groups on each, and
    with all of `gpus` and some of `more`. equal: every node gets as many groups as the others."""

    def __init__(self, facts: Facts, step: Step, gpus: Sequence[int], *, equal: bool) -> None:
        self.facts, self.step, self.equal, self.reach = facts, step, equal, UNREACHABLE - 1
        self.high = list(step.supply)
        for node, pages in enumerate(step.free_pages):
            if pages is not None and step.memory == "follows":
                self.high[node] = min(self.high[node], pages * step.groups // step.pages)
            elif pages is not None and step.memory == "together":
                self.high[node] *= pages > 0
        self.room = self.high
        self.whole = [min(one) for one in zip(step.whole_cores, self.high, strict=True)]
        self.low, self.more = [1] * len(self.high), list(gpus)
        self.must: list[int] = []
        self.packages: frozenset[int] = frozenset()
        self.gpus: list[int] = []
        self.may = [node for node, held in enumerate(self.high) if held]
        self.sizes = list(range(1, min(facts.most_nodes, step.groups, len(self.may)) + 1))

    def branches(self, vertex: str) -> tuple["Family", "Family"]:
        """The placings of the family with a node, a GPU or more than so many groups on a node, and
        those without."""
        kind, number, *most = (*vertex.split(), "-1")[:3]
        one, (yes, no) = int(number), (copy(self), copy(self))
        if kind == "node" and one in self.may:
            yes.may = no.may = [node for node in self.may if node != one]
            yes.must = sorted([*self.must, one])
        elif kind == "package" and one not in {self.facts.packages[node] for node in self.must}:
            yes.packages = self.packages | {one}
            no.may = [node for node in self.may if self.facts.packages[node] != one]
        elif kind == "gpu" and one in self.more:
            yes.more = no.more = [gpu for gpu in self.more if gpu != one]
            yes.gpus = [*self.gpus, one]
        else:
            is_known = kind == "groups" and one in self.must + self.may
            expect(is_known, f"expected a branch of the family, found {vertex!r}")
            yes.low, no.high = list(self.low), list(self.high)
            yes.low[one], no.high[one] = int(most[0]) + 1, int(most[0])
        return yes, no

    def narrow(self, name: str = "", wanted: Any = None) -> bool:
        """Leave out what costs more, a term being as wanted; whether that left anything out."""
        facts, groups = self.facts, self.step.groups
        before = len(self.may), self.low, self.high
        own = self.packages.union(facts.packages[node] for node in self.must)
        if name == "device_class":
            self.more = [gpu for gpu in self.more if self.classes([gpu])[0] <= wanted]
        elif name == "packages_spanned" and len(own) == wanted:
            self.may = [node for node in self.may if facts.packages[node] in own]
        elif name in ("nodes_spanned", "minus_nodes_spanned"):
            self.sizes = [abs(wanted)]
        elif name == "node_distance":
            self.reach = wanted
        elif name == "unevenness" and self.step.even and (less := self.sizes[0] - 1):
            parts = range(1, groups - less + 1)
            fits = [x for x in parts if less * x * x + (groups - x) ** 2 <= less * wanted]
            self.low = [max(low, min(fits, default=groups)) for low in self.low]
            self.high = [min(high, max(fits, default=0)) for high in self.high]
        elif name == "nodes":
            self.must, self.may = [facts.nodes.index(node) for node in wanted], []
        elif name:
            return False
        if self.sizes == [len(self.must)]:
            self.may = []
        far, low, high = facts.distances, self.low, self.high
        self.may = [
            node
            for node in self.may
            if low[node] <= high[node]
            if max(map(far[node].__getitem__, self.must), default=0) <= self.reach
        ]
        if not self.packages <= {facts.packages[node] for node in self.must + self.may}:
            self.sizes = []
        if facts.locality == "require":
            if any(self.is_away(facts.gpus[gpu].home) for gpu in self.gpus):
                self.sizes = []
            self.more = [gpu for gpu in self.more if not self.is_away(facts.gpus[gpu].home)]
        left = facts.gpu_count - len(self.gpus)
        if left in (0, len(self.more)):
            self.gpus, self.more = [*self.gpus, *self.more[:left]], []
        if not self.may:  # what the other nodes of the one set leave to each
            fewest, most = (sum(one[node] for node in self.must) for one in (low, high))
            self.low, self.high = list(low), list(high)
            for node in self.must:
                self.low[node] = max(low[node], groups - most + high[node])
                self.high[node] = min(high[node], groups - fewest + low[node])
            if self.step.shares:
                self.share_cores()
            low, high = self.low, self.high
        held = sorted((high[node] for node in self.may), reverse=True)
        sums = list(accumulate(held, initial=sum(high[node] for node in self.must)))
        first = sorted(low[node] for node in self.may)
        least = list(accumulate(first, initial=sum(low[node] for node in self.must)))
        count, tight = len(self.must), min((high[node] for node in self.must), default=groups)
        self.sizes = [
            size
            for size in self.sizes
            if 0 <= (more := size - count) < len(sums) and least[more] <= groups <= sums[more]
            if not self.equal or groups % size == 0
            if not self.equal or groups // size <= min([tight, *held[max(0, more - 1) : more]])
            if all(low[node] <= high[node] for node in self.must)
        ]
        if self.equal and len(self.sizes) == 1:
            self.low = [max(one, groups // self.sizes[0]) for one in self.low]
            self.high = [min(one, groups // self.sizes[0]) for one in self.high]
        return (len(self.may), self.low, self.high) != before

    def share_cores(self) -> None:
        """Of one set that has too few whole cores each gives its own, and of more as much."""
        cores = {node: max(1, self.whole[node]) for node in self.must}
        left = self.step.groups - sum(cores.values())
        room = {node: self.room[node] - cores[node] for node in self.must}
        levels = [one for one in range(left + 1) if sum(min(one, n) for n in room.values()) <= left]
        fewest = max(levels, default=0)
        most = fewest + (sum(min(fewest, one) for one in room.values()) < left)
        for node, own in cores.items():
            if left >= 0:
                self.low[node] = max(self.low[node], own + min(fewest, room[node]))
            self.high[node] = min(self.high[node], own + (min(most, room[node]) if left > 0 else 0))

    def rejection(self) -> str | None:
        """Why no placing of the family is possible; None where one may be."""
        one, facts, step, count = copy(self), self.facts, self.step, len(self.must)
        if any(facts.distances[a][b] == UNREACHABLE for a, b in combinations(self.must, 2)):
            return "distance"
        one.narrow()
        if not one.sizes:
            return "capacity"
        is_here, every = step.memory == "together", range(len(step.free_pages))
        pages = [step.pages if free is None else free for free in step.free_pages]
        others = one.may if is_here else [node for node in every if node not in self.must]
        more = max(one.sizes) - count if is_here else max(0, facts.most_nodes - count)
        most = sorted((pages[node] for node in others), reverse=True)[:more]
        is_short = sum(pages[node] for node in self.must) + sum(most) < step.pages
        if is_short and step.memory in ("together", "anywhere"):
            return "memory"
        away = any(one.is_away(device.home) for device in facts.devices if device.is_gpu)
        is_short = len(one.gpus) + len(one.more) < facts.gpu_count
        return "locality" if is_short or (away and facts.locality == "require") else None

    def compare(self, goal: Goal) -> tuple[int, int]:
        """(1 where all placings cost more than the goal, 0 where none costs less, else -1; the last
        term that was looked at). What may cost less is left in the family."""
        at = last = -1
        self.narrow()
        while at + 1 < len(goal):
            at, last = at + 1, max(last, at + 1)
            (name, wanted), is_possible = (
                goal[at],
                len(self.gpus + self.more) >= self.facts.gpu_count,
            )
            if not self.sizes or not is_possible or (value := self.bound(name)) > wanted:
                return 1, last
            if value < wanted:
                return -1, at
            if self.narrow(name, wanted):
                at = -1
        return 0, last

    def is_away(self, home: int | None) -> bool:
        return home is not None and self.facts.homes[home].node not in self.must + self.may

    def classes(self, gpus: Sequence[int]) -> list[int]:
        """The class of each of these GPUs next to the nodes."""
        packages, homes = (
            {self.facts.packages[node] for node in self.must + self.may},
            self.facts.homes,
        )
        near = [min(home.package_distances[one] for one in packages) for home in homes]
        own = ([gpu.home, *gpu.nics] for gpu in map(self.facts.gpus.__getitem__, gpus))
        return [max((near[one] for one in its if one is not None), default=0) for its in own]

    def evenness(self, held: Sequence[int]) -> tuple[int, int, int]:
        """Least lopsided_split, guest_sockets and unevenness over nodes that hold so many."""
        found, groups, counts = [(2, 0, 0)], self.step.groups, self.step.sockets
        for size in range(1, groups // len(held) + 1) if counts else (1,):
            left, parts = groups // size, [0]
            for number, most in enumerate(sorted(held) if groups % size == 0 else ()):
                parts.append(min(most // size, left // (len(held) - number)))
                left -= parts[-1]
            if sum(parts[1:2]) and not left:
                squares = sum(part * part for part in parts) * size * size
                found.append((int(parts[-1] > 2 * parts[1]), counts * groups // size, squares))
        return min(found)

    def least(self, cost: Callable[[int], int]) -> int:
        """The least sum of a cost of each node."""
        own = sum(map(cost, self.must))
        sums = list(accumulate(sorted(map(cost, self.may)), initial=own))
        return min(sums[size - len(self.must)] for size in self.sizes)

    def counts(self, node: int, column: int) -> set[int]:
        low, high = self.low[node], min(self.high[node], self.step.supply[node])
        return {self.step.counts[node][part - 1][column] for part in range(low, high + 1)}

    def spread(self, far: Sequence[int]) -> int:
        """The least sum of groups times distance."""
        total = sum(self.low[node] * far[node] for node in self.must)
        left = self.step.groups - sum(self.low[node] for node in self.must)
        room = [(far[node], self.high[node] - self.low[node]) for node in self.must]
        for distance, most in sorted(room + [(far[node], self.high[node]) for node in self.may]):
            total, left = total + min(most, left) * distance, left - min(most, left)
        return total

    def far(self, gpu: int) -> list[int]:
        """The distances of the functions of a GPU to each node."""
        home, functions = self.facts.gpus[gpu].home, self.facts.gpus[gpu].functions
        row = self.facts.homes[home].distances if home is not None else [0] * len(self.high)
        return [functions * distance for distance in row]

    def bound(self, name: str) -> Any:
        """What no placing of the family can undercut in a term, those before it being as wanted."""
        facts, step, must, may, sizes = self.facts, self.step, self.must, self.may, self.sizes
        homes, inside, left = facts.homes, must + may, facts.gpu_count - len(self.gpus)
        taken, sign = {*self.gpus, *facts.named_gpus}, 1 if facts.packs else -1
        if name == "vcpus_beyond_cores":
            more = sorted((self.whole[node] for node in may), reverse=True)[: sizes[-1] - len(must)]
            return max(0, step.groups - sum(self.whole[node] for node in must) - sum(more))
        if name == "device_class":
            packages = {facts.packages[node] for node in inside}
            rows = [homes[one.home].package_distances for one in facts.devices if one.counts]
            worst = [min(row[package] for package in packages) for row in rows]
            return max(
                [0, *worst, *self.classes(self.gpus), *sorted(self.classes(self.more))[:left]]
            )
        if name == "packages_spanned":
            held = Counter({facts.packages[node]: 0 for node in inside})
            for node in inside:
                held[facts.packages[node]] += self.high[node]
            own = self.packages.union(facts.packages[node] for node in must)
            rest = step.groups - sum(held.pop(package) for package in own)
            return len(own) + fewest(held.values(), rest)
        if name in HOME:
            given = [one.home for one in facts.devices if one.is_gpu]
            chosen = [facts.gpus[gpu].home for gpu in self.gpus]
            here = sum(not self.is_away(facts.gpus[gpu].home) for gpu in self.more)
            return sum(map(self.is_away, [*given, *chosen])) + max(0, left - here)
        if name == "nodes_spanned":
            return sizes[0]
        if name == "minus_nodes_spanned":
            return -sizes[-1]
        if name == "node_distance":
            d, size = facts.distances, sizes[0]
            rows = [sorted(d[a][b] for b in inside if b != a) for a in must or may]
            near = [row[size - 2] for row in rows] if size > 1 else [LOCAL]
            pairs = [d[a][b] for a, b in combinations(must, 2)]
            return max([max(near) if must else min(near), *pairs])
        if name in EVENNESS:
            most = sorted((self.high[node] for node in may), reverse=True)
            mine = [self.high[node] for node in must]
            triples = (self.evenness(mine + most[: size - len(mine)]) for size in sizes)
            return min(triples)[EVENNESS.index(name)]
        if name == "device_distance":
            rows = [homes[one.home].distances for one in facts.devices]
            rows += [self.far(gpu) for gpu in self.gpus]
            more = sorted(self.spread(self.far(gpu)) for gpu in self.more)[:left]
            return self.spread([sum(row[n] for row in rows) for n in range(len(self.high))]) + sum(
                more
            )
        if name == "gpu_link_groups":
            known = {facts.gpus[gpu].link for gpu in taken} - {None}
            links = Counter(facts.gpus[gpu].link for gpu in self.more)
            rest = left - sum(links.pop(link, 0) for link in [*known, None])
            return len(known) + fewest(links.values(), rest)
        if name == "gpu_sets_lost" and (facts.gpu_count or facts.named_positions):
            either = taken.union(self.more)
            begun = [one for one in facts.gpu_sets if not taken.isdisjoint(one)]
            return sum(not either.issuperset(one) for one in begun)
        if name in ("gpu_sets_lost", "gpu_nodes_used"):
            return self.least(lambda node: int(node in facts.gpu_nodes))
        if name in ("unisolated_cores", "llcs_spanned"):
            return self.least(lambda node: min(self.counts(node, int(name == "llcs_spanned"))))
        if name == "unequal_llcs":
            ways = {node: self.counts(node, 2) - {0} for node in inside}
            every = (ways[node] for node in must)
            alike = set.intersection(*every) if must else set[int]().union(*ways.values())
            room = sizes[0] - len(must)
            return int(all(sum(one in ways[node] for node in may) < room for one in alike))
        if name == "pages_to_reserve":
            pages = step.pages if facts.huge_pages and step.memory == "follows" else 0
            free = step.pool_pages
            return self.least(lambda n: max(0, -(-pages * self.low[n] // step.groups) - free[n]))
        if name == "balance_cores":
            return self.least(lambda node: sign * step.whole_cores[node])
        if name == "balance_memory":
            return self.least(lambda node: sign * facts.page_bytes * (step.free_pages[node] or 0))
        if name == "gpus_without_nic":
            alone = sum(not facts.gpus[gpu].is_paired for gpu in taken)
            paired = sum(facts.gpus[gpu].is_paired for gpu in self.more)
            return (alone + max(0, left - paired)) * any(gpu.is_paired for gpu in facts.gpus)
        if name == "nodes":
            mine, others = ([facts.nodes[node] for node in some] for some in (must, sorted(may)))
            return min(tuple(sorted(mine + others[: size - len(mine)])) for size in sizes)
        if name == "split":
            return tuple(-self.high[node] for node in must)
        positions = sorted(facts.gpus[gpu].position for gpu in self.more)[:left]
        positions += [facts.gpus[gpu].position for gpu in self.gpus]
        return tuple(sorted({*facts.named_positions, *positions}))


def fewest(sizes: Iterable[int], wanted: int) -> int:
    """How many of groups of these sizes hold so many, at least."""
    sums = list(accumulate(sorted(sizes, reverse=True), initial=0))
    return sum(one < wanted for one in sums[:-1])
