"""Paths of a machine: host and guest side by side, from a plan, or from what a layout means."""

from collections import Counter
from collections.abc import Iterable

from homenode.analyse.alternative import Alternative
from homenode.pci import DeviceKind, PciDevice
from homenode.plan.model import Plan
from homenode.report.charts.paths import GuestCell, HostNode, Paths
from homenode.topology import Host
from homenode.units import format_bytes
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding
from homenode.wording import plural


def planned_paths(label: str, plan: Plan, host: Host | None) -> Paths:
    """What a plan says. host: distinguishes GPUs from other devices, and nodes that the VM is not
    on.
    """
    counted = _counted(plan, host)
    at = {device.bdf: device for device in plan.devices if device.bdf in counted}
    used = {int(node) for cell in plan.cells for node in cell.host_nodes}
    used |= {int(device.host_node) for device in at.values() if device.host_node is not None}
    if host is not None:
        used |= {int(node.index) for node in host.nodes if node.pus}
    on_node: Counter[int | None] = Counter(device.host_node for device in at.values())
    cells = [
        GuestCell(
            cell.id,
            f"{plural(len(cell.vcpus), 'vCPU')}, {format_bytes(cell.memory_bytes)}",
            tuple(map(int, cell.host_nodes)) or tuple(sorted(used)),
            bool(plan.memory_nodes),
            _by_node(d.host_node for d in at.values() if d.cell == cell.id),
        )
        for cell in plan.cells
    ]
    loose = _by_node(d.host_node for d in at.values() if d.cell is None)
    if loose:
        cells.append(GuestCell(None, "numa_node -1", (), False, loose))
    nodes = tuple(HostNode(f"node {node}", node, on_node[node]) for node in sorted(used))
    if on_node[None]:
        nodes += (HostNode("node unknown", None, on_node[None]),)
    return Paths(label, nodes, tuple(cells), "device" if host is None else "GPU")


def meant_paths(one: Alternative, host: Host, gpus: int | None) -> Paths | None:
    """What a layout means on a host, where no plan is stored; None where its cells are unknown.

    gpus: how many of the host's GPUs the guest has; None = all.
    """
    if one.switches.cells is None:
        return None
    nodes = [node for node in host.nodes if node.pus]
    cards = _gpus(host)[:gpus]
    bound = one.switches.memory not in (None, MemoryBinding.AS_IT_WAS)
    bound = bound or one.switches.cells is GuestCells.MIRRORED
    mirrored = one.switches.cells is GuestCells.MIRRORED
    placed = mirrored and one.switches.pcie is GuestPcie.MIRRORED
    indices = tuple(int(node.index) for node in nodes)
    groups = [(index,) for index in indices] if mirrored else [indices]
    vcpus = {run.head.vcpus for run in one.runs}
    count = vcpus.pop() if len(vcpus) == 1 else None
    cells = [
        GuestCell(
            number,
            ""
            if count is None
            else f"about {plural(round(count / len(groups)), 'vCPU')}"
            if len(groups) > 1
            else plural(count, "vCPU"),
            group,
            bound,
            _by_node(g.node for g in cards if placed and g.node == group[0]),
        )
        for number, group in enumerate(groups)
    ]
    loose = _by_node(g.node for g in cards if not (placed and g.node in indices))
    if loose:
        cells.append(GuestCell(None, "numa_node -1", (), False, loose))
    on_node: Counter[int | None] = Counter(card.node for card in cards)
    sides = tuple(HostNode(f"node {index}", index, on_node[index]) for index in indices)
    if on_node[None]:
        sides += (HostNode("node unknown", None, on_node[None]),)
    return Paths(one.label, sides, tuple(cells), "GPU")


def _gpus(host: Host) -> list[PciDevice]:
    return [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None]


def _counted(plan: Plan, host: Host | None) -> set[object]:
    """Devices that are drawn: GPUs, where a host shows which they are; else one of each group."""
    if host is None:
        return {device.group for device in plan.devices}
    known = {gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
    return {device.bdf for device in plan.devices if device.bdf in known}


def _by_node(nodes: Iterable[int | None]) -> tuple[tuple[int | None, int], ...]:
    return tuple(Counter(nodes).items())
