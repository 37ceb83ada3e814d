"""Device places: a port in the guest's PCIe tree for every host device, passed or not.

A port follows from the host and the chosen nodes, not from which devices of a kind and node a VM
gets. So taking one of several away moves no other, and two VMs of one shape agree on where a device
sits.
"""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice, PortType
from homenode.machine.topology import Host
from homenode.plan.devices.brought import own_nics

BdfKey = tuple[int, int, int, int]

MOST_EMPTY_PORTS = 16
"""For devices of one kind and node that a VM does not have: as many as two boards of GPUs."""


class Section(IntEnum):
    """Kinds of port, the likeliest to be passed first: ports before a used one cost a port each."""

    GPU = 0
    PAIRED_NIC = 1  # the one NIC nearest to each GPU
    NVSWITCH = 2
    NIC = 3
    NVME = 4
    FURTHER_VF = 5  # all but the first virtual function of a device
    OTHER = 6
    VF_PARENT = 7  # its virtual functions are what is passed


class Place(Struct, frozen=True):
    """A port for one host device.

    node: the device's. near: the cell is only the nearest one. functions: those of the host that
    share the port: a GPU, then its audio and USB. order: sorts within the section. switch: upstream
    port of the host's switch above, or None.
    """

    functions: tuple[Bdf, ...]
    node: NodeIndex
    cell: int
    near: bool
    section: Section
    order: tuple[int, ...]
    root_complex: str
    switch: Bdf | None

    @property
    def slot_order(self) -> tuple[int, ...]:
        """Sorts ports on one bus: the cell's own first, each GPU next to its NIC."""
        section = Section.GPU if self.section is Section.PAIRED_NIC else self.section
        return (self.near, section, *self.order)


class _Tree(Struct):
    """Parents of every function, looked up once."""

    by_bdf: dict[Bdf, PciDevice]
    switches: dict[Bdf | None, Bdf | None] = field(default_factory=lambda: {None: None})

    def switch_above(self, bdf: Bdf | None) -> Bdf | None:
        """Upstream port of the lowest switch at or above a bridge."""
        path: list[Bdf] = []
        while bdf not in self.switches:
            assert bdf is not None  # None is in the map from the start
            device = self.by_bdf.get(bdf)
            if device is None or len(path) > 32:
                self.switches[bdf] = None
            elif device.bridge and device.bridge.port_type is PortType.SWITCH_UPSTREAM:
                self.switches[bdf] = bdf
            else:
                path.append(bdf)
                bdf = device.parent
        found = self.switches[bdf]
        self.switches.update(dict.fromkeys(path, found))
        return found


def device_places(
    host: Host,
    by_bdf: dict[Bdf, PciDevice],
    cell_of_node: dict[NodeIndex, int],
    nearest_of_node: Mapping[NodeIndex, int] = MappingProxyType({}),
) -> tuple[Place, ...]:
    """Every port of the cells, in the order in which ports are numbered.

    GPUs of all cells come before the NICs of any, so that a VM of GPUs alone has no idle port. The
    n-th GPU of each cell comes before the next one of any. nearest_of_node: cells of nodes that
    have none of their own; their devices come last and move no other.
    """
    tree = _Tree(by_bdf)
    cell_of = {**nearest_of_node, **cell_of_node}
    local = [
        device
        for device in host.pci_devices
        if device.kind is not DeviceKind.BRIDGE and device.node in cell_of
    ]
    physical = [device for device in local if device.physical_function is None]
    virtual: dict[Bdf, list[PciDevice]] = {}
    for device in local:
        if device.physical_function is not None:
            virtual.setdefault(device.physical_function, []).append(device)

    groups = _groups(physical)
    switches = {group[0].bdf: tree.switch_above(group[0].parent) for group in groups}
    paired = set(own_nics((group[0] for group in groups), switches).values())
    places: list[Place] = []

    def add(
        functions: tuple[Bdf, ...], like: PciDevice, section: Section, order: tuple[int, ...]
    ) -> None:
        node = like.node
        assert node is not None  # only devices of cell_of are here
        near, switch, root = node not in cell_of_node, switches[like.bdf], like.root_complex
        places.append(Place(functions, node, cell_of[node], near, section, order, root, switch))

    for group in groups:
        first = group[0]
        section = _section(first, paired)
        functions = tuple(device.bdf for device in group)
        children = virtual.pop(first.bdf, [])
        if children:
            # Nothing passes a function whose virtual functions are in use: the first takes over.
            add((children[0].bdf,), first, section, _key(children[0].bdf))
            for number, child in enumerate(children[1:], start=1):
                order = (number, section, *_key(child.bdf))
                add((child.bdf,), first, Section.FURTHER_VF, order)
            section = Section.VF_PARENT
        add(functions, first, section, _key(first.bdf))
    for orphans in virtual.values():
        for number, child in enumerate(orphans):
            switches[child.bdf] = tree.switch_above(child.parent)
            order = (number, _section(child, paired), *_key(child.bdf))
            add((child.bdf,), child, Section.FURTHER_VF, order)
    return _interleaved(places)


