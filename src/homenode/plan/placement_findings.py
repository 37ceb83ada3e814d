"""Findings on a placement: relaxations, remote devices and memory, and the cost of whole cores or
siblings for a VM whose definition shows siblings."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import CoreKind, Host, MemoryKind
from homenode.plan.allocations import MAX_NAMED, Allocations, find_allocations
from homenode.plan.devices.brought import are_paired, check_devices
from homenode.plan.memory import (
    cell_pages_wanted,
    compute_overhead,
    count_node_memory,
    format_memory,
    get_page_size,
    list_device_pages,
)
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Fallback, MemoryRule
from homenode.plan.search.supply import free_cpus
from homenode.text import format_cpus, format_nodes, plural, shorten_list
from homenode.units import format_bytes
from homenode.vm.layout import GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.vm.plan import Relaxation


def check_memory_short(host: Host, request: GuestRequest) -> Iterator[Finding]:
    """Yield a finding if a VM without bound memory needs more than all nodes have free."""
    page, needed_pages = get_page_size(request), cell_pages_wanted(request)
    needed_pages += sum(pages for _, pages in list_device_pages(request))
    free = _free_pages(host, request, keeps_reserve=False)
    if free is not None and free < needed_pages:
        size = format_bytes(free * page)
        yield finding(
            "memory-short",
            host.name,
            observed=f"{format_memory(request)} for the VM, {size} free on all nodes together: the "
            "start fails, or the host's OOM killer ends the VM",
            case="of a plan",
        )
        return
    # With huge pages, QEMU's own memory is already subtracted.
    needed = 0 if request.page_bytes is not None else -(-compute_overhead(request) // page)
    free = _free_pages(host, request, keeps_reserve=True)
    if free is not None and free < needed_pages + needed:
        yield _report_taken_memory(host, request)


def _free_pages(host: Host, request: GuestRequest, *, keeps_reserve: bool) -> int | None:
    """Return the free pages of all nodes but GPUs' memory; None if a node's are unknown."""
    bare = {n.index for n in host.nodes if not n.pus and n.memory_kind is not MemoryKind.GPU}
    allowed_nodes = tuple(bare.union(request.options.memory_nodes_allowed))
    options = replace(request.options, memory_nodes_allowed=allowed_nodes)
    request = replace(request, options=options)
    memory = count_node_memory(host, request, keeps_reserve=keeps_reserve).values()
    page_counts = [node.pages for node in memory if node.pages is not None]
    return sum(page_counts) if page_counts and len(page_counts) == len(memory) else None


def check_placement(
    host: Host,
    request: GuestRequest,
    devices: Sequence[Bdf],
    allocations: Allocations,
    *,
    relaxations: Sequence[Relaxation],
    fallback: Fallback,
    nodes: Sequence[NodeIndex],
    memory: Sequence[NodeIndex],
    vcpu_pus: CpuSet,
    threads: int,
    isolated_cpus: CpuSet,
) -> Iterator[Finding]:
    """Yield findings on devices and relaxations. threads: siblings per core that the guest sees."""
    # Long because it yields each finding with its text in place.
    yield from check_devices(host, request, devices, allocations)
    yield from bound_elsewhere(request, nodes)
    yield from _check_homes(host, request, devices, nodes)
    yield from _check_nic_packages(host, devices, nodes)
    yield from _check_host_share(host, request, relaxations, vcpu_pus, threads, allocations)
    further = set(memory) - set(nodes)
    if fallback.memory is MemoryRule.ELSEWHERE and further:
        bound = request.layout.memory is not MemoryBinding.KEEP
        yield finding(
            "memory-from-other-nodes",
            format_nodes(further),
            observed=f"node {', '.join(map(str, nodes))} cannot hold the memory next to the vCPUs, "
            f"so {'it is bound to' if bound else 'some is allocated on'} further nodes",
        )
    elif fallback.memory is not MemoryRule.FOLLOWS:
        mirrored = request.layout.cells is GuestCells.HOST
        yield finding(
            "memory-uneven",
            format_nodes(nodes),
            observed="the nodes hold the memory together, but not each its vCPUs' share of it",
            severity=Severity.WARNING if mirrored else Severity.INFO,
            case=None if mirrored else "one cell",
        )
    if Relaxation.UNEQUAL_CELLS in relaxations:
        yield finding(
            "unequal-cells",
            format_nodes(nodes),
            observed="no number of equal guest NUMA nodes fits without a further package, a "
            "further node or a GPU away from its node",
        )
    shows = request.layout.siblings is Siblings.EXPOSED or fallback.shares
    if shows and threads == 1 and request.layout.pinning is not Pinning.NODE:
        yield _report_siblings(host, request, fallback)
    if fallback.mixed:
        yield finding(
            "mixed-kinds",
            host.name,
            observed="vCPUs are pinned to performance and to efficiency cores, so they differ "
            "in speed",
            severity=Severity.INFO if request.options.mixed_kinds else Severity.WARNING,
        )
    if isolated_cpus and not vcpu_pus <= isolated_cpus:
        outside = vcpu_pus - isolated_cpus
        yield finding(
            "vcpus-not-isolated",
            format_cpus(outside),
            observed=f"outside isolcpus and nohz_full, on CPUs that the host may use too: "
            f"{plural(len(outside), 'vCPU')}",
        )


def _report_siblings(host: Host, request: GuestRequest, fallback: Fallback) -> Finding:
    """Return a finding if cores differ in siblings, so the guest cannot be shown them."""
    threads, packs = fallback.grouping.threads, fallback.grouping.counts_pus
    effect = "so the guest sees one thread per core"
    shared = f"{effect}, also where two of its vCPUs share one"
    if fallback.shares or packs:
        reason, case = f"not each core runs as many vCPUs, {shared}", None
    elif threads > 1:
        groups = f"{plural(request.vcpus, 'vCPU')} cannot fill whole cores of {threads} siblings"
        reason, case = f"{groups}, {shared}", "odd vCPUs"
    else:
        reason = f"no whole groups of siblings are free for the VM, {effect}"
        case = "no siblings"
    return finding(
        "siblings-not-exposed", host.name, observed=reason, case=case, values={"threads": threads}
    )


def _check_host_share(
    host: Host,
    request: GuestRequest,
    relaxations: Sequence[Relaxation],
    vcpu_pus: CpuSet,
    threads: int,
    allocations: Allocations,
) -> Iterator[Finding]:
    cores = sum(not core.pus.isdisjoint(vcpu_pus) for core in host.cores)
    serving = [
        (owner.domain, emulator_pus)
        for owner in allocations.by_domain
        if (emulator_pus := (owner.cores - owner.vcpu_cores) & vcpu_pus)
    ]
    names = shorten_list([domain for domain, _ in serving], MAX_NAMED)
    shares = f"QEMU's own threads of {names} run on cores of its vCPUs"
    if Relaxation.EMULATOR_CORE in relaxations:
        shared_pus = CpuSet.union(pus for _, pus in serving)
        shared_count = sum(not core.pus.isdisjoint(shared_pus) for core in host.cores)
        fewer = min(request.vcpus, cores * threads) - threads * shared_count
        yield finding(
            "emulator-shares-vcpus",
            format_cpus(shared_pus),
            observed=shares,
            case="of another VM" if fewer > 0 else None,
            values={"vcpus": fewer},
        )
    if Relaxation.HOST_CORE in relaxations:
        also = f"; {shares}" if serving else ""
        fewer = min(request.vcpus, cores * threads) - threads
        yield finding(
            "host-core-taken",
            host.name,
            observed=f"the VM uses the host's last core without vCPUs{also}",
            case="of a plan" if fewer > 0 else "of one core",
            values={"vcpus": fewer},
        )
    if Relaxation.HOST_MEMORY in relaxations:
        yield _report_taken_memory(host, request)


def _report_taken_memory(host: Host, request: GuestRequest) -> Finding:
    return finding(
        "host-memory-taken",
        host.name,
        observed=f"{format_memory(request)} leave the host less than its reserve and the "
        f"{format_bytes(compute_overhead(request))} that QEMU and page tables need: the host may "
        "kill the VM",
    )


def _check_homes(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], nodes: Sequence[NodeIndex]
) -> Iterator[Finding]:
    """Yield findings on GPUs whose node has no vCPU; in a flat guest only of other packages."""
    mirrored = request.layout.pcie is GuestPcie.HOST
    package_of = {node.index: node.package for node in host.nodes if node.pus}
    packages = {package_of.get(node) for node in nodes} - {None}
    limited = len(nodes) == request.options.max_nodes
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        if nodes and gpu.bdf in devices and gpu.node in package_of and gpu.node not in nodes:
            is_near = not mirrored and package_of[gpu.node] in packages
            yield finding(
                "gpu-away-from-home",
                str(gpu.bdf),
                observed=f"node {gpu.node} has no vCPU of the VM"
                f"{', and no guest NUMA node' if mirrored else ''}",
                severity=Severity.INFO if is_near else None,
                case="of a limit" if limited else None,
            )


def _check_nic_packages(
    host: Host, bdfs: Sequence[Bdf], nodes: Sequence[NodeIndex]
) -> Iterator[Finding]:
    """Yield findings on NICs paired with the VM's GPUs in a package without its vCPUs."""
    package_of = {node.index: node.package for node in host.nodes}
    packages = {package_of.get(node) for node in nodes}
    devices = [host.device_at[bdf] for bdf in bdfs if bdf in host.device_at]
    for nic in devices:
        if nic.kind is not DeviceKind.NIC or nic.node is None:
            continue
        package = package_of.get(nic.node)
        pair = next((g for g in devices if g.kind is DeviceKind.GPU and are_paired(g, nic)), None)
        if pair is not None and package is not None and package not in packages:
            yield finding(
                "nic-away-from-vm",
                str(nic.bdf),
                observed=f"paired with GPU {pair.bdf}, but its node {nic.node} is in a package "
                "without a vCPU of the VM",
            )


