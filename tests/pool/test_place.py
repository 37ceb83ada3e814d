"""Where the next VM goes: its own locality first, then what the pool loses."""

import random
from itertools import islice

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.flavour import Flavour, default_flavours
from homenode.cluster.pool.model import VmIdentity
from homenode.cluster.pool.place import PoolPlaces
from homenode.plan.planner import plan
from homenode.show.pool_text import refusal_text
from homenode.units import GIB
from tests.figures import numbers
from tests.pool.pools import filled, pool_of, shipped, sized, with_free_memory, with_vm

GPU1, GPU2, GPU4, GPU8 = default_flavours()


def _pool(count: int = 6, first: int = 0):  # type: ignore[no-untyped-def]
    host = shipped("hgx-h100")
    return pool_of([(f"h{i}", filled(host, first + i)) for i in range(count)])


def test_a_small_vm_goes_where_it_breaks_up_the_least() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([("empty", host), ("begun", with_vm(host, GPU1, "vm"))])
    best, second = PoolPlaces(pool, default_flavours()).ranked(GPU1)
    assert (best.host.name, second.host.name) == ("begun", "empty")
    assert [one.flavour for one in second.lost] == ["gpu8", "gpu4", "gpu2", "gpu1"]
    assert "gpu8" not in {one.flavour for one in best.lost}


def test_locality_comes_before_what_the_pool_loses() -> None:
    host = shipped("hgx-h100")
    # Three GPUs of node 0 are free, but their cores are not.
    far = with_vm(host, sized(name="big", gpus=1, vcpus=50, memory_bytes=100 * GIB), "big")
    for number in range(4):
        far = with_vm(far, GPU1, f"small-{number}")
    pool = pool_of([("far", far), ("empty", host)])
    best = next(PoolPlaces(pool, default_flavours()).ranked(GPU1))
    assert best.host.name == "empty"


@pytest.mark.parametrize("flavour", default_flavours(), ids=lambda one: str(one.name))
def test_a_single_placement_is_what_plan_says_of_that_host(flavour: Flavour) -> None:
    pool = _pool()
    places = PoolPlaces(pool, default_flavours())
    for one in places.ranked(flavour):
        real = pool.host(one.host)
        made = plan(real, flavour.request(real))
        assert (made.nodes, made.fallback) == (one.placement.nodes, one.placement.fallback)
        assert tuple(device.bdf for device in made.vm.hostdevs) == one.placement.devices


def test_hosts_that_refuse_are_those_that_plan_refuses() -> None:
    pool = _pool()
    places = PoolPlaces(pool, default_flavours())
    taking = {one.host.name for one in places.ranked(GPU4)}
    refusing = {name for one in places.refusals(GPU4) for name in one.hosts}
    assert taking | refusing == {host.name for host in pool.hosts}
    assert not taking & refusing


def test_a_reason_is_given_once_with_the_host_that_is_nearest() -> None:
    host = shipped("hgx-h100")
    one = with_vm(host, GPU1, "one")
    two = with_vm(with_vm(host, GPU2, "a"), GPU1, "b")
    busy = with_vm(host, sized(name="cpus", gpus=0, vcpus=104, memory_bytes=100 * GIB), "cpus")
    named = [("two", two), ("one", one), ("busy", busy), ("few", shipped("gh200x4"))]
    refused = PoolPlaces(pool_of(named), default_flavours()).refusals(GPU8)
    assert [sorted(one.hosts) for one in refused] == [["one", "two"], ["busy"], ["few"]]
    assert refused[0].nearest == "one"
    assert numbers(refused[0].detail) == [7, 8]
    texts = [refusal_text(one) for one in refused]
    assert not any("0000:" in text for text in texts)
    assert all(text.count(name) <= 2 for text in texts for name, _ in named)


def test_hosts_whose_refusal_is_not_explained_are_counted_last() -> None:
    pool = _pool(6)
    frees = [[(100 + 10 * i) * GIB for _ in host.nodes] for i, host in enumerate(pool.hosts)]
    places = PoolPlaces(with_free_memory(pool, frees), default_flavours())
    large = sized(name="large", gpus=0, vcpus=2, memory_bytes=2000 * GIB)
    (every,) = places.refusals(large)
    first, rest = places.refusals(large, most=1)
    assert first.reason == every.reason
    assert len(first.hosts) < len(rest.hosts)
    assert sorted((*first.hosts, *rest.hosts)) == sorted(every.hosts)


def test_arrivals_and_departures_leave_no_trace() -> None:
    pool = _pool()
    places = PoolPlaces(pool, default_flavours())
    before = [one.host.name for one in places.ranked(GPU1)]
    best = next(places.ranked(GPU2))
    vm = with_vm(pool.host(best.host), GPU2, "new").domains[-1]
    places.add(best.host.name, vm)
    assert places.hosts_of(VmIdentity("new")) == (best.host.name,)
    assert places.remove(VmIdentity("new")) == (best.host.name,)
    assert [one.host.name for one in places.ranked(GPU1)] == before


def test_a_vm_that_runs_in_the_pool_makes_room_for_itself() -> None:
    host = with_vm(shipped("hgx-h100"), GPU8, "own")
    places = PoolPlaces(pool_of([("a", host)]), default_flavours())
    assert next(places.ranked(GPU8), None) is None
    assert next(places.ranked(GPU8, vm=VmIdentity("own"))).host.name == "a"


def test_the_first_places_are_the_same_however_many_are_asked_for() -> None:
    pool = _pool(12, 20)
    rng = random.Random(1)
    frees = [[(700 + rng.randrange(300)) * GIB for _ in host.nodes] for host in pool.hosts]
    places = PoolPlaces(with_free_memory(pool, frees), default_flavours())
    every = list(places.ranked(GPU1))
    again = PoolPlaces(with_free_memory(pool, frees), default_flavours())
    assert [one.host.name for one in islice(again.ranked(GPU1), 3)] == [
        one.host.name for one in every[:3]
    ]


def test_only_named_hosts_are_chosen() -> None:
    places = PoolPlaces(_pool(), default_flavours())
    assert {one.host.name for one in places.ranked(GPU1, among={"h2"})} <= {"h2"}


def test_a_flavour_by_kind_of_host_is_placed_on_those_kinds_only() -> None:
    pool = pool_of([("a", shipped("hgx-h100")), ("b", shipped("gh200x4"))])
    places = PoolPlaces(pool, default_flavours())
    own = {pool.hosts[1].shape: replace(GPU1)}
    assert [one.host.name for one in places.ranked(own)] == ["b"]


def test_scores_of_single_hosts_are_in_the_order_of_their_pool() -> None:
    pool = _pool()
    flavours = default_flavours()
    ranked = [one.host.name for one in PoolPlaces(pool, flavours).ranked(GPU2)]
    alone = {one.name: pool_of([(one.name, pool.host(one))]) for one in pool.hosts}
    scores = {
        name: next(PoolPlaces(one, flavours).ranked(GPU2), None) for name, one in alone.items()
    }
    assert {name for name, one in scores.items() if one is not None} == set(ranked)
    orders = [one.order for name in ranked if (one := scores[name]) is not None]
    assert orders == sorted(orders)
