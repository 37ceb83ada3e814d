"""Neighbours of a running VM: interrupts of its devices, and what else runs on its cores."""

from collections.abc import Iterator

from homenode.findings import Finding, Severity
from homenode.indices import NodeIndex
from homenode.verify.live.running_vm import RunningVm
from homenode.vm.model import Vm

BUSY_RATIO = 0.1
"""Of one PU's time, over which an unpinned process on the VM's PUs is worth a finding: below, it is
a daemon that woke up."""


def interrupt_findings(expected: Vm, vm: RunningVm) -> Iterator[Finding]:
    """Devices whose interrupts other nodes serve. One finding for each device."""
    node_of = dict(vm.node_of_device) | {
        one.source: NodeIndex(one.host_node)
        for one in expected.hostdevs
        if one.host_node is not None
    }
    for bdf in sorted({one.source for one in expected.hostdevs}):
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
        yield Finding(
            id="live-interrupts",
            severity=Severity.WARNING,
            subject=f"interrupts of {bdf}",
            expected=f"served on node {node} (PUs {near})",
            observed=f"{len(far)} of {sum(i.device == bdf for i in vm.interrupts)} served by PUs "
            f"{' '.join(served[:4])}{' ...' if len(served) > 4 else ''}",
            cost="each crosses between nodes, unless the IOMMU posts them to the vCPU",
            fix=f"echo {near} > /proc/irq/{far[0].irq}/smp_affinity_list (irqbalance may undo it)",
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
            yield _finding(
                "live-shared-core",
                Severity.CRITICAL,
                subject,
                "no vCPU on the VM's cores",
                f"{other.threads} vCPUs on PUs {meeting}{load}",
                "two VMs take turns on a core, or share one as siblings",
                "plan one of them again: homenode plan knows what runs",
            )
        elif other.is_vcpu:
            yield _finding(
                "live-floating-vm",
                Severity.WARNING,
                subject,
                "vCPUs pinned apart from this VM's",
                f"{other.threads} vCPUs that may run anywhere, on PUs {meeting} too{load}",
                "it takes time from the VM's vCPUs whenever the scheduler likes",
                "pin it as well: homenode plan --layout pin",
            )
        elif other.allowed <= cores and not other.floats:
            yield _finding(
                "live-pinned-there",
                Severity.WARNING,
                subject,
                "nothing else bound to the VM's cores",
                f"{other.threads} threads that may run on PUs {other.allowed} only{load}",
                "it takes time from the vCPUs there",
                f"taskset -acp PUS {other.process}",
            )
        elif busy:
            yield _finding(
                "live-busy-neighbour",
                Severity.WARNING,
                subject,
                "the VM's PUs to itself",
                f"{100 * other.busy_ratio:.0f} % of a PU over {vm.watched_s:g} s",
                "it takes that time from the vCPUs there",
                "isolcpus= or a cpuset for the host's own processes (systemd AllowedCPUs=)",
            )


def _finding(
    id: str, severity: Severity, subject: str, expected: str, observed: str, cost: str, fix: str
) -> Finding:
    return Finding(
        id=id,
        severity=severity,
        subject=subject,
        expected=expected,
        observed=observed,
        cost=cost,
        fix=fix,
        source="/proc",
    )
