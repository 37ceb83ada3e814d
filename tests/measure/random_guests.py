"""Guests at random: what costs bandwidth in them, the experiment's runs, and what may be said.

A machine has some mechanisms: those that homenode knows, and others, STRANGE, that it does not. The
cells in which each acts are written here on their own, from what NCCL and Linux do.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from homenode.decide.alternative import alternatives_of
from homenode.decide.collective_causes import Diagnosis, diagnose
from homenode.decide.collective_mechanisms import Cause
from homenode.measure.gpu.collectives import ONE_BY_ONE
from homenode.measure.model import CollectiveSettings
from homenode.measure.results.model import (
    UNKNOWN_SWITCHES,
    Condition,
    Origin,
    Run,
    RunHead,
    Sample,
    Switches,
)
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci", "bare")
ROUNDS, GPUS = 3, 8
SLOW_BOOT = 0.6
LEAST = 0.9
"""What is left where a cost counts: less is a loss of 10 %, which matters."""


@dataclass(frozen=True)
class Place:
    """A layout under some settings, as a mechanism sees it."""

    layout: str
    settings: CollectiveSettings

    @property
    def guest(self) -> bool:
        return self.layout != "bare"

    @property
    def cells(self) -> bool:
        return self.layout in ("pin-numa", "pin-numa-pci")

    @property
    def knows(self) -> bool:
        return self.settings.file or self.layout in ("pin-numa-pci", "bare")


_Acts = Callable[[Place], bool]

KNOWN: Mapping[Cause, _Acts] = {
    Cause.PLACEMENT: lambda at: at.cells and not at.knows,
    Cause.UNKNOWN_NODES: lambda at: at.guest and not at.knows,
    Cause.TOPOLOGY: lambda at: at.guest and not at.settings.file,
    Cause.PORT_SPEED: lambda at: at.layout == "pin-numa-pci" and not at.settings.file,
    Cause.CHANNELS: lambda at: at.guest and at.knows,
    Cause.SCRIPT_BINDING: lambda at: at.settings.first_node,
    Cause.GUEST_CELLS: lambda at: at.cells,
    Cause.FLOATING: lambda at: at.layout == "default",
    Cause.VIRTUAL_MACHINE: lambda at: at.guest,
    Cause.GUEST_BALANCING: lambda at: at.cells and not at.knows and not at.settings.first_node,
    Cause.INTERRUPTS: lambda at: at.cells and not at.knows,
    Cause.RECLAIM: lambda at: at.cells,
    Cause.PEERS: lambda at: not at.settings.peers,
}
STRANGE: Mapping[str, _Acts] = {
    "several processes": lambda at: at.settings.several,
    "guests without P2P": lambda at: at.guest and not at.settings.peers,
    "the file, in flat guests": lambda at: at.settings.file and not at.cells and at.guest,
    "one layout": lambda at: at.layout == "pin-numa",
    "another layout": lambda at: at.layout == "pin-numa-pci",
    "flat guests": lambda at: at.layout in ("default", "pin"),
    "one cell": lambda at: at == Place("pin-numa", CollectiveSettings()),
    "a file without places": lambda at: at.settings.file and at.layout == "pin-numa",
    "the host": lambda at: not at.guest,
    "pins without cells": lambda at: at.layout == "pin",
    "all but one process": lambda at: not at.settings.several and at.guest,
    "the file with places": lambda at: at.settings.file and at.layout == "pin-numa-pci",
    "unpinned without the file": lambda at: at.layout == "default" and not at.settings.file,
    "pinned without the file": lambda at: at.layout in ("pin", "pin-numa") and not at.settings.file,
    "peers, where places are known": lambda at: at.settings.peers and at.knows,
    "one of two processes": lambda at: at.cells and at.settings.several,
    "cells and the first node": lambda at: at.cells and at.settings.first_node,
}


@dataclass(frozen=True)
class RandomGuests:
    """A machine. left: what each cost leaves of the bandwidth. boot_noise, round_noise: relative.
    two_states: some boots are slow by themselves. logs: "true", "none", or "bound everywhere".
    recorded: whether balancing, interrupts and reclaim were recorded. worst_counts: costs do not
    add up, as a narrow place hides the next."""

    seed: int
    left: Mapping[str, float]
    boots: int
    boot_noise: float
    two_states: bool
    round_noise: float
    logs: str
    recorded: bool = True
    worst_counts: bool = False
    layouts: tuple[str, ...] = LAYOUTS

    def costs(self) -> frozenset[str]:
        return frozenset(name for name, left in self.left.items() if left < LEAST)

    def share(self, at: Place) -> float:
        parts = [left for name, left in self.left.items() if _acts(name)(at)]
        return min(parts, default=1.0) if self.worst_counts else math.prod(parts)

    def runs(self, layout: str) -> Iterator[Run]:
        rng = random.Random(f"{self.seed} {layout}")
        is_bare = layout == "bare"
        switches = UNKNOWN_SWITCHES if is_bare else Switches.of(PRESETS[layout])
        for number in range(self.boots):
            name = f"{layout}-{number}"
            head = RunHead(
                name,
                "gpu",
                Origin.MEASURED,
                Vantage.HOST if is_bare else Vantage.GUEST,
                switches,
                host_kind="kind",
                host="host",
                boots=(name,),
                conditions=tuple(self._conditions(layout)),
                experiment="trial",
                block=number,
            )
            boot = math.exp(rng.gauss(0, self.boot_noise))
            boot *= SLOW_BOOT if self.two_states and rng.random() < 0.3 else 1.0
            yield Run(head, tuple(self._samples(layout, boot, rng)))

    def _conditions(self, layout: str) -> Iterator[Condition]:
        if not self.recorded:
            return
        costs, cells = self.costs(), layout in ("pin-numa", "pin-numa-pci")
        yield Condition("numa balancing", str(int(Cause.GUEST_BALANCING in costs and cells)))
        yield Condition("numa balancing on the host", "0")
        pages = "4096" if Cause.RECLAIM in costs and cells else "0"
        for settings in ONE_BY_ONE:
            yield Condition(f"nccl pages reclaimed, {settings.name}", pages)
            yield Condition(f"nccl pages reclaimed on the host, {settings.name}", "0")

    def _samples(self, layout: str, boot: float, rng: random.Random) -> Iterator[Sample]:
        costs = self.costs()
        for settings in ONE_BY_ONE:
            at = Place(layout, settings)
            if settings.first_node and layout in ("default", "pin"):
                continue  # flat guests have one node
            level = 20e9 * boot * self.share(at)
            for number in range(ROUNDS):
                value = level * math.exp(rng.gauss(0, self.round_noise))
                yield Sample(
                    "allreduce-busbw-peak",
                    "bytes_per_s",
                    value,
                    number=number,
                    variant=settings.name,
                )
            if self.recorded:
                nodes = 1.0 if Cause.INTERRUPTS in costs or layout in ("default", "pin") else 2.0
                yield _count("interrupt-nodes", nodes, settings)
            if self.logs == "none":
                continue
            fewer = at.knows and at.guest and Cause.CHANNELS in costs
            yield _count("channels", 1.0 if fewer else 2.0, settings)
            if at.knows or self.logs == "bound everywhere":
                yield _count("bound-gpus", GPUS, settings)


def _acts(name: str) -> _Acts:
    return KNOWN[Cause(name)] if name in KNOWN else STRANGE[name]


def _count(metric: str, value: float, settings: CollectiveSettings) -> Sample:
    return Sample(f"collective-{metric}", "count", value, variant=settings.name)


def guests_of(
    seed: int,
    mechanisms: Sequence[str] = (*KNOWN, *STRANGE),
    counts: Sequence[int] = (0, 1, 1, 1, 1, 2, 2, 3),
    boots: Sequence[int] = (1, 1, 3, 5),
) -> RandomGuests:
    """Mostly one cost or none; boots that hardly differ, and ones of two states."""
    rng = random.Random(seed)
    active = rng.sample(list(mechanisms), rng.choice(counts))
    left: dict[str, float] = {one: rng.uniform(0.98, 1) for one in KNOWN}
    left |= {one: rng.uniform(0.3, 0.8) for one in active}
    return RandomGuests(
        seed,
        left,
        boots=rng.choice(boots),
        boot_noise=rng.choice((0.005, 0.02, 0.05)),
        two_states=rng.random() < 0.25,
        round_noise=rng.choice((0.002, 0.01, 0.04)),
        logs=rng.choice(("true", "true", "true", "true", "none", "bound everywhere")),
        recorded=rng.random() < 0.7,
        worst_counts=rng.random() < 0.3,
    )


def diagnosis_of(guests: RandomGuests) -> Diagnosis:
    runs = {layout: list(guests.runs(layout)) for layout in guests.layouts}
    bare = alternatives_of([("bare", runs.pop("bare"))]) if "bare" in runs else ()
    found = diagnose(
        alternatives_of([("trial", [run for those in runs.values() for run in those])]), bare
    )
    assert found is not None
    return found


def named(found: Diagnosis) -> set[Cause]:
    return {found.cause, *(cause for cause, _ in found.also)} - {Cause.CANNOT_TELL}


def untrue(guests: RandomGuests, found: Diagnosis) -> set[Cause]:
    """Causes that were named, and are none of these guests'."""
    study = CollectiveSettings()
    flat, cells = (guests.share(Place(layout, study)) for layout in ("pin", "pin-numa"))
    true = guests.costs() | ({Cause.NO_LOSS} if LEAST < cells / flat < 1 / LEAST else set())
    return {one for one in named(found) if one not in true}


def tally(seeds: range) -> tuple[Counter[tuple[str, str]], list[int]]:
    """(boots, "named", "cannot tell" or "wrong") -> machines; seeds of the wrong."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for seed in seeds:
        guests = guests_of(seed)
        found = diagnosis_of(guests)
        how = "named" if named(found) else "cannot tell"
        if untrue(guests, found):
            how = "wrong"
            wrong.append(seed)
        counts["one boot" if guests.boots == 1 else f"{guests.boots} boots", how] += 1
    return counts, wrong
