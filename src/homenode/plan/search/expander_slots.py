"""ExpanderSlots: whether a guest can have the expander buses that its devices need.

pcie.0 has about 25 slots for them. A guest of more cells has a bus only where there is a device
(shape/pcie.py), so devices on more cells than that are refused here, before nodes are chosen.
"""

from collections.abc import Iterable
from functools import cached_property

from msgspec import Struct

from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.plan.bit_sets import members
from homenode.plan.devices.options import DeviceOptions
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_build import PcieDocument
from homenode.vm.layout import GuestPcie


class ExpanderSlots(Struct, frozen=True, kw_only=True, dict=True):
    """What the devices of one VM need of pcie.0.

    free: slots for expander buses that are left. cells_with_bus: cells to which the document has
    given one. certain: host nodes of devices that the VM gets in any case. nodes: those of the
    search, whose positions are the bits of a set.
    """

    host: Host
    free: int
    cells_with_bus: frozenset[int]
    certain: frozenset[NodeIndex]
    nodes: tuple[NodeIndex, ...]

    @property
    def own_nodes(self) -> int:
        """The nodes (bits) that certain devices lie on."""
        return sum(1 << i for i, node in enumerate(self.nodes) if node in self.certain)

    def suffice(self, nodes: int, homes: Iterable[NodeIndex] | None = None) -> bool:
        """Whether they do for a guest with a cell on each of these nodes (bits), and devices of
        these host nodes; None = the certain ones."""
        if nodes.bit_count() <= self.free:
            return True
        positions = tuple(members(nodes))
        cells = {self._cell(home, positions) for home in (self.certain if homes is None else homes)}
        return len(cells - self.cells_with_bus - {None}) <= self.free

    def _cell(self, home: NodeIndex, positions: tuple[int, ...]) -> int | None:
        """The node's own cell, else the nearest, the lowest of equals; None where none is known."""
        row, own = self._rows.get(home), self._position.get(home)
        if own in positions:
            return positions.index(own)
        return positions.index(min(positions, key=row.__getitem__)) if row else None

    @cached_property
    def _position(self) -> dict[NodeIndex, int]:
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def _rows(self) -> dict[NodeIndex, list[int]]:
        """Distances from each host node to each node of the search; none where none are known."""
        if self.host.distances is None:
            return {}
        distance, known = self.host.distance, (node.index for node in self.host.nodes)
        return {home: [distance(home, node) or 0 for node in self.nodes] for home in known}

    def narrowed(self, options: DeviceOptions) -> DeviceOptions | None:
        """The options with GPUs of so few host nodes alone, those with the most, that the slots
        suffice on any nodes of the search; None where these are too few."""
        room, groups = max(0, self.free - len(self.certain)), []
        for group in options.groups:
            gpus_of: dict[NodeIndex, int] = {}
            kept = group
            for number in members(group):
                home = options.gpus[number].home
                if home is not None and home not in self.certain:
                    gpus_of[home] = gpus_of.get(home, 0) | 1 << number
            for gpus in sorted(gpus_of.values(), key=int.bit_count, reverse=True)[room:]:
                kept &= ~gpus
            groups.append(kept)
        return options.among(groups)


def expander_slots(
    host: Host, request: GuestRequest, options: DeviceOptions, nodes: tuple[NodeIndex, ...]
) -> ExpanderSlots | None:
    """For a VM on some of these nodes; None where they suffice whichever are chosen."""
    if request.layout.pcie is GuestPcie.AS_IT_WAS:
        return None
    document = PcieDocument(request.guest, len(nodes), ())
    free = len(document.expander_slots())
    known = (host.device_at.get(bdf) for bdf in options.chosen(0))
    certain = frozenset(one.node for one in known if one is not None and one.node is not None)
    if min(len(nodes), len(certain) + options.count) <= free:
        return None
    return ExpanderSlots(
        host=host,
        free=free,
        cells_with_bus=document.cells_with_bus,
        certain=certain,
        nodes=nodes,
    )
