"""Findings: what the user should know of a placement that works."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, PartKind, PciDevice, is_viable_driver
from homenode.plan.gpu_parts import is_divided
from homenode.plan.layout import GuestCells, GuestPcie, MemoryBinding, Pinning, Siblings
from homenode.plan.model import PlanFinding
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.search.allocations import Allocations, allocations, listed
from homenode.plan.search.brought import are_paired, switched_gpus
from homenode.plan.search.ladder import Concession, Fallback, MemoryRule
from homenode.plan.search.memory import (
    memory_text,
    node_memory,
    overhead_bytes,
    page_size_bytes,
    pages_wanted,
)
from homenode.topology import CoreKind, Host
from homenode.units import format_bytes
from homenode.wording import plural

_CHIPSET_CLASSES = frozenset({0x0600, 0x0601})
"""Host and ISA bridges, which have no driver that VFIO minds."""


def device_findings(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """Findings on the devices, and on a VM of more vCPUs than the host has PUs."""
    mediated = dict(request.mediated)
    for bdf in devices:
        device = mediated.get(bdf, bdf)
        holder = others.holder(device)
        if holder is not None:
            yield PlanFinding(
                id="device-in-use",
                severity="warning",
                subject=str(device),
                detail=f"domain {holder!r} has it, so the VM cannot start while that runs",
                fix="stop that domain, or choose another device",
            )
    # A mediated device has an IOMMU group of its own.
    yield from _incomplete_groups(host, [bdf for bdf in devices if bdf not in mediated])
    yield from _parts_of_gpus(host, request, devices, others)
    yield from _nics_without_gpu(host, devices, others)
    yield from _brought(host, request, devices, others)
    yield from _nvswitches_left_out(host, request, devices, others)
    pus = sum(pu.online and pu.allowed for pu in host.pus)
    if pus and request.vcpus > pus and request.layout.pinning is Pinning.NONE:
        yield PlanFinding(
            id="overcommitted",
            severity="warning",
            subject=host.name,
            detail=f"{request.vcpus} vCPUs share {pus} PUs, so some wait for others at any time",
            fix=f"lower vcpus to {pus}",
        )


def _nics_without_gpu(
    host: Host, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """NICs whose GPUs the VM does not get, while it gets other GPUs."""
    ours = [host.device_at[bdf] for bdf in devices if bdf in host.device_at]
    gpus = [device for device in ours if device.kind is DeviceKind.GPU]
    nics = [device for device in ours if device.kind is DeviceKind.NIC]
    apart = {
        nic.bdf: paired
        for nic in nics
        if gpus
        and (paired := [gpu for gpu in _whole_gpus(host) if are_paired(gpu, nic)])
        and not any(are_paired(gpu, nic) for gpu in gpus)
    }
    if not apart:
        return
    near = [
        nic.bdf
        for nic in host.devices_of_kind(DeviceKind.NIC)
        if nic.physical_function is None
        and others.holder(nic.bdf) is None
        and nic not in nics
        and any(are_paired(gpu, nic) for gpu in gpus)
    ]
    pairs = (f"{nic} with {', '.join(str(gpu.bdf) for gpu in its)}" for nic, its in apart.items())
    yield PlanFinding(
        id="nic-without-gpu",
        severity="info",
        subject=", ".join(map(str, apart)),
        detail=f"paired by switch or root complex with GPUs that the VM does not get "
        f"({'; '.join(pairs)}), and with none that it gets: data from its GPUs crosses a CPU",
        fix=f"pass NICs next to its GPUs: {', '.join(map(str, near[:8]))}"
        if near
        else "name the GPUs next to the NICs: --device",
    )


def _brought(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """NICs that GPUs bring while the host may use them, and GPUs that bring none."""
    if not request.with_nics:
        return
    ours = [host.device_at[bdf] for bdf in devices]
    nics = [device for device in ours if device.kind is DeviceKind.NIC]
    own = [nic for nic in nics if nic.bdf not in request.devices]
    in_use = [nic for nic in own if nic.driver is not None and not is_viable_driver(nic.driver)]
    unknown = [nic for nic in own if nic.driver is None] if _drivers_are_unknown(host) else []
    leave = "leave the host with the VM's start, and so does what they carry for it"
    drivers = ", ".join(sorted({nic.driver for nic in in_use if nic.driver is not None}))
    for found, severity, what in (
        (in_use, "warning", f"{drivers} of the host has them"),
        (unknown, "info", "the host's source does not say which drivers have them"),
    ):
        if found:
            yield PlanFinding(
                id="nic-of-host",
                severity=severity,
                subject=", ".join(str(nic.bdf) for nic in found),
                detail=f"the VM's GPUs bring these NICs, and {what}: their interfaces {leave}",
                fix="look on the host: ip route, ip -br address, /sys/bus/pci/devices/BDF/net; "
                "where it needs one, name the others with --device in place of --with-nics",
            )
    for gpu in ours:
        if gpu.kind is not DeviceKind.GPU or any(are_paired(gpu, nic) for nic in nics):
            continue
        near = [nic for nic in host.devices_of_kind(DeviceKind.NIC) if are_paired(gpu, nic)]
        held = [f"{nic.bdf} by {who!r}" for nic in near if (who := others.holder(nic.bdf))]
        why = f"in use: {', '.join(held)}" if held else "none is on its switch or root complex"
        yield PlanFinding(
            id="gpu-without-nic",
            severity="warning",
            subject=str(gpu.bdf),
            detail=f"--with-nics found no NIC for this GPU: {why}",
            fix="choose other GPUs, or a NIC with --device",
        )


def _nvswitches_left_out(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """All GPUs of a board without its NVSwitches, unless another VM has these: it runs Fabric
    Manager for all."""
    for board in () if request.without_nvlink else switched_gpus(host):
        missing = board.left_out(devices)
        if missing and all(others.holder(bdf) is None for bdf in board.switches):
            yield PlanFinding(
                id="nvswitches-left-out",
                severity="warning",
                subject=", ".join(map(str, missing)),
                detail=f"the VM gets all {len(board.gpus)} GPUs that these NVSwitches join, and "
                f"{'none' if len(missing) == len(board.switches) else 'not all'} of these: unless "
                "a Fabric Manager outside activates the partition of all GPUs, CUDA fails to start "
                "(802, system not yet initialized)",
                fix="plan with --with-nvswitches; leave it where a Fabric Manager on the host or "
                "in a service VM serves all VMs (FABRIC_MODE=1)",
            )


def _whole_gpus(host: Host) -> list[PciDevice]:
    return [g for g in host.devices_of_kind(DeviceKind.GPU) if g.physical_function is None]


def memory_short(host: Host, request: GuestRequest) -> Iterator[PlanFinding]:
    """More memory than all nodes have free, or than they have next to what the host needs, for a VM
    whose memory no node was asked for."""
    page, wanted = page_size_bytes(host, request), pages_wanted(host, request)
    free = _free_pages(host, request, keeps_reserve=False)
    if free is not None and free < wanted:
        size = format_bytes(free * page)
        yield PlanFinding(
            id="memory-short",
            severity="critical",
            subject=host.name,
            detail=f"{memory_text(request)} for the VM, {size} free on all nodes together: the "
            "start fails, or the host's OOM killer ends the VM",
            fix="lower the memory, or choose another host",
        )
        return
    # Of huge pages what QEMU needs is off already.
    needed = 0 if request.page_bytes is not None else -(-overhead_bytes(request) // page)
    free = _free_pages(host, request, keeps_reserve=True)
    if free is not None and free < wanted + needed:
        yield _host_memory_taken(host, request)


def _free_pages(host: Host, request: GuestRequest, *, keeps_reserve: bool) -> int | None:
    """Of all nodes together; None where that of one is not known."""
    memory = node_memory(host, request, keeps_reserve=keeps_reserve).values()
    known = [one.pages for one in memory if one.pages is not None]
    return sum(known) if known and len(known) == len(memory) else None


def _parts_of_gpus(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """What the VM's parts of GPUs share, and with whom; GPUs taken whole that have parts."""
    mediated = dict(request.mediated)
    for gpu in _whole_gpus(host):
        functions = {part.bdf for part in gpu.parts if part.bdf is not None} - {gpu.bdf}
        yield from _without_vgpu(host, gpu, devices, mediated)
        own = [bdf for bdf in devices if bdf in functions or (bdf == gpu.bdf and bdf in mediated)]
        holders = (
            others.holder(one)
            for part in gpu.parts
            for one in (part.bdf, part.uuid)
            if one is not None and one != gpu.bdf
        )
        users = sorted({name for name in holders if name is not None})
        if gpu.bdf in devices and gpu.bdf not in own and is_divided(gpu):
            yield PlanFinding(
                id="gpu-and-its-parts",
                severity="warning",
                subject=str(gpu.bdf),
                detail=f"the GPU as a whole takes its {_parts_counted(gpu)} from whoever has them"
                + (f" ({listed(users)})" if users else "")
                + ": they end when its driver lets go of it",
                fix="pass parts alone, or remove them: nvidia-smi mig -dgi, echo 0 > sriov_numvfs",
            )
        elif own:
            shared = sum(part.is_for_vms for part in gpu.parts) - len(own)
            yield PlanFinding(
                id="gpu-shared",
                severity="info",
                subject=", ".join(map(str, own)),
                detail=f"part of GPU {gpu.bdf}, which {shared} other parts share"
                + (f", some of {listed(users)}" if users else "")
                + ": memory bandwidth, link and copies are one GPU's",
            )


