"""Cells: which host nodes the guest cells of a document stand for.

KubeVirt has decided it already: by <memnode>, else by the pins. Nothing here chooses.
"""

from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.domain.cells import cell_bytes, read_cells, read_distances
from homenode.domain.cputune import read_pins
from homenode.domain.document import Document
from homenode.domain.fields import decimal
from homenode.domain.numatune import read_memnodes
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.plan.shape.guest_numa import guest_distances
from homenode.topology import Host
from homenode.vm.model import VmCell


@dataclass(frozen=True, slots=True)
class CellNodes:
    """cell_of_node: the cell that stands for a host node; nodes without one are left out.

    node_of_cell: the one node that a cell stands for, None where that is several or not known.
    """

    cell_of_node: dict[NodeIndex, int]
    node_of_cell: tuple[NodeIndex | None, ...]


def cell_nodes(document: Document, host: Host) -> CellNodes:
    """Cells by node. A cell's <memnode> decides; where several cells name a node, or none does, it
    is the cell with the most vCPUs pinned to the node's PUs, the lowest of equals."""
    cells = [vcpus for _, vcpus in read_cells(document)]
    bound = {
        cell: frozenset(int(node) for node in nodes)
        for cell, (_, nodes) in read_memnodes(document).items()
        if cell < len(cells)
    }
    pins = read_pins(document)
    cell_of_node: dict[NodeIndex, int] = {}
    for node in host.nodes:
        named = [cell for cell in sorted(bound) if node.index in bound[cell]]
        if len(named) == 1:
            cell_of_node[node.index] = named[0]
            continue
        # A cell that is bound to other nodes does not stand for this one, whatever its pins.
        candidates = named or [cell for cell in range(len(cells)) if cell not in bound]
        count = {
            cell: sum(_is_within(pins.get(("vcpupin", vcpu)), node.pus) for vcpu in cells[cell])
            for cell in candidates
        }
        most = max(count.values(), default=0)
        if most or named:
            cell_of_node[node.index] = next(cell for cell in candidates if count[cell] == most)
    own: list[NodeIndex | None] = []
    for cell in range(len(cells)):
        stated = bound.get(cell) or {node for node, of in cell_of_node.items() if of == cell}
        own.append(NodeIndex(next(iter(stated))) if len(stated) == 1 else None)
    return CellNodes(cell_of_node, tuple(own))


def _is_within(pins: CpuSet | None, pus: CpuSet) -> bool:
    return pins is not None and bool(pins) and pins <= pus


def planned_cells(
    document: Document, host: Host, nodes: CellNodes, gaps: list[Gap]
) -> tuple[VmCell, ...]:
    """The cells exactly as the document has them, with the host's distances where it gives none."""
    found = read_cells(document)
    stated = [read_distances(document, element) for element, _ in found]
    known = tuple(node for node in nodes.node_of_cell if node is not None)
    online = {node.index for node in host.nodes}
    if not any(stated) and len(known) == len(found) and set(known) <= online:
        stated = list(guest_distances(host, known, gaps)) or stated
    return tuple(
        VmCell(
            id=i
            if element.get("id") is None
            else decimal(document, element, element.get("id") or "", "a cell id"),
            vcpus=vcpus,
            memory_bytes=cell_bytes(document, element),
            host_nodes=tuple(n for n, cell in nodes.cell_of_node.items() if cell == i),
            distances=stated[i],
        )
        for i, (element, vcpus) in enumerate(found)
    )
