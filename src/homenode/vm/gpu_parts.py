"""GPU parts as devices of a VM: mediated devices by their UUID, virtual functions by their profile.

The planner takes a mediated device for its function with a UUID: a VM has at most one of each.
"""

from collections.abc import Iterator, Mapping

from msgspec import structs

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.findings import Gap
from homenode.machine.pci import DeviceKind, GpuPart, PartKind, PciDevice
from homenode.machine.topology import Host
from homenode.text import plural, printable
from homenode.vm.model import GuestHostdev, Vm


def find_part_functions(host: Host) -> dict[str, Bdf]:
    """Map the UUID of each mediated device of a GPU to its function."""
    return {
        part.uuid: part.bdf
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        for part in gpu.parts
        if part.kind is PartKind.MEDIATED and part.uuid is not None and part.bdf is not None
    }


def add_mediated(guest: Vm, host: Host | None) -> Vm:
    """Return the guest with those mediated devices that the host has among its host devices. Raises
    InputError for two of one function."""
    if host is None or not guest.mediated:
        return guest
    function_of = find_part_functions(host)
    hostdevs = list(guest.hostdevs)
    for device in guest.mediated:
        function = function_of.get(device.uuid)
        if function is not None:
            reject_second(function, hostdevs)
            hostdevs.append(GuestHostdev(function, device.address, uuid=device.uuid))
    return structs.replace(guest, hostdevs=tuple(hostdevs))


def check_mediated(guest: Vm, host: Host | None) -> tuple[str, ...]:
    """Return UUIDs of the guest's mediated devices that the host lacks; () without a host."""
    if host is None:
        return ()
    functions = find_part_functions(host)
    return tuple(device.uuid for device in guest.mediated if device.uuid not in functions)


def find_mediated_gaps(guest: Vm, host: Host | None) -> tuple[Gap, ...]:
    """Return gaps for mediated devices that the host does not have."""
    return tuple(
        Gap(
            f"mediated device {uuid}",
            "the host has no mediated device with this UUID: its GPU and node are unknown, and "
            "it is ignored; virsh nodedev-list --cap mdev lists the existing ones",
        )
        for uuid in check_mediated(guest, host)
    )


def reject_second(function: Bdf, hostdevs: list[GuestHostdev]) -> None:
    if any(device.bdf == function for device in hostdevs):
        raise InputError(
            f"device {function}: expected one mediated device of it in a VM, found two",
            hint="give the VM one of a larger type, or parts of two functions",
        )


def find_uuid_function(host: Host | None, uuid: str) -> Bdf:
    """Return the function of a mediated device. Raises InputError if the host does not have it."""
    function_of_part = {} if host is None else find_part_functions(host)
    if uuid not in function_of_part:
        raise InputError(
            f"--device {uuid}: expected a mediated device of the host, which has "
            f"{len(function_of_part)}",
            hint="homenode show --json lists them under `parts`; virsh nodedev-list --cap mdev",
        )
    return function_of_part[uuid]


def resolve_device(host: Host | None, name: Bdf | str) -> Bdf | str:
    """Resolve a --device value: gpu0, the first GPU of `show`, to its address; else unchanged.
    Raises InputError for a number that the host does not have."""
    if isinstance(name, Bdf) or not name.startswith("gpu"):
        return name
    gpus = () if host is None else host.devices_of_kind(DeviceKind.GPU)
    number = int(name[3:])
    if number >= len(gpus):
        raise InputError(
            f"--device {name}: the host has {plural(len(gpus), 'GPU')}",
            hint="homenode show --host SOURCE lists them, from gpu0 on",
        )
    return gpus[number].bdf


def list_parts(by_bdf: Mapping[Bdf, PciDevice], function: Bdf) -> tuple[GpuPart, ...]:
    """Return parts at a GPU's function that VFIO can pass to a VM; () for other devices."""
    device = by_bdf.get(function)
    gpu = device
    if device is not None and device.physical_function is not None:
        gpu = by_bdf.get(device.physical_function)
    parts = () if gpu is None else gpu.parts
    return tuple(part for part in parts if part.bdf == function and part.is_for_vms)


def is_of_profile(part: GpuPart, profile: str) -> bool:
    """Return whether a part is of a profile in any of its spellings: "NVIDIA A40-12Q", "A40-12Q",
    and "NVIDIA_A40-12Q" as Kubernetes has it."""
    return part.profile is not None and _plain_profile(part.profile) == _plain_profile(profile)


def _plain_profile(profile: str) -> str:
    words = profile.replace("_", " ").split()
    return " ".join(words[1:] if words[:1] in (["NVIDIA"], ["GRID"]) else words).lower()


def list_free_parts(
    by_bdf: Mapping[Bdf, PciDevice], function: Bdf, taken_names: frozenset[str], profile: str | None
) -> Iterator[GpuPart]:
    """Yield the free parts at a function. taken_names: UUIDs of other VMs. No profile: only virtual
    functions without a type: a vGPU never counts as a GPU."""
    for part in list_parts(by_bdf, function):
        is_chosen = part.profile is None if profile is None else is_of_profile(part, profile)
        if is_chosen and part.uuid not in taken_names:
            yield part


def is_divided(gpu: PciDevice) -> bool:
    """Return whether parts of the GPU may be in use by others."""
    return bool(gpu.parts or gpu.sriov_num_vfs)


def format_profiles(host: Host) -> str:
    """Format the profiles of the host's parts, and whether VMs can use them."""
    parts = [part for gpu in host.devices_of_kind(DeviceKind.GPU) for part in gpu.parts]
    is_for_vms_of = {part.profile: part.is_for_vms for part in parts if part.profile is not None}
    profile_texts = [
        printable(profile) + ("" if for_vms else " (not for VMs)")
        for profile, for_vms in sorted(is_for_vms_of.items())
    ]
    return ", ".join(profile_texts[:12]) or "none"
