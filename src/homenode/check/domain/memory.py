"""Memory of a domain: whether its nodes exist and have enough memory and huge pages, locked memory,
and the locality of memory to vCPUs and devices.
"""

import math
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.check.domain.pins import find_nodes
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, Subject, finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, MemoryKind, NumaNode
from homenode.plan.memory import qemu_bytes
from homenode.plan.request import choose_huge_page_bytes
from homenode.text import format_nodes, plural
from homenode.units import GIB, format_bytes
from homenode.vm.domain.document import Document
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import Vm, VmCell

VFIO_EXTRA_BYTES = GIB
"""Added to the guest's memory. Source: qemuDomainGetMemLockLimitBytes, libvirt 9.0."""


class _MemoryDemand(Struct, frozen=True):
    """Memory that must come from some nodes."""

    subject: str | Subject
    nodes: CpuSet
    memory_bytes: int
    page_bytes: int | None  # None = ordinary, 0 = the default size, which the host then gives
    mode: str


def check_memory_alone(facts: Vm) -> Iterator[Finding]:
    """Check the memory without a host: whether VFIO may lock it."""
    if not facts.hostdevs or facts.hard_limit_bytes is None:
        return
    needed_bytes = facts.memory_bytes + facts.memory_device_bytes + VFIO_EXTRA_BYTES
    note = ""
    if facts.has_iommu and len(facts.hostdevs) > 1:
        needed_bytes *= len(facts.hostdevs)
        note = ", once for each device behind a vIOMMU"
    if facts.hard_limit_bytes < needed_bytes:
        yield finding(
            "memlock-low",
            "<hard_limit>",
            expected=f"at least {format_bytes(needed_bytes)}: VFIO locks all memory and QEMU needs "
            f"its own{note}",
            observed=format_bytes(facts.hard_limit_bytes),
        )


def memory_on_host(facts: Vm, host: Host) -> Iterator[Finding]:
    """Check the memory and its binding against this host's nodes."""
    node_at = {int(node.index): node for node in host.nodes}
    all_nodes = CpuSet(i for i, node in node_at.items() if node.memory_kind is not MemoryKind.GPU)
    demands = [
        *_list_demands(facts),
        *(_list_unbound_demands(facts, all_nodes) if all_nodes else ()),
    ]
    for demand in (*demands, *_bind_with_cells(facts, demands)):
        yield from _check_nodes(demand, node_at, host, facts.source)
    yield from _check_qemu_memory(facts, demands, [node_at[i].memory_bytes for i in all_nodes])
    running = _is_running(facts, host)
    if any(demand.page_bytes == 0 for demand in demands):
        default = choose_huge_page_bytes(host)
        demands = [replace(d, page_bytes=default) if d.page_bytes == 0 else d for d in demands]
    sizes = {demand.page_bytes for demand in demands}
    for size in sorted(sizes, key=lambda size: -1 if size is None else size):
        size_demands = [d for d in demands if d.page_bytes == size and d.nodes <= CpuSet(node_at)]
        if size is None:
            yield from _check_ordinary_pages(size_demands, node_at, running)
        else:
            yield from _check_huge_pages(size_demands, node_at, size, running)


def _check_qemu_memory(
    facts: Vm, demands: list[_MemoryDemand], sizes: list[int | None]
) -> Iterator[Finding]:
    """Find a VM that fits the memory only without QEMU and its page tables."""
    total = sum(size or 0 for size in sizes)
    vm_bytes = sum(demand.memory_bytes for demand in demands)
    ordinary_bytes = sum(demand.memory_bytes for demand in demands if demand.page_bytes is None)
    needed_bytes = vm_bytes + qemu_bytes(facts.vcpus, ordinary_bytes, bool(facts.hostdevs))
    if None not in sizes and 0 < vm_bytes <= total < needed_bytes:
        yield finding(
            "memory-short",
            "all nodes",
            expected=f"{format_bytes(needed_bytes)} for the VM and QEMU",
            observed=format_bytes(total),
            case="all nodes",
        )


def _is_running(facts: Vm, host: Host) -> bool | None:
    """Return whether the VM runs on the host now; None if a running domain's name is redacted."""
    names = [domain for domain in host.domains if domain.running]
    if any(domain.name == facts.name for domain in names):
        return True
    return None if any(domain.has_pseudonym for domain in names) else False


