"""Devices: passed-through PCI functions in <devices>, and the guest addresses in use."""

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.pci import normalize_uuid
from homenode.vm.domain.document import (
    Document,
    Element,
    address_attributes,
    format_set,
    guest_address,
    host_address,
)
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    insert_after,
    insert_at,
    remove,
    remove_all,
    set_attribute,
    set_attributes,
)
from homenode.vm.model import GuestAddress, GuestHostdev, MediatedDevice
from homenode.vm.plan import Plan


def list_hostdev_elements(document: Document) -> tuple[tuple[Bdf, Element], ...]:
    """Return (function, element) of every passed-through PCI function that names its source, a
    <hostdev> or an <interface>.

    Functions with <address type='unassigned'/> are not in the guest and are omitted.
    """
    functions: list[tuple[Bdf, Element]] = []
    for element in document.root.all("devices/*"):
        source = element.find("source/address")
        if source is None or not is_pci_function(element):
            continue
        is_interface = element.name == "interface"
        if is_interface and source.get("type") not in (None, "pci"):
            continue
        is_given = is_interface or element.get("mode") in (None, "subsystem")
        if is_given and element.value("address/@type") != "unassigned":
            functions.append((host_address(source), element))
    return tuple(functions)


def is_pci_function(element: Element) -> bool:
    """Return whether a device is a PCI function of the host."""
    kind = {"hostdev": "pci", "interface": "hostdev"}.get(element.name)
    return kind is not None and element.get("type") == kind


def read_hostdevs(document: Document) -> tuple[GuestHostdev, ...]:
    """Return the passed-through functions, in document order. Raises InputError for duplicates."""
    hostdevs: list[GuestHostdev] = []
    seen_bdfs: set[Bdf] = set()
    for bdf, element in list_hostdev_elements(document):
        if bdf in seen_bdfs:
            raise InputError(
                f"{document.source}:{element.line}: expected device {bdf} once, found it twice",
                hint="remove one of the two",
            )
        seen_bdfs.add(bdf)
        hostdevs.append(
            GuestHostdev(
                bdf=bdf,
                address=guest_address(element),
                alias=element.value("alias/@name"),
                managed=element.name == "interface" or element.get("managed") == "yes",
            )
        )
    return tuple(hostdevs)


def list_mediated(document: Document) -> tuple[tuple[str, Element], ...]:
    """Return (UUID, element) of every mediated PCI device, in lower case. Raises ParseError for an
    invalid UUID, which libvirt would use as a name in sysfs."""
    devices = []
    for element in document.root.all("devices/hostdev"):
        if element.get("type") != "mdev" or element.get("model") not in (None, "vfio-pci"):
            continue
        text = element.value("source/address/@uuid") or ""
        uuid = normalize_uuid(text)
        if uuid is None:
            place = f"{document.source}:{element.line}: <hostdev type='mdev'>"
            raise ParseError(place, "<source><address uuid='...'/></source>", text or None)
        devices.append((uuid, element))
    return tuple(devices)


def read_mediated(document: Document) -> tuple[MediatedDevice, ...]:
    """Return the mediated devices. Raises like list_mediated, and InputError for duplicates."""
    devices: dict[str, MediatedDevice] = {}
    for uuid, element in list_mediated(document):
        if uuid in devices:
            raise InputError(
                f"{document.source}:{element.line}: expected {uuid} once, found it twice",
                hint="remove one of the two",
            )
        devices[uuid] = MediatedDevice(uuid, guest_address(element))
    return tuple(devices.values())


def edit_initiators(document: Document, plan: Plan) -> Document:
    """Write each GPU's initiator cells to its <hostdev>; remove cells that the plan lacks."""
    element_of = map_hostdevs(document)
    edits: list[Edit] = []
    for device in plan.vm.hostdevs:
        element = element_of.get(device.bdf)
        if element is None:
            continue
        acpi = element.child("acpi")
        if device.initiator_cells:
            nodeset = format_set(CpuSet(device.initiator_cells))
            if acpi is None:
                edits += append(document, element, [NewElement("acpi", {"nodeset": nodeset})])
            else:
                edits += set_attribute(document, acpi, "nodeset", nodeset)
        elif acpi is not None and not read_initiators(document, element) <= CpuSet(
            cell.id for cell in plan.cells
        ):
            edits += remove(document, acpi)
    return apply(document, edits)


