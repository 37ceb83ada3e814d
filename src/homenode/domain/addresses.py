"""Addresses: which device is plugged in where, and slots that several functions share."""

from homenode.bdf import PciAddress
from homenode.domain.document import Document, Element
from homenode.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_after,
    remove,
    set_attribute,
    set_attributes,
)
from homenode.domain.fields import address_attributes, guest_address
from homenode.plan.model import Plan
from homenode.vm.model import GuestAddress


def addressed_devices(document: Document) -> tuple[tuple[GuestAddress, Element], ...]:
    """(guest address, device) of whatever is plugged in at a PCI address, in document order."""
    devices = document.root.child("devices")
    found: list[tuple[GuestAddress, Element]] = []
    for element in () if devices is None else devices.children:
        address = guest_address(document, element)
        if address is not None:
            found.append((address, element))
    return tuple(found)


def read_addresses(document: Document) -> tuple[GuestAddress, ...]:
    """Every guest PCI address that is in use, ascending."""
    return tuple(sorted({address for address, _ in addressed_devices(document)}))


def edit_shared_slots(document: Document, plan: Plan) -> Document:
    """multifunction='on' at function 0 of each slot of the plan that holds other functions too."""
    addresses = (*(c.address for c in plan.vm.controllers), *(d.address for d in plan.vm.hostdevs))
    planned = {_slot(address) for address in addresses if address is not None}
    devices = addressed_devices(document)
    shared = {_slot(address) for address, _ in devices if address.function} & planned
    edits: list[Edit] = []
    for address, element in devices:
        if _slot(address) in shared and address.function == 0:
            place = element.child("address")
            assert place is not None, "it has an address"
            edits += set_attribute(document, place, "multifunction", "on")
    return apply(document, edits)


def new_address(address: PciAddress) -> New:
    """The <address> of a device in the guest."""
    given = tuple((name, value) for name, value in address_attributes(address).items() if value)
    return New("address", (("type", "pci"), *given))


def place(document: Document, device: Element, address: GuestAddress) -> list[Edit]:
    """Edits that plug a device in at an address; none where it is there."""
    if guest_address(document, device) == address:
        return []
    old = device.child("address")
    if old is None:
        return append(document, device, [new_address(address)])
    if old.get("type") != "pci":
        return remove(document, old) + insert_after(document, old, [new_address(address)])
    return set_attributes(document, old, address_attributes(address) | {"multifunction": None})


def _slot(address: GuestAddress) -> tuple[int, int, int]:
    return address.domain, address.bus, address.device