def _without_vgpu(
    host: Host, gpu: PciDevice, devices: Sequence[Bdf], mediated: Mapping[Bdf, str]
) -> Iterator[PlanFinding]:
    """Virtual functions of a GPU with vGPUs, passed by their address, that are none themselves."""
    parts = {part.bdf: part for part in gpu.parts if part.is_for_vms and part.profile is not None}
    for bdf in devices:
        function = host.device_at[bdf]
        if function.physical_function != gpu.bdf or not parts or bdf in mediated:
            continue
        part = parts.get(bdf)
        if part is not None and part.uuid is None:
            continue
        yield PlanFinding(
            id="vgpu-missing",
            severity="critical",
            subject=str(bdf),
            detail="it has no vGPU type, so the VM's start fails"
            if part is None
            else f"VFIO gives its mediated device {part.uuid}, not the function: the start fails",
            fix="write a type to its nvidia/current_vgpu_type, or choose another part"
            if part is None
            else f"--device {part.uuid}",
        )


def _parts_counted(gpu: PciDevice) -> str:
    names = {
        PartKind.MIG: "MIG instances",
        PartKind.MEDIATED: "mediated devices",
        PartKind.PARTITION: "partitions",
        PartKind.VIRTUAL_FUNCTION: "virtual functions",
    }
    counts = Counter(part.kind for part in gpu.parts)
    text = " and ".join(f"{count} {names[kind]}" for kind, count in counts.items())
    return text or f"{gpu.sriov_num_vfs} virtual functions"


