"""Reservations: which VM has what of which host, and what a capture shows of it since."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from uuid import UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.pool.model import LostReservation, Pool, PoolHost, VmIdentity
from homenode.cluster.pool.rules import Availability, Rules
from homenode.cluster.pool.state import host_without
from homenode.errors import InputError
from homenode.machine.topology import RunningDomain

_OWNERS = UUID("5f7f3ad1-5a0e-4d0a-a1a5-7a5c2d8a6b1e")
"""Names of VMs are UUIDs of version 5 below it, where an owner tells VMs of one name apart."""


class ReservationState(StrEnum):
    """planned: no capture has shown the VM yet. gone: a later capture shows it nowhere."""

    PLANNED = "planned"
    RUNNING = "running"
    SHUT_OFF = "shut off"
    GONE = "gone"


class Reservation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A VM with what it has of a host.

    vm: its PUs, memory by node and devices. owner: tells VMs of one name without UUIDs apart.
    by_name: nothing has named its UUID. seen: the hosts that had it when it was placed here, each
    with what it had there: that is no news of a later capture. left: the host that homenode has
    moved it from, and the capture that it counts no more in. expires_at_s: seconds since 1970; a
    planned VM does not count from then on.
    """

    host: str
    vm: RunningDomain
    owner: str = ""
    by_name: bool = False
    rules: Rules = Rules()
    state: ReservationState = ReservationState.PLANNED
    seen: tuple[tuple[str, RunningDomain], ...] = ()
    left: tuple[str, str] | None = None
    expires_at_s: float | None = None

    @property
    def identity(self) -> VmIdentity:
        return VmIdentity.of(self.vm)

    @property
    def is_counted(self) -> bool:
        """Whether it counts on its host in addition to what a capture shows."""
        return self.state in (ReservationState.PLANNED, ReservationState.SHUT_OFF)


def identity_of(name: str, uuid: str | None, owner: str = "") -> VmIdentity:
    """The VM of this UUID; else of this name and owner."""
    if uuid is None and owner:
        uuid = str(uuid5(_OWNERS, f"{owner}\n{name}"))
    return VmIdentity(name, uuid)


def reservation_of(
    known: Iterable[Reservation], name: str, uuid: str | None, owner: str = ""
) -> Reservation | None:
    """The VM's reservation. Raises InputError where a VM without UUID may be one of several."""
    found = []
    for one in known:
        if uuid is not None and not one.by_name and one.vm.uuid == uuid:
            return one
        if (one.vm.name, one.owner) == (name, owner) and (uuid is None or one.by_name):
            found.append(one)
    if len(found) > 1:
        raise InputError(
            f"VM {name!r}: expected a UUID, found none and {len(found)} VMs of this name",
            hint="its document names the UUID: virsh dumpxml NAME",
        )
    return found[0] if found else None


def seen_in(pool: Pool, vm: VmIdentity) -> tuple[tuple[str, RunningDomain], ...]:
    """The hosts that have the VM, each with what it has there."""
    return tuple(
        (host.name, known)
        for host in pool.hosts
        for known in host.domains
        if not known.planned and vm.is_of(known)
    )


class LedgerView(Struct, frozen=True, kw_only=True):
    """A captured pool with its ledger. changed: reservations of which the capture says more, as
    they were and as they are now."""

    pool: Pool
    changed: tuple[tuple[Reservation, Reservation], ...] = ()


_Seen = tuple[str, RunningDomain]


def with_reservations(
    pool: Pool,
    reservations: Sequence[Reservation],
    availability: Mapping[str, Availability],
    now_s: float,
    capture: str = "",
) -> LedgerView:
    """The pool with the VMs that are reserved and do not run yet, the rules of all, and the hosts
    that take no VM. A VM that runs elsewhere by now has moved; one that ran, and that its host no
    longer has, is gone. capture: which the pool is."""
    of_pool = {host.name: host for host in pool.hosts}
    shown = _Shown(pool, reservations)
    counted: dict[str, list[Reservation]] = {}
    moved: dict[str, list[VmIdentity]] = {}
    changed, lost = [], []
    for one in reservations:
        now = _as_captured(one, shown.of(one), of_pool, now_s)
        if now is not one:
            changed.append((one, now))
        if now.state is ReservationState.GONE:
            continue
        if now.host not in of_pool:
            lost.append(LostReservation(now.vm.name, now.host))
        else:
            counted.setdefault(now.host, []).append(now)
        if now.left is not None and now.left[1] == capture:
            moved.setdefault(now.left[0], []).append(now.identity)
    hosts = tuple(
        _with(
            _without(pool, host, moved.get(host.name, ())),
            counted.get(host.name, ()),
            availability.get(host.name, Availability.OPEN),
        )
        for host in pool.hosts
    )
    return LedgerView(pool=replace(pool, hosts=hosts, lost=tuple(lost)), changed=tuple(changed))


