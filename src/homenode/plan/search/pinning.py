"""Pinning: the PUs, the memory nodes and QEMU's threads that follow from a solution."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind
from homenode.plan.options import EmulatorPolicy
from homenode.plan.request import GuestRequest
from homenode.plan.search import explicit_cells
from homenode.plan.search.ladder import Fallback, MemoryRule
from homenode.plan.search.memory import NodeMemory, page_size_bytes
from homenode.plan.search.problem import PlacementSearch, SearchProblem
from homenode.plan.search.solve import Placing
from homenode.plan.search.supply import SiblingGroup, Usable
from homenode.plan.search.threads import (
    ThreadPlaces,
    ThreadRequest,
    shared_places,
    thread_places,
)
from homenode.plan.shape.guest_numa import split_memory
from homenode.topology import CoreKind
from homenode.vm.layout import GuestCells, MemoryBinding, Pinning, Siblings


@dataclass(frozen=True, slots=True)
class PinnedCell:
    """A guest cell to be: the node's position, its sibling groups, and the PUs of each vCPU."""

    node: int
    groups: tuple[SiblingGroup, ...]
    pins: tuple[CpuSet, ...]


def pinned_cells(
    search: PlacementSearch, fallback: Fallback, problem: SearchProblem, best: Placing
) -> Iterator[PinnedCell]:
    """The cells, node by node; mixed kinds make two cells of a node, performance cores first."""
    floating = search.request.layout.pinning is Pinning.NODE
    idle = fallback.idle_siblings(search.request)
    for node, number in best.split:
        groups = problem.supplies[node].allocate(number)
        strong = tuple(group for group in groups if group.kind is not CoreKind.EFFICIENCY)
        weak = tuple(group for group in groups if group.kind is CoreKind.EFFICIENCY)
        for part in (strong, weak) if fallback.mixed else (groups,):
            if part and floating:
                pus = _node_pus(search, fallback, problem, node, best)
                yield PinnedCell(node, part, (pus,) * len(part))
            elif part:
                pins = tuple(_pins(part))
                last = node == best.split[-1][0]
                yield PinnedCell(node, part, pins[: len(pins) - idle] if last else pins)


def threads_shown(request: GuestRequest, fallback: Fallback, cells: Sequence[PinnedCell]) -> int:
    """Siblings of a core that the guest is shown: as many on each core, or none."""
    grouping = fallback.grouping
    if request.layout.siblings is not Siblings.EXPOSED and not fallback.shares:
        return 1
    if grouping.threads > 1:
        return 1 if fallback.idle_siblings(request) else grouping.threads
    if request.layout.pinning is Pinning.NODE or not grouping.counts_pus:
        return 1
    counts = {
        count
        for cell in cells
        for count in Counter((cell.node, group.core) for group in cell.groups).values()
    }
    return counts.pop() if len(counts) == 1 else 1


def assigned_cells(
    search: PlacementSearch,
    fallback: Fallback,
    problem: SearchProblem,
    best: Placing,
    assigned: tuple[tuple[int, int], ...],
) -> Iterator[PinnedCell]:
    """The cells that the user gives, in their order; those of one node share its groups out."""
    left = {node: problem.supplies[node].allocate(number) for node, number in best.split}
    floating = search.request.layout.pinning is Pinning.NODE
    for node, number in assigned:
        part, left[node] = left[node][:number], left[node][number:]
        if floating:
            pus = _node_pus(search, fallback, problem, node, best)
            yield PinnedCell(node, part, (pus,) * len(part))
        else:
            yield PinnedCell(node, part, tuple(_pins(part)))


def _node_pus(
    search: PlacementSearch, fallback: Fallback, problem: SearchProblem, node: int, best: Placing
) -> CpuSet:
    """The PUs of a node that its vCPUs may float over: all that are free, less a core for the host
    where the VM has every other core of it."""
    free = search.free_on(fallback)
    cores = [core.free for core in free.nodes[node].cores if core.kind in fallback.grouping.kinds]
    whole = sum(core.whole for other, _ in best.split for core in free.nodes[other].cores)
    last = best.split[-1]
    if (
        node == last[0]
        and fallback.keeps_core
        and free.cores_without_vcpus <= whole
        and len(cores) > last[1]
    ):
        cores = cores[: -search.request.host_reserve.cores or None]
    return CpuSet.from_bits(sum(cores))


def _pins(groups: Sequence[SiblingGroup]) -> Iterator[CpuSet]:
    for group in groups:
        bits = group.pus
        while bits:
            yield CpuSet.from_bits(bits & -bits)
            bits &= bits - 1


def memory_nodes(
    search: PlacementSearch, fallback: Fallback, own: tuple[NodeIndex, ...]
) -> tuple[NodeIndex, ...] | None:
    """Nodes that hold the memory: the VM's own and the fewest others that it takes, of these the
    nearest. None where even all that are allowed hold too little."""
    memory = search.memory_on(fallback)
    chosen = list(own)
    if fallback.memory is MemoryRule.ELSEWHERE:
        wanted = search.problem(replace(fallback, memory=MemoryRule.UNEVEN)).pages_together
        at = {node.index: position for position, node in enumerate(search.host.nodes)}
        between = search.distances.between
        others = sorted(
            (node for node in memory if node not in own),
            key=lambda n: (min(between[at[n]][at[o]] for o in own), n),
        )
        most = (search.request.options.max_nodes or len(memory)) - len(own)

        def largest(nodes: Sequence[NodeIndex], count: int) -> list[NodeIndex]:
            def pages(node: NodeIndex) -> int:
                known = memory[node].pages
                return wanted if known is None else known

            return sorted(nodes, key=pages, reverse=True)[:count]

        fewest = (n for n in range(most + 1) if _holds(memory, (*own, *largest(others, n)), wanted))
        left = next(fewest, None)
        if left is None:
            return None
        for position, node in enumerate(others):
            rest = largest(others[position + 1 :], left - 1)
            if left and _holds(memory, (*chosen, node, *rest), wanted):
                chosen.append(node)
                left -= 1
    return tuple(sorted(index for node in chosen for index in memory[node].nodes))


