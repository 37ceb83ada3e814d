"""Wording: how devices, links, sets and names are said, the same in tree, picture and plan."""

from collections.abc import Iterable

from homenode.bdf import PciAddress
from homenode.cpuset import CpuSet
from homenode.pci import DeviceKind, PciDevice, PciLink
from homenode.report.device_groups import KIND_NAMES, DeviceCard

# Source: pci-ids.ucw.cz, the vendors that make what our cards show.
_VENDORS = {
    0x1000: "Broadcom", 0x1002: "AMD", 0x10DE: "NVIDIA", 0x10EC: "Realtek", 0x1344: "Micron",
    0x144D: "Samsung", 0x14E4: "Broadcom", 0x15B3: "Mellanox", 0x1AF4: "virtio", 0x1B36: "QEMU",
    0x1C5C: "SK hynix", 0x1D0F: "Amazon", 0x1E0F: "Kioxia", 0x8086: "Intel",
}  # fmt: skip


def printable(text: str) -> str:
    """A text from outside with nothing in it that steers a terminal or breaks XML.

    >>> printable("vm\\x1b[31m1\\n")
    'vm?[31m1?'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun.

    >>> plural(1, "core"), plural(2, "core"), plural(2, "switch", "switches")
    ('1 core', '2 cores', '2 switches')
    """
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


def number_list(numbers: Iterable[int]) -> str:
    """Numbers as ranges.

    >>> number_list([3, 0, 1, 2, 8])
    '0-3,8'
    """
    return str(CpuSet(numbers))


def nodes_text(nodes: Iterable[int]) -> str:
    """Nodes with the word.

    >>> nodes_text([2]), nodes_text([0, 1, 3])
    ('node 2', 'nodes 0-1,3')
    """
    indices = list(nodes)
    return ("node " if len(indices) == 1 else "nodes ") + (number_list(indices) or "none")


def pus_text(pus: CpuSet) -> str:
    """PUs with the word.

    >>> pus_text(CpuSet([4])), pus_text(CpuSet.parse("0-3,8"))
    ('PU 4', 'PUs 0-3,8')
    """
    return f"PU {pus}" if len(pus) == 1 else f"PUs {pus}"


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
    the source tells neither."""
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
    return tuple(found)


def _of(current: float | None, most: float | None, before: str, after: str) -> str | None:
    if current is None and most is None:
        return None
    if current is None:
        return f"up to {before}{most:g}{after}"
    if most is None or current >= most:
        return f"{before}{current:g}{after}"
    return f"{before}{current:g} of {before}{most:g}{after}"
