"""ExplainGuest: what a plan makes of the guest: cells, CPUs, devices, pages, address space."""

from collections.abc import Sequence

from homenode.cpuset import CpuSet
from homenode.doc import Commands, Part, Section, Span, Table, Text
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.text import nodes_text, number_list, plural
from homenode.units import KIB, MIB, format_bytes, format_limit
from homenode.vm.layout import GuestCells, Pinning
from homenode.vm.model import GuestCache, GuestHostdev, VmCell
from homenode.vm.plan import Plan

CELLS_TITLE = "Guest cells (NUMA nodes that the guest sees)"


def cells_section(plan: Plan) -> Section:
    pinned = bool(plan.vcpu_pins)
    offline = plan.vm.offline_vcpus
    rows = tuple(
        (
            "whole guest" if plan.layout.cells is GuestCells.SINGLE else str(cell.id),
            f"{cell.vcpus} ({_number(cell.vcpus, offline)})" if cell.vcpus else "none",
            (str(CpuSet.union([plan.vcpu_pins[v] for v in cell.vcpus])) or "none")
            if pinned
            else "any",
            number_list(cell.host_nodes) or "any",
            format_bytes(cell.memory_bytes),
            " ".join(str(distance) for distance in cell.distances) or "not given",
        )
        for cell in plan.cells
    )
    if plan.memory_mode is None:
        line = "The layout changes no binding of memory."
    else:
        line = f"Memory is bound to host {nodes_text(plan.memory_nodes)}, mode {plan.memory_mode}."
    lines = [line]
    lines += [
        f"Cells {number_list(tuple(device.initiator_cells))} are for the memory of GPU "
        f"{device.bdf}: the guest's driver puts it online there."
        for device in plan.vm.hostdevs
        if device.initiator_cells
    ]
    columns = ("guest cell", "vCPUs", "PUs", "host node", "memory", "distances")
    return section(
        CELLS_TITLE,
        tuple(lines),
        Table(heads=columns, rows=rows),
    )


def _number(vcpus: CpuSet, offline: CpuSet) -> str:
    online = vcpus - offline
    return f"{len(vcpus)}, online {online or 'none'}" if online != vcpus else str(len(vcpus))


def topology_section(plan: Plan) -> Section:
    lines: list[str] = []
    if plan.vm.cpu_topology is not None:
        shape = plan.vm.cpu_topology
        levels = zip(shape, ("socket", "die", "core", "thread"), strict=True)
        product = " x ".join(plural(count, noun) for count, noun in levels)
        lines.append(f"The guest sees {product} = {plural(shape.vcpus, 'vCPU')}.")
    caches: dict[str | None, str] = {
        GuestCache.PASSTHROUGH: "Its caches are the host's: they match its threads and LLCs.",
        GuestCache.EMULATED: "Its L3 is emulated, one for each die.",
        GuestCache.DISABLED: "It is shown no L3: none could be true of its vCPUs.",
        None: "The layout sets no caches.",
    }
    lines.append(caches[plan.vm.cpu_cache])
    if plan.vm.topoext:
        sees = plan.vm.threads_per_core > 1
        lines.append(
            "The CPU feature topoext is required, or an AMD guest does not see threads."
            if sees
            else "The CPU feature topoext is required: an AMD guest reads its topology with it."
        )
    if plan.vm.has_iommu:
        lines.append("A vIOMMU is needed: more than 255 vCPUs, or the document had one.")
    return section("CPU topology and caches of the guest", tuple(lines))


def devices_section(plan: Plan, host: Host | None) -> Section:
    names = {} if host is None else {d.bdf: d.kind.value for d in host.pci_devices}
    rows = tuple(
        (
            str(device.bdf),
            names.get(device.bdf, "unknown"),
            "unknown" if device.host_node is None else str(device.host_node),
            "none" if device.cell is None else str(device.cell),
            "not planned" if device.address is None else str(device.address),
        )
        for device in plan.vm.hostdevs
    )
    columns = ("host BDF", "kind", "node", "guest cell", "guest address")
    lines = _dma_lines(plan, host)
    if any(device.address is not None for device in plan.vm.hostdevs):
        lines += (
            "`lspci` in the guest shows other bus numbers: guest addresses are libvirt's, with the "
            "index of a controller as bus.",
        )
    return section("Devices", lines, Table(heads=columns, rows=rows))


