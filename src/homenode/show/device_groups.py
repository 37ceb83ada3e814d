"""DeviceGroups: the PCI devices that matter to a user, by node, root complex and switch.

Management functions and unused virtual functions are only counted; links are text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import Struct

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import NodeIndex
from homenode.machine.pci import (
    DeviceKind,
    LinkKind,
    PartKind,
    PciDevice,
    PciLink,
    PortType,
    RootComplex,
)
from homenode.machine.topology import Host
from homenode.text import number_list, plural, printable

SHOWN_KINDS = (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME)
KIND_NAMES = {
    DeviceKind.GPU: "GPU",
    DeviceKind.NIC: "NIC",
    DeviceKind.NVSWITCH: "NVSwitch",
    DeviceKind.NVME: "NVMe",
    DeviceKind.AUDIO: "audio",
    DeviceKind.BRIDGE: "bridge",
    DeviceKind.OTHER: "device",
}


class DeviceCard(Struct, frozen=True):
    """The functions of one device (same slot), the function that decides its kind first."""

    functions: tuple[PciDevice, ...]
    virtual_functions: int = 0  # its SR-IOV functions without a card

    @property
    def device(self) -> PciDevice:
        return self.functions[0]


class SwitchGroup(Struct, frozen=True):
    """Devices below one PCIe switch, or directly below the root complex."""

    switch: PciDevice | None  # the lowest switch's upstream port
    # upstream ports of the switches between it and the root complex, the nearest first
    above: tuple[PciDevice, ...]
    cards: tuple[DeviceCard, ...]


class RootComplexGroup(Struct, frozen=True):
    """One root complex, limited to the devices of one node."""

    name: str
    root_complex: RootComplex | None
    groups: tuple[SwitchGroup, ...]
    other_functions: int  # functions without a card, except bridges


class NodeDevices(Struct, frozen=True):
    """PCI devices of a node (None: unknown), by root complex."""

    node: NodeIndex | None
    complexes: tuple[RootComplexGroup, ...]  # root complexes with at least one card
    quiet_complexes: int  # number of root complexes without a card
    quiet_functions: int  # number of their functions, bridges omitted


def group_by_node(
    host: Host, keep: Iterable[Bdf] = (), everything: bool = False
) -> tuple[NodeDevices, ...]:
    """Return every PCI function of the host, in a card or counted; by node, unknown last.

    On a host with one node a device of unknown node is on that node.

    keep: functions that get a card in any case. everything: all functions get a card.
    """
    kept_devices = frozenset(keep)
    by_bdf = host.device_at
    complexes = {complex_.name: complex_ for complex_ in host.root_complexes}
    # Firmware of one-node machines reports -1 for every device; only one node is possible.
    single_node = host.nodes[0].index if len(host.nodes) == 1 else None
    cards, counted_devices = _list_cards(host, kept_devices, everything)
    switches_of: dict[Bdf, tuple[PciDevice, ...]] = {}
    cards_by_node: dict[NodeIndex | None, dict[str, dict[tuple[Bdf, ...], list[DeviceCard]]]] = {}
    for card in cards:
        device = card.device
        node = device.node if device.node is not None else single_node
        switches = _switches_above(device, by_bdf, switches_of)
        by_complex = cards_by_node.setdefault(node, {})
        by_switch = by_complex.setdefault(device.root_complex, {})
        by_switch.setdefault(tuple(port.bdf for port in switches), []).append(card)
    other_counts: dict[tuple[NodeIndex | None, str], int] = {}
    for device in counted_devices:
        complex_of = complexes.get(device.root_complex)
        node = device.node if device.node is not None or not complex_of else complex_of.node
        node = single_node if node is None else node
        place = (node, device.root_complex)
        other_counts[place] = other_counts.get(place, 0) + (device.kind is not DeviceKind.BRIDGE)
    groups: list[NodeDevices] = []
    for node in sorted({*cards_by_node, *(node for node, _ in other_counts)}, key=_sort_key):
        node_groups = cards_by_node.get(node, {})
        counts = other_counts.items()
        quiet = [count for (at, name), count in counts if at == node and name not in node_groups]
        groups.append(
            NodeDevices(
                node,
                tuple(
                    RootComplexGroup(
                        name,
                        complexes.get(name),
                        tuple(
                            SwitchGroup(
                                by_bdf[path[0]] if path else None,
                                tuple(by_bdf[bdf] for bdf in path[1:]),
                                tuple(cards_below),
                            )
                            for path, cards_below in by_switch.items()
                        ),
                        other_counts.get((node, name), 0),
                    )
                    for name, by_switch in node_groups.items()
                ),
                len(quiet),
                sum(quiet),
            )
        )
    return tuple(groups)


def number_gpus(host: Host) -> dict[Bdf, int]:
    """Number the GPUs in host order; virtual functions are not counted."""
    gpus = list(host.whole_gpus)
    return {gpu.bdf: number for number, gpu in enumerate(gpus)}


def has_short_addresses(host: Host) -> bool:
    """Return whether all functions are in domain 0, so that addresses can omit it."""
    return all(device.bdf.domain == 0 for device in host.pci_devices)


def _list_cards(
    host: Host, kept_devices: frozenset[Bdf], everything: bool
) -> tuple[list[DeviceCard], list[PciDevice]]:
    """Return cards in host order, and the functions without a card."""
    slots: dict[tuple[int, int, int], list[PciDevice]] = {}
    counted_devices: list[PciDevice] = []
    unshown_vfs: dict[Bdf, int] = {}
    cards: list[DeviceCard] = []
    for device in host.pci_devices:
        if everything:
            cards.append(DeviceCard((device,)))
        elif device.physical_function is not None:
            if device.bdf in kept_devices:
                cards.append(DeviceCard((device,)))
            else:
                owner = device.physical_function
                unshown_vfs[owner] = unshown_vfs.get(owner, 0) + 1
        else:
            address = device.bdf
            slots.setdefault((address.domain, address.bus, address.device), []).append(device)
    for functions in slots.values():
        leaders = [f for f in functions if f.kind in SHOWN_KINDS or f.bdf in kept_devices]
        if not leaders:
            counted_devices += functions
            continue
        # A GPU's audio and USB functions go with it; ports of one NIC share a card.
        leader = next((f for f in leaders if f.kind in SHOWN_KINDS), leaders[0])
        vfs = sum(unshown_vfs.pop(f.bdf, 0) for f in functions)
        members = tuple(f for f in functions if f is not leader)
        cards.append(DeviceCard((leader, *members), vfs))
    # Virtual functions whose physical function has no card are counted at their own place.
    counted_devices += [
        device
        for device in host.pci_devices
        if device.physical_function in unshown_vfs and device.bdf not in kept_devices
    ]
    return sorted(cards, key=lambda card: card.device.bdf), counted_devices


def _switches_above(
    device: PciDevice,
    by_bdf: dict[Bdf, PciDevice],
    devices: dict[Bdf, tuple[PciDevice, ...]],
) -> tuple[PciDevice, ...]:
    """Return the upstream ports of the switches above a function, the nearest first."""
    if device.parent is None or device.parent not in by_bdf:
        return ()
    if device.parent not in devices:
        switches: list[PciDevice] = []
        parent: Bdf | None = device.parent
        for _ in range(32):
            if parent is None or parent not in by_bdf:
                break
            bridge = by_bdf[parent]
            if bridge.bridge and bridge.bridge.port_type is PortType.SWITCH_UPSTREAM:
                switches.append(bridge)
            parent = bridge.parent
        devices[device.parent] = tuple(switches)
    return devices[device.parent]


def _sort_key(node: NodeIndex | None) -> tuple[bool, int]:
    return (node is None, node if node is not None else 0)


# Source: pci-ids.ucw.cz, the vendors of devices with a card.
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


def format_address(address: PciAddress, short: bool) -> str:
    """Format a PCI address, without its domain if `short`."""
    return str(address).partition(":")[2] if short else str(address)


def format_link(link: PciLink | None) -> str | None:
    """Format a link, as "8 of 32 GT/s x16" if below its capability; None if unknown.

    >>> format_link(PciLink(32.0, 16, 32.0, 16)), format_link(PciLink(2.5, 8, 32.0, 16))
    ('32 GT/s x16', '2.5 of 32 GT/s, x8 of x16')
    """
    if link is None:
        return None
    speed = _format_current(link.current_gt_per_s, link.max_gt_per_s, "", " GT/s")
    width = _format_current(link.current_width, link.max_width, "x", "")
    if speed is None or width is None:
        return speed or width
    return f"{speed}{', ' if ' of ' in speed + width else ' '}{width}"


def find_device_model(device: PciDevice) -> str | None:
    """Return the short name of a device; for GPUs, NICs and NVSwitches the common name, in brackets
    in the PCI ids list. Without a name the vendor and the ids; None if the source has neither."""
    if not device.name:
        if device.vendor_id is None or device.device_id is None:
            return None
        ids = f"{device.vendor_id:04x}:{device.device_id:04x}"
        return f"{_VENDORS.get(device.vendor_id, 'vendor')} {ids}"
    name = printable(device.name).strip()
    if device.kind not in (DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH):
        return name
    opening, closing = name.rfind("["), name.rfind("]")
    # lspci -nn ends a line with [10de:2330], which is not a name.
    short_name = name[opening + 1 : closing].strip() if 0 <= opening < closing else ""
    return short_name if short_name and ":" not in short_name else name


def format_card_title(card: DeviceCard, gpu_number: int | None, short: bool) -> str:
    """Return kind, number and address of a card, such as "GPU3 5d:00.0" or "NIC 1a:00.0-1"."""
    device = card.device
    name = KIND_NAMES[device.kind]
    if gpu_number is not None:
        name += str(gpu_number)
    if device.physical_function is not None:
        name += " VF"
    numbers = [f.bdf.function for f in card.functions if f.kind is device.kind]
    address = format_address(device.bdf, short)
    if len(numbers) > 1:
        address = address.rpartition(".")[0] + "." + number_list(numbers)
    return f"{name} {address}"


def format_card_extras(card: DeviceCard) -> tuple[str, ...]:
    """Return the other functions of a card: of other kinds, virtual functions and parts."""
    device = card.device
    extras = [
        f"{KIND_NAMES[f.kind]} .{f.bdf.function:x}"
        for f in card.functions[1:]
        if f.kind is not device.kind
    ]
    return (*((f"with {', '.join(extras)}",) if extras else ()), *format_divisions(card))


def format_divisions(card: DeviceCard) -> tuple[str, ...]:
    """Return the parts of a card, and its virtual functions."""
    device = card.device
    vfs_texts = []
    if device.sriov_num_vfs or card.virtual_functions:
        active = device.sriov_num_vfs or card.virtual_functions
        total = device.sriov_total_vfs
        vfs_texts.append(f"{active} of {total} VFs" if total else plural(active, "VF"))
    return (*vfs_texts, *_format_parts(device))


def _format_parts(device: PciDevice) -> Iterator[str]:
    """Yield a divided GPU's parts by profile, "MIG 2x 1g.10gb", and modes without parts."""
    words = {PartKind.MIG: "MIG", PartKind.PARTITION: "partitions"}
    counts = Counter((part.kind, part.profile) for part in device.parts)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        profile_texts = [
            f"{count}x {printable(profile)}"
            for (text, profile), count in counts.items()
            if text is kind and profile is not None
        ]
        if profile_texts:
            yield f"{words.get(kind, 'vGPU')} {', '.join(profile_texts)}"
    mode = device.partition_mode
    if mode is not None and not any(not part.is_for_vms for part in device.parts):
        yield "MIG without instances" if mode == "mig" else printable(mode)
    if device.memory_partition_mode is not None:
        yield printable(device.memory_partition_mode)


