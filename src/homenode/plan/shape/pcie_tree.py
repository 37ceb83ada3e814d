"""The ideal PCIe tree of a guest: every controller that its cells and the host's devices call for.

The tree is made of the host alone and numbered from its roots on, so a plan takes a prefix of it.
Source: libvirt PCI topology documentation; of what was tried on libvirt 9.0: controller indices
must have no gaps (libvirt fills them with root ports on pcie.0), root ports on an expander bus take
slots 0 to 31, a port's own bus has slot 0 only.

Every host device has its port, passed or not. A port follows from the host and the chosen nodes,
not from which devices of a kind and node a VM gets. So taking one of several away moves no other,
and two VMs of one shape agree on where a device sits.

An expander bus owns the bus numbers from its busNr up to the next expander's. libvirt takes a
window that is too small without a word, and the guest's enumeration then breaks.
Source: tried on libvirt 9.0 and QEMU 7.2; libvirt domain XML, <target busNr> is 1 to 254.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice, PortType
from homenode.machine.topology import Host
from homenode.plan.devices.brought import own_nics
from homenode.vm.model import PortModel
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PciGranularity

BdfKey = tuple[int, int, int, int]

MOST_EMPTY_PORTS = 16
"""For devices of one kind and node that a VM does not have: as many as two boards of GPUs."""


class PortSection(IntEnum):
    """Kinds of port, the likeliest to be passed first: ports before a used one cost a port each."""

    GPU = 0
    PAIRED_NIC = 1  # the one NIC nearest to each GPU
    NVSWITCH = 2
    NIC = 3
    NVME = 4
    FURTHER_VF = 5  # all but the first virtual function of a device
    OTHER = 6
    VF_PARENT = 7  # its virtual functions are what is passed


class PortPlace(Struct, frozen=True):
    """A port for one host device.

    node: the device's. near: the cell is only the nearest one. functions: those of the host that
    share the port: a GPU, then its audio and USB. order: sorts within the section. switch: upstream
    port of the host's switch above, or None.
    """

    functions: tuple[Bdf, ...]
    node: NodeIndex
    cell: int
    near: bool
    section: PortSection
    order: tuple[int, ...]
    root_complex: str
    switch: Bdf | None

    @property
    def slot_order(self) -> tuple[int, ...]:
        """Sorts ports on one bus: the cell's own first, each GPU next to its NIC."""
        section = PortSection.GPU if self.section is PortSection.PAIRED_NIC else self.section
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
    cell_of_node: dict[NodeIndex, int],
    nearest_of_node: Mapping[NodeIndex, int] = MappingProxyType({}),
) -> tuple[PortPlace, ...]:
    """Every port of the cells, in the order in which ports are numbered.

    GPUs of all cells come before the NICs of any, so that a VM of GPUs alone has no idle port. The
    n-th GPU of each cell comes before the next one of any. nearest_of_node: cells of nodes that
    have none of their own; their devices come last and move no other.
    """
    tree = _Tree(host.device_at)
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
    places: list[PortPlace] = []

    def add(
        functions: tuple[Bdf, ...], like: PciDevice, section: PortSection, order: tuple[int, ...]
    ) -> None:
        node = like.node
        assert node is not None  # only devices of cell_of are here
        near, switch, root = node not in cell_of_node, switches[like.bdf], like.root_complex
        places.append(
            PortPlace(
                functions=functions,
                node=node,
                cell=cell_of[node],
                near=near,
                section=section,
                order=order,
                root_complex=root,
                switch=switch,
            )
        )

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
                add((child.bdf,), first, PortSection.FURTHER_VF, order)
            section = PortSection.VF_PARENT
        add(functions, first, section, _key(first.bdf))
    for orphans in virtual.values():
        for number, child in enumerate(orphans):
            switches[child.bdf] = tree.switch_above(child.parent)
            order = (number, _section(child, paired), *_key(child.bdf))
            add((child.bdf,), child, PortSection.FURTHER_VF, order)
    return _interleaved(places)


def sparse_places(places: tuple[PortPlace, ...], devices: tuple[Bdf, ...]) -> tuple[PortPlace, ...]:
    """The ports that a VM's numbering counts: of each section and node of which it gets a device.

    A group of which it would leave more than MOST_EMPTY_SEATS empty before a used one is counted
    by its used ports alone. Decision 0004 says what that costs.
    """
    wanted = set(devices)
    used: dict[tuple[PortSection, NodeIndex], int] = {}
    length: dict[tuple[PortSection, NodeIndex], int] = {}
    number: dict[tuple[PortSection, NodeIndex], int] = {}
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


def _interleaved(places: list[PortPlace]) -> tuple[PortPlace, ...]:
    """PortSection by section, and in each the nodes in turn; ports on nearest cells last."""
    ranks: dict[tuple[PortSection, NodeIndex], int] = {}
    keyed: list[tuple[bool, PortSection, int, int, NodeIndex, PortPlace]] = []
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


