"""Consequences: the changes that the guest's user will see, one sentence each."""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.machine.pci import KIND_NAMES, DeviceKind, PciDevice
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.shape.guest_topology import format_online
from homenode.text import plural
from homenode.units import format_bytes
from homenode.vm.layout import GuestCells
from homenode.vm.model import (
    GuestAddress,
    GuestHostdev,
    GuestPciController,
    GuestTopology,
    PortModel,
    Vm,
    VmCell,
)


def list_consequences(
    host: Host | None, request: GuestRequest, vm: Vm, cells: tuple[VmCell, ...]
) -> tuple[str, ...]:
    """Sentences in the order in which a user sees the changes. cells: of vm, if flat too."""
    sentences: list[str] = []
    guest = request.guest
    if vm.vcpus != guest.vcpus:
        sentences.append(f"The guest has {plural(vm.vcpus, 'vCPU')} instead of {guest.vcpus}.")
    if request.memory_bytes != guest.memory_bytes:
        sentences.append(
            f"The guest has {format_bytes(request.memory_bytes)} of memory instead of "
            f"{format_bytes(guest.memory_bytes)}."
        )
    sentences += _describe_cells(host, request, cells, vm.offline_vcpus)
    sentences += _describe_topology(host, request, cells, vm.cpu_topology)
    if host is not None:
        before = {hostdev.bdf: hostdev.address for hostdev in guest.hostdevs}
        sentences += _list_address_changes(host.device_at, before, vm.hostdevs)
        sentences += _describe_locality(host.device_at, vm.hostdevs)
    empty = _count_empty_ports(vm.hostdevs, vm.controllers)
    if empty:
        sentences.append(
            f"{plural(empty, 'empty PCIe port')} wait{'s' if empty == 1 else ''} for devices: the "
            "next one of a guest node takes one."
        )
    return tuple(sentences)


def _describe_cells(
    host: Host | None, request: GuestRequest, cells: tuple[VmCell, ...], offline: CpuSet
) -> list[str]:
    if request.layout.cells is GuestCells.SINGLE:
        return []
    sizes = "; ".join(
        f"node {cell.id} with vCPUs {cell.vcpus}{format_online(cell.vcpus, offline)} and "
        f"{format_bytes(cell.memory_bytes)}"
        for cell in cells
    )
    sentences = [f"The guest sees {plural(len(cells), 'NUMA node')}: {sizes}."]
    if len(cells) > 1 and host is not None and not cells[0].distances:
        sentences.append(
            "The guest sees no distances and treats all its NUMA nodes as equally far."
        )
    return sentences


def _describe_topology(
    host: Host | None,
    request: GuestRequest,
    cells: tuple[VmCell, ...],
    topology: GuestTopology | None,
) -> list[str]:
    if topology is None:
        return []
    sentences: list[str] = []
    before = request.guest.cpu_topology
    # Without a topology libvirt makes each vCPU a socket.
    sockets = before.sockets if before else request.guest.vcpus
    if topology.sockets != sockets:
        many = "socket" if topology.sockets == 1 else "sockets"
        instead = f", not {sockets}" if before else f"; without <topology> it would be {sockets}"
        sentences.append(f"Per-socket licences see {topology.sockets} {many}{instead}.")
    if host is not None and request.layout.cells is GuestCells.HOST:
        nodes = host.node_at
        packages = {
            nodes[node].package for cell in cells for node in cell.host_nodes if node in nodes
        }
        if None not in packages and len(packages) < len(cells) == topology.sockets:
            sentences.append(
                f"Each of {len(cells)} guest NUMA nodes is a socket, although the host has them on "
                f"{plural(len(packages), 'package')}."
            )
    if topology.threads > 1:
        sentences.append(f"The guest sees {plural(topology.threads, 'thread')} per core.")
    elif before and before.threads > 1:
        sentences.append(f"The guest sees one thread a core instead of {before.threads}.")
    if topology.dies > 1:
        sentences.append(
            f"The guest is shown {topology.dies} dies a socket, one for each host LLC."
        )
    return sentences


def _list_address_changes(
    by_bdf: dict[Bdf, PciDevice],
    before: dict[Bdf, GuestAddress | None],
    devices: tuple[GuestHostdev, ...],
) -> list[str]:
    sentences: list[str] = []
    nics = 0
    for device in devices:
        if device.address is None or before.get(device.bdf) == device.address:
            continue
        function = by_bdf.get(device.bdf)
        kind = "device" if function is None else KIND_NAMES.get(function.kind, "device")
        nics += function is not None and function.kind is DeviceKind.NIC
        old = before.get(device.bdf)
        origin = f"from guest address {old} to" if old else "to guest address"
        path = f"{origin} {device.address}"
        place = "" if device.cell is None else f", on guest NUMA node {device.cell}"
        sentences.append(f"{kind} {device.bdf} moves {path}{place}.")
    if nics:
        sentences.append(
            f"Names of {plural(nics, 'network interface')} that follow the PCI path (enpXsY) "
            "change in the guest; names by MAC or by altname do not."
        )
    return sentences


def _describe_locality(
    by_bdf: dict[Bdf, PciDevice], devices: tuple[GuestHostdev, ...]
) -> list[str]:
    """Return sentences on how much guest memory is local to GPUs and NICs."""
    shares: dict[tuple[str, float, NodeIndex | None], list[str]] = {}
    for device in devices:
        function = by_bdf.get(device.bdf)
        if function is None or device.local_memory_ratio is None:
            continue
        if function.kind in (DeviceKind.GPU, DeviceKind.NIC):
            key = (KIND_NAMES[function.kind], device.local_memory_ratio, function.node)
            shares.setdefault(key, []).append(str(device.bdf))
    return [
        f"{ratio * 100:.0f} % of the guest's memory is on the node of {kind} "
        f"{', '.join(bdfs[:8])}{' and others' if len(bdfs) > 8 else ''}"
        + (f"; the other {(1 - ratio) * 100:.0f} % is remote." if ratio < 0.995 else ".")
        for (kind, ratio, _), bdfs in shares.items()
    ]


def _count_empty_ports(
    devices: tuple[GuestHostdev, ...], controllers: tuple[GuestPciController, ...]
) -> int:
    used = {device.address.bus for device in devices if device.address is not None}
    parents = {c.address.bus for c in controllers if c.address is not None}
    return sum(
        controller.model != PortModel.EXPANDER_BUS
        and not controller.existing
        and controller.index not in used
        and controller.index not in parents
        for controller in controllers
    )
