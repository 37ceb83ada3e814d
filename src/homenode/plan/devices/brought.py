"""Brought: the NICs and NVSwitches that a VM gets with its GPUs, if the user requests them.

A VM gets the nearest NIC of each GPU, and with all GPUs of a board its NVSwitches: in Fabric
Manager's full passthrough mode a VM has both, or neither.

Source: NVIDIA, Fabric Manager User Guide (2025), chapter Full Passthrough Virtualization.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.findings import Rejection
from homenode.machine.pci import DeviceKind, LinkKind, PciDevice
from homenode.machine.topology import Host
from homenode.plan.allocations import Allocations
from homenode.plan.request import GuestRequest
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
