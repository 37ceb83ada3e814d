"""PeerPaths: what ACS, ATS and the IOMMU do to transfers from device to device.

Below one switch two devices talk without the root complex, unless ACS redirects their requests
there. For a VM that is the price of isolation; on a bare host no one gets anything for it.

Source: PCIe 6.0, 6.12 (ACS) and 10 (ATS); NVIDIA NCCL documentation, "PCI Access Control Services".
"""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind, PciDevice, PortType
from homenode.machine.topology import Host

_REDIRECTS = frozenset({"ReqRedir", "CmpltRedir"})
_PEERS = (DeviceKind.GPU, DeviceKind.NIC)
_OWN_DRIVERS = {"nvidia", "amdgpu", "xe", "i915"}
"""With these the host itself uses its GPUs. None at all counts as waiting for a VM."""
_SOURCE = "ACSCtl of the ports (lspci -vvv); PCIe 6.0, 6.12"


def peer_findings(host: Host) -> Iterator[Finding]:
    """Switches whose ports redirect, with what it means for who drives the devices."""
    by_bdf = {device.bdf: device for device in host.pci_devices}
    below: dict[Bdf, list[PciDevice]] = {}
    for device in host.pci_devices:
        if device.kind not in _PEERS or device.physical_function is not None:
            continue
        switch = host.switch_above(device.bdf)
        if switch is not None:
            below.setdefault(switch, []).append(device)
    for switch, devices in below.items():
        gpus = [device for device in devices if device.kind is DeviceKind.GPU]
        slots = {(d.bdf.domain, d.bdf.bus, d.bdf.device) for d in devices}
        ports = [port for device in devices if (port := _redirecting(device, by_bdf)) is not None]
        if gpus and len(slots) > 1 and ports:
            yield _redirected(switch, devices, sorted(set(ports)))
    yield from _translated(host)


def _redirecting(device: PciDevice, by_bdf: dict[Bdf, PciDevice]) -> Bdf | None:
    port = None if device.parent is None else by_bdf.get(device.parent)
    is_downstream = (
        port is not None
        and port.bridge is not None
        and port.bridge.port_type is PortType.SWITCH_DOWNSTREAM
    )
    if port is None or not is_downstream or port.acs is None:
        return None
    return port.bdf if _REDIRECTS & set(port.acs) else None


def _redirected(switch: Bdf, devices: list[PciDevice], ports: list[Bdf]) -> Finding:
    drivers = {device.driver for device in devices if device.kind is DeviceKind.GPU}
    passed = not drivers & _OWN_DRIVERS
    without_ats = [d.bdf for d in devices if d.ats_enabled is False]
    ats = ""
    if without_ats:
        ats = f"; ATS is off on {', '.join(map(str, without_ats))}, so translations go up as well"
    names = ", ".join(str(device.bdf) for device in devices)
    return finding(
        "p2p-redirected",
        f"{names} below switch {switch}",
        expected="isolation by ACS for VMs, at this price"
        if passed
        else "transfers between them that stay below their switch",
        observed=f"ports {', '.join(map(str, ports))} redirect them to the root complex (ACS){ats}",
        severity=Severity.INFO if passed else Severity.WARNING,
        case="in a VM" if passed else None,
        values={"port": ports[0]},
        source=_SOURCE,
    )


def _translated(host: Host) -> Iterator[Finding]:
    """GPUs that a bare host drives itself, each transfer of which the IOMMU translates."""
    gpus = [
        gpu
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.driver in _OWN_DRIVERS and (gpu.iommu_domain or "").startswith("DMA")
    ]
    if len(gpus) > 1:
        yield finding(
            "iommu-translates",
            f"{len(gpus)} GPUs that {gpus[0].driver} drives",
            expected="IOMMU domains of type identity (iommu=pt)",
            observed=f"type {gpus[0].iommu_domain}",
            source="/sys/kernel/iommu_groups/N/type; intel/compute-runtime#942",
        )