def sparse_places(places: tuple[Place, ...], devices: tuple[Bdf, ...]) -> tuple[Place, ...]:
    """The ports that a VM's numbering counts: of each section and node of which it gets a device.

    A group of which it would leave more than MOST_EMPTY_SEATS empty before a used one is counted
    by its used ports alone. docs/decisions/0004-guest-pcie-places.md says what that costs.
    """
    wanted = set(devices)
    used: dict[tuple[Section, NodeIndex], int] = {}
    length: dict[tuple[Section, NodeIndex], int] = {}
    number: dict[tuple[Section, NodeIndex], int] = {}
    for place in places:
        group = place.section, place.node
        number[group] = number.get(group, 0) + 1
        if not wanted.isdisjoint(place.functions):
            used[group] = used.get(group, 0) + 1
            length[group] = number[group]
    packed = {group for group, count in used.items() if length[group] - count > MOST_EMPTY_PORTS}
    return tuple(
        place
        for place in places
        if (place.section, place.node) in used
        and ((place.section, place.node) not in packed or not wanted.isdisjoint(place.functions))
    )


def _interleaved(places: list[Place]) -> tuple[Place, ...]:
    """Section by section, and in each the nodes in turn; ports on nearest cells last."""
    ranks: dict[tuple[Section, NodeIndex], int] = {}
    keyed: list[tuple[bool, Section, int, int, NodeIndex, Place]] = []
    for place in sorted(places, key=lambda place: (place.section, place.order)):
        rank = ranks.get((place.section, place.node), 0)
        ranks[place.section, place.node] = rank + 1
        keyed.append((place.near, place.section, rank, place.cell, place.node, place))
    keyed.sort(key=lambda item: item[:5])
    return tuple(place for *_, place in keyed)


def _groups(physical: list[PciDevice]) -> list[list[PciDevice]]:
    """Functions that share a port, the GPU or lowest first; in host order."""
    slots: dict[tuple[int, int, int], list[PciDevice]] = {}
    for device in physical:
        slots.setdefault((device.bdf.domain, device.bdf.bus, device.bdf.device), []).append(device)
    groups: list[list[PciDevice]] = []
    for devices in slots.values():
        gpu = next((device for device in devices if device.kind is DeviceKind.GPU), None)
        if gpu is None:
            groups += [[device] for device in devices]
        else:
            groups.append([gpu, *(device for device in devices if device is not gpu)])
    return groups


def _section(device: PciDevice, paired: set[Bdf]) -> Section:
    match device.kind:
        case DeviceKind.GPU:
            return Section.GPU
        case DeviceKind.NIC:
            return Section.PAIRED_NIC if device.bdf in paired else Section.NIC
        case DeviceKind.NVSWITCH:
            return Section.NVSWITCH
        case DeviceKind.NVME:
            return Section.NVME
        case _:
            return Section.OTHER


def _key(bdf: Bdf) -> BdfKey:
    return bdf.domain, bdf.bus, bdf.device, bdf.function
