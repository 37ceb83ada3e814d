"""Findings on devices that a VM takes from the host, leaves there, or gets only in part."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from homenode.bdf import Bdf
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import DeviceKind, PartKind, PciDevice, is_viable_driver
from homenode.machine.topology import Host
from homenode.plan.allocations import MAX_NAMED, Allocations
from homenode.plan.devices.brought import are_paired, list_nvswitch_gpus
from homenode.plan.request import GuestRequest
from homenode.text import plural, shorten_list
from homenode.vm.gpu_parts import is_divided
from homenode.vm.layout import Pinning

_CHIPSET_CLASSES = frozenset({0x0600, 0x0601})
"""Host and ISA bridges, whose drivers VFIO accepts."""


def check_devices(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], allocations: Allocations
) -> Iterator[Finding]:
    """Yield findings on the devices, and on a VM with more vCPUs than the host has CPUs."""
    mediated = dict(request.mediated)
    for bdf in devices:
        device = mediated.get(bdf, bdf)
        holder = allocations.find_holder(device)
        if holder is not None:
            yield finding(
                "device-in-use",
                str(device),
                observed=f"domain {allocations.label(holder)} uses it, so the VM cannot start "
                "while that runs",
                severity=Severity.WARNING,
            )
    # A mediated device has an IOMMU group of its own.
    yield from _check_groups(host, [bdf for bdf in devices if bdf not in mediated])
    yield from _check_parts(host, request, devices, allocations)
    yield from _check_lone_nics(host, devices, allocations)
    yield from _check_companions(host, request, devices, allocations)
    yield from _check_nvswitches(host, request, devices, allocations)
    floats = request.layout.pinning is Pinning.NONE
    pus = len(host.usable_pus) if floats else 0
    if pus and request.vcpus > pus:
        yield finding(
            "overcommitted",
            host.name,
            observed=f"{plural(request.vcpus, 'vCPU')} share {plural(pus, 'CPU')}: some wait",
            values={"pus": pus},
        )


def _check_lone_nics(
    host: Host, devices: Sequence[Bdf], allocations: Allocations
) -> Iterator[Finding]:
    """Find NICs whose paired GPUs the VM does not get, though it gets other GPUs."""
    vm_devices = [host.device_at[bdf] for bdf in devices if bdf in host.device_at]
    gpus = [device for device in vm_devices if device.kind is DeviceKind.GPU]
    nics = [device for device in vm_devices if device.kind is DeviceKind.NIC]
    apart = {
        nic.bdf: paired
        for nic in nics
        if gpus
        and (paired := [gpu for gpu in host.whole_gpus if are_paired(gpu, nic)])
        and not any(are_paired(gpu, nic) for gpu in gpus)
    }
    if not apart:
        return
    free_nics = [
        nic.bdf
        for nic in host.devices_of_kind(DeviceKind.NIC)
        if nic.physical_function is None
        and allocations.find_holder(nic.bdf) is None
        and nic not in nics
        and any(are_paired(gpu, nic) for gpu in gpus)
    ]
    pairs = (
        f"{nic} with {', '.join(str(gpu.bdf) for gpu in paired_gpus)}"
        for nic, paired_gpus in apart.items()
    )
    yield finding(
        "nic-without-gpu",
        ", ".join(map(str, apart)),
        observed=f"paired by switch or root complex with GPUs that the VM does not get "
        f"({'; '.join(pairs)}), but with no GPU of the VM: data from its GPUs crosses a CPU",
        case=None if free_nics else "none near",
        values={"nics": ", ".join(map(str, free_nics[:8]))},
    )


def _check_companions(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], allocations: Allocations
) -> Iterator[Finding]:
    """Yield findings on NICs that come with GPUs and may be in use, and on GPUs without a NIC."""
    if not request.options.with_nics:
        return
    vm_devices = [host.device_at[bdf] for bdf in devices]
    nics = [device for device in vm_devices if device.kind is DeviceKind.NIC]
    brought = [nic for nic in nics if nic.bdf not in request.devices]
    in_use = [nic for nic in brought if nic.driver is not None and not is_viable_driver(nic.driver)]
    unknown = [nic for nic in brought if nic.driver is None] if _has_unknown_drivers(host) else []
    leave = "leave the host when the VM starts, with the host's traffic on them"
    drivers = ", ".join(sorted({nic.driver for nic in in_use if nic.driver is not None}))
    for group, severity, reason in (
        (in_use, Severity.WARNING, f"the host's driver {drivers} is bound to them"),
        (unknown, Severity.INFO, "the host's source does not list their drivers"),
    ):
        if group:
            yield finding(
                "nic-bound-to-host",
                ", ".join(str(nic.bdf) for nic in group),
                observed=f"the VM's GPUs bring these NICs, and {reason}: their interfaces {leave}",
                severity=severity,
            )
    for gpu in vm_devices:
        if gpu.kind is not DeviceKind.GPU or any(are_paired(gpu, nic) for nic in nics):
            continue
        pairs = [nic for nic in host.devices_of_kind(DeviceKind.NIC) if are_paired(gpu, nic)]
        users = [
            f"{nic.bdf} by {who!r}" for nic in pairs if (who := allocations.find_holder(nic.bdf))
        ]
        text = f"in use: {', '.join(users)}" if users else "no NIC is on its switch or root complex"
        yield finding(
            "gpu-without-nic",
            str(gpu.bdf),
            observed=f"no free NIC for --with-nics: {text}",
        )


def _check_nvswitches(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], allocations: Allocations
) -> Iterator[Finding]:
    """Yield a finding if a VM gets all GPUs of a board without its NVSwitches. If another VM has
    the NVSwitches, it runs Fabric Manager."""
    for board in () if request.options.without_nvlink else list_nvswitch_gpus(host):
        missing = board.left_out(devices)
        if missing and all(allocations.find_holder(bdf) is None for bdf in board.switches):
            yield finding(
                "nvswitches-omitted",
                f"{plural(len(missing), 'NVSwitch', 'NVSwitches')} "
                f"({shorten_list(map(str, missing), 1)})",
                observed=f"they stay on the host, and the VM gets all {len(board.gpus)} GPUs that "
                "they join: CUDA fails with error 802 unless a Fabric Manager there activates the "
                "partition of all GPUs",
            )


def _check_parts(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], allocations: Allocations
) -> Iterator[Finding]:
    """Yield findings on shared GPUs of the VM's parts, and on divided GPUs taken whole."""
    mediated = dict(request.mediated)
    for gpu in host.whole_gpus:
        functions = {part.bdf for part in gpu.parts if part.bdf is not None} - {gpu.bdf}
        yield from _check_unused_functions(host, gpu, devices, mediated)
        parts = [bdf for bdf in devices if bdf in functions or (bdf == gpu.bdf and bdf in mediated)]
        holders = (
            allocations.find_holder(device)
            for part in gpu.parts
            for device in (part.bdf, part.uuid)
            if device is not None and device != gpu.bdf
        )
        users = sorted({name for name in holders if name is not None})
        if gpu.bdf in devices and gpu.bdf not in parts and is_divided(gpu):
            yield finding(
                "gpu-and-its-parts",
                str(gpu.bdf),
                observed=f"passing the whole GPU removes its {_format_part_count(gpu)}"
                + (f" ({shorten_list(users, MAX_NAMED)})" if users else "")
                + ": they end when its driver is unbound",
            )
        elif parts:
            shared = sum(part.is_for_vms for part in gpu.parts) - len(parts)
            yield finding(
                "gpu-shared",
                ", ".join(map(str, parts)),
                observed=f"part of GPU {gpu.bdf}, which {shared} other parts share"
                + (f", some of {shorten_list(users, MAX_NAMED)}" if users else "")
                + ": they share one GPU's memory bandwidth, link and copy engines",
            )


