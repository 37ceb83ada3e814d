"""Passthrough: what VFIO needs of the host for a domain's devices.

verify/document/devices.py finds groups with host drivers in them; here is what else must hold.
"""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.findings import Finding, Severity
from homenode.pci import DeviceKind, PciDevice, is_viable_driver
from homenode.topology import Host
from homenode.verify.domain_facts import DomainFacts


def passthrough_findings(facts: DomainFacts, host: Host) -> Iterator[Finding]:
    """No IOMMU, and companions of the same IOMMU group."""
    passed = {hostdev.source for hostdev in facts.guest.hostdevs}
    devices = [device for device in host.pci_devices if device.bdf in passed]
    if not devices:
        return
    if host.settings.iommus == () and all(d.iommu_group is None for d in devices):
        yield Finding(
            id="iommu-off",
            severity=Severity.CRITICAL,
            subject=f"{len(devices)} passed-through devices",
            expected="an IOMMU that is on",
            observed="none in /sys/class/iommu, and no IOMMU groups",
            cost="the start fails: VFIO needs one",
            fix="firmware: VT-d or AMD-Vi on; kernel: intel_iommu=on (AMD needs no word); check: "
            "ls /sys/class/iommu",
            source="/sys/class/iommu; Documentation/driver-api/vfio.rst",
        )
    yield from _companions(facts, host, devices, passed)


def _companions(
    facts: DomainFacts, host: Host, devices: list[PciDevice], passed: set[Bdf]
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
        yield Finding(
            id="iommu-group-companions",
            severity=Severity.INFO,
            subject=", ".join(str(d.bdf) for d in owned[:16]),
            expected="IOMMU groups that hold the VM's devices only",
            observed="in one group with a device of the VM, and not passed",
            cost="no one else can use them while the VM runs",
            fix="pass them as well, or use a slot below a port with ACS",
            source=facts.source,
        )


def _same_slot(a: Bdf, b: Bdf) -> bool:
    return (a.domain, a.bus, a.device) == (b.domain, b.bus, b.device)
