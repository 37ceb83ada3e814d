"""Guest PCIe: an expander bus per cell, a port per device, next to what the document has.

Every device goes to its place of pcie_tree.py. Ports of places that are not used, but come
before one that is, stay empty: an address then depends on the kinds of devices that a VM gets and
not on which, and libvirt finds no gap to fill. They serve hot-plug too.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.findings import Finding, Severity, finding
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import CoreKind, Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_build import (
    PcieBuild,
    PcieDocument,
    PortAssignment,
    assignments_of,
    base_of,
    best_ones,
    refuse_machine,
    right_ones,
)
from homenode.plan.shape.pcie_tree import PortPlace, device_places, pcie_tree, sparse_places
from homenode.vm.model import GuestAddress, GuestCellId, GuestPciController, PortModel
from homenode.vm.plan_options import PciGranularity


class NearestCell(Struct, frozen=True):
    """The guest's cell that is nearest to a host node without one. distance: the host's SLIT."""

    cell: int
    node: NodeIndex
    distance: int


def nearest_cells(host: Host, nodes: Sequence[NodeIndex]) -> dict[NodeIndex, NearestCell]:
    """For each host node that is no cell's the nearest cell, the lowest among equals.

    nodes: host node of each cell. Empty where the host gives no distances: then none is nearest.
    """
    known = {node.index for node in host.nodes}
    if host.distances is None or not nodes or not known.issuperset(nodes):
        return {}
    found: dict[NodeIndex, NearestCell] = {}
    for node in known.difference(nodes):
        far = [host.distance(node, other) or 0 for other in nodes]
        cell = far.index(min(far))
        found[node] = NearestCell(cell, nodes[cell], far[cell])
    return found


def nearest_cell_finding(
    devices: Iterable[tuple[Bdf, NodeIndex]], nearest: Mapping[NodeIndex, NearestCell]
) -> tuple[Finding, ...]:
    """One finding for all devices on a cell that is not their node's. devices: with their nodes."""
    by_node: dict[NodeIndex, list[Bdf]] = {}
    for bdf, node in devices:
        by_node.setdefault(node, []).append(bdf)
    if not by_node:
        return ()
    stated = "; ".join(
        f"{', '.join(map(str, bdfs))} of host node {node} on cell {nearest[node].cell} (host node "
        f"{nearest[node].node}), at distance {nearest[node].distance}"
        for node, bdfs in sorted(by_node.items())
    )
    count = sum(map(len, by_node.values()))
    return (
        finding(
            "device-on-nearest-cell",
            f"{count} device{'' if count == 1 else 's'}",
            observed=f"their host nodes have no cell, so each hangs on the nearest one: {stated}",
        ),
    )


MOST_SPARE_PORTS = 16


class MirroredPcie(Struct, frozen=True):
    """The guest's PCIe tree. address_of holds devices with a place only; cell_of likewise, and
    whatever else the document has put on a cell's expander bus."""

    controllers: tuple[GuestPciController, ...]
    address_of: dict[Bdf, GuestAddress]
    cell_of: dict[Bdf, GuestCellId]
    group_of: dict[Bdf, Bdf]
    findings: tuple[Finding, ...]


def mirror_pcie(host: Host, request: GuestRequest, placement: Placement) -> MirroredPcie:
    """Controllers and addresses for a request whose layout mirrors PCIe.

    Raises InputError for a machine type without PCIe expander buses, for a device that the host
    does not have or that is a bridge; Unplannable where 256 buses are too few.
    """
    refuse_machine(request.guest, request.layout.name)
    cell_of_node = {node: cell for cell, node in enumerate(placement.nodes)}
    if len(cell_of_node) < len(placement.nodes):
        cells = sorted(
            enumerate(placement.nodes), key=lambda it: _is_efficient(host, placement, it[0])
        )
        cell_of_node = {node: cell for cell, node in reversed(cells)}
    return mirror_cells(
        host,
        request,
        placement.devices,
        cell_of_node,
        len(placement.nodes),
        nearest_cells(host, placement.nodes),
    )


def _is_efficient(host: Host, placement: Placement, cell: int) -> bool:
    """The cell has efficiency cores: of two cells on one node the other one gets the devices."""
    pins = zip(placement.vcpu_nodes, placement.vcpu_pins, strict=False)
    used = CpuSet(pu for at, pus in pins if at == cell for pu in pus)
    return any(
        core.kind is CoreKind.EFFICIENCY and not core.pus.isdisjoint(used) for core in host.cores
    )


