"""Memory: <memory>, <currentMemory>, <maxMemory> and the memory devices."""

from homenode.cpuset import CpuSet
from homenode.domain.cells import cell_bytes, cell_elements
from homenode.domain.document import DOMAIN_ORDER, Document, Element
from homenode.domain.edits import Edit, New, apply, insert_in_order, set_attribute, set_text
from homenode.domain.fields import decimal, format_size, size_bytes
from homenode.domain.memory_backing import page_bytes_of_cell, read_page_bytes
from homenode.domain.numatune import read_binding, read_memnodes
from homenode.errors import InputError
from homenode.plan.model import Plan, PlanFinding, plan_finding
from homenode.plan.options import MemoryMode
from homenode.tools.versions import Version
from homenode.units import bytes_of
from homenode.vm.layout import GuestCells
from homenode.vm.model import MemoryDevice, Vm

LIBVIRT_WITH_STRICT_MASK: Version = (12, 0, 0)


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


def read_own_memory(document: Document) -> int:
    """Memory in bytes, without that of memory devices. Raises as read_memory, and InputError where
    there is none."""
    devices = memory_device_bytes(document)
    stated = read_memory(document)
    memory = stated - devices
    if memory <= 0:  # where there are cells, libvirt takes their sum, whatever <memory> says
        memory = sum(cell_bytes(document, cell) for cell in cell_elements(document))
    if memory <= 0:
        raise InputError(
            f"{document.source}: expected more <memory> than the {devices} bytes of memory "
            f"devices, found {stated}",
            hint="<memory> counts them in",
        )
    return memory


def read_ballooned(document: Document) -> int:
    """What of the memory the guest may have given back at the start, in bytes."""
    whole = read_own_memory(document) + memory_device_bytes(document)
    return max(0, whole - read_current_memory(document))


def memory_devices(document: Document) -> tuple[Element, ...]:
    """The <memory model=...> devices."""
    devices = document.root.child("devices")
    return () if devices is None else devices.all("memory")


def memory_device_bytes(document: Document) -> int:
    """What the memory devices add to <memory>, in bytes. Memory of enclaves is apart."""
    return sum(device.size_bytes for device in read_memory_devices(document))


def read_memory_devices(document: Document) -> tuple[MemoryDevice, ...]:
    """The memory devices that <memory> counts in, so without enclaves'. Raises ParseError."""
    found: list[MemoryDevice] = []
    memnodes = read_memnodes(document)
    unbound: tuple[str | None, CpuSet] = (None, CpuSet())
    binding = read_binding(document) or unbound
    for device in memory_devices(document):
        size = device.at("target", "size")
        if size is None or device.get("model") == "sgx-epc":
            continue
        node = device.at("target", "node")
        cell = 0 if node is None else decimal(document, node, node.text, "a cell")
        requested = device.at("target", "requested")
        plugged = size if requested is None else requested
        follows = _follows_cell(document, device)
        alias = device.child("alias")
        mode, nodes = memnodes.get(cell) or binding
        mask, page = device.at("source", "nodemask"), device.at("source", "pagesize")
        found.append(
            MemoryDevice(
                model=device.get("model") or "",
                alias=None if alias is None else alias.get("name"),
                cell=cell,
                size_bytes=size_bytes(document, size, size.text, size.get("unit")),
                plugged_bytes=size_bytes(document, plugged, plugged.text, plugged.get("unit")),
                follows_cell=follows and mask is None,
                has_nodemask=follows and mask is not None,
                mode=mode,
                nodes=nodes if mask is None else CpuSet.parse(mask.text.strip(), document.source),
                page_bytes=page_bytes_of_cell(document, cell)
                if page is None
                else size_bytes(document, page, page.text, page.get("unit")),
            )
        )
    return tuple(found)


def _follows_cell(document: Document, device: Element) -> bool:
    """Whether libvirt takes its pages from its cell's, and its nodes where it has no mask."""
    if device.get("model") in ("nvdimm", "virtio-pmem"):
        return False
    source = device.child("source")
    if source is None:
        return True
    if source.child("path") is not None:
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
    """Memory devices on a guest cell that is no more move to cell 0; where the plan binds memory, a
    <nodemask> follows its cell."""
    cells = len(cell_elements(document))
    edits: list[Edit] = []
    for device in memory_devices(document):
        node, mask = device.at("target", "node"), device.at("source", "nodemask")
        cell = 0 if node is None else decimal(document, node, node.text, "a cell")
        if node is not None and cells and cell >= cells:
            edits += set_text(document, node, "0")
            cell = 0
        if mask is None or plan.memory_mode is None or device.get("model") == "sgx-epc":
            continue
        mirrored = plan.layout.cells is GuestCells.MIRRORED and cell < len(plan.cells)
        nodes = CpuSet(plan.cells[cell].host_nodes if mirrored else plan.memory_nodes)
        if nodes and CpuSet.parse(mask.text.strip(), document.source) != nodes:
            edits += set_text(document, mask, str(nodes))
    return apply(document, edits)


def nodemask_not_strict(guest: Vm, plan: Plan, libvirt: Version | None) -> PlanFinding | None:
    """What a node mask of memory devices does not give before libvirt 12.0, which took the mode of
    the cell with it. Source: NEWS of libvirt 12.0; qemuBuildMemoryBackendProps of libvirt 11.3."""
    masked = [device for device in guest.memory_devices if device.has_nodemask]
    if not masked or plan.memory_mode in (None, MemoryMode.STRICT):
        return None
    if libvirt is not None and libvirt >= LIBVIRT_WITH_STRICT_MASK:
        return None
    found = "unknown" if libvirt is None else ".".join(map(str, libvirt))
    return plan_finding(
        "nodemask-not-strict",
        "<memory><source><nodemask>",
        f"{len(masked)} memory devices have mode {plan.memory_mode} of their cell: a node "
        f"mask is strict from libvirt 12.0, found {found}",
    )


def _resize(document: Document, element: Element, size: int) -> list[Edit]:
    """The size in the element's own unit where it is a whole number of them, else in KiB."""
    unit = element.get("unit")
    unit_bytes = bytes_of(1, unit or "KiB")
    if size % unit_bytes == 0:
        return set_text(document, element, str(size // unit_bytes))
    number, kib = format_size(size, ())
    return set_text(document, element, number) + set_attribute(document, element, "unit", kib)
