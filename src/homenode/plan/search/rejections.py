"""Rejections: why nodes cannot hold a VM, by name, with what was needed and what was found.

Hints come from the same sums as the refusal itself; no search is made to word one.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.findings import Rejection
from homenode.indices import NodeIndex
from homenode.machine.topology import CoreKind, Host, MemoryKind
from homenode.plan.memory import memory_text, overhead_bytes, page_size_bytes
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.ladder import Fallback
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.search.solve import fits
from homenode.plan.search.supply import Supply
from homenode.units import format_bytes
from homenode.vm.layout import MemoryBinding
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import DeviceLocality


def unusable_nodes(host: Host, request: GuestRequest) -> Iterator[Rejection]:
    """Nodes and PUs that can take no vCPU, whatever is free: one rejection per reason."""
    homeless = CpuSet(pu.index for pu in host.pus if pu.online and pu.node is None)
    if homeless:
        yield Rejection(
            "no-node", (), f"PUs {homeless}: on no node that the source of the host names"
        )
    without_pus = tuple(node for node in host.nodes if not node.pus)
    of_gpus = tuple(node.index for node in without_pus if node.memory_kind is MemoryKind.GPU)
    plain = tuple(node.index for node in without_pus if node.memory_kind is not MemoryKind.GPU)
    if of_gpus:
        yield Rejection(
            "gpu-memory",
            of_gpus,
            f"{_nodes_text(of_gpus)}: memory of GPUs, no PUs; never for a guest",
        )
    if plain:
        unasked = _unasked_memory(host, request)
        yield Rejection(
            "no-pus",
            plain,
            f"{_nodes_text(plain)}: no PUs, so no vCPU",
            f"--allow-memory-node {unasked[0]} lets its memory serve" if unasked else None,
        )


def single_nodes(attempt: Attempt) -> Iterator[Rejection]:
    """Why one node does not do, for each node that does not."""
    problem, request = attempt.problem, attempt.request
    page = page_size_bytes(attempt.host, request)
    pages = problem.pages or problem.pages_together
    for supply, memory in zip(problem.supplies, problem.memory, strict=True):
        node_text = f"node {supply.cores.index} (PUs {supply.cores.pus})"
        indices = (supply.cores.index,)
        if supply.groups < problem.groups:
            needs = _groups_text(attempt.fallback, problem.groups)
            owned = _owners_text(attempt, supply)
            detail = f"{node_text}: needs {needs}, {supply.groups} free"
            yield _of_cores(attempt, indices, f"{detail}; {owned}" if owned else detail)
        elif memory.pages is not None and memory.pages < pages:
            kind = "" if request.page_bytes is None else f" in pages of {format_bytes(page)}"
            needs = f"{format_bytes(pages * page)}{kind}"
            memory_detail = f"{node_text}: needs {needs}, {format_bytes(memory.pages * page)} free"
            yield _of_memory(attempt, indices, memory_detail)


def _of_cores(attempt: Attempt, nodes: tuple[NodeIndex, ...], detail: str) -> Rejection:
    return Rejection("pus" if attempt.fallback.grouping.counts_pus else "cores", nodes, detail)


def _of_memory(
    attempt: Attempt, nodes: tuple[NodeIndex, ...], detail: str, hint: str | None = None
) -> Rejection:
    constraint = "memory" if attempt.request.page_bytes is None else "pages"
    return Rejection(constraint, nodes, detail, hint)


def _unasked_memory(host: Host, request: GuestRequest) -> tuple[NodeIndex, ...]:
    """Nodes without PUs whose memory the user may allow, and has not."""
    return tuple(
        node.index
        for node in host.nodes
        if not node.pus
        and node.memory_kind is not MemoryKind.GPU
        and node.memory_bytes != 0
        and node.index not in request.options.memory_nodes_allowed
    )


def whole_host(attempt: Attempt) -> Rejection:
    """Why no set of nodes does: too few cores in all, too little memory, too few nodes, or nodes
    that cannot reach each other."""
    request, problem = attempt.request, attempt.problem
    if not attempt.knows_refusal:
        return Rejection(
            "search",
            (),
            "no set of nodes that holds the VM was found before the search ended; there may be one",
            "ask for fewer vCPUs or GPUs, allow fewer nodes with --max-nodes, or take --layout "
            "pin-numa, which needs no expander buses",
        )
    if request.options.explicit_cells:
        detail = "no nodes hold the cells as they are given"
        return Rejection("cells", (), detail, "leave node= out, or make the cells smaller")
    indices = tuple(supply.cores.index for supply in problem.supplies)
    together, memory = _together(indices), memory_text(request)
    total = sum(supply.groups for supply in problem.supplies)
    free = [memory.pages for memory in problem.memory]
    page_counts = [pages for pages in free if pages is not None]
    needed_pages = problem.pages or problem.pages_together or problem.pages_anywhere
    needed_pages += sum(pages for _, pages in problem.device_pages)
    if total < problem.groups:
        needs = _groups_text(attempt.fallback, problem.groups)
        return _of_cores(attempt, indices, f"{together}: need {needs}, {total} free")
    if len(page_counts) == len(free) and sum(page_counts) < needed_pages:
        extra = overhead_bytes(request) if attempt.fallback.keeps_memory else 0
        memory_nodes = _unasked_memory(attempt.host, request)[:4]
        options = " ".join(f"--allow-memory-node {node}" for node in memory_nodes)
        neighbours = f" and {format_bytes(extra)} for QEMU and page tables" if extra else ""
        free_text = format_bytes(sum(page_counts) * page_size_bytes(attempt.host, request))
        return _of_memory(
            attempt,
            indices,
            f"{together}: need {memory}{neighbours}, {free_text} free",
            "lower the memory" + (f", or allow other memory: {options}" if options else ""),
        )
    allowed, node_count = problem.most_nodes, len(indices)
    if allowed < node_count and fits(replace(problem, most_nodes=node_count)):
        enough = range(allowed + 1, node_count + 1)
        place = bisect_left(
            enough, True, key=lambda number: fits(replace(problem, most_nodes=number))
        )
        number = enough[min(place, len(enough) - 1)]
        return Rejection(
            "max-nodes",
            indices,
            f"at most {_count(allowed)} allowed, {number} needed",
            f"allow {_count(number)} with --max-nodes {number}",
        )
    if problem.devices.requires_home and fits(problem):
        return Rejection(
            "device-locality",
            indices,
            "no nodes that hold the VM have all of its GPUs",
            f"take --device-locality {DeviceLocality.PREFER}, other GPUs or fewer vCPUs",
        )
    slots = attempt.search.slots
    if slots is not None and fits(problem):
        return Rejection(
            "expander-buses",
            indices,
            "the devices lie next to more cells than pcie.0 has free slots for expander buses "
            f"({slots.free})",
            "pass fewer devices, allow fewer nodes with --max-nodes, or take --layout pin-numa, "
            "which leaves the PCI tree as it was",
        )
    if problem.device_pages:
        return _of_memory(
            attempt,
            indices,
            f"{together}: need {memory}, and the memory devices of some cell find no node with "
            "space for them next to the cell's share",
            "spread the memory devices over the cells, or make them smaller",
        )
    elsewhere = ""
    if request.layout.memory is MemoryBinding.BOUND_PER_CELL:
        elsewhere = ", or take --layout pin-bound: memory of other nodes helps there"
    owned = sum(problem.capacities)
    if owned < problem.groups:
        return _of_memory(
            attempt,
            indices,
            f"{together}: need {memory}; {owned} of {problem.groups} cores have their share of it "
            "on their node",
            f"lower the memory{elsewhere}",
        )
    if any(problem.distances.unreachable):
        return Rejection(
            "distance", indices, "the nodes with space cannot reach each other (distance 255)"
        )
    number = min(allowed, problem.groups)
    return _of_memory(
        attempt,
        indices,
        f"each node gets a core of the VM: {_count(number)} do not hold {memory}",
        f"lower the memory, or ask for more vCPUs{elsewhere}",
    )


def host_core(attempt: Attempt) -> Rejection:
    """That the host would keep no core."""
    return Rejection(
        "host-core",
        (),
        f"{attempt.problem.groups} cores for vCPUs leave the host fewer than "
        f"{attempt.request.host_reserve.cores} without vCPUs",
    )


def _most_vcpus(attempt: Attempt, problem: SearchProblem) -> int:
    """The most vCPUs, fewer than were asked for, that the fallback has space for; 0 = none."""

    def do(groups: int) -> bool:
        most_nodes = min(problem.most_nodes, groups)
        return fits(replace(problem, groups=groups, most_nodes=most_nodes))

    tries = range(min(problem.groups - 1, sum(attempt.supply[1:])), 0, -1)
    place = bisect_left(tries, True, key=do)
    return tries[place] * attempt.vcpus_of_group if place < len(tries) else 0


def refusal(
    search: PlacementSearch,
    rejections: Sequence[Rejection],
    misses: Sequence[tuple[Attempt, Rejection]],
) -> Unplannable:
    """What to raise: the nearest miss in the message, with how many vCPUs would fit where it has no
    other hint, every rejection in the value. The nearest is the first that more cores would not
    cure; else the fallback whose cores come nearest."""
    host, request, unique = search.host, search.request, tuple(dict.fromkeys(rejections))
    shown = next(iter(unique), None)
    if misses:
        of_cores = ("cores", "pus", "host-core")
        nearest = max(
            misses, key=lambda rejection: sum(rejection[0].supply[1:]) * rejection[0].vcpus_of_group
        )
        first, miss = next(
            (rejection for rejection in misses if rejection[1].constraint not in of_cores), nearest
        )
        shown = miss
        problem, also = first.problem, ""
        if miss.hint is None and not (count := _most_vcpus(first, problem)):
            problem = replace(problem, pages=0, pages_together=0, pages_anywhere=0, device_pages=())
            count, also = _most_vcpus(first, problem), ", and the memory"
        if miss.hint is None and count:
            with_siblings = " with --keep-vcpus" if request.keep_vcpus else ""
            shown = replace(miss, hint=f"lower vcpus to {count}{with_siblings}{also}")
        unique = tuple(shown if rejection == miss else rejection for rejection in unique)
    kinds = [core.kind for core in host.cores]
    strong, weak = kinds.count(CoreKind.PERFORMANCE), kinds.count(CoreKind.EFFICIENCY)
    of_kinds = f" ({strong} performance, {weak} efficiency)" if weak else ""
    pus, free = sum(pu.online for pu in host.pus), len(search.free[0].pus)
    summary = f"the host has {pus} PUs on {len(kinds)} cores{of_kinds}, {free} PUs free"
    reason = "no core is free" if shown is None else shown.detail
    return Unplannable(
        f"no placement for {request.vcpus} vCPUs and {memory_text(request)} on host "
        f"{host.name!r}: {reason}; {summary}",
        unique,
        hint=None if shown is None else shown.hint,
        nearest=shown,
    )


def _groups_text(fallback: Fallback, groups: int) -> str:
    threads, kinds, counts_pus = fallback.grouping
    kind = " performance" if kinds == {CoreKind.PERFORMANCE} else ""
    if counts_pus:
        if threads == 1:
            return f"{groups} free{kind} PUs"
        return f"{groups} groups of {threads} free siblings ({groups * threads} PUs)"
    siblings = f" of {threads} PUs" if threads > 1 else ""
    return f"{groups} free whole{kind} cores{siblings}"


def _owners_text(attempt: Attempt, supply: Supply) -> str:
    """Who has the node's other PUs."""
    request, allocations, pus = attempt.request, attempt.search.allocations, supply.cores.pus
    parts = []
    reserved = (request.options.reserved_pus | request.housekeeping_pus) & pus
    if reserved:
        parts.append(f"{len(reserved)} PUs reserved for the host ({reserved})")
    for holder in allocations.by_domain:
        owned = holder.cores & pus
        if owned:
            parts.append(f"{len(owned)} PUs in use by {allocations.label(holder.domain)} ({owned})")
    disallowed = (
        pus - attempt.free.pus - reserved - allocations.vcpu_cores - allocations.service_cores
    )
    if request.options.emulator_pus is not None:
        disallowed -= request.options.emulator_pus
    if disallowed:
        parts.append(f"{len(disallowed)} PUs not allowed ({disallowed})")
    broken = CpuSet.from_bits(sum(pus for pus, shape in supply.cores.cores if not shape.is_whole))
    if broken:
        parts.append(f"{len(broken)} PUs on cores that are not free as a whole ({broken})")
    return "; ".join(parts)


def _nodes_text(indices: tuple[NodeIndex, ...]) -> str:
    text = str(CpuSet(indices))
    return f"node {text}" if len(indices) == 1 else f"nodes {text}"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _together(indices: Sequence[NodeIndex]) -> str:
    return "the only node" if len(indices) == 1 else f"all {len(indices)} nodes together"
