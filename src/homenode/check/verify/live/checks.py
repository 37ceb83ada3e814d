"""Checks of a running VM, as the host's kernel shows it, against what it was planned to be: whether
each thread may run where it was planned, and only there, and what else runs on its cores.
"""

from collections.abc import Iterator

from msgspec import Struct

from homenode.catalogue import finding
from homenode.check.verify.live.procfs import (
    BackendObject,
    RamArea,
    RunningVm,
    ThreadKind,
)
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.indices import NodeIndex
from homenode.units import KIB, format_bytes
from homenode.vm.model import MemoryDevice, Vm, VmCell
from homenode.wording import command_line

_KVMS_OWN = "kvm-nx-lpage-re"
"""A thread that Linux 6.13 and newer start in the VM's process, on the PUs of whichever vCPU ran
first; it wakes up once an hour and no one can pin it for good."""


_PINNED = {
    ThreadKind.VCPU: ("live-vcpu", "vCPU", "vcpupin"),
    ThreadKind.IOTHREAD: ("live-iothread", "IOThread", "iothreadpin"),
}
"""Threads that are pinned one by one: id of the finding, word, virsh's command."""


def thread_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """vCPUs, then IOThreads, then everything else that QEMU runs."""
    if any(thread.kind is ThreadKind.ALL_VCPUS for thread in vm.threads):
        if expected.is_pinned:
            yield _inconclusive(vm, "one thread runs them all (TCG, thread=single)", None)
    else:
        yield from _vcpus(expected, vm)
    for number, pus in expected.iothread_pins:
        yield from _pinned(expected, vm, ThreadKind.IOTHREAD, number, pus)
    if expected.emulator_pus is None:
        return
    apart = expected.emulator_pus
    strays: dict[str, list[CpuSet]] = {}
    for thread in vm.threads:
        is_qemus = thread.kind is ThreadKind.EMULATOR and thread.name != _KVMS_OWN
        if is_qemus and not thread.allowed <= apart:
            strays.setdefault(thread.name, []).append(thread.allowed)
    for name, sets in strays.items():
        fix = command_line("virsh", "emulatorpin", vm.uuid, str(apart))
        where = CpuSet.union(sets)
        yield _stray("live-emulator", f"emulator thread {name!r}", where, apart, fix, expected)


