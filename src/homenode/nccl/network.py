"""Network: what NCCL makes of a machine's NICs, for people: who uses which, and what limits it.

The rate between hosts is that of the NICs that the GPUs choose; the search for channels may take
others in addition.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.machine.pci import PciLink
from homenode.nccl.guest_tree import QEMU_SWITCH, GuestTree, TreeGpu, TreeNic
from homenode.nccl.nets import NetPath, NetPlan
from homenode.nccl.system import PathType
from homenode.wording import first_few, plural

_MOST_NAMED = 4


class NicSeen(Struct, frozen=True, kw_only=True):
    """A NIC to NCCL. node: -1 where the kernel gives none. port_gb_per_s: the most of its model,
    None where that is not known."""

    number: int
    nic: Bdf
    node: int
    port_gb_per_s: float | None
    name: str | None


class NicPath(Struct, frozen=True, kw_only=True):
    """From a GPU to a NIC, in NCCL's words. gdr: by GPUDirect RDMA. relay: the GPU that it goes
    through by NVLink (PXN). chosen: whether the GPU uses this NIC."""

    gpu: Bdf
    nic: Bdf
    path: str
    gb_per_s: float
    gdr: bool
    relay: Bdf | None
    chosen: bool


class NetworkView(Struct, frozen=True, kw_only=True):
    """gdr_limit: the farthest path by GPUDirect RDMA that NCCL takes by itself. gb_per_s: between
    hosts, of the NICs that GPUs choose; limit: what the slowest of these is limited by."""

    nics: tuple[NicSeen, ...]
    paths: tuple[NicPath, ...]
    gdr_limit: str
    gb_per_s: float
    limit: str


def network_of(plan: NetPlan, tree: GuestTree) -> NetworkView:
    chosen = {(one.gpu, net) for one in plan.choices for net in one.nets}
    address = {net.number: net.address for net in plan.nets}
    paths = tuple(
        NicPath(
            gpu=one.gpu,
            nic=address[one.net],
            path=one.path.type.name,
            gb_per_s=one.path.gb_per_s,
            gdr=one.gdr,
            relay=one.relay,
            chosen=(one.gpu, one.net) in chosen,
        )
        for one in plan.paths
    )
    return NetworkView(
        nics=tuple(
            NicSeen(
                number=number,
                nic=nic.address,
                node=-1 if nic.node is None else nic.node,
                port_gb_per_s=nic.gb_per_s,
                name=nic.name,
            )
            for number, nic in enumerate(tree.nics)
        ),
        paths=paths,
        gdr_limit=gdr_limit(plan, tree).name,
        gb_per_s=plan.gb_per_s,
        limit=_limit(plan, [one for one in plan.paths if (one.gpu, one.net) in chosen]),
    )


def gdr_limit(plan: NetPlan, tree: GuestTree) -> PathType:
    """P2C counts only where a CPU is joined by C2C."""
    return plan.gdr_limit if any(gpu.has_c2c for gpu in tree.gpus) else PathType.PXB


def _limit(plan: NetPlan, used: Sequence[NetPath]) -> str:
    worst = min(used, key=lambda one: one.path.gb_per_s)
    port = next(net.gb_per_s for net in plan.nets if net.number == worst.net)
    rate = f"{worst.path.gb_per_s:g} GB/s"
    if worst.path.gb_per_s >= port:
        return f"the NICs' ports: {rate} each"
    return f"the PCIe path of {worst.gpu} to its NIC: {rate} of {port:g} GB/s ({_kind(worst)})"


def _kind(path: NetPath) -> str:
    return f"{path.path.type.name}{'' if path.gdr else ', without GPUDirect RDMA'}"


def network_findings(plan: NetPlan | None, tree: GuestTree, *, has_file: bool) -> Iterator[Finding]:
    """What of the NICs costs bandwidth between hosts, as the newest library has it."""
    if not has_file:
        yield from virtual_switch_findings(tree)
    if plan is None:
        return
    used = {
        one.gpu: [path for path in plan.paths if path.gpu == one.gpu and path.net in one.nets]
        for one in plan.choices
    }
    off = [gpu for gpu, paths in used.items() if not any(path.gdr for path in paths)]
    if off:
        kinds = sorted({path.path.type for gpu in off for path in used[gpu]})
        yield finding(
            "nccl-gdr-off",
            f"{len(off)} of {len(used)} GPUs",
            expected=f"a NIC within {gdr_limit(plan, tree).name}, NCCL's limit for GPUDirect RDMA",
            observed=f"their nearest NICs are {' and '.join(kind.name for kind in kinds)}: data "
            "goes through host memory",
            case=None if has_file else "without a file",
            source=tree.source,
        )
    far = [g for g, paths in used.items() if paths[0].path.type is PathType.SYS]
    if far and len(far) < len(used):
        yield finding(
            "nccl-nic-far",
            f"GPU {first_few(map(str, far), _MOST_NAMED)}",
            expected="a NIC on the GPU's own node",
            observed="a NIC beyond the link between two nodes' CPUs",
            source=tree.source,
        )
    in_use = {number for one in plan.choices for number in one.nets}
    least = min(net.gb_per_s for net in plan.nets if net.number in in_use)
    idle = [n for n in plan.nets if n.number not in in_use and n.gb_per_s >= least]
    if idle:
        yield finding(
            "nccl-nics-unused",
            f"{len(idle)} of {plural(len(plan.nets), 'NIC')}: "
            f"{first_few([str(net.address) for net in idle], _MOST_NAMED)}",
            expected="a GPU for each NIC that is as fast as those in use",
            observed="no GPU has them nearest",
            source=tree.source,
        )


def virtual_switch_findings(tree: GuestTree) -> Iterator[Finding]:
    """GPUs and NICs below ports of a virtual switch, which claim a lane of the 1st generation."""
    devices: tuple[TreeGpu | TreeNic, ...] = (*tree.gpus, *tree.nics)
    below = [device.address for device in devices if is_below_slow_switch(device)]
    if below:
        yield finding(
            "nccl-virtual-switch",
            f"{len(below)} of {plural(len(devices), 'GPU and NIC', 'GPUs and NICs')}: "
            f"{first_few(map(str, below), _MOST_NAMED)}",
            expected="switches with the host's links, from a topology file",
            observed="a virtual switch of 2.5 GT/s x1: 0.19 GB/s to NCCL",
            source=tree.source,
        )


def is_below_slow_switch(device: TreeGpu | TreeNic) -> bool:
    ends = [link for switch in device.switches for link in (switch.link.own, switch.link.port)]
    return any(_is_qemus(end) for end in (*ends, device.link.port))


def _is_qemus(end: PciLink | None) -> bool:
    slow = (QEMU_SWITCH.max_gt_per_s, QEMU_SWITCH.max_width)
    return end is not None and (end.max_gt_per_s, end.max_width) == slow