def placement_findings(
    host: Host,
    request: GuestRequest,
    devices: Sequence[Bdf],
    others: Allocations,
    *,
    given: Sequence[Concession],
    fallback: Fallback,
    own: Sequence[NodeIndex],
    memory: Sequence[NodeIndex],
    vcpu_pus: CpuSet,
    threads: int,
    isolated: CpuSet,
) -> Iterator[PlanFinding]:
    """Findings on devices, and on what gave way for the VM to fit. threads: siblings of a core that
    the guest is shown."""
    yield from device_findings(host, request, devices, others)
    yield from _bound_elsewhere(request, own)
    yield from _away_from_home(host, request, devices, own)
    yield from _nics_in_other_packages(host, devices, own)
    yield from _host_share(host, request, given, vcpu_pus, threads, others)
    further = sorted(set(memory) - set(own))
    if fallback.memory is MemoryRule.ELSEWHERE and further:
        bound = request.layout.memory is not MemoryBinding.AS_IT_WAS
        yield PlanFinding(
            id="memory-from-other-nodes",
            severity="warning",
            subject=_nodes(further),
            detail=f"node {', '.join(map(str, own))} cannot hold the memory next to the vCPUs, so "
            f"{'it is bound to' if bound else 'some will lie on'} further nodes",
            fix="lower the memory, free some on the VM's nodes, or move its vCPUs",
        )
    elif fallback.memory is not MemoryRule.FOLLOWS:
        mirrored = request.layout.cells is GuestCells.MIRRORED
        yield PlanFinding(
            id="memory-uneven",
            severity="warning" if mirrored else "info",
            subject=_nodes(own),
            detail="the nodes hold the memory together, but not each its vCPUs' share of it",
            fix="free memory on the nodes, or lower it" if mirrored else None,
        )
    if Concession.UNEQUAL_CELLS in given:
        yield PlanFinding(
            id="unequal-cells",
            severity="info",
            subject=_nodes(own),
            detail="no number of equal cells fits without a further package, a further node or a "
            "GPU away from its node",
        )
    shows = request.layout.siblings is Siblings.EXPOSED or fallback.shares
    if shows and threads == 1 and request.layout.pinning is not Pinning.NODE:
        yield _not_exposed(host, request, fallback)
    if fallback.mixed:
        yield PlanFinding(
            id="mixed-kinds",
            severity="info" if request.mixed_kinds else "warning",
            subject=host.name,
            detail="vCPUs lie on performance and on efficiency cores, so they differ in speed",
            fix="ask for no more vCPUs than there are performance cores",
        )
    if isolated and not vcpu_pus <= isolated:
        outside = vcpu_pus - isolated
        yield PlanFinding(
            id="vcpus-not-isolated",
            severity="info",
            subject=f"PUs {outside}",
            detail=f"{len(outside)} vCPUs lie outside isolcpus and nohz_full, where the host "
            "may run too",
        )


