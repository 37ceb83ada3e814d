"""The order of hosts with bounds, against the order in which every host is planned."""

import contextlib
import random
from collections.abc import Iterator
from itertools import islice

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cluster.pool.bounds import Bounds
from homenode.cluster.pool.flavour import Flavour, default_flavours
from homenode.cluster.pool.model import Pool, passable_gpus
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.place import PoolPlaces, RankedPlace
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.state import HostState
from homenode.cluster.pool.stranded import StrandedGpus, StrandedSearch
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.machine.topology import Host, PagePool
from homenode.plan.planner import rank
from homenode.plan.search.ladder import Concession
from homenode.units import GIB
from homenode.vm.layout import Pinning
from homenode.vm.model import GuestTopology
from homenode.vm.plan_options import DeviceLocality, DocumentSiblings, PlanOptions, Policy
from tests.pool.pools import pool_of, shipped, sized, with_free_memory, with_vm
from tests.small_hosts import even_host, small_request

SMALL = (
    "epyc9654-2p-1node",
    "small-2n8c-2gpu",
    "epyc-nps4-gpu-nic",
    "x86-1p1n6c8t-hybrid",
    "x86-2p2n8c16t-node1-no-memory",
    "x86-2p2n16c24t-smt-off-in-one-package",
    "x86-2p2n16c32t-isolated-pus",
    "hgx-h100",
)
EVERY = (*SMALL, "gh200x4", "h200-xeon8558", "hgx-a100-ibm", "mi350x-epyc9575f")
LAYOUTS = ("pin", "pin-numa", "pin-numa-smt", "pin-numa-pci", "pin-numa-pci-smt")


