"""DeviceText: how devices and links are named, the same in tree, picture and plan."""

from collections import Counter
from collections.abc import Iterator

from homenode.bdf import PciAddress
from homenode.pci import DeviceKind, PartKind, PciDevice, PciLink
from homenode.report.device_groups import KIND_NAMES, DeviceCard
from homenode.wording import number_list, plural, printable

# Source: pci-ids.ucw.cz, the vendors that make what our cards show.
_VENDORS = {
    0x1000: "Broadcom",
    0x1002: "AMD",
    0x10DE: "NVIDIA",
    0x10EC: "Realtek",
    0x1344: "Micron",
    0x144D: "Samsung",
    0x14E4: "Broadcom",
    0x15B3: "Mellanox",
    0x1AF4: "virtio",
    0x1B36: "QEMU",
    0x1C5C: "SK hynix",
    0x1D0F: "Amazon",
    0x1E0F: "Kioxia",
    0x8086: "Intel",
}


def address_text(address: PciAddress, short: bool) -> str:
    """A PCI address, without its domain where `short`."""
    return str(address).partition(":")[2] if short else str(address)


def link_text(link: PciLink | None) -> str | None:
    """Speed and width of a link, "8 of 32 GT/s x16" where less than it can; None if unknown.

    >>> link_text(PciLink(32.0, 16, 32.0, 16)), link_text(PciLink(2.5, 8, 32.0, 16))
    ('32 GT/s x16', '2.5 of 32 GT/s, x8 of x16')
    """
    if link is None:
        return None
    speed = _of(link.current_gt_per_s, link.max_gt_per_s, "", " GT/s")
    width = _of(link.current_width, link.max_width, "x", "")
    if speed is None or width is None:
        return speed or width
    return f"{speed}{', ' if ' of ' in speed + width else ' '}{width}"


def device_model(device: PciDevice) -> str | None:
    """The short name of a device; of GPUs, NICs and NVSwitches what the PCI ids list has in
    brackets, which is the name that people use. Without a name the vendor and the ids; None where
    the source gives neither."""
    if not device.name:
        if device.vendor_id is None or device.device_id is None:
            return None
        ids = f"{device.vendor_id:04x}:{device.device_id:04x}"
        return f"{_VENDORS.get(device.vendor_id, 'vendor')} {ids}"
    name = printable(device.name).strip()
    if device.kind not in (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH):
        return name
    opening, closing = name.rfind("["), name.rfind("]")
    # lspci -nn ends a line with [10de:2330], which is no name.
    inside = name[opening + 1 : closing].strip() if 0 <= opening < closing else ""
    return inside if inside and ":" not in inside else name


def card_title(card: DeviceCard, gpu_number: int | None, short: bool) -> str:
    """Kind, number and address of a card, such as "GPU3 5d:00.0" or "NIC 1a:00.0-1"."""
    device = card.device
    name = KIND_NAMES[device.kind]
    if gpu_number is not None:
        name += str(gpu_number)
    if device.physical_function is not None:
        name += " VF"
    same = [f.bdf.function for f in card.functions if f.kind is device.kind]
    address = address_text(device.bdf, short)
    if len(same) > 1:
        address = address.rpartition(".")[0] + "." + number_list(same)
    return f"{name} {address}"


def card_extras(card: DeviceCard) -> tuple[str, ...]:
    """What else a card holds: functions of other kinds, and virtual functions."""
    device = card.device
    extras = [
        f"{KIND_NAMES[f.kind]} .{f.bdf.function:x}"
        for f in card.functions[1:]
        if f.kind is not device.kind
    ]
    found = [f"with {', '.join(extras)}"] if extras else []
    if device.sriov_num_vfs or card.virtual_functions:
        active = device.sriov_num_vfs or card.virtual_functions
        total = device.sriov_total_vfs
        found.append(f"{active} of {total} VFs" if total else plural(active, "VF"))
    return (*found, *_parts_text(device))


def _parts_text(device: PciDevice) -> Iterator[str]:
    """Of a divided GPU its parts by profile, "MIG 2x 1g.10gb", and modes without parts."""
    words = {PartKind.MIG: "MIG", PartKind.PARTITION: "partitions"}
    counts = Counter((part.kind, part.profile) for part in device.parts)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        listed = [
            f"{count}x {printable(profile)}"
            for (one, profile), count in counts.items()
            if one is kind and profile is not None
        ]
        if listed:
            yield f"{words.get(kind, 'vGPU')} {', '.join(listed)}"
    mode = device.partition_mode
    if mode is not None and not any(not part.is_for_vms for part in device.parts):
        yield "MIG without instances" if mode == "mig" else printable(mode)
    if device.memory_partition_mode is not None:
        yield printable(device.memory_partition_mode)


def _of(current: float | None, most: float | None, before: str, after: str) -> str | None:
    if current is None and most is None:
        return None
    if current is None:
        return f"up to {before}{most:g}{after}"
    if most is None or current >= most:
        return f"{before}{current:g}{after}"
    return f"{before}{current:g} of {before}{most:g}{after}"