def _section(device: PciDevice, paired: set[Bdf]) -> PortSection:
    match device.kind:
        case DeviceKind.GPU:
            return PortSection.GPU
        case DeviceKind.NIC:
            return PortSection.PAIRED_NIC if device.bdf in paired else PortSection.NIC
        case DeviceKind.NVSWITCH:
            return PortSection.NVSWITCH
        case DeviceKind.NVME:
            return PortSection.NVME
        case _:
            return PortSection.OTHER


def _key(bdf: Bdf) -> BdfKey:
    return bdf.domain, bdf.bus, bdf.device, bdf.function


BUS_COUNT = 256
HOTPLUG_SPACE = 16
"""Buses kept on pcie.0 beyond those in use, for the ports that libvirt adds by itself."""

WIDEST_WINDOW = 64
LARGEST_SHARE = BUS_COUNT // 2
"""Expander buses take the upper half of the numbers at most, unless they need more."""


class Window(NamedTuple):
    """First bus number and how many follow it, itself included."""

    bus_nr: int
    bus_count: int


class ExpanderNeed(Struct, frozen=True):
    """An expander bus. buses: itself and every bus below it. bus_nr: None = to be chosen."""

    index: int
    buses: int
    bus_nr: int | None


def assign_windows(
    needs: Sequence[ExpanderNeed],
    expanders: int,
    root_buses: int,
    foreign: Sequence[Window] = (),
) -> tuple[Window, ...]:
    """A window for each need, lowest first in the order given.

    Numbers of the document stay if they hold what they must; else all are given out again.
    expanders: the count that sets the usual width, so that the width does not follow the devices.
    root_buses: buses of pcie.0 and below it. foreign: what expander buses that are not ours take.
    Raises Unplannable if there are not enough numbers.
    """
    if not needs:
        return ()
    others = [window.bus_nr for window in foreign]
    width = _usual_width(expanders, min(others, default=BUS_COUNT), root_buses)
    numbers = _keep(needs, width, root_buses, others)
    if numbers is None:
        numbers = _relay(needs, width, root_buses, foreign)
    in_use = sorted([*numbers, *others, BUS_COUNT])
    return tuple(Window(nr, next(n for n in in_use if n > nr) - nr) for nr in numbers)