def _size(rng: random.Random, pus: int, memory_gib: int) -> Flavour:
    share = rng.choice((1, 2, 4, 8))
    return sized(
        name=f"size-{rng.randrange(99)}",
        gpus=rng.choice((0, 1, 1, 2, 3, 4)),
        vcpus=pus // 24 + rng.randint(1, max(1, pus // share)),
        memory_bytes=(memory_gib // 32 + rng.randint(1, max(1, memory_gib // share))) * GIB,
        options=PlanOptions(layout=rng.choice(LAYOUTS)),
    )


def _case(seed: int, names: tuple[str, ...]) -> tuple[Pool, Flavour]:
    rng = random.Random(seed)
    base = shipped(rng.choice(names))
    size = len(base.pus), sum(node.memory_bytes or 0 for node in base.nodes) // GIB
    hosts = []
    for number in range(rng.randint(2, 6)):
        host = base
        for vm in range(rng.randint(0, 6)):
            one = _size(rng, *size) if rng.random() < 0.6 else rng.choice(default_flavours())
            try:
                host = with_vm(host, one, f"vm-{number}-{vm}")
            except HomenodeError:
                continue
        hosts.append((f"h{number}", host))
    pool = pool_of(hosts)
    if rng.random() < 0.4:
        frees = [
            [rng.randrange((node.memory_bytes or 0) + 1) for node in base.nodes] for _ in hosts
        ]
        pool = with_free_memory(pool, frees)
    return pool, _size(rng, *size) if rng.random() < 0.7 else rng.choice(default_flavours())


def _of(place: RankedPlace) -> tuple[object, ...]:
    return place.host.name, place.lost, place.step.placement.nodes, place.step.placement.devices


class _NoBounds(Bounds):
    """Says nothing of a host before it is planned, and counts all VMs that fit."""

    def __init__(self, planner: Planner, flavours: tuple[Flavour, ...]) -> None:
        super().__init__(planner, flavours)
        self._all = planner

    def keys(self, state: HostState, flavour: Flavour) -> Iterator[tuple[object, ...]]:
        yield ()

    def clean(self, state: HostState, flavour: Flavour) -> int:
        return self._all.counts(state, flavour)[0]


def _with_every_host_planned(pool: Pool, flavours: tuple[Flavour, ...]) -> PoolPlaces:
    places = PoolPlaces(pool, flavours)
    places.bounds = _NoBounds(places.planner, places.flavours)
    return places


def _check(pool: Pool, asked: Flavour) -> tuple[int, int]:
    """How often the planner was asked with every host planned, and with bounds."""
    every = _with_every_host_planned(pool, default_flavours())
    expected = [_of(one) for one in every.ranked(asked)][:3]
    planner = Planner(pool)
    assert [_of(one) for one in islice(PoolPlaces(pool, default_flavours()).ranked(asked), 3)] == (
        expected
    )
    outlook(pool, default_flavours(), planner)
    before = planner.asked
    places = PoolPlaces(pool, default_flavours(), planner)
    assert [_of(one) for one in islice(places.ranked(asked), 3)] == expected
    return every.planner.asked, planner.asked - before


@pytest.mark.parametrize("seed", range(12))
def test_the_first_hosts_are_those_of_all_when_every_one_is_planned(seed: int) -> None:
    _check(*_case(seed, SMALL))


@pytest.mark.lab
@pytest.mark.parametrize("seed", range(100, 500))
def test_the_first_hosts_are_the_same_on_every_kind_of_host(seed: int) -> None:
    _check(*_case(seed, EVERY))


def _bound_and_key(
    host: Host, asked: Flavour, flavours: tuple[Flavour, ...] = default_flavours()
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """The bound of a host, and the key once it is planned; what fits there is known."""
    pool = pool_of([("h", host)])
    planner = Planner(pool)
    outlook(pool, flavours, planner)
    places = PoolPlaces(pool, flavours, planner)
    bounds = list(places.bounds.keys(planner.state(pool.hosts[0]), asked))
    assert bounds == sorted(bounds)
    every = _with_every_host_planned(pool, flavours)
    assert next(every.ranked(asked), None) is not None
    (candidate,) = every._candidates[asked].values()
    return bounds[-1], candidate.key


def _in_use(host: Host, gpus: tuple[int, ...], cores: range) -> Host:
    """The host with a VM that has these GPUs, by their position, and a PU of these cores."""
    every = [gpu.bdf for gpu in passable_gpus(host)]
    pins = tuple(CpuSet.from_bits(host.cores[i].pus.bits & -host.cores[i].pus.bits) for i in cores)
    vm = replace(
        with_vm(host, sized(name="vm", gpus=0, vcpus=1, memory_bytes=GIB), "vm").domains[-1],
        vcpu_pins=pins,
    )
    return replace(host, domains=(replace(vm, devices=tuple(every[i] for i in gpus)),))


def test_a_limit_of_plans_says_how_many_hosts_may_be_better() -> None:
    host = shipped("hgx-h100")
    hosts = [
        (f"h{cores}", _in_use(host, tuple(range(cores % 4)), range(cores))) for cores in range(3, 9)
    ]
    asked = sized(name="vm", gpus=1, vcpus=9, memory_bytes=64 * GIB)
    exact = next(PoolPlaces(pool_of(hosts), default_flavours()).ranked(asked))
    few = next(PoolPlaces(pool_of(hosts), default_flavours()).ranked(asked, most_asked=1))
    many = next(PoolPlaces(pool_of(hosts), default_flavours()).ranked(asked, most_asked=999))
    assert (exact.unexamined, many.unexamined) == (0, 0)
    assert _of(many) == _of(exact)
    assert few.unexamined > 0


def test_what_a_limit_left_open_is_worked_out_when_asked_without_one() -> None:
    pool, asked = _case(3, SMALL)
    places = PoolPlaces(pool, default_flavours())
    next(places.ranked(asked, most_asked=0))
    expected = [_of(one) for one in PoolPlaces(pool, default_flavours()).ranked(asked)]
    assert [_of(one) for one in places.ranked(asked)] == expected


def test_pools_of_huge_pages_need_no_plan_for_ordinary_memory() -> None:
    host = shipped("hgx-h100")
    paged = replace(
        host,
        nodes=tuple(
            replace(
                node,
                page_pools=(PagePool(2 << 20, 512, 512),),
                memory_free_bytes=(node.memory_free_bytes or 0) - GIB,
            )
            for node in host.nodes
        ),
    )
    pool = pool_of([("a", host), ("b", paged)])
    planner, asked = Planner(pool), sized(name="vm", gpus=1, vcpus=9, memory_bytes=64 * GIB)
    steps = [planner.step(planner.state(one), asked) for one in pool.hosts]
    assert planner.asked == 1
    assert all(step is not None and not step.given for step in steps)


def test_gpus_that_may_be_anywhere_bind_no_node() -> None:
    host = _in_use(shipped("hgx-h100"), (0, 1, 2, 3), range(56, 112))
    options = PlanOptions(layout="pin-numa", device_locality=DeviceLocality.IGNORE)
    bound, key = _bound_and_key(
        host, sized(name="vm", gpus=1, vcpus=8, memory_bytes=8 * GIB, options=options)
    )
    assert bound <= key


@pytest.mark.parametrize("more", [0, 1])
def test_gpus_that_are_named_count_as_in_use(more: int) -> None:
    host = shipped("hgx-h100")
    first = passable_gpus(host)[0].bdf
    options = PlanOptions(layout="pin-numa-pci", devices=(first,))
    asked = sized(name="vm", gpus=more, vcpus=8, memory_bytes=8 * GIB, options=options)
    busy = _in_use(host, (2, 3, 6, 7), range(0))
    bound, key = _bound_and_key(busy, asked, default_flavours()[-1:])
    assert bound <= key


@pytest.mark.parametrize("gpus", [0, 1])
def test_vcpus_that_float_over_a_node_need_no_core_each(gpus: int) -> None:
    options = PlanOptions(layout="pin-bound", pinning=Pinning.NODE, policy=Policy.MEMORY_FIRST)
    host = _in_use(shipped("hgx-h100"), (4, 5, 6, 7), range(4, 112))
    bound, key = _bound_and_key(
        host, sized(name="vm", gpus=gpus, vcpus=6, memory_bytes=8 * GIB, options=options)
    )
    assert bound <= key


def test_a_gpu_of_unknown_node_may_be_nearer_than_those_of_the_empty_host() -> None:
    host = shipped("hgx-h100")
    last = passable_gpus(host)[-1].bdf
    host = replace(
        host,
        pci_devices=tuple(
            replace(one, node=None) if one.bdf == last else one for one in host.pci_devices
        ),
    )
    busy = _in_use(host, tuple(range(7)), range(0))
    bound, key = _bound_and_key(busy, sized(name="vm", gpus=1, vcpus=8, memory_bytes=8 * GIB))
    assert bound <= key


def test_a_host_that_keeps_its_memory_comes_before_one_that_gives_it() -> None:
    """However many smaller things give way for that."""
    host = shipped("small-2n8c-2gpu")
    asked = sized(name="x", gpus=0, vcpus=3, memory_bytes=GIB * 3 // 2)
    hosts = [("a", _in_use(host, (), range(4, 8))), ("b", _in_use(host, (), range(6, 8)))]
    best, second = PoolPlaces(pool_of(hosts), default_flavours()).ranked(asked)
    assert (best.host.name, second.host.name) == ("b", "a")
    assert len(best.step.given) > len(second.step.given)
    of_plan = rank([(one, asked.request(one)) for _, one in hosts])
    assert [one.position for one in of_plan] == [1, 0]


@pytest.mark.parametrize("vcpus", [19, 57])
def test_hosts_without_room_for_unequal_cells_are_not_planned(vcpus: int) -> None:
    """vCPUs of odd number over two nodes."""
    host = shipped("hgx-h100")
    free, full = _in_use(host, (), range(2)), _in_use(host, (0, 1, 2, 3), range(95))
    asked = sized(name="x", gpus=1, vcpus=vcpus, memory_bytes=1200 * GIB)
    places = PoolPlaces(pool_of([("a", full), ("b", free)]), default_flavours())
    best = next(places.ranked(asked))
    assert (best.host.name, best.step.given) == ("b", (Concession.UNEQUAL_CELLS,))
    assert not places._candidates[asked][places._state["a"]].step


def test_siblings_of_one_node_are_no_less_than_whole_cores_of_two() -> None:
    host = even_host(2, 1, 1, 6, 2)
    guest = structs.replace(small_request(8).guest, cpu_topology=GuestTopology(1, 1, 4, 2))
    options = PlanOptions(layout="pin-numa", document_siblings=DocumentSiblings.WHEN_SHORT)
    asked = Flavour(name="vm", options=options, guest=guest)
    bound, key = _bound_and_key(_in_use(host, (), range(5)), asked)
    assert bound <= key
    assert key[0] != 0


def test_siblings_as_the_document_shows_them_come_before_the_last_core_of_another_host() -> None:
    """As on one host: there its last core is not taken where siblings fit."""
    guest = structs.replace(small_request(8).guest, cpu_topology=GuestTopology(1, 1, 4, 2))
    options = PlanOptions(layout="pin-numa", document_siblings=DocumentSiblings.WHEN_SHORT)
    asked = Flavour(name="vm", options=options, guest=guest)
    hosts = [("no-smt", even_host(1, 1, 1, 8, 1)), ("smt", even_host(1, 1, 1, 6, 2))]
    ranked = list(PoolPlaces(pool_of(hosts), default_flavours()).ranked(asked))
    assert [one.host.name for one in ranked] == ["smt", "no-smt"]
    assert Concession.HOST_CORE in ranked[1].step.placement.concessions


def test_few_hosts_are_planned_once_it_is_known_what_fits() -> None:
    host = shipped("hgx-h100")
    sizes = [
        sized(name="vm", gpus=gpus, vcpus=vcpus, memory_bytes=64 * GIB)
        for gpus in (0, 1, 2)
        for vcpus in (7, 20, 31)
    ]
    hosts = [(f"h{i}", with_vm(host, size, "vm")) for i, size in enumerate(sizes)]
    every, bounded = _check(
        pool_of(hosts), sized(name="asked", gpus=1, vcpus=9, memory_bytes=64 * GIB)
    )
    assert every > 12
    assert bounded == 3, "the first three"


@pytest.mark.parametrize("seed", range(12))
def test_numbers_that_are_certain_are_those_of_the_planner(seed: int) -> None:
    pool, flavour = _case(seed + 500, EVERY)
    planner = Planner(pool)
    flavours = (flavour, *default_flavours())
    bounds = Bounds(Planner(pool), flavours)
    for host in pool.hosts:
        state = planner.state(host)
        for one in flavours:
            counts = planner.counts(state, one)
            assert bounds.certain(state, one) in (None, counts[0])
            assert bounds.counts(state, one) == counts


def _unlike_hgx_states() -> tuple[Planner, list[HostState]]:
    """Hosts with VMs of sizes of their own, so that cores and memory are short on either node."""
    rng, host = random.Random(7), shipped("hgx-h100")
    hosts = []
    for number in range(10):
        one = host
        for vm in range(rng.randrange(1, 4)):
            flavour = sized(
                name=f"vm{vm}",
                gpus=rng.randrange(3),
                vcpus=rng.randrange(4, 40),
                memory_bytes=rng.randrange(8, 400) * GIB,
            )
            with contextlib.suppress(HomenodeError):
                one = with_vm(one, flavour, f"vm{vm}")
        hosts.append((f"h{number}", one))
    planner = Planner(pool_of(hosts))
    return planner, list(map(planner.state, planner.pool.hosts))


def test_counts_and_stranded_gpus_of_unlike_hosts_are_the_planners_and_mostly_certain() -> None:
    planner, states = _unlike_hgx_states()
    search = StrandedSearch(planner, default_flavours())
    found = [[search.bounds.counts(one, size) for size in default_flavours()] for one in states]
    stranded = [search.of(one) for one in states]
    asked = planner.asked
    assert found == [[planner.counts(one, size) for size in default_flavours()] for one in states]

    def counts(every: tuple[StrandedGpus, ...]) -> list[tuple[str, int]]:
        return [(one.missing, len(one.gpus)) for one in every]

    unknown = StrandedSearch(planner, default_flavours())
    unknown.certain = lambda state, free: None  # type: ignore[method-assign]
    assert list(map(counts, stranded)) == [counts(unknown.of(one)) for one in states]
    assert any(stranded)
    assert asked * 3 < planner.asked
    for state, own in zip(states, stranded, strict=True):
        assert {gpu for one in own for gpu in one.gpus} <= planner.free_gpus(state)
