"""Stranded GPUs, against every way to fill a host."""

import random

import pytest

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.state import HostState
from homenode.cluster.pool.stranded import StrandedSearch
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, sized, with_vm


def _least_left(planner: Planner, flavours: tuple[Flavour, ...], state: HostState) -> int:
    """Of all fillings with full locality, one VM after the other."""
    seen: dict[HostState, int] = {}

    def least(at: HostState) -> int:
        if at not in seen:
            seen[at] = len(planner.free_gpus(at))
            for flavour in flavours:
                step = planner.exact_step(at, flavour)
                if step is not None and planner.is_clean(at, flavour, step):
                    seen[at] = min(seen[at], least(step.after))
        return seen[at]

    return least(state)


def _check(name: str, flavours: tuple[Flavour, ...], vms: tuple[Flavour, ...] = ()) -> int:
    host = shipped(name)
    for number, vm in enumerate(vms):
        host = with_vm(host, vm, f"vm-{number}")
    pool = pool_of([("h", host)])
    planner = Planner(pool)
    state = planner.state(pool.hosts[0])
    found = StrandedSearch(planner, flavours).of(state)
    number = sum(len(one.gpus) for one in found)
    assert number == _least_left(planner, flavours, state)
    return number


@pytest.mark.parametrize("seed", range(8))
def test_no_other_filling_leaves_fewer_gpus(seed: int) -> None:
    rng = random.Random(seed)
    sizes = tuple(
        sized(
            name=f"f{i}",
            gpus=rng.choice((1, 1, 2, 3, 4)),
            vcpus=rng.randint(8, 40),
            memory_bytes=rng.randint(40, 500) * GIB,
        )
        for i in range(2)
    )
    busy = sized(
        name="busy",
        gpus=rng.randint(0, 2),
        vcpus=rng.randint(4, 40),
        memory_bytes=rng.randint(8, 300) * GIB,
    )
    _check("hgx-h100", sizes, (busy,))


@pytest.mark.parametrize(
    "sizes",
    [
        (
            sized(name="a", gpus=1, vcpus=26, memory_bytes=4 * GIB),
            sized(name="b", gpus=5, vcpus=13, memory_bytes=400 * GIB),
        ),
        (
            sized(name="a", gpus=2, vcpus=6, memory_bytes=300 * GIB),
            sized(name="b", gpus=3, vcpus=10, memory_bytes=4 * GIB),
        ),
    ],
)
def test_fillings_that_change_between_flavours_are_found(sizes: tuple[Flavour, ...]) -> None:
    _check("hgx-h100", sizes, (sized(name="busy", gpus=1, vcpus=21, memory_bytes=8 * GIB),))
    _check("hgx-h100", sizes)
