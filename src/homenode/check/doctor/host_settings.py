"""Findings on a host's firmware and running system, and on GPUs whose node NCCL cannot see."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.text import format_cpus, number_list
from homenode.units import GIB, format_bytes
from homenode.vm.model import Vm

_MANY_LLCS = 4
_FIRMWARE = "the host's ACPI tables (SRAT, SLIT)"


def check_layout(host: Host, *, with_advice: bool = True) -> Iterator[Finding]:
    """Yield the nodes that span packages or many LLCs, CPUs without memory, GPUs without a node.
    with_advice: also choices of the operator that are not faults, such as NPS1."""
    core_counts = Counter(core.id.package for core in host.cores)
    for node in () if host.nodes_assumed else host.nodes:
        packages = [package for package in host.packages if not package.pus.isdisjoint(node.pus)]
        llcs = [llc for llc in host.llcs if not llc.pus.isdisjoint(node.pus)]
        # On POWER and s390 partitions and in VMs, each package may be one core.
        if len(packages) > 1 and any(core_counts[package.index] != 1 for package in packages):
            yield finding(
                "node-spans-packages",
                f"node {node.index}",
                expected="at least one node for each package",
                observed=f"packages {number_list(package.index for package in packages)}, "
                f"{len(llcs)} last-level caches",
                source=_FIRMWARE,
            )
        elif with_advice and len(llcs) >= _MANY_LLCS and packages and packages[0].pus == node.pus:
            yield finding(
                "node-spans-llcs",
                f"node {node.index}",
                expected="nodes that show which memory is near which cores",
                observed=f"one node for {len(llcs)} last-level caches",
                source=_FIRMWARE,
            )
    yield from _find_nodes_without_memory(host)
    yield from _check_unequal(host)
    offline = host.offline_pus
    if offline and host.settings.smt_control == "on":
        yield finding(
            "cpus-offline",
            format_cpus(offline),
            expected="every CPU online: SMT is on",
            observed="offline",
            values={"pus": offline},
            source="/sys/devices/system/cpu/offline",
        )


_CPU = "/sys/devices/system/cpu/cpuN"


def _format_megahertz(khz: int) -> str:
    return f"{khz / 1000:g} MHz"


_MIN_COMPARED = 4 * GIB
"""Smaller nodes are not compared: the kernel's own share exceeds the tolerance."""

_UNEQUAL = 0.95
"""Kernels keep up to 3 % of the first node for themselves; a DIMM of 16 is 6 %."""


def _check_unequal(host: Host) -> Iterator[Finding]:
    """Find nodes with less memory, smaller caches, lower clocks and asymmetric distances."""
    nodes = () if host.nodes_assumed else host.nodes
    memory = [(len(node.pus), node.memory_bytes or 0, int(node.index)) for node in nodes]
    memory = [row for row in memory if row[0] and row[1] >= _MIN_COMPARED]
    limits = host.settings.frequency_limits or ()
    llcs = host.llcs if len(host.packages) > 1 else ()
    caches = [(len(llc.pus), llc.size_bytes, min(llc.pus)) for llc in llcs if llc.size_bytes]
    clocks = [
        (len(package.pus), max(khz), int(package.index))
        for package in host.packages
        if (khz := [o.hardware_khz for o in limits if o.hardware_khz and o.pus & package.pus])
    ]
    for name, subject_noun, rows, share, format_size, source in (
        ("node-memory-unequal", "node", memory, _UNEQUAL, format_bytes, _FIRMWARE),
        ("llc-unequal", "LLC of CPU", caches, 1, format_bytes, f"{_CPU}/cache"),
        (
            "clock-unequal",
            "package",
            clocks,
            1,
            _format_megahertz,
            f"{_CPU}/cpufreq/cpuinfo_max_freq",
        ),
    ):
        for count in sorted({pus for pus, *_ in rows}):
            peers = sorted((size, index) for pus, size, index in rows if pus == count)
            least, largest = peers[0][0], peers[-1][0]
            first = min(index for _, index in peers)  # what the kernel keeps, it takes there
            shares = {first: share}
            if less := [i for size, i in peers if size < shares.get(i, max(share, 0.98)) * largest]:
                expected, observed = (
                    f"{format_size(largest)}, as others with as many CPUs",
                    format_size(least),
                )
                yield finding(
                    name, f"{subject_noun} {number_list(less)}", expected, observed, source
                )
    for a, b in combinations((node.index for node in nodes), 2):
        forth, back = host.find_distance(a, b), host.find_distance(b, a)
        if forth != back:
            subject, observed = f"distance of nodes {a} and {b}", f"{forth} and {back}"
            yield finding(
                "distances-asymmetric", subject, "the same both ways", observed, _FIRMWARE
            )


