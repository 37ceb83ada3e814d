"""Place: on which host of a pool the next VM goes, and what that costs the pool."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.cluster.pool.answers import Answers
from homenode.cluster.pool.bounds import Bounds
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, PoolHost
from homenode.cluster.pool.planner import FillStep, Planner
from homenode.cluster.pool.state import HostState
from homenode.errors import InputError
from homenode.machine.topology import Host, RunningDomain, with_certain_nodes
from homenode.plan.placement import Placement
from homenode.plan.planner import plan
from homenode.plan.search.place import place
from homenode.vm.plan_model import Unplannable


class LostFits(Struct, frozen=True):
    """How many VMs of a flavour no longer fit with full locality."""

    flavour: str
    count: int


@dataclass(frozen=True, slots=True)
class RankedPlace:
    """A host that takes the VM. step: the placement on any host in this state, so that cores and
    GPUs of the same kind may be exchanged. lost: VMs that no longer fit in the pool, the largest
    flavour first. vm: the VM's name, where it has one."""

    host: PoolHost
    flavour: Flavour
    state: HostState
    step: FillStep
    lost: tuple[LostFits, ...]
    vm: str | None
    planner: Planner = field(repr=False, compare=False)

    @property
    def real_host(self) -> Host:
        """The host as the VM finds it: an earlier record of the VM there no longer counts."""
        return _without_record(self.planner.real_host(self.host, self.flavour), self.vm)

    @property
    def placement(self) -> Placement:
        """The nodes and GPUs that the planner chooses on this host. Raises Unplannable."""
        host = with_certain_nodes(self.real_host)
        request = self.flavour.request(host, self.vm)
        return place(host, request, self.planner.inventory(self.host.shape), brief=True)


def _without_record(host: Host, vm: str | None) -> Host:
    left = tuple(known for known in host.domains if not (known.planned and known.name == vm))
    return structs.replace(host, domains=left)


class RefusedHosts(Struct, frozen=True, kw_only=True):
    """Hosts that refuse the VM for one reason. hosts: their names. nearest: the one of them with
    the most free GPUs and memory. detail: what was found there; "" where the reason says it."""

    reason: str
    hosts: tuple[str, ...]
    nearest: str
    detail: str


_REASONS = {
    "cores": "too few free cores",
    "pus": "too few free PUs",
    "host-core": "no core would be left for the host",
    "memory": "too little free memory",
    "pages": "too little free memory for its huge pages",
    "gpus": "too few free GPUs",
    "gpu-packages": "too few free GPUs in one package",
    "max-nodes": "it needs more nodes than --max-nodes allows",
    "device-locality": "a GPU would be on none of its nodes",
    "expander-buses": "its devices need more expander buses than pcie.0 has slots for",
    "cells": "no nodes have space for the cells of --cell",
}
"""By the constraint that the nearest placement does not meet."""

MOST_EXPLAINED = 200
"""Kinds of host whose refusal the planner explains, at a few ms each."""

_NOT_EXPLAINED = "they refuse it too, for reasons that were not examined"


