"""NodeMemory: the memory that each node can give to one VM, in pages.

Allocated memory counts as used, touched or not: free is a node's size less its page pools and the
memory that running domains have bound there, and at most what the kernel reports. The host keeps a
share (HostReserve), and the VM needs memory for QEMU and the IOMMU besides its own. GPU memory
never counts; memory of other nodes without CPUs counts only if allowed, and then with the nearest
node that has CPUs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from homenode.cpuset import NodeIndex
from homenode.errors import InputError, UsageError
from homenode.machine.topology import Host, MemoryKind, NumaNode, RunningDomain
from homenode.plan.allocations import other_domains, own_domains
from homenode.plan.request import GuestRequest, choose_huge_page_bytes
from homenode.plan.shape.guest_numa import choose_granule
from homenode.units import GIB, MIB, format_bytes

MIN_RESERVE_BYTES = 2 * GIB
_RESERVE_DIVISOR = 50
"""The host keeps 2 % of each node, and at least 2 GiB."""

_QEMU_BYTES = 256 * MIB
_QEMU_BYTES_PER_VCPU = 8 * MIB
"""QEMU itself and its threads. Source: KubeVirt's memory overhead (launcher and libvirt omitted),
pkg/virt-controller/services/renderresources.go: 8 MiB a vCPU, about 250 MiB for QEMU."""

_PAGE_TABLE_DIVISOR = 512
"""8 bytes for each page of 4 KiB, once for the guest (EPT, NPT) and once for the IOMMU."""

_OVERHEAD_STEP_BYTES = 64 * MIB


class NodeMemory(Struct, frozen=True):
    """The memory that a node with CPUs can give, its attached memory nodes included."""

    pages: int | None  # pages that are free or can be freed; None = unknown, so no limit
    pool_pages: int  # huge pages among them that are free already
    nodes: tuple[NodeIndex, ...]  # nodes of the pages, own node first


def compute_overhead(request: GuestRequest) -> int:
    """Return the memory of QEMU and of the page tables (EPT and, with devices, the IOMMU) besides
    the guest's memory. Page tables of huge pages are negligible: at most one page for each 2
    MiB."""
    memory = request.memory_bytes + request.guest.memory_device_bytes
    devices = bool(request.devices or request.options.gpu_count)
    return qemu_bytes(request.vcpus, None if request.page_bytes is not None else memory, devices)


def _compute_node_overhead(domain: RunningDomain, size: int) -> int:
    """Estimate the overhead on a node that has `size` bytes of a VM's memory, in whole steps."""
    memory = None if domain.page_bytes is not None else domain.memory_bytes
    total = qemu_bytes(len(domain.vcpu_pins), memory, bool(domain.devices or domain.mediated))
    share = total * size // (sum(node_bytes for _, node_bytes in domain.memory_by_node) or 1)
    return -(-share // _OVERHEAD_STEP_BYTES) * _OVERHEAD_STEP_BYTES


def qemu_bytes(vcpus: int, paged_bytes: int | None, has_devices: bool) -> int:
    """Return QEMU's own memory and page tables. paged_bytes: guest memory in ordinary pages."""
    tables = (paged_bytes or 0) // _PAGE_TABLE_DIVISOR * (1 + has_devices)
    return _QEMU_BYTES + vcpus * _QEMU_BYTES_PER_VCPU + tables


def reserve_bytes(request: GuestRequest, node: NumaNode) -> int:
    """Return the host's reserve of a node's memory; 0 for a node without memory."""
    if node.memory_bytes == 0:
        return 0
    reserve = request.host_reserve.memory_bytes
    if reserve is not None:
        return reserve
    return max(MIN_RESERVE_BYTES, (node.memory_bytes or 0) // _RESERVE_DIVISOR)


def get_page_size(request: GuestRequest) -> int:
    """Return the granule of each cell's memory in bytes: the huge page size, or a default. Raises
    InputError if the memory is not whole pages."""
    return choose_granule(request.memory_bytes, request.page_bytes)


def cell_pages_wanted(request: GuestRequest) -> int:
    """Return the number of pages of the guest's memory, without its memory devices."""
    return -(-request.memory_bytes // get_page_size(request))


def list_device_pages(request: GuestRequest) -> tuple[tuple[int, int], ...]:
    """Return (guest cell, whole pages) of each memory device that is on its cell's node."""
    page = get_page_size(request)
    return tuple(
        (device.cell, -(-device.size_bytes // page))
        for device in request.guest.memory_devices
        if device.lies_with_cell(request.layout)
    )


def format_memory(request: GuestRequest) -> str:
    """Format the guest's memory: "8 GiB", "8 GiB and 4 GiB in memory devices"."""
    text = format_bytes(request.memory_bytes)
    devices = request.guest.memory_devices
    device_bytes = sum(d.size_bytes for d in devices if d.lies_with_cell(request.layout))
    return f"{text} and {format_bytes(device_bytes)} in memory devices" if device_bytes else text


def map_attached_memory(
    host: Host, request: GuestRequest
) -> dict[NodeIndex, tuple[NodeIndex, ...]]:
    """Map each node with CPUs to the nodes whose memory it may give: itself, then the allowed nodes
    without CPUs that are nearest to it (ties go to the lowest index).

    Raises InputError for an allowed node that the host lacks, UsageError for memory of a GPU.
    """
    attached_nodes: dict[NodeIndex, tuple[NodeIndex, ...]] = {
        node.index: (node.index,) for node in host.nodes if node.pus
    }
    for index in dict.fromkeys(request.options.memory_nodes_allowed):  # each once
        node = host.find_node(index)
        if node is None:
            indices = ", ".join(str(n.index) for n in host.nodes)
            raise InputError(f"memory node {index}: expected a node of the host ({indices})")
        if node.memory_kind is MemoryKind.GPU:
            raise UsageError(
                f"memory node {index}: it belongs to GPU {node.gpu or 'unknown'} and is "
                "never assigned to a guest",
                hint="omit --allow-memory-node for this node",
            )
        if index in attached_nodes or not attached_nodes:
            continue
        nearest = host.nearest_cpu_nodes[index][0]
        attached_nodes[nearest] = (*attached_nodes[nearest], index)
    return attached_nodes


def count_node_memory(
    host: Host, request: GuestRequest, *, keeps_reserve: bool
) -> dict[NodeIndex, NodeMemory]:
    """Return the memory of every node with CPUs. keeps_reserve: the host keeps its reserve."""
    page = get_page_size(request)
    result: dict[NodeIndex, NodeMemory] = {}
    by_index = host.node_at
    huge = request.page_bytes is not None
    overhead = compute_overhead(request) if keeps_reserve and huge else 0
    domain_memory = held_memory(host, request)
    for home, nodes in map_attached_memory(host, request).items():
        total: int | None = 0
        pool_total = 0
        for index in nodes:
            node = by_index[index]
            ordinary, pool_pages = free_memory(host, request, node, page, domain_memory)
            pool_total += pool_pages
            if ordinary is None or total is None:
                total = None
            else:
                reserved_bytes = reserve_bytes(request, node) + overhead if keeps_reserve else 0
                total += pool_pages + max(0, ordinary - reserved_bytes) // page
        result[home] = NodeMemory(total, pool_total, nodes)
    return result


_DomainBytes = Mapping[NodeIndex, Sequence[tuple[RunningDomain, int]]]
"""The memory of domains on each node: (domain, bytes)."""


def held_memory(host: Host, request: GuestRequest) -> tuple[_DomainBytes, _DomainBytes]:
    """Return the memory of (domains that hold resources, the VM and the VMs that it replaces)."""

    def sum_by_node(domains: Iterable[RunningDomain]) -> _DomainBytes:
        sizes: dict[NodeIndex, list[tuple[RunningDomain, int]]] = {}
        for domain in domains:
            for node, size in domain.memory_by_node:
                sizes.setdefault(node, []).append((domain, size))
        return sizes

    return sum_by_node(other_domains(host, request)), sum_by_node(own_domains(host, request))


def free_memory(
    host: Host,
    request: GuestRequest,
    node: NumaNode,
    page: int,
    domain_memory: tuple[_DomainBytes, _DomainBytes] | None = None,
) -> tuple[int | None, int]:
    """Return (free ordinary memory in bytes, None = unknown; free huge pages of that size).
    domain_memory: of the host and the request; None = computed here."""
    if node.memory_kind is MemoryKind.GPU:
        return 0, 0
    of_others, of_vm = domain_memory or held_memory(host, request)
    untouched_bytes, own_bytes = 0, 0
    bound = sum(p.page_bytes * p.total_pages for p in node.page_pools)
    running: dict[int, int] = defaultdict(int)
    planned: dict[int, int] = defaultdict(int)
    for domain, size in of_others.get(node.index, ()):
        if domain.page_bytes is not None:
            own_page = domain.page_bytes or choose_huge_page_bytes(host)
            (running if domain.running else planned)[own_page] += -(-size // own_page)
        # The kernel's counters include only memory that running domains have touched.
        elif domain.running:
            bound += size
        else:
            untouched_bytes += size
        if not domain.running:
            untouched_bytes += _compute_node_overhead(domain, size)
    free_of_size = {
        p.page_bytes: min(p.free_pages, p.total_pages - running[p.page_bytes])
        - planned[p.page_bytes]
        for p in node.page_pools
    }
    for size, pages in planned.items():
        # Pages that the pool lacks have to be reserved from ordinary memory.
        untouched_bytes += size * min(pages, max(0, -free_of_size.get(size, -pages)))
    huge = request.page_bytes is not None
    pool = next((p for p in node.page_pools if huge and p.page_bytes == page), None)
    pool_pages = 0 if pool is None else free_of_size[page]
    limit = 0 if pool is None else pool.total_pages - running[page] - planned[page]
    for own_domain, size in of_vm.get(node.index, ()):
        if own_domain.page_bytes is None:
            own_bytes += size
        elif pool is not None and page == (own_domain.page_bytes or choose_huge_page_bytes(host)):
            pool_pages += size // page
    free = node.memory_free_bytes
    limits = [] if free is None else [free + own_bytes]
    if node.memory_bytes is not None:
        limits.append(node.memory_bytes - bound)
    return (min(limits) - untouched_bytes if limits else None), max(0, min(pool_pages, limit))
