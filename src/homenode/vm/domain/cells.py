"""Guest cells: <numa> in <cpu>, and the pages that back them: <hugepages> in <memoryBacking>."""

from operator import itemgetter

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.vm.domain.document import (
    Document,
    Element,
    format_set,
    format_size,
    number,
    parse_decimal,
    pu_set,
    require_attribute,
    size_bytes,
)
from homenode.vm.domain.edits import (
    Edit,
    NewElement,
    append,
    apply,
    close_up,
    insert_after,
    insert_at,
    prune,
    remove,
    remove_all,
    set_attributes,
)
from homenode.vm.layout import GuestCells
from homenode.vm.model import VmCell, complete_distances
from homenode.vm.plan import Plan


def cell_elements(document: Document) -> tuple[Element, ...]:
    """Return the guest's <cell> elements by id. Raises ParseError, like libvirt, unless ids are
    unique and consecutive from 0."""
    cells = enumerate(document.root.all("cpu/numa/cell"))
    numbered_cells = [
        (i if (text := cell.get("id")) is None else parse_decimal(cell, text, "id"), cell)
        for i, cell in cells
    ]
    ordered_cells = sorted(numbered_cells, key=itemgetter(0))
    for i, (cell_id, cell) in enumerate(ordered_cells):
        if cell_id != i:
            expected = f"cell ids from 0 to {len(ordered_cells) - 1}, each once"
            raise ParseError(cell.source, expected, str(cell_id), line=cell.line)
    return tuple(cell for _, cell in ordered_cells)


def read_cells(document: Document) -> tuple[tuple[Element, CpuSet], ...]:
    """Return each guest cell with its vCPUs, in cell order."""
    return tuple((cell, pu_set(cell, "cpus") or CpuSet()) for cell in cell_elements(document))


def read_cell_bytes(cell: Element) -> int:
    return size_bytes(cell, require_attribute(cell, "memory"), cell.get("unit"))


def cells_bytes(document: Document) -> int:
    return sum(map(read_cell_bytes, cell_elements(document)))


def read_distances(document: Document) -> tuple[tuple[int, ...], ...]:
    """Return the distances between cells, [from][to]; () for each if no cell has distances."""
    cells = cell_elements(document)
    given_distances = {
        (i, number(e, "id", "a cell id")): number(e, "value", "a distance")
        for i, cell in enumerate(cells)
        for e in cell.all("distances/sibling")
    }
    return complete_distances(given_distances, len(cells))


def edit_cells(document: Document, plan: Plan) -> Document:
    """Write the plan's cells. A flat layout removes several cells. It keeps a single cell, with the
    new vCPUs and memory, or one that memory hot-plug or memAccess needs."""
    before = tuple(vcpus for _, vcpus in read_cells(document))
    planned_cells = plan.cells
    if plan.layout.cells is GuestCells.SINGLE:
        if not before:
            return document
        numa = document.root.find("cpu/numa")
        assert numa is not None, "there are cells"
        if len(before) > 1 and not _needs_a_cell(document):
            return prune(document, numa)
        everything = CpuSet(range(plan.vm.vcpus))
        distances = () if len(before) > 1 else read_distances(document)[0]
        single = VmCell(
            id=0, vcpus=everything, memory_bytes=plan.vm.memory_bytes, distances=distances
        )
        planned_cells = (single,)
    if document.root.find("cpu/numa") is None:
        document = insert_at(document, "cpu", NewElement("numa"))
    document = _fit_count(document, planned_cells)
    document = apply(document, _list_cell_edits(document, planned_cells))
    document = _edit_distances(document, planned_cells)
    if before and before != tuple(cell.vcpus for cell in planned_cells):
        document = _remove_stale_hmat(document)
    return document


def _needs_a_cell(document: Document) -> bool:
    """libvirt: "At least one numa node has to be configured when enabling memory hotplug"."""
    return (
        document.root.child("maxMemory") is not None
        or document.root.find("devices/memory") is not None
        or any(cell.get("memAccess") or cell.get("discard") for cell in cell_elements(document))
    )


def _fit_count(document: Document, planned: tuple[VmCell, ...]) -> Document:
    """Remove surplus <cell> elements, or add new ones behind the last."""
    cells = cell_elements(document)
    edits = [edit for surplus in cells[len(planned) :] for edit in remove(document, surplus)]
    # Vhost-user and virtiofs need shared memory in every cell, so new cells follow the first.
    sharing = {
        name: value
        for name, value in (cells[0].attributes if cells else ())
        if name in ("memAccess", "discard")
    }
    new = [
        NewElement("cell", {**_list_attributes(cell), **sharing}) for cell in planned[len(cells) :]
    ]
    if new and cells:
        edits += insert_after(document, document.root.all("cpu/numa/cell")[-1], new)
    elif new:
        numa = document.root.find("cpu/numa")
        assert numa is not None, "edit_cells has made it"
        edits += append(document, numa, new)
    return apply(document, edits)


def _list_attributes(cell: VmCell) -> dict[str, str | None]:
    size, unit = format_size(cell.memory_bytes, ("MiB",))
    cpus = format_set(cell.vcpus) if cell.vcpus else None
    return {"id": str(cell.id), "cpus": cpus, "memory": size, "unit": unit}