_COSTS_OF_CORES = {
    Concession.SHARED_CORES: "not suffice",
    Concession.HOST_CORE: "take the host's last core",
    Concession.MIXED_KINDS: "mix performance and efficiency cores",
}


def whole_core_costs(host: Host, request: GuestRequest, placement: Placement) -> Iterator[str]:
    """What a whole core for each vCPU costs that siblings would not, in words: "whole cores would
    ...". placement: that of whole cores."""
    wanted = {Concession.MIXED_KINDS} if request.mixed_kinds else set()
    for given, words in _COSTS_OF_CORES.items():
        if given in placement.concessions and given not in wanted:
            yield words
            if given is Concession.SHARED_CORES:
                return
    others = allocations(host, request).vcpu_cores
    used = CpuSet.union(placement.vcpu_pins) | others
    left = sum(core.pus.isdisjoint(used) for core in host.cores)
    if left <= request.host_reserve.cores and Concession.HOST_CORE not in placement.concessions:
        yield f"leave the host no more than the {plural(left, 'core')} that it keeps"


def document_siblings(
    host: Host,
    request: GuestRequest,
    placement: Placement,
    other: Placement | None,
    costs: Sequence[str],
) -> Iterator[PlanFinding]:
    """Which of the two a document that shows siblings got, and what the other would have cost.
    other: the placement of the other choice; None = it has none."""
    cores = len(_cores_of(host, placement))
    threads = request.guest.threads_per_core
    slower = "40 to 75 % slower under full load"
    if placement.threads_per_core > 1:
        spans = _more_spans(host, other, placement)
        detail = (
            f"{request.vcpus} vCPUs run on {placement.threads_per_core} hyper-threads of each of "
            f"{plural(cores, 'core')}, as the document shows them, {slower} than on a whole core "
            f"each; whole cores would {' and '.join(costs)}{f', {spans}' if spans else ''}"
        )
        fix: str | None = "--siblings hidden gives each vCPU a whole core"
        if other is None or Concession.SHARED_CORES in other.concessions:
            most = _most_with_whole_cores(host, request)
            fix = f"at most {plural(most, 'vCPU')} can have a whole core each" if most else None
    elif not costs and other is not None:
        fewer = len(_cores_of(host, other))
        detail = (
            f"each vCPU gets a whole core, {cores} in all, though the document shows "
            f"{plural(fewer, 'core')} of {threads} threads: on those they would be {slower}"
        )
        spans = _more_spans(host, placement, other)
        fix = (
            f"--siblings as-document takes {plural(fewer, 'core')} and leaves {cores - fewer} more"
            f"{f'; whole cores lie {spans}' if spans else ''}"
        )
    else:
        return
    yield PlanFinding(
        id="document-siblings", severity="info", subject="<topology>", detail=detail, fix=fix
    )