class PoolPlaces:
    """The hosts of a pool by state, with arrivals and departures.

    flavours: the sizes whose fits are what a placement may cost the pool.
    """

    def __init__(
        self, pool: Pool, flavours: Sequence[Flavour], planner: Planner | None = None
    ) -> None:
        self.planner = planner or Planner(pool)
        self.flavours = tuple(
            sorted((one for one in flavours if one.gpus), key=lambda one: (-one.gpus, one.name))
        )
        self._hosts = {host.name: host for host in pool.hosts}
        self.bounds = Bounds(self.planner, self.flavours)
        self._order = {host.name: number for number, host in enumerate(pool.hosts)}
        self._state: dict[str, HostState] = {}
        self._members: dict[HostState, dict[str, None]] = {}
        self._host_of_vm: dict[str, list[str]] = {}
        self._candidates: dict[tuple[HostState, Flavour], _Candidate] = {}
        for host in pool.hosts:
            self._enter(host)

    def forget(self) -> None:
        """Start again with a planner that has worked out nothing, as the pool is now."""
        answers = self.planner.answers
        self.planner = Planner(
            self.planner.pool, None if answers is None else Answers(answers.stored)
        )
        self.bounds = Bounds(self.planner, self.flavours)
        self._candidates.clear()
        self._members.clear()
        for name, host in self._hosts.items():
            self._state[name] = state = self.planner.state(host)
            self._members.setdefault(state, {})[name] = None

    def host(self, name: str) -> PoolHost:
        return self._hosts[name]

    def members(self) -> Iterator[tuple[HostState, tuple[str, ...]]]:
        """Each state, with the hosts that are in it."""
        for state, names in list(self._members.items()):
            yield state, tuple(names)

    def position(self, host: str) -> int:
        """The host's place in the pool's order."""
        return self._order[host]

    def hosts_of(self, vm: str) -> tuple[str, ...]:
        """Hosts that have a VM of this name."""
        return tuple(self._host_of_vm.get(vm, ()))

    def pool(self) -> Pool:
        """The pool as it is now."""
        return replace(self.planner.pool, hosts=tuple(self._hosts.values()))

    def add(self, host: str, vm: RunningDomain) -> None:
        """A VM has arrived."""
        one = self._hosts[host]
        left = tuple(known for known in one.domains if known.name != vm.name)
        self.put(replace(one, domains=(*left, vm)))

    def remove(self, vm: str) -> tuple[str, ...]:
        """A VM has gone; from which hosts."""
        hosts = self.hosts_of(vm)
        for name in hosts:
            self.take_from(name, vm)
        return hosts

    def take_from(self, host: str, vm: str) -> None:
        """A VM has gone from one host; one of the same name elsewhere stays."""
        self.put(self.planner.host_without(self._hosts[host], {vm}))

    def put(self, host: PoolHost) -> None:
        """A host is in another state now."""
        self._leave(self._hosts[host.name])
        self._enter(host)

    def _enter(self, host: PoolHost) -> None:
        self._hosts[host.name] = host
        state = self.planner.state(host)
        self._state[host.name] = state
        self._members.setdefault(state, {})[host.name] = None
        for vm in host.domains:
            self._host_of_vm.setdefault(vm.name, []).append(host.name)

    def _leave(self, host: PoolHost) -> None:
        state = self._state[host.name]
        del self._members[state][host.name]
        if not self._members[state]:
            del self._members[state]
        for vm in host.domains:
            self._host_of_vm[vm.name].remove(host.name)

    def ranked(
        self,
        flavour: Flavour | Mapping[int, Flavour],
        *,
        vm: str | None = None,
        among: Collection[str] | None = None,
    ) -> Iterator[RankedPlace]:
        """The hosts that take the VM, the best first; each is worked out when it is asked for.

        flavour: the VM, or the VM by the number of the shape. vm: its name, where it may run in the
        pool already: there it frees its own. among: names of hosts that may be chosen.

        Order: what gives way, then the policy's order of concerns (docs/decisions/0010) up to the
        GPU sets that the host loses; before these, the VMs that the pool can no longer take with
        full locality, largest flavour first; then, of a VM with GPUs, those left free on the host,
        fewest first; then the rest, and at last the order of the hosts.
        """
        queue: list[tuple[tuple[object, ...], int, list[str], _Candidate]] = []
        for state, names in self._groups(vm, among):
            own_flavour = flavour if isinstance(flavour, Flavour) else flavour.get(state.shape)
            if own_flavour is None:
                continue
            candidate = self._candidate(state, own_flavour)
            if not candidate.is_refused:
                first = min(map(self._order.__getitem__, names))
                queue.append((candidate.key, first, names, candidate))
        heapq.heapify(queue)
        while queue:
            _, first, names, candidate = heapq.heappop(queue)
            step = candidate.step
            if step is None or not candidate.is_complete:
                candidate.go_on()
                if not candidate.is_refused:
                    heapq.heappush(queue, (candidate.key, first, names, candidate))
                continue
            for name in sorted(names, key=self._order.__getitem__):
                yield RankedPlace(
                    host=self._hosts[name],
                    flavour=candidate.flavour,
                    state=candidate.state,
                    step=step,
                    lost=candidate.lost(),
                    vm=vm,
                    planner=self.planner,
                )

    def _groups(
        self, vm: str | None, among: Collection[str] | None
    ) -> Iterator[tuple[HostState, list[str]]]:
        """Hosts that may be chosen, by state. vm: where it runs, its share is free."""
        own = {} if vm is None else dict.fromkeys(self.hosts_of(vm))
        for name in own:
            if among is None or name in among:
                yield self.planner.state(self._hosts[name], without=vm), [name]
        if among is None:
            for state, members in self._members.items():
                if names := [name for name in members if name not in own]:
                    yield state, names
            return
        groups: dict[HostState, list[str]] = {}
        for name in among:
            if name in self._state and name not in own:
                groups.setdefault(self._state[name], []).append(name)
        yield from groups.items()

    def _candidate(self, state: HostState, flavour: Flavour) -> "_Candidate":
        """The state as a place for the flavour."""
        key = (state, flavour)
        if key not in self._candidates:
            self._candidates[key] = _Candidate(self, flavour, state)
        return self._candidates[key]

    def refusals(
        self,
        flavour: Flavour | Mapping[int, Flavour],
        *,
        vm: str | None = None,
        most: int = MOST_EXPLAINED,
    ) -> tuple[RefusedHosts, ...]:
        """Why hosts refuse the VM, by reason, that of most hosts first. vm: its name, where it has
        one. most: the planner explains the refusal of at most so many kinds of host; those without
        enough GPUs do not count."""
        found: dict[str, list[tuple[int, HostState, str]]] = {}
        asked = 0
        for state, members in self._members.items():
            own = flavour if isinstance(flavour, Flavour) else flavour.get(state.shape)
            free, reason, detail = 0, "no layout is recommended there", ""
            if own is not None:
                if self.planner.step(state, own) is not None:
                    continue
                free = sum(self.planner.free_units(state, own).values())
                if own.gpus > free:
                    reason, detail = self._too_few_gpus(state, own, free)
                elif asked < most:
                    asked += 1
                    reason, detail = self._reason(self._hosts[next(iter(members))], own, vm)
                else:
                    reason = _NOT_EXPLAINED
            found.setdefault(reason, []).append((free, state, detail))
        refused = (self._refused(reason, groups) for reason, groups in found.items())
        return tuple(
            sorted(refused, key=lambda one: (one.reason == _NOT_EXPLAINED, -len(one.hosts)))
        )

    def _refused(self, reason: str, groups: Sequence[tuple[int, HostState, str]]) -> RefusedHosts:
        """The hosts of these states; nearest is one with the most free GPUs, memory, then cores."""

        def space(group: tuple[int, HostState, str]) -> tuple[int, int, int]:
            free_gpus, state, _ = group
            memory = sum(free or 0 for _, free, _ in state.memory)
            return free_gpus, memory, -sum(busy + service for busy, service in state.cores)

        _, state, detail = max(groups, key=space)
        hosts = [name for _, one, _ in groups for name in self._members[one]]
        nearest = next(iter(self._members[state]))
        return RefusedHosts(
            reason=reason,
            hosts=tuple(sorted(hosts, key=self.position)),
            nearest=nearest,
            detail=detail,
        )

    def _too_few_gpus(self, state: HostState, flavour: Flavour, free: int) -> tuple[str, str]:
        every = sum(self.planner.free_units(self.planner.empty(state), flavour).values())
        model = flavour.options.gpu_profile or flavour.gpu_model
        few = "no" if flavour.gpus == 1 else f"fewer than {flavour.gpus}"
        kind = f"{'GPU' if flavour.gpus == 1 else 'GPUs'}{f' of {model}' if model else ''}"
        if every < flavour.gpus:
            return f"{few} {kind}", f"{every} in all" if every else ""
        return f"{few} free {kind}", f"{free} of {every} free" if free else ""

    def _reason(self, one: PoolHost, flavour: Flavour, vm: str | None) -> tuple[str, str]:
        """Why the planner refuses the VM on this host, and what it found."""
        host = _without_record(self.planner.real_host(one, flavour), vm)
        try:
            plan(host, flavour.request(host, vm))
        except InputError as refused:
            return "it does not have what the VM needs", refused.message
        except Unplannable as refused:
            nearest = refused.nearest
            if nearest is None:
                return "the VM cannot be built there", refused.message
            reason = _REASONS.get(nearest.constraint, "no nodes have space for it")
            # Of GPUs that are divided, the hint names the profiles.
            detail = refused.hint if nearest.constraint == "gpus" else nearest.detail
            return reason, detail or ""
        if flavour.gpu_model or flavour.options.gpu_profile:
            return "its GPUs of that model or profile are in use", ""
        return "too little free memory, counted in steps of 64 MiB", "homenode plan may accept it"


