"""Moves: which VMs to move, and where, so that a host is empty or a large VM fits again."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from homenode.bdf import Bdf
from homenode.errors import InputError, UsageError
from homenode.plan.model import Unplannable
from homenode.plan.options import PlanOptions
from homenode.pool.flavour import DEFAULT_LAYOUT, Flavour
from homenode.pool.hook import placed_vm
from homenode.pool.model import Pool
from homenode.pool.place import PoolPlaces
from homenode.topology import RunningDomain

MOST_MOVED_TOGETHER = 3
"""VMs that are moved for one gain, at most."""

_MOST_SETS = 200
"""Sets of VMs of one host that are tried."""


@dataclass(frozen=True, slots=True)
class Move:
    """A VM from one host to another. restart: it has passed-through devices, so that it moves by
    stop and start; others may migrate live."""

    vm: str
    from_host: str
    to_host: str
    gpus: int
    restart: bool


@dataclass(frozen=True, slots=True)
class MoveGroup:
    """Moves that belong together, and what they bring. gain: VMs of `flavour` that fit afterwards
    with full locality and did not before, on the whole pool; of a drained host 0."""

    gain: int
    flavour: str | None
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class StuckVm:
    """A VM that no other host takes."""

    vm: str
    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Groups in the order in which they are to be done, the fewest moves first."""

    groups: tuple[MoveGroup, ...]
    stuck: tuple[StuckVm, ...]


def drain(pool: Pool, host: str, flavours: Sequence[Flavour]) -> MovePlan:
    """The moves that empty a host, each VM where the pool loses least. A VM that fits nowhere is
    named, and the rest goes on. Raises UsageError for a host that the pool has not."""
    places = PoolPlaces(pool, flavours)
    known = {one.name for one in pool.hosts}
    if host not in known:
        raise UsageError(f"drain: expected a host of the pool, found {host!r}")
    others = known - {host}
    vms = [vm for vm in places.host(host).domains if vm.running or vm.planned]
    groups, stuck = [], []
    # The largest first: small ones find a place next to them, but not the other way round.
    for vm in sorted(vms, key=lambda one: (-_devices(one), -len(one.vcpu_pins), one.name)):
        move = _moved(places, vm, host, others)
        if move is None:
            stuck.append(StuckVm(vm.name, host, "no other host takes it on free cores and GPUs"))
        else:
            groups.append(MoveGroup(0, None, (move,)))
    # VMs that can migrate live cost least.
    groups.sort(key=lambda one: (one.moves[0].restart, one.moves[0].gpus))
    return MovePlan(tuple(groups), tuple(stuck))


def defragment(
    pool: Pool, flavour: Flavour, flavours: Sequence[Flavour], *, most: int = 8
) -> MovePlan:
    """The moves after which more VMs of the flavour fit with full locality, the fewest for each
    gain first; at most so many gains."""
    places = PoolPlaces(pool, flavours)
    groups: list[MoveGroup] = []
    while len(groups) < most:
        found = _next_gain(places, flavour)
        if found is None:
            break
        groups.append(found)
    return MovePlan(tuple(groups), ())


def _next_gain(places: PoolPlaces, flavour: Flavour) -> MoveGroup | None:
    planner = places.planner
    for number in range(1, MOST_MOVED_TOGETHER + 1):
        for state, names in places.members():
            before = planner.counts(state, flavour)[0]
            name = min(names, key=places.position)
            for vms in _sets(places.host(name).domains, number):
                host = planner.pool.host(places.host(name))
                gone = {vm.name for vm in vms}
                left = tuple(vm for vm in host.domains if vm.name not in gone)
                emptied = planner.state_without(places.host(name), left)
                if planner.counts(emptied, flavour)[0] <= before:
                    continue
                found = _tried(places, flavour, name, vms)
                if found is not None:
                    return found
    return None


def _sets(vms: Sequence[RunningDomain], number: int) -> Iterator[tuple[RunningDomain, ...]]:
    own = [vm for vm in vms if vm.running or vm.planned]
    for tried, one in enumerate(combinations(own, number)):
        if tried == _MOST_SETS:
            return
        yield one


def _tried(
    places: PoolPlaces, flavour: Flavour, name: str, vms: Sequence[RunningDomain]
) -> MoveGroup | None:
    """The moves of these VMs where the pool gains by them; else everything is as it was."""
    before = _fits(places, flavour)
    others = {host.name for host in places.pool().hosts} - {name}
    moves: list[Move] = []
    for vm in sorted(vms, key=lambda one: (-_devices(one), one.name)):
        move = _moved(places, vm, name, others)
        if move is None:
            break
        moves.append(move)
    gain = _fits(places, flavour) - before
    if len(moves) == len(vms) and gain > 0:
        return MoveGroup(gain, flavour.name, tuple(moves))
    for move in moves:
        places.take_from(move.to_host, move.vm)
    moved = {move.vm for move in moves}
    for vm in vms:
        if vm.name in moved:
            places.add(name, vm)
    return None


def _devices(vm: RunningDomain) -> int:
    return len(vm.devices) + len(vm.mediated)


def _fits(places: PoolPlaces, flavour: Flavour) -> int:
    return sum(
        places.planner.counts(state, flavour)[0] * len(names) for state, names in places.members()
    )


def flavour_of_vm(places: PoolPlaces, vm: RunningDomain, host: str) -> Flavour | None:
    """The size of a VM that runs: what it would ask for on another host. None where no flavour is
    so: one with GPUs, or parts of them, of several profiles."""
    shape = places.planner.pool.shapes[places.host(host).shape]
    profile_of: dict[Bdf | str | None, str | None] = {
        part.uuid or part.bdf: part.profile
        for gpu in shape.pci_devices
        for part in gpu.parts
        if part.is_for_vms
    }
    gpus: list[Bdf | str] = [
        *(places.planner.gpus(places.host(host).shape) & set(vm.devices)),
        *vm.mediated,
    ]
    profiles = {profile_of.get(one) for one in gpus}
    if len(profiles) > 1:
        return None
    return Flavour(
        f"like {vm.name}",
        len(gpus),
        max(1, len(vm.vcpu_pins)),
        vm.memory_bytes or 1 << 30,
        vm.page_bytes,
        options=PlanOptions(layout=DEFAULT_LAYOUT, gpu_profile=next(iter(profiles), None)),
    )


def _moved(
    places: PoolPlaces, vm: RunningDomain, host: str, others: Collection[str]
) -> Move | None:
    """Move the VM to the best of the other hosts; None where none takes it."""
    flavour = flavour_of_vm(places, vm, host)
    if flavour is None:
        return None
    for one in places.ranked(flavour, among=others):
        try:
            there = placed_vm(places, one.host.name, flavour, vm.name)
        except (Unplannable, InputError):
            continue
        places.take_from(host, vm.name)
        places.add(one.host.name, there)
        return Move(vm.name, host, one.host.name, flavour.gpus, bool(vm.devices or vm.mediated))
    return None
