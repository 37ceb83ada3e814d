"""Checks of a running VM, as the host's kernel shows it, against what it was planned to be: whether
each thread may run where it was planned, and only there, and what else runs on its cores.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.verify.live.memory import (
    cell_memory,
    memory_findings,
    memory_subject,
    stated_pages,
)
from homenode.check.verify.live.running_vm import RunningVm, ThreadKind, VmThread
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Findings, in_order
from homenode.indices import NodeIndex
from homenode.vm.model import Vm

_KVMS_OWN = "kvm-nx-lpage-re"
"""A thread that Linux 6.13 and newer start in the VM's process, on the PUs of whichever vCPU ran
first; it wakes up once an hour and no one can pin it for good."""


def thread_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """vCPUs, then IOThreads, then everything else that QEMU runs."""
    if any(thread.kind is ThreadKind.ALL_VCPUS for thread in vm.threads):
        if expected.is_pinned:
            yield _inconclusive(vm, "vCPUs", "one thread runs them all (TCG, thread=single)", None)
    else:
        yield from _vcpus(expected, vm)
    found = {t.number: t for t in vm.threads if t.kind is ThreadKind.IOTHREAD}
    for number, pus in expected.iothread_pins:
        yield from _one(vm, f"IOThread {number}", found.get(number), pus, "live-iothread", expected)
    if expected.emulator_pus is None:
        return
    strays = [
        thread
        for thread in vm.threads
        if thread.kind is ThreadKind.EMULATOR
        and thread.name != _KVMS_OWN
        and not thread.allowed <= expected.emulator_pus
    ]
    for name in dict.fromkeys(thread.name for thread in strays):
        allowed = CpuSet.union(t.allowed for t in strays if t.name == name)
        yield _stray(
            vm,
            f"emulator thread {name!r}",
            allowed,
            expected.emulator_pus,
            "live-emulator",
            expected,
        )


def _vcpus(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    found = {t.number: t for t in vm.threads if t.kind is ThreadKind.VCPU}
    pins = expected.vcpu_pins
    if not found and expected.is_pinned:
        why = "no thread is named CPU N/KVM (debug-threads=off?) and no cgroup distinguishes them"
        yield _inconclusive(vm, "vCPUs", why, "start it through libvirt")
        return
    for number, pin in enumerate(pins):
        thread = found.get(number)
        if pin is not None and not (thread is None and number in expected.offline_vcpus):
            yield from _one(vm, f"vCPU {number}", thread, pin, "live-vcpu", expected)
    more = sorted(n for n in found if n is not None and n >= len(pins))
    if more:
        yield finding(
            "live-vcpus",
            vm.name,
            expected=f"{len(pins)} vCPUs",
            observed=f"vCPUs {CpuSet(more)} as well",
            source=expected.source,
        )


def _one(
    vm: RunningVm,
    subject: str,
    thread: VmThread | None,
    pus: CpuSet,
    id: str,
    expected: Vm,
) -> Iterator[Finding]:
    if thread is None:
        yield finding(
            f"{id}-missing",
            subject,
            expected=f"a thread on PUs {pus}",
            observed="no such thread",
            source=expected.source,
        )
    elif not thread.allowed <= pus:
        yield _stray(vm, subject, thread.allowed, pus, id, expected)


def _stray(
    vm: RunningVm,
    subject: str,
    allowed: CpuSet,
    pus: CpuSet,
    id: str,
    expected: Vm,
) -> Finding:
    fix = {
        "live-vcpu": "virsh vcpupin {} {} {}",
        "live-iothread": "virsh iothreadpin {} {} {}",
        "live-emulator": "virsh emulatorpin {} {}",
    }[id]
    words = [vm.uuid, *([subject.rpartition(" ")[2]] if fix.count("{}") == 3 else []), str(pus)]
    return finding(
        id,
        subject,
        expected=f"PUs {pus}",
        observed=f"PUs {allowed or 'none'}",
        fix=f"{fix.format(*words)} (homenode apply --live-pins does all of them)",
        source=expected.source,
    )


def _inconclusive(vm: RunningVm, subject: str, why: str, fix: str | None) -> Finding:
    return finding(
        "live-threads",
        subject,
        expected="a thread for each, where it is pinned",
        observed=why,
        fix=fix,
        source=f"/proc/{vm.process}/task",
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
        if other.is_vcpu and not other.floats:
            yield finding(
                "live-shared-core",
                subject,
                expected="no vCPU on the VM's cores",
                observed=f"{other.threads} vCPUs on PUs {meeting}{load}",
                source="/proc",
            )
        elif other.is_vcpu:
            yield finding(
                "live-floating-vm",
                subject,
                expected="vCPUs pinned apart from this VM's",
                observed=f"{other.threads} vCPUs that may run anywhere, on PUs {meeting} too{load}",
                source="/proc",
            )
        elif other.allowed <= cores and not other.floats:
            yield finding(
                "live-pinned-there",
                subject,
                expected="nothing else bound to the VM's cores",
                observed=f"{other.threads} threads that may run on PUs {other.allowed} only{load}",
                values={"process": other.process},
                source="/proc",
            )
        elif busy:
            yield finding(
                "live-busy-neighbour",
                subject,
                expected="the VM's PUs to itself",
                observed=f"{100 * other.busy_ratio:.0f} % of a PU over {vm.watched_s:g} s",
                source="/proc",
            )


def verify_live(expected: Vm, vm: RunningVm) -> Findings:
    """Everything about a running VM that is not where it should be, the worst first.

    What could not be read is a finding of its own, inconclusive.
    """
    found = [
        *thread_findings(expected, vm),
        *memory_findings(expected, vm),
        *interrupt_findings(expected, vm),
        *neighbour_findings(expected, vm),
        *(
            finding(
                "live-unread",
                gap.subject,
                expected="something to judge by",
                observed=gap.reason,
                source=vm.name,
            )
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
        lines.append(f"{memory_subject(memory.piece)} ({where}): {pages}")
    lines.append(
        f"{len(vm.interrupts)} interrupts of passed-through devices; other processes on PUs "
        f"{vm.host.cores_of(expected.pinned_pus) or 'none'}, watched for {vm.watched_s:g} s"
    )
    return tuple(lines)
