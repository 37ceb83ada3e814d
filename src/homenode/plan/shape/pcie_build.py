"""The build of a guest's PCIe tree: the ideal tree of pcie_tree.py on what the document has, and
the ports that the devices of the VM sit behind."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.plan.shape.pcie_tree import (
    SLOTS_PER_BUS,
    ExpanderNeed,
    PcieTree,
    TreeNode,
    Window,
    assign_windows,
)
from homenode.vm.model import (
    EXPANDER,
    GuestAddress,
    GuestCellId,
    GuestPciController,
    PortModel,
    Vm,
    expander_above,
)
from homenode.vm.plan_model import Unplannable

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
        self.guest, self.cells = guest, cells
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


LARGEST_INDEX = 255
"""libvirt writes a controller's index as `bus` of an address, which has 8 bits."""


class _Port(Struct, frozen=True):
    """A controller of the tree. bus_nr: the document's, on expander buses."""

    index: int
    model: PortModel
    cell: int
    address: GuestAddress
    existing: bool
    bus_nr: int | None = None


class PcieBuild:
    """Ports are added by index; what is there is never renumbered or moved.

    base: index before the ideal tree's first controller; None = the document has a tree of another
    shape, so that new ports are added one by one.
    """

    def __init__(self, document: PcieDocument, tree: PcieTree, base: int | None) -> None:
        self.document = document
        self.tree = tree
        self.base = base
        self.ports: dict[int, _Port] = {}
        self._ideal: set[int] = set()
        self._slots = {bus: set(slots) for bus, slots in document.slots_of_bus.items()}
        self._root_slots = document.expander_slots()
        self._below = document.below_expanders()

    def lay_ideal(self, positions: list[int]) -> dict[int, int]:
        """Lays the tree up to the last of these ports; the index of each that could have its own.

        A port whose index or slot is in use is left out of the answer.
        """
        if self.base is None:
            return {}
        base = self.base
        free = [position for position in positions if self.can_lay(position)]
        last = max((*free, self.tree.leading_expanders - 1))
        for node in self.tree.nodes[: last + 1]:
            index = base + 1 + node.position
            if self.document.matches(node, base):
                self._adopt(index)
                self._ideal.add(index)
            elif index > self.document.last_index:
                self._lay(node, index, base)
        return {position: base + 1 + position for position in free}

    def can_lay(self, position: int) -> bool:
        """The ideal port and everything above it are there and empty, or can be added."""
        base = self.base
        if base is None or self._slots.get(base + 1 + position):
            return False
        for node in self.tree.chain(position):
            if self.document.matches(node, base):
                continue
            if base + 1 + node.position <= self.document.last_index:
                return False
            if node.parent is not None and node.slot in self._slots.get(base + 1 + node.parent, ()):
                return False
        return True

    def holds_up_to(self, position: int) -> bool:
        """Whatever the document has where the tree would be is of the tree, up to this port."""
        return self.base is not None and all(
            self.document.matches(node, self.base)
            for node in self.tree.nodes[: position + 1]
            if self.base + 1 + node.position <= self.document.last_index
        )

    def adopt_expander_of(self, bus: int) -> None:
        """Takes the expander bus above a controller, with all its ports, into the plan."""
        expander = self.document.expander_above(bus)
        if expander is not None:
            self._adopt(expander.index)

    def append(self, cell: int) -> int:
        """Index of a new root port on an expander bus of the cell."""
        expander = self._expander_with_space(cell)
        slot = max(set(range(SLOTS_PER_BUS)) - self._slots.get(expander, set()))
        return self._add(self._next_index(), PortModel.ROOT_PORT, cell, expander, slot)

    def ensure_expander(self, cell: int) -> None:
        """The cell has an expander bus, an existing one where there is one."""
        self._expander_with_space(cell)

    def add_spares(self, count: int) -> None:
        """A port in each of the last `count` slots of every expander bus, where there is none."""
        for port in sorted(self.ports.values(), key=lambda port: port.index):
            if port.model != PortModel.EXPANDER_BUS:
                continue
            for slot in range(SLOTS_PER_BUS - 1, SLOTS_PER_BUS - 1 - count, -1):
                if slot not in self._slots.get(port.index, set()):
                    self._add(self._next_index(), PortModel.ROOT_PORT, port.cell, port.index, slot)

    def controllers(self) -> tuple[GuestPciController, ...]:
        """The tree by index, with bus windows. Raises Unplannable if bus numbers run out."""
        ours = [port for port in self.ports.values() if port.model == PortModel.EXPANDER_BUS]
        ours.sort(key=lambda port: (port.cell, port.index))
        buses = {port.index: 1 for port in ours}
        for index in self.ports:
            expander = self._expander_of(index)
            if expander != index and expander in buses:
                buses[expander] += 1
        foreign: list[Window] = []
        root_buses = 1 + self._left_out()
        for index, controller in self.document.controllers.items():
            if controller.model == EXPANDER:
                if index not in self.ports and controller.bus_nr is not None:
                    ports = sum(above == index for above in self._below.values())
                    foreign.append(Window(controller.bus_nr, 1 + ports))
            elif index != 0 and index not in self._below:
                root_buses += 1
        needs = [ExpanderNeed(port.index, buses[port.index], port.bus_nr) for port in ours]
        usual = max(self.tree.expanders, len(ours))
        windows = assign_windows(needs, usual, root_buses, foreign)
        window_of = {need.index: window for need, window in zip(needs, windows, strict=True)}
        planned: list[GuestPciController] = []
        for index in sorted(self.ports):
            port = self.ports[index]
            window = window_of.get(index)
            planned.append(
                GuestPciController(
                    index=index,
                    model=port.model,
                    address=port.address,
                    existing=port.existing and (window is None or window.bus_nr == port.bus_nr),
                    bus_nr=None if window is None else window.bus_nr,
                    bus_count=None if window is None else window.bus_count,
                    cell=None if window is None else GuestCellId(port.cell),
                )
            )
        return tuple(planned)

    def _left_out(self) -> int:
        """Indices that no one names below the highest: libvirt adds a port on pcie.0 for each."""
        named = {*self.document.controllers, *self.ports, 0}
        return len(set(range(max(self.document.last_index, *named) + 1)) - named)

    def _adopt(self, index: int) -> None:
        """Takes a controller of the document into the plan; an expander bus with its ports."""
        controller = self.document.controllers[index]
        if index in self.ports or controller.model not in set(PortModel):
            return
        expander = self.document.controllers[self._below.get(index, index)]
        cell = expander.cell or 0
        address = controller.address
        if address is None:  # libvirt has not given one yet
            address = GuestAddress(0, 0, self._root_slot(), 0)
        self.ports[index] = _Port(
            index,
            PortModel(controller.model),
            cell,
            address,
            existing=controller.address is not None,
            bus_nr=controller.bus_nr,
        )
        self._slots.setdefault(address.bus, set()).add(address.device)
        if controller.model == EXPANDER:
            for below, above in self._below.items():
                if above == index:
                    self._adopt(below)

    def _lay(self, node: TreeNode, index: int, base: int) -> None:
        """Adds a controller of the ideal tree, or a root port in its stead where its own place is
        in_use: an index without a controller would be filled by libvirt on pcie.0."""
        if node.parent is None:
            self._ideal.add(self._add(index, node.model, node.cell, 0, self._root_slot()))
            return
        parent = base + 1 + node.parent
        in_use = self._slots.get(parent, set())
        if parent in self._ideal and node.slot is not None and node.slot not in in_use:
            self._ideal.add(self._add(index, node.model, node.cell, parent, node.slot))
            return
        expander = self._expander_with_space(node.cell)
        slot = max(set(range(SLOTS_PER_BUS)) - self._slots.get(expander, set()))
        self._add(index, PortModel.ROOT_PORT, node.cell, expander, slot)

    def _expander_with_space(self, cell: int) -> int:
        for index, controller in sorted(self.document.controllers.items()):
            if controller.model == EXPANDER and controller.cell == cell:
                self._adopt(index)
        for index, port in sorted(self.ports.items()):
            has_space = len(self._slots.get(index, ())) < SLOTS_PER_BUS
            if port.model == PortModel.EXPANDER_BUS and port.cell == cell and has_space:
                return index
        return self._add(self._next_index(), PortModel.EXPANDER_BUS, cell, 0, self._root_slot())

    def _expander_of(self, index: int) -> int:
        while index in self.ports and self.ports[index].model != PortModel.EXPANDER_BUS:
            index = self.ports[index].address.bus
        return index

    def _root_slot(self) -> int:
        if not self._root_slots:
            raise Unplannable(
                "pcie.0: expected a free slot for an expander bus, found none",
                hint="move devices of the document behind root ports",
            )
        return self._root_slots.pop(0)

    def _next_index(self) -> int:
        return max((self.document.last_index, *self.ports)) + 1

    def _add(self, index: int, model: PortModel, cell: int, parent: int, slot: int) -> int:
        if index > LARGEST_INDEX:
            raise Unplannable(
                f"PCI controllers: expected indices up to {LARGEST_INDEX}, found a need for "
                f"{index} ({len(self.document.controllers)} in the document, "
                f"{sum(not port.existing for port in self.ports.values()) + 1} to add)",
                hint="pass fewer devices, ask for fewer --spare-ports, or start from a document "
                "with fewer PCI controllers",
            )
        self.ports[index] = _Port(
            index, model, cell, GuestAddress(0, parent, slot, 0), existing=False
        )
        self._slots.setdefault(parent, set()).add(slot)
        return index


