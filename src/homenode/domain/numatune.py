"""NUMA tuning: <memory> and <memnode> in <numatune>."""

from functools import reduce

from homenode.cpuset import CpuSet
from homenode.domain.cells import cell_elements
from homenode.domain.document import DOMAIN_ORDER, Document, Element
from homenode.domain.edits import (
    Edit,
    New,
    append,
    apply,
    insert_before,
    insert_in_order,
    is_bare,
    remove,
    set_attributes,
)
from homenode.domain.fields import decimal, format_set, needed, pu_set
from homenode.domain.metadata import read_record
from homenode.plan.model import Plan
from homenode.vm.layout import MemoryBinding


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
