"""Ranks on their GPUs' nodes: who gets which cores, srun's words for it, and what is refused."""

import re

import pytest
from msgspec.structs import replace

from homenode.cluster.slurm.numbering import with_affinities
from homenode.cluster.slurm.options import MemoryBind
from homenode.cluster.slurm.ranks import (
    RankBinding,
    RankOptions,
    bind_ranks,
    naive_nodes,
    sbatch_lines,
    srun_flags,
)
from homenode.cpuset import CpuSet
from homenode.errors import InputError, UsageError
from homenode.indices import NodeIndex
from homenode.machine.discover.pci_nodes import Locality
from homenode.machine.tools.nvidia_smi import parse_topology as parse
from homenode.machine.topology import Host
from homenode.vm.plan_model import Unplannable
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared
from tests.slurm.gpu_nodes import MI250X, machine

HOSTS = ("hgx-h100", "gh200x4", "mi350x-epyc9575f", "rtx4090-epyc7702", "x86-2p8n128c256t-64gpu")


def flag(binding: RankBinding, name: str, memory: MemoryBind = MemoryBind.STRICT) -> str:
    found = [f for f in srun_flags(binding, memory) if f.startswith(f"--{name}=")]
    return found[0].partition("=")[2] if found else ""


def gpus(host: Host) -> int:
    return len(bind_ranks(host, RankOptions(1)).ranks[0].gpus)


@pytest.mark.parametrize("name", HOSTS)
def test_every_rank_is_on_the_node_of_its_gpu_and_shares_no_core(name: str) -> None:
    host = load_host(name)
    binding = bind_ranks(host, RankOptions(gpus(host)))
    in_use = CpuSet()
    for rank in binding.ranks:
        (gpu,) = rank.gpus
        assert rank.nodes == (gpu.node,)
        node = host.node(rank.nodes[0])
        assert node is not None and rank.pus <= node.pus and len(rank.pus) == rank.cores
        cores = [core.pus for core in host.cores if not core.pus.isdisjoint(rank.pus)]
        whole = CpuSet.from_bits(sum(core.bits for core in cores))
        assert whole.isdisjoint(in_use)
        in_use = in_use | whole


@pytest.mark.parametrize("name", HOSTS)
def test_the_masks_are_those_of_the_ranks(name: str) -> None:
    binding = bind_ranks(load_host(name), RankOptions(4))
    masks = flag(binding, "cpu-bind").removeprefix("mask_cpu:").split(",")
    assert [CpuSet.from_bits(int(mask, 16)) for mask in masks] == [r.pus for r in binding.ranks]


def test_gpus_in_another_order_than_their_nodes_are_followed() -> None:
    binding = bind_ranks(machine(MI250X), RankOptions(8))
    assert flag(binding, "mem-bind") == "map_mem:3,3,1,1,0,0,2,2"
    assert flag(binding, "gpu-bind") == "map_gpu:0,1,2,3,4,5,6,7"
    assert [f.id for f in binding.findings] == ["gpu-order-naive"]
    assert "GPU 0 on node 3" in binding.findings[0].expected
    assert "node i/2" in binding.findings[0].observed
    assert [rank.rank for rank in binding.ranks if rank.naive is not None] == [0, 1, 4, 5, 6, 7]


@needs_shared
def test_on_a_captured_mi250x_each_rank_has_the_cores_that_are_nearest() -> None:
    host = load_host(str(shared("machines/hwloc/eas-tioga.xml")))
    binding = bind_ranks(host, RankOptions(8))
    assert [str(rank.pus) for rank in binding.ranks] == [
        "48-55",
        "56-63",
        "16-23",
        "24-31",
        "0-7",
        "8-15",
        "32-39",
        "40-47",
    ]
    assert [f.id for f in binding.findings] == ["gpu-order-naive"]
    for rank in bind_ranks(host, RankOptions(8, cores=7, siblings=True)).ranks:
        assert len(rank.pus) == 14


@pytest.mark.parametrize("name", ["hgx-h100", "gh200x4", "small-2n8c-2gpu"])
def test_where_counting_off_is_right_nothing_is_flagged(name: str) -> None:
    host = load_host(name)
    assert naive_nodes(host)
    assert bind_ranks(host, RankOptions(gpus(host))).findings == ()


def test_several_gpus_of_a_rank_are_of_one_node_where_they_can() -> None:
    text = MI250X.replace("node = [3, 1, 0, 2]", "node = [0, 1, 2, 3]")
    text = text.replace("nodes_per_package = 4", "nodes_per_package = 2").replace(
        "node = [0, 1, 2, 3]", "node = [0, 1, 0, 1]"
    )
    binding = bind_ranks(machine(text), RankOptions(2))
    assert [[g.index for g in rank.gpus] for rank in binding.ranks] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert flag(binding, "gpu-bind") == "mask_gpu:0x33,0xcc"
    assert flag(binding, "gpus-per-task") == "4" and flag(binding, "mem-bind") == "map_mem:0,1"


def test_ranks_that_share_a_gpu_share_its_nodes_cores() -> None:
    binding = bind_ranks(load_host("gh200x4"), RankOptions(8))
    assert flag(binding, "gpu-bind") == "map_gpu:0,0,1,1,2,2,3,3"
    assert flag(binding, "gpus-per-node") == "4" and not flag(binding, "gpus-per-task")
    assert {rank.cores for rank in binding.ranks} == {36}


