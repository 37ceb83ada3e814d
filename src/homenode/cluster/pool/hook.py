"""Hook: one request of a scheduler as a line of JSON, and the answer as another."""

from itertools import islice
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import Flavour, SizeTable, Text
from homenode.cluster.pool.place import LostFits, PoolPlaces, RankedPlace
from homenode.errors import HomenodeError, InputError
from homenode.json_text import NotJsonError, decode_json
from homenode.machine.topology import RunningDomain, with_certain_nodes
from homenode.plan.planner import as_placed
from homenode.plan.search.place import place
from homenode.plan.stored import domain_of_placement
from homenode.toml_text import decode_value

MOST_BYTES = 1 << 16
MOST_PLACEMENTS = 40_000
"""Kept by the planner, with some 6 KiB of what belongs to each."""

_MOST_SHOWN = 3


class HookRequest(SizeTable, kw_only=True, forbid_unknown_fields=False):
    """The request. op: rank = place, but the VM does not count afterwards.

    vm: its name. flavour: one of the pool's; None = the size that the other keys give. hosts: names
    that may be chosen; empty = all.
    """

    vm: Text
    op: Literal["place", "rank", "remove"] = "place"
    flavour: str | None = None
    hosts: tuple[str, ...] = ()


class HookPlace(Struct, frozen=True, kw_only=True):
    """A host that takes the VM. nodes: host nodes; gpus: addresses; fallback: as in a plan."""

    host: str
    nodes: tuple[int, ...]
    gpus: tuple[Bdf, ...]
    rung: str
    lost: tuple[LostFits, ...]


class HookAnswer(Struct, frozen=True, kw_only=True):
    """The answer. host: None if no host takes the VM; `reason` says why. places: the first three.
    error: the line was no valid request, and nothing was done."""

    vm: str | None
    op: str
    host: str | None = None
    places: tuple[HookPlace, ...] = ()
    removed_from: tuple[str, ...] = ()
    reason: str | None = None
    error: str | None = None


class Hook:
    """Answers requests one after the other; the VMs that it places count from then on."""

    def __init__(self, places: PoolPlaces, flavours: tuple[Flavour, ...]) -> None:
        self._places = places
        self._flavours = {flavour.name: flavour for flavour in flavours}
        self._sizes: dict[Flavour, Flavour] = {}

    def prepare(self) -> None:
        """Plan the pool's flavours, so that the first requests do not wait."""
        for flavour in self._flavours.values():
            next(self._places.ranked(flavour), None)

    def tidy(self) -> None:
        """Between requests: forget what requests of many sizes have left behind."""
        if self._places.planner.placements > MOST_PLACEMENTS:
            self._sizes.clear()
            self._places.forget()
            self.prepare()

    def answer(self, line: bytes) -> str:
        """The line of JSON that answers a line. No request raises an exception."""
        vm: str | None = None
        try:
            request = _request_of(line)
            vm = request.vm
            answer = self._answer(request)
        except HomenodeError as error:
            answer = HookAnswer(vm=vm, op="none", error=error.message)
        return _encoded(answer) + "\n"

    def _answer(self, request: HookRequest) -> HookAnswer:
        if request.op == "remove":
            return HookAnswer(
                vm=request.vm, op=request.op, removed_from=self._places.remove(request.vm)
            )
        if request.op == "place" and (there := self._places.hosts_of(request.vm)):
            raise InputError(f"vm: expected a new one, found {request.vm!r} on {there[0]}")
        flavour = self._flavour(request)
        among = set(request.hosts) or None
        ranked = list(islice(self._places.ranked(flavour, among=among), _MOST_SHOWN))
        shown = tuple(self._shown(one) for one in ranked)
        if not ranked:
            return HookAnswer(vm=request.vm, op=request.op, reason="no host takes it")
        best = ranked[0]
        if request.op == "place":
            self._places.add(best.host.name, self._placed(best, flavour, request.vm))
        return HookAnswer(vm=request.vm, op=request.op, host=best.host.name, places=shown)

    def _placed(self, best: RankedPlace, flavour: Flavour, vm: str) -> RunningDomain:
        """The VM as the planner places it on this host."""
        return placed_vm(self._places, best.host.name, flavour, vm)

    def _shown(self, one: RankedPlace) -> HookPlace:
        gpus = self._places.planner.gpus(one.state.shape)
        placement = one.placement
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


def _encoded(answer: HookAnswer) -> str:
    return msgspec.json.encode(answer, enc_hook=str).decode()
