"""Schedule: which layout is booted when: every layout once a round, in a seeded order."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.errors import UsageError
from homenode.measure.schedule import seeded_order

BARE = "bare"
"""In the place of a layout: the host itself, on the plan's PUs and nodes, no guest."""

MAX_BOOTS = 100


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One boot. number: its place, from 0. round: from 0; each layout is in each round once."""

    number: int
    round: int
    layout: str

    @property
    def is_bare(self) -> bool:
        return self.layout == BARE


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds that a boot and a measurement are expected to take."""

    boot_s: float
    measure_s: float


def trial_schedule(layouts: Sequence[str], boots: int, seed: int) -> tuple[TrialStep, ...]:
    """Every layout (and BARE, where it is among them) once a round, each round in its own order.

    What drifts over hours then meets every layout alike. The same arguments give the same steps.

    >>> [s.layout for s in trial_schedule(["pin", "default"], 2, seed=1)].count("pin")
    2

    Raises UsageError for a layout twice, none, or boots out of range.
    """
    if not layouts or len(set(layouts)) != len(layouts):
        found = ", ".join(layouts) or "none"
        raise UsageError(f"--layouts: expected one or more, each once, found {found}")
    if not 1 <= boots <= MAX_BOOTS:
        raise UsageError(f"--boots {boots}: expected 1 to {MAX_BOOTS}")
    order = [
        (number, layout)
        for number in range(boots)
        for layout in seeded_order(layouts, seed, number)
    ]
    return tuple(TrialStep(at, number, layout) for at, (number, layout) in enumerate(order))


def expected_seconds(steps: Sequence[TrialStep], durations: Durations) -> float:
    """How long steps take; the host itself is not booted.

    >>> expected_seconds(trial_schedule(["pin", BARE], 1, 1), Durations(60, 10))
    80.0
    """
    boots = sum(not step.is_bare for step in steps)
    return float(boots * durations.boot_s + len(steps) * durations.measure_s)
