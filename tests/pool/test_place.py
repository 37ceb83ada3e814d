"""Where the next VM goes: what it gets first, then the host's free cores, then its memory."""

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.fits import DEFAULT_SIZES, VmSize
from homenode.cluster.pool.free import blank_vm, free_by_node, sum_of
from homenode.cluster.pool.place import PoolRanking, rank_hosts
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import request_for
from homenode.units import GIB
from homenode.vm.host_sources import NamedHosts
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, PlanOptions
from tests.pool.pools import GPU1, GPU2, GPU8, filled, named, shipped, with_free_memory, with_vm


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
    assert (before.free_gpus - left.free_gpus, before.free_cores - left.free_cores) == (
        2,
        GPU2.request(host).vcpus,
    )
