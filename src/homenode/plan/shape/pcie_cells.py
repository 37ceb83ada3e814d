"""Cells of devices: the nearest cell to a host node without a cell, and findings on devices and
cells without a place in the guest's PCIe tree."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.text import plural
from homenode.vm.model import GuestAddress, GuestCellId, GuestPciController, PortModel


class NearestCell(Struct, frozen=True):
    """The guest's cell that is nearest to a host node without one."""

    cell: int
    node: NodeIndex
    distance: int  # the host's SLIT


def find_nearest_cells(host: Host, nodes: Sequence[NodeIndex]) -> dict[NodeIndex, NearestCell]:
    """Map each host node without a cell to the nearest cell, the lowest among equals. nodes: host
    node of each cell. Empty if the host reports no distances."""
    indices = {node.index for node in host.nodes}
    if host.distances is None or not nodes or not indices.issuperset(nodes):
        return {}
    nearest: dict[NodeIndex, NearestCell] = {}
    for node in indices.difference(nodes):
        distances = [host.find_distance(node, other) or 0 for other in nodes]
        cell = distances.index(min(distances))
        nearest[node] = NearestCell(cell, nodes[cell], distances[cell])
    return nearest


def report_nearest_cells(
    devices: Iterable[tuple[Bdf, NodeIndex]], nearest: Mapping[NodeIndex, NearestCell]
) -> tuple[Finding, ...]:
    """Return one finding for all devices on a cell of another node. devices: with their nodes."""
    by_node: dict[NodeIndex, list[Bdf]] = {}
    for bdf, node in devices:
        by_node.setdefault(node, []).append(bdf)
    if not by_node:
        return ()
    places = "; ".join(
        f"{', '.join(map(str, bdfs))} of host node {node} on cell {nearest[node].cell} (host node "
        f"{nearest[node].node}), at distance {nearest[node].distance}"
        for node, bdfs in sorted(by_node.items())
    )
    count = sum(map(len, by_node.values()))
    return (
        finding(
            "device-on-nearest-cell",
            f"{count} device{'' if count == 1 else 's'}",
            observed=f"their host nodes have no guest NUMA node, so each hangs on the nearest "
            f"one: {places}",
        ),
    )


def check_switches(controllers: Sequence[GuestPciController]) -> tuple[Finding, ...]:
    if all(port.model != PortModel.SWITCH_UPSTREAM for port in controllers):
        return ()
    return (
        finding(
            "mirrored-switch-slow-link",
            "mirrored PCIe switches",
            observed="QEMU's switch ports report links of Gen1 x1, from which NCCL computes "
            "0.2 GB/s between GPUs below one switch",
        ),
    )


def check_cell_buses(cells: int, with_bus: Iterable[int]) -> tuple[Finding, ...]:
    busless = CpuSet(range(cells)) - CpuSet(with_bus)
    if not busless:
        return ()
    return (
        finding(
            "cells-without-bus",
            f"guest cells {busless}",
            observed=f"pcie.0 has no slots for {cells} expander buses, so guest NUMA nodes "
            "without devices have no bus: a device plugged in later has no port there",
        ),
    )


def find_placeless_devices(
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
        place = (
            f"stays on the expander bus of cell {cell_of[bdf]}, as in the definition"
            if bdf in cell_of
            else "stays on pcie.0, so the guest sees no NUMA node for it"
        )
        if node is None:
            findings.append(
                finding(
                    "device-node-unknown",
                    str(bdf),
                    "a host NUMA node",
                    f"none: it {place}",
                    severity=Severity.INFO if bdf in cell_of else Severity.WARNING,
                )
            )
        else:
            nodes = ", ".join(map(str, sorted(cell_of_node)))
            findings.append(
                finding(
                    "device-without-cell",
                    str(bdf),
                    observed=f"its host node {node} is not among the guest's ({nodes}): it {place}",
                    case="other node",
                    values={"node": node, "nodes": nodes},
                )
            )
    return tuple(findings)


def check_empty_ports(
    request: GuestRequest,
    controllers: tuple[GuestPciController, ...],
    address_of: dict[Bdf, GuestAddress],
) -> tuple[Finding, ...]:
    """Return a finding on empty ports in a definition that libvirt has not processed yet.

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
            plural(len(empty), "empty port"),
            observed="the definition has not been defined yet: libvirt will assign them to devices "
            "that have no PCI address, for example a virtual NIC or disk",
        ),
    )
