"""Verifier: whether the proof that a stored plan carries is true, by arithmetic of its own.

It shares no code with the search. Format, bounds and their names: docs/formats/proof.md.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations
from math import gcd
from typing import Any

from homenode.plan.proof.statement import Facts, Proof, Search, Step

UNREACHABLE, LOCAL = 255, 10
MOST_SPLITS, MOST_WORK = 2_000, 1_000_000
EVENNESS = ["lopsided_split", "guest_sockets", "unevenness"]
REST = """device_distance gpu_link_groups gpu_sets_lost unisolated_cores llcs_spanned unequal_llcs
pages_to_reserve balance_cores balance_memory gpus_without_nic unevenness nodes split gpus""".split()
SPANS = {"memory-first": "nodes_spanned", "spread": "minus_nodes_spanned"}
EQUALITY = ("device_class", "packages_spanned", "gpus_away_from_home", "nodes_spanned")
GIVES_WAY = (
    "host's reserved memory",
    "host's last core",
    "uneven memory",
    "memory from other nodes",
)
REJECTIONS = ("distance", "capacity", "memory", "locality")
Goal = Sequence[tuple[str, Any]]
Nodes = Sequence[int]


class FalseProofError(Exception):
    """Says what of a proof is false."""


def terms_of(
    policy: str, *, shows_pcie: bool, even: bool, shares: bool
) -> tuple[list[str], list[str]]:
    """The terms in the order of comparison: those that a set of nodes decides, and the rest."""
    home, rest = ["gpus_away_from_home"], list(REST)
    first = ["device_class", "packages_spanned", *home * shows_pcie]
    first = [SPANS[policy], *first] if policy in SPANS else [*first, "nodes_spanned"]
    first += ["node_distance", *home * (not shows_pcie)]
    if policy == "any":
        first, rest = ["nodes_spanned"], rest[1:]
    if even:
        rest = EVENNESS + [name for name in rest if name not in EVENNESS]
    return ["vcpus_beyond_cores"] * shares + first, rest


class Problem:
    """The numbers of one step. equal: every node of a set gets as many groups as the others."""

    def __init__(self, facts: Facts, step: Step, *, equal: bool) -> None:
        self.facts, self.step, self.equal, self.work = facts, step, equal, 0
        nodes, homes = range(len(facts.nodes)), facts.homes
        self.capacity = [self.held(node) for node in nodes]
        self.whole = [min(one) for one in zip(step.whole_cores, self.capacity, strict=True)]
        self.root = [node for node in nodes if self.capacity[node]]
        self.given = [sum(homes[d.home].distances[node] for d in facts.devices) for node in nodes]
        self.rows = [
            [0 if g.home is None else g.functions * homes[g.home].distances[n] for n in nodes]
            for g in facts.gpus
        ]
        self.groups = facts.gpu_groups if facts.gpu_count else [[]]
        self.known: dict[object, Any] = {}

    def held(self, node: int, devices: int = 0) -> int:
        """Groups that a node can hold, next to so many pages of memory devices."""
        pages, most = self.step.free_pages[node], self.step.supply[node]
        if pages is None or self.step.memory in ("anywhere", "none"):
            return most
        if self.step.memory == "together":
            return most if pages > devices else 0
        return min(most, max(0, pages - devices) * self.step.groups // self.step.pages)

    def held_by(self, must: Nodes, may: Nodes) -> list[int]:
        """Groups that the nodes `must` can hold; memory devices count where no node may come."""
        pages = [0] * len(must)
        for cell, more in () if may else self.step.device_pages:
            pages[cell if cell < len(must) else 0] += more
        return [self.held(node, own) for node, own in zip(must, pages, strict=True)]

    def evenness(self, held: Nodes) -> tuple[int, int, int]:
        """Least (lopsided_split, guest_sockets, unevenness) over nodes that hold so many groups."""
        key, groups = ("evenness", *sorted(held)), self.step.groups
        if key not in self.known:
            found = []
            for size in range(1, groups // len(held) + 1) if self.step.sockets else (1,):
                left, parts = groups // size, [0] * len(held)
                for number, most in enumerate(sorted(held) if groups % size == 0 else ()):
                    parts[number] = min(most // size, left // (len(held) - number))
                    left -= parts[number]
                if parts[0] and not left:
                    found.append(self.shape([part * size for part in parts], groups // size))
            self.known[key] = min(found, default=(2, 0, 0))
        return self.known[key]  # type: ignore[no-any-return]

    def shape(self, parts: Nodes, sockets: int) -> tuple[int, int, int]:
        lopsided = int(max(parts) > 2 * min(parts))
        return lopsided, sockets if self.step.sockets else 0, sum(part * part for part in parts)

    def parts(self, number: int, unevenness: int) -> tuple[int, int]:
        """Fewest and most groups on a node of a split of that unevenness over so many nodes."""
        key, groups, others = ("parts", number, unevenness), self.step.groups, number - 1
        if key not in self.known:
            self.known[key] = [
                one
                for one in range(1 if others else groups, groups - others + 1)
                if others * one * one + (groups - one) ** 2 <= others * unevenness
            ] or [groups]
        return self.known[key][0], self.known[key][-1]

    def classes(self, packages: frozenset[int]) -> tuple[int, list[int]]:
        """(class of the worst given device, class of each GPU) next to nodes of these packages."""
        if packages not in self.known:
            homes, gpus = self.facts.homes, self.facts.gpus
            near = [min(home.package_distances[one] for one in packages) for home in homes]
            given = max((near[one.home] for one in self.facts.devices if one.counts), default=0)
            own = ([*gpu.nics, *([] if gpu.home is None else [gpu.home])] for gpu in gpus)
            of_gpus = [max((near[home] for home in its), default=0) for its in own]
            self.known[packages] = given, of_gpus
        return self.known[packages]  # type: ignore[no-any-return]

    def is_away(self, home: int | None, nodes: Nodes) -> bool:
        return home is not None and self.facts.homes[home].node not in nodes

    def rejections(self, must: Nodes, may: Nodes) -> Iterator[str]:
        """Why no set of a family holds the VM."""
        facts, step, inside = self.facts, self.step, [*must, *may]
        if any(facts.distances[a][b] == UNREACHABLE for a, b in combinations(must, 2)):
            yield "distance"
        sizes = Family(self, must, may, ()).sizes
        if not sizes:
            yield "capacity"
        pages = [step.pages if one is None else one for one in step.free_pages]
        is_here = step.memory == "together"
        others = may if is_here else [node for node in range(len(pages)) if node not in must]
        more = max([facts.most_nodes, len(must)] if not is_here else sizes or [len(must)])
        own = sum(pages[node] for node in must)
        own += sum(sorted((pages[node] for node in others), reverse=True)[: more - len(must)])
        if step.memory in ("together", "anywhere") and own < step.pages:
            yield "memory"
        homes = [[facts.gpus[gpu].home for gpu in group] for group in self.groups]
        near = max(sum(not self.is_away(home, inside) for home in group) for group in homes)
        away = any(self.is_away(one.home, inside) for one in facts.devices if one.is_gpu)
        if facts.requires_home and (away or near < facts.gpu_count):
            yield "locality"

    def stands(
        self, must: Nodes, may: Nodes, goal: Goal, least: int, *, exact: bool
    ) -> tuple[bool, int]:
        """(whether every placing of the family costs more than the goal, of `least` 0 no less; the
        last term that this takes, or the one that fails). exact: split by split, for one set."""
        last, each = 0, self.facts.gpu_choices == "each"
        for group in self.groups:
            standing, term = Family(self, must, may, group).compare(goal)
            last = max(last, term)
            choices = combinations(group, self.facts.gpu_count) if each else iter([tuple(group)])
            for choice in choices if standing < least else ():
                family = Family(self, must, may, choice)
                standing, term = family.compare(goal)
                if exact and standing < least and not family.may:
                    ways = self.splits(family) or [()]
                    made = (Family(self, family.must, (), choice, one) for one in ways)
                    standing, term = min(one.compare(goal) for one in made)
                if standing < least:
                    return False, term
                last = max(last, term)
        return True, last

    def splits(self, family: "Family") -> list[tuple[int, ...]]:
        """Every split over the one set of nodes of a family; [] where they are too many."""
        ranges, made = [family.part(node) for node in family.must], [()]
        for number, (low, high) in enumerate(ranges):
            fewest, most = (sum(one[i] for one in ranges[number + 1 :]) for i in (0, 1))
            made = [
                (*one, part)
                for one in made
                for part in range(low, high + 1)
                if fewest <= self.step.groups - sum(one) - part <= most
            ]
            if len(made) > MOST_SPLITS:
                return []
        return [one for one in made if not self.step.shares or self.is_shared(family.must, one)]

    def is_shared(self, nodes: Nodes, split: Nodes) -> bool:
        """All whole cores are used before a node gives more, and then each gives as much."""
        cores = [max(1, self.whole[node]) for node in nodes]
        more = [part - own for part, own in zip(split, cores, strict=True)]
        if sum(cores) >= self.step.groups:
            return max(more) <= 0
        held = zip(nodes, split, more, strict=True)
        room = [own for node, part, own in held if part < self.capacity[node]]
        return min(more) >= 0 and max(more) - min(room, default=max(more)) < 2


class Family:
    """Placings on the sets of nodes with all of `must` and some of `may`, with GPUs of these."""

    def __init__(
        self, of: Problem, must: Nodes, may: Nodes, gpus: Nodes, split: Nodes = ()
    ) -> None:
        self.of, self.facts, self.step = of, of.facts, of.step
        self.must, self.may, self.gpus, self.split = sorted(must), list(may), list(gpus), split
        self.number, self.reach, self.low, self.high = 0, UNREACHABLE - 1, 1, of.step.groups
        self.narrow()

    def narrow(self, name: str = "", wanted: Any = None) -> bool:
        """Leave out what costs more, once a term is as wanted; whether that left nodes out."""
        before, (of, facts) = len(self.may), (self.of, self.facts)
        if name == "device_class":
            classes = of.classes(self.packages())[1]
            self.gpus = [gpu for gpu in self.gpus if classes[gpu] <= wanted]
        elif name == "packages_spanned":
            own = {facts.packages[node] for node in self.must}
            if len(own) == wanted:
                self.may = [node for node in self.may if facts.packages[node] in own]
        elif name in SPANS.values():
            self.number = abs(wanted)
        elif name == "node_distance":
            self.reach = wanted
        elif name == "unevenness" and self.step.even:
            self.low, self.high = of.parts(self.number, wanted)
        elif name == "nodes":
            self.must, self.may = [facts.nodes.index(node) for node in wanted], []
        of.work += 1
        if of.work > MOST_WORK:
            raise FalseProofError(f"expected a proof of at most {MOST_WORK} bounds, found more")
        far = facts.distances
        self.may = [
            node
            for node in self.may
            if of.capacity[node] >= self.low and all(far[node][o] <= self.reach for o in self.must)
        ]
        if len(self.must) == self.number:
            self.may = []
        if facts.requires_home:
            inside = [*self.must, *self.may]
            self.gpus = [g for g in self.gpus if not of.is_away(facts.gpus[g].home, inside)]
        self.held = of.held_by(self.must, self.may)
        self.sizes = list(self._sizes())
        if of.equal and self.sizes:
            self.low, self.high = (
                self.step.groups // one[-1] for one in (self.sizes, self.sizes[:1])
            )
        return len(self.may) != before or (name == "nodes" and before > 0)

    def _sizes(self) -> Iterator[int]:
        """Numbers of nodes that sets of the family may have."""
        groups, own = self.step.groups, len(self.must)
        more = sorted((self.of.capacity[node] for node in self.may), reverse=True)
        sums, tight = list(accumulate(more, initial=sum(self.held))), min(self.held, default=groups)
        most = min(self.facts.most_nodes, groups, own + len(more))
        for number in range(max(1, own), most + 1):
            low = max(self.low, groups // number if self.of.equal else 1)
            if (
                self.number in (0, number)
                and sums[number - own] >= groups
                and min([tight, *more[number - own - 1 : number - own]]) >= low
                and not (self.of.equal and groups % number)
            ):
                yield number

    def compare(self, goal: Goal) -> tuple[int, int]:
        """(1 where all placings cost more than the goal, 0 where none costs less, else -1; the last
        term that was looked at, or for -1 the one that may be less)."""
        last = at = 0
        while at < len(goal):
            if not self.sizes or len(self.gpus) < self.facts.gpu_count:
                return 1, last
            name, wanted = goal[at]
            value = self.bound(name)
            last = max(last, at)
            if value != wanted:
                return (1, last) if value > wanted else (-1, at)
            at = 0 if self.narrow(name, wanted) else at + 1
        return 0, last

    def packages(self) -> frozenset[int]:
        return frozenset(self.facts.packages[node] for node in (*self.must, *self.may))

    def part(self, node: int) -> tuple[int, int]:
        """Fewest and most groups on a node where it is chosen."""
        if self.split:
            part = self.split[self.must.index(node)]
            return part, part
        held = self.held[self.must.index(node)] if node in self.must else self.of.capacity[node]
        return self.low, min(self.high, held, self.step.groups - self.sizes[0] + 1)

    def least(self, cost: Callable[[int], int]) -> int:
        """The least sum of a cost of each node."""
        own = sum(cost(node) for node in self.must)
        sums = list(accumulate(sorted(cost(node) for node in self.may), initial=own))
        return min(sums[number - len(self.must)] for number in self.sizes)

    def count(self, node: int, column: int) -> int:
        low, high = self.part(node)
        return min(self.step.counts[node][part - 1][column] for part in range(low, high + 1))

    def spread(self, far: Nodes) -> int:
        """The least sum of groups times distance."""
        parts = [(self.part(node), far[node]) for node in self.must]
        total, left = (sum(low * d for (low, _), d in parts), self.step.groups)
        left -= sum(low for (low, _), _ in parts)
        room = [(d, high - low) for (low, high), d in parts]
        for distance, most in sorted(room + [(far[node], self.part(node)[1]) for node in self.may]):
            total, left = total + min(most, left) * distance, left - min(most, left)
        return total

    def bound(self, name: str) -> Any:
        """What no placing of the family can undercut in a term, those before it being as wanted."""
        of, facts, step, must, may = self.of, self.facts, self.step, self.must, self.may
        low, high = self.sizes[0], self.sizes[-1]
        exact = len(self.gpus) == facts.gpu_count
        mine = {*self.gpus, *facts.named_gpus}
        if name == "vcpus_beyond_cores":
            more = sorted((of.whole[node] for node in may), reverse=True)[: high - len(must)]
            return max(0, step.groups - sum(of.whole[node] for node in must) - sum(more))
        if name == "device_class":
            given, classes = of.classes(self.packages())
            return max([given, *sorted(classes[gpu] for gpu in self.gpus)[: facts.gpu_count]])
        if name == "packages_spanned":
            own = {facts.packages[node] for node in must}
            held = dict.fromkeys(self.packages(), 0)
            for node in (*must, *may):
                held[facts.packages[node]] += of.capacity[node]
            left = step.groups - sum(held.pop(package) for package in own)
            sums = accumulate(sorted(held.values(), reverse=True), initial=0)
            return len(own) + max(not own, sum(one < left for one in list(sums)[:-1]))
        if name == "gpus_away_from_home":
            inside = [*must, *may]
            given = sum(of.is_away(one.home, inside) for one in facts.devices if one.is_gpu)
            here = sum(not of.is_away(facts.gpus[gpu].home, inside) for gpu in self.gpus)
            return given + max(0, facts.gpu_count - here)
        if name == "nodes_spanned":
            return low
        if name == "minus_nodes_spanned":
            return -high
        if name == "node_distance":
            far, inside = facts.distances, [*must, *may]
            rows = [sorted(far[a][b] for b in inside if b != a) for a in must or may]
            near = [row[low - 2] for row in rows] if low > 1 else [LOCAL]
            pairs = [far[a][b] for a, b in combinations(must, 2)]
            return max([max(near) if must else min(near), *pairs])
        if name in EVENNESS:
            if self.split:
                shape = of.shape(self.split, step.groups // gcd(*self.split))
            else:
                most = sorted((of.capacity[node] for node in may), reverse=True)
                ways = ([*self.held, *most[: number - len(must)]] for number in self.sizes)
                shape = min(of.evenness(held) for held in ways)
            return shape[EVENNESS.index(name)]
        if name == "device_distance":
            if exact:
                rows = [of.given, *(of.rows[gpu] for gpu in self.gpus)]
                return self.spread([sum(column) for column in zip(*rows, strict=True)])
            near = sorted(self.spread(of.rows[gpu]) for gpu in self.gpus)
            return self.spread(of.given) + sum(near[: facts.gpu_count])
        if name == "gpu_link_groups":
            links = Counter(facts.gpus[gpu].link for gpu in self.gpus)
            if exact or None in links:
                return len({facts.gpus[gpu].link for gpu in mine} - {None})
            sums = accumulate(sorted(links.values(), reverse=True), initial=0)
            return sum(one < facts.gpu_count for one in sums)
        if name == "gpu_sets_lost":
            if facts.gpu_count or facts.named_positions:
                taken = (mine.intersection(one) for one in facts.gpu_sets if exact)
                return sum(0 < len(t) < len(o) for t, o in zip(taken, facts.gpu_sets, strict=False))
            return self.least(lambda node: int(node in facts.gpu_nodes))
        if name in ("unisolated_cores", "llcs_spanned"):
            return self.least(lambda node: self.count(node, int(name == "llcs_spanned")))
        if name == "unequal_llcs":
            ways = {}
            for node in (*must, *may):
                fewest, most = self.part(node)
                ways[node] = {step.counts[node][one - 1][2] for one in range(fewest, most + 1)} - {
                    0
                }
            return int(
                not any(
                    all(size in ways[node] for node in must)
                    and sum(size in ways[node] for node in may) >= low - len(must)
                    for size in set().union(*ways.values())
                )
            )
        if name == "pages_to_reserve":
            if not facts.huge_pages or step.memory != "follows":
                return 0
            wanted = {n: -(-step.pages * self.part(n)[0] // step.groups) for n in (*must, *may)}
            return self.least(lambda node: max(0, wanted[node] - step.pool_pages[node]))
        sign = 1 if facts.packs else -1
        if name == "balance_cores":
            return self.least(lambda node: sign * step.whole_cores[node])
        if name == "balance_memory":
            return self.least(lambda node: sign * facts.page_bytes * (step.free_pages[node] or 0))
        if name == "gpus_without_nic":
            if not any(gpu.is_paired for gpu in facts.gpus):
                return 0
            alone = [gpu for gpu in facts.named_gpus if not facts.gpus[gpu].is_paired]
            paired = sum(facts.gpus[gpu].is_paired for gpu in self.gpus)
            return len(alone) + max(0, facts.gpu_count - paired)
        if name == "nodes":
            first = [facts.nodes[node] for node in sorted(may)]
            own = [facts.nodes[node] for node in must]
            return min(tuple(sorted(own + first[: n - len(must)])) for n in self.sizes)
        if name == "split":
            return tuple(-self.part(node)[1] for node in must)
        positions = sorted(facts.gpus[gpu].position for gpu in self.gpus)[: facts.gpu_count]
        return tuple(sorted({*facts.named_positions, *positions}))


def walk(facts: Facts, step: Step, search: Search, goal: Goal, least: int) -> None:
    """Check a tree. Raises FalseProofError."""
    problem = Problem(facts, step, equal=search.splits == "equal")
    families: list[tuple[Nodes, Nodes]] = [((), problem.root)]
    names = [name for name, _ in goal]
    for place, vertex in enumerate(search.tree):
        where = f"{' or '.join(map(str, step.fallbacks[0])) or 'step'}, vertex {place}"
        if not families:
            raise FalseProofError(f"{where}: expected the end of the tree, found {vertex!r}")
        must, may = families.pop()
        if isinstance(vertex, int):
            expect(vertex in may, f"{where}: expected one of the nodes {may}, found {vertex}")
            rest = [node for node in may if node != vertex]
            families += [(must, rest), ((*must, vertex), rest)]
            continue
        if vertex in REJECTIONS:
            is_so = vertex in problem.rejections(must, may)
        elif vertex in ("tie", "set"):
            is_so = least == 0 and problem.stands(must, may, goal, 0, exact=vertex == "set")[0]
        else:
            last = names.index(vertex) + 1 if vertex in names else 0
            is_so = problem.stands(must, may, goal[:last], 1, exact=False)[0]
        family = f"the sets with all of {sorted(must)} and some of {may}"
        expect(is_so, f"{where}: expected {vertex!r} to exclude {family}, found that it does not")
    expect(not families, f"expected a tree of all sets of nodes, found {len(families)} left out")


def verify(plan: dict[str, Any], proof: Proof) -> list[str]:
    """What is proved of a plan's document, in sentences. Raises FalseProofError."""
    facts, steps = proof.facts, proof.steps
    cost = [(one["name"], frozen(one["value"])) for one in plan["cost"]]
    at = [number for number, step in enumerate(steps) if step.outcome == "chosen"]
    expect(len(at) == 1, f"expected one step that is chosen, found {len(at)}")
    step, value = steps[at[0]], dict(cost)
    given = [one for one in plan["rung"].split(", ")[1:] if one != "unequal cells"]
    expect(given in step.fallbacks, f"expected a chosen step for the rung {given}")
    first, rest = terms_of(
        plan["policy"],
        shows_pcie=plan["layout"]["pcie"] == "mirrored",
        even=step.even,
        shares=step.shares,
    )
    found = [name for name, _ in cost]
    expect(found == first + rest, f"expected the terms {first + rest}, found {found}")
    expect(0 < proof.terms <= len(cost), f"expected 1 to {len(cost)} terms, found {proof.terms}")
    main = "equal" if step.equal and len(set(value["split"])) == 1 else "any"
    check_chosen(plan, Problem(facts, step, equal=main == "equal"), cost)
    searches = {search.splits: search for search in step.searches}
    wanted = {main, "any", "equal"} if step.equal else {main}
    expect(searches.keys() == wanted, f"expected searches of {sorted(wanted)} splits")
    walk(facts, step, searches.pop(main), cost[: proof.terms], 0)
    for search in searches.values():
        check_preference(facts, step, search, dict(cost[: len(first)]), main)
    earlier = [one for other in steps[: at[0]] for one in other.fallbacks]
    for one in filter(GIVES_WAY.__contains__, given):
        left = [other for other in given if other != one]
        expect(left in earlier, f"expected an earlier step {left}, found none")
    near = first.index("nodes_spanned") if plan["policy"] == "cores-first" else int(step.shares)
    said = [f"no placement costs less in the first {proof.terms} of {len(cost)} terms"]
    for number, other in enumerate(steps):
        if number != at[0]:
            said.append(check_step(facts, other, cost[:near], number < at[0]))
    return said


