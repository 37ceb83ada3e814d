"""Outlook: what is free in a pool, how many VMs of each flavour still fit, which GPUs are
stranded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, PoolFailure, PoolHost
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Availability
from homenode.cluster.pool.state import HostState
from homenode.cluster.pool.stranded import StrandedGpus, StrandedSearch


class FlavourFit(Struct, frozen=True, kw_only=True):
    """How many more VMs of a flavour fit, placed one after the other.

    local: with full locality: every GPU on a chosen node, and nothing worse than on the empty host.
    degraded: further VMs that fit with less.
    """

    flavour: str
    local: int
    degraded: int


class Free(Struct, frozen=True, kw_only=True):
    """What exists and what is free of it. Memory: bytes that the planner may give to VMs with
    ordinary pages; None if a node's memory is unknown."""

    gpus: int
    free_gpus: int
    cores: int
    free_cores: int
    memory_bytes: int | None
    free_memory_bytes: int | None
    vms: int


class HostOutlook(Struct, frozen=True, kw_only=True):
    """One host. fits: in the order of the flavours; none of a host that takes no VM."""

    name: str
    free: Free
    fits: tuple[FlavourFit, ...]
    stranded: tuple[StrandedGpus, ...]
    availability: Availability = Availability.OPEN

    @property
    def stranded_gpus(self) -> int:
        return sum(len(one.gpus) for one in self.stranded)


class MissingResource(Struct, frozen=True):
    """How many free GPUs of a pool are stranded because a resource is missing."""

    missing: str
    gpus: int


class PoolOutlook(Struct, frozen=True, kw_only=True):
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
        if host.availability is not Availability.OPEN:
            none = tuple(replace(fit, local=0, degraded=0) for fit in known.fits)
            known = replace(known, fits=none, stranded=(), availability=host.availability)
        hosts.append(replace(known, name=host.name, free=replace(known.free, vms=_vms(host))))
    missing: Counter[str] = Counter()
    for one in hosts:
        for stranded in one.stranded:
            missing[stranded.missing] += len(stranded.gpus)
    return PoolOutlook(
        hosts=tuple(hosts),
        free=_sum(one.free for one in hosts),
        fits=tuple(
            FlavourFit(
                flavour=flavour.name,
                local=sum(one.fits[i].local for one in hosts),
                degraded=sum(one.fits[i].degraded for one in hosts),
            )
            for i, flavour in enumerate(flavours)
        ),
        stranded=tuple(MissingResource(name, count) for name, count in missing.most_common()),
        shapes=len(pool.shapes),
        states=len(by_state),
        failures=pool.failures,
    )


def _vms(host: PoolHost) -> int:
    return sum(vm.running or vm.planned for vm in host.domains)


def _sum(parts: Iterable[Free]) -> Free:
    every = list(parts)

    def known(sizes: list[int | None]) -> int | None:
        return None if None in sizes else sum(size for size in sizes if size is not None)

    return Free(
        gpus=sum(one.gpus for one in every),
        free_gpus=sum(one.free_gpus for one in every),
        cores=sum(one.cores for one in every),
        free_cores=sum(one.free_cores for one in every),
        memory_bytes=known([one.memory_bytes for one in every]),
        free_memory_bytes=known([one.free_memory_bytes for one in every]),
        vms=sum(one.vms for one in every),
    )


def _of_state(
    planner: Planner, state: HostState, flavours: Sequence[Flavour], search: StrandedSearch
) -> HostOutlook:
    fits = []
    for flavour in flavours:
        clean, number = search.bounds.counts(state, flavour)
        fits.append(FlavourFit(flavour=flavour.name, local=clean, degraded=number - clean))
    sizes = [size for size, _, _ in state.memory]
    frees = [free for _, free, _ in state.memory]
    classes = planner.core_classes(state.shape)
    cores = sum(map(len, classes))
    free = Free(
        gpus=len(planner.gpus(state.shape)),
        free_gpus=len(planner.free_gpus(state)),
        cores=cores,
        free_cores=cores - sum(busy + service for busy, service in state.cores),
        memory_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
        free_memory_bytes=None
        if None in frees
        else sum(size for size in frees if size is not None),
        vms=0,
    )
    return HostOutlook(name="", free=free, fits=tuple(fits), stranded=search.of(state))
