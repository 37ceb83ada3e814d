"""Hosts: VMs that arrive and depart on the hosts of a pool, under policies for the host.

On the host every policy's VMs are placed by the ordinary planner; only the choice of the host
differs. The load is drawn, so that results are simulated.
"""

import heapq
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, VmIdentity
from homenode.cluster.pool.place import PoolPlaces, placed_vm
from homenode.cluster.pool.planner import FillStep, Planner
from homenode.cluster.pool.replay.trace import Replay
from homenode.cluster.pool.solver import optional_module
from homenode.cluster.pool.state import HostState
from homenode.cluster.pool.stranded import StrandedSearch
from homenode.errors import InputError
from homenode.vm.plan_model import Unplannable


class HostPolicy(StrEnum):
    """Which host a VM gets, among those that hold it."""

    FIRST_FIT = "first-fit"
    BEST_FIT = "best-fit"  # fewest GPUs left free
    FGD = "fgd"  # least growth of the expected fragment
    NOVA = "nova"  # most free memory and cores, as its weighers have it by default
    XAPI = "xapi"  # most free cores, then most free memory
    HOMENODE = "homenode"  # the VM's locality, then what the pool loses


class Arrival(Struct, frozen=True, kw_only=True):
    """A VM: when it comes, when it goes, and its flavour's position."""

    at: float
    until: float
    flavour: int


def drawn_load(
    flavours: Sequence[Flavour],
    weights: Sequence[float],
    gpus: int,
    *,
    load: float,
    count: int,
    seed: int,
) -> tuple[Arrival, ...]:
    """So many VMs with exponential times between arrivals and of stay (mean 1), so that on average
    `load` of the GPUs would be asked for."""
    numpy = optional_module("numpy", "pool simulate")
    rng = numpy.random.default_rng(seed)
    share = numpy.array(weights, dtype=float)
    share = share / share.sum()
    mean = float(sum(p * max(1, f.gpus) for p, f in zip(share, flavours, strict=True)))
    rate = load * gpus / mean
    at = 0.0
    arrivals = []
    for _ in range(count):
        at += float(rng.exponential(1 / rate))
        arrivals.append(
            Arrival(
                at=at,
                until=at + float(rng.exponential(1.0)),
                flavour=int(rng.choice(len(share), p=share)),
            )
        )
    return tuple(arrivals)


def replay_hosts(
    pool: Pool,
    flavours: Sequence[Flavour],
    weights: Sequence[float],
    load: Sequence[Arrival],
    policy: HostPolicy,
    planner: Planner | None = None,
) -> Replay:
    """The load, one decision at a time. A VM that no host holds is refused.

    allocated_percent, stranded_percent: mean GPUs over time. degraded: VMs placed with less than
    full locality. packages_crossed: beyond those that an empty host would need. curve: time, and
    the share of the GPUs that is allocated.
    """
    planner = planner or Planner(pool)
    total = sum(len(planner.gpus(host.shape)) for host in pool.hosts)
    if not total:
        raise InputError("pool simulate: expected hosts with GPUs, found none")
    places = PoolPlaces(pool, flavours, planner)
    departures: list[tuple[float, str, int]] = []
    used, refused, degraded, crossed = 0, 0, 0, 0
    allocated, lost, now = 0.0, 0.0, 0.0
    curve: list[tuple[float, float]] = []
    lost_of: dict[HostState, int] = {}
    search = StrandedSearch(planner, flavours)

    def advance(to: float) -> None:
        nonlocal allocated, lost, now
        allocated += used * (to - now)
        lost += _stranded(places, search, lost_of) * (to - now)
        now = to

    for number, vm in enumerate(load):
        while departures and departures[0][0] <= vm.at:
            until, name, gpus = heapq.heappop(departures)
            advance(until)
            places.remove(VmIdentity(name))
            used -= gpus
        advance(vm.at)
        flavour = flavours[vm.flavour]
        found = _chosen(places, flavours, weights, flavour, policy)
        name = f"vm-{number}"
        if found is None:
            refused += 1
        else:
            host, state, step = found
            try:
                places.add(host, placed_vm(places, host, flavour, name))
            except Unplannable:
                refused += 1
                continue
            heapq.heappush(departures, (vm.until, name, step.gpus))
            used += step.gpus
            best = planner.step(planner.empty(state), flavour)
            if not planner.is_clean(state, flavour, step):
                degraded += 1
            if best is not None:
                crossed += max(0, step.nearness[1] - best.nearness[1])
        curve.append((now, used / total))
    span = max(1e-9, now)
    figures = {
        "allocated_percent": allocated / span / total * 100,
        "refused_percent": refused / max(1, len(load)) * 100,
        "stranded_percent": lost / span / total * 100,
        "degraded": degraded,
        "packages_crossed": crossed,
    }
    return Replay(figures=figures, curve=tuple(curve))


def _stranded(places: PoolPlaces, search: StrandedSearch, known: dict[HostState, int]) -> int:
    number = 0
    for state, names in places.members():
        if state not in known:
            known[state] = sum(len(one.gpus) for one in search.of(state))
        number += known[state] * len(names)
    return number


def _chosen(
    places: PoolPlaces,
    flavours: Sequence[Flavour],
    weights: Sequence[float],
    flavour: Flavour,
    policy: HostPolicy,
) -> tuple[str, HostState, FillStep] | None:
    if policy is HostPolicy.HOMENODE:
        best = next(places.ranked(flavour), None)
        return None if best is None else (best.host.name, best.state, best.step)
    found: list[tuple[Any, int, str, HostState, FillStep]] = []
    for state, names in places.members():
        step = places.planner.step(state, flavour)
        if step is None:
            continue
        order, name = min((places.position(name), name) for name in names)
        key = _key(places.planner, state, step, flavours, weights, policy)
        found.append((key, order, name, state, step))
    if not found:
        return None
    _, _, name, state, step = min(found, key=lambda one: one[:2])
    return name, state, step


def _key(
    planner: Planner,
    state: HostState,
    step: FillStep,
    flavours: Sequence[Flavour],
    weights: Sequence[float],
    policy: HostPolicy,
) -> Any:
    """The policy's key of a host; the least is chosen."""
    if policy is HostPolicy.BEST_FIT:
        return len(planner.free_gpus(step.after)), _free_cores(planner, step.after)
    if policy is HostPolicy.FGD:
        before = _fragment(planner, state, flavours, weights)
        return _fragment(planner, step.after, flavours, weights) - before
    cores, memory = _free_cores(planner, state), _free_memory(state)
    if policy is HostPolicy.NOVA:
        sizes = sum(size or 0 for size, _, _ in state.memory)
        every = sum(map(len, planner.core_classes(state.shape)))
        return -(memory / max(1, sizes) + cores / max(1, every))
    if policy is HostPolicy.XAPI:
        return -cores, -memory
    return 0


def _fragment(
    planner: Planner, state: HostState, flavours: Sequence[Flavour], weights: Sequence[float]
) -> float:
    """Free GPUs, as far as the next VM would not fit."""
    free = len(planner.free_gpus(state))
    none = sum(
        weight
        for flavour, weight in zip(flavours, weights, strict=True)
        if planner.step(state, flavour) is None
    )
    return free * none / sum(weights)


def _free_cores(planner: Planner, state: HostState) -> int:
    every = sum(map(len, planner.core_classes(state.shape)))
    return every - sum(busy + service for busy, service in state.cores)


def _free_memory(state: HostState) -> int:
    return sum(free or 0 for _, free, _ in state.memory)
