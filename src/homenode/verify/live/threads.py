"""Threads of a running VM: whether each may run where it was planned, and only there."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.verify.live.running_vm import RunningVm, ThreadKind, VmThread
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
