"""Guest cells: their vCPUs, memory and distances, and the huge pages to reserve.

Initiators are cells without memory, for a Grace GPU's memory and MIG instances in the guest. The
guest's driver puts the GPU's memory online on the GPU's nodes. The host's firmware provides nodes
for each GPU (8 on GH200: its memory, and 7 MIG instances); the guest needs the same number. Source:
libvirt domain XML, <hostdev><acpi nodeset=>; QEMU acpi-generic-initiator; KubeVirt enhancement 199;
ids of device_kinds in KubeVirt pkg/util/hardware/grace.go.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.findings import Finding, Gap, Severity, finding
from homenode.machine.pci import NVIDIA, PciDevice
from homenode.machine.topology import LOCAL_DISTANCE, Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.text import plural
from homenode.units import KIB, MIB, format_bytes
from homenode.vm.layout import GuestCells, GuestPcie, Layout, MemoryBinding
from homenode.vm.model import MemoryDevice, Vm, VmCell
from homenode.vm.plan import PageReservation
from homenode.vm.plan_options import MemoryMode


def split_device_bytes(guest: Vm, layout: Layout, cells: int) -> tuple[int, ...]:
    """Return the bytes of memory devices in each cell, for devices on their cell's node. A device
    of a removed cell moves to cell 0, as in the rewritten definition."""
    bytes_of_cell = [0] * cells
    for device in guest.memory_devices:
        if device.lies_with_cell(layout):
            bytes_of_cell[device.cell if device.cell < cells else 0] += device.size_bytes
    return tuple(bytes_of_cell)


def list_device_gaps(guest: Vm, layout: Layout) -> tuple[Gap, ...]:
    """Return gaps for memory devices whose node a plan cannot name."""
    apart = sum(d.size_bytes for d in guest.memory_devices if not d.lies_with_cell(layout))
    if not apart:
        return ()
    return (
        Gap(
            "memory devices",
            f"{format_bytes(apart)} have their own file, host nodes or page size, so they are not "
            "counted on any node",
        ),
    )


def merge_devices(size_bytes: int) -> tuple[MemoryDevice, ...]:
    """Merge the devices into one: a plan counts them together and does not move them."""
    if not size_bytes:
        return ()
    device = MemoryDevice(model="", cell=0, size_bytes=size_bytes, plugged_bytes=size_bytes)
    return (device,)


UNREACHABLE_DISTANCE = 255
"""The largest SLIT entry means unreachable. Source: ACPI 6.5, 5.2.17; libvirt accepts 10 to 255."""

_ORDINARY_GRANULES = (MIB, 4 * KIB, KIB)
"""libvirt rounds each cell up to 1 MiB on x86 and counts in KiB: finer sizes only on request."""


class GuestMemory(Struct, frozen=True):
    """The cells of a guest, with findings and gaps."""

    cells: tuple[VmCell, ...]
    reservations: tuple[PageReservation, ...]
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...]


def split_guest_memory(
    host: Host | None, request: GuestRequest, placement: Placement, vcpus: tuple[CpuSet, ...]
) -> GuestMemory:
    """Return the placement's cells, with the pages that each host node needs. vcpus: of each cell.
    Raises InputError if the memory is not whole pages, or too few for a page in every cell."""
    gaps: list[Gap] = []
    page_bytes = request.page_bytes
    counts = tuple(map(len, vcpus))
    if request.layout.cells is GuestCells.SINGLE:
        if page_bytes is not None:
            choose_granule(request.memory_bytes, page_bytes)
        nodes = placement.memory_nodes or placement.nodes
        cells: tuple[VmCell, ...] = (
            VmCell(id=0, vcpus=vcpus[0], memory_bytes=request.memory_bytes, host_nodes=nodes),
        )
    else:
        granule = choose_granule(request.memory_bytes, page_bytes)
        if placement.cell_memory_bytes:
            sizes = _read_given_memory(request, placement.cell_memory_bytes, granule, len(counts))
        else:
            sizes = split_memory(request.memory_bytes, granule, counts)
        distances = guest_distances(host, placement.nodes, gaps)
        homes = list_memory_homes(host, placement)
        cells = tuple(
            VmCell(
                id=i,
                vcpus=vcpus[i],
                memory_bytes=sizes[i],
                host_nodes=homes[i],
                distances=distances[i] if distances else (),
            )
            for i in range(len(counts))
        )
    reservations, findings = _reserve(host, request, placement, cells, page_bytes)
    gaps += list_device_gaps(request.guest, request.layout)
    return GuestMemory(cells, reservations, findings, tuple(gaps))


def bind_cell(
    cell: VmCell, layout: Layout, binding: tuple[str, CpuSet] | None, page_bytes: int | None
) -> VmCell:
    """Return the cell with its memory's nodes. A cell without memory is bound like the others."""
    mode, nodes = binding or (None, CpuSet())
    if layout.memory is MemoryBinding.BOUND_PER_CELL and cell.host_nodes and cell.memory_bytes:
        nodes = CpuSet(cell.host_nodes)
    return structs.replace(cell, nodes=nodes, mode=mode, page_bytes=page_bytes)


