"""Brought: NICs and NVSwitches that a VM gets with its GPUs, if the user requests them; findings on
devices that a VM takes from the host, leaves there, or gets only in part.

A VM gets the nearest NIC of each GPU, and with all GPUs of a board its NVSwitches: in Fabric
Manager's full passthrough mode a VM has both, or neither.

Source: NVIDIA, Fabric Manager User Guide (2025), chapter Full Passthrough Virtualization.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.findings import Finding, Rejection, Severity, finding
from homenode.machine.pci import DeviceKind, LinkKind, PartKind, PciDevice, is_viable_driver
from homenode.machine.topology import Host
from homenode.plan.allocations import MAX_NAMED, Allocations
from homenode.plan.request import GuestRequest
from homenode.text import plural, shorten_list
from homenode.vm.gpu_parts import is_divided
from homenode.vm.layout import Pinning
from homenode.vm.plan import Unplannable


def are_paired(gpu: PciDevice, nic: PciDevice) -> bool:
    """Whether a NIC is on the root complex of a GPU: on its switch, or below the same CPU ports."""
    return gpu.root_complex == nic.root_complex


def own_nics(devices: Iterable[PciDevice], switches: Mapping[Bdf, Bdf | None]) -> dict[Bdf, Bdf]:
    """Choose each GPU's NIC: on its switch, else its root complex; the fastest, then the nearest.

    An HGX board has more NICs than GPUs below some switches (a storage NIC next to the Gen5 one).
    switches: the switch above each device. Returns each GPU's NIC; GPUs without a NIC are omitted.
    """
    devices = list(devices)
    nics: dict[str, list[PciDevice]] = {}
    for device in devices:
        if device.kind is DeviceKind.NIC:
            nics.setdefault(device.root_complex, []).append(device)
    nic_of_gpu: dict[Bdf, Bdf] = {}
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    for same_switch in (True, False):
        for gpu in gpus:
            candidates = [
                (-_link_rate(nic), abs(nic.bdf.bus - gpu.bdf.bus), nic.bdf)
                for nic in nics.get(gpu.root_complex, ())
                if nic.bdf not in nic_of_gpu.values()
                and not (same_switch and switches[nic.bdf] != switches[gpu.bdf])
            ]
            if candidates:
                nic_of_gpu[gpu.bdf] = min(candidates)[-1]
        gpus = [gpu for gpu in gpus if gpu.bdf not in nic_of_gpu]
    return nic_of_gpu


def _link_rate(device: PciDevice) -> float:
    """Return the maximum GT/s over all lanes; 0 if unknown, which sorts last."""
    link = device.link
    if link is None or link.max_gt_per_s is None or link.max_width is None:
        return 0.0
    return link.max_gt_per_s * link.max_width


class NvswitchGpus(Struct, frozen=True):
    """All GPUs of a board, and the NVSwitches that join them."""

    gpus: frozenset[Bdf]
    switches: tuple[Bdf, ...]

    def left_out(self, devices: Collection[Bdf]) -> tuple[Bdf, ...]:
        """Return the NVSwitches that the VM lacks though it has all GPUs of the board."""
        if not self.gpus <= set(devices):
            return ()
        return tuple(bdf for bdf in self.switches if bdf not in devices)


def list_nvswitch_gpus(host: Host) -> tuple[NvswitchGpus, ...]:
    """Return the host's boards; () without NVSwitches on the PCI bus (as with B200). If the links
    to NVSwitches are unknown, all GPUs count as one board."""
    switches = [device.bdf for device in host.devices_of_kind(DeviceKind.NVSWITCH)]
    whole_gpus = host.whole_gpus
    if not switches or not whole_gpus:
        return ()
    group_of = link_groups(host)
    if all(bdf in group_of for bdf in switches):
        boards = sorted({group_of[bdf] for bdf in switches})
        return tuple(
            NvswitchGpus(
                frozenset(gpu.bdf for gpu in whole_gpus if group_of.get(gpu.bdf) == board),
                tuple(bdf for bdf in switches if group_of[bdf] == board),
            )
            for board in boards
        )
    # PCIe cards have another model name than the modules of a board.
    models = [(gpu.vendor_id, gpu.device_id) for gpu in whole_gpus]
    model = max(models, key=models.count)
    gpus = (gpu.bdf for gpu in whole_gpus if (gpu.vendor_id, gpu.device_id) == model)
    return (NvswitchGpus(frozenset(gpus), tuple(switches)),)


def link_groups(host: Host) -> dict[Bdf, Bdf]:
    """Map each function with NVLink or xGMI to the lowest function that its links reach."""
    linked_bdfs: dict[Bdf, set[Bdf]] = {}
    for link in host.links:
        if link.b is not None and link.kind in (LinkKind.NVLINK, LinkKind.XGMI):
            linked_bdfs.setdefault(link.a, set()).add(link.b)
            linked_bdfs.setdefault(link.b, set()).add(link.a)
    group_of: dict[Bdf, Bdf] = {}
    for start in sorted(linked_bdfs):
        waiting = [] if start in group_of else [start]
        while waiting:
            bdf = waiting.pop()
            if bdf not in group_of:
                group_of[bdf] = start
                waiting += linked_bdfs[bdf]
    return group_of


class CompanionDevices(Struct, frozen=True, dict=True):
    """The devices that come with GPUs, on a host where other domains have devices already."""

    host: Host
    request: GuestRequest
    allocations: Allocations

    @cached_property
    def nics(self) -> dict[Bdf, Bdf]:
        """Map each NIC that a VM can get to the function to pass: the NIC, or its first free
        virtual function if it has any, as these end with its driver."""
        if not self.request.options.with_nics:
            return {}
        nics = self.host.devices_of_kind(DeviceKind.NIC)
        virtual: dict[Bdf, list[Bdf]] = {nic.bdf: [] for nic in nics if not nic.physical_function}
        for nic in nics:
            if nic.physical_function in virtual:
                virtual[nic.physical_function].append(nic.bdf)
        named_devices = self.request.devices
        return {
            nic: free[0]
            for nic, functions in virtual.items()
            if (free := [bdf for bdf in functions or [nic] if self._is_free(bdf)])
            and nic not in named_devices
            and not any(bdf in named_devices for bdf in functions)
        }

    @cached_property
    def boards(self) -> tuple[NvswitchGpus, ...]:
        return list_nvswitch_gpus(self.host) if self.request.options.with_nvswitches else ()

    def _is_free(self, bdf: Bdf) -> bool:
        return self.allocations.find_holder(bdf) is None

    def list_nearby_nics(self, gpu: PciDevice) -> tuple[Bdf, ...]:
        """Return the NICs that can come with the GPU."""
        at = self.host.device_at
        return tuple(function for nic, function in self.nics.items() if are_paired(gpu, at[nic]))

    def list_companions(self, chosen_bdfs: Iterable[Bdf]) -> Iterator[Bdf]:
        """Yield the devices that come with these GPUs and with the requested ones."""
        if not (self.nics or self.boards):
            return
        at = self.host.device_at
        named_gpus = (bdf for bdf in self.request.devices if at[bdf].kind is DeviceKind.GPU)
        gpus = sorted({*named_gpus, *chosen_bdfs})
        if self.nics:
            yield from self._list_nics([at[bdf] for bdf in gpus])
        for board in self.boards:
            yield from board.left_out(gpus)

    def _list_nics(self, gpus: Sequence[PciDevice]) -> Iterator[Bdf]:
        """Return NICs for the GPUs that have no NIC of the definition near them."""
        at = self.host.device_at
        named_nics = [at[bdf] for bdf in self.request.devices if at[bdf].kind is DeviceKind.NIC]
        devices = [*gpus, *named_nics]
        switch_of = self.host.switch_above
        served_bdfs = own_nics(devices, {device.bdf: switch_of(device.bdf) for device in devices})
        unserved_gpus = [gpu for gpu in gpus if gpu.bdf not in served_bdfs]
        unserved_gpus += [at[bdf] for bdf in self.nics]
        switches = {device.bdf: switch_of(device.bdf) for device in unserved_gpus}
        return (self.nics[nic] for nic in own_nics(unserved_gpus, switches).values())

    def board_choices(
        self, named_bdfs: Collection[Bdf], free: Collection[Bdf], count: int
    ) -> list[frozenset[Bdf]]:
        """Return the sets of `count` free GPUs that form whole boards with the named GPUs. Raises
        Unplannable without such a set, or if another VM has a board's NVSwitches."""
        users = [
            f"{bdf} by {self.allocations.label(name)}"
            for board in self.boards
            for bdf in (*board.switches, *sorted(board.gpus))
            if (name := self.allocations.find_holder(bdf)) is not None
        ]
        ready = [
            board
            for board in self.boards
            if all(map(self._is_free, board.switches)) and board.gpus <= {*named_bdfs, *free}
        ]
        sets = {board.gpus for board in ready} | {
            frozenset(gpu for board in ready for gpu in board.gpus)
        }
        named_set = set(named_bdfs)
        choices = [
            gpus - named_set
            for gpus in sets
            if named_set <= gpus and len(gpus - named_set) == count
        ]
        if choices:
            return sorted(choices, key=sorted)
        sizes = sorted({len(board.gpus) for board in self.boards})
        if not sizes:
            detail = "the host shows no NVSwitch on its PCI bus"
            hint = (
                "omit --with-nvswitches; boards from B200 on have bridge devices in their "
                "place, functions of a ConnectX-7: name these with --device"
            )
        else:
            size = " or ".join(map(str, sizes))
            detail = (
                f"a VM gets NVSwitches together with all {size} GPUs that they join, and this VM "
                f"gets {count + len(named_set)}"
            )
            if users:
                detail += f"; in use: {', '.join(users[:8])}"
            hint = (
                f"request --gpus {size}, or omit --with-nvswitches: Fabric Manager outside "
                "the VM joins fewer GPUs as one of its partitions"
            )
        raise Unplannable(
            f"{self.request.guest.name} does not fit {self.host.name}: {detail}",
            (Rejection("nvswitches", (), detail, hint),),
            hint=hint,
        )


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
