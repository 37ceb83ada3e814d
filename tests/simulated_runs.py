"""Runs made up around known figures: boots that differ, samples within them, a fixed seed."""

import math
import random
from collections.abc import Mapping

from homenode.bdf import Bdf
from homenode.measure.results.model import Condition, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

BOOTS = 3
SAMPLES = 10


def simulated_run(
    layout: str,
    figures: Mapping[str, tuple[str, float]],
    rng: random.Random,
    *,
    boots: int = BOOTS,
    samples: int = SAMPLES,
    between: float = 0.01,
    within: float = 0.01,
    system: str = "H200",
    host: str | None = "host-1",
    vcpus: int | None = None,
    device: Bdf | None = None,
    conditions: tuple[Condition, ...] = (Condition("governor", "performance"),),
) -> Run:
    """A run of a layout. figures: {metric: (unit, true value)}. between, within: relative."""
    made = []
    for metric, (unit, value) in figures.items():
        for boot in range(boots):
            level = math.log(value) + rng.gauss(0, between)
            made += [
                Sample(
                    metric,
                    unit,
                    math.exp(level + rng.gauss(0, within)),
                    boot=boot,
                    number=number,
                    device=device,
                )
                for number in range(samples)
            ]
    head = RunHead(
        layout,
        system,
        Origin.MEASURED,
        Vantage.GUEST,
        Switches.from_layout(PRESETS[layout]),
        host_kind=f"kind of {system}",
        host=host,
        conditions=conditions,
        vcpus=vcpus,
        host_addresses=device is not None,
    )
    return Run(head, tuple(made))
