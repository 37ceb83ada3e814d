"""Memory: <memory>, <currentMemory>, <maxMemory>, the memory devices, and what <numatune> binds."""

from functools import reduce

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.tools.versions import Version
from homenode.units import bytes_of
from homenode.vm.domain.cells import cell_bytes, cell_elements, page_bytes_of_cell, read_page_bytes
from homenode.vm.domain.document import DOMAIN_ORDER, Document, Element
from homenode.vm.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_before,
    insert_in_order,
    is_bare,
    remove,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.domain.fields import decimal, format_set, format_size, needed, pu_set, size_bytes
from homenode.vm.domain.metadata import read_record
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import MemoryDevice, Vm
from homenode.vm.plan_model import Plan, PlanFinding, plan_finding
from homenode.vm.plan_options import MemoryMode

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
        mirrored = plan.is_mirrored and cell < len(plan.cells)
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


def edit_numatune(document: Document, plan: Plan) -> Document:
    """Binds memory as the plan says.

    As it was: what the document says stays, unless homenode wrote it for an earlier layout (the
    record in <metadata> says so): then it goes. Bound: <memory> alone. Bound per cell: <memory>
    with every node and a <memnode> for each cell that has memory.
    """
    if plan.memory_mode is None:
        record = read_record(document)
        bound_by_us = record is not None and record.layout.memory is not MemoryBinding.AS_IT_WAS
        return _unbind(document, memory_too=bound_by_us)
    mode = str(plan.memory_mode)
    per_cell: dict[int, CpuSet] = {}
    if plan.layout.memory is MemoryBinding.BOUND_PER_CELL:
        per_cell = {
            cell.id: CpuSet(cell.host_nodes)
            for cell in plan.cells
            if cell.host_nodes and cell.memory_bytes
        }
    document = _with_memory(document, mode, CpuSet(plan.memory_nodes))
    return _with_memnodes(document, mode, per_cell)


def read_memnodes(document: Document) -> dict[int, tuple[str, CpuSet]]:
    """Guest cell -> (mode, host nodes) of each <memnode>."""
    return {
        cell: (element.get("mode") or "strict", nodes) for cell, element, nodes in _found(document)
    }


def read_binding(document: Document) -> tuple[str, CpuSet] | None:
    """(mode, host nodes) of <memory>; None where memory is not bound or numad is to choose."""
    memory = document.root.at("numatune", "memory")
    nodes = None if memory is None else pu_set(document, memory, "nodeset")
    if memory is None or not nodes:
        return None
    return memory.get("mode") or "strict", nodes


def read_bound_nodes(document: Document) -> CpuSet | None:
    """Every host node that the document lets the memory lie on; None where it may lie anywhere."""
    bindings = list(read_memnodes(document).values())
    whole = read_binding(document)
    if whole is not None:
        bindings.append(whole)
    if not bindings or any(mode == "preferred" for mode, _ in bindings):
        return None
    return reduce(CpuSet.__or__, (nodes for _, nodes in bindings))


def _found(document: Document) -> list[tuple[int, Element, CpuSet]]:
    numatune = document.root.child("numatune")
    return [
        (
            decimal(document, element, needed(document, element, "cellid"), "a guest cell"),
            element,
            pu_set(document, element, "nodeset") or CpuSet(),
        )
        for element in (() if numatune is None else numatune.all("memnode"))
    ]


def _unbind(document: Document, *, memory_too: bool) -> Document:
    numatune = document.root.child("numatune")
    if numatune is None:
        return document
    cells = len(cell_elements(document))
    edits: list[Edit] = []
    for cell, element, _ in _found(document):
        if memory_too or cell >= cells:  # libvirt refuses a <memnode> for a cell that is not there
            edits += remove(document, element)
    for memory in numatune.all("memory"):
        if memory_too:
            edits += remove(document, memory)
    document = apply(document, edits)
    numatune = document.root.child("numatune")
    if edits and numatune is not None and is_bare(document, numatune):
        return apply(document, remove(document, numatune))
    return document


def _with_memory(document: Document, mode: str, nodes: CpuSet) -> Document:
    new = New("memory", (("mode", mode), ("nodeset", format_set(nodes))))
    numatune = document.root.child("numatune")
    if numatune is None:
        whole = New("numatune", children=(new,))
        return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
    memory = numatune.child("memory")
    if memory is None:
        if numatune.children:
            return apply(document, insert_before(document, numatune.children[0], [new]))
        return apply(document, append(document, numatune, [new]))
    values: dict[str, str | None] = {"placement": None}
    if memory.get("placement") == "static":
        del values["placement"]
    if (memory.get("mode") or "strict") != mode:
        values["mode"] = mode
    if pu_set(document, memory, "nodeset") != nodes:
        values["nodeset"] = format_set(nodes)
    return apply(document, set_attributes(document, memory, values))


def _with_memnodes(document: Document, mode: str, wanted: dict[int, CpuSet]) -> Document:
    numatune = document.root.child("numatune")
    assert numatune is not None, "_with_memory has made it"
    edits: list[Edit] = []
    kept: set[int] = set()
    for cell, element, nodes in _found(document):
        if cell not in wanted or cell in kept:
            edits += remove(document, element)
            continue
        kept.add(cell)
        values: dict[str, str | None] = {}
        if (element.get("mode") or "strict") != mode:
            values["mode"] = mode
        if nodes != wanted[cell]:
            values["nodeset"] = format_set(wanted[cell])
        edits += set_attributes(document, element, values)
    document = apply(document, edits)
    numatune = document.root.child("numatune")
    assert numatune is not None, "it holds <memory>"
    new = [
        New("memnode", (("cellid", str(cell)), ("mode", mode), ("nodeset", format_set(nodes))))
        for cell, nodes in wanted.items()
        if cell not in kept
    ]
    return apply(document, append(document, numatune, new))