def _vcpus(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    found = vm.threads_of(ThreadKind.VCPU)
    if not found and expected.is_pinned:
        why = "no thread is named CPU N/KVM (debug-threads=off?) and no cgroup distinguishes them"
        yield _inconclusive(vm, why, "start it through libvirt")
        return
    for number, pin in enumerate(expected.vcpu_pins):
        if pin is not None and not (number not in found and number in expected.offline_vcpus):
            yield from _pinned(expected, vm, ThreadKind.VCPU, number, pin)
    pins = len(expected.vcpu_pins)
    more = CpuSet(n for n in found if n is not None and n >= pins)
    if more:
        there = f"vCPUs {more} as well"
        yield finding("live-vcpus", vm.name, f"{pins} vCPUs", there, expected.source)


def _pinned(
    expected: Vm, vm: RunningVm, kind: ThreadKind, number: int, pus: CpuSet
) -> Iterator[Finding]:
    name, word, command = _PINNED[kind]
    thread, subject = vm.threads_of(kind).get(number), f"{word} {number}"
    if thread is None:
        wanted = f"a thread on PUs {pus}"
        yield finding(f"{name}-missing", subject, wanted, "no such thread", expected.source)
    elif not thread.allowed <= pus:
        fix = command_line("virsh", command, vm.uuid, str(number), str(pus))
        yield _stray(name, subject, thread.allowed, pus, fix, expected)


def _stray(id: str, subject: str, allowed: CpuSet, pus: CpuSet, fix: str, expected: Vm) -> Finding:
    return finding(
        id,
        subject,
        expected=f"PUs {pus}",
        observed=f"PUs {allowed or 'none'}",
        fix=f"{fix} (homenode apply --live-pins does all of them)",
        source=expected.source,
    )


def _inconclusive(vm: RunningVm, why: str, fix: str | None) -> Finding:
    return finding(
        "live-threads",
        "vCPUs",
        expected="a thread for each, where it is pinned",
        observed=why,
        fix=fix,
        source=f"/proc/{vm.process}/task",
    )


_WORDS = {
    ThreadKind.IOTHREAD: "IOThread",
    ThreadKind.EMULATOR: "emulator",
    ThreadKind.ALL_VCPUS: "vCPUs",
}
_YIELDING = {3: "SCHED_BATCH", 5: "SCHED_IDLE"}
"""Policies that let other programs go first. Source: include/uapi/linux/sched.h."""


def limit_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Threads that get less than the time of their PUs: by the quota of a cgroup of their own or of
    the VM's, whoever set it, or by a scheduler that lets others go first."""
    seen: set[str] = set()
    for one in vm.limits:
        word = _WORDS.get(one.kind, "vCPU")
        subject = f"{word} {one.number}" if one.number is not None else word
        policy = _YIELDING.get(one.policy) or (f"nice {one.nice} more" if one.nice > 0 else None)
        if policy is not None:
            wanted = "a scheduler that gives it its turn"
            yield finding("live-scheduler", subject, wanted, policy, vm.name)
        for folder, share in one.quotas:
            own = folder.rpartition("/")[2].startswith(("vcpu", "iothread", "emulator"))
            if folder in seen or share >= (1 if own else expected.vcpus):
                continue
            seen.add(folder)
            yield finding(
                "live-quota",
                subject if own else vm.name,
                expected=f"all time of {'a PU' if own else f'{expected.vcpus} PUs'}",
                observed=f"{share:.0%} of a PU, by cgroup {folder}",
                source=vm.name,
            )


BUSY_RATIO = 0.1
"""Of one PU's time, over which an unpinned process on the VM's PUs is worth a finding: below, it is
a daemon that woke up."""


def interrupt_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Devices whose interrupts other nodes serve. One finding for each device."""
    node_of = dict(vm.node_of_device) | {
        one.bdf: NodeIndex(one.host_node) for one in expected.hostdevs if one.host_node is not None
    }
    for bdf in sorted({one.bdf for one in expected.hostdevs}):
        node = node_of.get(bdf)
        if node is None:
            continue
        near = vm.host.pus_of_node(node) & vm.host.online
        far = [
            interrupt
            for interrupt in vm.interrupts
            if interrupt.device == bdf
            and near
            and (pus := interrupt.effective or interrupt.allowed)
            and pus.isdisjoint(near)
        ]
        if not far:
            continue
        served = sorted({str(i.effective or i.allowed) for i in far})
        yield finding(
            "live-interrupts",
            f"interrupts of {bdf}",
            expected=f"served on node {node} (PUs {near})",
            observed=f"{len(far)} of {sum(i.device == bdf for i in vm.interrupts)} served by PUs "
            f"{' '.join(served[:4])}{' ...' if len(served) > 4 else ''}",
            values={"pus": near, "irq": far[0].irq},
            source="/proc/interrupts",
        )


def neighbour_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Other VMs and processes on the cores of the VM's vCPUs.

    On most hosts every process may run everywhere: that alone is no finding. One that may run
    nowhere else is, and so are another VM's vCPUs, and whatever keeps a PU of the VM busy.
    """
    own = expected.pinned_pus
    cores = vm.host.cores_of(own)
    for other in vm.neighbours:
        meeting = other.allowed & cores
        if not meeting:
            continue
        what = f"domain {other.domain!r}" if other.domain else f"{other.name!r}"
        subject = f"{what} (process {other.process})"
        busy = other.busy_ratio >= BUSY_RATIO
        load = f", busy {100 * other.busy_ratio:.0f} % of a PU there" if busy else ""
        name, values = "live-busy-neighbour", None
        if other.is_vcpu and not other.floats:
            name, wanted = "live-shared-core", "no vCPU on the VM's cores"
            there = f"{other.threads} vCPUs on PUs {meeting}{load}"
        elif other.is_vcpu:
            name, wanted = "live-floating-vm", "vCPUs pinned apart from this VM's"
            there = f"{other.threads} vCPUs that may run anywhere, on PUs {meeting} too{load}"
        elif other.allowed <= cores and not other.floats:
            name, wanted = "live-pinned-there", "nothing else bound to the VM's cores"
            there = f"{other.threads} threads that may run on PUs {other.allowed} only{load}"
            values = {"process": other.process}
        elif busy:
            wanted = "the VM's PUs to itself"
            there = f"{100 * other.busy_ratio:.0f} % of a PU over {vm.watched_s:g} s"
        else:
            continue
        yield finding(name, subject, wanted, there, "/proc", values=values)


def verify_live(expected: Vm, vm: RunningVm) -> Findings:
    """Everything about a running VM that is not where it should be, the worst first.

    What could not be read is a finding of its own, inconclusive.
    """
    found = [
        *thread_findings(expected, vm),
        *memory_findings(expected, vm),
        *interrupt_findings(expected, vm),
        *limit_findings(expected, vm),
        *neighbour_findings(expected, vm),
        *(
            finding("live-unread", gap.subject, "something to judge by", gap.reason, vm.name)
            for gap in vm.gaps
        ),
    ]
    return Findings(checked=_checked(expected, vm), findings=in_order(found))


def _checked(expected: Vm, vm: RunningVm) -> tuple[str, ...]:
    pinned = sum(pin is not None for pin in expected.vcpu_pins)
    count = sum(thread.kind is ThreadKind.VCPU for thread in vm.threads)
    others = sum(thread.kind is ThreadKind.EMULATOR for thread in vm.threads)
    lines = [
        f"process {vm.process} of {vm.name} against {expected.source}",
        f"{count} vCPU threads, {pinned} of them to be pinned; {others} emulator threads; "
        f"{len(expected.iothread_pins)} pinned IOThreads",
    ]
    for memory in cell_memory(expected, vm):
        where = "not bound" if not memory.piece.nodes else f"node {memory.piece.nodes}"
        pages = "not found" if memory.area is None else stated_pages(memory.area)
        lines.append(f"{memory.piece.subject} ({where}): {pages}")
    lines.append(
        f"{len(vm.interrupts)} interrupts of passed-through devices; other processes on PUs "
        f"{vm.host.cores_of(expected.pinned_pus) or 'none'}, watched for {vm.watched_s:g} s"
    )
    return tuple(lines)


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

    @property
    def subject(self) -> str:
        """What to call it: "memory of cell 1" or "memory device dimm0 (cell 1)"."""
        if self.device is None:
            return f"memory of cell {self.cell}"
        return f"memory device {self.device} (cell {self.cell})"


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
            (area for area in left if _holds(area, size)),
            key=lambda area: (
                not _named(area, backend),
                area.policy.nodes != nodes,
                -sum(pages for _, pages in area.policy.pages_by_node),
            ),
        )
        area = candidates[0] if candidates else None
        if area is not None:
            left.remove(area)
        matched.append(CellMemory(piece, backend, area))
    return tuple(matched)