def _list_cell_edits(document: Document, planned_cells: tuple[VmCell, ...]) -> list[Edit]:
    edits: list[Edit] = []
    for (element, vcpus), cell in zip(read_cells(document), planned_cells, strict=True):
        values = _list_attributes(cell)
        if element.get("id") is not None:  # equal, as read_cells orders them by it
            del values["id"]
        if vcpus == cell.vcpus:
            del values["cpus"]
        if read_cell_bytes(element) == cell.memory_bytes:
            del values["memory"], values["unit"]
        edits += set_attributes(document, element, values)
    return edits


def _edit_distances(document: Document, planned_cells: tuple[VmCell, ...]) -> Document:
    present = zip(cell_elements(document), read_distances(document), planned_cells, strict=True)
    stale = [
        old
        for element, distances, cell in present
        if distances != cell.distances or names_missing_cells(element, len(planned_cells))
        for old in element.all("distances")
    ]
    document = remove_all(document, stale)
    edits: list[Edit] = []
    for element, cell in zip(cell_elements(document), planned_cells, strict=True):
        if element.child("distances") is not None:
            continue
        if cell.distances:
            siblings = tuple(
                NewElement("sibling", {"id": str(other), "value": str(distance)})
                for other, distance in enumerate(cell.distances)
            )
            edits += append(document, element, [NewElement("distances", children=siblings)])
        else:
            edits += close_up(document, element)
    return apply(document, edits)


def names_missing_cells(cell: Element, cells: int) -> bool:
    """Return whether a cell has a distance to a cell beyond these."""
    return any(number(e, "id", "a cell id") >= cells for e in cell.all("distances/sibling"))


def _remove_stale_hmat(document: Document) -> Document:
    """Remove latencies, bandwidths and side caches, which refer to the earlier cells."""
    cells = document.root.all("cpu/numa/cell")
    stale = [
        *document.root.all("cpu/numa/interconnects"),
        *(c for e in cells for c in e.all("cache")),
    ]
    document = remove_all(document, stale)
    return apply(
        document, [edit for cell in cell_elements(document) for edit in close_up(document, cell)]
    )


def _find_pages(document: Document) -> tuple[Element, ...]:
    return document.root.all("memoryBacking/hugepages/page")


def read_page_bytes(document: Document) -> int | None:
    """Return the page size of the memory; 0 = the default huge page; None = ordinary pages. If
    cells have several page sizes, this is the largest."""
    if document.root.find("memoryBacking/hugepages") is None:
        return None
    return max(map(page_bytes, _find_pages(document)), default=0)


def page_bytes_of_cell(document: Document, cell: int) -> int | None:
    """Return a cell's page size: of the <page> with it in its nodeset, else without a nodeset."""
    pages = _find_pages(document)
    if not pages:
        return read_page_bytes(document)
    for page in pages:
        if cell in (pu_set(page, "nodeset") or ()):
            return page_bytes(page)
    general = next((page for page in pages if page.get("nodeset") is None), None)
    return None if general is None else page_bytes(general)


def page_bytes(page: Element) -> int:
    return size_bytes(page, require_attribute(page, "size"), page.get("unit"))


def edit_memory_backing(document: Document, plan: Plan) -> Document:
    """Back every cell with huge pages of the plan's size.

    Without a size the document's backing stays; only a <page> for cells that are gone is moved to
    those that exist. Raises InputError if cells with pages of several sizes would become one.
    """
    cells = len(cell_elements(document))
    if plan.vm.page_bytes is None:
        return _limit_cells(document, cells)
    hugepages = document.root.find("memoryBacking/hugepages")
    pages = _find_pages(document)
    if hugepages is not None and _pages_match(pages, plan.vm.page_bytes, cells):
        return document
    size, unit = format_size(plan.vm.page_bytes, ("GiB", "MiB"))
    of_cells = {"size": size, "unit": unit, "nodeset": format_set(range(cells)) if cells else None}
    new = (NewElement("page", of_cells),) if plan.vm.page_bytes else ()
    if hugepages is None:
        return insert_at(document, "memoryBacking", NewElement("hugepages", children=new))
    document = remove_all(document, pages)
    hugepages = document.root.find("memoryBacking/hugepages")
    assert hugepages is not None, "only its pages went"
    return apply(document, append(document, hugepages, new))


def _pages_match(pages: tuple[Element, ...], size: int, cells: int) -> bool:
    if size == 0:
        return not pages
    covered_cells = CpuSet()
    for page in pages:
        if page_bytes(page) != size:
            return False
        nodeset = pu_set(page, "nodeset")
        # Without a nodeset the page is for whatever cells no other page names.
        covered_cells |= CpuSet(range(cells)) if nodeset is None else nodeset
    return bool(pages) and covered_cells == CpuSet(range(cells))


def _limit_cells(document: Document, cells: int) -> Document:
    pages = _find_pages(document)
    present = CpuSet(range(cells))
    dangling = [page for page in pages if not (pu_set(page, "nodeset") or CpuSet()) <= present]
    if not dangling:
        return document
    if len(set(map(page_bytes, pages))) > 1:
        raise InputError(
            f"{document.source}:{dangling[0].line}: expected huge pages of one size for cells "
            f"that change, found several sizes for cells {dangling[0].get('nodeset')}, of which "
            f"{cells} remain",
            hint="choose one size with --page-size",
        )
    nodeset = format_set(range(cells)) if cells else None
    edits = set_attributes(document, pages[0], {"nodeset": nodeset})
    return apply(document, edits + [edit for page in pages[1:] for edit in remove(document, page)])