class _Candidate:
    """Hosts in one state, as a place for a VM. The key is first a lower bound. Then the planner is
    asked, and the key gets further parts as the comparison needs them."""

    __slots__ = ("_lost", "_rest", "flavour", "is_refused", "key", "places", "state", "step")

    def __init__(self, places: PoolPlaces, flavour: Flavour, state: HostState) -> None:
        self.places, self.flavour, self.state = places, flavour, state
        self.step: FillStep | None = None
        self.is_refused = False
        self._lost: list[int] = []
        self._rest: list[object] = []
        self.key: tuple[object, ...] = places.bounds.key(state, flavour)

    @property
    def is_complete(self) -> bool:
        return len(self._lost) > len(self.places.flavours)

    def go_on(self) -> None:
        """Ask the planner; then the next part of the key: what one flavour more loses, and at the
        end the rest."""
        planner, bounds = self.places.planner, self.places.bounds
        if self.step is None:
            self.step = planner.step(self.state, self.flavour)
            if self.step is None:
                self.is_refused = True
                return
            own, rest = self.step.terms
            self.key = (len(self.step.given), *own)
            self._rest = [value for _, value in rest]
            return
        number = len(self._lost)
        if number == len(self.places.flavours):
            free = planner.free_gpus(self.step.after) if self.flavour.gpus else ()
            self.key += (len(free), *self._rest)
            self._lost.append(0)
            return
        flavour = self.places.flavours[number]
        before = bounds.clean(self.state, flavour)
        lost = max(0, before - bounds.clean(self.step.after, flavour)) if before else 0
        self._lost.append(lost)
        self.key += (lost,)

    def lost(self) -> tuple[LostFits, ...]:
        return tuple(
            LostFits(flavour.name, count)
            for flavour, count in zip(self.places.flavours, self._lost, strict=False)
            if count
        )
