"""More data never turns an answer into its opposite, nor does a copy of a run change one."""

import math
import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.decide.alternative import alternatives
from homenode.decide.compare import compare
from homenode.decide.comparison import EvidenceLevel, Outcome
from homenode.decide.recommendation import Recommendation, recommend
from homenode.measure.results.model import Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.vm.layout import PRESETS
from tests.seeds import draws

METRICS = {
    Objective.MEMORY_BANDWIDTH: ("memory-bandwidth", "bytes_per_s", "triad"),
    Objective.LATENCY: ("memory-latency", "ns", "dram"),
    Objective.MULTI_GPU: ("allreduce-busbw-peak", "bytes_per_s", None),
    Objective.GPU_COPY: ("h2d-bandwidth", "bytes_per_s", None),
    Objective.THROUGHPUT: ("cpu-throughput", "events_per_s", None),
}
LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci", "pin-numa-smt")
GPUS = tuple(Bdf(0, 0x10 * number + 1, 0, 0) for number in range(8))


def run_of(layout: str, number: int, samples: Sequence[Sample], origin: Origin) -> Run:
    head = RunHead(
        f"{layout}-{number}",
        "gpu",
        origin,
        Vantage.GUEST,
        Switches.of_layout(PRESETS[layout]),
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
        for layout in rng.sample(LAYOUTS, rng.randint(2, 5)):
            level = 1e11 * rng.choice((1.0, 1.0, 1.03, 1.1, 1.3, 1.9, rng.uniform(0.5, 3)))
            for number in range(rng.randint(1, 4)):
                value = level * math.exp(rng.gauss(0, noise))
                repeats = [value * math.exp(rng.gauss(0, 0.004)) for _ in range(3)]
                samples = [
                    Sample(metric, unit, each, number=place, variant=variant)
                    for place, each in enumerate(repeats)
                ]
                runs.append(run_of(layout, number, samples, Origin.MEASURED))
        before = recommend("gpu", alternatives(runs), objective)
        assert recommend("gpu", alternatives([*runs, rng.choice(runs)]), objective) == before
        other = rng.choice(runs)
        near = [replace(one, value=one.value * rng.uniform(0.99, 1.01)) for one in other.samples]
        again = Run(replace(other.head, name="again"), tuple(near))
        after = recommend("gpu", alternatives([*runs, again]), objective)
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
    answer = recommend("gpu", alternatives(runs), Objective.GPU_COPY)
    assert (answer.choice, answer.avoid) == ("pin-numa-pci", ("pin-numa",))
    assert answer.level is EvidenceLevel.PROVISIONAL
    copied = recommend("gpu", alternatives([*runs, *runs]), Objective.GPU_COPY)
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
        effects = compare(alternatives(runs)).effects
        told += any(
            one.primary and one.outcome in (Outcome.BETTER, Outcome.WORSE) for one in effects
        )
    assert told <= 0.06 * count
