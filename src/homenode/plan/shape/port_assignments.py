"""Seats of the devices that a VM gets, and which of them the document has right already."""

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_build import PcieBuild
from homenode.plan.shape.pcie_document import PcieDocument
from homenode.plan.shape.pcie_tree import PcieTree
from homenode.vm.model import EXPANDER, GuestAddress


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
    request: GuestRequest,
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
    freed = PcieBuild(PcieDocument(request.guest, stated.cells, moving), tree, base)
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