def _format_current(
    current: float | None, maximum: float | None, before: str, after: str
) -> str | None:
    if current is None and maximum is None:
        return None
    if current is None:
        return f"up to {before}{maximum:g}{after}"
    if maximum is None or current >= maximum:
        return f"{before}{current:g}{after}"
    return f"{before}{current:g} of {before}{maximum:g}{after}"


LINK_NAMES = {LinkKind.NVLINK: "NVLink", LinkKind.XGMI: "xGMI", LinkKind.C2C: "NVLink-C2C"}


def format_links(host: Host) -> tuple[str, ...]:
    """Describe each kind of link and count with the devices that it joins, without omissions. A
    fully linked set of devices is one line."""
    naming = _DeviceNames(host)
    lines: list[str] = []
    by_kind: dict[tuple[LinkKind, int | None], set[frozenset[Bdf]]] = {}
    for link in host.links:
        if link.b is not None and link.a != link.b:
            pairs = by_kind.setdefault((link.kind, link.count), set())
            pairs.add(frozenset((link.a, link.b)))
    for (kind, count), pairs in sorted(by_kind.items(), key=lambda item: str(item[0])):
        per_pair = f", {plural(count, 'link')} each" if count else ", number of links unknown"
        remaining = set(pairs)
        for members in _find_components(pairs):
            inner_pairs = {pair for pair in remaining if pair <= members}
            names = naming.format_members(members)
            if len(members) > 2 and len(inner_pairs) == len(members) * (len(members) - 1) // 2:
                lines.append(f"{LINK_NAMES[kind]}: {names}, every pair{per_pair}")
                continue
            for ends, mates in _group_by_peers(inner_pairs):
                lines.append(
                    f"{LINK_NAMES[kind]}: {naming.format_members(ends)} to "
                    f"{naming.format_members(mates)}{per_pair}"
                )
    to_cpus = [
        f"{naming.format_members(frozenset([link.a]))} to the CPU of node {link.b_node}"
        for link in host.links
        if link.b_node is not None
    ]
    if to_cpus:
        lines.append(f"{LINK_NAMES[LinkKind.C2C]}: {', '.join(to_cpus)}")
    return tuple(lines)


