"""Devices: passed-through functions that exist, can be passed, and hang on their node's cell."""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, PciDevice, is_viable_driver
from homenode.plan.guest import Guest, GuestHostdev, GuestPciController
from homenode.plan.shape.pcie_document import EXPANDER, expander_above
from homenode.topology import Host
from homenode.verify.document.neighbour import neighbour, severity_of_neighbour
from homenode.verify.domain_facts import DomainFacts

LOST_LOCALITY_COST = (
    "the guest cannot tell where the device is: 12.6 against 15.6 GB/s host to device (KubeVirt)"
)


def cell_of_hostdev(guest: Guest, hostdev: GuestHostdev) -> int | None:
    """The guest cell whose expander bus a device hangs on; None on pcie.0."""
    if hostdev.address is None:
        return None
    controllers = {controller.index: controller for controller in guest.controllers}
    above = expander_above(controllers, hostdev.address.bus)
    return None if above is None or above.model != EXPANDER else above.node


def devices_alone(facts: DomainFacts) -> Iterator[Finding]:
    """What devices say without a host: expander buses on a machine that has them, and ACPI, by
    which a guest learns of them."""
    guest = facts.guest
    expanders = [c for c in guest.controllers if c.model == EXPANDER]
    if expanders and not (guest.is_q35 or guest.is_virt):
        yield Finding(
            "expander-on-other-machine", Severity.CRITICAL, f"machine {guest.machine or 'none'}",
            "q35 or virt, the machines with PCIe expander buses",
            f"{guest.machine or 'the default'} with {len(expanders)} of them",
            "libvirt refuses the definition",
            "change the machine to q35 in a new guest"
            if guest.architecture == "x86_64"
            else "take the expander buses out",
            facts.source,
        )  # fmt: skip
    yield from _acpi_missing(facts, expanders)


def _acpi_missing(facts: DomainFacts, expanders: list[GuestPciController]) -> Iterator[Finding]:
    """Cells and expander buses that the guest cannot learn of, for want of ACPI."""
    # On aarch64 the device tree has the cells.
    has_cells = bool(facts.cells) and facts.guest.architecture != "aarch64"
    shown = [*(["cells"] if has_cells else []), *(["expander buses"] if expanders else [])]
    if shown and not facts.has_acpi:
        yield Finding(
            "acpi-missing", Severity.CRITICAL, "<features>",
            f"<acpi/>, by which the guest learns its {' and '.join(shown)}", "none",
            "no device has a node in the guest, and its cells have no distances, or are one node",
            "add <acpi/> to <features>", facts.source,
        )  # fmt: skip


def devices_on_host(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    """What devices say of this host's PCI tree and of its nodes."""
    if facts.guest.hostdevs and not host.pci_devices:
        yield Finding(
            "devices-unknown", Severity.INCONCLUSIVE, "host devices", "the host's PCI functions",
            "the host's source gives none", None, "capture the host: homenode capture",
            facts.source,
        )  # fmt: skip
        return
    by_bdf = {device.bdf: device for device in host.pci_devices}
    passed = {hostdev.source for hostdev in facts.guest.hostdevs}
    for hostdev in facts.guest.hostdevs:
        device = by_bdf.get(hostdev.source)
        if device is None or device.kind is DeviceKind.BRIDGE:
            yield Finding(
                "device-of-no-host", Severity.CRITICAL, str(hostdev.source),
                f"a device of {host.name}", "none there" if device is None else "a bridge",
                "the start fails", "homenode show lists the host's devices", facts.source,
            )  # fmt: skip
            continue
        yield from _in_use(facts, host, hostdev.source)
        yield from _group(facts, host, device, passed)
        yield from _place(facts, hostdev, device.node)


def _in_use(facts: DomainFacts, host: Host, bdf: Bdf) -> Iterator[Finding]:
    for domain in host.domains:
        if domain.running and domain.name != facts.guest.name and bdf in domain.devices:
            yield Finding(
                "device-in-use", severity_of_neighbour(domain, Severity.CRITICAL), str(bdf),
                "a device that no other VM has", f"{neighbour(domain)} has it", "the start fails",
                "stop that domain, or choose another device", facts.source,
            )  # fmt: skip


def _group(
    facts: DomainFacts, host: Host, device: PciDevice, passed: set[Bdf]
) -> Iterator[Finding]:
    """VFIO gives away a whole IOMMU group: nothing else in it may have a driver of the host."""
    if device.iommu_group is None:
        return
    others = [
        other
        for other in host.pci_devices
        if other.iommu_group == device.iommu_group
        and other.kind is not DeviceKind.BRIDGE
        and other.bdf not in passed
        and not (other.driver is None or is_viable_driver(other.driver))
    ]
    if others:
        stated = ", ".join(f"{other.bdf} ({other.driver})" for other in others[:4])
        yield Finding(
            "iommu-group-shared", Severity.CRITICAL, str(device.bdf),
            f"IOMMU group {device.iommu_group} with no host driver in it", stated,
            "VFIO calls the group not viable: the start fails",
            "pass the others as well, or unbind their drivers", facts.source,
        )  # fmt: skip


def _place(facts: DomainFacts, hostdev: GuestHostdev, node: NodeIndex | None) -> Iterator[Finding]:
    if node is None or len(facts.cells) < 2:
        return
    homes = [cell.id for cell in facts.cells if node in cell.host_nodes]
    if not homes:
        return  # the guest has no memory there: no cell is the device's
    home = CpuSet(homes)
    cell = cell_of_hostdev(facts.guest, hostdev)
    if cell is None:
        yield Finding(
            "device-without-cell", Severity.WARNING, str(hostdev.source),
            f"the expander bus of cell {home}, whose memory is on the device's node {node}",
            f"at {hostdev.address or 'no address'}, on the root bus", LOST_LOCALITY_COST,
            "homenode plan --layout pin-numa-pci", facts.source,
        )  # fmt: skip
    elif cell not in homes:
        yield Finding(
            "device-on-other-cell", Severity.CRITICAL, str(hostdev.source),
            f"the expander bus of cell {home}, whose memory is on the device's node {node}",
            f"at {hostdev.address}, on that of cell {cell}",
            "the guest takes remote memory for local: 411.6 against 88.6 GB/s on GH200",
            "homenode plan --layout pin-numa-pci", facts.source,
        )  # fmt: skip
