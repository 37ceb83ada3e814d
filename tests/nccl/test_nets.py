"""Which NICs GPUs use: rows that NCCL's own code gave (2.30.7), and what is said of them."""

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import PciLink
from homenode.nccl.explanation import explain
from homenode.nccl.graph import NCCL_2_26, NCCL_2_30, graph_of
from homenode.nccl.guest_tree import (
    QEMU_SWITCH,
    GuestTree,
    TreeGpu,
    TreeLink,
    TreeNic,
    TreeSwitch,
    tree_of_host,
)
from homenode.nccl.nets import NetPlan
from homenode.nccl.system import PathType
from homenode.vm.sources import load_host

GEN5 = PciLink(None, None, 32.0, 16)
GEN3 = PciLink(None, None, 8.0, 16)


def device(kind: str, bus: int, node: int, switches: str, link: PciLink) -> TreeGpu | TreeNic:
    above = tuple(TreeSwitch(key=key, link=TreeLink(link, None)) for key in switches)
    own = TreeLink(link, None)
    at = Bdf(0, bus, 0, 0)
    if kind == "g":
        return TreeGpu(address=at, node=node, link=own, switches=above, link_gb_per_s=20.6)
    return TreeNic(address=at, node=node, link=own, switches=above, gb_per_s=50.0)


def guest(words: str, *, link: PciLink = GEN5, nvlink: bool = False) -> GuestTree:
    """Devices by words such as "g0ab": a GPU on node 0 below switches a and b; n: a NIC."""
    made = [
        device(word[0], 0x10 + at, int(word[1]), word[2:], link)
        for at, word in enumerate(words.split())
    ]
    gpus = [one for one in made if isinstance(one, TreeGpu)]
    if nvlink:
        gpus = [
            replace(gpu, nvlinks=tuple((o.address, 18) for o in gpus if o is not gpu))
            for gpu in gpus
        ]
    return GuestTree(
        source="guest",
        architecture="x86_64",
        vendor="GenuineIntel",
        family=6,
        model=0x8F,
        vcpus_of_node=((0, CpuSet([0])), (1, CpuSet([1]))),
        gpus=tuple(gpus),
        nics=tuple(one for one in made if isinstance(one, TreeNic)),
    )


def plan(tree: GuestTree) -> NetPlan:
    made = graph_of(tree, NCCL_2_30).nets
    assert made is not None
    return made


PAIRED = "g0a n0a g0b n0b g1c n1c g1d n1d"
ROWS = {
    # guest -> NICs of each GPU; path of the first GPU to each NIC
    (PAIRED, False): ("0 1 2 3", "PIX 48 PHB 48 SYS 22 SYS 22"),
    (PAIRED, True): ("0 1 2 3", "PIX 48 PXN 48 PXN 48 PXN 48"),
    ("g0 n0 g0 n0 g1 n1 g1 n1", False): ("0 1 2 3", "PHB 48 PHB 48 SYS 22 SYS 22"),
    ("g0a g0a n0a n0a", False): ("0 1", "PIX 48 PIX 48"),
    ("g0a g0a g0a g0a n0a n0a", False): ("0 1 0 1", "PIX 48 PIX 48"),
    ("g0a n0a n0a n0a n0a", False): ("0,1,2,3", "PIX 48 PIX 48 PIX 48 PIX 48"),
    ("g0a g1b n0a", False): ("0 0", "PIX 48"),
    ("g0a g1b n0a", True): ("0 0", "PIX 48"),
    ("g0ab n0ac g0ad n0ad", False): ("0 1", "PXB 48 PXB 48"),
}


@pytest.mark.parametrize(("words", "nvlink"), ROWS)
def test_a_gpu_uses_the_nics_that_the_code_of_2_30_gives_it(words: str, nvlink: bool) -> None:
    made = plan(guest(words, nvlink=nvlink))
    chosen, paths = ROWS[words, nvlink]
    assert [",".join(map(str, one.nets)) for one in made.choices] == chosen.split()
    first = [path for path in made.paths if path.gpu == made.choices[0].gpu]
    shown = " ".join(f"{path.path.type.name} {path.path.gb_per_s:g}" for path in first)
    assert shown == paths


def test_gpudirect_rdma_needs_a_path_over_switches_alone() -> None:
    below, apart = plan(guest("g0a n0a")), plan(guest("g0 n0"))
    assert [path.gdr for path in (*below.paths, *apart.paths)] == [True, False]
    assert below.paths[0].path.type is PathType.PIX and apart.paths[0].path.type is PathType.PHB


def test_a_virtual_switch_leaves_a_fifth_of_a_gigabyte_to_the_paths_beyond_it() -> None:
    tree = guest("g0a n0a g0b n0b", link=QEMU_SWITCH)
    real = [replace(one, link=TreeLink(GEN5, None)) for one in (*tree.gpus, *tree.nics)]
    tree = replace(
        tree,
        gpus=tuple(one for one in real if isinstance(one, TreeGpu)),
        nics=tuple(one for one in real if isinstance(one, TreeNic)),
    )
    path = plan(tree).path(tree.gpus[0].address, 1).path
    assert (path.type, round(path.gb_per_s, 2)) == (PathType.PHB, 0.19)
    assert "nccl-virtual-switch" in {one.id for one in explain(tree).findings}


def test_the_slowest_part_of_a_path_is_named() -> None:
    for link, words in ((GEN5, "48 GB/s of 50 GB/s (PIX)"), (GEN3, "12 GB/s of 50 GB/s (PIX)")):
        view = explain(guest("g0a n0a", link=link)).views[-1].network
        assert view is not None and words in view.limit and view.gdr_limit == "PXB"


def test_a_bare_hgx_uses_a_nic_for_each_gpu_and_nvlink_relays_to_the_others() -> None:
    for library in (NCCL_2_26, NCCL_2_30):
        made = graph_of(tree_of_host(load_host("h200-xeon8558")), library).nets
        assert made is not None
        assert [one.nets for one in made.choices] == [(number,) for number in range(8)]
        assert made.gb_per_s == pytest.approx(8 * 48.0)
        assert sum(path.relay is not None for path in made.paths) == 56
