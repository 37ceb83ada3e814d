"""Guest cells: <numa> in <cpu>."""

from homenode.cpuset import CpuSet
from homenode.domain.document import CPU_ORDER, DOMAIN_ORDER, Document, Element
from homenode.domain.edits import (
    Edit,
    New,
    append,
    apply,
    close_up,
    insert_after,
    insert_in_order,
    remove,
    set_attributes,
)
from homenode.domain.fields import decimal, format_set, format_size, needed, pu_set, size_bytes
from homenode.plan.model import Plan
from homenode.vm.layout import GuestCells
from homenode.vm.model import VmCell


def cell_elements(document: Document) -> tuple[Element, ...]:
    """The <cell> elements of the guest, by their id."""
    numa = document.root.at("cpu", "numa")
    cells = () if numa is None else numa.all("cell")
    numbered = [
        (i if cell.get("id") is None else decimal(document, cell, cell.get("id") or "", "id"), cell)
        for i, cell in enumerate(cells)
    ]
    return tuple(cell for _, cell in sorted(numbered, key=lambda pair: pair[0]))


def read_cells(document: Document) -> tuple[tuple[Element, CpuSet], ...]:
    """Each guest cell with its vCPUs, in cell order; a cell of memory alone has none."""
    return tuple(
        (cell, pu_set(document, cell, "cpus") or CpuSet()) for cell in cell_elements(document)
    )


def cell_bytes(document: Document, cell: Element) -> int:
    """Memory of a <cell>."""
    return size_bytes(document, cell, needed(document, cell, "memory"), cell.get("unit"))


def read_distances(document: Document, cell: Element) -> tuple[int, ...]:
    """Distances of a <cell> to every cell, by its id; () where it gives none."""
    distances = cell.child("distances")
    stated = {
        decimal(document, e, needed(document, e, "id"), "a cell id"): decimal(
            document, e, needed(document, e, "value"), "a distance"
        )
        for e in (() if distances is None else distances.all("sibling"))
    }
    return tuple(stated[i] for i in sorted(stated))


def edit_cells(document: Document, plan: Plan) -> Document:
    """The plan's cells.

    Mirrored: exactly these. Flat: a document with several cells loses them, one with a single cell
    keeps it, with the new vCPUs and memory, since its guest is flat already. A single cell stays
    as well where something in the document needs one: memory hot-plug or memAccess.
    """
    before = tuple(vcpus for _, vcpus in read_cells(document))
    wanted = plan.cells
    if plan.layout.cells is GuestCells.FLAT:
        if not before:
            return document
        if len(before) > 1 and not _needs_a_cell(document):
            return _without_cells(document)
        everything = CpuSet(range(plan.vcpus))
        distances = () if len(before) > 1 else read_distances(document, cell_elements(document)[0])
        whole = VmCell(id=0, vcpus=everything, memory_bytes=plan.memory_bytes, distances=distances)
        wanted = (whole,)
    document = _with_numa(document)
    document = _fit_count(document, wanted)
    document = apply(document, _cell_edits(document, wanted))
    document = _with_distances(document, wanted)
    if before and before != tuple(cell.vcpus for cell in wanted):
        document = _without_stale_hmat(document)
    return document


def _needs_a_cell(document: Document) -> bool:
    """libvirt: "At least one numa node has to be configured when enabling memory hotplug"."""
    devices = document.root.child("devices")
    return (
        document.root.child("maxMemory") is not None
        or (devices is not None and devices.child("memory") is not None)
        or any(cell.get("memAccess") or cell.get("discard") for cell in cell_elements(document))
    )


def _without_cells(document: Document) -> Document:
    numa = document.root.at("cpu", "numa")
    assert numa is not None, "there are cells"
    document = apply(document, remove(document, numa))
    cpu = document.root.child("cpu")
    assert cpu is not None, "there were cells in it"
    if not cpu.attributes and not cpu.children:
        return apply(document, remove(document, cpu))
    return apply(document, close_up(document, cpu))


