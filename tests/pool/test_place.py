"""Where the next VM goes, and what still fits."""

from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

import homenode
from homenode.cluster.pool.fits import (
    DEFAULT_SIZES,
    VmSize,
    blank_vm,
    compute_share,
    count_fits,
    examine_pool,
    free_by_node,
    list_passable_gpus,
    parse_size,
    sum_of,
)
from homenode.cluster.pool.place import PoolRanking, rank_hosts
from homenode.errors import InputError, UsageError
from homenode.machine.pci import GpuPart, PartKind
from homenode.machine.topology import Host, PagePool
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.units import GIB, MIB
from homenode.vm.host_sources import NamedHosts
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, PlanOptions
from tests.pool.pools import (
    GPU1,
    GPU2,
    GPU4,
    GPU8,
    filled,
    named,
    shipped,
    with_free_memory,
    with_vm,
)
from tests.seeds import part


def _ranked(
    hosts: NamedHosts, size: VmSize, balance: Balance | None = None, name: str = "new"
) -> PoolRanking:
    request = size.request(hosts.hosts[0].host)
    options = replace(request.options, balance=balance)
    guest = blank_vm(hosts.hosts[0].host, name, options.vcpus or 1, options.memory_bytes or GIB)
    return rank_hosts(hosts.hosts, guest, lambda entry: options)


def _names(ranking: PoolRanking) -> list[str]:
    return [ranked.entry.name for ranked in ranking.hosts]


def test_what_the_vm_gets_comes_before_what_is_free() -> None:
    host = shipped("hgx-h100")
    # Three GPUs of node 0 are free, but their cores are not.
    far = with_vm(host, VmSize(gpus=1, vcpus=50, memory_bytes=100 * GIB), "big")
    for number in range(4):
        far = with_vm(far, GPU1, f"small-{number}")
    ranking = _ranked(named(far=far, empty=host), GPU1)
    assert _names(ranking) == ["empty", "far"]
    assert ranking.hosts[1].decided == "packages_spanned"


def test_a_vm_with_gpus_goes_to_the_host_with_the_fewest_free_cores_unless_spread() -> None:
    host = shipped("hgx-h100")
    hosts = named(empty=host, busy=with_vm(host, VmSize(vcpus=8, memory_bytes=8 * GIB), "vm"))
    assert _names(_ranked(hosts, GPU2)) == ["busy", "empty"]
    assert _names(_ranked(hosts, GPU2, Balance.SPREAD)) == ["empty", "busy"]


def test_gpus_that_later_vms_lose_come_before_free_cores() -> None:
    host = shipped("hgx-h100")
    hosts = named(empty=host, begun=with_vm(host, GPU2, "vm"))
    ranking = _ranked(hosts, GPU2, Balance.SPREAD)
    assert _names(ranking) == ["begun", "empty"]
    assert ranking.hosts[1].decided == "gpu_sets_lost"


SHAPED = sorted(
    path.stem
    for path in (Path(homenode.__file__).parent / "machine/hosts").glob("*n[0-9]*c[0-9]*t*.toml")
    if "64gpu" not in path.stem  # a minute
)
SMALL = VmSize(vcpus=4, memory_bytes=8 * GIB)


def _busy(host: Host, cores: int, free_gib: int) -> Host:
    """A host with a VM on so many cores, and so much free memory on each node."""
    busy = with_vm(host, VmSize(vcpus=cores, memory_bytes=8 * GIB), "vm") if cores else host
    return with_free_memory(busy, [free_gib * GIB] * len(host.nodes))


def test_of_hosts_that_give_a_vm_the_same_the_one_with_the_most_free_cores_comes_first() -> None:
    """XAPI's rule for a pool: by free CPUs, then by free memory, so that a VM with much memory does
    not leave some hosts with far more vCPUs for each CPU than others."""
    host = shipped("xeon-2p-cpus")
    hosts = named(
        memory=_busy(host, 24, 900),
        cores=_busy(host, 8, 300),
        both=_busy(host, 8, 400),
        least=_busy(host, 40, 1000),
    )
    ranking = _ranked(hosts, SMALL)
    assert _names(ranking) == ["both", "cores", "memory", "least"]
    assert [ranked.decided for ranked in ranking.hosts] == [
        "",
        "free_memory",
        "free_cores",
        "free_cores",
    ]
    packed = _ranked(hosts, SMALL, Balance.PACK)
    assert _names(packed) == ["least", "memory", "cores", "both"]


