"""Checks of a running VM, as the host's kernel shows it, against its plan: whether each thread may
run on its planned CPUs only, and which other processes run on its cores.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from homenode.check.verify.live.procfs import (
    BackendObject,
    RamArea,
    RunningVm,
    ThreadKind,
)
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding, Findings, Severity, finding, sort_findings
from homenode.text import format_cpus, plural
from homenode.units import KIB, format_bytes, parse_whole
from homenode.vm.facts import FactValues, VmComparison, VmFact, diff
from homenode.vm.model import MemoryDevice, Vm, VmCell

_KVMS_OWN = "kvm-nx-lpage-re"
"""A thread that Linux 6.13 and newer start in the VM's process, on the CPUs of the vCPU that ran
first; it runs once an hour and cannot be pinned permanently."""


class _Threads(NamedTuple):
    """The CPUs of a VM's threads."""

    pus: tuple[CpuSet, ...]

    def find_strays(self, home: "_Threads") -> CpuSet:
        return CpuSet.union(pus for pus in self.pus if not pus <= home.pus[0])


Piece = VmCell | MemoryDevice
"""Memory that QEMU maps at once."""


def _read_vcpus(vm: Vm) -> FactValues:
    pins = enumerate(vm.vcpu_pins)
    return {f"vCPU {n}": pin and _Threads((pin,)) for n, pin in pins}


def _describe_threads(home: _Threads, seen_threads: _Threads | None) -> tuple[str, str, str]:
    if seen_threads is None:
        return "", f"a thread on {format_cpus(home.pus[0])}", "no such thread"
    strays = seen_threads.find_strays(home)
    return "", format_cpus(home.pus[0]), format_cpus(strays) if strays else "none"


def _make_piece_values(get: Callable[[Piece], Any]) -> Callable[[Vm], FactValues]:
    return lambda vm: {subject: get(piece) for subject, piece in vm.memory_pieces.items()}


def _is_home(planned_piece: Piece, seen_piece: Piece) -> bool:
    pages = seen_piece.bytes_by_node or ()
    return bool(pages) and all(node in planned_piece.nodes for node, _ in pages)


def _describe_pages(planned_piece: Piece, seen_piece: Piece | None) -> tuple[str, str, str]:
    node = f"node {planned_piece.nodes}"
    if seen_piece is None or seen_piece.bytes_by_node is None:
        expected = f"a mapping of {format_bytes(planned_piece.memory_bytes)} on {node}"
        return "", expected, "no mapping of that size"
    if not seen_piece.bytes_by_node:
        bound = f"bound to node {seen_piece.nodes or 'any'}, and not used yet"
        return "", f"pages on {node}", bound
    return "", f"every page on {node}", _format_pages(seen_piece.bytes_by_node)


_VCPUS = VmFact(
    id="live-vcpu",
    values=_read_vcpus,
    agrees=lambda home, seen: all(pus <= home.pus[0] for pus in seen.pus),
    show_both=_describe_threads,
)
_LIVE_FACTS = (
    _VCPUS,
    VmFact(
        id="live-vcpus",
        values=lambda vm: {vm.name: vm.vcpus},
        agrees=lambda planned, seen: seen <= planned,
        show_both=lambda planned, seen: (
            "",
            plural(planned, "vCPU"),
            f"vCPUs {CpuSet(range(planned, seen))} as well",
        ),
    ),
    replace(
        _VCPUS,
        id="live-iothread",
        values=lambda vm: {
            f"IOThread {number}": _Threads((pus,)) for number, pus in vm.iothread_pins
        },
    ),
    replace(
        _VCPUS,
        id="live-emulator",
        values=lambda vm: {
            f"emulator thread {name!r}": _Threads(pus) for name, pus in vm.emulator_threads
        },
    ),
    VmFact(
        id="live-binding",
        values=_make_piece_values(lambda piece: piece.nodes or None),
        show="bound to node {}".format,
        may_lack=True,
    ),
    VmFact(
        id="live-memory",
        values=_make_piece_values(
            lambda piece: piece if piece.nodes or piece.bytes_by_node is not None else None
        ),
        agrees=_is_home,
        show_both=_describe_pages,
    ),
    VmFact(
        id="live-page-size",
        values=_make_piece_values(lambda piece: piece.page_bytes),
        show=lambda size: f"pages of {format_bytes(size)}",
        may_lack=True,
    ),
)
"""Facts that a QEMU process shows about its VM: rows as in vm/facts.py."""
_OF_MEMORY = {"live-binding": "cmdline", "live-memory": "numa_maps", "live-page-size": "numa_maps"}
"""Facts of memory, and the file of the process that shows them."""