def mirror_cells(
    host: Host,
    request: GuestRequest,
    devices: tuple[Bdf, ...],
    cell_of_node: dict[NodeIndex, int],
    cells: int,
    nearest: Mapping[NodeIndex, NearestCell] = MappingProxyType({}),
) -> MirroredPcie:
    """The same for cells that are there already: a cell may be several nodes, or none.

    devices: those that get a place, host order. cells: how many the guest has. nearest: the cells
    of nodes that have none of their own; devices of all other nodes stay where they are.
    Raises as mirror_pcie, the machine type apart.
    """
    if not 0 <= request.options.spare_ports <= MOST_SPARE_PORTS:
        raise UsageError(
            f"--spare-ports: expected 0 to {MOST_SPARE_PORTS}, found {request.options.spare_ports}"
        )
    _refuse_unfit(host.device_at, devices)
    granularity = request.options.pci_granularity or PciGranularity.CELL
    any_port = granularity is PciGranularity.CELL
    nearest_of_node = {node: to.cell for node, to in nearest.items()}
    places = device_places(host, cell_of_node, nearest_of_node)
    if any_port:
        places = sparse_places(places, devices)
    stated = PcieDocument(request.guest, cells, ())
    with_bus = _cells_with_bus(stated, places, devices, cells)
    tree = pcie_tree(places, with_bus, granularity, request.options.spare_ports)
    assignments = assignments_of(tree, devices)
    hostdevs = {hostdev.bdf: hostdev for hostdev in request.guest.hostdevs}
    addresses = {bdf: device.address for bdf, device in hostdevs.items() if device.address}
    base = base_of(stated, tree, assignments, addresses, any_port)
    kept = right_ones(stated, assignments, addresses) if stated.has_tree else {}
    if not any_port:
        kept = best_ones(stated, tree, base, assignments, addresses, kept)
    leaving = [
        addresses[bdf]
        for assignment in assignments
        for bdf in assignment.function_of
        if assignment.position not in kept and bdf in addresses
    ]
    document = PcieDocument(request.guest, cells, leaving)
    if base is None and not (any_port and document.has_tree):
        base = document.last_index  # a new tree, behind whatever there is
    build = PcieBuild(document, tree, base)
    for address in kept.values():
        build.adopt_expander_of(address.bus)
    bus_of = build.lay_ideal(
        [assignment.position for assignment in assignments if assignment.position not in kept]
    )
    if any_port:
        for cell in with_bus:
            build.ensure_expander(cell)
    displaced: list[PortAssignment] = []
    for assignment in assignments:
        if assignment.position not in kept and assignment.position not in bus_of:
            bus_of[assignment.position] = build.append(assignment.cell)
            displaced.append(assignment)
    build.add_spares(request.options.spare_ports)

    address_of: dict[Bdf, GuestAddress] = {}
    cell_of: dict[Bdf, GuestCellId] = {}
    group_of: dict[Bdf, Bdf] = {}
    for assignment in assignments:
        at = kept.get(assignment.position) or GuestAddress(0, bus_of[assignment.position], 0, 0)
        for bdf, function in assignment.function_of.items():
            address_of[bdf] = GuestAddress(at.domain, at.bus, at.device, function)
            cell_of[bdf] = GuestCellId(assignment.cell)
            group_of[bdf] = assignment.first
    for bdf, address in addresses.items():
        expander = document.expander_above(address.bus)
        if bdf not in cell_of and expander is not None and expander.cell is not None:
            cell_of[bdf] = GuestCellId(expander.cell)
    controllers = build.controllers()
    findings = _unplaced(host.device_at, devices, cell_of_node, address_of, cell_of)
    near = [
        (bdf, node)
        for bdf in devices
        if (node := host.device_at[bdf].node) is not None and node in nearest
    ]
    findings += nearest_cell_finding(near, nearest)
    if not any_port:
        findings += tuple(_displaced_finding(assignment) for assignment in displaced)
    if any(port.model == PortModel.SWITCH_UPSTREAM for port in controllers):
        findings += (
            finding(
                "mirrored-switch-slow-link",
                "mirrored PCIe switches",
                observed="QEMU's switch ports report links of Gen1 x1, from which NCCL computes "
                "0.2 GB/s between GPUs below one switch",
            ),
        )
    findings += _without_bus(cells, with_bus)
    findings += _unguarded(request, controllers, address_of)
    return MirroredPcie(controllers, address_of, cell_of, group_of, findings)


