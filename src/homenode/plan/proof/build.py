"""Build: the proof of a plan, made from the problems of its ladder and the placing it chose.

The search is not asked how it found the placing: whatever it did, a proof is a tree of families of
node sets, of which the verifier's own arithmetic excludes each leaf. Where that is not enough, the
proof says how many of the terms it covers, or why there is none.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.json_text import decode_json
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, with_certain_nodes
from homenode.plan.bit_sets import members
from homenode.plan.proof.statement import (
    NODE_COSTS,
    VERSION,
    Device,
    DeviceHome,
    Facts,
    FalseProofError,
    Goal,
    NotProved,
    Outcome,
    Proof,
    Search,
    Splits,
    Step,
    plan_document,
)
from homenode.plan.proof.trees import BranchOrder, NotProvedError, deepest, tree_of
from homenode.plan.proof.verifier import EQUALITY, FAR, check_placing, roots
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.devices import Home
from homenode.plan.search.ladder import Concession, Fallback, MemoryRule, fallbacks
from homenode.plan.search.place import Inventory
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.stored import encode_plan
from homenode.vm.layout import with_siblings
from homenode.vm.plan_model import Plan
from homenode.vm.plan_options import DocumentSiblings, Policy


def proof_of(host: Host, request: GuestRequest, plan: Plan) -> Proof | NotProved:
    """The proof of a plan that was made for the request on this host."""
    try:
        return _proof(with_certain_nodes(host), request, plan)
    except NotProvedError as error:
        return NotProved(not_proved=str(error))


def _proof(host: Host, request: GuestRequest, plan: Plan) -> Proof:
    if request.options.explicit_cells:
        raise NotProvedError("the cells were given one by one")
    if not plan.cost:
        raise NotProvedError("no nodes were chosen")
    for variant in _variants(request):
        made = _Builder(Inventory(host).search(host, variant), plan)
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


class _Builder:
    def __init__(self, search: PlacementSearch, plan: Plan) -> None:
        self.search, self.plan = search, plan
        self.document = plan_document(decode_json(encode_plan(plan)))
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
        threads, vcpus = fallback.grouping.threads, self.plan.vm.vcpus
        if fallback.concessions != self.given or fallback.groups != sum(self.split):
            return False
        if vcpus != fallback.groups * threads and -(-vcpus // threads) != fallback.groups:
            return False
        problem = self.search.problem(fallback)
        step = _step(self.search, problem, fallback, "chosen")
        try:
            check_placing(self.document, _facts(self.search, problem), step, self.cost)
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
        return Proof(version=VERSION, terms=terms, facts=facts, steps=[*earlier, step, *later])

    def _chosen_step(self, facts: Facts, problem: SearchProblem) -> tuple[int, Step]:
        assert self.chosen is not None
        step = _step(self.search, problem, self.chosen, "chosen")
        main: Splits = "equal" if problem.equal and len(set(self.split)) == 1 else "any"
        placing = self._placing(facts)
        terms, tree = deepest(facts, step, main, self.cost, len(problem.first), placing)
        searches, reason = [Search(splits=main, tree=tree)], ""
        if problem.equal:
            # Where equal cells were chosen none is nearer; where they were not, they are farther.
            other: Splits = "any" if main == "equal" else "equal"
            goal = [one for one in self.cost if one[0] in EQUALITY]
            wider = [one for one in self.cost if one[0] in {*EQUALITY, FAR}]
            found: list[str] | int = 0
            for its in (goal, wider) if main == "equal" else (goal,):
                if isinstance(found, int):
                    families = roots(facts, step, equal=other == "equal")
                    found = tree_of(families, its, placing, ties=main == "equal")
            if isinstance(found, int):
                reason = "the choice between equal and unequal cells is not proved"
            else:
                searches.append(Search(splits=other, tree=found))
        return terms, msgspec.structs.replace(step, searches=searches, reason=reason)

    def _placing(self, facts: Facts) -> BranchOrder:
        nodes = tuple(facts.nodes.index(node) for node in self.nodes)
        chosen = dict(self.cost)["gpus"]
        gpus = tuple(n for n, one in enumerate(facts.devices) if one.position in chosen)
        return BranchOrder(nodes, gpus, self.split)

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
            takes = Attempt(self.search, fallback).takes_host_core
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
            tree = tree_of(families, goal, BranchOrder(), ties=ties and bool(goal))
            if not isinstance(tree, int):
                searches = [Search(splits="any", tree=tree)]
                return msgspec.structs.replace(step, outcome=outcome, searches=searches)
        reason = "nodes hold the VM that may be as near as the chosen ones"
        return Step(fallbacks=step.fallbacks, outcome="unproved", groups=step.groups, reason=reason)

    def _near(self) -> Goal:
        names = [name for name, _ in self.cost]
        if self.search.request.options.policy is Policy.CORES_FIRST:
            return self.cost[: names.index("nodes_spanned")]
        return self.cost[: int(names[0] == "vcpus_beyond_cores")]


# The statement.


def _facts(search: PlacementSearch, problem: SearchProblem) -> Facts:
    options, nodes = problem.devices.options, len(problem.supplies)
    rows: dict[int, DeviceHome] = {}
    numbers: dict[int, int] = {}

    def number(home: Home, host_node: int) -> int:
        if id(home) not in numbers:
            numbers[id(home)] = len(numbers)
            to_node = [home.to_package[package] for package in problem.distances.packages]
            rows[id(home)] = DeviceHome(host_node=host_node, distances=to_node)
        return numbers[id(home)]

    def node_of(home: Home) -> int:
        return home.node.bit_length() - 1 if home.node else nodes

    devices = []
    host_nodes: dict[int, int] = {}
    for one, (index, *_) in zip(problem.devices.named, options.homes, strict=False):
        host_nodes[id(one.home)] = index
        devices.append(
            Device(
                host_node=index,
                distances=list(one.home.to_node),
                homes=[number(one.home, index)] if one.pulls else [],
                node=node_of(one.home) if one.is_gpu else None,
            )
        )
    for gpu, its_home in zip(options.gpus, problem.devices.gpu_homes, strict=False):
        if gpu.home is not None and its_home is not None:
            host_nodes.setdefault(id(its_home), gpu.home)
    has_nics = any(gpu.nics for gpu in options.gpus)
    linked: dict[int, list[int]] = {}

    def link(gpu: int, device: int) -> None:
        if options.link_groups:
            linked.setdefault(options.link_groups[gpu], []).append(device)

    named = {gpu.position: gpu for gpu in options.gpus if options.named_gpus >> gpu.number & 1}
    of_host = search.host.devices_of_kind(DeviceKind.GPU)
    for position in options.named_positions:
        known = named.get(position)
        devices.append(
            Device(
                bdf=str(of_host[position].bdf),
                position=position,
                distances=[0] * nodes,
                is_alone=has_nics and known is not None and not known.nics,
            )
        )
    given = len(devices)
    device_of = {
        one.number: given + at
        for at, one in enumerate(gpu for gpu in options.gpus if gpu.position not in named)
    }
    for gpu in options.gpus:
        if gpu.position in named:
            device_of[gpu.number] = next(
                at for at, one in enumerate(devices) if one.position == gpu.position
            )
            link(gpu.number, device_of[gpu.number])
            continue
        link(gpu.number, device_of[gpu.number])
        home = problem.devices.gpu_homes[gpu.number] if problem.devices.gpu_homes else None
        nics = problem.devices.nic_homes[gpu.number] if problem.devices.nic_homes else ()
        homes = [one for one in (home, *nics) if one is not None]
        devices.append(
            Device(
                bdf=str(gpu.bdf),
                position=gpu.position,
                host_node=None if home is None else host_nodes[id(home)],
                distances=[gpu.weight * far for far in home.to_node] if home else [0] * nodes,
                homes=[number(one, host_nodes[id(one)]) for one in homes],
                node=None if home is None else node_of(home),
                is_alone=has_nics and not gpu.nics,
            )
        )

    def of(gpus: int) -> list[int]:
        return sorted(device_of[gpu] for gpu in members(gpus))

    return Facts(
        nodes=[int(one.cores.index) for one in problem.supplies],
        packages=list(problem.distances.packages),
        distances=[list(row) for row in problem.distances.between],
        homes=list(rows.values()),
        devices=devices,
        given=list(range(given)),
        device_count=given + options.count,
        choices=[of(one) for one in options.groups] if options.count else [[]],
        link_groups=list(linked.values()),
        gpu_sets=[of(one) for one in options.sets] if options.has_gpus else [],
        reserved=str(_reserved(search.request)),
        locality=search.request.options.device_locality.value,
        most_nodes=problem.most_nodes,
        page_bytes=problem.page_bytes,
    )


def _reserved(request: GuestRequest) -> CpuSet:
    """PUs that the request keeps from the VM."""
    kept = request.options.reserved_pus.bits | request.housekeeping_pus.bits
    kept |= 0 if request.options.emulator_pus is None else request.options.emulator_pus.bits
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
    costs, llc_parts = _costs(problem) if outcome == "chosen" else ({}, [])
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
        room=list(problem.capacities),
        cores=list(problem.whole_cores),
        memory=memory,  # type: ignore[arg-type]
        pages=pages,
        free_pages=[one.pages for one in problem.memory],
        costs=costs,
        llc_parts=llc_parts,
    )


def _costs(problem: SearchProblem) -> tuple[dict[str, list[list[int]]], list[list[int]]]:
    """(by term: for each node, what 1, 2, … groups there cost; groups on each of their LLCs)."""
    sign = 1 if problem.pack else -1
    costs: dict[str, list[list[int]]] = {name: [] for name in NODE_COSTS}
    if not problem.devices.options.has_gpus:
        costs["gpu_sets_lost"] = []
    llc_parts = []
    for node, room in enumerate(problem.capacities):
        pages = problem.memory[node].pages or 0
        its: dict[str, list[int]] = {name: [] for name in costs}
        parts = []
        for groups in range(1, room + 1):
            one = problem.cost_of(node, groups)
            parts.append(one.per_llc)
            its["unisolated_cores"].append(one.unisolated)
            its["llcs_spanned"].append(one.llcs)
            its["pages_to_reserve"].append(problem.short_pages(node, groups))
        has_gpus = problem.devices.gpu_nodes >> node & 1
        same = {
            "balance_cores": sign * problem.supplies[node].whole_cores,
            "balance_memory": sign * problem.page_bytes * pages,
            "gpu_nodes_used": has_gpus,
            "gpu_sets_lost": has_gpus,
        }
        for name, row in its.items():
            costs[name].append(_short([same[name]] * room if name in same else row))
        llc_parts.append(_short(parts))
    return costs, llc_parts


def _short(row: list[int]) -> list[int]:
    """The row without what its last number repeats."""
    while len(row) > 1 and row[-1] == row[-2]:
        row = row[:-1]
    return row