def _with_numa(document: Document) -> Document:
    cpu = document.root.child("cpu")
    if cpu is None:
        new = New("cpu", children=(New("numa"),))
        return apply(document, insert_in_order(document, document.root, new, DOMAIN_ORDER))
    if cpu.child("numa") is None:
        return apply(document, insert_in_order(document, cpu, New("numa"), CPU_ORDER))
    return document


def _fit_count(document: Document, wanted: tuple[VmCell, ...]) -> Document:
    """As many <cell> elements as are wanted: surplus ones go, new ones come behind the last."""
    cells = cell_elements(document)
    edits: list[Edit] = []
    for surplus in cells[len(wanted) :]:
        edits += remove(document, surplus)
    # Vhost-user and virtiofs need shared memory in every cell, so new cells follow the first.
    kept = (
        ()
        if not cells
        else tuple(
            (name, value) for name, value in cells[0].attributes if name in ("memAccess", "discard")
        )
    )
    new = tuple(New("cell", (*_new_attributes(cell), *kept)) for cell in wanted[len(cells) :])
    if new and cells:
        edits += insert_after(document, max(cells, key=lambda cell: cell.start), new)
    elif new:
        numa = document.root.at("cpu", "numa")
        assert numa is not None, "_with_numa has made it"
        edits += append(document, numa, new)
    return apply(document, edits)


def _new_attributes(cell: VmCell) -> tuple[tuple[str, str], ...]:
    number, unit = format_size(cell.memory_bytes, ("MiB",))
    cpus = (("cpus", format_set(cell.vcpus)),) if cell.vcpus else ()
    return (("id", str(cell.id)), *cpus, ("memory", number), ("unit", unit))


def _cell_edits(document: Document, wanted: tuple[VmCell, ...]) -> list[Edit]:
    edits: list[Edit] = []
    for (element, vcpus), cell in zip(read_cells(document), wanted, strict=True):
        values: dict[str, str | None] = {}
        if (
            element.get("id") is None
            or decimal(document, element, element.get("id") or "", "id") != cell.id
        ):
            values["id"] = str(cell.id)
        if vcpus != cell.vcpus:
            values["cpus"] = format_set(cell.vcpus) if cell.vcpus else None
        if cell_bytes(document, element) != cell.memory_bytes:
            values["memory"], values["unit"] = format_size(cell.memory_bytes, ("MiB",))
        edits += set_attributes(document, element, values)
    return edits


def _with_distances(document: Document, wanted: tuple[VmCell, ...]) -> Document:
    edits: list[Edit] = []
    for element, cell in zip(cell_elements(document), wanted, strict=True):
        if read_distances(document, element) == cell.distances:
            continue
        for old in element.all("distances"):
            edits += remove(document, old)
    document = apply(document, edits)
    edits = []
    for element, cell in zip(cell_elements(document), wanted, strict=True):
        if element.child("distances") is not None:
            continue
        if cell.distances:
            siblings = tuple(
                New("sibling", (("id", str(other)), ("value", str(distance))))
                for other, distance in enumerate(cell.distances)
            )
            edits += append(document, element, [New("distances", children=siblings)])
        else:
            edits += close_up(document, element)
    return apply(document, edits)


def _without_stale_hmat(document: Document) -> Document:
    """Latencies, bandwidths and side caches spoke of cells that are others now."""
    edits: list[Edit] = []
    numa = document.root.at("cpu", "numa")
    assert numa is not None, "there are cells"
    for element in numa.all("interconnects"):
        edits += remove(document, element)
    for cell in numa.all("cell"):
        for cache in cell.all("cache"):
            edits += remove(document, cache)
    document = apply(document, edits)
    edits = []
    for cell in cell_elements(document):
        edits += close_up(document, cell)
    return apply(document, edits)
