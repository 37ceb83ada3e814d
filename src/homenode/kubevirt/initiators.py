"""Initiators: the Grace GPUs of a host, and why one of a VM has no nodes of generic initiators."""

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.discover.device_kinds import NVIDIA
from homenode.discover.pci_nodes import Locality
from homenode.discover.pci_tree import PCI
from homenode.discover.readings import read_number
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.pci import PciDevice
from homenode.plan.shape.initiators import GRACE_GPUS, initiator_nodes
from homenode.snapshot.protocol import Snapshot
from homenode.topology import Host


def initiators_of(
    snapshot: Snapshot, host: Host, gpus: tuple[PciDevice, ...]
) -> tuple[dict[Bdf, tuple[NodeIndex, ...]], tuple[str, ...]]:
    """The generic initiator nodes of each of these GPUs, and a note for each that has none."""
    every = _grace_gpus(snapshot, Locality.of(host.nodes, CpuSet(), host.distances))
    found = initiator_nodes(host, every, gpus)
    notes = [
        f"warning: {gpu.bdf}: expected host nodes of generic initiators to share among the "
        f"{sum(node == gpu.node for _, node in every)} Grace GPUs of node {gpu.node}, found none "
        "or an uneven number: the guest's driver cannot put the GPU's memory online"
        for gpu in gpus
        if gpu.bdf not in found
    ]
    return found, tuple(notes)


def _grace_gpus(snapshot: Snapshot, locality: Locality) -> tuple[tuple[Bdf, NodeIndex | None], ...]:
    """(function, node of CPUs) of every Grace GPU of the host, the VM's or not, ascending."""
    found: list[tuple[Bdf, NodeIndex | None]] = []
    for name in snapshot.list(PCI) or ():
        folder = f"{PCI}/{name}"
        if read_number(snapshot, f"{folder}/device", 16) not in GRACE_GPUS:
            continue
        if read_number(snapshot, f"{folder}/vendor", 16) != NVIDIA:
            continue
        try:
            node = locality.node_of(read_number(snapshot, f"{folder}/numa_node"), None)
            found.append((Bdf.parse(name), node))
        except ParseError:
            continue  # no name of a function
    return tuple(sorted(found))