def test_a_pool_of_equal_hosts_is_filled_evenly() -> None:
    """As XAPI's pool does: no host has a second VM before each has one."""
    host, names = shipped("xeon-2p-cpus"), ("a", "b", "c")
    hosts = dict.fromkeys(names, host)
    chosen = []
    for number in range(6):
        best = _ranked(named(**hosts), SMALL, name=f"vm-{number}").hosts[0].entry.name
        hosts[best] = with_vm(hosts[best], SMALL, f"vm-{number}")
        chosen.append(best)
    assert chosen == [*names, *names]


@pytest.mark.parametrize("size", DEFAULT_SIZES, ids=str)
def test_a_placement_is_what_plan_says_of_that_host(size: VmSize) -> None:
    pool = named(**{f"h{seed}": filled(shipped("hgx-h100"), seed) for seed in range(6)})
    ranking = _ranked(pool, size)
    for ranked in ranking.hosts:
        host = ranked.entry.host
        options = ranked.options
        guest = blank_vm(host, "new", options.vcpus or 1, options.memory_bytes or GIB)
        made = plan(host, request_for(guest, options, host))
        assert (made.nodes, made.fallback) == (ranked.placement.nodes, ranked.placement.fallback)
        assert tuple(device.bdf for device in made.vm.hostdevs) == ranked.placement.devices
    refusing = {name for refused in ranking.refusing for name in refused.names}
    assert refusing | set(_names(ranking)) == {entry.name for entry in pool.hosts}
    for entry in pool.hosts:
        if entry.name in refusing:
            with pytest.raises(Unplannable):
                plan(entry.host, size.request(entry.host))


def test_hosts_that_are_alike_are_planned_once() -> None:
    host = filled(shipped("hgx-h100"), 3)
    renamed = replace(host, domains=tuple(replace(vm, name=f"{vm.name}-b") for vm in host.domains))
    asked = []

    def options_on(entry: object) -> PlanOptions:
        asked.append(entry)
        return PlanOptions("pin", vcpus=2)

    pool = named(a=host, b=renamed, c=host, other=shipped("hgx-h200"))
    ranking = rank_hosts(pool.hosts, blank_vm(host, "vm", 2, GIB), options_on)
    assert len(asked) == 2
    assert sorted(_names(ranking)) == ["a", "b", "c", "other"]


def test_a_reason_is_given_once_that_of_the_most_hosts_first() -> None:
    host = shipped("hgx-h100")
    cpus = with_vm(host, VmSize(vcpus=104, memory_bytes=100 * GIB), "cpus")
    pool = named(one=with_vm(host, GPU1, "one"), busy=cpus, two=with_vm(host, GPU2, "two"))
    ranking = _ranked(pool, GPU8)
    assert [refused.names for refused in ranking.refusing] == [("one", "two"), ("busy",)]
    assert "7 of 8 free" in ranking.refusing[0].reason
    assert not ranking.hosts


def test_a_vm_that_runs_on_a_host_makes_room_for_itself() -> None:
    planned = with_vm(shipped("hgx-h100"), GPU8, "own")
    running = tuple(replace(vm, running=True, planned=False) for vm in planned.domains)
    pool = named(a=replace(planned, domains=running))
    assert not _ranked(pool, GPU8).hosts
    (ranked,) = _ranked(pool, GPU8, name="own").hosts
    assert ranked.free.free_gpus == 0


def test_what_is_left_is_what_is_free_once_the_vm_is_there() -> None:
    host = shipped("hgx-h100")
    (ranked,) = _ranked(named(a=host), GPU2).hosts
    left = sum_of(free_by_node(with_vm(host, GPU2, "vm")))
    assert ranked.free == left
    before = sum_of(free_by_node(host))
    assert (
        (before.free_gpus or 0) - (left.free_gpus or 0),
        before.free_cores - left.free_cores,
    ) == (
        2,
        GPU2.request(host).vcpus,
    )


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
        for vm, gpu in zip(spread.domains, list_passable_gpus(host)[3:5], strict=True)
    )
    assert count_fits(replace(host, domains=far), GPU4) == 0
    assert count_fits(shipped("hgx-h100"), GPU8) == 1


def test_a_host_without_gpus_has_no_answer_for_shares_of_gpus() -> None:
    host = shipped("xeon-2p-cpus")
    assert count_fits(host, GPU1) is None
    assert count_fits(host, VmSize(vcpus=16, memory_bytes=64 * GIB)) == 6
    with pytest.raises(InputError):
        compute_share(host, 1)


def test_counting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homenode.cluster.pool.fits.MAX_COUNTED", 9)
    tiny = VmSize(vcpus=1, memory_bytes=128 * MIB)
    assert count_fits(shipped("xeon-2p-cpus"), tiny) == 9


