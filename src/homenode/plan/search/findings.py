"""Findings: what the user should know of a placement that works."""

from collections.abc import Iterator, Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, is_viable_driver
from homenode.plan.layout import MemoryBinding, Siblings
from homenode.plan.model import PlanFinding
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Rung
from homenode.plan.search.taken import Taken
from homenode.topology import Host

_CHIPSET_CLASSES = frozenset({0x0600, 0x0601})
"""Host and ISA bridges, which have no driver that VFIO minds."""


def placement_findings(
    host: Host,
    request: GuestRequest,
    devices: Sequence[Bdf],
    taken: Taken,
    *,
    rung: Rung | None = None,
    own: Sequence[NodeIndex] = (),
    memory: Sequence[NodeIndex] = (),
    vcpu_pus: CpuSet = CpuSet(),
    isolated: CpuSet = CpuSet(),
) -> Iterator[PlanFinding]:
    """Findings on devices, memory elsewhere, siblings, core kinds and isolation."""
    for bdf in devices:
        holder = taken.holder(bdf)
        if holder is not None:
            yield PlanFinding(
                "device-in-use", "warning", str(bdf),
                f"domain {holder!r} has it, so the VM cannot start while that runs",
                "stop that domain, or choose another device",
            )  # fmt: skip
    yield from _incomplete_groups(host, devices)
    if rung is None:
        pus = sum(pu.online and pu.allowed for pu in host.pus)
        if pus and request.vcpus > pus:
            yield PlanFinding(
                "overcommitted", "warning", host.name,
                f"{request.vcpus} vCPUs share {pus} PUs, so some wait for others at any time",
                f"lower vcpus to {pus}",
            )  # fmt: skip
        return
    yield from _bound_elsewhere(request, own)
    further = sorted(set(memory) - set(own))
    if not rung.memory_follows and further:
        bound = request.layout.memory is not MemoryBinding.AS_IT_WAS
        yield PlanFinding(
            "memory-from-other-nodes", "warning", _nodes(further),
            f"node {', '.join(map(str, own))} cannot hold the memory next to the vCPUs, so "
            f"{'it is bound to' if bound else 'some will lie on'} further nodes",
            "lower the memory, free some on the VM's nodes, or move its vCPUs",
        )  # fmt: skip
    elif not rung.memory_follows:
        yield PlanFinding(
            "memory-uneven", "info", _nodes(own),
            "the nodes hold the memory together, but not each its vCPUs' share of it",
        )  # fmt: skip
    if request.layout.siblings is Siblings.EXPOSED and rung.threads == 1:
        yield PlanFinding(
            "siblings-not-exposed", "warning", host.name,
            "no whole groups of siblings serve the VM, so the guest sees one thread per core"
            + (", also where two of its vCPUs share one" if rung.counts_pus else ""),
            "turn SMT on, or take a layout that hides siblings",
        )  # fmt: skip
    if rung.mixed:
        yield PlanFinding(
            "mixed-kinds", "warning", host.name,
            "vCPUs lie on performance and on efficiency cores, so they differ in speed",
        )  # fmt: skip
    if isolated and not vcpu_pus <= isolated:
        outside = vcpu_pus - isolated
        yield PlanFinding(
            "vcpus-not-isolated", "info", f"PUs {outside}",
            f"{len(outside)} vCPUs lie outside isolcpus and nohz_full, where the host may run too",
        )  # fmt: skip


def _bound_elsewhere(request: GuestRequest, own: Sequence[NodeIndex]) -> Iterator[PlanFinding]:
    """A binding that the layout keeps, and that leaves out nodes of the vCPUs."""
    bound = request.guest.bound_nodes
    if bound is None or request.layout.memory is not MemoryBinding.AS_IT_WAS:
        return
    without = [node for node in own if node not in bound]
    where = _nodes([NodeIndex(node) for node in bound])
    if without:
        yield PlanFinding(
            "memory-bound-elsewhere", "warning", _nodes(without),
            f"the document binds all memory to {where}, and layout "
            f"{request.layout.name} leaves that as it was: the vCPUs there have none of it near",
            "take pin-bound or a layout with cells, or remove <numatune>",
        )  # fmt: skip


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
                "iommu-group-incomplete", "warning", str(first),
                f"its IOMMU group {group} also holds {', '.join(others[:4])}{more}: VFIO refuses "
                "the start while a driver of the host has one of these",
                "pass them as well (--device), or bind them to vfio-pci, or unbind their drivers",
            )  # fmt: skip


def _nodes(indices: Sequence[NodeIndex]) -> str:
    return f"nodes {CpuSet(indices)}" if len(indices) > 1 else f"node {CpuSet(indices)}"