def edit_hostdevs(document: Document, plan: Plan) -> Document:
    """Place each device of the plan, add missing ones, remove PCI functions that it omits."""
    planned_keys = {_make_device_key(device) for device in plan.vm.hostdevs}
    present = _map_elements(document)
    surplus = [
        element
        for key, element in present.items()
        if (key not in planned_keys if isinstance(key, Bdf) else key in plan.mediated_removed)
    ]
    document = remove_all(document, surplus)
    element_of = _map_elements(document)
    edits: list[Edit] = []
    for device in plan.vm.hostdevs:
        element = element_of.get(_make_device_key(device))
        if element is not None and device.address is not None:
            edits += place(document, element, device.address)
        if element is not None and not device.managed and element.get("managed") == "yes":
            edits += set_attribute(document, element, "managed", "no")
    document = apply(document, edits)
    new = [
        _make_hostdev(device)
        for device in plan.vm.hostdevs
        if _make_device_key(device) not in element_of
    ]
    if not new:
        return document
    devices = document.root.child("devices")
    if devices is None:
        return insert_at(document, "", NewElement("devices", children=tuple(new)))
    hostdevs = devices.all("hostdev")
    if hostdevs:
        return apply(document, insert_after(document, hostdevs[-1], new))
    return apply(document, append(document, devices, new))


def read_initiators(document: Document, hostdev: Element) -> CpuSet:
    cell = hostdev.value("acpi/@nodeset")
    return CpuSet() if cell is None else CpuSet.parse(cell, f"{document.source}: <acpi nodeset>")


def map_hostdevs(document: Document) -> dict[Bdf, Element]:
    """Map passed-through PCI functions to their elements."""
    return dict(list_hostdev_elements(document))


def _map_elements(document: Document) -> dict[Bdf | str, Element]:
    """Map functions by address, and mediated devices by UUID, to their elements."""
    return dict((*list_mediated(document), *list_hostdev_elements(document)))


def _make_device_key(device: GuestHostdev) -> Bdf | str:
    return device.bdf if device.uuid is None else device.uuid


def _make_hostdev(device: GuestHostdev) -> NewElement:
    address = () if device.address is None else (make_address(device.address),)
    if device.uuid is not None:
        source = NewElement("address", {"uuid": device.uuid})
        kind = {"type": "mdev", "model": "vfio-pci"}
    else:
        source = NewElement("address", address_attributes(device.bdf))
        kind = {"type": "pci", "managed": "yes" if device.managed else "no"}
    children = (NewElement("source", children=(source,)), *address)
    return NewElement("hostdev", {"mode": "subsystem", **kind}, children)


def list_addressed(document: Document) -> tuple[tuple[GuestAddress, Element], ...]:
    """Return (guest address, device) of every device with a PCI address, in document order."""
    devices = ((guest_address(e), e) for e in document.root.all("devices/*"))
    return tuple((address, element) for address, element in devices if address is not None)


def read_addresses(document: Document) -> tuple[GuestAddress, ...]:
    """Return every guest PCI address in use, ascending."""
    return tuple(sorted({address for address, _ in list_addressed(document)}))


def edit_shared_slots(document: Document, plan: Plan) -> Document:
    """Set multifunction='on' at function 0 of each of the plan's slots with several functions."""
    addresses = (*(c.address for c in plan.vm.controllers), *(d.address for d in plan.vm.hostdevs))
    planned_slots = {_make_slot_key(address) for address in addresses if address is not None}
    devices = list_addressed(document)
    slots = {_make_slot_key(address) for address, _ in devices if address.function} & planned_slots
    edits: list[Edit] = []
    for address, element in devices:
        if _make_slot_key(address) in slots and address.function == 0:
            place = element.child("address")
            assert place is not None, "it has an address"
            edits += set_attribute(document, place, "multifunction", "on")
    return apply(document, edits)


def make_address(address: PciAddress) -> NewElement:
    """Return the <address> of a device in the guest."""
    return NewElement("address", {"type": "pci", **address_attributes(address)})


def place(document: Document, device: Element, address: GuestAddress) -> list[Edit]:
    """Return edits that move a device to an address; none if it is there."""
    if guest_address(device) == address:
        return []
    old = device.child("address")
    if old is None:
        return append(document, device, [make_address(address)])
    values = {"type": "pci", **address_attributes(address), "multifunction": None}
    return set_attributes(document, old, values)


def _make_slot_key(address: GuestAddress) -> tuple[int, int, int]:
    return address.domain, address.bus, address.device