def _cores_of(host: Host, placement: Placement) -> list[CpuSet]:
    used = CpuSet.union(placement.vcpu_pins)
    return [core.pus for core in host.cores if not core.pus.isdisjoint(used)]


def _more_spans(host: Host, wide: Placement | None, narrow: Placement | None) -> str:
    """What the first spans more of than the second: "on 2 nodes instead of 1"."""
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
        f"on {plural(more, noun)} instead of {fewer}"
        for noun, more, fewer in counts
        if more > fewer
    )


def _most_with_whole_cores(host: Host, request: GuestRequest) -> int:
    """vCPUs that could have a whole core each, and leave the host more than it keeps."""
    others = allocations(host, request).vcpu_cores
    free = [core for core in host.cores if core.pus.isdisjoint(others)]
    fast = [core for core in free if core.kind is not CoreKind.EFFICIENCY]
    kept = request.host_reserve.cores + 1
    return max(0, min(len(free) - kept, len(free if request.mixed_kinds else fast)))


def _not_exposed(host: Host, request: GuestRequest, fallback: Fallback) -> PlanFinding:
    """A topology has as many threads on each core: what is not so cannot be shown."""
    threads, packs = fallback.grouping.threads, fallback.grouping.counts_pus
    if fallback.shares or packs:
        why = "not each core runs as many vCPUs, so the guest sees one thread per core, also where "
        why += "two of its vCPUs share one"
        fix = "ask for as many vCPUs as there are whole cores, or as their hyper-threads"
    elif threads > 1:
        why = f"{request.vcpus} vCPUs are no whole groups of {threads} siblings, so the guest sees "
        why += "one thread per core, also where two of its vCPUs share one"
        fix = f"choose a multiple of {threads} vCPUs"
    else:
        why = "no whole groups of siblings are free for the VM, so the guest sees one thread per "
        why += "core"
        fix = "turn SMT on, or take a layout that hides siblings"
    return PlanFinding(
        id="siblings-not-exposed", severity="warning", subject=host.name, detail=why, fix=fix
    )


def _host_share(
    host: Host,
    request: GuestRequest,
    given: Sequence[Concession],
    vcpu_pus: CpuSet,
    threads: int,
    others: Allocations,
) -> Iterator[PlanFinding]:
    if Concession.HOST_CORE in given:
        cores = sum(not core.pus.isdisjoint(vcpu_pus) for core in host.cores)
        shared = [
            one.domain
            for one in others.by_domain
            if not (one.cores - one.vcpu_cores).isdisjoint(vcpu_pus)
        ]
        also = (
            f"; QEMU's own threads of {listed(shared)} run on cores of its vCPUs" if shared else ""
        )
        yield PlanFinding(
            id="host-core-taken",
            severity="warning",
            subject=host.name,
            detail=f"the VM takes the host's last core without vCPUs{also}",
            fix=f"lower vcpus to {max(1, min(request.vcpus, cores * threads) - threads)}, or keep "
            "less with "
            "--host-reserve cores=0",
        )
    if Concession.HOST_MEMORY in given:
        yield _host_memory_taken(host, request)


def _host_memory_taken(host: Host, request: GuestRequest) -> PlanFinding:
    return PlanFinding(
        id="host-memory-taken",
        severity="critical",
        subject=host.name,
        detail=f"{memory_text(request)} leave the host less than its reserve and the "
        f"{format_bytes(overhead_bytes(request))} that QEMU and page tables need: the host may "
        "kill the VM",
        fix="lower the memory, or the reserve with --host-reserve memory=SIZE",
    )


