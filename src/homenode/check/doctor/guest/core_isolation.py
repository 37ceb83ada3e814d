"""CoreIsolation: what still interrupts vCPUs on PUs that were set apart for them.

Only where the operator has set PUs apart (isolcpus=): of others no one asked that they be quiet.

Source: Documentation/admin-guide/kernel-parameters.txt (isolcpus, nohz_full, rcu_nocbs),
Documentation/timers/no_hz.rst: nohz_full= moves the RCU callbacks of its PUs away as well.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.vm.model import Vm

_SOURCE = "/sys/devices/system/cpu/isolated and nohz_full; /proc/cmdline"


def isolation_findings(facts: Vm, host: Host) -> Iterator[Finding]:
    """Ticks and RCU callbacks on isolated PUs of vCPUs, and siblings that were not isolated."""
    isolated = CpuSet(pu.index for pu in host.pus if pu.isolated)
    ours = facts.pinned_pus & isolated
    if not ours:
        return
    yield from _ticks(ours, host)
    yield from _siblings(ours, isolated, facts.pinned_pus, host)


def rcu_nocbs(host: Host) -> CpuSet | None:
    """The PUs whose RCU callbacks run elsewhere; None where the command line is not known.

    A list that only the kernel understands ("all", "N") counts as all PUs.
    """
    line = host.settings.kernel_command_line
    if line is None:
        return None
    everything = CpuSet(pu.index for pu in host.pus)
    for word in line.split():
        name, _, value = word.partition("=")
        if name == "rcu_nocbs":
            try:
                return CpuSet.parse(value, "rcu_nocbs") if value else everything
            except ParseError:
                return everything
    return CpuSet()


def _ticks(ours: CpuSet, host: Host) -> Iterator[Finding]:
    ticking = ours - CpuSet(pu.index for pu in host.pus if pu.nohz_full)
    offloaded = rcu_nocbs(host)
    if not ticking or offloaded is None:
        return
    callbacks = ticking - offloaded
    stated = f"PUs {ticking} are not in nohz_full="
    if callbacks:
        stated += f", and PUs {callbacks} not in rcu_nocbs="
    yield finding(
        "isolated-with-tick",
        f"vCPUs on isolated PUs {ours}",
        expected="isolated PUs without the scheduler's tick and RCU callbacks",
        observed=stated,
        values={"pus": ours},
        source=_SOURCE,
    )


def _siblings(ours: CpuSet, isolated: CpuSet, pinned: CpuSet, host: Host) -> Iterator[Finding]:
    open_siblings = CpuSet(
        pu
        for core in host.cores
        if not core.pus.isdisjoint(ours)
        for pu in core.pus - isolated - pinned
    )
    if open_siblings:
        yield finding(
            "sibling-not-isolated",
            f"vCPUs on isolated PUs {ours}",
            expected="cores of which all siblings are isolated",
            observed=f"siblings {open_siblings}, on which the host runs whatever it likes",
            source=_SOURCE,
        )
