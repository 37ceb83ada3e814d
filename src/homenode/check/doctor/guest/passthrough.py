"""Passthrough: what VFIO needs of the host for a domain's devices.

verify/document/devices.py finds groups with host drivers in them; here is what else must hold.
"""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind, PciDevice, is_viable_driver
from homenode.machine.topology import Host
from homenode.plan.devices.brought import switched_gpus
from homenode.plan.shape.initiators import initiator_nodes_of, is_grace
from homenode.vm.domain.document import Document
from homenode.vm.domain.hostdevs import element_of_bdf, initiators_of
from homenode.vm.model import Vm


def passthrough_findings(facts: Vm, document: Document, host: Host) -> Iterator[Finding]:
    """No IOMMU, companions of the same IOMMU group, and what boards and Grace GPUs need."""
    passed = {hostdev.bdf for hostdev in facts.hostdevs}
    devices = [device for device in host.pci_devices if device.bdf in passed]
    if not devices:
        return
    if host.settings.iommus == () and all(d.iommu_group is None for d in devices):
        yield finding(
            "iommu-off",
            f"{len(devices)} passed-through devices",
            expected="an IOMMU that is on",
            observed="none in /sys/class/iommu, and no IOMMU groups",
            source="/sys/class/iommu; Documentation/driver-api/vfio.rst",
        )
    yield from _companions(facts, host, devices, passed)
    yield from _nvswitches(facts, host, passed)
    yield from _initiators(facts, document, host, devices)


def _initiators(
    facts: Vm, document: Document, host: Host, devices: list[PciDevice]
) -> Iterator[Finding]:
    """Grace GPUs without the guest's NUMA nodes that their memory goes to."""
    if not facts.is_virt:
        return
    elements = element_of_bdf(document)
    found = initiator_nodes_of(host, [device for device in devices if is_grace(device)])
    short = {
        bdf: (count, len(nodes))
        for bdf, nodes in found.items()
        if (count := len(initiators_of(document, elements[bdf]))) < len(nodes)
    }
    if short:
        given, needed = map(sum, zip(*short.values(), strict=True))
        yield finding(
            "initiators-missing",
            ", ".join(map(str, short)),
            expected=f"{needed} cells without vCPUs and memory, as many as the host has nodes for "
            "these GPUs, in their <acpi nodeset=>",
            observed=str(given or "none"),
            source=facts.source,
        )


def _nvswitches(facts: Vm, host: Host, passed: set[Bdf]) -> Iterator[Finding]:
    """All GPUs of a board without its NVSwitches; another VM that has them serves all VMs."""
    others = {
        bdf
        for domain in host.domains
        if domain.name != facts.name and (domain.running or domain.planned)
        for bdf in domain.devices
    }
    for board in switched_gpus(host):
        missing = board.left_out(passed)
        if missing and others.isdisjoint(board.switches):
            yield finding(
                "nvswitches-left-out",
                ", ".join(map(str, missing)),
                expected=f"passed to the VM with all {len(board.gpus)} GPUs that they join",
                observed="the GPUs alone",
                source=facts.source,
            )


def _companions(
    facts: Vm, host: Host, devices: list[PciDevice], passed: set[Bdf]
) -> Iterator[Finding]:
    """Devices that no other VM and not the host can use while this VM runs."""
    groups = {device.iommu_group for device in devices} - {None}
    owned = [
        other
        for other in host.pci_devices
        if other.iommu_group in groups
        and other.bdf not in passed
        and other.kind is not DeviceKind.BRIDGE
        and other.class_code >> 16 != 0x06
        and (other.driver is None or is_viable_driver(other.driver))
        and not any(_same_slot(other.bdf, bdf) for bdf in passed)
    ]
    if owned:
        yield finding(
            "iommu-group-companions",
            ", ".join(str(d.bdf) for d in owned[:16]),
            expected="IOMMU groups that hold the VM's devices only",
            observed="in one group with a device of the VM, and not passed",
            source=facts.source,
        )


def _same_slot(a: Bdf, b: Bdf) -> bool:
    return (a.domain, a.bus, a.device) == (b.domain, b.bus, b.device)
