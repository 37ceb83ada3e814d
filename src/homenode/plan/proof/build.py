"""Build: the proof of a plan, made from the problems of its ladder and the placing it chose.

The search is not asked how it found the placing: whatever it did, a proof is a tree of families of
node sets, of which the verifier's own arithmetic excludes each leaf. Where that is not enough, the
proof says how many of the terms it covers, or why there is none.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from homenode.cpuset import CpuSet
from homenode.json_text import decode_json
from homenode.plan.allocations import allocations
from homenode.plan.bit_sets import members
from homenode.plan.devices.options import device_options
from homenode.plan.model import Plan
from homenode.plan.proof.family import FalseProofError, Family, Goal
from homenode.plan.proof.statement import (
    Device,
    Facts,
    Gpu,
    Home,
    NotProved,
    Outcome,
    PlanDocument,
    Proof,
    Search,
    Splits,
    Step,
)
from homenode.plan.proof.verifier import check_chosen, roots
from homenode.plan.request import DocumentSiblings, GuestRequest, Policy
from homenode.plan.search.certain_nodes import with_certain_nodes
from homenode.plan.search.ladder import Concession, Fallback, MemoryRule, fallbacks
from homenode.plan.search.place import Inventory
from homenode.plan.search.problem import Home as SearchHome
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.search.supply import usable
from homenode.plan.stored import encode_plan
from homenode.topology import Host
from homenode.vm.layout import Pinning, with_siblings

FEW_NODES = 8
"""With more nodes a tree splits by packages before it does by nodes."""

MOST_WORK = 50_000
"""Of one tree, as `work_of` counts: some tenths of a second. Beyond, the proof is of fewer terms,
or there is none."""


class NotProvedError(Exception):
    """Says why there is no proof."""


def proof_of(host: Host, request: GuestRequest, plan: Plan) -> Proof | NotProved:
    """The proof of a plan that was made for the request on this host."""
    try:
        return _proof(with_certain_nodes(host), request, plan)
    except NotProvedError as error:
        return NotProved(not_proved=str(error))


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


@dataclass(frozen=True, slots=True)
class _Placing:
    """What to branch on first: nodes, GPUs and groups of the nodes, of the facts."""

    nodes: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()


class _Builder:
    def __init__(self, search: PlacementSearch, plan: Plan) -> None:
        self.search, self.plan = search, plan
        self.document = msgspec.convert(decode_json(encode_plan(plan)), PlanDocument)
        self.cost: Goal = [(term.name, term.value) for term in plan.cost]
        value: dict[str, Any] = dict(self.cost)
        self.nodes, self.split = value["nodes"], tuple(-part for part in value["split"])
        self.ladder = list(fallbacks(search.request, search.free[1]))
        given = tuple(plan.fallback.split(", ")[1:])
        self.given = tuple(one for one in given if one != Concession.UNEQUAL_CELLS)
        self.chosen = next((one for one in self.ladder if self._is_chosen(one)), None)

    def _is_chosen(self, fallback: Fallback) -> bool:
        """Whether the plan's placing is one of the fallback's, and costs there what the plan says:
        several may bear one name."""
        threads, vcpus = fallback.grouping.threads, self.plan.vcpus
        if fallback.concessions != self.given or fallback.groups != sum(self.split):
            return False
        if vcpus != fallback.groups * threads and -(-vcpus // threads) != fallback.groups:
            return False
        problem = self.search.problem(fallback)
        step = _step(self.search, problem, fallback, "chosen")
        try:
            check_chosen(self.document, _facts(self.search, problem), step, "any")
        except FalseProofError:
            return False
        return True

    def proof(self) -> Proof:
        assert self.chosen is not None
        problem = self.search.problem(self.chosen)
        if any(len(one.parts) > 1 for one in problem.supplies):
            raise NotProvedError("cores of a node are of several packages")
        if problem.device_pages:
            raise NotProvedError("memory devices lie with their cells")
        facts = _facts(self.search, problem)
        terms, step = self._chosen_step(facts, problem)
        at = self.ladder.index(self.chosen)
        earlier = self._others(facts, self.ladder[:at], "worse")
        later = self._others(facts, self._rivals(self.ladder[at + 1 :]), "not-better")
        return Proof(terms=terms, facts=facts, steps=[*earlier, step, *later])

    def _chosen_step(self, facts: Facts, problem: SearchProblem) -> tuple[int, Step]:
        assert self.chosen is not None
        step = _step(self.search, problem, self.chosen, "chosen")
        main: Splits = "equal" if problem.equal and len(set(self.split)) == 1 else "any"
        terms, tree = _deepest(
            facts, step, main, self.cost, len(problem.first), self._placing(facts)
        )
        searches = [Search(splits=main, tree=tree)]
        reason = ""
        if problem.equal:
            try:
                searches.append(self._preference(facts, step, problem, main))
            except NotProvedError as error:
                reason = str(error)
        return terms, msgspec.structs.replace(step, searches=searches, reason=reason)

    def _placing(self, facts: Facts) -> _Placing:
        nodes = tuple(facts.nodes.index(node) for node in self.nodes)
        chosen = dict(self.cost)["gpus"]
        gpus = tuple(number for number, gpu in enumerate(facts.gpus) if gpu.position in chosen)
        return _Placing(nodes, gpus, self.split)

    def _likely(self, facts: Facts) -> list[list[int]]:
        """The sets of nodes that the plan names: of the runners-up, and the chosen one last."""
        named = [*(one.nodes for one in reversed(self.plan.runners_up)), self.nodes]
        return [[facts.nodes.index(node) for node in nodes] for nodes in named]

    def _preference(self, facts: Facts, step: Step, problem: SearchProblem, main: Splits) -> Search:
        """The other kind of split: where equal cells were chosen, none is nearer; where they were
        not, the best of them costs more of what they may not."""
        other: Splits = "any" if main == "equal" else "equal"
        own = self.cost[: len(problem.first)]
        placing = self._placing(facts)

        def every() -> list[Family]:
            return roots(facts, step, equal=other == "equal")

        if main == "equal":
            tree = _tree(every(), own, placing, ties=True)
            if not isinstance(tree, int):
                first = [value for _, value in own]
                return Search(splits=other, tree=tree, least=list(placing.nodes), first=first)
        nodes, first = _least_set(every(), problem.first, self._likely(facts))
        if nodes is None:
            tree = _tree(every(), [], placing, ties=False)
        else:
            goal = list(zip(problem.first, first, strict=True))
            tree = _tree(every(), goal, _Placing(tuple(nodes)), ties=True)
        if isinstance(tree, int):
            raise NotProvedError("the choice between equal and unequal cells is not proved")
        return Search(splits=other, tree=tree, least=nodes, first=first)

    def _rivals(self, later: Sequence[Fallback]) -> list[Fallback]:
        """Those after the chosen one that are taken where they are nearer."""
        own, near = self.chosen, self._near()
        assert own is not None
        if not near or (own.memory is MemoryRule.ELSEWHERE and not own.shares):
            return []
        rivals = [one for one in later if one.is_like(own)]
        return [one for one in rivals if own.shares or one.memory is not MemoryRule.ELSEWHERE]

    def _others(
        self, facts: Facts, others: Sequence[Fallback], compared: Outcome
    ) -> Iterator[Step]:
        """The steps of fallbacks that are not chosen; those of the same numbers as one."""
        found: dict[object, tuple[bool, Fallback, SearchProblem, list[list[str]]]] = {}
        for fallback in others:
            problem = self.search.problem(fallback)
            takes = self._takes_host_core(fallback, problem)
            key = (takes, problem.key(), problem.shares, problem.whole_cores)
            given = [str(one) for one in fallback.concessions]
            found.setdefault(key, (takes, fallback, problem, []))[3].append(given)
        for takes, fallback, problem, names in found.values():
            if takes:
                yield Step(
                    fallbacks=names,
                    outcome="host-core",
                    groups=problem.groups,
                    cores_left=self.search.free[0].cores_without_vcpus,
                    cores_kept=self.search.request.host_reserve.cores,
                )
                continue
            step = msgspec.structs.replace(
                _step(self.search, problem, fallback, "no-set"), fallbacks=names
            )
            yield self._compared(facts, step, compared)

    def _compared(self, facts: Facts, step: Step, compared: Outcome) -> Step:
        """The step with the tree that excludes it."""
        near, ties = self._near(), compared == "not-better"
        for outcome, goal in (("no-set", []), (compared, near)):
            families = roots(facts, step, equal=False)
            tree = _tree(families, goal, _Placing(), ties=ties and bool(goal))
            if not isinstance(tree, int):
                searches = [Search(splits="any", tree=tree)]
                return msgspec.structs.replace(step, outcome=outcome, searches=searches)
        reason = "nodes hold the VM that may be as near as the chosen ones"
        return Step(fallbacks=step.fallbacks, outcome="unproved", groups=step.groups, reason=reason)

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


def _facts(search: PlacementSearch, problem: SearchProblem) -> Facts:
    options = problem.options
    homes: dict[int, int] = {}
    host_nodes = {
        id(d.home): index for d, (index, *_) in zip(problem.named, options.homes, strict=False)
    }
    for gpu, its_home in zip(options.gpus, problem.gpu_homes, strict=False):
        if gpu.home is not None:
            host_nodes.setdefault(id(its_home), gpu.home)
    made: list[SearchHome] = []

    def number(home: SearchHome) -> int:
        if id(home) not in homes:
            homes[id(home)] = len(homes)
            made.append(home)
        return homes[id(home)]

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
    return Facts(
        nodes=[int(one.cores.index) for one in problem.supplies],
        packages=list(problem.distances.packages),
        distances=[list(row) for row in problem.distances.between],
        homes=[
            Home(
                host_node=host_nodes[id(home)],
                node=home.node.bit_length() - 1 if home.node else None,
                distances=list(home.to_node),
                package_distances=list(home.to_package),
            )
            for home in made
        ],
        devices=devices,
        gpus=gpus,
        named_gpus=list(members(options.named_gpus)),
        named_positions=list(options.named_positions),
        gpu_count=options.count,
        gpu_groups=[list(members(one)) for one in options.groups],
        gpu_sets=[list(members(one)) for one in options.sets],
        gpu_nodes=list(members(problem.gpu_nodes)),
        reserved=str(_reserved(search.request)),
        locality=search.request.device_locality.value,
        most_nodes=problem.most_nodes,
        page_bytes=problem.page_bytes,
        huge_pages=problem.huge,
        packs=problem.pack,
    )


def _reserved(request: GuestRequest) -> CpuSet:
    """PUs that the request keeps from the VM."""
    kept = request.reserved_pus.bits | request.housekeeping_pus.bits
    kept |= 0 if request.emulator_pus is None else request.emulator_pus.bits
    return CpuSet.from_bits(kept)


def _step(
    search: PlacementSearch, problem: SearchProblem, fallback: Fallback, outcome: Outcome
) -> Step:
    rules = (
        ("follows", problem.pages),
        ("together", problem.pages_together),
        ("anywhere", problem.pages_anywhere),
        ("none", 0),
    )
    memory, pages = next((one for one in rules if one[1]), rules[-1])
    counts: list[list[tuple[int, int, int]]] = []
    if outcome == "chosen":
        for node, supply in enumerate(problem.supplies):
            own = (problem.cost_of(node, groups) for groups in range(1, supply.groups + 1))
            counts.append([(one.unisolated, one.llcs, one.per_llc) for one in own])
    every = sum(core.pus.bits for core in search.host.cores)
    return Step(
        fallbacks=[[str(one) for one in fallback.concessions]],
        outcome=outcome,
        groups=problem.groups,
        equal=problem.equal,
        even=problem.even_splits,
        shares=problem.shares,
        sockets=problem.counts_sockets,
        barred=str(CpuSet.from_bits(every & ~search.free_on(fallback).pus.bits)),
        threads=fallback.grouping.threads,
        counts_pus=fallback.grouping.counts_pus,
        kinds=sorted(
            (None if one is None else str(one) for one in fallback.grouping.kinds), key=str
        ),
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
    facts: Facts, step: Step, splits: Splits, cost: Goal, first: int, placing: _Placing
) -> tuple[int, list[str]]:
    """(so many terms, their tree): as many as can be proved. first: how many the nodes decide."""
    terms = len(cost)
    while terms:
        families = roots(facts, step, equal=splits == "equal")
        found = _tree(families, cost[:terms], placing, ties=True)
        if not isinstance(found, int):
            return terms, found
        terms = found if found < terms else first if first < terms else 0
    raise NotProvedError("the first terms are not proved within the budget")


def _tree(families: list[Family], goal: Goal, placing: _Placing, *, ties: bool) -> list[str] | int:
    """The tree; where there is none, so many terms as there might be one for: where these are
    those of the goal, it is the number of nodes that makes it too large."""
    names = [name for name, _ in goal]
    tree: list[str] = []
    likely, work = len(goal), 0
    while families:
        family = families.pop()
        work += work_of(family)
        if work > MOST_WORK:
            return likely
        leaf = family.rejection()
        if leaf is None:
            narrowed = copy(family)
            standing, term = narrowed.compare(goal)
            if standing == 1:
                leaf = names[term]
            elif standing == 0 and ties:
                leaf = "tie"
            else:
                branch = _branch(narrowed, placing) or _branch(family, placing)
                if branch is None:
                    return max(term, 0)
                if not branch.startswith("node"):
                    likely = min(likely, term)
                tree.append(branch)
                families += reversed(family.branches(branch))
                continue
        tree.append(leaf)
    return tree


def work_of(family: Family) -> int:
    """Roughly, what it takes to compare a family."""
    nodes = len(family.must) + len(family.may)
    return 20 + nodes * (1 + len(family.more) // 8)


def _branch(family: Family, placing: _Placing) -> str | None:
    """What to tell apart in a family; None where it is one placing."""
    packages = family.facts.packages
    known = {*family.packages, *(packages[node] for node in family.must)}
    if len(family.facts.nodes) > FEW_NODES:
        for node in (*placing.nodes, *family.may):
            if node in family.may and packages[node] not in known:
                return f"package {packages[node]}"
    for node in (*placing.nodes, *family.may):
        if node in family.may:
            return f"node {node}"
    for gpu in (*placing.gpus, *family.more):
        if gpu in family.more:
            return f"gpu {gpu}"
    wanted = dict(zip(placing.nodes, placing.groups, strict=False))
    for node in family.must:
        low, high = family.low[node], family.high[node]
        if low < high:
            middle = min(max(wanted.get(node, (low + high) // 2), low), high)
            return f"groups {node} {middle if middle < high else middle - 1}"
    return None


def _least_set(
    families: list[Family], names: Sequence[str], likely: Sequence[Sequence[int]]
) -> tuple[list[int] | None, list[int]]:
    """(a set of nodes of the least first terms, these terms); None where no set holds the VM."""
    best: tuple[list[int], list[int]] | None = None
    waiting = list(families)
    for nodes in likely:
        for family in families:
            one = copy(family)
            one.must, one.may = sorted(nodes), []
            waiting.append(one)
    work = 0
    while work < MOST_WORK:
        if not waiting:
            return (None, []) if best is None else best
        family = waiting.pop()
        work += work_of(family)
        if family.rejection() is not None:
            continue
        goal = [] if best is None else list(zip(names, best[1], strict=True))
        narrowed = copy(family)
        if goal and narrowed.compare(goal)[0] >= 0:
            continue
        if not family.may:
            best = family.must, _first_terms(family, names)
            continue
        node = (narrowed.may or family.may)[0]
        waiting += reversed(family.branches(f"node {node}"))
    raise NotProvedError("the choice between equal and unequal cells is not proved")


def _first_terms(family: Family, names: Sequence[str]) -> list[int]:
    """The first terms of one set of nodes."""
    one, values = copy(family), []
    one.narrow()
    for name in names:
        values.append(one.bound(name))
        one.narrow(name, values[-1])
    return values