def test_a_vm_that_needs_unequal_guest_nodes_does_not_count() -> None:
    size = VmSize(gpus=1, vcpus=14, memory_bytes=200 * GIB)
    assert count_fits(shipped("hgx-a100-80gb"), size) == 4


@pytest.mark.parametrize(
    ("name", "gpus", "counts"),
    [
        ("hgx-h100", 2, {24: 4, 27: 4, 28: 3, 29: 2}),
        ("h200-xeon8558", 1, {11: 8, 12: 7, 13: 4}),
        ("epyc-nps4-gpu-nic", 1, {30: 4, 31: 4}),
    ],
)
def test_vms_fill_the_host_but_for_its_own_core(
    name: str, gpus: int, counts: dict[int, int]
) -> None:
    """The last VM of a node runs on the core of another VM's emulator, too."""
    sizes = {vcpus: VmSize(gpus=gpus, vcpus=vcpus, memory_bytes=16 * GIB) for vcpus in counts}
    fits = {vcpus: count_fits(shipped(name), size) for vcpus, size in sizes.items()}
    assert fits == counts


@pytest.mark.parametrize("name", part(SHAPED, 0, every=3))
def test_a_larger_vm_never_fits_more_often(name: str) -> None:
    """From a vCPU for each node on: a VM's memory is on nodes with vCPUs only."""
    host = shipped(name)
    memory, gpus = sum(node.memory_bytes or 0 for node in host.nodes), len(list_passable_gpus(host))
    steps = (
        range(min(gpus, 4) + 1),
        range(sum(bool(node.pus) for node in host.nodes), len(host.cores) + 2),
        [max(1, memory // share // GIB) * GIB for share in (16, 5, 3, 2)],
    )
    sizes = list(product(*map(enumerate, steps)))
    fits = {
        tuple(at for at, _ in size): count_fits(host, VmSize(gpus=g, vcpus=v, memory_bytes=m)) or 0
        for size in sizes
        for (_, g), (_, v), (_, m) in (size,)
    }
    for at, count in fits.items():
        for axis in range(3):
            smaller = (*at[:axis], at[axis] - 1, *at[axis + 1 :])
            assert count <= fits.get(smaller, count), (name, smaller, at)


def test_vms_have_huge_pages_where_these_have_most_of_the_memory() -> None:
    host = shipped("hgx-h100")
    pools = (PagePool(GIB, 900, 900),)
    paged = replace(host, nodes=tuple(replace(node, page_pools=pools) for node in host.nodes))
    assert [count_fits(paged, size) for size in DEFAULT_SIZES] == [8, 4, 2, 1]
    assert compute_share(paged, 1)[1] <= 900 * GIB // 4 < compute_share(host, 1)[1]


def test_shares_of_an_idle_host_are_of_its_free_memory() -> None:
    host = with_free_memory(shipped("hgx-h100"), [900 * GIB, 980 * GIB])
    assert [count_fits(host, size) for size in DEFAULT_SIZES] == [8, 4, 2, 1]


def test_a_gpus_share_leaves_the_host_and_the_emulators_their_cores() -> None:
    host = shipped("hgx-h100")
    vcpus, memory_bytes = compute_share(host, 2)
    assert vcpus <= 2 * (112 - 8) // 8
    assert memory_bytes <= 2 * (2 << 40) // 8
    assert compute_share(host, 4) == (2 * vcpus, 2 * memory_bytes)


def test_parts_of_a_divided_gpu_are_not_counted_as_a_gpu() -> None:
    host = shipped("hgx-h100")
    divided = list_passable_gpus(host)[0].bdf
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
    assert nodes[-1].gpus
    assert nodes[-1].cores == 0
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
    assert parse_size("gpus=2") == VmSize(gpus=2)
    assert parse_size("vcpus=16,memory=64GiB") == VmSize(vcpus=16, memory_bytes=64 * GIB)
    assert str(parse_size("gpus=1,vcpus=8")) == "1 GPU, 8 vCPUs"
    for text, hint in (
        ("gpus=2,memory=64", "memory=64GiB"),
        ("gpus=2,cpus=4", "--size gpus=2,vcpus=4"),
    ):
        with pytest.raises(UsageError) as raised:
            parse_size(text)
        assert raised.value.hint == hint
    for text in ("", "gpus=0", "vcpus=4", "gpus=x", "cores=4", "gpus=1,vcpus=999999"):
        with pytest.raises(UsageError):
            parse_size(text)