def _list_demands(facts: Vm) -> Iterator[_MemoryDemand]:
    if facts.cells:
        for cell in facts.cells:
            if cell.nodes:
                yield _MemoryDemand(
                    Subject(f"cell {cell.id}", "cell", cell.id),
                    cell.nodes,
                    cell.memory_bytes,
                    cell.page_bytes,
                    cell.mode or "strict",
                )
    elif facts.binding is not None:
        mode, nodes = facts.binding
        yield _MemoryDemand("<numatune>", nodes, facts.memory_bytes, facts.page_bytes, mode)
    devices = (device for device in facts.memory_devices if device.is_host_memory)
    for number, device in enumerate(devices):
        if device.nodes:
            name = f"memory device {number} ({device.model}, cell {device.cell})"
            yield _MemoryDemand(
                Subject(name, "cell", device.cell),
                device.nodes,
                device.plugged_bytes,
                device.page_bytes,
                device.mode or "strict",
            )


def _list_unbound_demands(facts: Vm, all_nodes: CpuSet) -> Iterator[_MemoryDemand]:
    """Yield unbound memory; ordinary pages without devices are needed only when touched."""
    needs_all = bool(facts.hostdevs)
    parts: dict[str | Subject, Vm | VmCell] = {
        Subject(f"cell {c.id}", "cell", c.id): c for c in facts.cells if not c.nodes
    }
    if not facts.cells and facts.binding is None:
        parts["<memory>"] = facts
    for subject, part in parts.items():
        mode = "strict" if needs_all or part.page_bytes is not None else "preferred"
        yield _MemoryDemand(subject, all_nodes, part.memory_bytes, part.page_bytes, mode)


def _bind_with_cells(facts: Vm, demands: list[_MemoryDemand]) -> Iterator[_MemoryDemand]:
    """Check <numatune><memory> if every cell has its own nodes: libvirt checks these nodes too."""
    if facts.binding is not None:
        mode, nodes = facts.binding
        if all(demand.nodes != nodes for demand in demands):
            yield _MemoryDemand("<numatune>", nodes, 0, None, mode)


def _check_nodes(
    demand: _MemoryDemand, node_at: dict[int, NumaNode], host: Host, source: str
) -> Iterator[Finding]:
    missing = demand.nodes - CpuSet(node_at)
    if missing:
        yield finding(
            "memory-unknown-node",
            demand.subject,
            expected=f"nodes of {host.name}: {CpuSet(node_at)}",
            observed=f"node {missing}, which is not there",
            source=source,
        )
    empty = CpuSet(n for n in demand.nodes if n in node_at and node_at[n].memory_bytes == 0)
    if empty and empty == demand.nodes:
        yield finding(
            "memory-on-empty-node",
            demand.subject,
            expected="a node with memory",
            observed=f"node {empty}, which has no memory",
            source=source,
        )


def _find_shortages(
    demands: list[_MemoryDemand], space: dict[int, int | None]
) -> Iterator[tuple[CpuSet, int, int]]:
    """Yield (nodes, needed, available) of each set of nodes with too little memory. Unknown amounts
    are not judged. Exact for demands of single nodes; where sets overlap, each set is compared with
    everything that must come from inside it."""
    for nodes in sorted({d.nodes for d in demands}, key=lambda nodes: (len(nodes), str(nodes))):
        spaces = [space.get(node) for node in nodes]
        sizes = [size for size in spaces if size is not None]
        if len(sizes) == len(spaces):
            needed_bytes = sum(d.memory_bytes for d in demands if d.nodes <= nodes)
            if needed_bytes > sum(sizes):
                yield nodes, needed_bytes, sum(sizes)


def _find_memory_shortages(
    demands: list[_MemoryDemand],
    free: dict[int, int | None],
    total: dict[int, int | None],
    running: bool | None,
) -> Iterator[tuple[CpuSet, int, int, Severity | None]]:
    """Yield (nodes, needed, room, severity); None = the usual one. A running VM has its memory
    already, so only the nodes' size can be too small. If it is unknown whether it runs, free memory
    is not judged."""
    for nodes, needed_bytes, space in _find_shortages(demands, total if running else free):
        doubtful = running is None and (nodes, needed_bytes) not in {
            (short_nodes, short_bytes)
            for short_nodes, short_bytes, _ in _find_shortages(demands, total)
        }
        hard = any(d.mode in ("strict", "restrictive") for d in demands if d.nodes <= nodes)
        severity = None if hard else Severity.WARNING
        yield nodes, needed_bytes, space, Severity.INCONCLUSIVE if doubtful else severity