def format_peer_links(host: Host) -> dict[Bdf, str]:
    """Describe each device's links in a few words: "NVLink x18 to 7". Counts are not summed over
    peers: links through NVSwitches are shared by all peers."""
    counts: dict[tuple[Bdf, LinkKind], list[int | None]] = {}
    for link in host.links:
        if link.b is not None and link.a != link.b:
            for end in (link.a, link.b):
                counts.setdefault((end, link.kind), []).append(link.count)
    texts: dict[Bdf, str] = {}
    for (bdf, kind), link_counts in counts.items():
        numbers = {count for count in link_counts if count}
        width = f" x{min(numbers)}" if len(numbers) == 1 and None not in link_counts else ""
        link_text = f"{LINK_NAMES[kind]}{width} to {len(link_counts)}"
        texts[bdf] = f"{texts[bdf]}, {link_text}" if bdf in texts else link_text
    return texts


class _DeviceNames:
    """Names of devices in links: GPUs by number, other devices by kind and address."""

    def __init__(self, host: Host) -> None:
        self.gpus = number_gpus(host)
        self.kinds = {device.bdf: device.kind for device in host.pci_devices}
        self.short = has_short_addresses(host)

    def format_members(self, members: frozenset[Bdf]) -> str:
        gpus = [self.gpus[bdf] for bdf in members if bdf in self.gpus]
        parts = [f"GPU{'s ' if len(gpus) > 1 else ''}{number_list(gpus)}"] if gpus else []
        by_kind: dict[DeviceKind, list[Bdf]] = {}
        for bdf in sorted(members - self.gpus.keys()):
            by_kind.setdefault(self.kinds.get(bdf, DeviceKind.OTHER), []).append(bdf)
        for kind, bdfs in by_kind.items():
            parts.append(
                f"{KIND_NAMES[kind]} {', '.join(format_address(b, self.short) for b in bdfs)}"
            )
        return " and ".join(parts)


