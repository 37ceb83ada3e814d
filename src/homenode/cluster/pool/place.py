"""Place: on which host of a pool the next VM goes, and what that costs the pool."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.cluster.pool.answers import Answers
from homenode.cluster.pool.bounds import Bounds
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, PoolHost, VmIdentity
from homenode.cluster.pool.planner import FillStep, Planner
from homenode.cluster.pool.rules import NO_RULES, Availability, Rules
from homenode.cluster.pool.state import HostState
from homenode.errors import InputError
from homenode.machine.topology import Host, RunningDomain, with_certain_nodes
from homenode.plan.placement import Placement
from homenode.plan.planner import as_placed, plan
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.plan.stored import domain_of_placement
from homenode.vm.plan_model import Unplannable


class LostFits(Struct, frozen=True):
    """How many VMs of a flavour no longer fit with full locality."""

    flavour: str
    count: int


@dataclass(frozen=True, slots=True)
class RankedPlace:
    """A host that takes the VM. step: the placement on any host in this state, so that cores and
    GPUs of the same kind may be exchanged. lost: VMs that no longer fit in the pool, the largest
    flavour first. order: the least is the best, of all hosts and pools with the same flavours.
    unexamined: hosts that may be better by their bounds, which were not planned; then `lost` is the
    least that it can be. vm: which VM it is, where it is one."""

    host: PoolHost
    flavour: Flavour
    state: HostState
    step: FillStep
    lost: tuple[LostFits, ...]
    order: tuple[object, ...]
    unexamined: int
    vm: VmIdentity | None
    planner: Planner = field(repr=False, compare=False)
    known: dict[Flavour, Placement] = field(repr=False, compare=False)
    """What was chosen for others on this very host, as long as nothing changes there."""

    @property
    def real_host(self) -> Host:
        """The host as the VM finds it: an earlier record of the VM there no longer counts."""
        return _without_record(self.planner.real_host(self.host, self.flavour), self.vm)

    @property
    def placement(self) -> Placement:
        """The nodes and GPUs that the planner chooses on this host. Raises Unplannable."""
        if self.flavour not in self.known:
            host, request = self._asked()
            inventory = self.planner.inventory(self.host.shape)
            self.known[self.flavour] = place(host, request, inventory, brief=True)
        return self.known[self.flavour]

    def placed(self, placement: Placement) -> RunningDomain:
        """The VM where the placement has it."""
        host, request = self._asked()
        return domain_of_placement(host, as_placed(request, placement), placement)

    def _asked(self) -> tuple[Host, GuestRequest]:
        host = with_certain_nodes(self.real_host)
        return host, self.flavour.request(host, None if self.vm is None else self.vm.name)


def _without_record(host: Host, vm: VmIdentity | None) -> Host:
    if vm is None:
        return host
    left = tuple(known for known in host.domains if not (known.planned and vm.is_of(known)))
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
    "search": "no nodes for it were found before the search ended",
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
        counted = [one for one in flavours if one.gpus] or flavours
        self.flavours = tuple(sorted(counted, key=lambda one: (-one.gpus, one.name)))
        self._hosts = {host.name: host for host in pool.hosts}
        self.bounds = Bounds(self.planner, self.flavours)
        self._order = {host.name: number for number, host in enumerate(pool.hosts)}
        self._state: dict[str, HostState] = {}
        self._placements: dict[str, dict[Flavour, Placement]] = {}
        self._members: dict[HostState, dict[str, None]] = {}
        self._hosts_with: dict[str, list[str]] = {}
        self._closed: set[str] = set()
        self._in_group: dict[tuple[str, str], list[tuple[str, VmIdentity]]] = {}
        self._candidates: dict[Flavour, dict[HostState, _Candidate]] = {}
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

    def prepare(self) -> None:
        """Plan the flavours on each kind of host."""
        for state in self._members:
            self.bounds.workload_of(state)

    def host(self, name: str) -> PoolHost:
        return self._hosts[name]

    def members(self) -> Iterator[tuple[HostState, tuple[str, ...]]]:
        """Each state, with the hosts that are in it."""
        for state, names in list(self._members.items()):
            yield state, tuple(names)

    def position(self, host: str) -> int:
        """The host's place in the pool's order."""
        return self._order[host]

    def hosts_of(self, vm: VmIdentity) -> tuple[str, ...]:
        """Hosts that have the VM."""
        named = (*self._hosts_with.get(vm.name, ()), *self._hosts_with.get(vm.uuid or "", ()))
        return tuple(
            host for host in dict.fromkeys(named) if any(map(vm.is_of, self._hosts[host].domains))
        )

    def lost(self, before: HostState, after: HostState, flavour: Flavour) -> int:
        """How many VMs of a flavour no longer fit with full locality after a change."""
        fit = self.bounds.clean(before, flavour)
        return max(0, fit - self.bounds.clean(after, flavour)) if fit else 0

    def cost_of_change(self, before: HostState, after: HostState) -> tuple[int, int]:
        """What an arrival that another program places costs the pool, in the order of `ranked`: the
        policy's loss, then the free GPUs that remain."""
        lost = [self.lost(before, after, flavour) for flavour in self.flavours]
        gpus = self.planner.free_gpus(after) if before.owned != after.owned else ()
        return self.bounds.loss(before, after, lost), len(gpus)

    def pool(self) -> Pool:
        """The pool as it is now."""
        return replace(self.planner.pool, hosts=tuple(self._hosts.values()))

    def add(self, host: str, vm: RunningDomain, rules: Rules = NO_RULES) -> None:
        """A VM has arrived. What runs of it there counts too, until a capture shows it changed."""
        one, own = self._hosts[host], VmIdentity.of(vm)
        left = tuple(known for known in one.domains if known.running or not own.is_of(known))
        others = tuple(known for known in one.rules if known[0] != vm.name)
        group = () if rules.is_free else ((vm.name, rules),)
        self.put(replace(one, domains=(*left, vm), rules=(*others, *group)))

    def remove(self, vm: VmIdentity) -> tuple[str, ...]:
        """A VM has gone; from which hosts."""
        hosts = self.hosts_of(vm)
        for name in hosts:
            self.take_from(name, vm)
        return hosts

    def take_from(self, host: str, vm: VmIdentity) -> None:
        """A VM has gone from one host, and stays where else it is."""
        one = self._hosts[host]
        self.put(self.planner.host_without(one, {k.name for k in one.domains if vm.is_of(k)}))

    def put(self, host: PoolHost) -> None:
        """A host is in another state now."""
        self._leave(self._hosts[host.name])
        self._enter(host)

    def _enter(self, host: PoolHost) -> None:
        self._hosts[host.name] = host
        self._placements[host.name] = {}
        state = self.planner.state(host)
        self._state[host.name] = state
        self._members.setdefault(state, {})[host.name] = None
        for vm in host.domains:
            for key in filter(None, (vm.name, vm.uuid)):
                self._hosts_with.setdefault(key, []).append(host.name)
        for group, vm_there in _groups(host):
            self._in_group.setdefault(group, []).append((host.name, vm_there))
        if host.availability is not Availability.OPEN:
            self._closed.add(host.name)

    def _leave(self, host: PoolHost) -> None:
        state = self._state[host.name]
        del self._members[state][host.name]
        if not self._members[state]:
            del self._members[state]
        for vm in host.domains:
            for key in filter(None, (vm.name, vm.uuid)):
                self._hosts_with[key].remove(host.name)
                if not self._hosts_with[key]:
                    del self._hosts_with[key]
        for group, vm_there in _groups(host):
            self._in_group[group].remove((host.name, vm_there))
        self._closed.discard(host.name)

    def rules_of(self, host: str, vm: RunningDomain) -> Rules:
        """What a VM of the host has to do with others."""
        return dict(self._hosts[host].rules).get(vm.name, NO_RULES)

    def excluded(
        self, vm: VmIdentity | None, rules: Rules = NO_RULES, emptied: str | None = None
    ) -> dict[str, str]:
        """The hosts that may not take the VM, whatever they have free, each with why. emptied: a
        host that all VMs leave: they bind no VM of their affinity group."""
        found = {name: f"the host is {self._hosts[name].availability}" for name in self._closed}

        def hosts_in(kind: str, group: str | None) -> list[str]:
            there = [] if group is None else self._in_group.get((kind, group), [])
            return [host for host, one in there if one != vm]

        if rules.affinity is not None:
            together = {one for one in hosts_in("affinity", rules.affinity) if one != emptied}
            for name in self._hosts if together else ():
                if name not in together:
                    found.setdefault(name, f"its affinity group {rules.affinity!r} is elsewhere")
        for name in hosts_in("anti_affinity", rules.anti_affinity):
            found.setdefault(name, f"it has a VM of the group {rules.anti_affinity!r}")
        used = {
            self._hosts[one].failure_domain
            for one in hosts_in("fault_domains", rules.fault_domains)
        }
        for name, host in self._hosts.items() if used else ():
            if host.failure_domain in used:
                reason = f"its fault domain has a VM of the group {rules.fault_domains!r}"
                found.setdefault(name, reason)
        if vm is not None:
            for name in self._hosts_with.get(vm.name, ()):
                there = self._hosts[name].domains
                if any(one.name == vm.name and not vm.is_of(one) for one in there):
                    found.setdefault(name, "another VM of this name is there")
        return found

    def ranked(
        self,
        flavour: Flavour | Mapping[int, Flavour],
        *,
        vm: VmIdentity | None = None,
        among: Collection[str] | None = None,
        rules: Rules = NO_RULES,
        emptied: str | None = None,
        most_asked: int | None = None,
    ) -> Iterator[RankedPlace]:
        """The hosts that take the VM, the best first; each is worked out when it is asked for.

        flavour: the VM, or the VM by the number of the shape. vm: which it is, where it may run in
        the pool already: there it frees its own. among: names of hosts that may be chosen. rules,
        emptied: as for `excluded`. most_asked: plans, after which the bounds decide as soon as one
        host holds the VM; None = no limit.

        Order: what gives way, then the policy's order of concerns (docs/decisions/0010) up to the
        GPU sets that the host loses; before these, the policy's loss (policy.py); then, of a VM
        with GPUs, those left free on the host, fewest first; then the rest, and at last the VM's
        own host and the order of the hosts.
        """
        queue: list[tuple[tuple[object, ...], int, list[str], _Candidate]] = []
        own = () if vm is None else self.hosts_of(vm)
        excluded = self.excluded(vm, rules, emptied)
        for state, names in self._groups(vm, own, among, excluded):
            own_flavour = flavour if isinstance(flavour, Flavour) else flavour.get(state.shape)
            if own_flavour is None:
                continue
            candidate = self._candidate(state, own_flavour)
            if not candidate.is_refused:
                first = -1 if names[0] in own else min(map(self._order.__getitem__, names))
                queue.append((candidate.key, first, names, candidate))
        heapq.heapify(queue)
        limit = None if most_asked is None else self.planner.asked + most_asked
        unexamined, is_placed = 0, False
        while queue:
            key, first, names, candidate = heapq.heappop(queue)
            step = candidate.step
            if key == candidate.key and (step is None or not candidate.is_complete):
                is_over = limit is not None and self.planner.asked >= limit
                if is_over and step is None and is_placed:
                    unexamined += len(names)
                    continue
                was_bounded = candidate.is_bounded
                candidate.go_on(by_bounds=is_over)
                if candidate.is_bounded and not was_bounded and not candidate.is_refused:
                    unexamined += len(names)
                is_placed = is_placed or candidate.step is not None
                step = None
            if candidate.is_refused:
                continue
            if step is None or key != candidate.key:  # the VM's own host may share the candidate
                heapq.heappush(queue, (candidate.key, first, names, candidate))
                continue
            for name in sorted(names, key=self._order.__getitem__):
                yield RankedPlace(
                    host=self._hosts[name],
                    flavour=candidate.flavour,
                    state=candidate.state,
                    step=step,
                    lost=candidate.lost(),
                    order=candidate.key,
                    unexamined=unexamined,
                    vm=vm,
                    planner=self.planner,
                    known={} if name in own else self._placements[name],
                )

    def _groups(
        self,
        vm: VmIdentity | None,
        own: Collection[str],
        among: Collection[str] | None,
        excluded: Collection[str],
    ) -> Iterator[tuple[HostState, list[str]]]:
        """Hosts that may be chosen, by state. own: where the VM runs, its share is free."""
        for name in own:
            if name not in excluded and (among is None or name in among):
                yield self.planner.state(self._hosts[name], without=vm), [name]
        not_here = {*own, *excluded}
        if among is None:
            for state, members in self._members.items():
                if names := [name for name in members if name not in not_here]:
                    yield state, names
            return
        groups: dict[HostState, list[str]] = {}
        for name in among:
            if name in self._state and name not in not_here:
                groups.setdefault(self._state[name], []).append(name)
        yield from groups.items()

    def _candidate(self, state: HostState, flavour: Flavour) -> "_Candidate":
        """The state as a place for the flavour."""
        known = self._candidates.setdefault(flavour, {})
        if state not in known or known[state].is_bounded:
            known[state] = _Candidate(self, flavour, state)
        return known[state]

    def refusals(
        self,
        flavour: Flavour | Mapping[int, Flavour],
        *,
        vm: VmIdentity | None = None,
        among: Collection[str] | None = None,
        rules: Rules = NO_RULES,
        most: int = MOST_EXPLAINED,
    ) -> tuple[RefusedHosts, ...]:
        """Why hosts refuse the VM, by reason, that of most hosts first. vm: which it is, where it
        is one. most: the planner explains the refusal of at most so many kinds of host; those
        without enough GPUs do not count."""
        found: dict[str, list[tuple[int, HostState, str, list[str]]]] = {}
        asked = 0
        excluded = self.excluded(vm, rules)
        for name, reason in excluded.items():
            if among is None or name in among:
                found.setdefault(reason, []).append((0, self._state[name], "", [name]))
        for state, members in self._groups(vm, (), among, excluded):
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
                    reason, detail = self._reason(self._hosts[members[0]], own, vm)
                else:
                    reason = _NOT_EXPLAINED
            found.setdefault(reason, []).append((free, state, detail, members))
        refused = (self._refused(reason, groups) for reason, groups in found.items())
        return tuple(
            sorted(refused, key=lambda one: (one.reason == _NOT_EXPLAINED, -len(one.hosts)))
        )

    def _refused(
        self, reason: str, groups: Sequence[tuple[int, HostState, str, list[str]]]
    ) -> RefusedHosts:
        """The hosts of these states; nearest is one with the most free GPUs, memory, then cores."""

        def space(group: tuple[int, HostState, str, list[str]]) -> tuple[int, int, int]:
            free_gpus, state, _, _ = group
            memory = sum(free or 0 for _, free, _ in state.memory)
            return free_gpus, memory, -sum(busy + service for busy, service in state.cores)

        _, _, detail, names = max(groups, key=space)
        hosts = [name for _, _, _, members in groups for name in members]
        return RefusedHosts(
            reason=reason,
            hosts=tuple(sorted(hosts, key=self.position)),
            nearest=names[0],
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

    def _reason(self, one: PoolHost, flavour: Flavour, vm: VmIdentity | None) -> tuple[str, str]:
        """Why the planner refuses the VM on this host, and what it found."""
        host = _without_record(self.planner.real_host(one, flavour), vm)
        try:
            plan(host, flavour.request(host, None if vm is None else vm.name))
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


def _groups(host: PoolHost) -> Iterator[tuple[tuple[str, str], VmIdentity]]:
    """The groups of the VMs that the host has, each with its VM."""
    of_name = {vm.name: VmIdentity.of(vm) for vm in host.domains if host.rules}
    for name, rules in host.rules:
        for kind in ("affinity", "anti_affinity", "fault_domains"):
            group = getattr(rules, kind)
            if group is not None and name in of_name:
                yield (kind, group), of_name[name]


class _Candidate:
    """Hosts in one state, as a place for a VM. The key is first a lower bound. Then the planner is
    asked, and the loss is worked out by flavour as the comparison needs it."""

    def __init__(self, places: PoolPlaces, flavour: Flavour, state: HostState) -> None:
        self.places, self.flavour, self.state = places, flavour, state
        self.step: FillStep | None = None
        self.is_refused = self.is_complete = self.is_bounded = False
        self._lost: list[int] = []
        self._bounds = places.bounds.keys(state, flavour)
        self.key = next(self._bounds)

    def go_on(self, *, by_bounds: bool = False) -> None:
        """The next bound; else ask the planner; then what one flavour more loses, and at the end
        the rest. by_bounds: without more plans than that of the VM."""
        places, step = self.places, self.step
        if by_bounds:
            self._bounds, self.is_bounded = iter(()), True
        if (bound := next(self._bounds, None)) is not None:
            self.key = bound
            return
        if step is None:
            self.step = step = places.planner.step(self.state, self.flavour)
            if step is None:
                self.is_refused = True
                return
        else:
            flavour = places.flavours[len(self._lost)]
            lost = places.bounds.least_lost if by_bounds else places.lost
            self._lost.append(lost(self.state, step.after, flavour))
        own, rest = step.terms
        left = len(places.flavours) - len(self._lost)
        loss = places.bounds.loss(self.state, step.after, [*self._lost, *[0] * left])
        self.key = (*own, loss)
        if not left:
            free = places.planner.free_gpus(step.after) if self.flavour.gpus else ()
            self.key += (len(free), *(value for _, value in rest))
            self.is_complete = True

    def lost(self) -> tuple[LostFits, ...]:
        return tuple(
            LostFits(flavour.name, count)
            for flavour, count in zip(self.places.flavours, self._lost, strict=True)
            if count
        )


def placed_vm(places: PoolPlaces, host: str, flavour: Flavour, vm: str) -> RunningDomain:
    """A VM of the flavour as the planner places it on a host. Raises Unplannable."""
    one = places.host(host)
    real = with_certain_nodes(places.planner.real_host(one, flavour))
    request = flavour.request(real, vm)
    placement = place(real, request, places.planner.inventory(one.shape), brief=True)
    return domain_of_placement(real, as_placed(request, placement), placement)
