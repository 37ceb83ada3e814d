"""Copies, more data, boots in states, and the order of layouts: no false certainty."""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.decide.alternative import _states_of_boots, group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import FEW_BOOTS, ORDER, STATES, Effect, EvidenceLevel, Outcome
from homenode.decide.machine_facts import collect_run_facts
from homenode.decide.recommendation import Recommendation, decide, recommend
from homenode.decide.sentences import format_effect
from homenode.measure.results.model import Condition, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.vm.layout import PRESETS
from tests.seeds import draws

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
            Switches.from_layout(PRESETS[layout]),
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
    return compare(group_runs(runs)).effects


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
    made = decide((tuple(runs)), collect_run_facts("H200", runs), Objective.MEMORY_BANDWIDTH)
    assert made.level is EvidenceLevel.RULE


def test_a_state_that_every_boot_of_a_layout_has_is_its_usual_one() -> None:
    rng = random.Random(2)
    runs = [
        *boots_of("pin", (HIGH,) * 3, rng, states=("27 ns",) * 3),
        *boots_of("pin-numa", (2 * HIGH,) * 3, rng, states=("110 ns",) * 3),
    ]
    (effect,) = effects(runs)
    assert (effect.state, effect.outcome) == ("usual", Outcome.BETTER)
    # The probe pins itself on a host, but in a guest without pins a state is one of several.
    first, *others = boots_of("default", (HIGH,) * 3, rng, states=("27 ns",) * 3)
    on_host = Run(replace(first.head, vantage=Vantage.HOST), first.samples)
    assert effects([on_host, *others, *runs[3:]]) == ()


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
    repeats, wrong = draws(100), 0
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
        assert effect.caveats == (STATES,)


@pytest.mark.parametrize(("boots", "outcome"), [(3, Outcome.CANNOT_TELL), (5, Outcome.BETTER)])
def test_a_difference_as_large_as_that_of_two_states_takes_five_boots(
    boots: int, outcome: Outcome
) -> None:
    rng = random.Random(10)
    runs = [*boots_of("pin", (LOW,) * boots, rng), *boots_of("pin-numa", (HIGH,) * boots, rng)]
    (effect,) = effects(runs)
    assert effect.outcome is outcome
    assert (effect.caveats == (FEW_BOOTS,)) is (boots < 5)


def test_boots_far_apart_while_their_samples_agree_are_a_caveat_of_every_comparison_that_near() -> (
    None
):
    rng = random.Random(3)
    runs = [
        *boots_of("default", (HIGH,) * 5, rng),
        *boots_of("pin", (LOW,) * 5, rng),
        *boots_of("pin-numa", (HIGH, LOW, HIGH, LOW, LOW), rng),
        *boots_of("pin-numa-pci", (5 * HIGH,) * 5, rng),
        *boots_of("pin-bound", (LOW / 1.06,) * 5, rng),
        *boots_of("pin-numa-smt", (LOW / 1.15,) * 5, rng),
    ]
    found = {one.alternative: one for one in effects(runs)}
    assert found["pin-bound"].caveats == (STATES,)  # states repeat to 10 %
    assert found["pin-numa-smt"].outcome is Outcome.WORSE
    assert found["pin"].caveats == (STATES,) and found["pin"].outcome is Outcome.CANNOT_TELL
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
        assert effect.caveats == (ORDER,)


def test_in_mixed_order_drift_is_noise_and_no_caveat() -> None:
    rng = random.Random(5)
    runs = _drifting(rng, ("pin", "pin-numa", "pin-numa", "pin") * 2, 0.10)
    (effect,) = effects(runs)
    assert effect.caveats == ()
    starts = sorted(run.head.started_s or 0.0 for run in runs)
    placed = [
        replace(run, head=replace(run.head, place=starts.index(run.head.started_s or 0.0)))
        for run in runs
    ]
    (by_place,) = effects(replace(run, head=replace(run.head, started_s=None)) for run in placed)
    assert (by_place.low, by_place.high) == pytest.approx((effect.low, effect.high), rel=1e-6)
    (unordered,) = effects(replace(run, head=replace(run.head, started_s=None)) for run in runs)
    assert (unordered.low or 0.0) < (effect.low or 0.0), (
        "the drift is noise where no order is known"
    )


def test_the_multiple_of_drifting_layouts_is_that_of_its_interval() -> None:
    order = "001011011"
    levels: tuple[list[float], list[float]] = [], []
    starts: tuple[list[float], list[float]] = [], []
    for place, side in enumerate(map(int, order)):
        levels[side].append(1e11 * (1 + side / 2) * 0.95**place)
        starts[side].append(1.7e9 + 600 * place)
    runs = [
        run
        for side, layout in enumerate(("pin", "pin-numa"))
        for run in boots_of(
            layout, levels[side], random.Random(side), starts=starts[side], noise=0.0, within=0.002
        )
    ]
    answer = decide(runs, collect_run_facts("H200", runs), Objective.MEMORY_BANDWIDTH)
    assert format_effect(answer) == "1.5x pin (1.5x)"


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


METRICS = {
    Objective.MEMORY_BANDWIDTH: ("memory-bandwidth", "bytes_per_s", "triad"),
    Objective.LATENCY: ("memory-latency", "ns", "dram"),
    Objective.MULTI_GPU: ("allreduce-busbw-peak", "bytes_per_s", None),
    Objective.GPU_COPY: ("h2d-bandwidth", "bytes_per_s", None),
    Objective.THROUGHPUT: ("cpu-throughput", "events_per_s", None),
}
MORE_LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci", "pin-numa-smt")
GPUS = tuple(Bdf(0, 0x10 * number + 1, 0, 0) for number in range(8))


