"""Memory of a running VM: on which nodes its pages are, and how large they are."""

from collections.abc import Iterator

from msgspec import Struct

from homenode.catalogue import finding
from homenode.check.verify.live.running_vm import BackendObject, RamArea, RunningVm
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.units import KIB, format_bytes
from homenode.vm.model import MemoryDevice, Vm, VmCell


class MemoryPiece(Struct, frozen=True):
    """Memory that QEMU maps at once: a guest cell's own, or that of a memory device.

    nodes, mode, page_bytes: as VmCell has them. device: libvirt's alias ("dimm0"), None for a
    cell's own.
    """

    cell: int
    memory_bytes: int
    nodes: CpuSet
    mode: str | None
    page_bytes: int | None
    device: str | None = None


def memory_pieces(vm: Vm) -> tuple[MemoryPiece, ...]:
    """The pieces of a VM's memory: of its cells, or of all where it has none, then of devices.

    Only a running domain's document has the aliases that QEMU's backends are named by.
    """

    def piece(one: VmCell | MemoryDevice, cell: int, size: int, alias: str | None) -> MemoryPiece:
        return MemoryPiece(cell, size, one.nodes, one.mode, one.page_bytes, alias)

    cells = [
        piece(cell, cell.id, cell.memory_bytes, None)
        for cell in vm.cells_or_whole
        if cell.memory_bytes
    ]
    devices = [
        piece(device, device.cell, device.size_bytes, device.alias)
        for device in vm.memory_devices
        if device.is_host_memory and device.alias is not None
    ]
    return (*cells, *devices)


class CellMemory(Struct, frozen=True):
    """A piece with the mapping that is its memory; area None where none of its size was left."""

    piece: MemoryPiece
    backend: BackendObject | None
    area: RamArea | None


def cell_memory(expected: Vm, vm: RunningVm) -> tuple[CellMemory, ...]:
    """The mapping of each piece.

    A file gives its cell by name. Anonymous memory is known by its size and by the nodes that QEMU
    was asked to bind it to; cells that agree in both share those mappings in any order, which
    makes no difference to what is asked of them.
    """
    left = list(vm.areas)
    matched = []
    pieces = memory_pieces(expected)
    alone = sum(piece.device is None for piece in pieces) == 1
    for piece in pieces:
        backend = _backend(vm, piece, alone=alone)
        size = piece.memory_bytes if backend is None else backend.size_bytes
        nodes = CpuSet() if backend is None else backend.host_nodes
        candidates = sorted(
            (area for area in left if 0 <= area.size_bytes - size < max(area.page_bytes, 64 * KIB)),
            key=lambda area: (
                not _named(area, backend),
                area.policy_nodes != nodes,
                -sum(pages for _, pages in area.pages_by_node),
            ),
        )
        area = candidates[0] if candidates else None
        if area is not None:
            left.remove(area)
        matched.append(CellMemory(piece, backend, area))
    return tuple(matched)


def memory_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Cell by cell: binding, pages, page size; then what was swapped out."""
    if vm.areas:
        for memory in cell_memory(expected, vm):
            yield from _binding(memory, vm)
            yield from _pages(memory, vm)
            yield from _page_size(memory, vm)
    if vm.swapped_bytes:
        yield finding(
            "live-swapped",
            vm.name,
            expected="no memory swapped out",
            observed=f"{format_bytes(vm.swapped_bytes)} swapped out",
            source=f"/proc/{vm.process}/status",
        )


def _backend(vm: RunningVm, piece: MemoryPiece, *, alone: bool) -> BackendObject | None:
    # libvirt's names. Source: qemuBuildMemoryCellBackendStr and qemuBuildMemoryDimmBackendStr.
    name = f"ram-node{piece.cell}" if piece.device is None else f"mem{piece.device}"
    named = next((b for b in vm.backends if b.name == name), None)
    if named is None and alone and piece.device is None:
        return next((b for b in vm.backends if b.name.endswith(".ram")), None)
    return named


def _named(area: RamArea, backend: BackendObject | None) -> bool:
    if area.file is None or backend is None:
        return False
    name = area.file.rpartition("/")[2]
    return name.startswith((f"qemu_back_mem._objects_{backend.name}.", f"{backend.name}."))


def _binding(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    piece, backend = memory.piece, memory.backend
    if not piece.nodes or backend is None or not backend.host_nodes:
        return  # bound for the whole process, if at all: its pages show it
    if backend.host_nodes != piece.nodes:
        yield finding(
            "live-binding",
            memory_subject(piece),
            expected=f"bound to node {piece.nodes}",
            observed=f"bound to node {backend.host_nodes}",
            source=f"/proc/{vm.process}/cmdline",
        )


def _pages(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    piece, area, source = memory.piece, memory.area, f"/proc/{vm.process}/numa_maps"
    if not piece.nodes:
        return
    if area is None:
        yield finding(
            "live-memory-unknown",
            memory_subject(piece),
            expected=f"a mapping of {format_bytes(piece.memory_bytes)} on node {piece.nodes}",
            observed="no mapping of that size",
            source=source,
        )
        return
    here = sum(pages for node, pages in area.pages_by_node if node in piece.nodes)
    away = tuple((node, pages) for node, pages in area.pages_by_node if node not in piece.nodes)
    if away:
        strays = sum(pages for _, pages in away)
        strict = piece.mode not in ("preferred", "interleave")
        yield finding(
            "live-memory",
            memory_subject(piece),
            expected=f"every page on node {piece.nodes}",
            observed=stated_pages(area),
            severity=Severity.CRITICAL if strict else Severity.WARNING,
            values={"share": f"{100 * strays / (here + strays):.0f}"},
            source=source,
        )
    elif not here:
        yield finding(
            "live-memory-untouched",
            memory_subject(piece),
            expected=f"pages on node {piece.nodes}",
            observed=f"bound to node {area.policy_nodes or 'any'}, and nothing has touched it yet",
            source=source,
        )


def _page_size(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    piece, area = memory.piece, memory.area
    wanted = vm.default_huge_bytes if piece.page_bytes == 0 else piece.page_bytes
    if area is None or wanted is None or area.page_bytes == wanted:
        return
    yield finding(
        "live-page-size",
        memory_subject(piece),
        expected=f"pages of {format_bytes(wanted)}",
        observed=f"pages of {format_bytes(area.page_bytes)}",
        source=f"/proc/{vm.process}/numa_maps",
    )


def stated_pages(area: RamArea) -> str:
    """Where the pages are, in words: "256 MiB on node 1 and 4 KiB on node 0"."""
    parts = [
        f"{format_bytes(pages * area.page_bytes)} on node {node}"
        for node, pages in sorted(area.pages_by_node, key=lambda pair: -pair[1])
    ]
    return " and ".join(parts) or "nothing touched yet"


def memory_subject(piece: MemoryPiece) -> str:
    """What to call it: "memory of cell 1" or "memory device dimm0 (cell 1)"."""
    if piece.device is None:
        return f"memory of cell {piece.cell}"
    return f"memory device {piece.device} (cell {piece.cell})"
