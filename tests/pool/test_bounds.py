"""The order of hosts with bounds, against the order in which every host is planned."""

import random
from itertools import islice

import pytest

from homenode.errors import HomenodeError
from homenode.plan.options import PlanOptions
from homenode.pool.flavour import Flavour, default_flavours
from homenode.pool.model import Pool
from homenode.pool.outlook import outlook
from homenode.pool.place import PoolPlaces, RankedPlace
from homenode.pool.planner import Planner
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, with_free_memory, with_vm

SMALL = (
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
    return Flavour(
        f"size-{rng.randrange(99)}",
        rng.choice((0, 1, 1, 2, 3, 4)),
        pus // 24 + rng.randint(1, max(1, pus // share)),
        (memory_gib // 32 + rng.randint(1, max(1, memory_gib // share))) * GIB,
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


def _check(pool: Pool, asked: Flavour) -> tuple[int, int]:
    """How often the planner was asked with every host planned, and with bounds."""
    every = PoolPlaces(pool, default_flavours())
    every.bounds.key = lambda state, flavour: ()  # type: ignore[method-assign]
    every.bounds.clean = (  # type: ignore[method-assign]
        lambda state, flavour: every.planner.counts(state, flavour)[0]
    )
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


def test_few_hosts_are_planned_once_it_is_known_what_fits() -> None:
    host = shipped("hgx-h100")
    sizes = [Flavour("vm", gpus, vcpus, 64 * GIB) for gpus in (0, 1, 2) for vcpus in (7, 20, 31)]
    hosts = [(f"h{i}", with_vm(host, size, "vm")) for i, size in enumerate(sizes)]
    every, bounded = _check(pool_of(hosts), Flavour("asked", 1, 9, 64 * GIB))
    assert bounded * 4 < every
