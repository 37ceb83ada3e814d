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
from homenode.plan.request import GuestRequest
from homenode.plan.search.allocations import Allocations, listed
from homenode.plan.search.ladder import Concession, Fallback, MemoryRule
from homenode.plan.search.memory import memory_text, overhead_bytes
from homenode.topology import Host
from homenode.units import format_bytes

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
    pus = sum(pu.online and pu.allowed for pu in host.pus)
    if pus and request.vcpus > pus and request.layout.pinning is Pinning.NONE:
        yield PlanFinding(
            id="overcommitted",
            severity="warning",
            subject=host.name,
            detail=f"{request.vcpus} vCPUs share {pus} PUs, so some wait for others at any time",
            fix=f"lower vcpus to {pus}",
        )


def _parts_of_gpus(
    host: Host, request: GuestRequest, devices: Sequence[Bdf], others: Allocations
) -> Iterator[PlanFinding]:
    """What the VM's parts of GPUs share, and with whom; GPUs taken whole that have parts."""
    mediated = dict(request.mediated)
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        if gpu.physical_function is not None:
            continue
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
    isolated: CpuSet,
) -> Iterator[PlanFinding]:
    """Findings on devices, and on what gave way for the VM to fit."""
    yield from device_findings(host, request, devices, others)
    yield from _bound_elsewhere(request, own)
    yield from _away_from_home(host, request, devices, own)
    yield from _host_share(host, request, given, vcpu_pus, others)
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
            detail="no number of equal cells fits without a further package or a GPU away "
            "from its node",
        )
    if fallback.falls_back:
        yield PlanFinding(
            id="vcpus-share-cores",
            severity="warning",
            subject=host.name,
            detail=f"{request.vcpus} vCPUs do not get a core each, so they are pinned to "
            "hyper-threads of "
            "shared cores: 40 to 75 % slower under full load than on whole cores (published for "
            "XAPI's placement)",
            fix="lower vcpus to "
            f"{sum(core.pus.isdisjoint(others.vcpu_cores) for core in host.cores)} "
            "or fewer, or free cores",
        )
    if request.layout.siblings is Siblings.EXPOSED and fallback.grouping.threads == 1:
        yield PlanFinding(
            id="siblings-not-exposed",
            severity="warning",
            subject=host.name,
            detail="no whole groups of siblings are free for the VM, so the guest sees one "
            "thread per core"
            + (", also where two of its vCPUs share one" if fallback.grouping.counts_pus else ""),
            fix="turn SMT on, or take a layout that hides siblings",
        )
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


def _host_share(
    host: Host,
    request: GuestRequest,
    given: Sequence[Concession],
    vcpu_pus: CpuSet,
    others: Allocations,
) -> Iterator[PlanFinding]:
    if Concession.HOST_CORE in given:
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
            fix=f"lower vcpus to {max(1, request.vcpus - 1)}, or keep less with "
            "--host-reserve cores=0",
        )
    if Concession.HOST_MEMORY in given:
        needed = overhead_bytes(request)
        yield PlanFinding(
            id="host-memory-taken",
            severity="critical",
            subject=host.name,
            detail=f"{memory_text(request)} leave the host less than its reserve and the "
            f"{format_bytes(needed)} that QEMU and page tables need: the host may kill the VM",
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


def _incomplete_groups(host: Host, devices: Sequence[Bdf]) -> Iterator[PlanFinding]:
    """VFIO gives away whole IOMMU groups: a function that stays must have no driver of the host.

    A source that names no endpoint's driver is silent, so that a driver has to be assumed.
    """
    ours = set(devices)
    endpoints = [
        device
        for device in host.pci_devices
        if device.kind is not DeviceKind.BRIDGE and device.class_code >> 8 not in _CHIPSET_CLASSES
    ]
    is_silent = all(device.driver is None for device in endpoints)
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
