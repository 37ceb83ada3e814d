"""Hook: one request of a scheduler as a line of JSON, and the answer as another."""

import gc
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import Flavour, SizeTable, Text
from homenode.cluster.pool.model import VmIdentity
from homenode.cluster.pool.place import LostFits, PoolPlaces, RankedPlace
from homenode.cluster.pool.reservations import Reservation, identity_of
from homenode.cluster.pool.rules import Rules
from homenode.errors import HomenodeError, InputError
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.pci import canonical_uuid
from homenode.machine.topology import RunningDomain, with_certain_nodes
from homenode.plan.placement import Placement
from homenode.plan.planner import as_placed
from homenode.plan.search.place import place
from homenode.plan.stored import domain_of_placement
from homenode.toml_text import decode_value

MOST_BYTES = 1 << 16
MOST_PLACEMENTS = 40_000
"""Kept by the planner, with some 6 KiB of what belongs to each."""

MOST_ASKED = 4
"""Plans for a VM of a size of its own, at 3 ms each; then bounds decide."""

_MOST_SHOWN = 3
Uuid = Annotated[
    str,
    Meta(
        pattern=r"\A[0-9A-Fa-f]{8}(-?[0-9A-Fa-f]{4}){3}-?[0-9A-Fa-f]{12}\Z",
        extra={"expected": "a UUID"},
    ),
]


class HookRequest(SizeTable, kw_only=True):
    """The request. op: rank = place, but the VM does not count afterwards.

    vm: its name. uuid: libvirt's; owner: tells VMs of one name apart that have none. flavour: one
    of the pool's; None = the size that the other keys give. hosts: names that may be chosen; empty
    = all. affinity, anti_affinity, fault_domains: groups, as of a packing. ttl_s: seconds after
    which the VM no longer counts, unless a capture has shown it.
    """

    vm: Text
    op: Literal["place", "rank", "remove"] = "place"
    flavour: str | None = None
    uuid: Uuid | None = None
    owner: Text | None = None
    hosts: tuple[str, ...] = ()
    affinity: Text | None = None
    anti_affinity: Text | None = None
    fault_domains: Text | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None


class Reservations(Protocol):
    """Where the VMs that the hook places are kept for other commands; see `ledger`."""

    def find(self, name: str, uuid: str | None, owner: str = "") -> Reservation | None: ...

    def reserve(self, one: Reservation) -> None: ...

    def release(self, one: Reservation) -> None: ...


class HookPlace(Struct, frozen=True, kw_only=True):
    """A host that takes the VM. nodes: host nodes; gpus: addresses; fallback: as in a plan."""

    host: str
    nodes: tuple[int, ...]
    gpus: tuple[Bdf, ...]
    rung: str
    lost: tuple[LostFits, ...]


class HookAnswer(Struct, frozen=True, kw_only=True):
    """The answer. host: None if no host takes the VM; `reason` says why. places: the first three.
    unexamined: hosts that may be better by their bounds, and were not planned. error: the line was
    no valid request, and nothing was done."""

    vm: str | None
    op: str
    host: str | None = None
    places: tuple[HookPlace, ...] = ()
    removed_from: tuple[str, ...] = ()
    unexamined: int = 0
    reason: str | None = None
    error: str | None = None


