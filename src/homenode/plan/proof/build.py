"""Build: the proof of a plan, made from the problems of its ladder and the placing it chose.

The search is not asked how it found the placing: whatever it did, a proof is a tree of families of
node sets, of which the verifier's own arithmetic excludes each leaf. Where that is not enough, the
proof says how many of the terms it covers, or why there is none.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from homenode.plan.layout import Pinning, with_siblings
from homenode.plan.model import Plan
from homenode.plan.proof.statement import Device, Facts, Gpu, Home, Proof, Search, Step
from homenode.plan.proof.verifier import Family, Goal, Nodes, Problem
from homenode.plan.request import DocumentSiblings, GuestRequest, Policy
from homenode.plan.search.allocations import allocations
from homenode.plan.search.certain_nodes import with_certain_nodes
from homenode.plan.search.devices import device_options
from homenode.plan.search.distances import members
from homenode.plan.search.ladder import Concession, Fallback, fallbacks
from homenode.plan.search.place import Inventory
from homenode.plan.search.problem import Home as SearchHome
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.search.supply import usable
from homenode.topology import Host

MOST_VERTICES = 20_000
MOST_BOUNDS = 8_000
"""Of one search; then the proof is of fewer terms, or there is none."""

MOST_CHOICES = 300
"""Sets of GPUs that are looked at one by one."""


class NotProvedError(Exception):
    """Says why there is no proof."""


def proof_of(host: Host, request: GuestRequest, plan: Plan) -> dict[str, Any]:
    """The proof of a plan that was made for the request on this host, as its document has it."""
    try:
        return msgspec.to_builtins(_proof(with_certain_nodes(host), request, plan))  # type: ignore[no-any-return]
    except NotProvedError as error:
        return {"not_proved": str(error)}


def _proof(host: Host, request: GuestRequest, plan: Plan) -> Proof:
    if request.explicit_cells:
        raise NotProvedError("the cells were given one by one")
    if not plan.cost:
        raise NotProvedError("no nodes were chosen")
    for variant in _variants(request):
        search = _search(host, variant)
        made = _Builder(search, plan)
        if made.chosen is not None:
            return made.proof()
    raise NotProvedError("no step of the ladder has this placing")


def _variants(request: GuestRequest) -> Iterator[GuestRequest]:
    """The requests that place() makes of one whose document shows siblings."""
    if request.document_siblings is not DocumentSiblings.WHEN_SHORT:
        yield request
        return
    from dataclasses import replace

    plain = replace(request, document_siblings=DocumentSiblings.IGNORED)
    yield plain
    yield replace(
        plain,
        layout=with_siblings(request.layout),
        keep_vcpus=True,
        most_threads=request.guest.threads_per_core,
    )


def _search(host: Host, request: GuestRequest) -> PlacementSearch:
    inventory = Inventory(host)
    others = allocations(host, request)
    free = usable(request, others, inventory.cores)
    service = usable(request, others, inventory.cores, service_cores=True)
    return PlacementSearch(
        host,
        request,
        others,
        device_options(host, request, others, inventory.devices),
        inventory.distances,
        (free, service if others.service_cores else free),
    )


class _Builder:
    def __init__(self, search: PlacementSearch, plan: Plan) -> None:
        self.search, self.plan = search, plan
        self.cost: Goal = [(term.name, term.value) for term in plan.cost]
        value: dict[str, Any] = dict(self.cost)
        self.nodes, self.split = value["nodes"], tuple(-part for part in value["split"])
        self.ladder = list(fallbacks(search.request, search.free[1]))
        given = tuple(plan.fallback.split(", ")[1:])
        self.given = tuple(one for one in given if one != Concession.UNEQUAL_CELLS)
        self.chosen = next((one for one in self.ladder if self._is_chosen(one)), None)

    def _is_chosen(self, fallback: Fallback) -> bool:
        threads = fallback.grouping.threads
        groups = fallback.groups
        vcpus = self.plan.vcpus
        return (
            fallback.concessions == self.given
            and groups == sum(self.split)
            and (vcpus == groups * threads or -(-vcpus // threads) == groups)
            and len(self.plan.cost) == sum(map(len, self._terms(fallback)))
        )

    def _terms(self, fallback: Fallback) -> tuple[tuple[str, ...], tuple[str, ...]]:
        problem = self.search.problem(fallback)
        return problem.first, problem.rest

    def proof(self) -> Proof:
        assert self.chosen is not None
        problem = self.search.problem(self.chosen)
        if any(len(one.parts) > 1 for one in problem.supplies):
            raise NotProvedError("cores of a node are of several packages")
        if problem.device_pages:
            raise NotProvedError("memory devices lie with their cells")
        facts = _facts(problem)
        step = self._chosen_step(facts, problem)
        terms, step = step
        steps = [*self._earlier(facts, problem), step]
        return Proof(terms=terms, facts=facts, steps=steps)

    def _chosen_step(self, facts: Facts, problem: SearchProblem) -> tuple[int, Step]:
        assert self.chosen is not None
        step = _step(problem, self.chosen, "chosen")
        main = "equal" if problem.equal and len(set(self.split)) == 1 else "any"
        terms, tree = _deepest(facts, step, main, self.cost, self._positions(facts))
        searches = [Search(splits=main, tree=tree)]  # type: ignore[arg-type]
        if problem.equal:
            searches.append(self._preference(facts, step, problem, main))
        return terms, msgspec.structs.replace(step, searches=searches)

    def _positions(self, facts: Facts) -> list[int]:
        return [facts.nodes.index(node) for node in self.nodes]

    def _likely(self, facts: Facts) -> list[list[int]]:
        """The sets of nodes that the plan names: of the runners-up, and the chosen one last."""
        named = [*(one.nodes for one in reversed(self.plan.runners_up)), self.nodes]
        return [[facts.nodes.index(node) for node in nodes] for nodes in named]

    def _preference(self, facts: Facts, step: Step, problem: SearchProblem, main: str) -> Search:
        """The other kind of split: where equal cells were chosen, none is nearer; where they were
        not, the best of them costs more of what they may not."""
        other = "any" if main == "equal" else "equal"
        own = self.cost[: len(problem.first)]
        arithmetic = Problem(facts, step, equal=other == "equal")
        positions = self._positions(facts)
        if main == "equal":
            tree = _tree(arithmetic, own, 0, positions)
            if not isinstance(tree, int):
                return Search(splits=other, tree=tree, least=positions, first=[v for _, v in own])
        nodes, first = _least_set(arithmetic, problem.first, self._likely(facts))
        if nodes is None:
            tree = _tree(arithmetic, [], 1, positions)
        else:
            tree = _tree(arithmetic, list(zip(problem.first, first, strict=True)), 0, nodes)
        if isinstance(tree, int):
            raise NotProvedError("the choice between equal and unequal cells is not proved")
        return Search(splits=other, tree=tree, least=nodes, first=first)

    def _earlier(self, facts: Facts, chosen: SearchProblem) -> Iterator[Step]:
        """The steps before the one that is chosen; those of the same numbers as one."""
        found: dict[object, tuple[Fallback, SearchProblem, list[list[str]]]] = {}
        assert self.chosen is not None
        for fallback in self.ladder[: self.ladder.index(self.chosen)]:
            problem = self.search.problem(fallback)
            takes = self._takes_host_core(fallback, problem)
            key = (takes, problem.key())
            names = [str(one) for one in fallback.concessions]
            found.setdefault(key, (fallback, problem, []))[2].append(names)
        for (takes, _), (fallback, problem, names) in found.items():
            yield self._earlier_step(facts, fallback, problem, names, takes)

    def _earlier_step(
        self,
        facts: Facts,
        fallback: Fallback,
        problem: SearchProblem,
        names: list[list[str]],
        takes: bool,
    ) -> Step:
        if takes:
            return Step(
                fallbacks=names,
                outcome="host-core",
                groups=problem.groups,
                cores_left=self.search.free[0].cores_without_vcpus,
                cores_kept=self.search.request.host_reserve.cores,
            )
        step = msgspec.structs.replace(_step(problem, fallback, "no-set"), fallbacks=names)
        arithmetic = Problem(facts, step, equal=False)
        tree = _tree(arithmetic, [], 1, ())
        if not isinstance(tree, int):
            return msgspec.structs.replace(step, searches=[Search(splits="any", tree=tree)])
        near = self._near()
        tree = _tree(arithmetic, near, 1, ()) if near else 0
        if not isinstance(tree, int):
            return msgspec.structs.replace(
                step, outcome="worse", searches=[Search(splits="any", tree=tree)]
            )
        return Step(
            fallbacks=names,
            outcome="unproved",
            groups=problem.groups,
            reason="sets of nodes may hold the VM here",
        )

    def _near(self) -> Goal:
        names = [name for name, _ in self.cost]
        if self.search.request.policy is Policy.CORES_FIRST:
            return self.cost[: names.index("nodes_spanned")]
        return self.cost[: int(names[0] == "vcpus_beyond_cores")]

    def _takes_host_core(self, fallback: Fallback, problem: SearchProblem) -> bool:
        """As place() asks before it searches."""
        if not fallback.keeps_core or fallback.grouping.counts_pus:
            return False
        if self.search.request.layout.pinning is Pinning.NONE:
            return False
        if sum(supply.groups for supply in problem.supplies) < problem.groups:
            return False
        left = self.search.free[0].cores_without_vcpus - problem.groups
        return left < self.search.request.host_reserve.cores


# The statement.


def _facts(problem: SearchProblem) -> Facts:
    homes: dict[int, tuple[int, SearchHome]] = {}

    def number(home: SearchHome) -> int:
        return homes.setdefault(id(home), (len(homes), home))[0]

    options = problem.options
    devices = [
        Device(home=number(one.home), is_gpu=one.is_gpu, counts=one.affinities)
        for one in problem.named
    ]
    gpus = []
    for gpu in options.gpus:
        home = problem.gpu_homes[gpu.number] if problem.gpu_homes else None
        nics = problem.nic_homes[gpu.number] if problem.nic_homes else ()
        gpus.append(
            Gpu(
                bdf=str(gpu.bdf),
                position=gpu.position,
                home=None if home is None else number(home),
                functions=gpu.weight,
                nics=[number(nic) for nic in nics],
                is_paired=bool(gpu.nics),
                link=options.link_groups[gpu.number] if options.link_groups else None,
            )
        )
    ways = sum(_ways(one.bit_count(), options.count) for one in options.groups)
    return Facts(
        nodes=[int(one.cores.index) for one in problem.supplies],
        packages=list(problem.distances.packages),
        distances=[list(row) for row in problem.distances.between],
        homes=[
            Home(
                host_node=0,
                node=home.node.bit_length() - 1 if home.node else None,
                distances=list(home.to_node),
                package_distances=list(home.to_package),
            )
            for _, home in homes.values()
        ],
        devices=devices,
        gpus=gpus,
        named_gpus=list(members(options.named_gpus)),
        named_positions=list(options.named_positions),
        gpu_count=options.count,
        gpu_groups=[list(members(one)) for one in options.groups],
        gpu_choices="each" if ways <= MOST_CHOICES else "group",
        gpu_sets=[list(members(one)) for one in options.sets],
        gpu_nodes=list(members(problem.gpu_nodes)),
        requires_home=problem.requires_home,
        most_nodes=problem.most_nodes,
        page_bytes=problem.page_bytes,
        huge_pages=problem.huge,
        packs=problem.pack,
    )


def _ways(gpus: int, count: int) -> int:
    from math import comb

    return comb(gpus, count)


def _step(problem: SearchProblem, fallback: Fallback, outcome: str) -> Step:
    memory = "none"
    pages = 0
    for memory, pages in (
        ("follows", problem.pages),
        ("together", problem.pages_together),
        ("anywhere", problem.pages_anywhere),
        ("none", 0),
    ):
        if pages:
            break
    counts: list[list[tuple[int, int, int]]] = []
    if outcome == "chosen":
        for node, supply in enumerate(problem.supplies):
            own = (problem.cost_of(node, groups) for groups in range(1, supply.groups + 1))
            counts.append([(one.unisolated, one.llcs, one.per_llc) for one in own])
    return Step(
        fallbacks=[[str(one) for one in fallback.concessions]],
        outcome=outcome,  # type: ignore[arg-type]
        groups=problem.groups,
        equal=problem.equal,
        even=problem.even_splits,
        shares=problem.shares,
        sockets=problem.counts_sockets,
        supply=[one.groups for one in problem.supplies],
        whole_cores=[one.whole_cores for one in problem.supplies],
        memory=memory,  # type: ignore[arg-type]
        pages=pages,
        free_pages=[one.pages for one in problem.memory],
        pool_pages=[one.pool_pages for one in problem.memory],
        counts=counts,
    )


# The trees.


def _deepest(
    facts: Facts, step: Step, splits: str, cost: Goal, nodes: Sequence[int]
) -> tuple[int, list[int | str]]:
    """(so many terms, their tree): as many as can be proved."""
    terms = len(cost)
    while terms:
        problem = Problem(facts, step, equal=splits == "equal")
        found = _tree(problem, cost[:terms], 0, nodes)
        if not isinstance(found, int):
            return terms, found
        terms = min(found, terms - 1)
    raise NotProvedError("not even the first term is proved within the budget")


def _tree(problem: Problem, goal: Goal, least: int, nodes: Sequence[int]) -> list[int | str] | int:
    """The tree, or the term at which a family cannot be excluded; the half of the terms where it
    would be too large."""
    names = [name for name, _ in goal]
    tree: list[int | str] = []
    families: list[tuple[Nodes, Nodes]] = [((), problem.root)]
    while families:
        if len(tree) > MOST_VERTICES or problem.work > MOST_BOUNDS:
            return len(goal) // 2
        must, may = families.pop()
        leaf, failed = _leaf(problem, must, may, goal, names, least)
        if leaf is not None:
            tree.append(leaf)
            continue
        if not may:
            return failed
        node = next((one for one in nodes if one in may), None)
        if node is None:
            left = Family(problem, must, may, problem.groups[0]).may
            node = left[0] if left else may[0]
        rest = [one for one in may if one != node]
        tree.append(node)
        families += [(must, rest), ((*must, node), rest)]
    return tree


def _leaf(
    problem: Problem, must: Nodes, may: Nodes, goal: Goal, names: Sequence[str], least: int
) -> tuple[str | None, int]:
    """(what excludes a family, None where nothing does; the term that fails)."""
    rejection = next(problem.rejections(must, may), None)
    if rejection is not None:
        return rejection, 0
    if not goal:
        return None, 0
    is_so, term = problem.stands(must, may, goal, 1, exact=False)
    if is_so:
        return names[term], 0
    if least:
        return None, term
    is_so, term = problem.stands(must, may, goal, 0, exact=False)
    if is_so:
        return "tie", 0
    is_so, exact = problem.stands(must, may, goal, 0, exact=True)
    return ("set", 0) if is_so else (None, exact)


def _least_set(
    problem: Problem, names: Sequence[str], likely: Sequence[Nodes]
) -> tuple[list[int] | None, list[int]]:
    """(a set of nodes of the least first terms, these terms); None where no set holds the VM."""
    best: tuple[list[int], list[int]] | None = None
    families: list[tuple[Nodes, Nodes]] = [((), problem.root), *((one, ()) for one in likely)]
    while families:
        if problem.work > MOST_BOUNDS:
            raise NotProvedError("the choice between equal and unequal cells is not proved")
        must, may = families.pop()
        if next(problem.rejections(must, may), None) is not None:
            continue
        goal = [] if best is None else list(zip(names, best[1], strict=True))
        if goal and problem.stands(must, may, goal, 0, exact=False)[0]:
            continue
        if not may:
            best = list(must), min(_first_terms(problem, must, names))
            continue
        families += [(must, may[1:]), ((*must, may[0]), may[1:])]
    return (None, []) if best is None else best


def _first_terms(problem: Problem, nodes: Nodes, names: Sequence[str]) -> Iterator[list[int]]:
    """The first terms of one set of nodes, for each group of GPUs."""
    for group in problem.groups:
        family = Family(problem, nodes, (), group)
        values = []
        for name in names:
            if len(family.gpus) < problem.facts.gpu_count:
                break
            values.append(family.bound(name))
            family.narrow(name, values[-1])
        else:
            yield values
