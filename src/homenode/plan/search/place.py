"""Place: from a host and a request to a placement, or to every reason why there is none.

Ladder (ladder.py), devices (devices.py), supply of each node (supply.py, memory.py), search
(solve.py), then the PUs and QEMU's own threads. Same input, same placement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec import structs

from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.plan.allocations import Allocations, allocations
from homenode.plan.devices.options import DeviceInventory, DeviceOptions, device_options
from homenode.plan.findings.of_devices import device_findings
from homenode.plan.findings.of_placement import memory_short, placement_findings
from homenode.plan.findings.siblings import document_siblings, whole_core_costs
from homenode.plan.model import Rejection, RunnerUp, Unplannable
from homenode.plan.options import DocumentSiblings, Policy
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search import explicit_cells
from homenode.plan.search.cost import Cost, terms
from homenode.plan.search.distances import DistanceMatrix, distance_matrix
from homenode.plan.search.explicit_cells import check_cells
from homenode.plan.search.ladder import (
    Concession,
    Fallback,
    MemoryRule,
    check_layout,
    fallback_name,
    fallbacks,
)
from homenode.plan.search.memory import page_size_bytes
from homenode.plan.search.pinning import (
    assigned_cells,
    memory_nodes,
    pinned_cells,
    qemu_threads,
    threads_shown,
    uneven_memory,
)
from homenode.plan.search.problem import PlacementSearch, SearchProblem, Split
from homenode.plan.search.rejections import (
    host_core,
    is_of_cores,
    refusal,
    single_nodes,
    space_for,
    unusable_nodes,
    whole_host,
    with_hint,
)
from homenode.plan.search.solve import (
    Placing,
    Solution,
    may_be_nearer,
    solve,
    solve_fixed,
    without_first_gpu,
)
from homenode.plan.search.supply import CoreInventory, Usable, usable
from homenode.plan.search.threads import (
    ThreadPlaces,
)
from homenode.topology import LOCAL_DISTANCE, Host
from homenode.vm.layout import (
    GuestCells,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
    named,
    with_siblings,
)

MOST_REFUSED_NODES = 16


@dataclass(frozen=True)
class Inventory:
    """What a search needs to know of a host, whoever has what of it: hosts with the same nodes,
    cores and devices can share it. Each part is worked out when it is first asked for."""

    host: Host

    @cached_property
    def cores(self) -> CoreInventory:
        return CoreInventory(self.host)

    @cached_property
    def devices(self) -> DeviceInventory:
        return DeviceInventory(self.host)

    @cached_property
    def distances(self) -> DistanceMatrix:
        return distance_matrix(self.host)


def place(
    host: Host, request: GuestRequest, inventory: Inventory | None = None, *, brief: bool = False
) -> Placement:
    """The placement of least cost on the first fallback that holds the VM. inventory: of a host
    that differs in memory and VMs at most; None = of this one. brief: without what only explains
    it: runners-up, rejections, findings, gaps.

    Raises Unplannable with every rejection; UsageError for layout and policy that clash;
    InputError for devices or nodes that the host has not.
    """
    inventory = inventory or Inventory(host)
    if request.document_siblings is DocumentSiblings.WHEN_SHORT:
        return _cores_or_siblings(host, request, inventory, brief=brief)
    layout = request.layout
    check_layout(layout, request.options.policy)
    others = allocations(host, request)
    options = device_options(host, request, others, inventory.devices)
    floats = layout.pinning is Pinning.NONE
    if floats and layout.cells is GuestCells.FLAT and layout.memory is MemoryBinding.AS_IT_WAS:
        return _unplaced(host, request, others, options)
    free = usable(request, others, inventory.cores)
    with_service = free
    if others.service_cores:
        with_service = usable(request, others, inventory.cores, service_cores=True)
    search = PlacementSearch(
        host, request, others, options, inventory.distances, (free, with_service), brief
    )
    if request.options.explicit_cells:
        return _explicit(search)
    rejections = list(unusable_nodes(host, request))
    misses: list[_Miss] = []
    refused: set[tuple[object, ...]] = set()
    said: set[tuple[object, ...]] = set()
    too_few: set[tuple[int, ...]] = set()
    knows_refusals = True
    for fallback in fallbacks(request, search.free[1]):
        groups = (fallback.groups, *(one.groups for one in search.supplies(fallback)))
        if groups in too_few:
            continue  # whatever of the memory gives way
        problem = search.problem(fallback)
        if problem.key() in refused:
            continue  # nothing gave way that counts here
        if _takes_host_core(search, problem, fallback):
            rejections.append(host_core(request, problem))
            continue
        solution, is_known = solve(problem)
        knows_refusals &= is_known
        if solution is not None:
            placement = _placement(search, fallback, problem, solution, rejections)
            if placement is not None:
                better = _better(search, fallback, problem, solution, rejections)
                found = better or placement
                return found if knows_refusals else replace(found, optimal=None)
            continue
        refused.add(problem.key())
        if sum(groups[1:]) < fallback.groups:
            too_few.add(groups)
        if brief:
            continue
        cores = (
            fallback.grouping.threads,
            fallback.grouping.counts_pus,
            tuple(one.groups for one in problem.supplies),
        )
        if cores not in said:
            said.add(cores)
            rejections += single_nodes(
                host, request, problem, fallback, search.free_on(fallback), others
            )
        miss = _Miss(fallback, problem, whole_host(host, request, problem, fallback))
        misses.append(miss)
        rejections.append(miss.rejection)
    if brief:
        raise Unplannable(f"no placement on host {host.name!r}")
    raise _refusal(search, rejections, misses)


def _cores_or_siblings(
    host: Host, request: GuestRequest, inventory: Inventory, *, brief: bool
) -> Placement:
    """A whole core for each vCPU, unless that costs the host its last core, leaves it no more than
    it keeps, or mixes kinds of core: then siblings as the document shows them, where they fit."""
    for_cores = replace(request, document_siblings=DocumentSiblings.IGNORED)
    layout = with_siblings(request.layout)
    threads = request.guest.threads_per_core
    for_siblings = replace(for_cores, layout=layout, keep_vcpus=True, most_threads=threads)
    refusal, whole, paired, costs = None, None, None, ["need more cores than are free"]
    try:
        whole = place(host, for_cores, inventory, brief=brief)
        costs = list(whole_core_costs(host, request, whole))
    except Unplannable as error:
        refusal = error
    if costs or not brief:
        try:
            paired = place(host, for_siblings, inventory, brief=brief or not costs)
        except Unplannable:
            paired = None
    if paired is not None and (
        paired.threads_per_core == 1
        # Siblings that lie on one core by chance are not those of the document.
        or {Concession.SHARED_CORES, Concession.SIBLINGS_NOT_EXPOSED} & {*paired.concessions}
    ):
        paired = None
    if costs and paired is not None:
        found, other = replace(paired, layout=layout, takes_siblings=True), whole
    elif whole is not None:
        found, other = whole, paired
    else:
        assert refusal is not None, "neither whole cores nor siblings hold the VM"
        raise refusal
    if brief:
        return found
    said = document_siblings(host, request, found, other, costs)
    return replace(found, findings=(*found.findings, *said))


@dataclass(frozen=True, slots=True)
class _Miss:
    """A fallback that holds the VM on no nodes, and why."""

    fallback: Fallback
    problem: SearchProblem
    rejection: Rejection


def _refusal(
    search: PlacementSearch, rejections: Sequence[Rejection], misses: Sequence[_Miss]
) -> Unplannable:
    """What to raise. It says first what more cores would not cure, of the first fallback where that
    is; else the fallback whose cores come nearest."""
    request = search.request
    first = next((miss for miss in misses if not is_of_cores(miss.rejection)), None)
    if first is None and misses:
        first = max(misses, key=lambda miss: space_for(request, miss.problem, miss.fallback))
    headline = None
    if first is not None:
        headline = with_hint(request, first.problem, first.fallback, first.rejection)
        rejections = [headline if one == first.rejection else one for one in rejections]
    return refusal(search.host, request, search.free[0], rejections, headline)


def _better(
    search: PlacementSearch,
    fallback: Fallback,
    problem: SearchProblem,
    solution: Solution,
    rejections: list[Rejection],
) -> Placement | None:
    """The placement of a later fallback that is better, where only the host's last core or memory
    next to its vCPUs give way for it; None where none is.

    Better: where vCPUs share cores, by the cores that the VM gets. Then by what comes first with
    cores-first, class of device distance, packages and, where the guest sees its PCIe tree, GPUs
    away from home; then, for a VM with GPUs, by the GPU sets that it breaks, where it is known that
    this fallback cannot break fewer.
    """
    near = search.request.options.policy is Policy.CORES_FIRST
    elsewhere = fallback.memory is MemoryRule.ELSEWHERE
    if not fallback.shares and (elsewhere or not near):
        return None
    names = problem.first[: problem.first.index("nodes_spanned") if near else 1]
    best, found = solution.best.cost, None

    counts_sets = near and search.options.has_gpus and solution.optimal

    def concerns(cost: Cost) -> list[int]:
        lost = cost.gpu_sets_lost if counts_sets else 0
        return [*(getattr(cost, name) for name in names), lost]

    least = {"vcpus_beyond_cores": 0, "device_class": LOCAL_DISTANCE, "packages_spanned": 1}
    limits = (*(least.get(name, 0) for name in names), 0)
    if all(mine <= limit for mine, limit in zip(concerns(best), limits, strict=True)):
        return None
    ladder = list(fallbacks(search.request, search.free[1]))
    others = [
        other
        for other in ladder[ladder.index(fallback) + 1 :]
        if other.is_like(fallback) and (fallback.shares or other.memory is not MemoryRule.ELSEWHERE)
    ]
    # Where every node holds as much as before, no other set of nodes holds the VM.
    roomier = [
        other
        for other in others
        if (theirs := search.problem(other)).capacities != problem.capacities
        or (fallback.shares and theirs.whole_cores != problem.whole_cores)
    ]
    if not roomier or not (concerns(best)[-1] or may_be_nearer(search.problem(roomier[-1]), best)):
        return None
    for other in roomier:
        lower = search.problem(other)
        if _takes_host_core(search, lower, other):
            continue
        better, _ = solve(lower)
        if better is None:
            continue
        count = 1 if elsewhere or other.memory is MemoryRule.ELSEWHERE else None
        if concerns(better.best.cost)[:count] < concerns(best)[:count]:
            placement = _placement(search, other, lower, better, rejections)
            if placement is not None:
                best, found = better.best.cost, placement
                elsewhere = other.memory is MemoryRule.ELSEWHERE
    return found


def _explicit(search: PlacementSearch) -> Placement:
    """The placement of cells that the user gives; siblings and the host's share give way as
    elsewhere, the cells do not."""
    host, request = search.host, search.request
    check_cells(request)
    wanted = request.options.explicit_cells
    rejections = list(unusable_nodes(host, request))
    page = page_size_bytes(host, request)
    first: Rejection | None = None
    for fallback in fallbacks(request, search.free[1]):
        if fallback.memory is not MemoryRule.FOLLOWS or fallback.mixed:
            continue
        per_vcpu = fallback.grouping.threads if request.keep_vcpus else 1
        if any(cell.vcpus % per_vcpu for cell in wanted):
            continue
        problem = replace(search.problem(fallback), pages=0)
        groups = [cell.vcpus // per_vcpu for cell in wanted]
        if _takes_host_core(search, problem, fallback):
            continue
        ways: dict[Split, tuple[int, ...]] = {}
        for nodes in explicit_cells.assignments(problem, wanted, groups, page):
            by_node: dict[int, int] = {}
            for node, number in zip(nodes, groups, strict=True):
                by_node[node] = by_node.get(node, 0) + number
            ways.setdefault(tuple(sorted(by_node.items())), nodes)
        solution = solve_fixed(problem, ways)
        if solution is not None:
            assigned = tuple(zip(ways[solution.best.split], groups, strict=True))
            found = _placement(search, fallback, problem, solution, rejections, assigned)
            if found is not None:
                return replace(found, cell_memory_bytes=tuple(cell.memory_bytes for cell in wanted))
        free = search.free_on(fallback)
        rejections += single_nodes(host, request, problem, fallback, free, search.others)
        first = first or Rejection(
            "cells",
            (),
            "no nodes hold the cells as they are given",
            "leave node= out, or make the cells smaller",
        )
    raise refusal(host, request, search.free[0], rejections, first)


def _unplaced(
    host: Host, request: GuestRequest, others: Allocations, options: DeviceOptions
) -> Placement:
    """A VM that is neither pinned nor bound; only its GPUs are to be chosen."""
    devices = options.chosen(options.of_least_loss())
    return Placement(
        (),
        (),
        (),
        (),
        1,
        None,
        (),
        devices,
        "not placed",
        findings=(
            *options.findings,
            *memory_short(host, request),
            *device_findings(host, request, devices, others),
        ),
        gaps=(*others.gaps, *options.gaps, *options.unplaced(devices)),
    )


def _takes_host_core(search: PlacementSearch, problem: SearchProblem, fallback: Fallback) -> bool:
    """Whether whole cores for all groups would leave the host too few without vCPUs."""
    if (
        not fallback.keeps_core
        or fallback.grouping.counts_pus
        or search.request.layout.pinning is Pinning.NONE
    ):
        return False
    if sum(supply.groups for supply in problem.supplies) < problem.groups:
        return False  # too few for the vCPUs themselves
    left = search.free[0].cores_without_vcpus - problem.groups
    return left < search.request.host_reserve.cores


def _placement(
    search: PlacementSearch,
    fallback: Fallback,
    problem: SearchProblem,
    solution: Solution,
    rejections: list[Rejection],
    assigned: tuple[tuple[int, int], ...] = (),
) -> Placement | None:
    """The placement of a solution; None where its memory or the host's core is missing after all.

    assigned: (node, groups) of each cell that the user gives, in cell order.
    """
    host, request = search.host, search.request
    best = solution.best
    free = search.free_on(fallback)
    cells = tuple(
        assigned_cells(search, fallback, problem, best, assigned)
        if assigned
        else pinned_cells(search, fallback, problem, best)
    )
    threads = threads_shown(request, fallback, cells)
    nodes = tuple(problem.supplies[cell.node].cores.index for cell in cells)
    own = tuple(dict.fromkeys(nodes))
    memory = memory_nodes(search, fallback, own)
    floats = request.layout.pinning is Pinning.NONE
    vcpu_pus = CpuSet.from_bits(sum(g.pus for cell in cells for g in cell.groups))
    if memory is None or (
        fallback.grouping.counts_pus and not _host_keeps_core(search, fallback, vcpu_pus)
    ):
        return None
    pins = tuple(pin for cell in cells for pin in cell.pins)
    unequal = fallback.equal and len({len(cell.pins) for cell in cells}) > 1
    given = (*fallback.concessions, *((Concession.UNEQUAL_CELLS,) if unequal else ()))
    places = (
        ThreadPlaces(None, ())
        if floats
        else qemu_threads(search, problem, best, free, vcpu_pus, pins)
    )
    if len(best.split) > 1 and len(problem.supplies) <= MOST_REFUSED_NODES and not search.brief:
        rejections += single_nodes(host, request, problem, fallback, free, search.others)
    devices = search.options.chosen(best.gpus)
    names = (*problem.first, *problem.rest)
    found = Placement(
        nodes=nodes,
        vcpu_pins=() if floats else pins,
        vcpu_nodes=tuple(i for i, cell in enumerate(cells) for _ in cell.pins),
        memory_nodes=() if request.layout.memory is MemoryBinding.AS_IT_WAS else memory,
        threads_per_core=threads,
        emulator_pus=places.emulator_pus,
        iothread_pus=places.iothread_pus,
        devices=devices,
        fallback=fallback_name(_span(problem, best), given),
        concessions=tuple(given),
        layout=_layout(request, fallback, threads),
        cell_memory_bytes=uneven_memory(search, fallback, problem, cells),
        cost=terms(best.cost, names),
        optimal=solution.optimal,
    )
    if search.brief:
        return found
    findings = placement_findings(
        host,
        request,
        devices,
        search.others,
        given=given,
        fallback=fallback,
        own=own,
        memory=memory,
        vcpu_pus=vcpu_pus,
        threads=threads,
        isolated=free.isolated,
    )
    return replace(
        found,
        runners_up=_runners_up(problem, solution, names, cells_given=bool(assigned)),
        rejections=tuple(replace(one, hint=None) for one in dict.fromkeys(rejections)),
        findings=(*search.options.findings, *findings, *places.findings),
        gaps=(
            *_host_gaps(search, fallback, free),
            *search.others.gaps,
            *search.options.gaps,
            *search.options.unplaced(devices),
        ),
    )


def _layout(request: GuestRequest, fallback: Fallback, threads: int) -> Layout | None:
    """The layout that the VM gets where it is not the one asked for: vCPUs share cores."""
    if not fallback.shares or request.layout.pinning is Pinning.NODE:
        return None
    siblings = Siblings.EXPOSED if threads > 1 else Siblings.HIDDEN
    return named(structs.replace(request.layout, pinning=Pinning.ALL_PUS, siblings=siblings))


def _host_keeps_core(search: PlacementSearch, fallback: Fallback, vcpu_pus: CpuSet) -> bool:
    if not fallback.keeps_core or search.request.layout.pinning is Pinning.NONE:
        return True
    used = vcpu_pus.bits | search.others.vcpu_cores.bits
    left = sum(not core.pus.bits & used for core in search.host.cores)
    return left >= search.request.host_reserve.cores


def _span(problem: SearchProblem, best: Placing) -> str:
    cost = best.cost
    if cost.nodes_spanned == 1:
        return "one LLC" if cost.llcs_spanned == 1 else "one node"
    if cost.nodes_spanned == len(problem.supplies):
        return "all nodes"
    return "one package" if cost.packages_spanned == 1 else "across packages"


def _runners_up(
    problem: SearchProblem, solution: Solution, names: tuple[str, ...], *, cells_given: bool
) -> tuple[RunnerUp, ...]:
    """Other sets of nodes, and the best that other GPUs would have given on the same nodes."""
    own = terms(solution.best.cost, names)
    found = list(solution.runners_up())
    other = without_first_gpu(problem, solution.best, keeps_split=cells_given)
    if other is not None and all(other.cost != one.cost for one in found):
        found.append(other)
    result = []
    for placing in found:
        theirs = terms(placing.cost, names)
        differing = (a.name for a, b in zip(own, theirs, strict=True) if a != b)
        result.append(
            RunnerUp(
                tuple(NodeIndex(node) for node in placing.cost.nodes),
                theirs,
                next(differing),
                problem.options.chosen(placing.gpus) if problem.options.count else (),
            )
        )
    return tuple(sorted(result, key=lambda one: [term.value for term in one.cost]))


def _host_gaps(search: PlacementSearch, fallback: Fallback, free: Usable) -> Iterator[Gap]:
    host = search.host
    if host.distances is None and len(host.nodes) > 1:
        yield Gap("distances between nodes", "the host gives none: 10 and 20 were assumed")
    if free.nodes and not host.llcs:
        yield Gap("LLCs", "the host gives none, so cores were not kept within one")
    for node, memory in search.memory_on(fallback).items():
        if memory.pages is None:
            yield Gap(f"node {node} memory", "unknown, so it was assumed to suffice")
