"""DeviceGroups: the PCI devices that people ask about, by node, root complex and switch.

GPUs, NICs, NVSwitches and NVMe drives become cards; management functions and unused virtual
functions are counted, so that a host of 500 functions still fits a page.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, PciDevice, PortType, RootComplex
from homenode.topology import Host

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


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """Functions of one device (same slot), the one that gives it its kind first.

    virtual_functions: SR-IOV functions of it that have no card of their own.
    """

    functions: tuple[PciDevice, ...]
    virtual_functions: int = 0

    @property
    def device(self) -> PciDevice:
        return self.functions[0]


@dataclass(frozen=True, slots=True)
class SwitchGroup:
    """Devices below one PCIe switch, or with none between them and the root complex.

    switch: the lowest switch's upstream port. above: upstream ports of the switches between it and
    the root complex, the nearest first.
    """

    switch: PciDevice | None
    above: tuple[PciDevice, ...]
    cards: tuple[DeviceCard, ...]


@dataclass(frozen=True, slots=True)
class RootComplexGroup:
    """One root complex, as far as it serves one node. others: functions without a card that are no
    bridges."""

    name: str
    root_complex: RootComplex | None
    groups: tuple[SwitchGroup, ...]
    others: int


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """PCI devices whose node is `node` (None: unknown), by root complex.

    complexes: those with at least one card. quiet_complexes: how many have none; quiet_functions:
    how many functions these have, bridges left out.
    """

    node: NodeIndex | None
    complexes: tuple[RootComplexGroup, ...]
    quiet_complexes: int
    quiet_functions: int


def devices_by_node(
    host: Host, keep: Iterable[Bdf] = (), everything: bool = False
) -> tuple[NodeDevices, ...]:
    """Every PCI function of the host, in a card or counted; ascending by node, unknown last.

    On a host of one node a device of unknown node is on that one.

    keep: functions that get a card whatever they are. everything: all functions get one.
    """
    kept = frozenset(keep)
    by_bdf = {device.bdf: device for device in host.pci_devices}
    complexes = {complex_.name: complex_ for complex_ in host.root_complexes}
    # Firmware of one-node machines says -1 of every device; there is no other node to be on.
    only = host.nodes[0].index if len(host.nodes) == 1 else None
    cards, counted = _cards(host, kept, everything)
    switches_of: dict[Bdf, tuple[PciDevice, ...]] = {}
    grouped: dict[NodeIndex | None, dict[str, dict[tuple[Bdf, ...], list[DeviceCard]]]] = {}
    for card in cards:
        device = card.device
        node = device.node if device.node is not None else only
        switches = _switches_above(device, by_bdf, switches_of)
        by_complex = grouped.setdefault(node, {})
        by_switch = by_complex.setdefault(device.root_complex, {})
        by_switch.setdefault(tuple(port.bdf for port in switches), []).append(card)
    others: dict[tuple[NodeIndex | None, str], int] = {}
    for device in counted:
        complex_of = complexes.get(device.root_complex)
        node = device.node if device.node is not None or not complex_of else complex_of.node
        node = only if node is None else node
        place = (node, device.root_complex)
        others[place] = others.get(place, 0) + (device.kind is not DeviceKind.BRIDGE)
    found: list[NodeDevices] = []
    for node in sorted({*grouped, *(node for node, _ in others)}, key=_unknown_last):
        shown = grouped.get(node, {})
        quiet = [count for (at, name), count in others.items() if at == node and name not in shown]
        found.append(
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
                        others.get((node, name), 0),
                    )
                    for name, by_switch in shown.items()
                ),
                len(quiet),
                sum(quiet),
            )
        )
    return tuple(found)


def gpu_numbers(host: Host) -> dict[Bdf, int]:
    """A number for each GPU in host order; virtual functions are not counted."""
    gpus = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.physical_function is None]
    return {gpu.bdf: number for number, gpu in enumerate(gpus)}


def short_addresses(host: Host) -> bool:
    """True where every function is in domain 0, so that addresses can be said without it."""
    return all(device.bdf.domain == 0 for device in host.pci_devices)


def _cards(
    host: Host, kept: frozenset[Bdf], everything: bool
) -> tuple[list[DeviceCard], list[PciDevice]]:
    """Cards in host order, and the functions that are in none."""
    slots: dict[tuple[int, int, int], list[PciDevice]] = {}
    counted: list[PciDevice] = []
    unshown_vfs: dict[Bdf, int] = {}
    cards: list[DeviceCard] = []
    for device in host.pci_devices:
        if everything:
            cards.append(DeviceCard((device,)))
        elif device.physical_function is not None:
            if device.bdf in kept:
                cards.append(DeviceCard((device,)))
            else:
                owner = device.physical_function
                unshown_vfs[owner] = unshown_vfs.get(owner, 0) + 1
        else:
            address = device.bdf
            slots.setdefault((address.domain, address.bus, address.device), []).append(device)
    for functions in slots.values():
        leaders = [f for f in functions if f.kind in SHOWN_KINDS or f.bdf in kept]
        if not leaders:
            counted += functions
            continue
        # A GPU's audio and USB functions go with it; ports of one NIC share a card.
        leader = next((f for f in leaders if f.kind in SHOWN_KINDS), leaders[0])
        vfs = sum(unshown_vfs.pop(f.bdf, 0) for f in functions)
        rest = tuple(f for f in functions if f is not leader)
        cards.append(DeviceCard((leader, *rest), vfs))
    # Virtual functions whose physical function has no card: counted where they are.
    counted += [
        device
        for device in host.pci_devices
        if device.physical_function in unshown_vfs and device.bdf not in kept
    ]
    return sorted(cards, key=lambda card: card.device.bdf), counted


def _switches_above(
    device: PciDevice,
    by_bdf: dict[Bdf, PciDevice],
    known: dict[Bdf, tuple[PciDevice, ...]],
) -> tuple[PciDevice, ...]:
    """Upstream ports of the switches above a function, the nearest first."""
    if device.parent is None or device.parent not in by_bdf:
        return ()
    if device.parent not in known:
        found: list[PciDevice] = []
        parent: Bdf | None = device.parent
        for _ in range(32):
            if parent is None or parent not in by_bdf:
                break
            bridge = by_bdf[parent]
            if bridge.bridge and bridge.bridge.port_type is PortType.SWITCH_UPSTREAM:
                found.append(bridge)
            parent = bridge.parent
        known[device.parent] = tuple(found)
    return known[device.parent]


def _unknown_last(node: NodeIndex | None) -> tuple[bool, int]:
    return (node is None, node if node is not None else 0)