def _check_unused_functions(
    host: Host, gpu: PciDevice, devices: Sequence[Bdf], mediated: Mapping[Bdf, str]
) -> Iterator[Finding]:
    """Yield findings on virtual functions of a GPU with vGPUs that have no vGPU themselves."""
    parts = {part.bdf: part for part in gpu.parts if part.is_for_vms and part.profile is not None}
    for bdf in devices:
        function = host.device_at[bdf]
        if function.physical_function != gpu.bdf or not parts or bdf in mediated:
            continue
        part = parts.get(bdf)
        if part is not None and part.uuid is None:
            continue
        yield finding(
            "vgpu-missing",
            str(bdf),
            observed="it has no vGPU type, so the VM's start fails"
            if part is None
            else f"VFIO exposes its mediated device {part.uuid}, not the function: the start fails",
            case=None if part is None else "mediated device",
            values={"uuid": "" if part is None else part.uuid},
        )


def _format_part_count(gpu: PciDevice) -> str:
    names = {
        PartKind.MIG: "MIG instance",
        PartKind.MEDIATED: "mediated device",
        PartKind.PARTITION: "partition",
        PartKind.VIRTUAL_FUNCTION: "virtual function",
    }
    counts = Counter(part.kind for part in gpu.parts)
    text = " and ".join(plural(count, names[kind]) for kind, count in counts.items())
    return text or plural(gpu.sriov_num_vfs or 0, "virtual function")


def _list_endpoints(host: Host) -> list[PciDevice]:
    return [
        device
        for device in host.pci_devices
        if device.kind is not DeviceKind.BRIDGE and device.class_code >> 8 not in _CHIPSET_CLASSES
    ]


def _has_unknown_drivers(host: Host) -> bool:
    """Return whether the host's source lists no drivers of endpoints."""
    return all(device.driver is None for device in _list_endpoints(host))


def _check_groups(host: Host, devices: Sequence[Bdf]) -> Iterator[Finding]:
    """Yield findings on IOMMU groups: VFIO needs the whole group free of host drivers. If a source
    lists no drivers, host drivers are assumed."""
    bdfs = set(devices)
    endpoints = _list_endpoints(host)
    is_silent = _has_unknown_drivers(host)
    groups = {
        device.iommu_group: device.bdf
        for device in reversed(endpoints)
        if device.bdf in bdfs and device.iommu_group is not None
    }
    for group, first in sorted(groups.items()):
        holders = [
            f"{device.bdf} ({device.driver or 'driver not known'})"
            for device in endpoints
            if device.iommu_group == group
            and device.bdf not in bdfs
            and (is_silent if device.driver is None else not is_viable_driver(device.driver))
        ]
        if holders:
            yield finding(
                "iommu-group-incomplete",
                str(first),
                observed=f"its IOMMU group {group} also holds {shorten_list(holders, 4)}: "
                "VFIO rejects the start while a host driver is bound to one of these",
            )