def run_of(layout: str, number: int, samples: Sequence[Sample], origin: Origin) -> Run:
    head = RunHead(
        f"{layout}-{number}",
        "gpu",
        origin,
        Vantage.GUEST,
        Switches.from_layout(PRESETS[layout]),
        host_kind="kind",
        host="host",
        host_addresses=True,
    )
    return Run(head, tuple(samples))


def copies(values: Sequence[float]) -> list[Sample]:
    """A table of copies from host to device, in GB/s."""
    return [
        Sample("h2d-bandwidth", "bytes_per_s", value * 1e9, device=gpu)
        for gpu, value in zip(GPUS, values, strict=True)
    ]


def turned_round(before: Recommendation, after: Recommendation) -> bool:
    """Whether what results told against is chosen now, or what they told for is avoided."""
    if after.choice == before.choice:
        return False
    return before.tells and (after.choice in before.avoid or before.choice in after.avoid)


def test_another_run_within_one_percent_turns_no_recommendation_round() -> None:
    rng, changed, count = random.Random(54), 0, draws(400)
    for _ in range(count):
        objective = rng.choice(list(METRICS))
        metric, unit, variant = METRICS[objective]
        noise = rng.choice((0.002, 0.01, 0.03, 0.1))
        runs = []
        for layout in rng.sample(MORE_LAYOUTS, rng.randint(2, 5)):
            level = 1e11 * rng.choice((1.0, 1.0, 1.03, 1.1, 1.3, 1.9, rng.uniform(0.5, 3)))
            for number in range(rng.randint(1, 4)):
                value = level * math.exp(rng.gauss(0, noise))
                repeats = [value * math.exp(rng.gauss(0, 0.004)) for _ in range(3)]
                samples = [
                    Sample(metric, unit, each, number=place, variant=variant)
                    for place, each in enumerate(repeats)
                ]
                runs.append(run_of(layout, number, samples, Origin.MEASURED))
        before = recommend("gpu", group_runs(runs), objective)
        assert recommend("gpu", group_runs([*runs, rng.choice(runs)]), objective) == before
        other = rng.choice(runs)
        near = [replace(one, value=one.value * rng.uniform(0.99, 1.01)) for one in other.samples]
        again = Run(replace(other.head, name="again"), tuple(near))
        after = recommend("gpu", group_runs([*runs, again]), objective)
        assert not turned_round(before, after), (before, after)
        changed += after.choice != before.choice
    assert changed <= 0.03 * count, "and hardly any changes between layouts that are alike"


BEFORE = (
    (12.61, 12.52, 15.46, 15.53, 15.59, 15.62, 12.66, 12.55),
    (12.57, 12.59, 15.59, 15.46, 15.60, 15.54, 12.59, 12.65),
    (12.60, 12.55, 15.52, 15.50, 15.58, 15.59, 12.62, 12.60),
)
AFTER = (
    (15.60, 15.64, 15.75, 15.58, 15.39, 15.39, 14.76, 15.40),
    (15.58, 15.63, 15.70, 15.60, 15.41, 15.37, 14.79, 15.42),
    (15.61, 15.62, 15.74, 15.57, 15.40, 15.38, 14.75, 15.41),
)
"""The tables of an article, and a third of each as its figures scatter."""


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_expander_buses_are_recommended_from_however_many_tables(
    before: int, after: int, is_ordered: bool
) -> None:
    runs = [
        run_of(layout, number, copies(table), Origin.IMPORTED)
        for layout, tables in (("pin-numa", BEFORE[:before]), ("pin-numa-pci", AFTER[:after]))
        for number, table in enumerate(tables)
    ]
    if is_ordered:
        runs = [Run(replace(one.head, place=at), one.samples) for at, one in enumerate(runs)]
    answer = recommend("gpu", group_runs(runs), Objective.GPU_COPY)
    assert (answer.choice, answer.avoid) == ("pin-numa-pci", ("pin-numa",))
    assert answer.level is EvidenceLevel.PROVISIONAL
    copied = recommend("gpu", group_runs([*runs, *runs]), Objective.GPU_COPY)
    assert copied == answer


@pytest.mark.parametrize("own", [0.01, 0.05])
@pytest.mark.parametrize("boots", [1, 2])
def test_what_a_boot_changes_for_all_gpus_is_no_layouts_doing(boots: int, own: float) -> None:
    """Eight GPUs, a shared boot effect of 3 %, and one of each GPU."""
    rng, told, count = random.Random(55), 0, draws(400)
    for _ in range(count):
        runs = []
        for layout in ("pin-numa", "pin-numa-pci"):
            for number in range(boots):
                shared = rng.gauss(0, 0.03)
                table = [15.5 * math.exp(shared + rng.gauss(0, own)) for _ in GPUS]
                runs.append(run_of(layout, number, copies(table), Origin.MEASURED))
        effects = compare(group_runs(runs)).effects
        told += any(
            one.primary and one.outcome in (Outcome.BETTER, Outcome.WORSE) for one in effects
        )
    assert told <= 0.06 * count


@pytest.mark.parametrize(
    ("boots", "states"),
    [
        ([(2, 1)], {"near"}),  # two thirds are the usual state
        ([(3, 2)], {None}),
        ([(2, 1), (3, 2)], {None}),
        ([(2, 1), (0, 3), (3, 2)], {"near", "far"}),
    ],
)
def test_a_boots_usual_state_has_two_thirds_of_its_samples(
    boots: list[tuple[int, int]], states: set[str | None]
) -> None:
    counters = [Counter({"near": near, "far": far}) for near, far in boots]
    assert _states_of_boots(counters) == states
