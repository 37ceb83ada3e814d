"""Memory backing: <hugepages> in <memoryBacking>."""

from homenode.cpuset import CpuSet
from homenode.domain.cells import cell_elements
from homenode.domain.document import DOMAIN_ORDER, MEMORY_BACKING_ORDER, Document, Element
from homenode.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_in_order,
    remove,
    set_attributes,
)
from homenode.domain.fields import format_set, format_size, needed, pu_set, size_bytes
from homenode.errors import InputError
from homenode.plan.model import Plan


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