def choose_granule(memory_bytes: int, page_bytes: int | None) -> int:
    """Return the granule of every cell's memory in bytes. Raises InputError with the nearest sizes
    if the memory is not a multiple of it."""
    if page_bytes is None:
        for granule in _ORDINARY_GRANULES:
            if memory_bytes % granule == 0:
                return granule
    step = page_bytes or KIB
    if memory_bytes % step == 0:
        return step
    floor = memory_bytes // step * step
    nearest = [size for size in (floor, floor + step) if size > 0]
    raise InputError(
        f"memory of {memory_bytes // KIB} KiB: expected whole pages of {format_bytes(step)}, "
        f"found {memory_bytes / step:.3f} pages",
        hint="set the memory to "
        + " or ".join(f"{size // KIB} KiB ({format_bytes(size)})" for size in nearest),
    )


def split_memory(memory_bytes: int, granule: int, vcpu_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of each cell: in proportion to vCPUs, in whole granules, exact in sum.

    Equal counts get equal memory; granules that do not divide go to the first of the largest
    remainders, one each.

    >>> split_memory(32 * 2, 2, (2, 2, 2)), split_memory(10, 1, (3, 1))
    ((22, 22, 20), (8, 2))

    Raises InputError if there is not a granule for every cell.
    """
    pages = memory_bytes // granule
    shares = _split_shares(pages, vcpu_counts)
    if 0 in shares:
        # Enough memory gives even the smallest share a whole granule.
        enough = max(pages + 1, len(vcpu_counts))
        while 0 in _split_shares(enough, vcpu_counts):
            enough += 1
        raise InputError(
            f"memory of {format_bytes(memory_bytes)}: expected a page of {format_bytes(granule)} "
            f"in each of {len(vcpu_counts)} guest NUMA nodes, found {pages} pages in all",
            hint=f"use smaller pages, or at least {format_bytes(granule * enough)} of memory",
        )
    return tuple(share * granule for share in shares)


def _read_given_memory(
    request: GuestRequest, sizes: tuple[int, ...], granule: int, cells: int
) -> tuple[int, ...]:
    """Return the sizes given for each cell, by placement or user: whole granules, exact in sum."""
    if len(sizes) != cells or sum(sizes) != request.memory_bytes:
        raise InputError(
            f"memory of the guest NUMA nodes: expected {cells} sizes that come to "
            f"{format_bytes(request.memory_bytes)}, found {', '.join(map(format_bytes, sizes))}"
        )
    for cell, size in enumerate(sizes):
        if size < granule or size % granule:
            floor = size // granule * granule
            raise InputError(
                f"guest cell {cell}: expected memory in whole pages of {format_bytes(granule)}, "
                f"found {format_bytes(size)}",
                hint="use "
                + " or ".join(
                    format_bytes(nearest) for nearest in (floor, floor + granule) if nearest
                )
                + " there, or smaller pages",
            )
    return sizes


def _split_shares(pages: int, vcpu_counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pages of each cell by largest remainder; a cell may get none."""
    total = sum(vcpu_counts)
    shares = [pages * count // total for count in vcpu_counts]
    by_remainder = sorted(
        range(len(vcpu_counts)), key=lambda i: (-(pages * vcpu_counts[i] % total), i)
    )
    for i in by_remainder[: pages - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def list_memory_homes(host: Host | None, placement: Placement) -> tuple[tuple[NodeIndex, ...], ...]:
    """Return the nodes of each cell's memory: its own node, then nearby nodes without CPUs. A node
    without memory is omitted if another node gives the memory."""
    homes = [[node] for node in placement.nodes]
    if host is None:
        return tuple((node,) for node in placement.nodes)
    for extra in placement.memory_nodes:
        if extra not in placement.nodes:
            nearest = min(
                range(len(homes)),
                key=lambda i: (host.find_distance(extra, placement.nodes[i]) or 0, i),
            )
            homes[nearest].append(extra)
    empty = {node.index for node in host.nodes if node.memory_bytes == 0}
    return tuple(tuple(node for node in home if node not in empty) or (home[0],) for home in homes)


def guest_distances(
    host: Host | None, nodes: tuple[NodeIndex, ...], gaps: list[Gap]
) -> tuple[tuple[int, ...], ...]:
    """Return the host's SLIT between the cells' nodes, [from][to]; () if the host reports none. A
    cell is always nearer to itself than to another: Linux would merge the two."""
    if host is None or len(nodes) < 2:
        return ()
    if host.distances is None:
        gaps.append(Gap("guest distances", "no SLIT on the host: none in the guest"))
        return ()
    position = {node.index: i for i, node in enumerate(host.nodes)}
    rows: list[tuple[int, ...]] = []
    texts: list[str] = []
    for i, a in enumerate(nodes):
        row: list[int] = []
        for j, b in enumerate(nodes):
            distance = host.distances[position[a]][position[b]]
            value = LOCAL_DISTANCE if i == j else min(max(distance, 11), UNREACHABLE_DISTANCE)
            if i != j and value != distance:
                texts.append(f"{a}->{b} is {distance}")
            row.append(value)
        rows.append(tuple(row))
    if texts:
        gaps.append(
            Gap(
                "guest distances",
                f"the host's SLIT has {', '.join(texts[:4])}: expected 11 to 255 between nodes; "
                f"the guest is shown the nearest of these",
            )
        )
    return tuple(rows)


def _reserve(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    cells: tuple[VmCell, ...],
    page_bytes: int | None,
) -> tuple[tuple[PageReservation, ...], tuple[Finding, ...]]:
    """Return the pages per bound node, and a finding for each node with too few free pages."""
    if page_bytes is None or not placement.memory_nodes:
        return (), ()
    pools = {
        (node.index, pool.page_bytes): pool
        for node in (host.nodes if host else ())
        for pool in node.page_pools
    }
    pages_of_node: dict[NodeIndex, int] = {}
    if request.layout.cells is GuestCells.HOST:
        devices = split_device_bytes(request.guest, request.layout, len(cells))
        for cell, extra_bytes in zip(cells, devices, strict=True):
            unplaced = cell.memory_bytes // page_bytes + -(-extra_bytes // page_bytes)
            for node in cell.host_nodes:
                pool = pools.get((node, page_bytes))
                is_last = node == cell.host_nodes[-1]
                in_use = unplaced if is_last or pool is None else min(unplaced, pool.free_pages)
                pages_of_node[node] = pages_of_node.get(node, 0) + in_use
                unplaced -= in_use
    else:
        # Over several nodes only the sum is certain; interleave takes them evenly, and an even
        # reservation serves strict and preferred as well.
        nodes = sorted(placement.memory_nodes)
        extra_bytes = sum(split_device_bytes(request.guest, request.layout, 1))
        total_pages = request.memory_bytes // page_bytes + -(-extra_bytes // page_bytes)
        pages, extra = divmod(total_pages, len(nodes))
        pages_of_node = {node: pages + (i < extra) for i, node in enumerate(nodes)}
    reservations: list[PageReservation] = []
    findings: list[Finding] = []
    for node in sorted(pages_of_node):
        pool = pools.get((node, page_bytes))
        needed_pages = pages_of_node[node]
        free = pool.free_pages if pool else None
        reservations.append(PageReservation(node, page_bytes, needed_pages, free))
        if pool is not None and free is not None and free < needed_pages:
            is_preferred = request.options.memory_mode is MemoryMode.PREFERRED
            total_wanted = pool.total_pages + needed_pages - free
            findings.append(
                finding(
                    "huge-pages-short",
                    f"node {node}",
                    expected=f"{plural(needed_pages, 'free page')} of {format_bytes(page_bytes)}",
                    observed=f"{free} of {pool.total_pages}",
                    severity=Severity.INFO if is_preferred else Severity.WARNING,
                    case="of a plan",
                    values={"pages": total_wanted, "node": node, "kilobytes": page_bytes // KIB},
                )
            )
    return tuple(reservations), tuple(findings)


GRACE_GPUS = frozenset({0x2342, 0x2348, 0x2941})
"""Device ids of NVIDIA's GPUs with a Grace CPU."""

LIBVIRT_WITH_INITIATORS = (11, 8, 0)
QEMU_WITH_INITIATORS = (9, 0, 0)
"""First versions with <acpi nodeset=> in <hostdev>, and with acpi-generic-initiator."""


class InitiatorCells(Struct, frozen=True):
    """The guest's cells followed by initiator cells, and the initiator cells of each GPU."""

    cells: tuple[VmCell, ...]
    cells_of_gpu: dict[Bdf, CpuSet]
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = ()


def is_grace(device: PciDevice) -> bool:
    return device.vendor_id == NVIDIA and device.device_id in GRACE_GPUS


def build_initiator_cells(
    host: Host | None,
    request: GuestRequest,
    placement: Placement,
    cells: tuple[VmCell, ...],
) -> InitiatorCells:
    """Return the cells that the VM's Grace GPUs need, if the guest sees its PCIe tree and the
    host's libvirt and QEMU support them; else a finding."""
    functions = {} if host is None else host.device_at
    devices = [functions[bdf] for bdf in placement.devices if bdf in functions]
    grace = tuple(device for device in devices if is_grace(device))
    if host is None or not grace or not request.guest.is_virt:
        return InitiatorCells(cells, {})
    nodes_of_gpu = find_initiator_nodes(host, grace)
    shows = request.layout.pcie is GuestPcie.HOST
    if not nodes_of_gpu or not shows or not _can_give(host):
        return InitiatorCells(
            cells, {}, (_report_missing_initiators(host, grace, nodes_of_gpu, shows=shows),)
        )
    gaps: list[Gap] = []
    grown, cells_of_gpu = add_initiator_cells(cells, placement.nodes, nodes_of_gpu, host, gaps)
    gpus = tuple(gpu for gpu in grace if gpu.bdf not in nodes_of_gpu)
    findings = (_report_missing_initiators(host, gpus, {}, shows=shows),) if gpus else ()
    return InitiatorCells(grown, cells_of_gpu, findings, tuple(gaps))


def _can_give(host: Host) -> bool:
    """Return whether libvirt is known to be new enough, and QEMU not known to be too old."""
    libvirt, qemu = host.settings.libvirt_version, host.settings.qemu_version
    if libvirt is None or libvirt < LIBVIRT_WITH_INITIATORS:
        return False
    return qemu is None or qemu >= QEMU_WITH_INITIATORS


def _report_missing_initiators(
    host: Host,
    gpus: Sequence[PciDevice],
    nodes_of_gpu: dict[Bdf, tuple[NodeIndex, ...]],
    *,
    shows: bool,
) -> Finding:
    cells = sum(map(len, nodes_of_gpu.values()))
    programs = (
        ("libvirt", host.settings.libvirt_version, LIBVIRT_WITH_INITIATORS),
        ("QEMU", host.settings.qemu_version, QEMU_WITH_INITIATORS),
    )
    old = [program for program in programs if program[1] is None or program[1] < program[2]]
    if not nodes_of_gpu:
        detail = (
            "no host nodes of generic initiators that can be shared evenly among the Grace GPUs"
        )
        case: str | None = "no nodes"
    elif not shows:
        detail = f"the guest's driver needs {cells} NUMA nodes without memory, and this layout "
        detail += "gives none"
        case = None
    else:
        expected = " and ".join(f"{name} {least[0]}.{least[1]}" for name, _, least in old)
        found_text = " and ".join(
            f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
            for name, version, _ in old
        )
        detail = (
            f"the guest's driver needs {cells} NUMA nodes without memory (<acpi nodeset=>): "
            f"expected {expected} or newer, found {found_text}"
        )
        libvirt = host.settings.libvirt_version
        case = "unknown programs" if libvirt is None else "old programs"
    return finding(
        "initiators-missing",
        ", ".join(str(gpu.bdf) for gpu in gpus),
        observed=f"{detail}: it cannot bring the GPU's memory online",
        case=case,
    )


def find_initiator_nodes(host: Host, gpus: Sequence[PciDevice]) -> dict[Bdf, tuple[NodeIndex, ...]]:
    """The generic initiator nodes of each of these Grace GPUs; () for a GPU without nodes."""
    grace_gpus = tuple((device.bdf, device.node) for device in host.pci_devices if is_grace(device))
    return map_initiators(host, grace_gpus, gpus)


def map_initiators(
    host: Host, grace_gpus: Sequence[tuple[Bdf, int | None]], gpus: Sequence[PciDevice]
) -> dict[Bdf, tuple[NodeIndex, ...]]:
    """Return the generic initiator nodes without CPUs of each of these GPUs; () for none.

    grace_gpus: (function, node) of all Grace GPUs of the host, ascending. Each CPU's nodes are
    divided among its GPUs, as sysfs does not link a node to a GPU.
    """
    initiators = {node.index for node in host.nodes if node.generic_initiator}
    home_of_node = {
        node: homes[0] for node, homes in host.nearest_cpu_nodes.items() if node in initiators
    }
    nodes_of_gpu: dict[Bdf, tuple[NodeIndex, ...]] = {}
    for gpu in gpus:
        siblings = [bdf for bdf, node in grace_gpus if node == gpu.node]
        nodes = [node for node, home in home_of_node.items() if home == gpu.node]
        share, remainder = divmod(len(nodes), len(siblings) or 1)
        if gpu.bdf in siblings and share and not remainder:
            first = siblings.index(gpu.bdf) * share
            nodes_of_gpu[gpu.bdf] = tuple(nodes[first : first + share])
    return nodes_of_gpu


def add_initiator_cells(
    cells: tuple[VmCell, ...],
    homes: Sequence[NodeIndex | None],
    nodes_of_gpu: dict[Bdf, tuple[NodeIndex, ...]],
    host: Host,
    gaps: list[Gap],
) -> tuple[tuple[VmCell, ...], dict[Bdf, CpuSet]]:
    """Return the cells followed by an empty cell for each host node of each GPU; these by GPU.
    homes: the node of each original cell.

    Distances are the host's; those between the definition's own cells are kept.
    """
    added: list[NodeIndex] = []
    cells_of_gpu: dict[Bdf, CpuSet] = {}
    for bdf, nodes in sorted(nodes_of_gpu.items()):
        start = len(cells) + len(added)
        cells_of_gpu[bdf] = CpuSet(range(start, start + len(nodes)))
        added += nodes
    if not added:
        return cells, cells_of_gpu
    count = len(cells)
    online = {node.index for node in host.nodes}
    known_homes = tuple(node for node in homes if node is not None and node in online)
    rows = guest_distances(host, (*known_homes, *added), gaps) if len(known_homes) == count else ()
    grown_cells = list(cells)
    if rows:
        for i, cell in enumerate(cells):
            row = cell.distances or rows[i][:count]
            grown_cells[i] = structs.replace(cell, distances=row + rows[i][count:])
    for i, node in enumerate(added, start=count):
        distances = rows[i] if rows else ()
        grown_cells.append(VmCell(id=i, vcpus=CpuSet(), host_nodes=(node,), distances=distances))
    return tuple(grown_cells), cells_of_gpu