def _away_from_home(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], own: Sequence[NodeIndex]
) -> Iterator[PlanFinding]:
    """GPUs that the guest's tree cannot put next to their own node."""
    if request.layout.pcie is not GuestPcie.MIRRORED:
        return
    with_pus = {node.index for node in host.nodes if node.pus}
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        if gpu.bdf in devices and gpu.node in with_pus and gpu.node not in own:
            yield PlanFinding(
                id="gpu-away-from-home",
                severity="warning",
                subject=str(gpu.bdf),
                detail=f"its node {gpu.node} gives the VM no vCPU, so no guest cell is next to it",
                fix="free cores or memory there, or ask for --device-locality require",
            )


def _nics_in_other_packages(
    host: Host, devices: Sequence[Bdf], own: Sequence[NodeIndex]
) -> Iterator[PlanFinding]:
    """NICs that are paired with a GPU of the VM and lie in a package that it is not in."""
    package_of = {node.index: node.package for node in host.nodes}
    packages = {package_of.get(node) for node in own}
    ours = [host.device_at[bdf] for bdf in devices if bdf in host.device_at]
    for nic in ours:
        if nic.kind is not DeviceKind.NIC or nic.node is None or nic.node in own:
            continue
        package = package_of.get(nic.node)
        pair = next((g for g in ours if g.kind is DeviceKind.GPU and are_paired(g, nic)), None)
        if pair is not None and package is not None and package not in packages:
            yield PlanFinding(
                id="nic-away-from-vm",
                severity="warning",
                subject=str(nic.bdf),
                detail=f"paired with GPU {pair.bdf}, but its node {nic.node} is in a package that "
                "gives the VM no vCPU",
                fix="free cores or memory there, or pass another NIC",
            )


def _bound_elsewhere(request: GuestRequest, own: Sequence[NodeIndex]) -> Iterator[PlanFinding]:
    """A binding that the layout keeps, and that leaves out nodes of the vCPUs."""
    bound = request.guest.bound_nodes
    if bound is None or request.layout.memory is not MemoryBinding.AS_IT_WAS:
        return
    without = [node for node in own if node not in bound]
    where = _nodes([NodeIndex(node) for node in bound])
    if without:
        yield PlanFinding(
            id="memory-bound-elsewhere",
            severity="warning",
            subject=_nodes(without),
            detail=f"the document binds all memory to {where}, and layout "
            f"{request.layout.name} leaves that as it was: the vCPUs there have none of it near",
            fix="take pin-bound or a layout with cells, or remove <numatune>",
        )


def _endpoints(host: Host) -> list[PciDevice]:
    return [
        device
        for device in host.pci_devices
        if device.kind is not DeviceKind.BRIDGE and device.class_code >> 8 not in _CHIPSET_CLASSES
    ]


def _drivers_are_unknown(host: Host) -> bool:
    """Whether the host's source names no endpoint's driver."""
    return all(device.driver is None for device in _endpoints(host))


def _incomplete_groups(host: Host, devices: Sequence[Bdf]) -> Iterator[PlanFinding]:
    """VFIO gives away whole IOMMU groups: a function that stays must have no driver of the host.

    A source that names no endpoint's driver is silent, so that a driver has to be assumed.
    """
    ours = set(devices)
    endpoints = _endpoints(host)
    is_silent = _drivers_are_unknown(host)
    groups = {
        device.iommu_group: device.bdf
        for device in reversed(endpoints)
        if device.bdf in ours and device.iommu_group is not None
    }
    for group, first in sorted(groups.items()):
        others = [
            f"{device.bdf} ({device.driver or 'driver not known'})"
            for device in endpoints
            if device.iommu_group == group
            and device.bdf not in ours
            and (is_silent if device.driver is None else not is_viable_driver(device.driver))
        ]
        if others:
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            yield PlanFinding(
                id="iommu-group-incomplete",
                severity="warning",
                subject=str(first),
                detail=f"its IOMMU group {group} also holds {', '.join(others[:4])}{more}: "
                "VFIO refuses "
                "the start while a driver of the host has one of these",
                fix="pass them as well (--device), or bind them to vfio-pci, or unbind their "
                "drivers",
            )


def _nodes(indices: Sequence[NodeIndex]) -> str:
    return f"nodes {CpuSet(indices)}" if len(indices) > 1 else f"node {CpuSet(indices)}"