def _holds(memory: dict[NodeIndex, NodeMemory], nodes: Sequence[NodeIndex], wanted: int) -> bool:
    pages = [memory[node].pages for node in nodes]
    known = [count for count in pages if count is not None]
    return len(known) < len(pages) or sum(known) >= wanted


def uneven_memory(
    search: PlacementSearch, fallback: Fallback, problem: SearchProblem, cells: Sequence[PinnedCell]
) -> tuple[int, ...]:
    """Bytes of each cell where they cannot follow the vCPUs: as near to that as the nodes allow;
    () where they follow."""
    request = search.request
    if request.layout.cells is GuestCells.FLAT:
        return ()
    page = page_size_bytes(search.host, request)
    if fallback.memory is MemoryRule.FOLLOWS and fallback.idle_siblings(request):
        groups = tuple(len(cell.groups) for cell in cells)
        return split_memory(request.memory_bytes, page, groups)
    if fallback.memory is not MemoryRule.UNEVEN:
        return ()
    total = -(-request.memory_bytes // page)
    weights = [len(cell.pins) for cell in cells]
    owned = problem.devices_of_cells(len(cells))
    space = []
    for i, cell in enumerate(cells):
        pages = problem.memory[cell.node].pages
        here = sum(other.node == cell.node for other in cells)
        space.append(total if pages is None else max(1, (pages - owned[i]) // here))
    shares = explicit_cells.pages_within(total, weights, space)
    return tuple(share * page for share in shares)


def qemu_threads(
    search: PlacementSearch,
    problem: SearchProblem,
    best: Placing,
    free: Usable,
    vcpu_pus: CpuSet,
    pins: Sequence[CpuSet],
) -> ThreadPlaces:
    request = search.request
    iothreads = len(request.guest.iothread_ids)
    asked = request.options.emulator_pus
    if request.layout.pinning is Pinning.NODE and asked is None:
        return shared_places(CpuSet.union(pins), iothreads)
    if request.options.emulator_policy is EmulatorPolicy.SHARE and asked is None:
        return shared_places(vcpu_pus, iothreads)
    if request.options.emulator_policy is EmulatorPolicy.NONE and asked is None:
        return ThreadPlaces(None, ())
    housekeeping = request.options.emulator_policy is EmulatorPolicy.HOUSEKEEPING
    if housekeeping and asked is None and request.housekeeping_pus:
        asked = request.housekeeping_pus
    own = [node for node, _ in best.split]
    rows = _device_rows(problem, best.gpus)

    def to_devices(node: int) -> tuple[int, int]:
        return sum(row[node] for row in rows), node

    def to_own(node: int) -> tuple[int, int]:
        return min(problem.distances.between[node][o] for o in own), node

    others = [node for node in range(len(problem.supplies)) if node not in own]
    order = [*sorted(own, key=to_devices), *sorted(others, key=to_own)]
    open_pus = search.free[1].pus - search.free[1].isolated - vcpu_pus
    service = search.others.service_cores & open_pus
    serving = [core.pus for core in search.host.cores if core.pus <= service] if service else []
    shared = [pus for node in order for pus in serving if pus <= problem.supplies[node].cores.pus]
    chosen = _chosen_gpus(problem, best.gpus)
    wanted = ThreadRequest(
        vcpu_pus,
        iothreads,
        asked,
        lambda node: _own_cores(search, problem, free, node, vcpu_pus, chosen),
        tuple(shared),
        housekeeping,
        request.page_bytes is not None and request.layout.memory is not MemoryBinding.AS_IT_WAS,
    )
    return thread_places(free, order, len(own), wanted)


def _device_rows(problem: SearchProblem, gpus: int) -> list[tuple[int, ...]]:
    rows = [device.home.to_node for device in problem.named]
    homes = (h for i, h in enumerate(problem.gpu_homes) if gpus >> i & 1)
    return rows + [home.to_node for home in homes if home is not None]


def _chosen_gpus(problem: SearchProblem, gpus: int) -> int:
    return gpus | problem.options.named_gpus


def _own_cores(
    search: PlacementSearch,
    problem: SearchProblem,
    free: Usable,
    node: int,
    vcpu_pus: CpuSet,
    gpus: int,
) -> int:
    """Cores of a node that an emulator may have to itself: those that the node's free GPUs do not
    need, at the node's number of cores for each of its GPUs."""
    cores = problem.supplies[node].cores
    spare = sum(core.whole and not core.free & vcpu_pus.bits for core in free.nodes[node].cores)
    every = [gpu for gpu in search.options.gpus if gpu.home == cores.index]
    left = sum(not gpus >> gpu.number & 1 for gpu in every)
    if not left:
        return spare
    of_node = sum(not core.pus.bits & ~cores.pus.bits for core in search.host.cores)
    owned = {bdf for bdf, _ in search.others.devices}
    total = len(every) + sum(
        device.node == cores.index
        for bdf in owned
        if (device := search.host.device(bdf)) and device.kind is DeviceKind.GPU
    )
    return max(0, spare - left * (of_node // total))
