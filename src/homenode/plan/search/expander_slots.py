"""ExpanderSlots: whether a guest can have the expander buses that its devices need.

pcie.0 has about 25 slots for them. A guest of more cells has a bus only where there is a device
(shape/pcie.py), so devices on more cells than that are refused here, before nodes are chosen.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property

from msgspec import Struct

from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.plan.bit_sets import members
from homenode.plan.devices.options import DeviceOptions
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie import PcieDocument
from homenode.vm.layout import GuestPcie
from homenode.vm.plan_options import DeviceLocality


class ExpanderSlots(Struct, frozen=True, kw_only=True, dict=True):
    """What the devices of one VM need of pcie.0."""

    host: Host
    free: int  # slots for expander buses that are left
    cells_with_bus: frozenset[int]  # cells to which the document has given one
    certain: frozenset[NodeIndex]  # host nodes of devices that the VM gets in any case
    options: DeviceOptions  # the GPUs that it may get
    at_home: bool  # only those of its own nodes
    nodes: tuple[NodeIndex, ...]  # those of the search, whose positions are the bits of a set

    def suffice(self, nodes: int, homes: Iterable[NodeIndex] | None = None) -> bool:
        """Whether they do for a guest with a cell on each of these nodes (bits), and devices of
        these host nodes; None = the certain ones, with the GPUs for which they do if any."""
        if nodes.bit_count() <= self.free:
            return True
        if homes is None and self.options.count:
            return self.narrow(nodes) is not None
        return len(self._new_cells(nodes, self.certain if homes is None else homes)) <= self.free

    def narrow(self, nodes: int) -> DeviceOptions | None:
        """The options with GPUs of so few cells on these nodes (bits) alone that the slots suffice:
        of those with the most GPUs at home, else with the most. None where these are too few."""
        for prefers_own in (True, False):
            groups = [self._pick(homes, nodes, prefers_own) for homes in self._gpus_of_home]
            options = self.options.among(groups)
            if options is not None:
                return options
        return None

    def _pick(self, homes: Mapping[NodeIndex | None, int], nodes: int, prefers_own: bool) -> int:
        """Those of the GPUs of these homes; none where certain devices need too many slots."""
        certain = self._new_cells(nodes, self.certain)
        room = self.free - len(certain)
        own_count, gpus_of_cell = Counter[int | None](), dict[int | None, int]()
        for home, gpus in homes.items():
            is_own = home in self.nodes and bool(nodes >> self.nodes.index(home) & 1)
            if is_own or home is None or not self.at_home:
                cell = self._cell(home, nodes)
                own_count[cell] += is_own * prefers_own * gpus.bit_count()
                gpus_of_cell[cell] = gpus_of_cell.get(cell, 0) | gpus
        served = gpus_of_cell.keys() & (certain | self.cells_with_bus | {None})
        unserved = sorted(
            gpus_of_cell.keys() - served,
            key=lambda one: (-own_count[one], -gpus_of_cell[one].bit_count()),
        )
        return sum(gpus_of_cell[cell] for cell in (*served, *unserved[:room])) if room >= 0 else 0

    def _new_cells(self, nodes: int, homes: Iterable[NodeIndex]) -> set[int | None]:
        """The cells that need a bus for devices of these host nodes."""
        return {self._cell(home, nodes) for home in homes} - self.cells_with_bus - {None}

    def _cell(self, home: NodeIndex | None, nodes: int) -> int | None:
        """The node's own cell, else the nearest, the lowest of equals; None where none is known."""
        for node in self._nearest(home):
            if nodes >> node & 1:
                return (nodes & (1 << node) - 1).bit_count()
        return None

    @cached_property
    def _nearest(self) -> Callable[[NodeIndex | None], list[int]]:
        """The nodes of the search, the nearest to a host node first; none where none is known."""

        def nearest(home: NodeIndex | None) -> list[int]:
            own_position = [self.nodes.index(home)] if home in self.nodes else []
            indices = {node.index for node in self.host.nodes}
            if self.host.distances is None or home is None or home not in indices:
                return own_position
            row = [self.host.distance(home, node) or 0 for node in self.nodes]
            return own_position + sorted(range(len(row)), key=row.__getitem__)

        return cache(nearest)

    @cached_property
    def _gpus_of_home(self) -> list[dict[NodeIndex | None, int]]:
        """Of each group to choose from, the GPUs (bits) of each host node."""
        home_of = [gpu.home for gpu in self.options.gpus]
        return [
            {
                home: sum(1 << number for number in members(group) if home_of[number] == home)
                for home in dict.fromkeys(home_of[number] for number in members(group))
            }
            for group in self.options.groups
        ]


def expander_slots(
    host: Host, request: GuestRequest, options: DeviceOptions, nodes: tuple[NodeIndex, ...]
) -> ExpanderSlots | None:
    """For a VM on some of these nodes; None where they suffice whichever are chosen."""
    if request.layout.pcie is GuestPcie.KEEP:
        return None
    document = PcieDocument(request.guest, len(nodes), ())
    free = len(document.expander_slots())
    functions = (host.device_at.get(bdf) for bdf in options.functions_with(0))
    certain = frozenset(
        function.node
        for function in functions
        if function is not None and function.node is not None
    )
    if min(len(nodes), len(certain) + options.count) <= free:
        return None
    return ExpanderSlots(
        host=host,
        free=free,
        cells_with_bus=document.cells_with_bus,
        certain=certain,
        options=options,
        at_home=request.options.device_locality is DeviceLocality.REQUIRE,
        nodes=nodes,
    )