def _format_nodes(nodes: CpuSet, node_at: Iterable[int]) -> str:
    return "all nodes" if nodes == CpuSet(node_at) and len(nodes) > 1 else f"node {nodes}"


def _free_memory(space: str, severity: Severity | None) -> str:
    if severity is not Severity.INCONCLUSIVE:
        return space
    return f"{space}; a running domain with a redacted name may be this very VM"


def _check_ordinary_pages(
    demands: list[_MemoryDemand], node_at: dict[int, NumaNode], running: bool | None
) -> Iterator[Finding]:
    free: dict[int, int | None] = {}
    total: dict[int, int | None] = {}
    for index, node in node_at.items():
        pool_bytes = sum(pool.page_bytes * pool.total_pages for pool in node.page_pools)
        total[index] = None if node.memory_bytes is None else node.memory_bytes - pool_bytes
        known_free = node.memory_free_bytes
        free[index] = total[index] if known_free is None else known_free
    host_bytes = math.inf if None in total.values() else sum(filter(None, total.values()))
    for nodes, needed, space, severity in _find_memory_shortages(demands, free, total, running):
        yield finding(
            "memory-short",
            _format_nodes(nodes, node_at),
            expected=f"{format_bytes(needed)} free for the VM",
            observed=_free_memory(format_bytes(space), severity),
            severity=None if needed > host_bytes else severity,
            case="all nodes" if nodes == CpuSet(node_at) else None,
        )