def _holds(area: RamArea, memory_bytes: int) -> bool:
    return 0 <= area.size_bytes - memory_bytes < max(area.policy.page_bytes, 64 * KIB)


def memory_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Cell by cell: binding, pages, page size; then what was swapped out."""
    if vm.areas:
        for memory in cell_memory(expected, vm):
            yield from _of_piece(memory, vm)
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
    if area.policy.file is None or backend is None:
        return False
    name = area.policy.file.rpartition("/")[2]
    return name.startswith((f"qemu_back_mem._objects_{backend.name}.", f"{backend.name}."))


def _of_piece(memory: CellMemory, vm: RunningVm) -> Iterator[Finding]:
    piece, backend, area = memory.piece, memory.backend, memory.area
    subject, process = piece.subject, f"/proc/{vm.process}"
    # Without nodes of its own it is bound for the whole process, if at all: its pages show it.
    nodes = CpuSet() if backend is None else backend.host_nodes
    if piece.nodes and nodes and nodes != piece.nodes:
        wanted, there = f"bound to node {piece.nodes}", f"bound to node {nodes}"
        yield finding("live-binding", subject, wanted, there, f"{process}/cmdline")
    source = f"{process}/numa_maps"
    if piece.nodes and area is None:
        wanted = f"a mapping of {format_bytes(piece.memory_bytes)} on node {piece.nodes}"
        yield finding("live-memory-unknown", subject, wanted, "no mapping of that size", source)
    elif area is not None:
        yield from _pages(piece, area, source)
    size = vm.default_huge_bytes if piece.page_bytes == 0 else piece.page_bytes
    found = None if area is None else area.policy.page_bytes
    if found is not None and size is not None and found != size:
        wanted, there = f"pages of {format_bytes(size)}", f"pages of {format_bytes(found)}"
        yield finding("live-page-size", subject, wanted, there, source)


def _pages(piece: MemoryPiece, area: RamArea, source: str) -> Iterator[Finding]:
    if not piece.nodes:
        return
    here = sum(pages for node, pages in area.policy.pages_by_node if node in piece.nodes)
    away = sum(pages for node, pages in area.policy.pages_by_node) - here
    if away:
        strict = piece.mode not in ("preferred", "interleave")
        yield finding(
            "live-memory",
            piece.subject,
            expected=f"every page on node {piece.nodes}",
            observed=stated_pages(area),
            severity=None if strict else Severity.WARNING,
            values={"share": f"{100 * away / (here + away):.0f}"},
            source=source,
        )
    elif not here:
        yield finding(
            "live-memory-untouched",
            piece.subject,
            expected=f"pages on node {piece.nodes}",
            observed=f"bound to node {area.policy.nodes or 'any'}, and nothing has touched it yet",
            source=source,
        )


def stated_pages(area: RamArea) -> str:
    """Where the pages are, in words: "256 MiB on node 1 and 4 KiB on node 0"."""
    parts = [
        f"{format_bytes(pages * area.policy.page_bytes)} on node {node}"
        for node, pages in sorted(area.policy.pages_by_node, key=lambda pair: -pair[1])
    ]
    return " and ".join(parts) or "nothing touched yet"
