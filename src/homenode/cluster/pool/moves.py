"""Moves: which VMs to move, and where, to empty a host or to make a large VM fit again."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, islice

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import DEFAULT_LAYOUT, Flavour
from homenode.cluster.pool.model import Pool, PoolHost, VmIdentity
from homenode.cluster.pool.place import PoolPlaces, placed_vm
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Availability, Rules
from homenode.errors import HomenodeError, InputError, UsageError
from homenode.machine.topology import Host, RunningDomain
from homenode.plan.stored import domain_of_plan
from homenode.plan.tuning import Tuning, tune
from homenode.units import format_bytes
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PlanOptions
from homenode.wording import did_you_mean, plural

LAYOUT_WITH_SIBLINGS = "pin-numa-pci-smt"
"""Of VMs whose vCPUs are pinned to siblings."""

MOST_MOVED_TOGETHER = 3
"""VMs that are moved for one gain, at most."""

MOST_TARGETS = 4
"""Kinds of host that are tried for each of them."""

MOST_TRIES = 200
"""Moves that are tried in vain, at most, where the best host of each VM is not enough."""

_MOST_SETS = 200
"""Sets of VMs of one host that are tried."""


class Move(Struct, frozen=True, kw_only=True):
    """A VM from one host to another. restart: it has passed-through devices and moves by stop and
    start; other VMs may migrate live."""

    vm: str
    from_host: str
    to_host: str
    gpus: int
    restart: bool


class MoveGroup(Struct, frozen=True, kw_only=True):
    """Moves that belong together. gain: how many more VMs of `flavour` fit in the pool with full
    locality after them; 0 for a drained host."""

    gain: int
    flavour: str | None
    moves: tuple[Move, ...]


class StuckVm(Struct, frozen=True, kw_only=True):
    """A VM that stays on a host. reason: why."""

    vm: str
    host: str
    reason: str


Staying = Mapping[tuple[str, str], str]
"""Why VMs stay where they are, by host and name."""

ALL_MOVE: Staying = {}


class MovePlan(Struct, frozen=True, kw_only=True):
    """Groups of moves in their order, the fewest moves first. fits_before: VMs of the flavour that
    fit with full locality before all moves; None for a drained host. stuck: VMs that fit on no
    other host, or have to stay. left: those of a drained host that are shut off, or whose move is
    recorded already, and those of other hosts that have to stay."""

    groups: tuple[MoveGroup, ...]
    stuck: tuple[StuckVm, ...]
    fits_before: int | None = None
    left: tuple[StuckVm, ...] = ()

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(move for group in self.groups for move in group.moves)


def drain(
    pool: Pool,
    host: str,
    flavours: Sequence[Flavour],
    planner: Planner | None = None,
    *,
    staying: Staying = ALL_MOVE,
) -> MovePlan:
    """The moves that empty a host, each VM to the host where the pool loses least. A VM that fits
    on no other host, or has to stay, is named, and the others are moved. Raises UsageError for a
    host that the pool does not have."""
    places = PoolPlaces(pool, flavours, planner)
    known = {one.name for one in pool.hosts}
    if host not in known:
        raise UsageError(
            f"pool drain: expected a host of the pool, found {host!r}",
            hint=f"{did_you_mean(host, known)}homenode pool show --pool POOL --all lists them",
        )
    places.put(replace(places.host(host), availability=Availability.DRAINING))
    left = tuple(_left(places, host))
    stuck = [StuckVm(vm=vm, host=on, reason=why) for (on, vm), why in staying.items() if on == host]
    kept = {one.vm for one in (*left, *stuck)}
    vms = [vm for vm in places.host(host).domains if vm.name not in kept]
    # VMs that can migrate live cost least. Else the largest first: small ones find a place next to
    # them, but not the other way round.
    largest = sorted(vms, key=lambda one: (-_devices(one), -len(one.vcpu_pins), one.name))
    for order in (sorted(largest, key=lambda one: bool(_devices(one))), largest):
        moves = _all_moved(places, order, host, _Tries(len(places.pool().hosts), MOST_TRIES, host))
        if moves is not None:
            return MovePlan(
                groups=tuple(MoveGroup(gain=0, flavour=None, moves=(move,)) for move in moves),
                stuck=tuple(stuck),
                left=left,
            )
    groups = []
    for vm in largest:
        found = next(_moves(places, vm, host, host), None)
        if found is None:
            stuck.append(StuckVm(vm=vm.name, host=host, reason=_unmovable(places, vm, host)))
        else:
            groups.append(MoveGroup(gain=0, flavour=None, moves=(found[0],)))
    return MovePlan(groups=tuple(groups), stuck=tuple(stuck), left=left)


class TunedMove(Struct, frozen=True, kw_only=True):
    """A move with what the VM is to have there. original: its definition now. vm: what it takes of
    the new host."""

    move: Move
    vm: RunningDomain
    original: bytes
    tuning: Tuning
    rules: Rules


def tuned_moves(
    pool: Pool,
    moves: Sequence[Move],
    planner: Planner,
    document_of: Callable[[Move], bytes],
) -> Iterator[TunedMove | StuckVm]:
    """Each VM planned on its new host, after the moves before; up to the first that has no plan."""
    places = PoolPlaces(pool, (), planner)
    for move in moves:
        vm = next(one for one in places.host(move.from_host).domains if one.name == move.vm)
        rules, flavour = (
            places.rules_of(move.from_host, vm),
            flavour_of_vm(places, vm, move.from_host),
        )
        assert flavour is not None, "a VM without one has no move"
        host = planner.real_host(places.host(move.to_host), flavour)
        options = replace(flavour.options, vcpus=None, memory_bytes=None, page_bytes=None)
        original = document_of(move)
        try:
            tuning = tune(original, move.vm, options, host)
        except HomenodeError as error:
            yield StuckVm(
                vm=move.vm, host=move.from_host, reason=f"{move.to_host}: {error.message}"
            )
            return
        placed = replace(domain_of_plan(tuning.plan), name=vm.name, uuid=vm.uuid)
        yield TunedMove(move=move, vm=placed, original=original, tuning=tuning, rules=rules)
        places.take_from(move.from_host, VmIdentity.of(vm))
        places.add(move.to_host, placed, rules)


def _left(places: PoolPlaces, host: str) -> Iterator[StuckVm]:
    """The VMs of a host that no move concerns."""
    for vm in places.host(host).domains:
        own = VmIdentity.of(vm)
        elsewhere = [one for one in places.hosts_of(own) if one != host]
        if not (vm.running or vm.planned):
            yield StuckVm(vm=vm.name, host=host, reason="it is shut off")
        elif (
            vm.running
            and elsewhere
            and any(one.planned and own.is_of(one) for one in places.host(elsewhere[0]).domains)
        ):
            yield StuckVm(vm=vm.name, host=host, reason=f"its move to {elsewhere[0]} is recorded")


def defragment(
    pool: Pool,
    flavour: Flavour,
    flavours: Sequence[Flavour],
    planner: Planner | None = None,
    *,
    most: int = 8,
    staying: Staying = ALL_MOVE,
) -> MovePlan:
    """The moves after which more VMs of the flavour fit with full locality, the fewest moves per
    gain first. most: number of gains."""
    places = PoolPlaces(pool, flavours, planner)
    before = _fits(places, flavour)
    groups: list[MoveGroup] = []
    while len(groups) < most:
        found = _next_gain(places, flavour, staying)
        if found is None:
            break
        groups.append(found)
    left = (StuckVm(vm=vm, host=host, reason=why) for (host, vm), why in staying.items())
    return MovePlan(groups=tuple(groups), stuck=(), fits_before=before, left=tuple(left))


def _next_gain(places: PoolPlaces, flavour: Flavour, staying: Staying) -> MoveGroup | None:
    """The fewest moves with a gain: each VM to its best host first, then to other hosts too."""
    for number in range(1, MOST_MOVED_TOGETHER + 1):
        for targets in (1, MOST_TARGETS):
            tries = _Tries(targets, MOST_TRIES)
            for name, vms in _candidates(places, flavour, number, staying):
                found = _tried(places, flavour, name, vms, tries)
                if found is not None:
                    return found
                if targets > 1 and not tries.left:
                    break
    return None


def _candidates(
    places: PoolPlaces, flavour: Flavour, number: int, staying: Staying
) -> Iterator[tuple[str, tuple[RunningDomain, ...]]]:
    """Hosts, each with so many of its VMs without which more VMs of the flavour fit there."""
    planner = places.planner
    # Moves that are tried and rolled back change the groups; each round takes them as they are.
    closed, bound = places.excluded(None), {host for host, _ in staying}
    for state, every in tuple(places.members()):
        names = [name for name in every if name not in closed]
        if not names:
            continue
        before = places.bounds.clean(state, flavour)
        host = places.host(min(names, key=lambda one: (one in bound, places.position(one))))
        movable = [vm for vm in host.domains if (host.name, vm.name) not in staying]
        for vms in _sets(movable, number):
            emptied = planner.state(planner.host_without(host, {vm.name for vm in vms}))
            if places.bounds.clean(emptied, flavour) > before:
                yield host.name, vms


def _sets(vms: Sequence[RunningDomain], number: int) -> Iterator[tuple[RunningDomain, ...]]:
    own = [vm for vm in vms if vm.running or vm.planned]
    for tried, one in enumerate(combinations(own, number)):
        if tried == _MOST_SETS:
            return
        yield one


def _tried(
    places: PoolPlaces,
    flavour: Flavour,
    name: str,
    vms: Sequence[RunningDomain],
    tries: "_Tries",
) -> MoveGroup | None:
    """The moves of these VMs if the pool gains by them; else the pool is as before."""
    before = _fits(places, flavour)
    order = sorted(vms, key=lambda one: (-_devices(one), one.name))
    moves = _all_moved(places, order, name, tries, lambda: _fits(places, flavour) > before)
    if moves is None:
        return None
    return MoveGroup(gain=_fits(places, flavour) - before, flavour=flavour.name, moves=moves)


class _Tries(Struct):
    """targets: how many kinds of host are tried for each VM. left: moves that may be undone.
    emptied: the host that all its VMs leave."""

    targets: int
    left: int
    emptied: str | None = None


def _all_moved(
    places: PoolPlaces,
    vms: Sequence[RunningDomain],
    host: str,
    tries: _Tries,
    is_enough: Callable[[], bool] = lambda: True,
) -> tuple[Move, ...] | None:
    """The moves of all these VMs, in this order; None if there are none, and the pool is as
    before."""
    if not vms:
        return () if is_enough() else None
    here = places.host(host)
    for move, there in islice(_moves(places, vms[0], host, tries.emptied), tries.targets):
        rest = _all_moved(places, vms[1:], host, tries, is_enough)
        if rest is not None:
            return (move, *rest)
        places.put(there)
        places.put(here)
        tries.left = max(0, tries.left - 1)
        if tries.targets > 1 and not tries.left:
            break
    return None


def _devices(vm: RunningDomain) -> int:
    return len(vm.devices) + len(vm.mediated)


def _fits(places: PoolPlaces, flavour: Flavour) -> int:
    closed = places.excluded(None)
    return sum(
        places.bounds.clean(state, flavour) * sum(name not in closed for name in names)
        for state, names in places.members()
    )


def flavour_of_vm(places: PoolPlaces, vm: RunningDomain, host: str) -> Flavour | None:
    """The size of a running VM: what it would request on another host, with GPUs of the same model.
    None for a VM with GPUs of several models or parts of several profiles."""
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
    models = _models(shape, vm.devices, places.planner.gpus(places.host(host).shape))
    if len(profiles) > 1 or len(models) > 1:
        return None
    has_siblings = _shares_cores(shape, vm)
    return Flavour(
        name="a VM that moves",  # one name for all: equal sizes are planned once
        gpu_model=next(iter(models), None),
        options=PlanOptions(
            layout=LAYOUT_WITH_SIBLINGS if has_siblings else DEFAULT_LAYOUT,
            vcpus=max(1, len(vm.vcpu_pins)),
            memory_bytes=vm.memory_bytes or 1 << 30,
            page_bytes=vm.page_bytes,
            gpu_count=len(gpus) or None,
            keep_vcpus=has_siblings,
            gpu_profile=next(iter(profiles), None),
        ),
    )


def _shares_cores(shape: Host, vm: RunningDomain) -> bool:
    """Whether its vCPUs are pinned to siblings of one core, so that it needs fewer cores than it
    has vCPUs."""
    pins = [pin.bits for pin in vm.vcpu_pins if pin is not None and len(pin) == 1]
    return any(sum(bool(core.pus.bits & pin) for pin in pins) > 1 for core in shape.cores)


def _models(shape: Host, devices: Sequence[Bdf], gpus: Collection[Bdf]) -> set[str]:
    """The names of the GPUs among these devices, or of the whole GPUs of which they are parts."""
    found = set()
    for bdf in devices:
        one = shape.device_at.get(bdf)
        if one is not None and bdf in gpus:
            whole = shape.device_at.get(one.physical_function or bdf, one)
            found.add(whole.name or "")
    return found - {""}


def _unmovable(places: PoolPlaces, vm: RunningDomain, host: str) -> str:
    flavour = flavour_of_vm(places, vm, host)
    if flavour is None:
        return "its GPUs are of several models or profiles: plan it by hand"
    size = flavour.options
    parts = [plural(size.vcpus or 0, "core"), format_bytes(size.memory_bytes or 0)]
    if flavour.gpus:
        kind = flavour.options.gpu_profile or flavour.gpu_model
        parts.insert(0, plural(flavour.gpus, "GPU") + (f" ({kind})" if kind else ""))
    own = VmIdentity.of(vm)
    excluded = places.excluded(own, places.rules_of(host, vm), host)
    without = " and may take it" if set(excluded) - {host} else ""
    if len(places.hosts_of(own)) > 1:
        without = " and no VM of this name"
    return f"no other host has {', '.join(parts[:-1])} and {parts[-1]} free together{without}"


def _moves(
    places: PoolPlaces, vm: RunningDomain, host: str, emptied: str | None
) -> Iterator[tuple[Move, PoolHost]]:
    """The VM moved to the best of the other hosts, with that host as it was before; then, once both
    hosts are restored, to the next host in another state."""
    flavour = flavour_of_vm(places, vm, host)
    if flavour is None:
        return
    shapes = places.planner.pool.shapes
    architecture = shapes[places.host(host).shape].architecture
    others = {
        one.name
        for one in places.pool().hosts
        if one.name != host and shapes[one.shape].architecture == architecture
    }
    tried = set()
    own, rules = VmIdentity.of(vm), places.rules_of(host, vm)
    others.difference_update(places.hosts_of(own))
    for one in places.ranked(flavour, vm=own, among=others, rules=rules, emptied=emptied):
        if one.state in tried:
            continue
        tried.add(one.state)
        try:
            placed = placed_vm(places, one.host.name, flavour, vm.name)
        except (Unplannable, InputError):
            continue
        there = places.host(one.host.name)
        places.take_from(host, own)
        places.add(one.host.name, replace(placed, uuid=vm.uuid), rules)
        restart = bool(vm.devices or vm.mediated)
        yield (
            Move(
                vm=vm.name,
                from_host=host,
                to_host=one.host.name,
                gpus=flavour.gpus,
                restart=restart,
            ),
            there,
        )
