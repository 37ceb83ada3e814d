"""Seats of the devices that a VM gets, and which of them the document has right already."""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.plan.guest import GuestAddress
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_build import PcieBuild
from homenode.plan.shape.pcie_document import EXPANDER, PcieDocument
from homenode.plan.shape.pcie_tree import PcieTree


@dataclass(frozen=True, slots=True)
class Seat:
    """A port and what sits behind it. function_of: guest function of each host function, ascending
    by address."""

    position: int
    cell: int
    function_of: dict[Bdf, int]

    @property
    def first(self) -> Bdf:
        return next(iter(self.function_of))


def seats_of(tree: PcieTree, devices: tuple[Bdf, ...]) -> list[Seat]:
    """One seat for each port, in the order of numbering; functions as on the host.

    A guest looks at function 0 first and skips the device where there is none: without the host's
    function 0 the lowest one takes its number.
    """
    functions: dict[int, list[Bdf]] = {}
    for bdf in devices:
        position = tree.port_of_function.get(bdf)
        if position is not None:
            functions.setdefault(position, []).append(bdf)
    seats: list[Seat] = []
    for position in sorted(functions):
        members = sorted(functions[position])
        # A virtual function's number on the host says nothing: it has its port for itself.
        numbers = {bdf: bdf.function for bdf in members}
        numbers[members[0]] = 0
        seats.append(Seat(position, tree.nodes[position].cell, numbers))
    return seats


def base_of(
    told: PcieDocument,
    tree: PcieTree,
    seats: list[Seat],
    addresses: dict[Bdf, GuestAddress],
    any_port: bool,
) -> int | None:
    """The index before the tree in the document; None if it has none that would serve.

    Where any port of a cell is right, its expander buses are all that is asked of the tree. Else
    it has to have a device in its ideal place already, or space for all of them.
    """
    for base in told.bases_of(tree):
        if any_port:
            return base
        build = PcieBuild(told, tree, base)
        if any(_is_ideal(seat, addresses, told, tree, base) for seat in seats):
            return base
        last = max((seat.position for seat in seats), default=0)
        if build.holds_up_to(last) and all(build.can_lay(seat.position) for seat in seats):
            return base
    return None


def _is_ideal(
    seat: Seat,
    addresses: dict[Bdf, GuestAddress],
    told: PcieDocument,
    tree: PcieTree,
    base: int,
) -> bool:
    """A device of the seat is behind the seat's own port."""
    index = base + 1 + seat.position
    return any(
        bdf in addresses and addresses[bdf].bus == index for bdf in seat.function_of
    ) and all(told.matches(node, base) for node in tree.chain(seat.position))


def right_ones(
    told: PcieDocument, seats: list[Seat], addresses: dict[Bdf, GuestAddress]
) -> dict[int, GuestAddress]:
    """The document's address of each seat that is on an expander bus of its cell."""
    found = {seat.position: _right_address(seat, addresses, told) for seat in seats}
    return {position: address for position, address in found.items() if address is not None}


def best_ones(
    request: GuestRequest,
    told: PcieDocument,
    tree: PcieTree,
    base: int | None,
    seats: list[Seat],
    addresses: dict[Bdf, GuestAddress],
    right: dict[int, GuestAddress],
) -> dict[int, GuestAddress]:
    """Of the seats on their cell, those behind their own port, and those whose port something else
    has taken, which no move would better."""
    if base is None or not right:
        return {}
    ideal = {s.position for s in seats if _is_ideal(s, addresses, told, tree, base)}
    moving = [
        addresses[bdf]
        for seat in seats
        for bdf in seat.function_of
        if seat.position not in ideal and bdf in addresses
    ]
    freed = PcieBuild(PcieDocument(request.guest, told.cells, moving), tree, base)
    return {
        position: address
        for position, address in right.items()
        if position in ideal or not freed.can_lay(position)
    }


def _right_address(
    seat: Seat, addresses: dict[Bdf, GuestAddress], told: PcieDocument
) -> GuestAddress | None:
    """The document's address of a seat if it is on its cell, else None. One function that is right
    keeps the seat for the others."""
    for bdf, function in seat.function_of.items():
        address = addresses.get(bdf)
        if address is None or address.function != function or address.device != 0:
            continue
        port = told.controllers.get(address.bus)
        expander = told.expander_above(address.bus)
        is_port = port is not None and port.model != EXPANDER
        if is_port and expander is not None and expander.node == seat.cell:
            return address
    return None
