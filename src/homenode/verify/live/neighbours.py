"""Neighbours of a running VM: interrupts of its devices, and what else runs on its cores."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.indices import NodeIndex
from homenode.verify.live.running_vm import RunningVm
from homenode.vm.model import Vm

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