class _Shown:
    """The VMs that a capture shows, by what names them."""

    def __init__(self, pool: Pool, reservations: Sequence[Reservation]) -> None:
        self._known = {one.vm.uuid for one in reservations if not one.by_name}
        self._by_uuid: dict[str, list[_Seen]] = {}
        self._by_name: dict[str, list[_Seen]] = {}
        if not reservations:
            return
        for host in pool.hosts:
            for vm in host.domains:
                if vm.planned:
                    continue
                if vm.uuid is not None:
                    self._by_uuid.setdefault(vm.uuid, []).append((host.name, vm))
                if not vm.has_pseudonym:
                    self._by_name.setdefault(vm.name, []).append((host.name, vm))

    def of(self, one: Reservation) -> list[_Seen]:
        """Where the VM is: of this UUID, or of this name where either has none."""
        named = self._by_name.get(one.vm.name, ())
        if one.by_name:
            return [(host, vm) for host, vm in named if vm.uuid not in self._known - {None}]
        own = self._by_uuid.get(one.vm.uuid or "", ())
        return [*own, *((host, vm) for host, vm in named if vm.uuid is None)]


def _as_captured(
    one: Reservation, shown: Sequence[_Seen], hosts: Mapping[str, PoolHost], now_s: float
) -> Reservation:
    """The reservation as the capture has it."""
    if one.state is ReservationState.GONE and not shown:
        return one
    before = {host for host, _ in one.seen}
    news = [
        (host, vm)
        for host, vm in shown
        if (host, vm) not in one.seen and (host == one.host or host not in before)
    ]
    own = [vm for host, vm in news if host == one.host]
    if running := [vm for vm in own if vm.running]:
        return _at(one, one.host, running[0])
    elsewhere = {host: vm for host, vm in news if host != one.host and vm.running}
    if not elsewhere and not own:
        elsewhere = {host: vm for host, vm in news if host != one.host}
    if len(elsewhere) == 1:
        return _at(one, *next(iter(elsewhere.items())))
    if own:
        found = replace(_named(one, own[0]), state=ReservationState.SHUT_OFF, expires_at_s=None)
        return one if found == one else found
    if elsewhere or one.state is ReservationState.GONE:
        return one  # several of its name: which it is, none says
    if one.state is ReservationState.PLANNED:
        expired = one.expires_at_s is not None and one.expires_at_s <= now_s
        return replace(one, state=ReservationState.GONE) if expired else one
    host = hosts.get(one.host)
    if host is None or not host.lists_domains:
        return one
    if shown:  # its move was given up
        return _at(one, *shown[0])
    return replace(one, state=ReservationState.GONE, seen=(), left=None)


def _at(one: Reservation, host: str, vm: RunningDomain) -> Reservation:
    """The VM as a host has it by now."""
    state = ReservationState.RUNNING if vm.running else ReservationState.SHUT_OFF
    named = _named(one, vm)
    found = replace(
        named,
        host=host,
        vm=replace(vm, uuid=named.vm.uuid),
        state=state,
        seen=(),
        left=None,
        expires_at_s=None,
    )
    return one if found == one else found


def _named(one: Reservation, vm: RunningDomain) -> Reservation:
    """The reservation with the UUID that a capture shows."""
    if not one.by_name or vm.uuid is None:
        return one
    return replace(one, by_name=False, vm=replace(one.vm, uuid=vm.uuid))


def _without(pool: Pool, host: PoolHost, moved: Sequence[VmIdentity]) -> PoolHost:
    """The host without VMs that run elsewhere since it was captured."""
    gone = {vm.name for vm in host.domains if any(one.is_of(vm) for one in moved)}
    return host_without(pool.shapes[host.shape].nodes, host, gone) if gone else host


def _with(host: PoolHost, own: Sequence[Reservation], availability: Availability) -> PoolHost:
    """The host with these VMs: one that is only defined there counts as it was reserved."""
    if not own and availability is Availability.OPEN:
        return host
    added = tuple(replace(one.vm, running=False, planned=True) for one in own if one.is_counted)
    defined = [one.identity for one in own if one.is_counted]
    left = tuple(
        vm for vm in host.domains if vm.running or not any(one.is_of(vm) for one in defined)
    )
    rules = tuple((one.vm.name, one.rules) for one in own if not one.rules.is_free)
    return replace(host, domains=(*left, *added), availability=availability, rules=rules)


def of_journal(lines: Iterable[tuple[str, str, RunningDomain | None]]) -> Iterator[Reservation]:
    """The reservations of (host, name, VM or None where it was removed), the last of a VM."""
    found: dict[tuple[str, str], RunningDomain] = {}
    for host, name, vm in lines:
        found.pop((host, name), None)
        if vm is not None:
            found[host, name] = vm
    by_name = {name: (host, vm) for (host, name), vm in found.items()}
    for host, vm in by_name.values():
        yield Reservation(host=host, vm=vm, by_name=True)