class Hook:
    """Answers requests one after the other; the VMs that it places count from then on."""

    def __init__(self, places: PoolPlaces, flavours: tuple[Flavour, ...]) -> None:
        self._places = places
        self._flavours = {flavour.name: flavour for flavour in flavours}
        self._sizes: dict[Flavour, Flavour] = {}

    def prepare(self) -> None:
        """Plan the pool's flavours, so that the next requests do not wait."""
        self._places.prepare()
        for flavour in self._flavours.values():
            with suppress(HomenodeError):  # a request is answered with it
                self._best(self._places.ranked(flavour))

    def _best(self, ranking: Iterator[RankedPlace]) -> tuple[list[RankedPlace], list[Placement]]:
        """The first places, the last of which may be no better than hosts that were not planned;
        and what the planner chooses there."""
        ranked = []
        for one in islice(ranking, _MOST_SHOWN):
            ranked.append(one)
            if one.unexamined:
                break
        return ranked, [one.placement for one in ranked]

    def tidy(self) -> None:
        """Between requests: forget what requests of many sizes have left behind, prepare for the
        next, and collect the garbage, which shall not happen while one waits (see `gc.disable`).
        """
        if self._places.planner.placements > MOST_PLACEMENTS:
            self._sizes.clear()
            self._places.forget()
            gc.collect()
        self.prepare()
        gc.collect(1)

    def answer(self, line: bytes, ledger: Reservations | None = None, now_s: float = 0.0) -> str:
        """The line of JSON that answers a line. No request raises an exception.

        ledger: of the pool, whose lock is held; None = VMs count until the hook ends.
        """
        vm: str | None = None
        try:
            request = _request_of(line)
            vm = request.vm
            answer = self._answer(request, ledger, now_s)
        except HomenodeError as error:
            answer = HookAnswer(vm=vm, op="none", error=error.message)
        return encoded(answer)

    def _answer(
        self, request: HookRequest, ledger: Reservations | None, now_s: float
    ) -> HookAnswer:
        owner = request.owner or ""
        uuid = None if request.uuid is None else canonical_uuid(request.uuid)
        known = None if ledger is None else ledger.find(request.vm, uuid, owner)
        own = known.identity if known else identity_of(request.vm, uuid, owner)
        if request.op == "remove":
            return self._removed(request, own, ledger, known)
        there = self._places.hosts_of(own)
        if request.op == "place" and there:
            if uuid is None:
                raise InputError(f"vm: expected a new one, found {request.vm!r} on {there[0]}")
            return HookAnswer(vm=request.vm, op=request.op, host=there[0])
        flavour = self._flavour(request)
        rules = Rules(
            affinity=request.affinity,
            anti_affinity=request.anti_affinity,
            fault_domains=request.fault_domains,
        )
        among = set(request.hosts) or None
        limit = None if flavour in self._flavours.values() else MOST_ASKED
        ranking = self._places.ranked(flavour, vm=own, among=among, rules=rules, most_asked=limit)
        ranked, placements = self._best(ranking)
        shown = tuple(map(self._shown, ranked, placements))
        if not ranked:
            return HookAnswer(vm=request.vm, op=request.op, reason="no host takes it")
        best = ranked[0]
        if request.op == "place":
            placed = replace(best.placed(placements[0]), uuid=own.uuid)
            if ledger is not None:
                ledger.reserve(
                    Reservation(
                        host=best.host.name,
                        vm=placed,
                        owner=owner,
                        by_name=uuid is None,
                        rules=rules,
                        expires_at_s=None if request.ttl_s is None else now_s + request.ttl_s,
                    )
                )
            self._places.add(best.host.name, placed, rules)
        return HookAnswer(
            vm=request.vm,
            op=request.op,
            host=best.host.name,
            places=shown,
            unexamined=best.unexamined,
        )

    def _removed(
        self,
        request: HookRequest,
        own: VmIdentity,
        ledger: Reservations | None,
        known: Reservation | None,
    ) -> HookAnswer:
        """A VM that a capture shows counts until another does not, for all commands alike."""
        hosts = self._places.hosts_of(own)
        for name in hosts:
            domains = self._places.host(name).domains
            stays = ledger is not None and any(vm.running and own.is_of(vm) for vm in domains)
            if not stays:
                self._places.take_from(name, own)
        if ledger is not None and known is not None:
            ledger.release(known)
        return HookAnswer(vm=request.vm, op=request.op, removed_from=hosts)

    def _shown(self, one: RankedPlace, placement: Placement) -> HookPlace:
        gpus = self._places.planner.gpus(one.state.shape)
        own = tuple(bdf for bdf in placement.devices if bdf in gpus)
        return HookPlace(
            host=one.host.name,
            nodes=placement.nodes,
            gpus=own,
            rung=placement.fallback,
            lost=one.lost,
        )

    def _flavour(self, request: HookRequest) -> Flavour:
        if request.flavour is not None:
            known = self._flavours.get(request.flavour)
            if known is None:
                raise request.refusal(
                    "flavour", f"one of {', '.join(self._flavours)}", request.flavour
                )
            return known
        flavour = request.named(f"{request.gpus} GPUs")
        # One object is found sooner than an equal one; a size of the pool has been worked out.
        alike = (one for one in self._flavours.values() if replace(flavour, name=one.name) == one)
        return self._sizes.setdefault(flavour, next(alike, flavour))


def placed_vm(places: PoolPlaces, host: str, flavour: Flavour, vm: str) -> RunningDomain:
    """A VM of the flavour as the planner places it on a host. Raises Unplannable."""
    one = places.host(host)
    real = with_certain_nodes(places.planner.real_host(one, flavour))
    request = flavour.request(real, vm)
    placement = place(real, request, places.planner.inventory(one.shape), brief=True)
    return domain_of_placement(real, as_placed(request, placement), placement)


def _request_of(line: bytes) -> HookRequest:
    if len(line) > MOST_BYTES:
        raise InputError(f"a request: expected at most {MOST_BYTES} bytes, found {len(line)}")
    try:
        record = decode_json(line)
    except NotJsonError as error:
        raise InputError(f"a request: expected a line of JSON, found: {error}") from None
    return decode_value(record, HookRequest, "a request", "")


def encoded(answer: HookAnswer) -> str:
    """The answer as a line of JSON."""
    return msgspec.json.encode(answer, enc_hook=str).decode() + "\n"
