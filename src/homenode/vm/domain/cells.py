"""Guest cells: <numa> in <cpu>, and the pages that back them: <hugepages> in <memoryBacking>."""

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.vm.domain.document import (
    CPU_ORDER,
    DOMAIN_ORDER,
    MEMORY_BACKING_ORDER,
    Document,
    Element,
)
from homenode.vm.domain.edits import (
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
from homenode.vm.domain.fields import decimal, format_set, format_size, needed, pu_set, size_bytes
from homenode.vm.layout import GuestCells
from homenode.vm.model import VmCell
from homenode.vm.plan_model import Plan


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


def read_page_bytes(document: Document) -> int | None:
    """The page size that backs the memory; 0 = the default huge page; None = ordinary pages.

    Where cells have pages of several sizes this is the largest.
    """
    pages = document.root.at("memoryBacking", "hugepages")
    if pages is None:
        return None
    return max((page_bytes(document, page) for page in pages.all("page")), default=0)


def page_bytes_of_cell(document: Document, cell: int) -> int | None:
    """The page size of a cell: that whose nodeset names it, else that without a nodeset."""
    hugepages = document.root.at("memoryBacking", "hugepages")
    pages = () if hugepages is None else hugepages.all("page")
    if not pages:
        return None if hugepages is None else 0
    for page in pages:
        named = pu_set(document, page, "nodeset")
        if named is not None and cell in named:
            return page_bytes(document, page)
    general = next((page for page in pages if page.get("nodeset") is None), None)
    return None if general is None else page_bytes(document, general)


def page_bytes(document: Document, page: Element) -> int:
    """The size of a <page>."""
    return size_bytes(document, page, needed(document, page, "size"), page.get("unit"))


def edit_memory_backing(document: Document, plan: Plan) -> Document:
    """Huge pages of the plan's size behind every cell; nothing where the plan names none.

    A layout has no switch for pages: with page_bytes None the document's own backing stays, only
    that a <page> whose nodeset names cells that are no more is made to name those that are.
    Raises InputError where cells with pages of several sizes would become one.
    """
    cells = len(cell_elements(document))
    everywhere = format_set(range(cells)) if cells else None
    if plan.page_bytes is None:
        return _with_cells_that_are(document, cells)
    hugepages = document.root.at("memoryBacking", "hugepages")
    pages = () if hugepages is None else hugepages.all("page")
    if hugepages is not None and _says(document, pages, plan.page_bytes, cells):
        return document
    new = () if plan.page_bytes == 0 else (_page(plan.page_bytes, everywhere),)
    if hugepages is not None:
        edits: list[Edit] = []
        for page in pages:
            edits += remove(document, page)
        document = apply(document, edits)
        hugepages = document.root.at("memoryBacking", "hugepages")
        assert hugepages is not None, "only its pages went"
        return apply(document, append(document, hugepages, new))
    backing = document.root.child("memoryBacking")
    element = New("hugepages", children=new)
    if backing is None:
        whole = New("memoryBacking", children=(element,))
        return apply(document, insert_in_order(document, document.root, whole, DOMAIN_ORDER))
    return apply(document, insert_in_order(document, backing, element, MEMORY_BACKING_ORDER))


def _page(size: int, nodeset: str | None) -> New:
    number, unit = format_size(size, ("GiB", "MiB"))
    where = () if nodeset is None else (("nodeset", nodeset),)
    return New("page", (("size", number), ("unit", unit), *where))


def _says(document: Document, pages: tuple[Element, ...], size: int, cells: int) -> bool:
    if size == 0:
        return not pages
    covered = CpuSet()
    for page in pages:
        if page_bytes(document, page) != size:
            return False
        nodeset = pu_set(document, page, "nodeset")
        # Without a nodeset the page is for whatever cells no other page names.
        covered |= CpuSet(range(cells)) if nodeset is None else nodeset
        if nodeset is not None and not cells:
            return False
    return bool(pages) and covered == CpuSet(range(cells))


def _with_cells_that_are(document: Document, cells: int) -> Document:
    hugepages = document.root.at("memoryBacking", "hugepages")
    pages = () if hugepages is None else hugepages.all("page")
    present = CpuSet(range(cells))
    dangling = [
        page
        for page in pages
        if (nodeset := pu_set(document, page, "nodeset")) is not None and not nodeset <= present
    ]
    if not dangling:
        return document
    if len({page_bytes(document, page) for page in pages}) > 1:
        raise InputError(
            f"{document.source}:{dangling[0].line}: expected huge pages of one size for cells "
            f"that change, found several sizes, and cells {dangling[0].get('nodeset')} of which "
            f"{cells} remain",
            hint="choose one size with --page-size",
        )
    edits: list[Edit] = set_attributes(
        document, pages[0], {"nodeset": format_set(range(cells)) if cells else None}
    )
    for page in pages[1:]:
        edits += remove(document, page)
    return apply(document, edits)
