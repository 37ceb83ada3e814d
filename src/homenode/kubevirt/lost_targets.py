"""Lost targets: expander buses that come back from KubeVirt without their cell and bus number.

Where KubeVirt keeps ports for NICs to be plugged in, it defines a VM twice: the second time with
the devices that libvirt printed of the first, as KubeVirt's own types hold them. Before the types
knew PCINUMAAwareTopology they had no <target> for controllers. libvirt would then give each such
bus two bus numbers, too few for its ports, and no node.

Source: KubeVirt, virtwrap/nichotplug.go: withNetworkIfacesResources; KubeVirt enhancement 115.
"""

from collections.abc import Mapping
from dataclasses import replace

from homenode.bdf import Bdf
from homenode.indices import NodeIndex
from homenode.pci import PciDevice
from homenode.plan.guest import Guest, GuestPciController
from homenode.plan.shape.pcie_document import EXPANDER, expander_above


def with_lost_targets(
    guest: Guest, by_bdf: Mapping[Bdf, PciDevice], cell_of_node: Mapping[NodeIndex, int]
) -> tuple[Guest, frozenset[int]]:
    """The guest with a cell on each expander bus that has lost it, and the indices of those.

    It is the cell of the functions below. Buses with nothing below them get the cells that have no
    bus yet, both in ascending order. A bus with a number of its own is somebody else's and stays.
    """
    controllers = {controller.index: controller for controller in guest.controllers}
    lost = [c.index for c in guest.controllers if _has_lost_target(c)]
    if not lost:
        return guest, frozenset()
    cells_below: dict[int, set[int | None]] = {index: set() for index in lost}
    for hostdev in guest.hostdevs:
        at = hostdev.address
        above = None if at is None else expander_above(controllers, at.bus)
        if above is not None and above.index in cells_below:
            node = by_bdf[hostdev.source].node
            cells_below[above.index].add(None if node is None else cell_of_node.get(node))
    cell_of = {
        index: cell
        for index, cells in cells_below.items()
        if len(cells) == 1 and (cell := next(iter(cells))) is not None
    }
    named = {*cell_of.values(), *(c.node for c in guest.controllers)}
    without = [cell for cell in range(len(guest.cell_vcpus)) if cell not in named]
    empty = [index for index in lost if not cells_below[index]]
    cell_of |= dict(zip(empty, without, strict=False))
    regained = tuple(
        replace(controller, node=cell_of[controller.index])
        if controller.index in cell_of
        else controller
        for controller in guest.controllers
    )
    return replace(guest, controllers=regained), frozenset(cell_of)


def _has_lost_target(controller: GuestPciController) -> bool:
    return controller.model == EXPANDER and controller.bus_nr is None and controller.node is None