class PortAssignment(Struct, frozen=True):
    """A port and what sits behind it. function_of: guest function of each host function, ascending
    by address."""

    position: int
    cell: int
    function_of: dict[Bdf, int]

    @property
    def first(self) -> Bdf:
        return next(iter(self.function_of))


def assignments_of(tree: PcieTree, devices: tuple[Bdf, ...]) -> list[PortAssignment]:
    """One port for each port, in the order of numbering; functions as on the host.

    A guest looks at function 0 first and skips the device where there is none: without the host's
    function 0 the lowest one takes its number.
    """
    functions: dict[int, list[Bdf]] = {}
    for bdf in devices:
        position = tree.port_of_function.get(bdf)
        if position is not None:
            functions.setdefault(position, []).append(bdf)
    assignments: list[PortAssignment] = []
    for position in sorted(functions):
        members = sorted(functions[position])
        # A virtual function's number on the host says nothing: it has its port for itself.
        numbers = {bdf: bdf.function for bdf in members}
        numbers[members[0]] = 0
        assignments.append(PortAssignment(position, tree.nodes[position].cell, numbers))
    return assignments


def base_of(
    stated: PcieDocument,
    tree: PcieTree,
    assignments: list[PortAssignment],
    addresses: dict[Bdf, GuestAddress],
    any_port: bool,
) -> int | None:
    """The index before the tree in the document; None if it has none that would serve.

    Where any port of a cell is right, its expander buses are all that is asked of the tree. Else
    it has to have a device in its ideal place already, or space for all of them.
    """
    for base in stated.bases_of(tree):
        if any_port:
            return base
        build = PcieBuild(stated, tree, base)
        if any(_is_ideal(assignment, addresses, stated, tree, base) for assignment in assignments):
            return base
        last = max((assignment.position for assignment in assignments), default=0)
        if build.holds_up_to(last) and all(
            build.can_lay(assignment.position) for assignment in assignments
        ):
            return base
    return None


