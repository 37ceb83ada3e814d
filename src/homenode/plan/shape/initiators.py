"""Initiators: the memory-less cells that a Grace GPU's memory and MIG instances go to in the guest.

The driver in the guest puts the GPU's memory online on nodes that belong to the GPU. Firmware gives
the host some for each GPU (8 on GH200: its memory, and 7 MIG instances); the guest needs as many.

Source: libvirt domain XML, <hostdev><acpi nodeset=>; QEMU acpi-generic-initiator; KubeVirt
enhancement 199; ids of device_kinds in KubeVirt pkg/util/hardware/grace.go.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.discover.device_kinds import NVIDIA
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.guest_numa import guest_distances
from homenode.vm.layout import GuestPcie
from homenode.vm.model import VmCell
from homenode.vm.plan_model import PlanFinding, plan_finding

GRACE_GPUS = frozenset({0x2342, 0x2348, 0x2941})
"""Device ids of NVIDIA's GPUs with a Grace CPU."""

LIBVIRT_WITH_INITIATORS = (11, 8, 0)
QEMU_WITH_INITIATORS = (9, 0, 0)
"""First versions with <acpi nodeset=> in <hostdev>, and with acpi-generic-initiator."""


class InitiatorCells(Struct, frozen=True):
    """The guest's cells with those of initiators behind them, and which are each GPU's."""

    cells: tuple[VmCell, ...]
    cells_of_gpu: dict[Bdf, CpuSet]
    findings: tuple[PlanFinding, ...] = ()
    gaps: tuple[Gap, ...] = ()


def is_grace(device: PciDevice) -> bool:
    return device.vendor_id == NVIDIA and device.device_id in GRACE_GPUS


def initiator_cells(
    host: Host | None,
    by_bdf: dict[Bdf, PciDevice],
    request: GuestRequest,
    placement: Placement,
    cells: tuple[VmCell, ...],
) -> InitiatorCells:
    """The cells that the Grace GPUs of the VM need, where the layout shows the guest its PCIe tree
    and the host's libvirt and QEMU can give them; else a finding."""
    passed = [by_bdf[bdf] for bdf in placement.devices if bdf in by_bdf]
    grace = tuple(device for device in passed if is_grace(device))
    if host is None or not grace or not request.guest.is_virt:
        return InitiatorCells(cells, {})
    found = initiator_nodes_of(host, grace)
    shows = request.layout.pcie is GuestPcie.MIRRORED
    if not found or not shows or not _can_give(host):
        return InitiatorCells(cells, {}, (_missing(host, grace, found, shows=shows),))
    gaps: list[Gap] = []
    grown, cells_of_gpu = with_initiator_cells(cells, placement.nodes, found, host, gaps)
    without = tuple(gpu for gpu in grace if gpu.bdf not in found)
    findings = (_missing(host, without, {}, shows=shows),) if without else ()
    return InitiatorCells(grown, cells_of_gpu, findings, tuple(gaps))


def _can_give(host: Host) -> bool:
    """libvirt is known to be new enough, and QEMU not known to be too old."""
    libvirt, qemu = host.settings.libvirt_version, host.settings.qemu_version
    if libvirt is None or libvirt < LIBVIRT_WITH_INITIATORS:
        return False
    return qemu is None or qemu >= QEMU_WITH_INITIATORS


def _missing(
    host: Host,
    gpus: Sequence[PciDevice],
    found: dict[Bdf, tuple[NodeIndex, ...]],
    *,
    shows: bool,
) -> PlanFinding:
    needed = sum(map(len, found.values()))
    versions = [
        f"{name} {'unknown' if version is None else '.'.join(map(str, version))}"
        for name, version in (
            ("libvirt", host.settings.libvirt_version),
            ("QEMU", host.settings.qemu_version),
        )
    ]
    if not found:
        detail = (
            "expected host nodes of generic initiators to share among the Grace GPUs, found none "
            "or an uneven number"
        )
        case: str | None = "no nodes"
    elif not shows:
        detail = f"the guest's driver needs {needed} NUMA nodes without memory, and this layout "
        detail += "gives none"
        case = None
    else:
        detail = (
            f"the guest's driver needs {needed} NUMA nodes without memory (<acpi nodeset=>): "
            f"expected libvirt 11.8 and QEMU 9.0 or newer, found {' and '.join(versions)}"
        )
        case = "old programs"
    return plan_finding(
        "initiators-missing",
        ", ".join(str(gpu.bdf) for gpu in gpus),
        f"{detail}: it cannot put the GPU's memory online",
        case=case,
    )


def initiator_nodes_of(host: Host, gpus: Sequence[PciDevice]) -> dict[Bdf, tuple[NodeIndex, ...]]:
    """The generic initiator nodes without PUs of each of these Grace GPUs of the host; none for one
    that has none."""
    every = tuple((device.bdf, device.node) for device in host.pci_devices if is_grace(device))
    return initiator_nodes(host, every, gpus)


def initiator_nodes(
    host: Host, every: Sequence[tuple[Bdf, int | None]], gpus: Sequence[PciDevice]
) -> dict[Bdf, tuple[NodeIndex, ...]]:
    """The generic initiator nodes without PUs of each of these GPUs; none for one that has none.

    every: (function, node) of all Grace GPUs of the host, ascending. They share the nodes, each
    CPU's among the GPUs of that CPU: nothing in sysfs names the GPU of a node.
    """
    initiators = {node.index for node in host.nodes if node.generic_initiator}
    near = {node: homes[0] for node, homes in host.nearest_cpu_nodes.items() if node in initiators}
    found: dict[Bdf, tuple[NodeIndex, ...]] = {}
    for gpu in gpus:
        siblings = [bdf for bdf, node in every if node == gpu.node]
        nodes = [node for node, home in near.items() if home == gpu.node]
        share, left = divmod(len(nodes), len(siblings) or 1)
        if gpu.bdf in siblings and share and not left:
            first = siblings.index(gpu.bdf) * share
            found[gpu.bdf] = tuple(nodes[first : first + share])
    return found


def with_initiator_cells(
    cells: tuple[VmCell, ...],
    homes: Sequence[NodeIndex | None],
    nodes_of_gpu: dict[Bdf, tuple[NodeIndex, ...]],
    host: Host,
    gaps: list[Gap],
) -> tuple[tuple[VmCell, ...], dict[Bdf, CpuSet]]:
    """The cells and, behind them, one without PUs or memory for each host node of each GPU; these
    by GPU. homes: the node of each cell before.

    Distances are the host's. What the document gives between its own cells stays.
    """
    added: list[NodeIndex] = []
    cells_of_gpu: dict[Bdf, CpuSet] = {}
    for bdf, nodes in sorted(nodes_of_gpu.items()):
        start = len(cells) + len(added)
        cells_of_gpu[bdf] = CpuSet(range(start, start + len(nodes)))
        added += nodes
    if not added:
        return cells, cells_of_gpu
    count = len(cells)
    online = {node.index for node in host.nodes}
    known = tuple(node for node in homes if node is not None and node in online)
    rows = guest_distances(host, (*known, *added), gaps) if len(known) == count else ()
    grown = list(cells)
    if rows:
        for i, cell in enumerate(cells):
            own = cell.distances or rows[i][:count]
            grown[i] = structs.replace(cell, distances=own + rows[i][count:])
    for i, node in enumerate(added, start=count):
        stated = rows[i] if rows else ()
        grown.append(VmCell(id=i, vcpus=CpuSet(), host_nodes=(node,), distances=stated))
    return tuple(grown), cells_of_gpu