def bound_elsewhere(request: GuestRequest, nodes: Sequence[NodeIndex]) -> Iterator[Finding]:
    """Yield a finding if the layout keeps a binding that omits nodes of the vCPUs."""
    bound = request.guest.bound_nodes
    if bound is None or request.layout.memory is not MemoryBinding.KEEP:
        return
    omitted = [node for node in nodes if node not in bound]
    bound_text = format_nodes([NodeIndex(node) for node in bound])
    if omitted:
        yield finding(
            "memory-bound-elsewhere",
            format_nodes(omitted),
            observed=f"the definition binds all memory to {bound_text}, and layout "
            f"{request.layout.name} keeps that binding: vCPUs there have no local memory",
        )


_COSTS_OF_CORES = {
    Relaxation.SHARED_CORES: "not suffice",
    Relaxation.HOST_CORE: "use the host's last core",
    Relaxation.EMULATOR_CORE: "share cores with QEMU's own threads of other VMs",
    Relaxation.MIXED_KINDS: "mix performance and efficiency cores",
}


def list_whole_core_costs(host: Host, request: GuestRequest, placement: Placement) -> Iterator[str]:
    """Yield the extra cost of a whole core for each vCPU, as text: "whole cores would ...".
    placement: with whole cores."""
    allowed_relaxations = {Relaxation.MIXED_KINDS} if request.options.mixed_kinds else set()
    for relaxation, cost_text in _COSTS_OF_CORES.items():
        if relaxation in placement.relaxations and relaxation not in allowed_relaxations:
            yield cost_text
            if relaxation is Relaxation.SHARED_CORES:
                return
    vcpu_cores = find_allocations(host, request).vcpu_cores
    used = CpuSet.union(placement.vcpu_pins) | vcpu_cores
    idle = sum(core.pus.isdisjoint(used) for core in host.cores)
    if idle <= request.host_reserve.cores and Relaxation.HOST_CORE not in placement.relaxations:
        yield f"leave the host only its reserve of {plural(idle, 'core')}"


