"""Guests at random: what costs bandwidth in them, the experiment's runs, and what may be said."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from homenode.decide.alternative import alternatives_of
from homenode.decide.collective_causes import Cause, Diagnosis, diagnose
from homenode.measure.gpu.collectives import ONE_BY_ONE
from homenode.measure.model import CollectiveSettings
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci", "bare")
ROUNDS, GPUS = 3, 8
SLOW_BOOT = 0.6
_COSTS = ("placement", "cells", "channels", "binding", "vm")
LEAST = 0.9
"""What is left where a cost counts: less is a loss of 10 %, which matters."""


@dataclass(frozen=True)
class RandomGuests:
    """A machine. left: what each cost leaves of the bandwidth. boot_noise, round_noise: relative.
    two_states: some boots are slow by themselves. logs: "true", "none", or "bound everywhere"."""

    seed: int
    left: Mapping[str, float]
    boots: int
    boot_noise: float
    two_states: bool
    round_noise: float
    logs: str

    def costs(self) -> frozenset[str]:
        return frozenset(name for name, left in self.left.items() if left < LEAST)

    def has(self, layout: str, settings: CollectiveSettings) -> frozenset[str]:
        """Costs that a run has."""
        found = {"vm"} if layout != "bare" else set()
        cells = layout in ("pin-numa", "pin-numa-pci")
        knows = self.knows(layout, settings)
        found |= {"cells"} if cells else set()
        found |= {"placement"} if cells and not knows else set()
        found |= {"channels"} if knows and layout != "bare" else set()
        found |= {"binding"} if settings.first_node and (cells or layout == "bare") else set()
        return frozenset(found)

    @staticmethod
    def knows(layout: str, settings: CollectiveSettings) -> bool:
        return settings.file or layout in ("pin-numa-pci", "bare")

    def runs(self, layout: str) -> Iterator[Run]:
        rng = random.Random(f"{self.seed} {layout}")
        is_bare = layout == "bare"
        switches = UNKNOWN_SWITCHES if is_bare else Switches.of(PRESETS[layout])
        vantage = Vantage.HOST if is_bare else Vantage.GUEST
        for number in range(self.boots):
            name = f"{layout}-{number}"
            head = RunHead(
                name,
                "gpu",
                Origin.MEASURED,
                vantage,
                switches,
                host_kind="kind",
                host="host",
                boots=(name,),
                experiment="trial",
                block=number,
            )
            boot = math.exp(rng.gauss(0, self.boot_noise))
            boot *= SLOW_BOOT if self.two_states and rng.random() < 0.3 else 1.0
            yield Run(head, tuple(self._samples(layout, boot, rng)))

    def _samples(self, layout: str, boot: float, rng: random.Random) -> Iterator[Sample]:
        for settings in ONE_BY_ONE:
            if settings.first_node and layout in ("default", "pin"):
                continue  # flat guests have one node
            level = 20e9 * boot * math.prod(self.left[one] for one in self.has(layout, settings))
            for number in range(ROUNDS):
                value = level * math.exp(rng.gauss(0, self.round_noise))
                yield Sample(
                    "allreduce-busbw-peak",
                    "bytes_per_s",
                    value,
                    number=number,
                    variant=settings.name,
                )
            if self.logs == "none":
                continue
            knows = self.knows(layout, settings)
            fewer = knows and layout != "bare" and "channels" in self.costs()
            channels, bound = 1.0 if fewer else 2.0, knows or self.logs == "bound everywhere"
            for metric, value in (("channels", channels), ("bound-gpus", GPUS * bound)):
                if value:
                    yield Sample(f"collective-{metric}", "count", value, variant=settings.name)


def guests_of(seed: int) -> RandomGuests:
    """Mostly one cost or none; boots that hardly differ, and ones of two states."""
    rng = random.Random(seed)
    count = rng.choice((0, 1, 1, 1, 1, 2, 2, 3))
    active = rng.sample(_COSTS, count)
    left = {one: rng.uniform(0.3, 0.8) if one in active else rng.uniform(0.98, 1) for one in _COSTS}
    return RandomGuests(
        seed,
        left,
        boots=rng.choice((1, 1, 3, 5)),
        boot_noise=rng.choice((0.005, 0.02, 0.05)),
        two_states=rng.random() < 0.25,
        round_noise=rng.choice((0.002, 0.01, 0.04)),
        logs=rng.choice(("true", "true", "true", "true", "none", "bound everywhere")),
    )


def diagnosis_of(guests: RandomGuests) -> Diagnosis:
    runs = {layout: list(guests.runs(layout)) for layout in LAYOUTS}
    bare = alternatives_of([("bare", runs.pop("bare"))])
    found = diagnose(
        alternatives_of([("trial", [run for those in runs.values() for run in those])]), bare
    )
    assert found is not None
    return found


def untrue(guests: RandomGuests, found: Diagnosis) -> list[Cause]:
    """Causes that were named, and are none of these guests'."""
    costs = guests.costs()
    loss = bool(costs & {"placement", "cells"})
    is_true = {
        Cause.NO_LOSS: not loss,
        Cause.PLACEMENT: "placement" in costs,
        Cause.PLACEMENT_IN_PART: "placement" in costs and bool(costs & {"cells", "channels"}),
        Cause.SCRIPT_BINDING: "binding" in costs,
        Cause.CHANNELS: "channels" in costs,
        Cause.GUEST_CELLS: "cells" in costs and "placement" not in costs,
        Cause.VIRTUAL_MACHINE: "vm" in costs,
        Cause.CANNOT_TELL: True,
    }
    return [cause for cause in (found.cause, *(one for one, _ in found.also)) if not is_true[cause]]


def tally(seeds: range) -> tuple[Counter[tuple[str, str]], list[int]]:
    """(kind of trial, named, in part, cannot tell or wrong) -> machines; seeds of the wrong."""
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for seed in seeds:
        guests = guests_of(seed)
        found = diagnosis_of(guests)
        if untrue(guests, found):
            how = "wrong"
            wrong.append(seed)
        else:
            named = {found.cause, *(cause for cause, _ in found.also)} - {Cause.CANNOT_TELL}
            how = "named" if named else "cannot tell"
        counts["one boot" if guests.boots == 1 else f"{guests.boots} boots", how] += 1
    return counts, wrong
