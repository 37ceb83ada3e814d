"""HostSettings: what the running system does to VMs, where it matters to the VM at hand."""

from collections.abc import Iterator

from homenode.findings import Finding, Severity
from homenode.topology import Host
from homenode.units import GIB, format_bytes
from homenode.verify.domain_facts import DomainFacts

_DRIVERS_WITH_OWN_CLOCK = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
"""With these "powersave" is the normal, dynamic choice. Source: admin-guide/pm/intel_pstate.rst."""

_SLOW_WAKE_US = 200
_LARGE_GUEST_BYTES = 16 * GIB
_SYSFS = "/sys and /proc of the host"


def settings_findings(host: Host, facts: DomainFacts | None) -> Iterator[Finding]:
    """Governor and idle states of any host; page moving and merging for a VM that they reach."""
    yield from _governor(host)
    if facts is None:
        return
    yield from _idle(host, facts)
    if facts.page_bytes is None:
        yield from _small_pages(host, facts)


def _governor(host: Host) -> Iterator[Finding]:
    governors, drivers = host.settings.governors, host.settings.scaling_drivers
    if governors is None or drivers is None or "powersave" not in governors:
        return
    if not _DRIVERS_WITH_OWN_CLOCK.issuperset(drivers):
        yield Finding(
            "governor-powersave", Severity.WARNING, "cpufreq",
            "a governor that follows the load", f"powersave with driver {', '.join(drivers)}: "
            "the lowest clock always", "every vCPU runs at the lowest clock",
            "cpupower frequency-set -g performance; check: cpupower frequency-info",
            "Documentation/admin-guide/pm/cpufreq.rst",
        )  # fmt: skip


def _idle(host: Host, facts: DomainFacts) -> Iterator[Finding]:
    latency = host.settings.idle_exit_latency_us
    if latency is None or latency < _SLOW_WAKE_US or not facts.is_pinned:
        return
    yield Finding(
        "idle-deep", Severity.INFO, "cpuidle", f"idle states that end within {_SLOW_WAKE_US} µs",
        f"up to {latency} µs", "small transfers and interrupts wait for a core to wake up",
        "for latency: cpupower idle-set -D 100, or tuned-adm profile virtual-host; it costs power",
        _SYSFS,
    )  # fmt: skip


def _small_pages(host: Host, facts: DomainFacts) -> Iterator[Finding]:
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
    bound = facts.binding is not None or any(cell.host_nodes for cell in facts.cells)
    if settings.numa_balancing and not bound and facts.is_pinned and len(host.nodes) > 1:
        yield Finding(
            "numa-balancing", Severity.INFO, "kernel.numa_balancing",
            "memory that is bound, or 0", f"{settings.numa_balancing}, and memory is not bound",
            "pages are unmapped to see who uses them; those that VFIO holds cannot move anyway",
            "homenode plan --layout pin-bound, or sysctl kernel.numa_balancing=0", _SYSFS,
        )  # fmt: skip