def test_some_gpus_of_a_node_are_asked_for_with_all_others() -> None:
    binding = bind_ranks(load_host("hgx-h100"), RankOptions(2, gpus=(4, 7), cores=4))
    assert flag(binding, "gpus-per-node") == "8" and flag(binding, "gpu-bind") == "map_gpu:4,7"
    assert flag(binding, "mem-bind") == "map_mem:1,1"
    assert "#SBATCH --gpus-per-node=8" in sbatch_lines(binding)


def test_no_flag_takes_cpus_from_the_step() -> None:
    text = " ".join(
        srun_flags(bind_ranks(load_host("hgx-h100"), RankOptions(8)), MemoryBind.STRICT)
    )
    assert not re.search("--cpus-per-task|--exact|--hint", text)


def test_memory_is_bound_preferred_or_left() -> None:
    binding = bind_ranks(load_host("hgx-h100"), RankOptions(2))
    assert flag(binding, "mem-bind", MemoryBind.PREFERRED) == "prefer,map_mem:0,1"
    assert flag(binding, "mem-bind", MemoryBind.NONE) == ""
    whole = bind_ranks(load_host("hgx-h100"), RankOptions(1))
    assert flag(whole, "mem-bind") == "mask_mem:0x3"


@pytest.mark.parametrize(("node", "right"), [(4, 0), (5, 0), (11, 0), (12, 1), (35, 3)])
def test_binding_to_memory_of_a_gpu_is_refused_with_the_right_node(node: int, right: int) -> None:
    with pytest.raises(UsageError) as caught:
        bind_ranks(load_host("gh200x4"), RankOptions(4, node=NodeIndex(node)))
    assert f"--node {node}:" in caught.value.message and "memory of GPU" in caught.value.message
    assert f"node {right} " in str(caught.value.hint)


def test_nothing_is_ever_bound_to_memory_of_a_gpu() -> None:
    host = load_host("gh200x4")
    for tasks in (1, 2, 4, 8, 12):
        for rank in bind_ranks(host, RankOptions(tasks)).ranks:
            assert set(rank.nodes) <= {0, 1, 2, 3}


def test_of_several_nodes_of_a_gpu_the_one_with_cpus_is_home() -> None:
    host = load_host("gh200x4")
    locality = Locality.of(host.nodes, CpuSet(), host.distances)
    assert locality.node_listed(CpuSet.parse("0,5-11"), None) == 0
    assert locality.node_listed(CpuSet.parse("3,28-35"), None) == 3
    assert locality.node_listed(CpuSet.parse("4-11"), None) is None
    assert locality.node_listed(CpuSet.parse("0-1"), None) is None


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        (RankOptions(0), "at least 1"),
        (RankOptions(3), "shares 4 GPUs out evenly"),
        (RankOptions(1, gpus=(4,)), "GPUs 0-3"),
        (RankOptions(4, cores=0), "at least 1"),
        (RankOptions(4, node=NodeIndex(36)), "no such node"),
    ],
)
def test_what_cannot_be_is_refused(wishes: RankOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bind_ranks(load_host("gh200x4"), wishes)


def test_more_cores_than_there_are_have_no_place() -> None:
    with pytest.raises(Unplannable, match="rank 1, 40 cores"):
        bind_ranks(load_host("hgx-h100"), RankOptions(8, cores=40))


def test_a_host_without_gpus_has_nothing_to_bind() -> None:
    with pytest.raises(UsageError, match="a host with GPUs"):
        bind_ranks(load_host("xeon-2p-cpus"), RankOptions(1))


def test_a_gpu_without_a_node_is_reported() -> None:
    binding = bind_ranks(load_host("x86-2p2n8c16t-gpu-node-unknown"), RankOptions(2))
    assert "bind-node-unknown" in [f.id for f in binding.findings]


def test_hybrid_cores_and_one_node_are_no_obstacle() -> None:
    binding = bind_ranks(load_host("rtx4080-i9-14900k"), RankOptions(1))
    assert len(binding.ranks[0].pus) == 24


@needs_shared
def test_affinities_that_are_lists_give_the_node_with_cpus() -> None:
    text = shared("machines/topo-m/gh200x4-nvidia-smi-topo-m.txt").read_text()
    blind = without_nodes(load_host("gh200x4"))
    assert "bind-node-unknown" in [f.id for f in bind_ranks(blind, RankOptions(4)).findings]
    stated = with_affinities(blind, parse(text), "topo")
    binding = bind_ranks(stated, RankOptions(4))
    assert flag(binding, "mem-bind") == "map_mem:0,1,2,3" and binding.findings == ()


TOPO = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tSYS\t0-3\t{}\tN/A
GPU1\tSYS\t X \t4-7\t1\tN/A
"""


def test_a_listing_of_another_machine_is_refused() -> None:
    host = load_host("small-2n8c-2gpu")
    assert with_affinities(host, parse(TOPO.format(0)), "topo") == host
    with pytest.raises(InputError, match="on node 0, as small-2n8c-2gpu says, found 1"):
        with_affinities(host, parse(TOPO.format(1)), "topo")
    with pytest.raises(InputError, match="expected 4 GPUs"):
        with_affinities(load_host("gh200x4"), parse(TOPO.format(0)), "topo")
    stated = with_affinities(without_nodes(host), parse(TOPO.format(0)), "topo")
    assert [gpu.node for gpu in bind_ranks(stated, RankOptions(1)).ranks[0].gpus] == [0, 1]


def without_nodes(host: Host) -> Host:
    """The host as a firmware shows it that gives no node of devices."""
    return replace(
        host,
        pci_devices=tuple(replace(d, node=None, local_pus=None) for d in host.pci_devices),
    )