def _group_by_peers(pairs: set[frozenset[Bdf]]) -> list[tuple[frozenset[Bdf], frozenset[Bdf]]]:
    """Group pairs as (devices, peers linked to each of them): every pair once, in few groups."""
    mates: dict[Bdf, set[Bdf]] = {}
    for pair in pairs:
        for bdf in pair:
            mates.setdefault(bdf, set()).update(pair - {bdf})
    stars: list[tuple[frozenset[Bdf], frozenset[Bdf]]] = []
    while any(mates.values()):
        first = min(bdf for bdf, partners in mates.items() if partners)
        peers = frozenset(mates[first])
        # `ends` have no links to each other: they would be mates.
        ends = frozenset(bdf for bdf, partners in mates.items() if frozenset(partners) == peers)
        stars.append((ends, peers))
        for bdf in ends:
            mates[bdf] = set()
        for bdf in peers:
            mates[bdf] -= ends
    return stars


def _find_components(pairs: set[frozenset[Bdf]]) -> list[frozenset[Bdf]]:
    """Return connected sets of devices, ascending by their first device."""
    owner: dict[Bdf, set[Bdf]] = {}
    for pair in pairs:
        merged_bdfs: set[Bdf] = set(pair)
        for bdf in pair:
            merged_bdfs |= owner.get(bdf, set())
        for bdf in merged_bdfs:
            owner[bdf] = merged_bdfs
    return sorted({frozenset(group) for group in owner.values()}, key=min)
