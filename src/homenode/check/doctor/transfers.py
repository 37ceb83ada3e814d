"""Transfers of devices: errors on their way, measured copies, and what ACS, ATS and the IOMMU do.

The status bits that lspci prints (CESta) stay set from the first training on: they are no count,
and nothing is concluded from them.

Below one switch two devices talk without the root complex, unless ACS redirects their requests
there. For a VM that is the price of isolation; on a bare host no one gets anything for it.

Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats; PCIe 6.0, 6.2 (errors), 6.12
(ACS) and 10 (ATS); NVIDIA NCCL documentation, "PCI Access Control Services".
"""

from collections.abc import Iterator, Mapping

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding, Severity
from homenode.machine.link_path import LinkRate, device_paths, gigabytes, rates_that_fit
from homenode.machine.pci import DeviceKind, LinkKind, PciDevice, PciErrors, PortType
from homenode.machine.topology import Host

_OF_THE_WIRE = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
_OF_RESETS = frozenset({"UnsupReq", "CmpltTO"})
"""Firmware's enumeration and a reset by VFIO or a driver leave these on sound machines."""

_MANY = 1000
"""A training or a reset leaves a handful, a sound GPU has 150 replays; a bad contact makes
thousands a day."""


def error_findings(host: Host) -> Iterator[Finding]:
    """Lost data at any count, and retries that are too many to come from resets."""
    seen: dict[object, PciDevice] = {}
    for path in device_paths(host):
        seen.setdefault(path.device.bdf, path.device)
        for link in path.links:
            seen.setdefault(link.upper.bdf, link.upper)
            seen.setdefault(link.lower.bdf, link.lower)
    for device in seen.values():
        yield from _of_function(device)


def _of_function(device: PciDevice) -> Iterator[Finding]:
    errors = device.errors or PciErrors(())
    folder = f"/sys/bus/pci/devices/{device.bdf}"
    lost = (*errors.fatal, *errors.nonfatal)
    if lost:
        harmless = {name for name, _ in errors.nonfatal} <= _OF_RESETS and not errors.fatal
        yield finding(
            "pcie-errors-uncorrected",
            str(device.bdf),
            expected="no uncorrected errors",
            observed=_stated(lost),
            severity=Severity.INFO if harmless else None,
            source=f"{folder}/aer_dev_nonfatal, aer_dev_fatal",
        )
    retries = sum(count for name, count in errors.correctable if name in _OF_THE_WIRE)
    replays = device.link_replays or 0
    if max(retries, replays) >= _MANY:
        stated = errors.correctable or (("replays", replays),)
        yield finding(
            "pcie-errors-corrected",
            str(device.bdf),
            expected=f"fewer than {_MANY} retries since boot",
            observed=_stated(stated),
            source=f"{folder}/aer_dev_correctable; replay_counter of nvidia-smi -q",
        )


def _stated(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)


_SOUND = 0.7
"""Copies of large pinned buffers reach more of a sound path: 0.72 to 0.9 were measured."""


def copy_findings(
    host: Host,
    rates: Mapping[Bdf, float],
    everyone: float | None = None,
    known_widths: Mapping[Bdf, int] | None = None,
) -> Iterator[Finding]:
    """GPUs whose copies are slower than their path. rates: bytes/s by GPU; everyone: of any GPU.

    known_widths: as for device_paths. A copy says nothing of links faster than itself, so what is
    unknown of the path is not judged. Copies to a GPU that hangs on its CPU by C2C go over that.
    """
    over_c2c = {link.a for link in host.links if link.kind is LinkKind.C2C}
    for path in device_paths(host, known_widths):
        if path.device.kind is not DeviceKind.GPU or path.device.bdf in over_c2c:
            continue
        rate = rates.get(path.device.bdf, everyone)
        if rate is None or path.expected is None:
            continue
        if rate > path.expected.bytes_per_s:
            yield finding(
                "h2d-above-link",
                f"GPU {path.device.bdf}",
                expected=f"at most {path.expected.with_rate()}",
                observed=f"{gigabytes(rate)} measured",
                source="the figure of --h2d, or of the copy that ran",
            )
        elif rate < _SOUND * path.expected.bytes_per_s:
            yield _slow(path.device.bdf, rate, path.expected)


def _slow(gpu: Bdf, rate: float, expected: LinkRate) -> Finding:
    fits = rates_that_fit(rate, expected)
    excluded = LinkRate(2.5, expected.width)
    not_one = f"; excludes {excluded.as_generation}" if excluded.bytes_per_s < rate else ""
    return finding(
        "h2d-low",
        f"GPU {gpu}",
        expected=f"{gigabytes(_SOUND * expected.bytes_per_s)} or more over {expected.with_rate()}",
        observed=f"{gigabytes(rate)}, which fits "
        f"{', '.join(fit.as_generation for fit in fits) or 'no link at all'}{not_one}",
        severity=Severity.WARNING,
        values={"share": f"{(1 - rate / expected.bytes_per_s) * 100:.0f}"},
        source="the figure of --h2d, or of the copy that ran",
    )


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
        severity=Severity.INFO if passed else None,
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
