"""For each finding of an explanation a machine that has it and one that nearly has it."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.machine.pci import PciLink
from homenode.nccl.explanation import explain
from homenode.nccl.guest_tree import QEMU_SWITCH, GuestTree, TreeGpu, TreeLink, TreeNic, TreeSwitch
from homenode.nccl.strict_reader import read_topology
from tests.doctor_cases import case
from tests.nccl_documents import TWO_CPUS


def guest(*nodes: int | None, gt_per_s: float = 32.0, buses: Sequence[int] = ()) -> GuestTree:
    """A guest of two nodes on Emerald Rapids, a GPU for each of nodes."""
    link = TreeLink(PciLink(None, None, gt_per_s, 16), None)
    at = buses or range(0x20, 0x20 + len(nodes))
    gpus = tuple(
        TreeGpu(address=Bdf(0, bus, 0, 0), node=node, link=link)
        for bus, node in zip(at, nodes, strict=True)
    )
    vcpus = ((0, CpuSet(range(4))), (1, CpuSet(range(4, 8))))
    return GuestTree(
        source="guest",
        architecture="x86_64",
        vendor="GenuineIntel",
        family=6,
        model=0xCF,
        vcpus_of_node=vcpus,
        gpus=gpus,
    )


def with_nics(*nodes: int, gpus: Sequence[int] = (0,), below: PciLink | None = None) -> GuestTree:
    """A guest with a GPU on each node of gpus and a NIC on each of nodes. below: the link of a
    switch that is above the first GPU and the first NIC."""
    made = guest(*gpus)
    switch = () if below is None else (TreeSwitch(key="switch", link=TreeLink(below, None)),)
    nics = tuple(
        TreeNic(
            address=Bdf(0, 0x40 + number, 0, 0),
            node=node,
            link=made.gpus[0].link,
            switches=switch if number == 0 else (),
            gb_per_s=50.0,
        )
        for number, node in enumerate(nodes)
    )
    first = replace(made.gpus[0], switches=switch)
    return replace(made, gpus=(first, *made.gpus[1:]), nics=nics)


def found_with(*nodes: int, **how: Any) -> Callable[[], Sequence[Finding]]:
    return lambda: explain(with_nics(*nodes, **how)).findings


GEN5 = PciLink(None, None, 32.0, 16)


def _with_file(*buses: int) -> Callable[[], Sequence[Finding]]:
    file = read_topology(TWO_CPUS.encode(), "topo.xml")
    return lambda: explain(guest(*[None] * len(buses), buses=buses), file).findings


NCCL_CASES = {
    "nccl-gpus-without-node": case(
        "two nodes, and two GPUs that show -1",
        lambda: explain(guest(None, None)).findings,
        "two nodes, and a GPU on each",
        lambda: explain(guest(0, 1)).findings,
    ),
    "nccl-file-not-used": case(
        "a file of GPUs 81:00.0 and c1:00.0, and a guest with 20:00.0 and 21:00.0",
        _with_file(0x20, 0x21),
        "the same file, and a guest with its GPUs",
        _with_file(0x81, 0xC1),
    ),
    "nccl-ring-crosses-nodes": case(
        "two nodes with two GPUs each at 16 GT/s, and a link between nodes that counts as 40 GB/s",
        lambda: explain(guest(0, 0, 1, 1, gt_per_s=16.0)).findings,
        "the same GPUs at 32 GT/s",
        lambda: explain(guest(0, 0, 1, 1)).findings,
    ),
    "nccl-virtual-switch": case(
        "a GPU and a NIC below a switch of QEMU's",
        found_with(0, below=QEMU_SWITCH),
        "both on root ports of their own",
        found_with(0),
    ),
    "nccl-gdr-off": case(
        "a GPU and a NIC on root ports of their own",
        found_with(0),
        "both below one switch",
        found_with(0, below=GEN5),
    ),
    "nccl-nic-far": case(
        "a GPU on each of two nodes, and a NIC on one of them",
        found_with(0, gpus=(0, 1)),
        "a GPU and a NIC on each of two nodes",
        found_with(0, 1, gpus=(0, 1)),
    ),
    "nccl-nics-unused": case(
        "a GPU with a NIC below its switch, and a NIC on another node",
        found_with(0, 1, below=GEN5),
        "the GPU and its NIC alone",
        found_with(0, below=GEN5),
    ),
}
