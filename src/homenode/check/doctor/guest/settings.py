"""HostSettings: what the running system does to VMs, where it matters to the VM at hand."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.units import GIB, format_bytes

if TYPE_CHECKING:
    from homenode.vm.model import Vm

_DRIVERS_WITH_OWN_CLOCK = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
"""With these "powersave" is the normal, dynamic choice. Source: admin-guide/pm/intel_pstate.rst."""

_SLOW_WAKE_US = 200
_LARGE_GUEST_BYTES = 16 * GIB
_SYSFS = "/sys and /proc of the host"


def settings_findings(
    host: Host, facts: "Vm | None", *, memory_is_bound: bool = False
) -> Iterator[Finding]:
    """Governor and idle states of any host; page moving and merging for a VM that they reach.

    memory_is_bound: by something that the facts do not say.
    """
    yield from _governor(host, facts)
    if facts is None:
        return
    yield from _idle(host, facts)
    if facts.page_bytes is None:
        yield from _small_pages(host, facts, memory_is_bound)


def _governor(host: Host, facts: "Vm | None") -> Iterator[Finding]:
    """Of the VM's own PUs where it is pinned and they are known one by one, else of all."""
    ours = CpuSet() if facts is None else facts.pinned_pus
    slow, mixed = CpuSet(), CpuSet()
    governors, drivers = host.settings.governors or (), host.settings.scaling_drivers
    if ours and host.settings.pus_of_governor is not None:
        of_ours = [(name, pus & ours) for name, pus in host.settings.pus_of_governor if pus & ours]
        governors = tuple(name for name, _ in of_ours)
        slow = CpuSet(pu for name, pus in of_ours if name == "powersave" for pu in pus)
        mixed = min((pus for _, pus in of_ours), key=len) if len(of_ours) > 1 else mixed
    if drivers is None:
        return
    if "powersave" in governors and not _DRIVERS_WITH_OWN_CLOCK.issuperset(drivers):
        yield finding(
            "governor-powersave",
            f"cpufreq of PUs {slow}" if slow else "cpufreq",
            expected="a governor that follows the load",
            observed=f"powersave with driver {', '.join(drivers)}: the lowest clock always",
            source="Documentation/admin-guide/pm/cpufreq.rst",
        )
    elif mixed:
        yield finding(
            "governor-mixed",
            f"cpufreq of PUs {ours}",
            expected="one governor for all vCPUs",
            observed=f"{', '.join(governors)}; PUs {mixed} differ",
            values={"pus": ours},
            source=_SYSFS,
        )


def _idle(host: Host, facts: "Vm") -> Iterator[Finding]:
    """Of the VM's own PUs where they are known one by one, else of the lowest."""
    if not facts.is_pinned:
        return
    ours, settings = facts.pinned_pus, host.settings
    known = settings.pus_of_idle_latency_us
    if known is None:
        latency, deep = settings.idle_exit_latency_us, ours
    else:
        slow = [(each, pus & ours) for each, pus in known if each >= _SLOW_WAKE_US and pus & ours]
        latency = max((each for each, _ in slow), default=None)
        deep = CpuSet(pu for _, pus in slow for pu in pus)
    if latency is None or latency < _SLOW_WAKE_US:
        return
    yield finding(
        "idle-deep",
        f"cpuidle of PUs {deep}",
        expected=f"idle states that end within {_SLOW_WAKE_US} µs",
        observed=f"up to {latency} µs",
        values={"pus": deep},
        source=_SYSFS,
    )


def _small_pages(host: Host, facts: "Vm", memory_is_bound: bool) -> Iterator[Finding]:
    """Only ordinary pages are merged, moved or made huge behind the VM's back."""
    settings, guest = host.settings, facts
    size = format_bytes(guest.memory_bytes)
    if settings.transparent_hugepages == "never" and guest.memory_bytes >= _LARGE_GUEST_BYTES:
        yield finding(
            "pages-small",
            f"{size} of ordinary pages",
            expected="huge pages: <hugepages>, or transparent ones",
            observed="transparent_hugepage is never",
            source=_SYSFS,
        )
    if settings.ksm_run == 1 and not guest.hostdevs:
        yield finding(
            "ksm-on",
            "ksm",
            expected="no merging of a pinned VM's pages",
            observed="ksm/run is 1",
            source=_SYSFS,
        )
    # The kernel scans neither huge pages of hugetlbfs nor strictly bound memory.
    # Source: task_numa_work and vma_policy_mof, kernel/sched/fair.c and mm/mempolicy.c.
    bound = memory_is_bound or facts.binding is not None
    bound = bound or any(cell.nodes for cell in facts.cells)
    if settings.numa_balancing and not bound and facts.is_pinned and len(host.nodes) > 1:
        yield finding(
            "numa-balancing",
            "kernel.numa_balancing",
            expected="memory that is bound, or 0",
            observed=f"{settings.numa_balancing}, and memory is not bound",
            source=_SYSFS,
        )