def _dma_lines(plan: Plan, host: Host | None) -> tuple[str, ...]:
    """Local and remote parts of DMA; devices with the same parts together."""
    if not plan.vm.hostdevs:
        return ()
    alike: dict[tuple[bool, float | None, int | None], list[GuestHostdev]] = {}
    for device in plan.vm.hostdevs:
        node = device.host_node
        farthest = None if node is None else _farthest(plan.cells, host, node)
        key = (node is not None, device.local_memory_ratio, farthest)
        alike.setdefault(key, []).append(device)
    lines = []
    for (known, ratio, farthest), devices in alike.items():
        which = plural(len(devices), "device")
        if not known:
            lines.append(f"{which} with no known node: which memory is local to them is unknown.")
            continue
        nodes = sorted({device.host_node for device in devices if device.host_node is not None})
        which += f" on {nodes_text(nodes)}"
        if ratio is None:
            bound = (
                f"memory is bound to {nodes_text(plan.memory_nodes)} as a whole, and the kernel "
                "chooses which of it lies where"
                if plan.memory_nodes
                else "this layout does not bind memory"
            )
            lines.append(f"{which}: {bound}, so the local part of DMA is unknown.")
            continue
        whole = plan.vm.memory_bytes + plan.vm.memory_device_bytes
        local = round(whole * ratio)
        remote = whole - local
        each = "each" if len(devices) > 1 else "it"
        text = f"{which}: {each} has {format_bytes(local)} ({_percent(ratio)}) of the guest's "
        text += "memory on its own node"
        if remote:
            text += f"; DMA to the other {format_bytes(remote)} is remote"
            text += f", at distances up to {farthest}" if farthest else ""
        lines.append(text + ".")
    no_cell = [d for d in plan.vm.hostdevs if d.cell is None]
    if no_cell and len(plan.cells) > 1:
        lines.append(
            f"{plural(len(no_cell), 'device')} on no guest cell: the guest cannot know which "
            "of its cells is near."
        )
    return tuple(lines)


def _farthest(cells: Sequence[VmCell], host: Host | None, node: NodeIndex) -> int | None:
    if host is None or host.node(node) is None:
        return None
    others = [
        n
        for cell in cells
        for n in cell.host_nodes
        if cell.memory_bytes and n != node and host.node(n)
    ]
    distances = [host.distance(node, other) for other in others]
    return max((d for d in distances if d is not None), default=None)


