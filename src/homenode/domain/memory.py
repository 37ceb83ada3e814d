"""Memory: <memory>, <currentMemory>, <maxMemory> and the memory devices."""

from homenode.domain.cells import cell_bytes, cell_elements
from homenode.domain.document import DOMAIN_ORDER, Document, Element
from homenode.domain.edits import Edit, New, apply, insert_in_order, set_attribute, set_text
from homenode.domain.fields import decimal, format_size, size_bytes
from homenode.domain.memory_backing import read_page_bytes
from homenode.errors import InputError
from homenode.plan.guest import GuestMemoryDevice
from homenode.plan.model import Plan
from homenode.units import bytes_of


def read_memory(document: Document) -> int:
    """<memory> in bytes, memory devices included. Raises ParseError, InputError."""
    element = document.root.child("memory")
    if element is None:
        # libvirt takes the sum of the cells where there is no <memory>.
        total = sum(cell_bytes(document, cell) for cell in cell_elements(document))
        if total:
            return total + memory_device_bytes(document)
        raise InputError(
            f"{document.source}: expected <memory> with the VM's memory, found none",
            hint="<memory unit='GiB'>64</memory>",
        )
    size = size_bytes(document, element, element.text, element.get("unit"))
    if size == 0:
        raise InputError(f"{document.source}:{element.line}: expected some <memory>, found 0")
    return size


def read_current_memory(document: Document) -> int:
    """<currentMemory> in bytes, <memory> where it is not there. Raises ParseError, InputError."""
    current = document.root.child("currentMemory")
    if current is None:
        return read_memory(document)
    return size_bytes(document, current, current.text, current.get("unit"))


def memory_devices(document: Document) -> tuple[Element, ...]:
    """The <memory model=...> devices."""
    devices = document.root.child("devices")
    return () if devices is None else devices.all("memory")


def memory_device_bytes(document: Document) -> int:
    """What the memory devices add to <memory>, in bytes. Memory of enclaves is apart."""
    return sum(device.size_bytes for device in read_memory_devices(document))


def read_memory_devices(document: Document) -> tuple[GuestMemoryDevice, ...]:
    """The memory devices that <memory> counts in, so without enclaves'. Raises ParseError."""
    found: list[GuestMemoryDevice] = []
    for device in memory_devices(document):
        size = device.at("target", "size")
        if size is None or device.get("model") == "sgx-epc":
            continue
        node = device.at("target", "node")
        cell = 0 if node is None else decimal(document, node, node.text, "a cell")
        owned = size_bytes(document, size, size.text, size.get("unit"))
        found.append(GuestMemoryDevice(cell, owned, _follows_cell(document, device)))
    return tuple(found)


def _follows_cell(document: Document, device: Element) -> bool:
    """Whether libvirt takes its memory from the nodes and pages of its cell."""
    if device.get("model") in ("nvdimm", "virtio-pmem"):
        return False
    source = device.child("source")
    if source is None:
        return True
    if source.child("nodemask") is not None or source.child("path") is not None:
        return False
    page = source.child("pagesize")
    if page is None:
        return True
    return size_bytes(document, page, page.text, page.get("unit")) == read_page_bytes(document)


def edit_memory(document: Document, plan: Plan) -> Document:
    """The plan's memory, plus the memory devices that <memory> counts in.

    Where the amount is the document's own, nothing changes. Else <currentMemory> follows, and
    <maxMemory> is raised where it would be less.
    """
    total = plan.memory_bytes + memory_device_bytes(document)
    element = document.root.child("memory")
    if element is None:
        number, unit = format_size(total, ("GiB", "MiB"))
        new = New("memory", (("unit", unit),), text=number)
        return apply(document, insert_in_order(document, document.root, new, DOMAIN_ORDER))
    if read_memory(document) == total:
        return document
    edits = _resize(document, element, total)
    current = document.root.child("currentMemory")
    if current is not None:
        edits += _resize(document, current, total)
    most = document.root.child("maxMemory")
    if most is not None and size_bytes(document, most, most.text, most.get("unit")) < total:
        edits += _resize(document, most, total)
    return apply(document, edits)


def edit_memory_devices(document: Document, plan: Plan) -> Document:
    """Memory devices on a guest cell that is no more move to cell 0."""
    cells = len(cell_elements(document))
    edits: list[Edit] = []
    for device in memory_devices(document):
        node = device.at("target", "node")
        if node is not None and cells and decimal(document, node, node.text, "a cell") >= cells:
            edits += set_text(document, node, "0")
    return apply(document, edits)


def _resize(document: Document, element: Element, size: int) -> list[Edit]:
    """The size in the element's own unit where it is a whole number of them, else in KiB."""
    unit = element.get("unit")
    unit_bytes = bytes_of(1, unit or "KiB")
    if size % unit_bytes == 0:
        return set_text(document, element, str(size // unit_bytes))
    number, kib = format_size(size, ())
    return set_text(document, element, number) + set_attribute(document, element, "unit", kib)