def check_document_siblings(
    host: Host,
    request: GuestRequest,
    placement: Placement,
    other: Placement | None,
    costs: Sequence[str],
) -> Iterator[Finding]:
    """Yield the finding on siblings or whole cores for a definition with siblings, with the cost of
    the alternative. other: the alternative placement, or None."""
    cores = len(_list_cores(host, placement))
    threads = request.guest.threads_per_core
    slower = "40 to 75 % slower under full load"
    if placement.threads_per_core > 1:
        spans = _format_more_spans(host, other, placement)
        detail = (
            f"{request.vcpus} vCPUs run on {placement.threads_per_core} hyper-threads of each of "
            f"{plural(cores, 'core')}, as the definition shows them, {slower} than on a whole core "
            f"each; whole cores would {' and '.join(costs)}{f', {spans}' if spans else ''}"
        )
        fix: str | None = "--siblings hidden gives each vCPU a whole core"
        if other is None or Relaxation.SHARED_CORES in other.relaxations:
            limit = _count_with_whole_cores(host, request)
            fix = f"at most {plural(limit, 'vCPU')} can have a whole core each" if limit else None
    elif other is not None:
        fewer = len(_list_cores(host, other))
        detail = (
            f"each vCPU gets a whole core, {cores} in all, though the definition shows "
            f"{plural(fewer, 'core')} of {threads} threads: on those cores they would be {slower}"
        )
        spans = _format_more_spans(host, placement, other)
        fix = (
            f"--siblings keep takes {plural(fewer, 'core')} and leaves {cores - fewer} more"
            f"{f'; whole cores are {spans}' if spans else ''}"
        )
    else:
        return
    yield finding("document-siblings", "<topology>", observed=detail, fix=fix)


def _list_cores(host: Host, placement: Placement) -> list[CpuSet]:
    used = CpuSet.union(placement.vcpu_pins)
    return [core.pus for core in host.cores if not core.pus.isdisjoint(used)]


def _format_more_spans(host: Host, wide: Placement | None, narrow: Placement | None) -> str:
    """Return the wider span of the first placement: "on 2 nodes instead of 1"."""
    if wide is None or narrow is None:
        return ""

    def llcs(placement: Placement) -> int:
        used = CpuSet.union(placement.vcpu_pins)
        return sum(not llc.pus.isdisjoint(used) for llc in host.llcs)

    counts = (
        ("last-level cache", llcs(wide), llcs(narrow)),
        ("node", len(set(wide.nodes)), len(set(narrow.nodes))),
    )
    return " and ".join(
        f"on {plural(wide_count, noun)} instead of {narrow_count}"
        for noun, wide_count, narrow_count in counts
        if wide_count > narrow_count
    )


def _count_with_whole_cores(host: Host, request: GuestRequest) -> int:
    """Return the most vCPUs with a whole core each that leave the host more than its reserve."""
    allocations = find_allocations(host, request)
    free = free_cpus(host, request, allocations)
    whole = [core.kind for core in host.cores if core.pus <= free.pus]
    weak_count = 0 if request.options.mixed_kinds else whole.count(CoreKind.EFFICIENCY)
    cores = free.cores_without_vcpus - request.host_reserve.cores - 1
    return max(0, min(cores, len(whole) - weak_count))
