"""The PCIe tree that a domain document already has, as far as a plan builds on it."""

from collections.abc import Iterable

from msgspec.structs import replace

from homenode.errors import InputError
from homenode.plan.shape.pcie_tree import PcieTree, TreeNode
from homenode.vm.model import (
    EXPANDER,
    GuestAddress,
    GuestPciController,
    Vm,
    expander_above,
)

# Slots on pcie.0 for expander buses, the quietest first. Left out: 0 is the host bridge; libvirt
# gives 1 to the first video device and counts up from 2 with its own root ports; q35's chipset has
# 0x1a, 0x1d (USB), 0x1b (sound) and 0x1f (LPC, SATA, SMBus).
_EXPANDER_SLOTS = (*range(0x10, 0x19), *range(0x0F, 0x02, -1), 0x19, 0x1C, 0x1E)


class PcieDocument:
    """Controllers and addresses of a document, without the devices that a plan moves.

    cells: of the guest to be; an expander bus that names another one belongs to no cell.
    leaving: addresses that become free.
    """

    def __init__(self, guest: Vm, cells: int, leaving: Iterable[GuestAddress]) -> None:
        self.controllers = {
            controller.index: controller
            if controller.cell is None or controller.cell < cells
            else replace(controller, cell=None)
            for controller in guest.controllers
        }
        self.cells = cells
        gone = set(leaving)
        staying = [address for address in guest.addresses if address not in gone]
        plugged = [c.address for c in guest.controllers if c.address is not None]
        self.slots_of_bus: dict[int, set[int]] = {}
        for address in (*staying, *plugged):
            self.slots_of_bus.setdefault(address.bus, set()).add(address.device)
        self.last_index = max((*self.controllers, *self.slots_of_bus), default=0)

    def expander_above(self, bus: int) -> GuestPciController | None:
        """The expander bus that a controller's bus hangs on; None where that is pcie.0."""
        return expander_above(self.controllers, bus)

    @property
    def has_tree(self) -> bool:
        """An expander bus belongs to a cell already."""
        return any(controller.cell is not None for controller in self.controllers.values())

    def bases_of(self, tree: PcieTree) -> list[int]:
        """Indices before the first controller of such a tree, as far as its first ones show."""
        leading = tree.nodes[: tree.leading_expanders]
        return [
            index - 1
            for index, controller in sorted(self.controllers.items())
            if controller.model == EXPANDER
            and all(self.matches(node, index - 1) for node in leading)
        ]

    def matches(self, node: TreeNode, base: int) -> bool:
        """The document has this controller, at this index and below the same parent."""
        controller = self.controllers.get(base + 1 + node.position)
        if controller is None or controller.model != node.model.value:
            return False
        if node.parent is None:
            return controller.cell == node.cell
        return controller.address is not None and controller.address.bus == base + 1 + node.parent

    def expander_slots(self) -> list[int]:
        """Free slots on pcie.0, in the order in which expander buses take them."""
        in_use = self.slots_of_bus.get(0, set())
        return [slot for slot in _EXPANDER_SLOTS if slot not in in_use]

    @property
    def cells_with_bus(self) -> frozenset[int]:
        """Cells that an expander bus of the document belongs to."""
        buses = (one for one in self.controllers.values() if one.model == EXPANDER)
        return frozenset(one.cell for one in buses if one.cell is not None)

    def below_expanders(self) -> dict[int, int]:
        """For each controller under an expander bus, the index of that bus."""
        found: dict[int, int] = {}
        for index, controller in self.controllers.items():
            if controller.model == EXPANDER or controller.address is None:
                continue
            expander = self.expander_above(controller.address.bus)
            if expander is not None:
                found[index] = expander.index
        return found


def refuse_machine(guest: Vm, layout: str) -> None:
    """Raises InputError unless the machine type has expander buses for PCIe."""
    if guest.architecture == "x86_64" and guest.is_q35:
        return
    if guest.architecture == "aarch64" and guest.is_virt:
        return
    found = guest.machine
    if found is None:
        found = "none named, which libvirt takes for i440fx on x86_64"
    elif guest.architecture == "x86_64" and not guest.is_q35:
        found = f"{found} (i440fx)" if found == "pc" or "i440fx" in found else found
    machine = {"x86_64": "q35", "aarch64": "virt"}.get(guest.architecture)
    other = f"change the machine type to {machine} in a new guest, or " if machine else ""
    raise InputError(
        f"layout {layout}: expected machine q35 (x86_64) or virt (aarch64), the only ones with "
        f"PCIe expander buses; found {found} on {guest.architecture}",
        hint=f"{other}choose pin-numa, which leaves the PCI tree as it was",
    )
