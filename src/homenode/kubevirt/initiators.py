"""Initiators: the memory-less cells that a Grace GPU's memory and MIG instances go to in the guest.

The driver in the guest puts the GPU's memory online on nodes that belong to the GPU. Firmware gives
the host some for each GPU (8 on GH200: its memory, and 7 MIG instances); the guest needs as many.

Source: libvirt domain XML, <hostdev><acpi nodeset=>; QEMU acpi-generic-initiator; KubeVirt
enhancement 199; ids of device_kinds in KubeVirt pkg/util/hardware/grace.go.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.discover.device_kinds import NVIDIA
from homenode.discover.pci_tree import PCI
from homenode.discover.readings import read_number
from homenode.domain.document import Document
from homenode.domain.edits import Edit, New, append, apply, set_attribute
from homenode.domain.fields import host_address
from homenode.domain.hostdevs import hostdev_elements
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.kubevirt.needed_host import GRACE_GPUS
from homenode.pci import PciDevice
from homenode.plan.model import GuestCellId, Plan, PlannedCell
from homenode.plan.shape.guest_numa import guest_distances
from homenode.snapshot.protocol import Snapshot
from homenode.topology import Host


@dataclass(frozen=True, slots=True)
class Initiators:
    """Host nodes of each Grace GPU of the VM, by function; why some has none."""

    nodes_of_gpu: dict[Bdf, tuple[NodeIndex, ...]]
    notes: tuple[str, ...]


def initiators_of(snapshot: Snapshot, host: Host, gpus: tuple[PciDevice, ...]) -> Initiators:
    """The generic initiator nodes without PUs of each of these GPUs.

    They are shared out among all Grace GPUs of the host, each CPU's nodes among the GPUs of that
    CPU: nothing in sysfs names the GPU of a node.
    """
    every = _grace_gpus(snapshot)
    cpu_of_node = _nearest_cpu_nodes(host)
    found: dict[Bdf, tuple[NodeIndex, ...]] = {}
    notes: list[str] = []
    for gpu in gpus:
        beside = [bdf for bdf, node in every if node == gpu.node]
        nodes = [node for node, cpu in cpu_of_node.items() if cpu == gpu.node]
        share, left = divmod(len(nodes), len(beside) or 1)
        if gpu.bdf not in beside or not share or left:
            notes.append(
                f"warning: {gpu.bdf}: expected host nodes of generic initiators to share among the "
                f"{len(beside)} Grace GPUs of node {gpu.node}, found {len(nodes)}: the guest's "
                "driver cannot put the GPU's memory online"
            )
            continue
        first = beside.index(gpu.bdf) * share
        found[gpu.bdf] = tuple(nodes[first : first + share])
    return Initiators(found, tuple(notes))


def with_initiator_cells(
    cells: tuple[PlannedCell, ...],
    homes: tuple[NodeIndex | None, ...],
    initiators: Initiators,
    host: Host,
    gaps: list[Gap],
) -> tuple[tuple[PlannedCell, ...], dict[Bdf, tuple[int, int]]]:
    """The cells and, behind them, one without PUs or memory for each host node of each GPU; first
    and last of these by GPU. homes: the node of each cell before.

    Distances are the host's. What the document tells between its own cells stays.
    """
    added: list[NodeIndex] = []
    span_of_gpu: dict[Bdf, tuple[int, int]] = {}
    for bdf, nodes in sorted(initiators.nodes_of_gpu.items()):
        start = len(cells) + len(added)
        span_of_gpu[bdf] = (start, start + len(nodes) - 1)
        added += nodes
    if not added:
        return cells, span_of_gpu
    count = len(cells)
    online = {node.index for node in host.nodes}
    known = tuple(node for node in homes if node is not None and node in online)
    rows = guest_distances(host, (*known, *added), gaps) if len(known) == count else ()
    grown = list(cells)
    if rows:
        for i, cell in enumerate(cells):
            own = cell.distances or rows[i][:count]
            grown[i] = replace(cell, distances=own + rows[i][count:])
    for i, node in enumerate(added, start=count):
        told = rows[i] if rows else ()
        grown.append(PlannedCell(GuestCellId(i), CpuSet(), 0, (node,), told))
    return tuple(grown), span_of_gpu


def initiator_step(
    span_of_gpu: dict[Bdf, tuple[int, int]],
) -> Callable[[Document, Plan], Document]:
    """A step of the rewrite that names the cells of each GPU in its <hostdev>."""

    def step(document: Document, _plan: Plan) -> Document:
        edits: list[Edit] = []
        for element, _ in hostdev_elements(document):
            source = element.at("source", "address")
            assert source is not None, "hostdev_elements gives those with a source"
            span = span_of_gpu.get(host_address(document, source))
            if span is None:
                continue
            nodeset = f"{span[0]}-{span[1]}" if span[0] < span[1] else str(span[0])
            acpi = element.child("acpi")
            if acpi is None:
                edits += append(document, element, [New("acpi", (("nodeset", nodeset),))])
            else:
                edits += set_attribute(document, acpi, "nodeset", nodeset)
        return apply(document, edits)

    return step


def _grace_gpus(snapshot: Snapshot) -> tuple[tuple[Bdf, int | None], ...]:
    """(function, node) of every Grace GPU of the host, the VM's or not, ascending."""
    found: list[tuple[Bdf, int | None]] = []
    for name in snapshot.list(PCI) or ():
        folder = f"{PCI}/{name}"
        if read_number(snapshot, f"{folder}/device", 16) not in GRACE_GPUS:
            continue
        if read_number(snapshot, f"{folder}/vendor", 16) != NVIDIA:
            continue
        try:
            found.append((Bdf.parse(name), read_number(snapshot, f"{folder}/numa_node")))
        except ParseError:
            continue  # no name of a function
    return tuple(sorted(found))


def _nearest_cpu_nodes(host: Host) -> dict[NodeIndex, NodeIndex]:
    """The nearest node with PUs of each initiator node without; ascending, the lowest of equals."""
    homes = [node.index for node in host.nodes if node.pus]
    if not homes:
        return {}
    return {
        node.index: min(homes, key=lambda home: (host.distance(home, node.index) or 0, home))
        for node in host.nodes
        if node.generic_initiator and not node.pus
    }
