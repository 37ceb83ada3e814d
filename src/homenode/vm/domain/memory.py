"""Memory: <memory>, <currentMemory>, <maxMemory>, memory devices, <numatune>, and the record of a
layout in <metadata>, which marks a <numatune> as homenode's own."""

from msgspec.structs import asdict

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding, finding
from homenode.machine.pci import normalize_uuid
from homenode.machine.tools.versions import Version
from homenode.machine.topology import LAYOUT_NAMESPACE, DomainMark
from homenode.objective import Objective
from homenode.units import to_bytes
from homenode.vm.domain.cells import cell_elements, cells_bytes, page_bytes_of_cell, read_page_bytes
from homenode.vm.domain.document import (
    Document,
    Element,
    format_set,
    format_size,
    number,
    parse_decimal,
    pu_set,
    read_size,
)
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    edit_attributes,
    insert_at,
    is_bare,
    prune,
    remove,
    remove_all,
    set_attribute,
    set_attributes,
    set_text,
)
from homenode.vm.layout import (
    GuestCells,
    GuestPcie,
    Layout,
    MemoryBinding,
    Pinning,
    Siblings,
    add_preset_name,
)
from homenode.vm.model import LayoutRecord, MemoryDevice, Vm
from homenode.vm.plan import RECORDED_DIGITS, Plan
from homenode.vm.plan_options import MemoryMode

_RECORD = f"{{{LAYOUT_NAMESPACE}}}layout"


def _find_element(document: Document) -> Element | None:
    return next((e for e in document.root.all("metadata/*") if e.name == _RECORD), None)


def read_record(document: Document) -> LayoutRecord | None:
    """Return the record of a definition, None if it is missing or unreadable."""
    element = _find_element(document)
    if element is None:
        return None
    try:
        layout = Layout(
            name=element.get("name") or "custom",
            pinning=Pinning(element.get("pinning") or ""),
            siblings=Siblings(element.get("siblings") or ""),
            cells=GuestCells(element.get("cells") or ""),
            pcie=GuestPcie(element.get("pcie") or ""),
            memory=MemoryBinding(element.get("memory") or ""),
        )
    except ValueError:
        return None
    objective = next(
        (candidate for candidate in Objective if candidate == element.get("objective")), None
    )
    multiplied = False if element.get("multiplied") == "no" else None
    return LayoutRecord(
        layout=layout, host=element.get("host"), objective=objective, multiplied=multiplied
    )


def read_mark(document: Document) -> DomainMark | None:
    """Return whether a definition's mark is its own or of the VM that it copies; None without."""
    element = _find_element(document)
    if element is None:
        return None
    marked_uuid, uuid = element.get("uuid"), _find_uuid(document)
    is_own = marked_uuid is None or (uuid is not None and normalize_uuid(marked_uuid) == uuid)
    return DomainMark.OWN if is_own else DomainMark.COPY


def _find_uuid(document: Document) -> str | None:
    return normalize_uuid(document.root.value("uuid") or "")


def edit_metadata(document: Document, plan: Plan) -> Document:
    """Write the record of the plan's layout; a layout that changes nothing has no record."""
    element = _find_element(document)
    if add_preset_name(plan.layout).name == "default":
        return document if element is None else prune(document, element)
    record = plan.vm.record
    values: dict[str, str | None] = {
        **{name: str(value) for name, value in asdict(plan.layout).items()},
        "host": plan.host_fingerprint[:RECORDED_DIGITS] or None,
        "objective": None if plan.objective is None else str(plan.objective),
        "multiplied": "no" if record and record.multiplied is False else None,
        # A mark from before the domain had a UUID belongs to it, and stays.
        "uuid": None if element is not None and not element.get("uuid") else _find_uuid(document),
    }
    if element is not None:
        return apply(document, set_attributes(document, element, values))
    mark = NewElement("homenode:layout", {"xmlns:homenode": LAYOUT_NAMESPACE, **values})
    return insert_at(document, "metadata", mark)


LIBVIRT_WITH_STRICT_MASK: Version = (12, 0, 0)


def read_memory(document: Document) -> int:
    """Return the VM's memory in bytes with memory devices: <memory>, or the sum of the cells, which
    overrides it in libvirt. Raises ParseError or InputError."""
    if (total := cells_bytes(document)) > 0:
        return total + sum_memory_devices(document)
    element = document.root.child("memory")
    if element is None:
        raise InputError(
            f"{document.source}: missing <memory> with the VM's memory",
            hint="<memory unit='GiB'>64</memory>",
        )
    size = read_size(element)
    if size == 0:
        raise InputError(f"{document.source}:{element.line}: expected <memory> above 0, found 0")
    return size