def pages_section(plan: Plan, host: Host | None) -> Section:
    commands: list[str] = []
    rows: list[tuple[str, ...]] = []
    for node, page_bytes, pages, free in plan.page_reservations:
        rows.append(
            (
                str(node),
                format_bytes(page_bytes),
                str(pages),
                "unknown" if free is None else str(free),
            )
        )
        if free is not None and free >= pages:
            continue
        folder = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{page_bytes // KIB}kB"
        file = f"{folder}/nr_hugepages"
        missing = pages if free is None else pages - free
        total = _pool_pages(host, node, page_bytes)
        wanted = f"$(( $(cat {file}) + {missing} ))" if total is None else str(total + missing)
        commands.append(f"echo {wanted} > {file}")
    lines: tuple[str, ...] = ()
    if commands:
        lines = (
            "Reserve before the VM starts, as root, and check: the kernel reserves fewer where "
            "memory is fragmented, without an error. A reboot ends it: homenode plan --explain "
            "prints the kernel parameters that reserve them at every boot.",
        )
    elif rows:
        lines = ("Enough huge pages are free; nothing to reserve.",)
    table = Table(heads=("node", "page size", "pages needed", "free now"), rows=tuple(rows))
    return section("Huge pages", lines, table if rows else None, tuple(commands))


def kernel_section(plan: Plan, host: Host | None) -> Section:
    """Kernel parameters for what the plan needs from every boot on: huge pages, and PUs without
    the host's own work.

    Source: Linux Documentation/admin-guide/kernel-parameters.txt (hugepages=NODE:COUNT since 5.16,
    isolcpus=, nohz_full=, rcu_nocbs=, irqaffinity=).
    """
    pools: dict[int, list[str]] = {}
    for node, page_bytes, pages, free in plan.page_reservations:
        total = _pool_pages(host, node, page_bytes)
        if total is not None:
            pages = total + max(0, pages - (free or 0))
        pools.setdefault(page_bytes, []).append(f"{node}:{pages}")
    parameters = [
        f"hugepagesz={page_bytes // KIB}K hugepages={','.join(pools[page_bytes])}"
        for page_bytes in sorted(pools, reverse=True)  # small pages break up what large ones need
    ]
    pus = CpuSet.union(plan.vcpu_pins)
    if host is not None and pus and plan.layout.pinning is not Pinning.NODE:
        pus |= CpuSet(pu.index for pu in host.pus if pu.isolated)
        rest = CpuSet(pu.index for pu in host.pus if pu.online) - pus
        isolated = f"isolcpus=managed_irq,domain,{pus} nohz_full={pus} rcu_nocbs={pus}"
        parameters += [f"{isolated} irqaffinity={rest}"] if rest else []
    lines = (
        "For the bootloader's kernel command line, where the VM has its PUs for good; "
        "hugepages= by node needs Linux 5.16:",
    )
    return section("Kernel parameters", lines if parameters else (), commands=parameters)


def _pool_pages(host: Host | None, index: NodeIndex, page_bytes: int) -> int | None:
    """Pages of that size that the node's pool has now; None where that is not known."""
    node = None if host is None else host.node(index)
    if node is None:
        return None
    return next((p.total_pages for p in node.page_pools if p.page_bytes == page_bytes), None)


def apertures_section(plan: Plan) -> Section:
    aperture = plan.aperture
    if aperture is None:
        return section("Address space and locked memory")
    lines: list[str] = []
    if aperture.pcihole64_bytes is not None:
        lines.append(f"64-bit PCI window (pcihole64): {format_bytes(aperture.pcihole64_bytes)}.")
    if aperture.physical_address_bits is not None:
        lines.append(f"Physical address bits in the guest: {aperture.physical_address_bits}.")
    if aperture.firmware_mmio64_mib is not None:
        window = aperture.firmware_mmio64_mib * MIB
        lines.append(f"OVMF's 64-bit MMIO window: {format_bytes(window)}.")
    lines.append(
        f"Locked memory (memlock) that QEMU needs: {format_limit(aperture.memlock_bytes)}."
    )
    if aperture.dma_map_entries:
        lines.append(
            f"Entries in the IOMMU's DMA map: at most {aperture.dma_map_entries:,}. The kernel "
            "makes them when the VM starts; larger pages need fewer."
        )
    return section("Address space and locked memory", tuple(lines))


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{100 * ratio:.0f} %"


_LOOKS = {"warning:": "warn", "critical:": "bad", "hint:": "hint", "fix:": "hint"}


def section(
    heading: str,
    lines: Sequence[str] = (),
    table: Table | None = None,
    commands: Sequence[str] = (),
) -> Section:
    """Sentences, then a table, then commands to run as root. No parts where there is nothing."""
    parts: list[Part] = [line_text(line) for line in lines]
    if table is not None and table.rows:
        parts.append(table)
    if commands:
        parts.append(Commands(tuple(commands)))
    return Section(heading, tuple(parts))


def line_text(line: str) -> Text:
    """A line with its indent, and the word at its beginning that says what it is."""
    text = line.lstrip(" ")
    word, _, rest = text.partition(" ")
    words = (Span(word, _LOOKS[word]), f" {rest}") if word in _LOOKS else text
    return Text(words, indent=len(line) - len(text))