def _find_nodes_without_memory(host: Host) -> Iterator[Finding]:
    with_pus = [node for node in host.nodes if node.pus]
    bare = [node for node in with_pus if node.memory_bytes == 0]
    # If no node has both, the machine was built that way: all use memory of another kind.
    if bare and len(bare) < len(with_pus):
        yield finding(
            "node-without-memory",
            f"node {number_list(node.index for node in bare)}",
            expected="memory next to the cores",
            observed="cores and no memory",
            source=_FIRMWARE,
        )
    if len(with_pus) < 2:
        return
    gpus = [d for d in host.devices_of_kind(DeviceKind.GPU) if d.node is None]
    for named in sorted(
        {gpu.firmware_node for gpu in gpus}, key=lambda node: -1 if node is None else node
    ):
        lost_gpus = [gpu.bdf for gpu in gpus if gpu.firmware_node == named]
        yield finding(
            "gpu-node-unknown",
            f"GPU {', '.join(map(str, lost_gpus[:16]))}",
            expected="a NUMA node",
            observed="numa_node is -1"
            if named is None
            else f"numa_node is {named}, which has no CPUs and is as near to several nodes",
            source="/sys/bus/pci/devices/BDF/numa_node",
        )


_DRIVERS_WITH_OWN_CLOCK = frozenset({"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"})
"""Their "powersave" is the default, and dynamic. Source: admin-guide/pm/intel_pstate.rst."""

_FAST = "performance"
_SLOW_WAKE_US = 200
_LARGE_GUEST_BYTES = 16 * GIB
_SYSFS = "/sys and /proc of the host"


def check_settings(
    host: Host, facts: Vm | None, *, memory_is_bound: bool = False
) -> Iterator[Finding]:
    """Check governor and idle states of any host; page migration and merging for a VM that they
    affect. memory_is_bound: by a setting that the facts do not show."""
    yield from _check_governor(host, facts)
    yield from _find_capped(host, facts)
    if host.settings.turbo == "off" and host.architecture != "aarch64":  # boost is an option there
        yield finding(
            "turbo-off",
            "cpufreq",
            expected="clocks above the base clock where power and heat allow",
            observed="off",
            source=_SYSFS,
        )
    if facts is None:
        gpus = host.devices_of_kind(DeviceKind.GPU)
        if gpus and host.settings.iommus == () and all(g.iommu_group is None for g in gpus):
            yield finding(
                "iommu-off",
                "GPUs",
                "an IOMMU for VMs",
                "off",
                severity=Severity.INFO,
                source=_SYSFS,
            )
        return
    yield from _check_idle_states(host, facts)
    if facts.page_bytes is None:
        yield from _check_small_pages(host, facts, memory_is_bound)