def _is_ideal(
    assignment: PortAssignment,
    addresses: dict[Bdf, GuestAddress],
    stated: PcieDocument,
    tree: PcieTree,
    base: int,
) -> bool:
    """A device of the port is behind the port's own port."""
    index = base + 1 + assignment.position
    return any(
        bdf in addresses and addresses[bdf].bus == index for bdf in assignment.function_of
    ) and all(stated.matches(node, base) for node in tree.chain(assignment.position))


def right_ones(
    stated: PcieDocument, assignments: list[PortAssignment], addresses: dict[Bdf, GuestAddress]
) -> dict[int, GuestAddress]:
    """The document's address of each port that is on an expander bus of its cell."""
    found = {
        assignment.position: _right_address(assignment, addresses, stated)
        for assignment in assignments
    }
    return {position: address for position, address in found.items() if address is not None}


def best_ones(
    stated: PcieDocument,
    tree: PcieTree,
    base: int | None,
    assignments: list[PortAssignment],
    addresses: dict[Bdf, GuestAddress],
    right: dict[int, GuestAddress],
) -> dict[int, GuestAddress]:
    """Of the places on their cell, those behind their own port, and those whose port something else
    occupies, which no move would improve."""
    if base is None or not right:
        return {}
    ideal = {s.position for s in assignments if _is_ideal(s, addresses, stated, tree, base)}
    moving = [
        addresses[bdf]
        for assignment in assignments
        for bdf in assignment.function_of
        if assignment.position not in ideal and bdf in addresses
    ]
    freed = PcieBuild(PcieDocument(stated.guest, stated.cells, moving), tree, base)
    return {
        position: address
        for position, address in right.items()
        if position in ideal or not freed.can_lay(position)
    }


def _right_address(
    assignment: PortAssignment, addresses: dict[Bdf, GuestAddress], stated: PcieDocument
) -> GuestAddress | None:
    """The document's address of a port if it is on its cell, else None. One function that is right
    keeps the port for the others."""
    for bdf, function in assignment.function_of.items():
        address = addresses.get(bdf)
        if address is None or address.function != function or address.device != 0:
            continue
        port = stated.controllers.get(address.bus)
        expander = stated.expander_above(address.bus)
        is_port = port is not None and port.model != EXPANDER
        if is_port and expander is not None and expander.cell == assignment.cell:
            return address
    return None
