"""Boots that fall into states, and the order in which layouts were measured: no false certainty."""

import math
import random
from collections.abc import Iterable, Sequence

import pytest
from msgspec.structs import replace

from homenode.decide.alternative import alternatives
from homenode.decide.compare import compare
from homenode.decide.comparison import FEW_BOOTS, ORDER, STATES, Effect, EvidenceLevel, Outcome
from homenode.decide.machine_facts import facts_of_runs
from homenode.decide.recommendation import decide
from homenode.measure.results.model import Condition, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.vm.layout import PRESETS

LOW, HIGH = 47e9, 79e9
LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci")


def boots_of(
    layout: str,
    levels: Sequence[float],
    rng: random.Random,
    *,
    states: Sequence[str] | None = None,
    starts: Sequence[float] | None = None,
    rounds: bool = False,
    noise: float = 0.01,
    within: float = 0.01,
) -> list[Run]:
    """A run for each boot, ten samples each. starts: when each was taken."""
    made = []
    for number, level in enumerate(levels):
        head = RunHead(
            f"{layout}-{number}",
            "H200",
            Origin.MEASURED,
            Vantage.GUEST,
            Switches.of_layout(PRESETS[layout]),
            host="host-1",
            conditions=(Condition("governor", "performance"),),
            started_s=None if starts is None else starts[number],
            experiment="trial-1" if rounds else None,
            block=number if rounds else None,
        )
        centre = math.log(level) + rng.gauss(0, noise)
        samples = tuple(
            Sample(
                "memory-bandwidth",
                "bytes_per_s",
                math.exp(centre + rng.gauss(0, within)),
                number=n,
                state=None if states is None else states[number],
            )
            for n in range(10)
        )
        made.append(Run(head, samples))
    return made


def effects(runs: Iterable[Run]) -> tuple[Effect, ...]:
    return compare(alternatives(runs)).effects


def is_stated(effect: Effect) -> bool:
    return effect.outcome in (Outcome.BETTER, Outcome.WORSE)


def test_boots_that_contradict_each_other_stay_the_unit_though_samples_name_their_states() -> None:
    rng = random.Random(1)
    runs = [
        *boots_of("pin", (HIGH, HIGH, LOW), rng, states=("27 ns", "27 ns", "110 ns")),
        *boots_of("pin-numa", (LOW, LOW, HIGH), rng, states=("110 ns", "110 ns", "27 ns")),
    ]
    (effect,) = effects(runs)
    assert (effect.state, effect.boots) == (None, (3, 3))
    assert effect.outcome is Outcome.CANNOT_TELL
    made = decide((tuple(runs)), facts_of_runs("H200", runs), Objective.MEMORY_BANDWIDTH)
    assert made.level is EvidenceLevel.RULE


def test_a_state_that_every_boot_of_a_layout_has_is_its_usual_one() -> None:
    rng = random.Random(2)
    runs = [
        *boots_of("pin", (HIGH,) * 3, rng, states=("27 ns",) * 3),
        *boots_of("pin-numa", (2 * HIGH,) * 3, rng, states=("110 ns",) * 3),
    ]
    (effect,) = effects(runs)
    assert (effect.state, effect.outcome) == ("usual", Outcome.BETTER)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("boots", "share"), [(1, 0.5), (2, 0.5), (3, 0.5), (3, 0.3), (4, 0.5), (5, 0.5)]
)
@pytest.mark.parametrize("labelled", [False, True])
def test_boots_in_two_states_never_give_a_confident_wrong_answer(
    count: int, boots: int, share: float, labelled: bool
) -> None:
    """Fewer than five boots of each give no answer at all; five part the states in 0.2 %."""
    rng = random.Random(20261122)
    repeats = 100
    wrong = 0
    for _ in range(repeats):
        runs = []
        for layout in LAYOUTS[:count]:
            levels = [HIGH if rng.random() < share else LOW for _ in range(boots)]
            states = ["27 ns" if level == HIGH else "110 ns" for level in levels]
            runs += boots_of(layout, levels, rng, states=states if labelled else None)
        gains = [max(one.gain, 1 / one.gain) for one in effects(runs) if is_stated(one)]
        wrong += any(gain > 1.5 for gain in gains)
    assert wrong <= repeats * (0.01 if boots == 5 else 0)


def test_noise_within_boots_does_not_hide_that_they_are_in_states() -> None:
    rng = random.Random(9)
    for _ in range(100):
        runs = [
            *boots_of("pin", (HIGH,) * 6, rng, within=0.10),
            *boots_of("pin-numa", (LOW,) * 5 + (HIGH,), rng, within=0.10),
        ]
        (effect,) = effects(runs)
        assert effect.doubts == (STATES,)