def _check_governor(host: Host, facts: Vm | None) -> Iterator[Finding]:
    """Judge the governors of the VM's pinned CPUs if each is known, else of all CPUs."""
    vm_pus = CpuSet() if facts is None else facts.pinned_pus
    slow, cpus = CpuSet(), CpuSet()
    governors, drivers = host.settings.governors or (), host.settings.scaling_drivers
    if vm_pus and host.settings.pus_of_governor is not None:
        vm_governors = [
            (name, pus & vm_pus) for name, pus in host.settings.pus_of_governor if pus & vm_pus
        ]
        governors = tuple(name for name, _ in vm_governors)
        slow = CpuSet(pu for name, pus in vm_governors if name == "powersave" for pu in pus)
        cpus = min((pus for _, pus in vm_governors), key=len) if len(vm_governors) > 1 else cpus
    elif facts is None:  # most CPUs are set to be fast, and some were forgotten
        slow_sets = [pus for name, pus in host.settings.pus_of_governor or () if name != _FAST]
        cpus = CpuSet(pu for pus in slow_sets for pu in pus)
        cpus = cpus if 2 * len(cpus) <= len(host.online_pus) else CpuSet()
    if drivers is None:
        return
    if "powersave" in governors and not _DRIVERS_WITH_OWN_CLOCK.issuperset(drivers):
        yield finding(
            "governor-powersave",
            f"cpufreq of {format_cpus(slow)}" if slow else "cpufreq",
            expected="a governor that follows the load",
            observed=f"powersave with driver {', '.join(drivers)}: the lowest clock always",
            source="Documentation/admin-guide/pm/cpufreq.rst",
        )
    elif cpus:
        yield finding(
            "governor-mixed",
            f"cpufreq of {format_cpus(vm_pus or cpus)}",
            expected="one governor for all vCPUs" if vm_pus else "performance, as most CPUs",
            observed=f"{', '.join(governors)}; CPUs {cpus} differ",
            values={"pus": vm_pus or cpus},
            severity=Severity.INFO if vm_pus else None,
            source=_SYSFS,
        )


def _find_capped(host: Host, facts: Vm | None) -> Iterator[Finding]:
    """Find CPUs whose policy allows less than their hardware's clock; for a pinned VM its CPUs."""
    vm_pus = CpuSet() if facts is None else facts.pinned_pus
    for policy in host.settings.frequency_limits or ():
        pus = policy.pus & vm_pus if vm_pus else policy.pus
        if pus and policy.hardware_khz is not None and policy.limit_khz < policy.hardware_khz:
            yield finding(
                "frequency-capped",
                f"cpufreq of {format_cpus(pus)}",
                expected=f"{_format_megahertz(policy.hardware_khz)} at most, as the hardware can",
                observed=_format_megahertz(policy.limit_khz),
                values={"share": f"{(1 - policy.limit_khz / policy.hardware_khz) * 100:.0f}"},
                source=f"{_CPU}/cpufreq/scaling_max_freq, cpuinfo_max_freq",
            )


def _check_idle_states(host: Host, facts: Vm) -> Iterator[Finding]:
    if not facts.is_pinned:
        return
    slow = [
        (wake_us, pus & facts.pinned_pus)
        for wake_us, pus in host.settings.pus_of_idle_latency_us or ()
        if wake_us >= _SLOW_WAKE_US and pus & facts.pinned_pus
    ]
    if not slow:
        return
    deep = CpuSet(pu for _, pus in slow for pu in pus)
    yield finding(
        "idle-deep",
        f"cpuidle of {format_cpus(deep)}",
        expected=f"idle states that end within {_SLOW_WAKE_US} µs",
        observed=f"up to {slow[-1][0]} µs",
        values={"pus": deep},
        source=_SYSFS,
    )


def _check_small_pages(host: Host, facts: Vm, memory_is_bound: bool) -> Iterator[Finding]:
    """Yield whether the VM has ordinary pages, which the kernel may merge, move or make huge."""
    settings = host.settings
    if settings.transparent_hugepages == "never" and facts.memory_bytes >= _LARGE_GUEST_BYTES:
        yield finding(
            "pages-small",
            f"{format_bytes(facts.memory_bytes)} of ordinary pages",
            expected="huge pages: <hugepages>, or transparent ones",
            observed="transparent_hugepage is never",
            source=_SYSFS,
        )
    if settings.ksm_run == 1 and not facts.hostdevs:
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