def check_chosen(plan: dict[str, Any], problem: Problem, cost: Goal) -> None:
    """The plan's placing is one of those that are compared, and costs what it says."""
    facts, step, value = problem.facts, problem.step, dict(cost)
    expect(set(value["nodes"]) <= set(facts.nodes), f"expected nodes of {facts.nodes}")
    nodes = [facts.nodes.index(node) for node in value["nodes"]]
    split = tuple(-part for part in value["split"])
    expect(
        nodes and nodes == sorted(set(nodes)) and len(split) == len(nodes), "expected nodes once"
    )
    expect(set(plan["nodes"]) == set(value["nodes"]), f"expected the nodes {value['nodes']}")
    owned = {one["bdf"] for one in plan["devices"]}
    gpus = [
        number
        for number, gpu in enumerate(facts.gpus)
        if gpu.position in value["gpus"] and gpu.position not in facts.named_positions
    ]
    others = {one.bdf for one in facts.gpus if one.position not in value["gpus"]}
    named = {one.bdf for one in facts.gpus if one.position in value["gpus"]}
    expect(named <= owned and not others & owned, f"expected GPUs {sorted(named)} in the plan")
    reasons = list(problem.rejections(nodes, ()))
    expect(not reasons, f"expected nodes that hold the VM, found {reasons}")
    ways = [group for group in problem.groups if set(gpus) <= set(group)]
    expect(
        ways and len(gpus) == facts.gpu_count, f"expected {facts.gpu_count} GPUs that may be chosen"
    )
    family = Family(problem, nodes, (), gpus)
    ranges = [family.part(node) for node in nodes]
    fits = all(low <= part <= high for (low, high), part in zip(ranges, split, strict=True))
    expect(fits and sum(split) == step.groups, f"expected a split of {step.groups} within {ranges}")
    for name, wanted in cost:
        found = Family(problem, nodes, (), gpus, split).bound(name)
        expect(found == wanted, f"expected {name} {found}, found {wanted}")


