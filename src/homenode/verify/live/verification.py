"""Live: a running VM, as the host's kernel shows it, against what it was planned to be."""

from homenode.catalogue import finding
from homenode.findings import Findings, in_order
from homenode.verify.live.memory import (
    cell_memory,
    memory_findings,
    memory_subject,
    stated_pages,
)
from homenode.verify.live.neighbours import interrupt_findings, neighbour_findings
from homenode.verify.live.running_vm import RunningVm, ThreadKind
from homenode.verify.live.threads import thread_findings
from homenode.vm.model import Vm


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
    return Findings(_checked(expected, vm), in_order(found))


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
