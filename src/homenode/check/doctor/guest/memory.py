"""GuestMemory: where a domain's memory may lie, against where its vCPUs and devices are."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.check.doctor.guest.pins import nodes_of
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, MemoryKind
from homenode.vm.domain.document import Document
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import Vm

_PULLING = (DeviceKind.GPU, DeviceKind.NIC)


def is_bound_by_numad(document: Document) -> bool:
    """Whether libvirt asks numad for the nodes at each start, and then binds to them."""
    memory = document.root.at("numatune", "memory")
    return memory is not None and memory.get("placement") == "auto"


def memory_findings(facts: Vm, document: Document, host: Host) -> Iterator[Finding]:
    """Memory that is not bound, bound elsewhere, or bound in two ways; devices that are far."""
    if len(host.nodes) < 2:
        return
    if not is_bound_by_numad(document):
        yield from _unbound(facts, host)
    yield from _modes(facts)
    yield from _gpu_nodes(facts, host)
    yield from _far_devices(facts, host)


def _unbound(facts: Vm, host: Host) -> Iterator[Finding]:
    if not facts.is_pinned:
        return
    vcpu_nodes = nodes_of(facts.pinned_pus, host)
    unbound = [cell.id for cell in facts.cells if not cell.nodes]
    if len(facts.cells) > 1 and unbound:
        yield finding(
            "memory-unbound",
            f"cells {CpuSet(unbound)}",
            expected="memory bound to the node of the cell's vCPUs",
            observed="no <memnode> and no <memory>",
            source=facts.source,
        )
    elif len(facts.cells) < 2 and facts.binding is None and len(vcpu_nodes) == 1:
        as_planned = (
            facts.record is not None and facts.record.layout.memory is MemoryBinding.AS_IT_WAS
        )
        yield finding(
            "memory-unbound",
            "<numatune>",
            expected=f"memory bound to node {vcpu_nodes}, where the vCPUs are",
            observed="no binding",
            severity=Severity.INFO if as_planned else Severity.WARNING,
            source=facts.source,
        )
    elif len(facts.cells) < 2 and facts.binding is not None:
        away = facts.binding[1] - vcpu_nodes
        if vcpu_nodes and away:
            yield finding(
                "memory-elsewhere",
                "<numatune>",
                expected=f"memory on nodes {vcpu_nodes}, where the vCPUs are",
                observed=f"nodes {away} as well"
                if facts.binding[1] != away
                else f"on nodes {away} only",
                source=facts.source,
            )


def _modes(facts: Vm) -> Iterator[Finding]:
    if facts.binding is None or facts.binding[0] != "strict":
        return
    soft = [cell for cell in facts.cells if cell.mode not in ("strict", None)]
    if soft:
        yield finding(
            "memnode-not-strict",
            f"cells {CpuSet(cell.id for cell in soft)}",
            expected="mode strict, as <memory> says",
            observed=f"<memnode> with mode {', '.join(sorted({str(cell.mode) for cell in soft}))}",
            source=facts.source,
        )


def _gpu_nodes(facts: Vm, host: Host) -> Iterator[Finding]:
    gpu_nodes = CpuSet(n.index for n in host.nodes if n.memory_kind is MemoryKind.GPU)
    bound = facts.binding[1] if facts.binding is not None else CpuSet()
    for cell in facts.cells:
        bound |= cell.nodes
    if not bound.isdisjoint(gpu_nodes):
        yield finding(
            "memory-on-gpu",
            f"node {bound & gpu_nodes}",
            expected="nodes of the CPUs' own memory",
            observed="memory of a GPU",
            source=facts.source,
        )


def _far_devices(facts: Vm, host: Host) -> Iterator[Finding]:
    """Devices in packages where the VM has neither vCPUs nor memory.

    Between the nodes of one package little is lost, and the planner itself ranks that last.
    """
    if not facts.is_pinned:
        return
    here = nodes_of(facts.pinned_pus, host)
    if facts.binding is not None:
        here |= facts.binding[1]
    for cell in facts.cells:
        here |= cell.nodes
    by_bdf = {device.bdf: device for device in host.pci_devices}
    passed = [by_bdf.get(hostdev.bdf) for hostdev in facts.hostdevs]
    pulling = [
        device
        for device in passed
        if device is not None and device.kind in _PULLING and device.node is not None
    ]
    homes = {node.package for node in host.nodes if node.index in {d.node for d in pulling}}
    # Cores that do not divide over the devices' packages have to leave some devices far, and so
    # has a package without memory.
    topology = facts.cpu_topology
    cores = facts.vcpus // (1 if topology is None else topology[3])
    divides = not homes or cores % len(homes) == 0
    divides = divides and not any(node.memory_bytes == 0 for node in host.nodes if node.pus)
    near = _packages_whole(here, host)
    for device in pulling:
        if device.node is not None and int(device.node) not in near:
            yield finding(
                "device-far",
                str(device.bdf),
                expected=f"vCPUs and memory on the device's node {device.node}",
                observed=f"all of them on nodes {here}",
                severity=Severity.WARNING if divides else Severity.INFO,
                case=None if divides else "uneven cores",
                values={"packages": len(homes)},
                source=facts.source,
            )


def _packages_whole(nodes: CpuSet, host: Host) -> CpuSet:
    """These nodes and all others of their packages."""
    packages = {node.package for node in host.nodes if node.index in nodes} - {None}
    return nodes | CpuSet(node.index for node in host.nodes if node.package in packages)