def _cells_with_bus(
    stated: PcieDocument, places: tuple[PortPlace, ...], devices: tuple[Bdf, ...], cells: int
) -> tuple[int, ...]:
    """Every cell; only those that get a device where pcie.0 has no slot for so many buses. The
    search chooses no nodes for which these are too many (search/expander_slots.py)."""
    if cells <= len(stated.expander_slots()) + len(stated.cells_with_bus):
        return tuple(range(cells))
    wanted = set(devices)
    return tuple(sorted({p.cell for p in places if not wanted.isdisjoint(p.functions)}))


def _without_bus(cells: int, with_bus: tuple[int, ...]) -> tuple[Finding, ...]:
    without = CpuSet(range(cells)) - CpuSet(with_bus)
    if not without:
        return ()
    return (
        finding(
            "cells-without-bus",
            f"guest cells {without}",
            observed=f"pcie.0 has no slots for {cells} expander buses, so cells without devices "
            "have none: "
            "a device that is plugged in later has no port there",
        ),
    )


def _refuse_unfit(by_bdf: dict[Bdf, PciDevice], devices: tuple[Bdf, ...]) -> None:
    for bdf in devices:
        device = by_bdf.get(bdf)
        if device is None:
            raise InputError(
                f"device {bdf}: expected a PCI function of the host, found none at that address",
                hint="homenode show lists the host's devices",
            )
        if device.kind is DeviceKind.BRIDGE:
            raise InputError(f"device {bdf}: expected a device, found a bridge")


def _unplaced(
    by_bdf: dict[Bdf, PciDevice],
    devices: tuple[Bdf, ...],
    cell_of_node: dict[NodeIndex, int],
    address_of: dict[Bdf, GuestAddress],
    cell_of: dict[Bdf, GuestCellId],
) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    for bdf in devices:
        if bdf in address_of:
            continue
        node = by_bdf[bdf].node
        where = (
            f"stays on the expander bus of cell {cell_of[bdf]}, where the document has it"
            if bdf in cell_of
            else "stays on pcie.0, so the guest sees no NUMA node for it"
        )
        if node is None:
            findings.append(
                finding(
                    "device-node-unknown",
                    str(bdf),
                    "a host NUMA node",
                    f"none: it {where}",
                    severity=Severity.INFO if bdf in cell_of else Severity.WARNING,
                )
            )
        else:
            nodes = ", ".join(map(str, sorted(cell_of_node)))
            findings.append(
                finding(
                    "device-without-cell",
                    str(bdf),
                    observed=f"its host node {node} is not among the guest's ({nodes}): it {where}",
                    case="other node",
                    values={"node": node, "nodes": nodes},
                )
            )
    return tuple(findings)


def _unguarded(
    request: GuestRequest,
    controllers: tuple[GuestPciController, ...],
    address_of: dict[Bdf, GuestAddress],
) -> tuple[Finding, ...]:
    """Empty ports in a document that libvirt has never seen, which names no controllers.

    libvirt 9.0 gives any empty port, on an expander bus and with hotplug='off' too, to the first
    device without an address.
    """
    if request.guest.controllers:
        return ()
    used = {address.bus for address in address_of.values()}
    used |= {c.address.bus for c in controllers if c.address is not None}
    empty = [c for c in controllers if c.index not in used and c.model != PortModel.EXPANDER_BUS]
    if not empty:
        return ()
    return (
        finding(
            "empty-ports-unguarded",
            f"{len(empty)} empty ports",
            observed="the document has not been defined yet: libvirt will give them to devices "
            "that have no "
            "PCI address, a virtual NIC or disk, say",
        ),
    )


def _displaced_finding(assignment: PortAssignment) -> Finding:
    return finding(
        "device-off-its-place",
        str(assignment.first),
        observed="the document has something else where this device's port belongs: it has a "
        "root port of "
        f"its own on an expander bus of cell {assignment.cell}",
    )