@pytest.mark.parametrize(("boots", "outcome"), [(3, Outcome.CANNOT_TELL), (5, Outcome.BETTER)])
def test_a_difference_as_large_as_that_of_two_states_takes_five_boots(
    boots: int, outcome: Outcome
) -> None:
    rng = random.Random(10)
    runs = [*boots_of("pin", (LOW,) * boots, rng), *boots_of("pin-numa", (HIGH,) * boots, rng)]
    (effect,) = effects(runs)
    assert effect.outcome is outcome
    assert (effect.doubts == (FEW_BOOTS,)) is (boots < 5)


def test_boots_far_apart_while_their_samples_agree_are_a_doubt_of_every_comparison_that_near() -> (
    None
):
    rng = random.Random(3)
    runs = [
        *boots_of("default", (HIGH,) * 5, rng),
        *boots_of("pin", (LOW,) * 5, rng),
        *boots_of("pin-numa", (HIGH, LOW, HIGH, LOW, LOW), rng),
        *boots_of("pin-numa-pci", (5 * HIGH,) * 5, rng),
    ]
    found = {one.alternative: one for one in effects(runs)}
    assert found["pin"].doubts == (STATES,) and found["pin"].outcome is Outcome.CANNOT_TELL
    assert found["pin-numa-pci"].outcome is Outcome.BETTER
    assert found["pin-numa-pci"].level is EvidenceLevel.MEASURED


def _drifting(rng: random.Random, order: Sequence[str], drift: float) -> list[Run]:
    """Equal layouts on a machine that slows down by so much from the first to the last boot."""
    levels: dict[str, list[float]] = {}
    starts: dict[str, list[float]] = {}
    for place, layout in enumerate(order):
        levels.setdefault(layout, []).append(1e11 * (1 - drift * place / (len(order) - 1)))
        starts.setdefault(layout, []).append(1_780_000_000.0 + 600 * place)
    return [
        run
        for layout in dict.fromkeys(order)
        for run in boots_of(layout, levels[layout], rng, starts=starts[layout], noise=0.002)
    ]


def test_all_boots_of_one_layout_before_all_of_the_other_is_no_certain_difference() -> None:
    rng = random.Random(4)
    for _ in range(100):
        (effect,) = effects(_drifting(rng, ("pin",) * 3 + ("pin-numa",) * 3, 0.10))
        assert effect.outcome is Outcome.CANNOT_TELL
        assert effect.doubts == (ORDER,)


def test_in_mixed_order_drift_is_noise_and_no_doubt() -> None:
    rng = random.Random(5)
    (effect,) = effects(_drifting(rng, ("pin", "pin-numa", "pin-numa", "pin") * 2, 0.10))
    assert effect.doubts == ()


def test_a_difference_beyond_any_drift_is_reported_in_whatever_order_but_not_as_measured() -> None:
    rng = random.Random(6)
    runs = [
        *boots_of("pin", (1e11,) * 3, rng, starts=(1.0, 2.0, 3.0)),
        *boots_of("pin-numa", (7e11,) * 3, rng, starts=(4.0, 5.0, 6.0)),
    ]
    (effect,) = effects(runs)
    assert (effect.outcome, effect.level) == (Outcome.BETTER, EvidenceLevel.PROVISIONAL)


def test_rounds_that_differ_are_blocks_and_a_difference_within_each_is_found() -> None:
    rng = random.Random(7)
    drift = [1.0, 0.95, 0.91, 0.87]
    runs = []
    for layout, gain in (("pin", 1.0), ("pin-numa", 1.05), ("pin-numa-pci", 1.0)):
        levels = [1e11 * gain * level for level in drift]
        runs += boots_of(layout, levels, rng, rounds=True, noise=0.003)
    better, equal = effects(runs)
    assert (better.outcome, equal.outcome) == (Outcome.BETTER, Outcome.NO_DIFFERENCE)
    unknown = [Run(replace(run.head, experiment=None, block=None), run.samples) for run in runs]
    assert effects(unknown)[0].outcome is Outcome.CANNOT_TELL


def test_two_boots_are_no_measured_verdict() -> None:
    rng = random.Random(8)
    runs = [*boots_of("pin", (1e11,) * 2, rng), *boots_of("pin-numa", (1.6e11,) * 2, rng)]
    (effect,) = effects(runs)
    assert (effect.outcome, effect.low) == (Outcome.CANNOT_TELL, None)
