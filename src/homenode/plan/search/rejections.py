"""Rejections: named reasons why nodes cannot hold a VM, with the required and free amounts.

Hints use the numbers of the rejection itself, without a further search.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Rejection
from homenode.machine.topology import CoreKind, Host, MemoryKind
from homenode.plan.memory import compute_overhead, format_memory, get_page_size
from homenode.plan.request import GuestRequest
from homenode.plan.search.attempt import Attempt
from homenode.plan.search.ladder import Fallback
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.search.solve import fits
from homenode.plan.search.supply import Supply
from homenode.text import plural
from homenode.units import GIB, format_bytes
from homenode.vm.layout import MemoryBinding
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import DeviceLocality


def list_unusable_nodes(host: Host, request: GuestRequest) -> Iterator[Rejection]:
    """Yield rejections of nodes and CPUs that can never run a vCPU, one per reason."""
    homeless = host.online_pus - CpuSet.union(node.pus for node in host.nodes)
    if homeless:
        yield Rejection(
            "no-node", (), f"CPUs {homeless}: not on a node that the host's source lists"
        )
    without_pus = tuple(node for node in host.nodes if not node.pus)
    of_gpus = tuple(node.index for node in without_pus if node.memory_kind is MemoryKind.GPU)
    plain = tuple(node.index for node in without_pus if node.memory_kind is not MemoryKind.GPU)
    if of_gpus:
        yield Rejection(
            "gpu-memory",
            of_gpus,
            "memory of GPUs, no CPUs; never for a guest",
        )
    if plain:
        memory = _find_unused_memory(host, request)
        yield Rejection(
            "no-pus",
            plain,
            "no CPUs, so no vCPU",
            f"--allow-memory-node {memory[0]} lets its memory serve" if memory else None,
        )


def judge_single_nodes(attempt: Attempt) -> Iterator[Rejection]:
    """Yield a rejection for each single node that does not suffice."""
    problem, request = attempt.problem, attempt.request
    page = get_page_size(request)
    pages = problem.pages or problem.pages_together
    for supply, memory in zip(problem.supplies, problem.memory, strict=True):
        indices = (supply.cores.index,)
        if supply.groups < problem.groups:
            needs = _format_groups(attempt.fallback, problem.groups)
            text = _format_owners(attempt, supply)
            detail = f"{needs} needed, {supply.groups} free"
            yield _make_cores_rejection(attempt, indices, f"{detail}; {text}" if text else detail)
        elif memory.pages is not None and memory.pages < pages:
            kind = "" if request.page_bytes is None else f" in pages of {format_bytes(page)}"
            needs = f"{format_bytes(pages * page)}{kind}"
            memory_detail = f"{needs} needed, {format_bytes(memory.pages * page)} free"
            yield _make_memory_rejection(attempt, indices, memory_detail)


def _make_cores_rejection(attempt: Attempt, nodes: tuple[NodeIndex, ...], detail: str) -> Rejection:
    return Rejection("pus" if attempt.fallback.grouping.counts_pus else "cores", nodes, detail)


def _make_memory_rejection(
    attempt: Attempt, nodes: tuple[NodeIndex, ...], detail: str, hint: str | None = None
) -> Rejection:
    constraint = "memory" if attempt.request.page_bytes is None else "pages"
    return Rejection(constraint, nodes, detail, hint)


def _find_unused_memory(host: Host, request: GuestRequest) -> tuple[NodeIndex, ...]:
    """Return nodes without CPUs whose memory the user has not allowed."""
    return tuple(
        node.index
        for node in host.nodes
        if not node.pus
        and node.memory_kind is not MemoryKind.GPU
        and node.memory_bytes != 0
        and node.index not in request.options.memory_nodes_allowed
    )


def judge_whole_host(attempt: Attempt) -> Rejection:
    """Return why no set of nodes suffices: too few cores in all, too little memory, too few nodes,
    or nodes that cannot reach each other."""
    # Long because it tries each constraint once, in the order in which a user would lift them.
    request, problem = attempt.request, attempt.problem
    if not attempt.knows_refusal:
        return Rejection(
            "search",
            (),
            "no set of nodes that holds the VM was found before the search ended; there may be one",
            "request fewer vCPUs or GPUs",
        )
    if request.options.explicit_cells:
        detail = "no nodes hold the guest NUMA nodes as specified"
        return Rejection("cells", (), detail, "omit node=, or make the guest NUMA nodes smaller")
    indices = tuple(supply.cores.index for supply in problem.supplies)
    memory = format_memory(request)
    total = sum(supply.groups for supply in problem.supplies)
    if total < problem.groups:
        needs = _format_groups(attempt.fallback, problem.groups)
        return _make_cores_rejection(attempt, indices, f"{needs} needed, {total} free")
    free_text = _free_memory(attempt)
    if free_text is not None:
        extra = compute_overhead(request) if attempt.fallback.keeps_memory else 0
        memory_nodes = _find_unused_memory(attempt.host, request)[:4]
        options = " ".join(f"--allow-memory-node {node}" for node in memory_nodes)
        overhead = f" + {format_bytes(extra)} for QEMU and page tables" if extra else ""
        return _make_memory_rejection(
            attempt,
            indices,
            f"{memory}{overhead} needed, {free_text} free",
            _memory_hint(attempt) + (f", or allow other memory: {options}" if options else ""),
        )
    allowed_count, node_count = problem.most_nodes, len(indices)
    if allowed_count < node_count and fits(replace(problem, most_nodes=node_count)):
        enough = range(allowed_count + 1, node_count + 1)
        place = bisect_left(
            enough, True, key=lambda number: fits(replace(problem, most_nodes=number))
        )
        number = enough[min(place, len(enough) - 1)]
        return Rejection(
            "max-nodes",
            indices,
            f"{plural(number, 'node')} needed, {allowed_count} allowed",
            f"--max-nodes {number}",
        )
    if problem.devices.requires_home and fits(problem):
        return Rejection(
            "device-locality",
            indices,
            "no nodes that hold the VM have all of its GPUs",
            f"--device-locality {DeviceLocality.PREFER}, other GPUs or fewer vCPUs",
        )
    if problem.device_pages:
        return _make_memory_rejection(
            attempt,
            indices,
            f"{memory} needed, and no node has space for both the share and the memory devices "
            "of a guest node",
            "spread the memory devices over the guest nodes, or make them smaller",
        )
    advice = ""
    if request.layout.memory is MemoryBinding.BOUND_PER_CELL:
        advice = ", or use --layout pin-bound: memory of other nodes helps there"
    capacity = sum(problem.capacities)
    if capacity < problem.groups:
        return _make_memory_rejection(
            attempt,
            indices,
            f"{memory} needed; {capacity} of {problem.groups} cores have their share on their node",
            f"{_memory_hint(attempt)}{advice}",
        )
    if any(problem.distances.unreachable):
        return Rejection(
            "distance", indices, "the nodes with space cannot reach each other (distance 255)"
        )
    number = min(allowed_count, problem.groups)
    return _make_memory_rejection(
        attempt,
        indices,
        f"each node gets a core of the VM: {plural(number, 'node')} do not hold {memory}",
        f"{_memory_hint(attempt)}, or more --vcpus{advice}",
    )


def _change_memory(attempt: Attempt, memory_bytes: int) -> SearchProblem:
    """Return the problem of the same VM with another memory size."""
    problem, page = attempt.problem, get_page_size(attempt.request)
    for name in ("pages", "pages_together", "pages_anywhere"):
        if pages := getattr(problem, name):
            saved_pages = (attempt.request.memory_bytes - memory_bytes) // page
            return replace(problem, **{name: pages - saved_pages})
    return problem


def _memory_hint(attempt: Attempt) -> str:
    """Return the --memory option with the largest size that fits, in GiB."""

    def has_space(gib: int) -> bool:
        return fits(_change_memory(attempt, gib * GIB))

    sizes = range(attempt.request.memory_bytes // GIB, 0, -1)
    place = bisect_left(sizes, True, key=has_space)
    return f"--memory {sizes[place]}GiB" if place < len(sizes) else "less memory"


def _free_memory(attempt: Attempt) -> str | None:
    """Return the free memory of all nodes, if it is known and too small; else None."""
    problem = attempt.problem
    page_counts = [memory.pages for memory in problem.memory]
    pages_by_node = [pages for pages in page_counts if pages is not None]
    needed_pages = problem.pages or problem.pages_together or problem.pages_anywhere
    needed_pages += sum(pages for _, pages in problem.device_pages)
    if len(pages_by_node) < len(page_counts) or sum(pages_by_node) >= needed_pages:
        return None
    return format_bytes(sum(pages_by_node) * get_page_size(attempt.request))


def judge_host_core(attempt: Attempt) -> Rejection:
    """Return the rejection for a host that would keep no core."""
    return Rejection(
        "host-core",
        (),
        f"{plural(attempt.problem.groups, 'core')} for vCPUs would leave the host fewer than "
        f"{attempt.request.host_reserve.cores} without vCPUs",
    )


def _find_most_vcpus(attempt: Attempt, problem: SearchProblem) -> int:
    """Return the largest number of vCPUs below the request that fits on the fallback; 0 = none."""

    def do(groups: int) -> bool:
        most_nodes = min(problem.most_nodes, groups)
        return fits(replace(problem, groups=groups, most_nodes=most_nodes))

    tries = range(min(problem.groups - 1, sum(attempt.supply[1:])), 0, -1)
    place = bisect_left(tries, True, key=do)
    return tries[place] * attempt.vcpus_of_group if place < len(tries) else 0


def make_error(
    search: PlacementSearch,
    rejections: Sequence[Rejection],
    misses: Sequence[tuple[Attempt, Rejection]],
) -> Unplannable:
    """Return the exception: its message has the nearest miss, with the number of vCPUs that would
    fit if it has no other hint; its value has every rejection. The nearest is the first that more
    cores would not fix; else the fallback that lacks the fewest cores."""
    host, request, unique = search.host, search.request, tuple(dict.fromkeys(rejections))
    cause = next(iter(unique), None)
    if misses:
        of_cores = ("cores", "pus", "host-core")
        nearest = max(misses, key=lambda miss: sum(miss[0].supply[1:]) * miss[0].vcpus_of_group)
        of_others = (miss for miss in misses if miss[1].constraint not in of_cores)
        first, rejection = next(of_others, nearest)
        cause = rejection
        problem, also = first.problem, ""
        if rejection.hint is None and not (count := _find_most_vcpus(first, problem)):
            problem = replace(
                _change_memory(first, min(GIB, request.memory_bytes)), device_pages=()
            )
            count, also = _find_most_vcpus(first, problem), " and less memory"
        if rejection.hint is None and count:
            with_siblings = " --keep-vcpus" if request.keep_vcpus else ""
            cause = replace(rejection, hint=f"--vcpus {count}{with_siblings}{also}")
        unique = tuple(cause if other == rejection else other for other in unique)
    reason = "no core is free" if cause is None else cause.detail
    is_memory = misses and cause is not None and cause.constraint in ("memory", "pages")
    if free_text := _free_memory(first) if is_memory else None:
        reason = f"{format_memory(request)} needed, {free_text} free"
    return Unplannable(
        f"{request.guest.name} does not fit {host.name}: {reason}",
        unique,
        hint=None if cause is None else cause.hint,
        nearest=cause,
        quotes_nearest=not free_text,
    )


def _format_groups(fallback: Fallback, groups: int) -> str:
    threads, kinds, counts_pus = fallback.grouping
    kind = "performance " if kinds == {CoreKind.PERFORMANCE} else ""
    if counts_pus:
        if threads == 1:
            return plural(groups, f"{kind}CPU")
        return f"{plural(groups, 'group')} of {threads} siblings ({groups * threads} CPUs)"
    siblings = f" of {threads} CPUs" if threads > 1 else ""
    return f"{plural(groups, f'whole {kind}core')}{siblings}"


def _format_owners(attempt: Attempt, supply: Supply) -> str:
    """Describe the users of the node's other CPUs."""
    request, allocations, pus = attempt.request, attempt.search.allocations, supply.cores.pus
    parts = []
    reserved_pus = (request.options.reserved_pus | request.housekeeping_pus) & pus
    if reserved_pus:
        parts.append(f"{plural(len(reserved_pus), 'CPU')} reserved for the host ({reserved_pus})")
    for holder in allocations.by_domain:
        owned_pus = holder.cores & pus
        if owned_pus:
            label = allocations.label(holder.domain)
            parts.append(f"{plural(len(owned_pus), 'CPU')} in use by {label} ({owned_pus})")
    disallowed_pus = (
        pus - attempt.free.pus - reserved_pus - allocations.vcpu_cores - allocations.service_cores
    )
    if request.options.emulator_pus is not None:
        disallowed_pus -= request.options.emulator_pus
    if disallowed_pus:
        parts.append(f"{plural(len(disallowed_pus), 'CPU')} not allowed ({disallowed_pus})")
    broken = CpuSet.from_bits(sum(pus for pus, shape in supply.cores.cores if not shape.is_whole))
    if broken:
        parts.append(
            f"{plural(len(broken), 'CPU')} on cores that are not free as a whole ({broken})"
        )
    return "; ".join(parts)
