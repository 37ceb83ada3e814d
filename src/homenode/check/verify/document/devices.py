"""Devices: passed-through functions that exist, can be passed, and hang on their node's cell."""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.check.verify.document.pins import neighbour, severity_of_neighbour
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice, is_viable_driver
from homenode.machine.topology import Host
from homenode.vm.gpu_parts import (
    functions_of_parts,
    parts_at,
    unknown_mediated,
    with_mediated,
)
from homenode.vm.model import EXPANDER, GuestHostdev, GuestPciController, Vm, cell_of_hostdev


def devices_alone(facts: Vm) -> Iterator[Finding]:
    """What devices say without a host: expander buses on a machine that has them, and ACPI, by
    which a guest learns of them."""
    guest = facts
    expanders = [c for c in guest.controllers if c.model == EXPANDER]
    if expanders and not (guest.is_q35 or guest.is_virt):
        yield finding(
            "expander-on-other-machine",
            f"machine {guest.machine or 'none'}",
            expected="q35 or virt, the machines with PCIe expander buses",
            observed=f"{guest.machine or 'the default'} with {len(expanders)} of them",
            case=None if guest.architecture == "x86_64" else "other architecture",
            source=facts.source,
        )
    yield from _acpi_missing(facts, expanders)


def _acpi_missing(facts: Vm, expanders: list[GuestPciController]) -> Iterator[Finding]:
    """Cells and expander buses that the guest cannot learn of, for want of ACPI."""
    # On aarch64 the device tree has the cells.
    has_cells = bool(facts.cells) and facts.architecture != "aarch64"
    shown = [*(["cells"] if has_cells else []), *(["expander buses"] if expanders else [])]
    if shown and not facts.has_acpi:
        yield finding(
            "acpi-missing",
            "<features>",
            expected=f"<acpi/>, by which the guest learns its {' and '.join(shown)}",
            observed="none",
            source=facts.source,
        )


def devices_on_host(facts: Vm, host: Host) -> Iterator[Finding]:
    """What devices say of this host's PCI tree and of its nodes."""
    if facts.hostdevs and not host.pci_devices:
        yield finding(
            "devices-unknown",
            "host devices",
            expected="the host's PCI functions",
            observed="the host's source gives none",
            source=facts.source,
        )
        return
    shows_some = bool(functions_of_parts(host))
    for uuid in unknown_mediated(facts, host):
        yield finding(
            "device-of-no-host" if shows_some else "devices-unknown",
            f"mediated device {uuid}",
            expected=f"a mediated device of {host.name}",
            observed="none of that UUID" if shows_some else "the host's source gives none",
            case="mediated device",
            source=facts.source,
        )
    by_bdf = {device.bdf: device for device in host.pci_devices}
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    for hostdev in with_mediated(facts, host).hostdevs:
        device = by_bdf.get(hostdev.bdf)
        if device is None or device.kind is DeviceKind.BRIDGE:
            yield finding(
                "device-of-no-host",
                str(hostdev.bdf),
                expected=f"a device of {host.name}",
                observed="none there" if device is None else "a bridge",
                source=facts.source,
            )
            continue
        yield from _in_use(facts, host, hostdev.uuid or hostdev.bdf)
        if hostdev.uuid is None:
            yield from _unmanaged(facts, host, hostdev, device)
            yield from _group(facts, host, device, passed)
        yield from _place(facts, hostdev, device.node)


def _in_use(facts: Vm, host: Host, held: Bdf | str) -> Iterator[Finding]:
    for domain in host.domains:
        has_it = held in domain.devices or held in domain.mediated
        if domain.running and domain.name != facts.name and has_it:
            yield finding(
                "device-in-use",
                str(held),
                expected="a device that no other VM has",
                observed=f"{neighbour(domain)} has it",
                severity=severity_of_neighbour(domain, Severity.CRITICAL),
                source=facts.source,
            )


def _unmanaged(
    facts: Vm, host: Host, hostdev: GuestHostdev, device: PciDevice
) -> Iterator[Finding]:
    is_vgpu = any(part.profile for part in parts_at(host.device_at, device.bdf))
    if hostdev.managed or is_vgpu or "vfio" in (device.driver or ""):
        return
    yield finding(
        "not-bound-to-vfio",
        str(device.bdf),
        expected="driver vfio-pci, because without managed='yes' that is left to you",
        observed=f"driver {device.driver}" if device.driver else "no driver that is known",
        severity=Severity.CRITICAL if device.driver else Severity.INCONCLUSIVE,
        source=facts.source,
    )


def _group(facts: Vm, host: Host, device: PciDevice, passed: set[Bdf]) -> Iterator[Finding]:
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
        yield finding(
            "iommu-group-shared",
            str(device.bdf),
            expected=f"IOMMU group {device.iommu_group} with no host driver in it",
            observed=stated,
            source=facts.source,
        )


def _place(facts: Vm, hostdev: GuestHostdev, node: NodeIndex | None) -> Iterator[Finding]:
    if node is None or len(facts.cells) < 2:
        return
    homes = [cell.id for cell in facts.cells if node in cell.nodes]
    if not homes:
        return  # the guest has no memory there: no cell is the device's
    home = CpuSet(homes)
    cell = cell_of_hostdev(facts, hostdev)
    if cell is None:
        yield finding(
            "device-without-cell",
            str(hostdev.bdf),
            expected=f"the expander bus of cell {home}, whose memory is on the device's node "
            f"{node}",
            observed=f"at {hostdev.address or 'no address'}, on the root bus",
            source=facts.source,
        )
    elif cell not in homes:
        yield finding(
            "device-on-other-cell",
            str(hostdev.bdf),
            expected=f"the expander bus of cell {home}, whose memory is on the device's node "
            f"{node}",
            observed=f"at {hostdev.address}, on that of cell {cell}",
            source=facts.source,
        )
