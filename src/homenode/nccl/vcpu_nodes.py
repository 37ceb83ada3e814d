"""VcpuNodes: which vCPUs run on which host node, and what the guest calls those nodes."""

from collections.abc import Sequence

from homenode.cpuset import CpuSet, PuIndex
from homenode.indices import NodeIndex
from homenode.nccl.guest_side import GuestSide
from homenode.topology import Host


def vcpus_of_nodes(host: Host, guest: GuestSide) -> dict[NodeIndex, CpuSet]:
    """Host node -> the vCPUs that run there: by their pins, else by their cell's memory.

    vCPUs that float run on every node that has PUs.
    """
    bound = {
        vcpu: cell.host_nodes for cell in guest.cells for vcpu in cell.vcpus if cell.host_nodes
    }
    everywhere = tuple(node.index for node in host.nodes if node.pus)
    found: dict[NodeIndex, set[int]] = {}
    for vcpu, pin in enumerate(guest.vcpu_pins):
        if pin is not None:
            here = tuple(node.index for node in host.nodes if not node.pus.isdisjoint(pin))
        else:
            here = bound.get(PuIndex(vcpu), everywhere)
        for node in here:
            found.setdefault(node, set()).add(vcpu)
    return {node: CpuSet(vcpus) for node, vcpus in found.items()}


def nearest_vcpus(host: Host, node: NodeIndex, vcpus_of_node: dict[NodeIndex, CpuSet]) -> CpuSet:
    """vCPUs of the nodes nearest to one that runs none; all where the host gives no distances."""
    far = {other: host.distance(node, other) or 0 for other in vcpus_of_node}
    least = min(far.values(), default=0)
    bits = 0
    for other, vcpus in vcpus_of_node.items():
        if far[other] == least:
            bits |= vcpus.bits
    return CpuSet.from_bits(bits)


def numa_ids(used: Sequence[NodeIndex], guest: GuestSide) -> dict[NodeIndex, int]:
    """Host node -> the guest's node for it: the lowest one whose memory is there.

    A host node that the guest has no node for gets the next number that no node of the guest has:
    NCCL takes any, as long as the vCPUs are given with it.
    """
    found: dict[NodeIndex, int] = {}
    for cell, number in zip(guest.cells, guest.node_of_cell, strict=True):
        for node in cell.host_nodes[:1]:
            found[node] = min(number, found.get(node, number))
    spare = max(guest.node_of_cell, default=-1) + 1
    for node in used:
        if node not in found:
            found[node] = spare
            spare += 1
    return found
