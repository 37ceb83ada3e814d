"""Outlook: what a pool has free, what still fits which flavour, and which GPUs are stranded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from homenode.bdf import Bdf
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.plan.model import Unplannable
from homenode.plan.request import DeviceLocality
from homenode.plan.search.ladder import Concession
from homenode.plan.search.place import place
from homenode.pool.flavour import Flavour
from homenode.pool.model import Pool, PoolFailure, PoolHost
from homenode.pool.planner import Planner
from homenode.pool.state import HostState

_OF_MEMORY = {
    Concession.HOST_MEMORY,
    Concession.UNEVEN_MEMORY,
    Concession.MEMORY_ELSEWHERE,
}


@dataclass(frozen=True, slots=True)
class FlavourFit:
    """How many more VMs of a flavour fit, placed one after the other.

    local: with full locality: every GPU at home, and no worse than on the empty host. degraded:
    those after that.
    """

    flavour: str
    local: int
    degraded: int


@dataclass(frozen=True, slots=True)
class StrandedGpus:
    """Free GPUs that stay free however flavours fill the host with full locality, and the resource
    that is missing there: cores, memory, pages, gpus (too few together), or another constraint of
    the planner."""

    missing: str
    gpus: tuple[Bdf, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """What there is and what is free of it. Memory: bytes that the planner may give to VMs of
    ordinary pages; None where a node's is unknown."""

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
    """How many free GPUs of a pool are stranded for want of a resource."""

    missing: str
    gpus: int


@dataclass(frozen=True, slots=True)
class PoolOutlook:
    """A whole pool: the sums, then the hosts. shapes: kinds of machine; states: machines that are
    distinguished by shape and allocation."""

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
    """What is free and what still fits, host by host and in sum. progress: called with hosts that
    are worked out, and all."""
    planner = planner or Planner(pool)
    states = [planner.state(host) for host in pool.hosts]
    by_state: dict[HostState, HostOutlook] = {}
    hosts: list[HostOutlook] = []
    for host, state in zip(pool.hosts, states, strict=True):
        if state not in by_state:
            progress(len(hosts), len(states))
            by_state[state] = _of_state(planner, state, flavours)
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


def _of_state(planner: Planner, state: HostState, flavours: Sequence[Flavour]) -> HostOutlook:
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
    return HostOutlook("", free, tuple(fits), stranded(planner, state, flavours))


def stranded(
    planner: Planner, state: HostState, flavours: Sequence[Flavour]
) -> tuple[StrandedGpus, ...]:
    """The free GPUs that no filling with flavours of full locality takes: fillings by the largest
    flavours first and by each flavour first, of which the one that leaves fewest counts."""
    if planner.answers is None:
        return _stranded(planner, state, flavours)
    known = planner.answers.stored.stranded
    digest = planner.digest(state, tuple(flavours))
    if digest not in known:
        found = _stranded(planner, state, flavours)
        known[digest] = tuple((one.missing, tuple(map(str, one.gpus))) for one in found)
    return tuple(
        StrandedGpus(missing, tuple(map(Bdf.parse, gpus))) for missing, gpus in known[digest]
    )


def _stranded(
    planner: Planner, state: HostState, flavours: Sequence[Flavour]
) -> tuple[StrandedGpus, ...]:
    with_gpus = sorted((one for one in flavours if one.gpus), key=lambda one: (-one.gpus, one.name))
    best = state
    left = planner.free_gpus(state)
    if not left or not with_gpus:
        return ()
    orders = [tuple(with_gpus), *((first, *with_gpus) for first in reversed(with_gpus))]
    for order in orders:
        run = planner.run(state, order, only_clean=True)
        if run is not None and not run.free_gpus:
            return ()
    for order in orders:
        at = state
        for flavour in order:
            step = planner.exact_step(at, flavour)
            while step is not None and planner.is_clean(at, flavour, step):
                at = step.after
                step = planner.exact_step(at, flavour)
        free = planner.free_gpus(at)
        if len(free) < len(left):
            best, left = at, free
        if not left:
            return ()
    smallest = with_gpus[-1]
    by_missing: dict[str, list[Bdf]] = {}
    for gpu in sorted(left):
        by_missing.setdefault(_missing(planner, best, smallest, gpu, len(left)), []).append(gpu)
    return tuple(StrandedGpus(name, tuple(gpus)) for name, gpus in sorted(by_missing.items()))


def _missing(planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, left: int) -> str:
    """What a VM of the flavour with this GPU lacks on the GPU's node."""
    if flavour.gpus > left:
        return "gpus"
    if gpu in planner.unfit(state.shape, flavour):
        return "flavour"
    device = planner.host(state).device(gpu)
    home = None if device is None else device.node
    if home is None or planner.host(state).node(home) is None:
        return "gpu-node"
    if flavour.gpus == 1:
        # What other nodes have does not count then: hosts that are alike here share the answer.
        state = planner.with_one_node(state, home, gpu)
        with_memory = planner.with_all_memory(state)
        found = _missing_at(planner, with_memory, flavour, gpu, home)
        if found is not None:
            return found
        if not any(pools for _, _, pools in state.memory):
            return "memory"
    return _missing_at(planner, state, flavour, gpu, home) or "cores"


def _missing_at(
    planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, home: NodeIndex
) -> str | None:
    """The same in this very state; None where nothing is."""
    key = (state, flavour, gpu)
    if key not in planner.missing:
        planner.missing[key] = _first_missing(planner, state, flavour, gpu, home)
    return planner.missing[key]


def _first_missing(
    planner: Planner, state: HostState, flavour: Flavour, gpu: Bdf, home: NodeIndex
) -> str | None:
    request = planner.request(state, flavour)
    if request is None:
        return "flavour"
    asked = replace(
        request,
        devices=(gpu,),
        gpu_count=(flavour.gpus - 1) or None,
        max_nodes=request.max_nodes or 1,
        device_locality=DeviceLocality.REQUIRE,
    )
    try:
        found = place(planner.host(state), asked)
    except InputError:
        return "flavour"
    except Unplannable as refused:
        own = [one.constraint for one in refused.rejections if home in one.nodes]
        every = own or [one.constraint for one in refused.rejections]
        return every[0] if every else "cores"
    if not found.concessions:
        return None
    return "memory" if set(found.concessions) & _OF_MEMORY else "cores"
