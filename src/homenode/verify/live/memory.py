"""Memory of a running VM: on which nodes its pages are, and how large they are."""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.units import KIB, format_bytes
from homenode.verify.live.expectation import LiveCell, LiveExpectation
from homenode.verify.live.running_vm import BackendObject, RamArea, RunningVm

_MOVE = "memory does not follow a changed pin: shut the VM down and start it, or migratepages(8)"


@dataclass(frozen=True, slots=True)
class CellMemory:
    """A cell with the mapping that is its memory; area None where none of its size was left."""

    cell: LiveCell
    backend: BackendObject | None
    area: RamArea | None


def cell_memory(expected: LiveExpectation, vm: RunningVm) -> tuple[CellMemory, ...]:
    """The mapping of each cell.

    A file gives its cell by name. Anonymous memory is known by its size and by the nodes that QEMU
    was asked to bind it to; cells that agree in both share those mappings in any order, which
    makes no difference to what is asked of them.
    """
    left = list(vm.areas)
    matched = []
    alone = sum(cell.device is None for cell in expected.cells) == 1
    for cell in expected.cells:
        backend = _backend(vm, cell, alone=alone)
        size = cell.memory_bytes if backend is None else backend.size_bytes
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
        matched.append(CellMemory(cell, backend, area))
    return tuple(matched)


def memory_findings(expected: LiveExpectation, vm: RunningVm) -> Iterator[Finding]:
    """Cell by cell: binding, pages, page size; then what was swapped out."""
    if vm.areas:
        for memory in cell_memory(expected, vm):
            yield from _binding(memory, vm)
            yield from _pages(memory, vm)
            yield from _page_size(memory, vm)
    if vm.swapped_bytes:
        yield Finding(
            id="live-swapped",
            severity=Severity.WARNING,
            subject=vm.name,
            expected="no memory swapped out",
            observed=f"{format_bytes(vm.swapped_bytes)} swapped out",
            cost="a vCPU that touches it waits for the disk",
            fix="<memoryBacking><locked/></memoryBacking>, huge pages, or fewer VMs",
            source=f"/proc/{vm.process}/status",
        )


def _backend(vm: RunningVm, cell: LiveCell, *, alone: bool) -> BackendObject | None:
    # libvirt's names. Source: qemuBuildMemoryCellBackendStr and qemuBuildMemoryDimmBackendStr.
    name = f"ram-node{cell.id}" if cell.device is None else f"mem{cell.device}"
    named = next((b for b in vm.backends if b.name == name), None)
    if named is None and alone and cell.device is None:
        return next((b for b in vm.backends if b.name.endswith(".ram")), None)
    return named


def _named(area: RamArea, backend: BackendObject | None) -> bool:
    if area.file is None or backend is None:
        return False
    name = area.file.rpartition("/")[2]
    return name.startswith((f"qemu_back_mem._objects_{backend.name}.", f"{backend.name}."))


def _binding(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    cell, backend = memory.cell, memory.backend
    if not cell.nodes or backend is None or not backend.host_nodes:
        return  # bound for the whole process, if at all: its pages show it
    if backend.host_nodes != cell.nodes:
        yield Finding(
            id="live-binding",
            severity=Severity.CRITICAL,
            subject=memory_subject(cell),
            expected=f"bound to node {cell.nodes}",
            observed=f"bound to node {backend.host_nodes}",
            cost="its vCPUs take the far node's memory for theirs",
            fix="the running VM is of another definition: shut it down and start it",
            source=f"/proc/{vm.process}/cmdline",
        )


def _pages(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    cell, area, source = memory.cell, memory.area, f"/proc/{vm.process}/numa_maps"
    if not cell.nodes:
        return
    if area is None:
        yield Finding(
            id="live-memory-unknown",
            severity=Severity.INCONCLUSIVE,
            subject=memory_subject(cell),
            expected=f"a mapping of {format_bytes(cell.memory_bytes)} on node {cell.nodes}",
            observed="no mapping of that size",
            fix="virsh dommemstat, numastat -p",
            source=source,
        )
        return
    here = sum(pages for node, pages in area.pages_by_node if node in cell.nodes)
    away = tuple((node, pages) for node, pages in area.pages_by_node if node not in cell.nodes)
    if away:
        strays = sum(pages for _, pages in away)
        strict = cell.mode not in ("preferred", "interleave")
        yield Finding(
            id="live-memory",
            severity=Severity.CRITICAL if strict else Severity.WARNING,
            subject=memory_subject(cell),
            expected=f"every page on node {cell.nodes}",
            observed=stated_pages(area),
            cost=f"{100 * strays / (here + strays):.0f} % of it is read through the link "
            "between nodes",
            fix=_MOVE,
            source=source,
        )
    elif not here:
        yield Finding(
            id="live-memory-untouched",
            severity=Severity.INFO,
            subject=memory_subject(cell),
            expected=f"pages on node {cell.nodes}",
            observed=f"bound to node {area.policy_nodes or 'any'}, and nothing has touched it yet",
            fix="<memoryBacking><allocation mode='immediate'/> or huge pages take it at the start",
            source=source,
        )


def _page_size(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    cell, area = memory.cell, memory.area
    wanted = vm.default_huge_bytes if cell.page_bytes == 0 else cell.page_bytes
    if area is None or wanted is None or area.page_bytes == wanted:
        return
    yield Finding(
        id="live-page-size",
        severity=Severity.WARNING,
        subject=memory_subject(cell),
        expected=f"pages of {format_bytes(wanted)}",
        observed=f"pages of {format_bytes(area.page_bytes)}",
        cost="more address translations in the IOMMU and in the CPUs",
        fix="reserve the pages on that node and start the VM again",
        source=f"/proc/{vm.process}/numa_maps",
    )


def stated_pages(area: RamArea) -> str:
    """Where the pages are, in words: "256 MiB on node 1 and 4 KiB on node 0"."""
    parts = [
        f"{format_bytes(pages * area.page_bytes)} on node {node}"
        for node, pages in sorted(area.pages_by_node, key=lambda pair: -pair[1])
    ]
    return " and ".join(parts) or "nothing touched yet"


def memory_subject(cell: LiveCell) -> str:
    """What to call it: "memory of cell 1" or "memory device dimm0 (cell 1)"."""
    if cell.device is None:
        return f"memory of cell {cell.id}"
    return f"memory device {cell.device} (cell {cell.id})"
