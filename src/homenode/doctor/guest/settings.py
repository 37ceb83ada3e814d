"""HostSettings: what the running system does to VMs, where it matters to the VM at hand."""

from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.doctor.guest.pins import pinned_pus
from homenode.findings import Finding, Severity
from homenode.topology import Host
from homenode.units import GIB, format_bytes
from homenode.verify.domain_facts import DomainFacts

_DRIVERS_WITH_OWN_CLOCK = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
"""With these "powersave" is the normal, dynamic choice. Source: admin-guide/pm/intel_pstate.rst."""

_SLOW_WAKE_US = 200
_LARGE_GUEST_BYTES = 16 * GIB
_SYSFS = "/sys and /proc of the host"


def settings_findings(
    host: Host, facts: DomainFacts | None, *, memory_is_bound: bool = False
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


def _governor(host: Host, facts: DomainFacts | None) -> Iterator[Finding]:
    """Of the VM's own PUs where it is pinned and they are known one by one, else of all."""
    ours = CpuSet() if facts is None else pinned_pus(facts)
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
        yield Finding(
            "governor-powersave", Severity.WARNING, f"cpufreq of PUs {slow}" if slow else "cpufreq",
            "a governor that follows the load", f"powersave with driver {', '.join(drivers)}: "
            "the lowest clock always", "every vCPU there runs at the lowest clock",
            "cpupower frequency-set -g performance; check: cpupower frequency-info",
            "Documentation/admin-guide/pm/cpufreq.rst",
        )  # fmt: skip
    elif mixed:
        yield Finding(
            "governor-mixed", Severity.INFO, f"cpufreq of PUs {ours}",
            "one governor for all vCPUs", f"{', '.join(governors)}; PUs {mixed} differ",
            "vCPUs clock up at different speeds, and the guest takes them for equal",
            f"cpupower -c {ours} frequency-set -g performance; check: grep . "
            "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor", _SYSFS,
        )  # fmt: skip


def _idle(host: Host, facts: DomainFacts) -> Iterator[Finding]:
    """Of the VM's own PUs where they are known one by one, else of the lowest."""
    if not facts.is_pinned:
        return
    ours, settings = pinned_pus(facts), host.settings
    known = settings.pus_of_idle_latency_us
    if known is None:
        latency, deep = settings.idle_exit_latency_us, ours
    else:
        slow = [(each, pus & ours) for each, pus in known if each >= _SLOW_WAKE_US and pus & ours]
        latency = max((each for each, _ in slow), default=None)
        deep = CpuSet(pu for _, pus in slow for pu in pus)
    if latency is None or latency < _SLOW_WAKE_US:
        return
    yield Finding(
        "idle-deep", Severity.INFO, f"cpuidle of PUs {deep}",
        f"idle states that end within {_SLOW_WAKE_US} µs", f"up to {latency} µs",
        "small transfers and interrupts wait for a core to wake up",
        f"for latency: cpupower -c {deep} idle-set -D {_SLOW_WAKE_US}, or tuned-adm profile "
        "virtual-host; it costs power", _SYSFS,
    )  # fmt: skip


def _small_pages(host: Host, facts: DomainFacts, memory_is_bound: bool) -> Iterator[Finding]:
    """Only ordinary pages are merged, moved or made huge behind the VM's back."""
    settings, guest = host.settings, facts.guest
    size = format_bytes(guest.memory_bytes)
    if settings.transparent_hugepages == "never" and guest.memory_bytes >= _LARGE_GUEST_BYTES:
        yield Finding(
            "pages-small", Severity.WARNING, f"{size} of ordinary pages",
            "huge pages: <hugepages>, or transparent ones", "transparent_hugepage is never",
            "a page walk of up to 24 steps for each TLB miss, and 4 KiB mappings in the IOMMU",
            "homenode plan --page-size 1GiB, or echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled", _SYSFS,
        )  # fmt: skip
    if settings.ksm_run == 1 and not guest.hostdevs:
        yield Finding(
            "ksm-on", Severity.INFO, "ksm", "no merging of a pinned VM's pages", "ksm/run is 1",
            "pages that are merged across nodes are remote for one of the VMs",
            "<memoryBacking><nosharepages/>, or echo 0 > "
            "/sys/kernel/mm/ksm/merge_across_nodes after ksm/run 2", _SYSFS,
        )  # fmt: skip
    # The kernel scans neither huge pages of hugetlbfs nor strictly bound memory.
    # Source: task_numa_work and vma_policy_mof, kernel/sched/fair.c and mm/mempolicy.c.
    bound = memory_is_bound or facts.binding is not None
    bound = bound or any(cell.host_nodes for cell in facts.cells)
    if settings.numa_balancing and not bound and facts.is_pinned and len(host.nodes) > 1:
        yield Finding(
            "numa-balancing", Severity.INFO, "kernel.numa_balancing",
            "memory that is bound, or 0", f"{settings.numa_balancing}, and memory is not bound",
            "pages are unmapped to see who uses them; those that VFIO holds cannot move anyway",
            "homenode plan --layout pin-bound, or sysctl kernel.numa_balancing=0", _SYSFS,
        )  # fmt: skip