def check_placement(expected_vm: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Find threads and memory that are not on their planned CPUs and nodes."""
    facts = set() if vm.areas else set(_OF_MEMORY)
    is_single = any(thread.kind is ThreadKind.ALL_VCPUS for thread in vm.threads)
    if expected_vm.is_pinned and (is_single or not vm.list_threads(ThreadKind.VCPU)):
        facts.add("live-vcpu")
        reason = (
            "no thread is named CPU N/KVM (debug-threads=off?) and no cgroup distinguishes them"
        )
        yield finding(
            "live-threads",
            "vCPUs",
            expected="a thread for each, on its planned CPUs",
            observed="one thread runs them all (TCG, thread=single)" if is_single else reason,
            fix=None if is_single else UNSET,
            source=f"/proc/{vm.process}/task",
        )
    actual = _vm_shown(expected_vm, vm)
    for difference in diff(_build_visible_vm(expected_vm, actual, vm), actual, facts, _LIVE_FACTS):
        file = _OF_MEMORY.get(difference.fact.id)
        source = expected_vm.source if file is None else f"/proc/{vm.process}/{file}"
        name, details = _choose_finding(difference, vm)
        yield finding(
            name, difference.subject, difference.expected, difference.observed, source, **details
        )


def _choose_finding(difference: VmComparison, vm: RunningVm) -> tuple[str, dict[str, Any]]:
    """Return the id of a difference's finding, and the arguments of its case."""
    name, home, value = difference.fact.id, difference.planned_value, difference.found_value
    if isinstance(home, _Threads):
        if value is None:
            return f"{name}-missing", {}
        counts = {"count": plural(len(CpuSet.union(value.pus)), "CPU"), "planned": len(home.pus[0])}
        return name, {"values": {"name": vm.name, **counts}}
    if name != "live-memory":
        return name, {}
    pages = None if value is None else value.bytes_by_node
    if not pages:
        return "live-memory-unknown" if pages is None else "live-memory-untouched", {}
    remote_size = sum(size for node, size in pages if node not in home.nodes)
    share = f"{100 * remote_size / sum(size for _, size in pages):.0f}"
    is_lax = home.mode in ("preferred", "interleave")
    return name, {"values": {"share": share}, "severity": Severity.WARNING if is_lax else None}


def _build_visible_vm(expected_vm: Vm, shown_vm: Vm, vm: RunningVm) -> Vm:
    """Return the VM as a process can show it: no offline vCPU, the emulator's threads."""
    apart, off = expected_vm.emulator_pus, expected_vm.offline_vcpus
    absent = off - CpuSet(n for n, pin in enumerate(shown_vm.vcpu_pins) if pin is not None)
    pins = enumerate(expected_vm.vcpu_pins)
    names = () if apart is None else [name for name, _ in shown_vm.emulator_threads]
    return replace(
        _replace_pieces(
            expected_vm,
            {
                subject: {"page_bytes": vm.default_huge_bytes}
                for subject, piece in expected_vm.memory_pieces.items()
                if piece.page_bytes == 0
            },
        ),
        name=vm.name,
        vcpu_pins=tuple(None if n in absent else pin for n, pin in pins),
        emulator_threads=tuple((name, (apart or CpuSet(),)) for name in names),
    )


def _replace_pieces(vm: Vm, changes: Mapping[str, Mapping[str, Any]]) -> Vm:
    """Return the VM with replaced pieces of its memory, by their subjects."""
    pieces = {
        subject: replace(piece, **changes.get(subject, {}))
        for subject, piece in vm.memory_pieces.items()
    }
    return replace(
        vm,
        cells=tuple(part for part in pieces.values() if isinstance(part, VmCell)),
        memory_devices=tuple(part for part in pieces.values() if isinstance(part, MemoryDevice)),
    )


_WORDS = {
    ThreadKind.IOTHREAD: "IOThread",
    ThreadKind.EMULATOR: "emulator",
    ThreadKind.ALL_VCPUS: "vCPUs",
}
_YIELDING = {3: "SCHED_BATCH", 5: "SCHED_IDLE"}
"""Policies that let other programs go first. Source: include/uapi/linux/sched.h."""


def check_limits(expected_vm: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Find threads that a quota or a yielding scheduler keeps from the time of their CPUs."""
    seen_names: set[str] = set()
    for limit in vm.limits:
        word = _WORDS.get(limit.kind, "vCPU")
        subject = f"{word} {limit.number}" if limit.number is not None else word
        policy = _YIELDING.get(limit.policy) or (
            f"nice {limit.nice} more" if limit.nice > 0 else None
        )
        if policy is not None:
            fair = "a scheduler that guarantees its share"
            yield finding("live-scheduler", subject, fair, policy, vm.name)
        for directory, share in limit.quotas:
            is_thread = directory.rpartition("/")[2].startswith(("vcpu", "iothread", "emulator"))
            if directory in seen_names or share >= (1 if is_thread else expected_vm.vcpus):
                continue
            seen_names.add(directory)
            yield finding(
                "live-quota",
                subject if is_thread else vm.name,
                expected=f"no limit below {plural(1 if is_thread else expected_vm.vcpus, 'CPU')}",
                observed=f"{share:.0%} of a CPU, by cgroup {directory}",
                source=vm.name,
            )


_USUAL = {
    "cpu.weight": 100,
    "cpu.shares": 1024,
    "io.weight": 100,
    "io.bfq.weight": 100,
    "blkio.bfq.weight": 100,
}
"""The kernel's defaults of a cgroup's weights. Source: Documentation/admin-guide of Linux."""


def check_groups(expected_vm: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Find limits of the VM's cgroups on memory and I/O, and shares below the usual ones."""
    memory = sum(piece.memory_bytes for piece in expected_vm.memory_pieces.values())
    for limit in vm.group_limits:
        text, by = limit.text.replace("\n", "; "), f"{limit.file} of cgroup {limit.directory}"
        value = text.split()[-1]
        number = parse_whole(value)
        if limit.file.startswith("memory."):
            if number is not None and number < memory:
                fair, size = f"{format_bytes(memory)} or more", format_bytes(number)
                yield finding("live-memory-limit", vm.name, fair, f"{size}, by {by}", vm.name)
        elif (usual := _USUAL.get(limit.file)) is None:
            yield finding("live-io-limit", vm.name, "the devices' own rates", f"{text}, by {by}")
        elif limit.file == "cpu.weight" and value == "0":
            fair, idle = (
                "a scheduler that guarantees its share",
                f"cpu.idle of cgroup {limit.directory}",
            )
            yield finding("live-scheduler", vm.name, fair, idle, by)
        elif number is not None and number < usual:
            yield finding("live-shares", vm.name, f"{usual} as others", f"{value}, by {by}")


BUSY_RATIO = 0.1
"""Share of one CPU's time from which an unpinned process on the VM's CPUs is worth a finding:
below, it is a daemon that woke up."""


def _check_swap(vm: RunningVm) -> Iterator[Finding]:
    if vm.swapped_bytes:
        yield finding(
            "live-swapped",
            vm.name,
            expected="no memory swapped out",
            observed=f"{format_bytes(vm.swapped_bytes)} swapped out",
            source=f"/proc/{vm.process}/status",
        )


def check_interrupts(expected_vm: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Find devices whose interrupts other nodes serve: one finding for each device."""
    node_of = dict(vm.node_of_device) | {
        hostdev.bdf: NodeIndex(hostdev.host_node)
        for hostdev in expected_vm.hostdevs
        if hostdev.host_node is not None
    }
    for bdf in sorted({hostdev.bdf for hostdev in expected_vm.hostdevs}):
        node = node_of.get(bdf)
        if node is None:
            continue
        near_pus = vm.host.pus_of_node(node) & vm.host.online
        far_irqs = [
            interrupt
            for interrupt in vm.interrupts
            if interrupt.device == bdf
            and near_pus
            and (pus := interrupt.effective or interrupt.allowed)
            and pus.isdisjoint(near_pus)
        ]
        if not far_irqs:
            continue
        served_cpus = CpuSet.union(i.effective or i.allowed for i in far_irqs)
        yield finding(
            "live-interrupts",
            f"interrupts of {bdf}",
            expected=f"served on node {node} ({format_cpus(near_pus)})",
            observed=f"{len(far_irqs)} of {sum(i.device == bdf for i in vm.interrupts)} served by "
            f"{format_cpus(served_cpus)}",
            values={"pus": near_pus, "irq": far_irqs[0].irq},
            source="/proc/interrupts",
        )


def check_neighbours(expected_vm: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Find other VMs and processes on the cores of the VM's vCPUs. On most hosts every process may
    run everywhere: that alone is not a finding. Processes pinned to these cores, other VMs' vCPUs,
    and busy processes are."""
    cores = vm.host.add_siblings(expected_vm.pinned_pus)
    busiest: list[tuple[float, str]] = []
    for other in vm.neighbours:
        meeting = other.allowed & cores
        if not meeting:
            continue
        process_text = f"domain {other.domain!r}" if other.domain else f"{other.name!r}"
        subject = f"{process_text} (process {other.process})"
        busy = other.busy_ratio >= BUSY_RATIO
        load = f", busy {100 * other.busy_ratio:.0f} % of a CPU there" if busy else ""
        values = None
        if other.is_vcpu and not other.floats:
            name, planned = "live-shared-core", "no vCPU on the VM's cores"
            observed = f"{plural(other.threads, 'vCPU')} on {format_cpus(meeting)}{load}"
        elif other.is_vcpu:
            name, planned = "live-floating-vm", "vCPUs pinned apart from this VM's"
            threads_text = f"{plural(other.threads, 'vCPU')} that may run anywhere"
            observed = f"{threads_text}, on {format_cpus(meeting)} too{load}"
        elif other.allowed <= cores and not other.floats:
            name, planned = "live-pinned-process", "no other process bound to the VM's cores"
            allowed_text = format_cpus(other.allowed)
            observed = f"{plural(other.threads, 'thread')} allowed on {allowed_text} only{load}"
            values = {"process": other.process}
        else:
            busiest += [(other.busy_ratio, subject)] if busy else []
            continue
        yield finding(name, subject, planned, observed, "/proc", values=values)
    if busiest:
        busiest.sort(key=lambda entry: (-entry[0], entry[1]))
        shares = ", ".join(f"{100 * ratio:.0f} %" for ratio, _ in busiest)
        yield finding(
            "live-busy-neighbour",
            ", ".join(subject for _, subject in busiest),
            expected="the VM's CPUs to itself",
            observed=f"{shares} of a CPU over {vm.watched_s:g} s",
            source="/proc",
        )


def verify_live(expected_vm: Vm, vm: RunningVm) -> Findings:
    """Compare a running VM with the plan, the worst finding first; the unread is inconclusive."""
    findings = [
        *check_placement(expected_vm, vm),
        *_check_swap(vm),
        *check_interrupts(expected_vm, vm),
        *check_limits(expected_vm, vm),
        *check_groups(expected_vm, vm),
        *check_neighbours(expected_vm, vm),
        *(
            finding("live-unread", gap.subject, "a readable file", gap.reason, vm.name)
            for gap in vm.gaps
        ),
    ]
    return Findings(checked=_format_checked(expected_vm, vm), findings=sort_findings(findings))


def _format_checked(expected_vm: Vm, vm: RunningVm) -> tuple[str, ...]:
    pinned_count = sum(pin is not None for pin in expected_vm.vcpu_pins)
    count = sum(thread.kind is ThreadKind.VCPU for thread in vm.threads)
    emulators = sum(thread.kind is ThreadKind.EMULATOR for thread in vm.threads)
    lines = [
        f"process {vm.process} of {vm.name} against {expected_vm.source}",
        f"{plural(count, 'vCPU thread')}, {pinned_count} to be pinned; "
        f"{plural(emulators, 'emulator thread')}; "
        f"{plural(len(expected_vm.iothread_pins), 'pinned IOThread')}",
    ]
    shown_pieces = _vm_shown(expected_vm, vm).memory_pieces
    for subject, piece in expected_vm.memory_pieces.items():
        node, bytes_by_node = f"node {piece.nodes}", shown_pieces[subject].bytes_by_node
        pages = "not found" if bytes_by_node is None else _format_pages(bytes_by_node)
        lines.append(f"{subject} ({node if piece.nodes else 'not bound'}): {pages}")
    watched_cpus = vm.host.add_siblings(expected_vm.pinned_pus) or "none"
    lines.append(
        f"{plural(len(vm.interrupts), 'interrupt')} of passed-through devices; "
        f"other processes on CPUs {watched_cpus}, watched for {vm.watched_s:g} s"
    )
    return tuple(lines)


def _vm_shown(expected_vm: Vm, vm: RunningVm) -> Vm:
    """Return the VM that its process shows: threads' CPUs and pages by node; None = not shown."""
    vcpus, iothreads = vm.list_threads(ThreadKind.VCPU), vm.list_threads(ThreadKind.IOTHREAD)
    pins = {n: thread for n, thread in iothreads.items() if n is not None}
    count = max((n + 1 for n in vcpus if n is not None), default=0)
    emulator_pus: dict[str, list[CpuSet]] = {}
    for thread in vm.threads:
        if thread.kind is ThreadKind.EMULATOR and thread.name != _KVMS_OWN:
            emulator_pus.setdefault(thread.name, []).append(thread.allowed)
    return replace(
        _replace_pieces(expected_vm, dict(_shown_pieces(expected_vm, vm))),
        name=vm.name,
        source=f"/proc/{vm.process}",
        vcpus=count,
        vcpu_pins=tuple(vcpus[n].allowed if n in vcpus else None for n in range(count)),
        iothread_pins=tuple((n, thread.allowed) for n, thread in pins.items()),
        emulator_threads=tuple((name, tuple(pus)) for name, pus in emulator_pus.items()),
    )


def _shown_pieces(expected_vm: Vm, vm: RunningVm) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the observed state of each piece of memory. A file names its cell. Anonymous memory is
    identified by its size and the nodes to which QEMU binds it; cells that agree in both share
    these mappings in any order, which does not affect the result."""
    free = list(vm.areas)
    pieces = expected_vm.memory_pieces
    alone = sum(isinstance(piece, VmCell) for piece in pieces.values()) == 1
    for subject, piece in pieces.items():
        backend = _find_backend(vm, piece, alone=alone)
        size = piece.memory_bytes if backend is None else backend.size_bytes
        # Without its own nodes it is bound with the whole process, or not bound: its pages show it.
        nodes = CpuSet() if backend is None else backend.host_nodes
        area = min(
            (area for area in free if _is_of_size(area, size)),
            key=lambda area: (
                not _is_named(area, backend),
                area.policy.nodes != nodes,
                -sum(pages for _, pages in area.policy.pages_by_node),
            ),
            default=None,
        )
        if area is None:
            yield subject, {"nodes": nodes, "page_bytes": None, "bytes_by_node": None}
            continue
        free.remove(area)
        page = area.policy.page_bytes
        by_node = sorted(area.policy.pages_by_node, key=lambda pair: -pair[1])
        bytes_by_node = tuple((node, pages * page) for node, pages in by_node)
        yield subject, {"nodes": nodes, "page_bytes": page, "bytes_by_node": bytes_by_node}


def _is_of_size(area: RamArea, memory_bytes: int) -> bool:
    return 0 <= area.size_bytes - memory_bytes < max(area.policy.page_bytes, 64 * KIB)


def _find_backend(vm: RunningVm, piece: Piece, *, alone: bool) -> BackendObject | None:
    # libvirt's names. Source: qemuBuildMemoryCellBackendStr and qemuBuildMemoryDimmBackendStr.
    name = f"ram-node{piece.id}" if isinstance(piece, VmCell) else f"mem{piece.alias}"
    backend = next((b for b in vm.backends if b.name == name), None)
    if backend is None and alone and isinstance(piece, VmCell):
        return next((b for b in vm.backends if b.name.endswith(".ram")), None)
    return backend


def _is_named(area: RamArea, backend: BackendObject | None) -> bool:
    if area.policy.file is None or backend is None:
        return False
    name = area.policy.file.rpartition("/")[2]
    return name.startswith((f"qemu_back_mem._objects_{backend.name}.", f"{backend.name}."))


def _format_pages(bytes_by_node: tuple[tuple[NodeIndex, int], ...]) -> str:
    """Return the nodes of the pages as text: "256 MiB on node 1 and 4 KiB on node 0"."""
    parts = (f"{format_bytes(size)} on node {node}" for node, size in bytes_by_node)
    return " and ".join(parts) or "nothing touched yet"
