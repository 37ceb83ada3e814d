"""ExpanderSlots: the sets of nodes whose guest can have the expander buses that its devices need.

pcie.0 has about 25 slots for them. A guest of more cells has a bus only where there is a device
(shape/pcie.py), so devices on more cells than that are refused here, before nodes are chosen.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.plan.bit_sets import members
from homenode.plan.devices.options import DeviceOptions
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_build import PcieDocument
from homenode.vm.layout import GuestPcie


class DeviceNode(Struct, frozen=True, kw_only=True):
    """A host node of devices. position: among the nodes of the search, None where it has no PUs.
    distances: to each of these; None where the host gives none."""

    position: int | None
    distances: tuple[int, ...] | None


class ExpanderSlots(Struct, frozen=True, kw_only=True):
    """What the devices of one VM need of pcie.0. Nodes are positions, sets of them bits.

    free: slots for expander buses that are left. cells_with_bus: cells to which the document has
    given one. certain: nodes of devices that the VM gets in any case. possible: nodes of the GPUs
    of which it gets `count`. places: by node, all that have devices.
    """

    free: int
    cells_with_bus: frozenset[int]
    certain: tuple[DeviceNode, ...]
    possible: tuple[DeviceNode, ...]
    count: int
    places: dict[NodeIndex, DeviceNode]

    @property
    def own_nodes(self) -> int:
        """The nodes that devices lie on."""
        positions = {one.position for one in (*self.certain, *self.possible)}
        return sum(1 << one for one in positions if one is not None)

    def suffice(self, nodes: int) -> bool:
        """Whether they do for a guest with a cell on each of these nodes, whichever GPUs it
        gets."""
        if nodes.bit_count() <= self.free:
            return True
        positions = tuple(members(nodes))
        certain = self._cells(self.certain, positions)
        possible = self._cells(self.possible, positions) - certain
        return len(certain) + min(self.count, len(possible)) <= self.free

    def suffice_for(self, nodes: int, homes: Iterable[NodeIndex | None]) -> bool:
        """The same for a guest with devices of these host nodes and no others."""
        if nodes.bit_count() <= self.free:
            return True
        of = [self.places[node] for node in _known(homes)]
        return len(self._cells(of, tuple(members(nodes)))) <= self.free

    def _cells(self, of: Sequence[DeviceNode], positions: Sequence[int]) -> set[int]:
        """The cells that need a new bus for devices of these nodes."""
        cells = {_cell(one, positions) for one in of}
        return {cell for cell in cells if cell is not None and cell not in self.cells_with_bus}


def _cell(node: DeviceNode, positions: Sequence[int]) -> int | None:
    """The node's own cell, else the nearest, the lowest among equals; None where none is known."""
    if node.position in positions:
        return positions.index(node.position)
    distances = node.distances
    if distances is None:
        return None
    return min(range(len(positions)), key=lambda cell: distances[positions[cell]])


def expander_slots(
    host: Host, request: GuestRequest, options: DeviceOptions, nodes: Sequence[NodeIndex]
) -> ExpanderSlots | None:
    """For a VM on some of these nodes; None where they suffice whichever are chosen."""
    if request.layout.pcie is GuestPcie.AS_IT_WAS:
        return None
    document = PcieDocument(request.guest, len(nodes), ())
    free = len(document.expander_slots())
    known = [host.device_at.get(bdf) for bdf in options.chosen(0)]
    of_gpus = {options.gpus[gpu].home for group in options.groups for gpu in members(group)}
    certain = _known({device.node for device in known if device is not None})
    possible = _known(of_gpus if options.count else ())
    if min(len(nodes), len(certain) + min(options.count, len(possible))) <= free:
        return None

    def device_node(node: NodeIndex) -> DeviceNode:
        return DeviceNode(
            position=nodes.index(node) if node in nodes else None,
            distances=None
            if host.distances is None
            else tuple(host.distance(node, other) or 0 for other in nodes),
        )

    homes = _known({device.node for device in host.pci_devices})
    places = {node: device_node(node) for node in homes}
    return ExpanderSlots(
        free=free,
        cells_with_bus=document.cells_with_bus,
        certain=tuple(places[node] for node in certain),
        possible=tuple(places[node] for node in possible),
        count=options.count,
        places=places,
    )


def _known(nodes: Iterable[NodeIndex | None]) -> list[NodeIndex]:
    return sorted({node for node in nodes if node is not None})