def check_preference(
    facts: Facts, step: Step, search: Search, own: dict[str, Any], main: str
) -> None:
    """Whether equal cells are preferred by the rule, or are not."""
    goal = list(zip(own, search.first, strict=False))
    if search.least is None:
        expect(main == "any", "expected a set of nodes of least first terms")
        return walk(facts, step, search, [], 1)
    problem = Problem(facts, step, equal=search.splits == "equal")
    expect(len(goal) == len(own), f"expected {len(own)} first terms")
    reasons = list(problem.rejections(search.least, ()))
    families = [Family(problem, search.least, (), group) for group in problem.groups]
    is_so = not reasons and any(one.compare(goal)[0] == 0 for one in families)
    expect(is_so, f"expected first terms of the nodes {search.least}, found others")
    worse = [name for name, least in goal if name in EQUALITY and own[name] > least]
    better = [name for name, least in goal if name in EQUALITY and own[name] < least]
    expect(not worse if main == "equal" else better, "expected equal cells where they cost no more")
    return walk(facts, step, search, goal, 0)


def check_step(facts: Facts, step: Step, near: Goal, is_earlier: bool) -> str:
    """What is proved of a fallback that is not chosen."""
    name = " or ".join(", ".join(one) or "nothing gives way" for one in step.fallbacks)
    if step.outcome == "host-core":
        expect(step.cores_left - step.groups < step.cores_kept, f"{name}: expected too few cores")
        return f"{name}: the host would keep too few cores"
    if step.outcome == "unproved":
        return f"{name}: not proved: {step.reason}"
    is_worse = step.outcome == ("worse" if is_earlier else "not-better") and near
    expect(
        step.outcome == "no-set" or is_worse,
        f"{name}: expected another outcome than {step.outcome}",
    )
    expect(
        [one.splits for one in step.searches] == ["any"],
        f"{name}: expected one search of any split",
    )
    walk(facts, step, step.searches[0], near if is_worse else [], int(is_earlier or not is_worse))
    return f"{name}: " + ("no node set holds the VM" if not is_worse else "nothing better")


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise FalseProofError(what)


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