def read_own_memory(document: Document) -> int:
    """Bytes without memory devices. Raises like read_memory, InputError if none is left."""
    devices = sum_memory_devices(document)
    total = read_memory(document)
    if (memory := total - devices) <= 0:
        raise InputError(
            f"{document.source}: <memory> is {total} bytes, memory devices alone {devices}",
            hint="<memory> counts them in",
        )
    return memory


def read_ballooned(document: Document) -> int:
    """Return the bytes that the balloon may hold at the start. A size of 0 is all memory. Source:
    virDomainDefPostParseMemory."""
    current = document.root.child("currentMemory")
    size = 0 if current is None else read_size(current)
    return max(0, read_memory(document) - size) if size else 0


def list_memory_devices(document: Document) -> tuple[Element, ...]:
    return document.root.all("devices/memory")


def sum_memory_devices(document: Document) -> int:
    """Return the bytes that memory devices add to <memory>, without enclaves."""
    return sum(device.size_bytes for device in read_memory_devices(document))


def read_memory_devices(document: Document) -> tuple[MemoryDevice, ...]:
    """Return the memory devices included in <memory>, without enclaves. Raises ParseError."""
    devices: list[MemoryDevice] = []
    memnodes = read_memnodes(document)
    binding = read_binding(document) or (None, CpuSet())
    for device in list_memory_devices(document):
        size = device.find("target/size")
        if size is None or device.get("model") == "sgx-epc":
            continue
        cell = _read_cell(device)
        follows = _follows_cell(document, device)
        mode, nodes = memnodes.get(cell) or binding
        mask, page = device.find("source/nodemask"), device.find("source/pagesize")
        devices.append(
            MemoryDevice(
                model=device.get("model") or "",
                alias=device.value("alias/@name"),
                cell=cell,
                size_bytes=read_size(size),
                plugged_bytes=read_size(device.find("target/requested") or size),
                follows_cell=follows and mask is None,
                has_nodemask=follows and mask is not None,
                mode=mode,
                nodes=nodes if mask is None else _read_nodes(mask),
                page_bytes=page_bytes_of_cell(document, cell) if page is None else read_size(page),
            )
        )
    return tuple(devices)


def _read_cell(device: Element) -> int:
    node = device.find("target/node")
    return 0 if node is None else parse_decimal(node, node.text, "a cell")


def _read_nodes(mask: Element) -> CpuSet:
    return CpuSet.parse(mask.text.strip(), mask.source)


def _follows_cell(document: Document, device: Element) -> bool:
    """Return whether a device uses its cell's page size, and its nodes without a mask."""
    if device.get("model") in ("nvdimm", "virtio-pmem") or device.find("source/path") is not None:
        return False
    page = device.find("source/pagesize")
    return page is None or read_size(page) == read_page_bytes(document)


def edit_memory(document: Document, plan: Plan) -> Document:
    """Write the plan's memory plus memory devices', with <currentMemory>; raise <maxMemory>."""
    total = plan.vm.memory_bytes + sum_memory_devices(document)
    element = document.root.child("memory")
    if element is None:
        size, unit = format_size(total, ("GiB", "MiB"))
        return insert_at(document, "", NewElement("memory", {"unit": unit}, text=size))
    if read_size(element) == total:
        return document
    edits = _edit_size(document, element, total)
    current, limit = document.root.child("currentMemory"), document.root.child("maxMemory")
    if current is not None:
        edits += _edit_size(document, current, total)
    if limit is not None and read_size(limit) < total:
        edits += _edit_size(document, limit, total)
    return apply(document, edits)


def edit_memory_devices(document: Document, plan: Plan) -> Document:
    """Move memory devices of removed cells to cell 0; a <nodemask> follows its cell if bound."""
    cells = len(cell_elements(document))
    edits: list[Edit] = []
    for device in list_memory_devices(document):
        node, mask, cell = (
            device.find("target/node"),
            device.find("source/nodemask"),
            _read_cell(device),
        )
        if node is not None and cells and cell >= cells:
            edits += set_text(document, node, "0")
            cell = 0
        if mask is None or plan.memory_mode is None or device.get("model") == "sgx-epc":
            continue
        nodes = CpuSet(plan.cells[cell].host_nodes if plan.is_mirrored else plan.memory_nodes)
        if _read_nodes(mask) != nodes:
            edits += set_text(document, mask, str(nodes))
    return apply(document, edits)


def check_nodemask(guest: Vm, plan: Plan, libvirt: Version | None) -> Finding | None:
    """Return the finding that a node mask has its cell's mode before libvirt 12.0. Source: NEWS of
    libvirt 12.0; qemuBuildMemoryBackendProps of libvirt 11.3."""
    masked = [device for device in guest.memory_devices if device.has_nodemask]
    if not masked or plan.memory_mode in (None, MemoryMode.STRICT):
        return None
    if libvirt is not None and libvirt >= LIBVIRT_WITH_STRICT_MASK:
        return None
    version = "unknown" if libvirt is None else ".".join(map(str, libvirt))
    return finding(
        "nodemask-not-strict",
        "<memory><source><nodemask>",
        observed=f"{len(masked)} memory devices have mode {plan.memory_mode} of their cell: a node "
        f"mask is strict from libvirt 12.0, found {version}",
    )