def _check_huge_pages(
    demands: list[_MemoryDemand], node_at: dict[int, NumaNode], page: int, running: bool | None
) -> Iterator[Finding]:
    sizes = sorted({pool.page_bytes for node in node_at.values() for pool in node.page_pools})
    if not sizes:
        yield finding(
            "huge-pages-unknown",
            "huge pages",
            expected="the host's pools of huge pages",
            observed="none in the capture or description of the host",
        )
        # Pools can be made of what there is, and of no more.
        yield from _check_ordinary_pages(demands, node_at, True)
        return
    if page not in sizes and page * page // 8 in sizes:
        # The ordinary page: a table of one page has page / 8 entries, and maps the next size.
        yield from _check_ordinary_pages(demands, node_at, running)
        return
    if page not in sizes:
        yield finding(
            "huge-page-size",
            "<hugepages>",
            expected=f"a size that the host has: {', '.join(map(format_bytes, sizes))}",
            observed=format_bytes(page),
        )
        return
    for demand in demands:
        if demand.memory_bytes % page:
            yield finding(
                "huge-pages-not-whole",
                demand.subject,
                expected=f"whole pages of {format_bytes(page)}",
                observed=f"{demand.memory_bytes} bytes",
            )
    free: dict[int, int | None] = dict.fromkeys(node_at, 0)
    total: dict[int, int | None] = dict.fromkeys(node_at, 0)
    for index, node in node_at.items():
        for pool in node.page_pools:
            if pool.page_bytes == page:
                free[index], total[index] = page * pool.free_pages, page * pool.total_pages
    for nodes, needed, space, severity in _find_memory_shortages(demands, free, total, running):
        missing = -(-(needed - space) // page)
        yield finding(
            "huge-pages-short",
            _format_nodes(nodes, node_at),
            expected=f"{plural(-(-needed // page), 'free page')} of {format_bytes(page)}",
            observed=_free_memory(str(space // page), severity),
            severity=severity,
            values={"pages": missing, "node": nodes.first(), "kilobytes": page // 1024},
        )


_PULLING = (DeviceKind.GPU, DeviceKind.NIC)


def is_bound_by_numad(document: Document | None) -> bool:
    """Return whether libvirt gets the nodes from numad at each start, and binds to them."""
    memory = None if document is None else document.root.find("numatune/memory")
    return memory is not None and memory.get("placement") == "auto"


def check_memory(facts: Vm, document: Document | None, host: Host) -> Iterator[Finding]:
    """Memory that is not bound, bound elsewhere, or bound in two ways; devices that are far."""
    if len(host.nodes) < 2:
        return
    if not is_bound_by_numad(document):
        yield from _check_unbound(facts, host)
    yield from _check_modes(facts)
    yield from _check_gpu_nodes(facts, host)
    yield from _check_far_devices(facts, host)


def _check_unbound(facts: Vm, host: Host) -> Iterator[Finding]:
    if not facts.is_pinned:
        return
    vcpu_nodes = find_nodes(facts.pinned_pus, host)
    unbound = [cell.id for cell in facts.cells if cell.memory_bytes and not cell.nodes]
    if len(facts.cells) > 1 and unbound:
        yield finding(
            "memory-unbound",
            Subject(f"cells {CpuSet(unbound)}", "cell", unbound[0]),
            expected="memory bound to the node of the cell's vCPUs",
            observed="no binding",
        )
    elif len(facts.cells) < 2 and not facts.memory_nodes and len(vcpu_nodes) == 1:
        record = facts.record
        as_planned = record is not None and record.layout.memory is MemoryBinding.KEEP
        yield finding(
            "memory-unbound",
            "<numatune>",
            expected=f"memory bound to {format_nodes(vcpu_nodes)}, where the vCPUs are",
            observed="no binding",
            severity=Severity.INFO if as_planned else None,
        )
    elif len(facts.cells) < 2 and facts.binding is not None:
        bound = facts.binding[1]
        nodes_without_vcpus = bound - vcpu_nodes
        bare = vcpu_nodes - bound - CpuSet(n.index for n in host.nodes if n.memory_bytes == 0)
        if vcpu_nodes and nodes_without_vcpus:
            observed = (
                f"on {format_nodes(nodes_without_vcpus)} only"
                if nodes_without_vcpus == bound
                else f"{format_nodes(nodes_without_vcpus)} as well"
            )
        else:
            observed = f"none on {format_nodes(bare)}" if bare else ""
        if observed:
            yield finding(
                "memory-elsewhere",
                "<numatune>",
                expected=f"memory on {format_nodes(vcpu_nodes)}, where the vCPUs are",
                observed=observed,
                case=None if facts.source == facts.name else "file",
                values={"vm": facts.source},
            )


def _check_modes(facts: Vm) -> Iterator[Finding]:
    if facts.binding is None or facts.binding[0] != "strict":
        return
    soft = [cell for cell in facts.cells if cell.mode not in ("strict", None)]
    if soft:
        yield finding(
            "memnode-not-strict",
            Subject(f"cells {CpuSet(cell.id for cell in soft)}", "cell", soft[0].id),
            expected="mode strict, as in <memory>",
            observed=f"<memnode> with mode {', '.join(sorted({str(cell.mode) for cell in soft}))}",
        )


def _check_gpu_nodes(facts: Vm, host: Host) -> Iterator[Finding]:
    gpu_nodes = CpuSet(n.index for n in host.nodes if n.memory_kind is MemoryKind.GPU)
    bound = facts.memory_nodes
    if not bound.isdisjoint(gpu_nodes):
        yield finding(
            "memory-on-gpu",
            f"node {bound & gpu_nodes}",
            expected="nodes of the CPUs' own memory",
            observed="memory of a GPU",
        )


def _check_far_devices(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find devices in packages without vCPUs and memory of the VM."""
    if not facts.is_pinned:
        return
    vm_nodes = find_nodes(facts.pinned_pus, host) | facts.memory_nodes
    devices = (host.find_device(hostdev.bdf) for hostdev in facts.hostdevs)
    pulling = [
        device
        for device in devices
        if device is not None and device.kind in _PULLING and device.node is not None
    ]
    homes = {node.package for node in host.nodes if node.index in {d.node for d in pulling}}
    # Cores that do not divide over the devices' packages have to leave some devices far, and so
    # has a package without memory.
    cores = facts.vcpus // facts.threads_per_core
    divides = not homes or cores % len(homes) == 0
    divides = divides and not any(node.memory_bytes == 0 for node in host.nodes if node.pus)
    near_nodes = _add_package_nodes(vm_nodes, host)
    for device in pulling:
        if device.node is not None and int(device.node) not in near_nodes:
            yield finding(
                "device-far",
                device.bdf,
                expected=f"vCPUs and memory on the device's node {device.node}",
                observed=f"all of them on {format_nodes(vm_nodes)}",
                severity=None if divides else Severity.INFO,
                case=None if divides else "uneven cores",
                values={"packages": len(homes)},
            )


def _add_package_nodes(nodes: CpuSet, host: Host) -> CpuSet:
    """Return these nodes and the other nodes of their packages."""
    packages = {node.package for node in host.nodes if node.index in nodes} - {None}
    return nodes | CpuSet(node.index for node in host.nodes if node.package in packages)
