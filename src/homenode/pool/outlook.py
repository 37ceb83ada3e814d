"""Outlook: what is free in a pool, how many VMs of each flavour still fit, which GPUs are
stranded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from homenode.pool.flavour import Flavour
from homenode.pool.model import Pool, PoolFailure, PoolHost
from homenode.pool.planner import Planner
from homenode.pool.state import HostState
from homenode.pool.stranded import StrandedGpus, StrandedSearch


@dataclass(frozen=True, slots=True)
class FlavourFit:
    """How many more VMs of a flavour fit, placed one after the other.

    local: with full locality: every GPU on a chosen node, and nothing worse than on the empty host.
    degraded: further VMs that fit with less.
    """

    flavour: str
    local: int
    degraded: int


@dataclass(frozen=True, slots=True)
class Free:
    """What exists and what is free of it. Memory: bytes that the planner may give to VMs with
    ordinary pages; None if a node's memory is unknown."""

    gpus: int
    free_gpus: int
    cores: int
    free_cores: int
    memory_bytes: int | None
    free_memory_bytes: int | None
    vms: int


@dataclass(frozen=True, slots=True)
class HostOutlook:
    """One host. fits: in the order of the flavours."""

    name: str
    free: Free
    fits: tuple[FlavourFit, ...]
    stranded: tuple[StrandedGpus, ...]

    @property
    def stranded_gpus(self) -> int:
        return sum(len(one.gpus) for one in self.stranded)


@dataclass(frozen=True, slots=True)
class MissingResource:
    """How many free GPUs of a pool are stranded because a resource is missing."""

    missing: str
    gpus: int


@dataclass(frozen=True, slots=True)
class PoolOutlook:
    """A whole pool: the sums, then the hosts. shapes: number of kinds of machine. states: number of
    different allocations of them."""

    hosts: tuple[HostOutlook, ...]
    free: Free
    fits: tuple[FlavourFit, ...]
    stranded: tuple[MissingResource, ...]
    shapes: int
    states: int
    failures: tuple[PoolFailure, ...]

    @property
    def stranded_gpus(self) -> int:
        return sum(one.gpus for one in self.stranded)


def outlook(
    pool: Pool,
    flavours: Sequence[Flavour],
    planner: Planner | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PoolOutlook:
    """What is free and what still fits, by host and in sum. progress: called with the number of
    hosts that are done, and of all."""
    planner = planner or Planner(pool)
    states = [planner.state(host) for host in pool.hosts]
    by_state: dict[HostState, HostOutlook] = {}
    search = StrandedSearch(planner, flavours)
    hosts: list[HostOutlook] = []
    for host, state in zip(pool.hosts, states, strict=True):
        if state not in by_state:
            progress(len(hosts), len(states))
            by_state[state] = _of_state(planner, state, flavours, search)
        known = by_state[state]
        hosts.append(replace(known, name=host.name, free=replace(known.free, vms=_vms(host))))
    missing: Counter[str] = Counter()
    for one in hosts:
        for stranded in one.stranded:
            missing[stranded.missing] += len(stranded.gpus)
    return PoolOutlook(
        tuple(hosts),
        _sum(one.free for one in hosts),
        tuple(
            FlavourFit(
                flavour.name,
                sum(one.fits[i].local for one in hosts),
                sum(one.fits[i].degraded for one in hosts),
            )
            for i, flavour in enumerate(flavours)
        ),
        tuple(MissingResource(name, count) for name, count in missing.most_common()),
        len(pool.shapes),
        len(by_state),
        pool.failures,
    )


def _vms(host: PoolHost) -> int:
    return sum(vm.running or vm.planned for vm in host.domains)


def _sum(parts: Iterable[Free]) -> Free:
    every = list(parts)

    def known(sizes: list[int | None]) -> int | None:
        return None if None in sizes else sum(size for size in sizes if size is not None)

    return Free(
        sum(one.gpus for one in every),
        sum(one.free_gpus for one in every),
        sum(one.cores for one in every),
        sum(one.free_cores for one in every),
        known([one.memory_bytes for one in every]),
        known([one.free_memory_bytes for one in every]),
        sum(one.vms for one in every),
    )


def _of_state(
    planner: Planner, state: HostState, flavours: Sequence[Flavour], search: StrandedSearch
) -> HostOutlook:
    fits = []
    for flavour in flavours:
        clean, number = planner.counts(state, flavour)
        fits.append(FlavourFit(flavour.name, clean, number - clean))
    sizes = [size for size, _, _ in state.memory]
    frees = [free for _, free, _ in state.memory]
    classes = planner.core_classes(state.shape)
    cores = sum(map(len, classes))
    free = Free(
        len(planner.gpus(state.shape)),
        len(planner.free_gpus(state)),
        cores,
        cores - sum(busy + service for busy, service in state.cores),
        None if None in sizes else sum(size for size in sizes if size is not None),
        None if None in frees else sum(size for size in frees if size is not None),
        0,
    )
    return HostOutlook("", free, tuple(fits), search.of(state))