def _edit_size(document: Document, element: Element, size: int) -> list[Edit]:
    """Return edits that set the size in the element's unit, or in KiB if it is not whole there."""
    unit_bytes = to_bytes(1, element.get("unit") or "KiB")
    if size % unit_bytes == 0:
        return set_text(document, element, str(size // unit_bytes))
    text, kib = format_size(size, ())
    return set_text(document, element, text) + set_attribute(document, element, "unit", kib)


def edit_numatune(document: Document, plan: Plan) -> Document:
    """Bind memory as the plan does: as a whole, or with a <memnode> for each cell that has memory.

    Without a binding the document's own stays; one that homenode wrote (by the record in
    <metadata>) is removed.
    """
    if plan.memory_mode is None:
        return _remove_binding(document)
    mode, nodes = str(plan.memory_mode), CpuSet(plan.memory_nodes)
    per_cell: dict[int, CpuSet] = {}
    if plan.layout.memory is MemoryBinding.BOUND_PER_CELL:
        per_cell = {
            cell.id: CpuSet(cell.host_nodes)
            for cell in plan.cells
            if cell.host_nodes and cell.memory_bytes
        }
    memory = document.root.find("numatune/memory")
    placement = None if memory is None else memory.get("placement")
    values = _check_binding(memory, mode, nodes) | (
        {} if placement == "static" else {"placement": None}
    )
    return _edit_memnodes(edit_attributes(document, "numatune/memory", values), mode, per_cell)


def _check_binding(element: Element | None, mode: str, nodes: CpuSet) -> dict[str, str | None]:
    """Return the attributes of mode and nodes that an element lacks."""
    values: dict[str, str | None] = {}
    if element is None or (element.get("mode") or "strict") != mode:
        values["mode"] = mode
    if element is None or pu_set(element, "nodeset") != nodes:
        values["nodeset"] = format_set(nodes)
    return values


def read_memnodes(document: Document) -> dict[int, tuple[str, CpuSet]]:
    """Map guest cells to (mode, host nodes) of each <memnode>."""
    return {
        cell: (element.get("mode") or "strict", pu_set(element, "nodeset") or CpuSet())
        for cell, element in _list_memnodes(document)
    }


def read_binding(document: Document) -> tuple[str | None, CpuSet] | None:
    """Return (mode, host nodes) of <memory>; None if memory is not bound or numad chooses."""
    memory = document.root.find("numatune/memory")
    nodes = None if memory is None else pu_set(memory, "nodeset")
    if memory is None or not nodes:
        return None
    return memory.get("mode") or "strict", nodes


def read_bound_nodes(document: Document) -> CpuSet | None:
    """Return every host node that the definition allows for the memory; None if all are."""
    bindings = [*read_memnodes(document).values(), read_binding(document)]
    present = [binding for binding in bindings if binding is not None]
    if not present or any(mode == "preferred" for mode, _ in present):
        return None
    return CpuSet.union(nodes for _, nodes in present)


def _list_memnodes(document: Document) -> list[tuple[int, Element]]:
    memnodes = document.root.all("numatune/memnode")
    return [(number(element, "cellid", "a guest cell"), element) for element in memnodes]


def _remove_binding(document: Document) -> Document:
    record = read_record(document)
    is_ours = record is not None and record.layout.memory is not MemoryBinding.KEEP
    cells = len(cell_elements(document))
    # libvirt rejects a <memnode> for a cell that does not exist.
    stale = [element for cell, element in _list_memnodes(document) if is_ours or cell >= cells]
    stale += document.root.all("numatune/memory") if is_ours else ()
    document = remove_all(document, stale)
    numatune = document.root.child("numatune")
    if stale and numatune is not None and is_bare(document, numatune):
        return remove_all(document, [numatune])
    return document


def _edit_memnodes(document: Document, mode: str, nodes_of_cell: dict[int, CpuSet]) -> Document:
    edits: list[Edit] = []
    bound_cells: set[int] = set()
    for cell, element in _list_memnodes(document):
        if cell not in nodes_of_cell or cell in bound_cells:
            edits += remove(document, element)
            continue
        bound_cells.add(cell)
        edits += set_attributes(
            document, element, _check_binding(element, mode, nodes_of_cell[cell])
        )
    document = apply(document, edits)
    numatune = document.root.child("numatune")
    assert numatune is not None, "it holds <memory>"
    new = [
        NewElement("memnode", {"cellid": str(cell), "mode": mode, "nodeset": format_set(nodes)})
        for cell, nodes in nodes_of_cell.items()
        if cell not in bound_cells
    ]
    return apply(document, append(document, numatune, new))
