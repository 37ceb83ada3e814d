"""Groups hold over time: random VMs with rules are placed, packed, removed, captured, drained and
moved together, and a judge that knows only where each VM is looks at every group."""

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.division import PackRequest
from homenode.cluster.pool.model import Pool, VmIdentity
from homenode.cluster.pool.moves import MovePlan, defragment, drain, flavour_of_vm
from homenode.cluster.pool.pack import pack
from homenode.cluster.pool.place import PoolPlaces, placed_vm
from homenode.cluster.pool.reservations import Reservation, with_reservations
from homenode.cluster.pool.rules import Rules
from homenode.machine.topology import RunningDomain
from homenode.plan.stored import domain_of_plan
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, sized
from tests.seeds import seeds

pytest.importorskip("ortools")

SIZES = tuple(
    sized(name=f"gpu{gpus}", gpus=gpus, vcpus=vcpus, memory_bytes=2 * GIB)
    for gpus, vcpus in ((2, 2), (1, 2), (0, 1))
)
STEPS = 24


class Fleet:
    """VMs by name, each with its host, what it has there, and its rules."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        pool = pool_of([(f"h{number}", shipped("small-2n8c-2gpu")) for number in range(6)])
        hosts = (replace(one, fault_domain=f"r{n % 4}") for n, one in enumerate(pool.hosts))
        self.captured = replace(pool, hosts=tuple(hosts))
        self.domains = {one.name: one.failure_domain for one in self.captured.hosts}
        self.vms: dict[str, tuple[str, RunningDomain, Rules]] = {}
        self.number = 0

    def pool(self) -> Pool:
        reserved = [
            Reservation(host=host, vm=vm, rules=rules) for host, vm, rules in self.vms.values()
        ]
        return with_reservations(self.captured, reserved, {}, 0.0).pool

    def name(self) -> tuple[str, str]:
        self.number += 1
        return f"vm{self.number}", f"00000000-0000-4000-a000-{self.number:012d}"

    def rules(self) -> Rules:
        group = self.draw.choice("xyz")
        kind = self.draw.choice(("affinity", "anti_affinity", "fault_domains", None))
        return Rules() if kind is None else Rules(**{kind: group})

    def place(self) -> None:
        (name, uuid), rules = self.name(), self.rules()
        places = PoolPlaces(self.pool(), SIZES)
        flavour, own = self.draw.choice(SIZES), VmIdentity(name, uuid)
        best = next(places.ranked(flavour, vm=own, rules=rules), None)
        if best is not None:
            vm = replace(placed_vm(places, best.host.name, flavour, name), uuid=uuid)
            self.vms[name] = best.host.name, vm, rules

    def pack(self) -> None:
        named = [self.name() for _ in range(4)]
        requests = [
            PackRequest(flavour=self.draw.choice(SIZES), names=(one,), rules=self.rules())
            for one, _ in named
        ]
        for vm in pack(self.pool(), requests, seconds=1).vms:
            own = replace(domain_of_plan(vm.plan), uuid=dict(named)[vm.name])
            self.vms[vm.name] = vm.host, own, vm.rules

    def remove(self) -> None:
        if self.vms:
            del self.vms[self.draw.choice(sorted(self.vms))]
            self.capture()

    def capture(self) -> None:
        """All VMs run where they are."""
        running: dict[str, list[RunningDomain]] = {}
        for name, (host, vm, rules) in self.vms.items():
            now = replace(vm, running=True, planned=False)
            self.vms[name] = host, now, rules
            running.setdefault(host, []).append(now)
        hosts = (
            replace(one, domains=tuple(running.get(one.name, ()))) for one in self.captured.hosts
        )
        self.captured = replace(self.captured, hosts=tuple(hosts))

    def drain(self) -> None:
        self.capture()
        pool = self.pool()
        host = self.draw.choice(pool.hosts).name
        self._move(pool, drain(pool, host, SIZES))

    def defragment(self) -> None:
        self.capture()
        pool = self.pool()
        self._move(pool, defragment(pool, SIZES[0], SIZES, most=2))

    def _move(self, pool: Pool, plan: MovePlan) -> None:
        places = PoolPlaces(pool, SIZES)
        for move in plan.moves:
            _, vm, rules = self.vms[move.vm]
            flavour = flavour_of_vm(places, vm, move.from_host)
            assert flavour is not None
            there = replace(placed_vm(places, move.to_host, flavour, vm.name), uuid=vm.uuid)
            places.take_from(move.from_host, VmIdentity.of(vm))
            places.add(move.to_host, there, rules)
            self.vms[move.vm] = move.to_host, there, rules
        self.capture()

    def broken(self) -> Iterator[str]:
        every = [(name, host, rules) for name, (host, _, rules) in self.vms.items()]
        for (one, host, rules), (other, there, its) in combinations(every, 2):
            is_one_domain = self.domains[host] == self.domains[there]
            apart = {
                "affinity": host != there,
                "anti_affinity": host == there,
                "fault_domains": is_one_domain,
            }
            for kind, is_broken in apart.items():
                group = getattr(rules, kind)
                if is_broken and group is not None and group == getattr(its, kind):
                    yield f"{kind} {group}: {one} on {host}, {other} on {there}"


@pytest.mark.parametrize("seed", seeds(40, 20))
def test_groups_hold_whatever_happens(seed: int) -> None:
    fleet = Fleet(seed)
    steps = (fleet.place, fleet.place, fleet.place, fleet.pack, fleet.remove)
    for _ in range(STEPS):
        step = fleet.draw.choice((*steps, fleet.capture, fleet.drain, fleet.defragment))
        step()
        assert not list(fleet.broken()), step.__name__
