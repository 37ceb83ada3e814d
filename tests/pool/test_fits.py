"""What still fits: as the planner places VMs one at a time, and all GPUs of an empty host."""

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.fits import (
    DEFAULT_SIZES,
    MOST_COUNTED,
    VmSize,
    count_fits,
    examine_pool,
    share_of,
    size_of,
)
from homenode.cluster.pool.free import free_by_node, passable_gpus, sum_of
from homenode.errors import InputError, UsageError
from homenode.machine.pci import GpuPart, PartKind
from homenode.machine.topology import Host, PagePool
from homenode.plan.planner import plan
from homenode.units import GIB, MIB
from homenode.vm.plan import Unplannable
from tests.pool.pools import GPU1, GPU2, GPU4, GPU8, filled, named, shipped, with_vm


def _one_at_a_time(host: Host, size: VmSize) -> int:
    """VMs that the ordinary planner places until one has a GPU away from its nodes, or spans more
    packages than it needs."""
    number = 0
    while True:
        request = size.request(host)
        try:
            made = plan(host, request)
            host = with_vm(host, size, f"more-{number}")
        except Unplannable:
            return number
        packages = {node.package for node in host.nodes if node.index in made.nodes}
        homes = {host.device_at[device.bdf].node for device in made.vm.hostdevs if device.bdf}
        if not homes <= set(made.nodes) or (size.gpus <= 4 and len(packages) > 1):
            return number
        number += 1


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_is_what_the_planner_places_one_at_a_time(seed: int) -> None:
    host = filled(shipped("hgx-h100"), seed)
    for size in DEFAULT_SIZES:
        assert count_fits(host, size) == _one_at_a_time(host, size), str(size)


@pytest.mark.parametrize("name", ["small-2n8c-2gpu", "epyc-nps4-gpu-nic", "gh200x4"])
def test_every_gpu_of_an_empty_host_fits_a_vm_with_its_share(name: str) -> None:
    host = shipped(name)
    assert count_fits(host, GPU1) == sum_of(free_by_node(host)).gpus


def test_a_vm_across_packages_counts_only_where_an_empty_host_has_it_there_too() -> None:
    host = shipped("hgx-h100")
    for number in range(4):
        host = with_vm(host, GPU1, f"a-{number}")
    assert count_fits(host, GPU4) == 1  # those four were packed on one node
    spread = replace(host, domains=(host.domains[0], host.domains[1]))
    far = tuple(
        replace(vm, devices=(gpu.bdf,))
        for vm, gpu in zip(spread.domains, passable_gpus(host)[3:5], strict=True)
    )
    assert count_fits(replace(host, domains=far), GPU4) == 0
    assert count_fits(shipped("hgx-h100"), GPU8) == 1


def test_a_host_without_gpus_has_no_answer_for_shares_of_gpus() -> None:
    host = shipped("xeon-2p-cpus")
    assert count_fits(host, GPU1) is None
    assert count_fits(host, VmSize(vcpus=16, memory_bytes=64 * GIB)) == 6
    with pytest.raises(InputError):
        share_of(host, 1)


def test_counting_ends() -> None:
    tiny = VmSize(vcpus=1, memory_bytes=128 * MIB)
    assert count_fits(shipped("xeon-2p-cpus"), tiny) == MOST_COUNTED


def test_a_gpus_share_leaves_the_host_and_the_emulators_their_cores() -> None:
    host = shipped("hgx-h100")
    vcpus, memory_bytes = share_of(host, 2)
    assert vcpus <= 2 * (112 - 8) // 8
    assert memory_bytes <= 2 * (2 << 40) // 8
    assert share_of(host, 4) == (2 * vcpus, 2 * memory_bytes)


def test_parts_of_a_divided_gpu_are_not_counted_as_a_gpu() -> None:
    host = shipped("hgx-h100")
    divided = passable_gpus(host)[0].bdf
    part = GpuPart(PartKind.MIG, "1g.10gb", number=1)
    devices = tuple(
        replace(one, parts=(part,)) if one.bdf == divided else one for one in host.pci_devices
    )
    assert sum_of(free_by_node(replace(host, pci_devices=devices))).gpus == 7


def test_free_memory_is_ordinary_memory_and_huge_pages_without_what_vms_have() -> None:
    host = shipped("xeon-2p-cpus")
    pool = (PagePool(GIB, 100, 60),)
    nodes = tuple(
        replace(node, memory_free_bytes=200 * GIB, page_pools=pool) for node in host.nodes
    )
    paged = replace(host, nodes=nodes)
    assert [node.free_memory_bytes for node in free_by_node(paged)] == [260 * GIB] * 2
    vm = with_vm(paged, VmSize(vcpus=4, memory_bytes=64 * GIB), "vm")
    free = [node.free_memory_bytes or 0 for node in free_by_node(vm)]
    assert sorted(free)[1] == 260 * GIB
    assert sorted(free)[0] <= (260 - 64) * GIB
    unknown = tuple(replace(node, memory_free_bytes=None, memory_bytes=None) for node in nodes)
    assert sum_of(free_by_node(replace(host, nodes=unknown))).free_memory_bytes is None


def test_each_node_has_its_own_row_and_gpus_of_an_unknown_node_the_last() -> None:
    host = shipped("x86-2p2n8c16t-gpu-node-unknown")
    nodes = free_by_node(host)
    assert [node.node for node in nodes] == [0, 1, None]
    assert nodes[-1].gpus > 0 == nodes[-1].cores
    assert sum_of(nodes).cores == len(host.cores)


def test_a_pool_counts_each_host_and_plans_those_that_are_alike_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = shipped("hgx-h100")
    counted: list[str] = []

    def count(host: Host, size: VmSize) -> int:
        counted.append(host.name)
        return 1

    monkeypatch.setattr("homenode.cluster.pool.fits.count_fits", count)
    pool = examine_pool(named(a=host, b=host, c=with_vm(host, GPU2, "vm")), (GPU1,))
    assert counted == ["a", "c"]
    assert [(one.name, one.vms, one.free.free_gpus) for one in pool.hosts] == [
        ("a", 0, 8),
        ("b", 0, 8),
        ("c", 1, 6),
    ]


def test_a_size_is_read_as_it_is_typed() -> None:
    assert size_of("gpus=2") == VmSize(gpus=2)
    assert size_of("vcpus=16,memory=64GiB") == VmSize(vcpus=16, memory_bytes=64 * GIB)
    assert str(size_of("gpus=1,vcpus=8")) == "1 GPU, 8 vCPUs"
    for text in ("", "gpus=0", "vcpus=4", "gpus=x", "cores=4", "gpus=1,vcpus=999999"):
        with pytest.raises(UsageError):
            size_of(text)