def _usual_width(expanders: int, top: int, root_buses: int) -> int:
    space = min(LARGEST_SHARE, top - root_buses - HOTPLUG_SPACE)
    width = min(WIDEST_WINDOW, space // max(expanders, 1))
    return max(width - width % 4, 2)


def _keep(
    needs: Sequence[ExpanderNeed], width: int, root_buses: int, others: Sequence[int]
) -> list[int] | None:
    """The document's numbers, new ones below them; None if they cannot stay."""
    fixed = [need.bus_nr for need in needs if need.bus_nr is not None]
    in_use = sorted([*fixed, *others])
    if len(set(in_use)) != len(in_use) or not fixed:
        return None
    lowest = in_use[0]
    numbers: list[int] = []
    for need in reversed(needs):
        if need.bus_nr is None:
            lowest -= max(width, need.buses)
            numbers.append(lowest)
        else:
            end = next((n for n in in_use if n > need.bus_nr), BUS_COUNT)
            if end - need.bus_nr < need.buses:
                return None
            numbers.append(need.bus_nr)
    return numbers[::-1] if lowest >= root_buses else None


def _relay(
    needs: Sequence[ExpanderNeed], width: int, root_buses: int, foreign: Sequence[Window]
) -> list[int]:
    """All numbers again, the last highest; exact windows where the usual ones are too many."""
    space: list[tuple[int, int]] = []  # free numbers as (first, past the last), the highest first
    end = BUS_COUNT
    for other in sorted(foreign, reverse=True):
        space.append((max(root_buses, other.bus_nr + other.bus_count), end))
        end = min(end, other.bus_nr)
    space.append((root_buses, end))
    exact = [max(need.buses, 2) for need in needs]
    for widths in ([max(width, need.buses) for need in needs], exact):
        numbers = _stack(widths, space)
        if numbers is not None:
            return numbers
    free = sum(max(0, end - start) for start, end in space)
    shown = ", ".join(f"controller {need.index}: {need.buses}" for need in needs)
    raise Unplannable(
        f"PCI bus numbers: expected at most {free} for expander buses ({BUS_COUNT} less "
        f"{root_buses} for pcie.0"
        + (f" and {BUS_COUNT - root_buses - free} for other expander buses" if foreign else "")
        + f"), found {sum(exact)} ({shown})",
        hint="pass fewer devices, ask for fewer --spare-ports, or use --pci-granularity cell",
    )


def _stack(widths: list[int], space: list[tuple[int, int]]) -> list[int] | None:
    """First numbers of windows of these widths, each at the top of the highest free numbers that
    hold it; None if one finds no space."""
    left = list(space)
    numbers: list[int] = []
    for count in reversed(widths):
        for position, (start, end) in enumerate(left):
            if end - start >= count:
                left[position] = (start, end - count)
                numbers.append(end - count)
                break
        else:
            return None
    return numbers[::-1]


SLOTS_PER_BUS = 32
"""Device numbers on an expander bus or below a switch's upstream port."""

ExpanderKey = tuple[int, str, int]
"""Cell, root complex ("" where the cell has one tree), and number of the bus, 0 the first."""


class TreeNode(Struct, frozen=True):
    """One controller.

    position: in the order of numbering. parent: position of what it is plugged into, None = pcie.0.
    slot: on the parent's bus; None on pcie.0, where the document decides.
    """

    position: int
    model: PortModel
    cell: int
    parent: int | None
    slot: int | None


class PcieTree(Struct, frozen=True):
    """Controllers in the order of numbering, and the port of each host function.

    leading_expanders: how many open every numbering. expanders: how many there are when every GPU
    and paired NIC is passed.
    """

    nodes: tuple[TreeNode, ...]
    port_of_function: dict[Bdf, int]
    leading_expanders: int
    expanders: int

    def chain(self, position: int) -> Iterator[TreeNode]:
        """From a controller up to its expander bus."""
        at: int | None = position
        while at is not None:
            yield self.nodes[at]
            at = self.nodes[at].parent


def pcie_tree(
    places: tuple[PortPlace, ...],
    cells: Sequence[int],
    granularity: PciGranularity,
    spare_ports: int,
) -> PcieTree:
    """The tree of these places. cells: those that have an expander bus, used or not. spare_ports:
    slots that each expander bus keeps free."""
    per_bus = SLOTS_PER_BUS - spare_ports
    by_root = granularity is PciGranularity.ROOT_COMPLEX
    if granularity is PciGranularity.SWITCH:
        unit_of_place = _switch_units(places)
    else:
        unit_of_place = list(range(len(places)))
    members: dict[int, list[int]] = {}
    for number, unit in enumerate(unit_of_place):
        members.setdefault(unit, []).append(number)
    # A unit hangs on an expander bus directly: a device's port, or a whole switch.
    units_of_tree: dict[tuple[int, str], list[int]] = {}
    for unit in members:
        tree = (places[unit].cell, places[unit].root_complex if by_root else "")
        units_of_tree.setdefault(tree, []).append(unit)
    order = [place.slot_order for place in places]
    expander_of_unit: dict[int, ExpanderKey] = {}
    slot_of_unit: dict[int, int] = {}
    for (cell, root), units in units_of_tree.items():
        for number, start in enumerate(range(0, len(units), per_bus)):
            chunk = units[start : start + per_bus]
            chunk.sort(key=lambda unit: min(order[i] for i in members[unit]))
            for slot, unit in enumerate(chunk):
                expander_of_unit[unit] = (cell, root, number)
                slot_of_unit[unit] = slot

    nodes: list[TreeNode] = []

    def add(model: PortModel, cell: int, parent: int | None, slot: int | None) -> int:
        nodes.append(TreeNode(len(nodes), model, cell, parent, slot))
        return len(nodes) - 1

    expanders: dict[ExpanderKey, int] = {}
    upstreams: dict[int, int] = {}
    ports: list[int] = []
    if not by_root:
        for cell in cells:
            expanders[cell, "", 0] = add(PortModel.EXPANDER_BUS, cell, None, None)
    pulled = leading = len(expanders)
    for number, place in enumerate(places):
        unit, cell = unit_of_place[number], place.cell
        key = expander_of_unit[unit]
        if key not in expanders:
            expanders[key] = add(PortModel.EXPANDER_BUS, cell, None, None)
            pulled += place.section <= PortSection.PAIRED_NIC and not place.near
        if not _is_switch(granularity, place):
            ports.append(add(PortModel.ROOT_PORT, cell, expanders[key], slot_of_unit[unit]))
            continue
        if unit not in upstreams:
            root_port = add(PortModel.ROOT_PORT, cell, expanders[key], slot_of_unit[unit])
            upstreams[unit] = add(PortModel.SWITCH_UPSTREAM, cell, root_port, 0)
        below = sorted(members[unit], key=lambda i: order[i]).index(number)
        ports.append(add(PortModel.SWITCH_DOWNSTREAM, cell, upstreams[unit], below))
    port_of_function = {
        function: port
        for place, port in zip(places, ports, strict=True)
        for function in place.functions
    }
    return PcieTree(tuple(nodes), port_of_function, max(leading, 1), max(pulled, 1))


def _is_switch(granularity: PciGranularity, place: PortPlace) -> bool:
    """Shown as a device below a switch. Virtual functions beyond the first never are: there may be
    more of them than a switch has slots."""
    mirrors = granularity is PciGranularity.SWITCH and place.switch is not None
    return mirrors and place.section < PortSection.FURTHER_VF


def _switch_units(places: tuple[PortPlace, ...]) -> list[int]:
    """For each place the number of the first place that shares its mirrored switch."""
    first: dict[tuple[Bdf, int, int], int] = {}
    count: dict[Bdf, int] = {}
    units: list[int] = []
    for number, place in enumerate(places):
        if place.switch is None or not _is_switch(PciGranularity.SWITCH, place):
            units.append(number)
            continue
        # A guest switch has 32 slots; a second one takes the rest.
        copy = count.get(place.switch, 0) // SLOTS_PER_BUS
        count[place.switch] = count.get(place.switch, 0) + 1
        units.append(first.setdefault((place.switch, place.cell, copy), number))
    return units
