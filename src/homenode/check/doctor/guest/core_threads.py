"""CoreThreads: SMT of the host against what a domain makes of it."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.vm.model import Vm

_SWITCHED_OFF = frozenset({"off", "forceoff"})
_CONTROL = "/sys/devices/system/cpu/smt/control"


def thread_findings(facts: Vm, host: Host) -> Iterator[Finding]:
    """A guest with siblings where SMT is off, and QEMU's own threads on vCPUs' siblings."""
    yield from _switched_off(facts, host)
    yield from _emulator_on_siblings(facts, host)


def _switched_off(facts: Vm, host: Host) -> Iterator[Finding]:
    if host.settings.smt_control not in _SWITCHED_OFF:
        return
    topology = facts.cpu_topology
    threads = 1 if topology is None else topology[3]
    offline = CpuSet(pu.index for pu in host.pus if not pu.online)
    asleep = facts.pinned_pus & offline
    if threads < 2 and not asleep:
        return
    words = (host.settings.kernel_command_line or "").split()
    by = next((w for w in words if w.partition("=")[0] in ("nosmt", "mitigations")), None)
    why = f" (command line: {by})" if by is not None and "nosmt" in by else ""
    asked = f"threads='{threads}' in <topology>" if threads > 1 else f"pins on PUs {asleep}"
    yield finding(
        "smt-off",
        "<topology>" if threads > 1 else "<vcpupin>",
        expected="SMT that is on, or a guest without siblings",
        observed=f"{asked}, and SMT control says {host.settings.smt_control}{why}",
        source=_CONTROL,
    )


def _emulator_on_siblings(facts: Vm, host: Host) -> Iterator[Finding]:
    """Where cores without vCPUs are at hand: else the siblings are the best place there is."""
    emulator, vcpus = facts.emulator_pus, facts.pinned_pus
    if emulator is None or not facts.is_pinned:
        return
    used = CpuSet(pu for core in host.cores if not core.pus.isdisjoint(vcpus) for pu in core.pus)
    free = CpuSet(pu.index for pu in host.pus if pu.online and pu.allowed) - used
    if not free or not emulator <= used or not emulator.isdisjoint(vcpus):
        return
    in_use = [d for d in host.domains if d.running and d.name != facts.name]
    free -= CpuSet(pu for d in in_use for pin in d.vcpu_pins if pin is not None for pu in pin)
    is_bound = facts.binding is not None or any(cell.nodes for cell in facts.cells)
    if facts.page_bytes is not None and is_bound:
        # QEMU allocates the huge pages of a node on PUs of that node.
        free &= CpuSet.union(n.pus for n in host.nodes if not n.pus.isdisjoint(emulator))
    if free:
        yield finding(
            "emulator-on-sibling",
            "<emulatorpin>",
            expected="a core without vCPUs",
            observed=f"PUs {emulator}, siblings of vCPUs, while PUs {free} have none",
            source=facts.source,
        )
