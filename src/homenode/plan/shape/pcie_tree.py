"""The ideal PCIe tree of a guest: every controller that its cells and the host's devices call for.

The tree is made of the host alone and numbered from its roots on, so a plan takes a prefix of it.
Source: libvirt PCI topology documentation; of what was tried on libvirt 9.0: controller indices
must have no gaps (libvirt fills them with root ports on pcie.0), root ports on an expander bus take
slots 0 to 31, a port's own bus has slot 0 only.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.plan.shape.device_places import Place, Section
from homenode.vm.model import PortModel
from homenode.vm.plan_options import PciGranularity

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
    places: tuple[Place, ...],
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
            pulled += place.section <= Section.PAIRED_NIC and not place.near
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


def _is_switch(granularity: PciGranularity, place: Place) -> bool:
    """Shown as a device below a switch. Virtual functions beyond the first never are: there may be
    more of them than a switch has slots."""
    mirrors = granularity is PciGranularity.SWITCH and place.switch is not None
    return mirrors and place.section < Section.FURTHER_VF


def _switch_units(places: tuple[Place, ...]) -> list[int]:
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
