"""Published figures are result files: every number as its document prints it, and what follows."""

import re
import statistics
from pathlib import Path

import pytest

from homenode.measure.results.model import Origin, Sample, Statistic
from homenode.measure.results.store import load_runs
from homenode.objective import Objective
from homenode.plan.planner import LAYOUTS
from tests.frozen.compare import differences, frozen
from tests.frozen.freeze import answers_of
from tests.frozen.requests import KINDS
from tests.shared_data import needs_shared, shared

RUNS = load_runs(Path(__file__).parents[2] / "demo" / "published").runs
DOCUMENTS = {
    "study": "000_2d6e43fb326d5310.txt",
    "study-scripts": "001_0e7d6af3fa4b28bb.txt",
    "ibm": "002_3ec5936733e7fa59.txt",
    "sdumont": "003_babfeca1c0efd1b9.txt",
    "xapi": "004_abbde5934c03793c.txt",
}


def samples(system: str, name: str, metric: str) -> list[Sample]:
    (run,) = [run for run in RUNS if (run.head.system, run.head.name) == (system, name)]
    return [sample for sample in run.samples if sample.metric == metric]


def value(system: str, name: str, metric: str) -> float:
    """The figure; the middle of a range."""
    whole = (None, "dram", "FP16 as printed")
    return statistics.fmean(s.value for s in samples(system, name, metric) if s.variant in whole)


def test_every_number_is_as_it_was_frozen() -> None:
    answers = answers_of(tuple(KINDS["published"]()))
    assert len(answers) == len(frozen("published")) == sum(len(run.samples) for run in RUNS) == 148
    assert not list(differences("published", answers))


def test_every_run_is_marked_as_published_and_names_its_document() -> None:
    for run in RUNS:
        assert run.head.origin is Origin.PUBLISHED
        assert (run.head.source or "").partition(":")[0] in DOCUMENTS
        assert all(sample.statistic is not Statistic.SAMPLE for sample in run.samples)


@needs_shared
@pytest.mark.parametrize("id", DOCUMENTS)
def test_every_number_is_printed_in_its_document(id: str) -> None:
    text = shared(f"seeds/{DOCUMENTS[id]}").read_text(encoding="utf-8")
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    printed = {float(number.replace(",", "")) for number in found}
    for run in RUNS:
        if (run.head.source or "").partition(":")[0] != id:
            continue
        for sample in run.samples:
            if sample.unit == "ratio":  # of a reference that has 1; losses and gains in per cent
                one = sample.value
                written = {one, 1, *(round(100 * abs(one - 1), 6), round(100 * (1 / one - 1), 6))}
            else:
                written = {round(sample.value / scale, 6) for scale in (1, 1e6, 1e9)}
            assert written & printed, (run.head.system, run.head.name, sample)


@pytest.mark.parametrize(
    ("objective", "metric", "of", "against", "systems", "text"),
    [
        (
            Objective.MULTI_GPU,
            "allreduce-busbw-peak",
            "vcpu_pin",
            "vcpu_pin_numa",
            ("H200", "RTX PRO 6000"),
            "{low:.1f}x pin-numa on H200, {high:.1f}x",
        ),
        (
            Objective.MEMORY_BANDWIDTH,
            "memory-bandwidth",
            "vcpu_pin_numa",
            "default",
            ("H200", "MI350X", "RTX PRO 6000", "RTX 4090"),
            "{low:.1f}x to {high:.1f}x default",
        ),
        (
            Objective.LATENCY,
            "memory-latency",
            "vcpu_pin_numa",
            "vcpu_pin",
            ("H200", "MI350X"),
            "{gain:.0%} to {most:.0%} lower",
        ),
        (
            Objective.DENSITY,
            "cpu-throughput",
            "vcpu_pin_numa_smt",
            "vcpu_pin",
            ("H200", "MI350X"),
            "{low:.2f}x to {high:.2f}x",
        ),
    ],
)
def test_the_reasons_of_auto_are_what_the_figures_come_to(
    objective: Objective, metric: str, of: str, against: str, systems: tuple[str, ...], text: str
) -> None:
    ratios = sorted(value(one, of, metric) / value(one, against, metric) for one in systems)
    low, high = ratios[0], ratios[-1]
    said = text.format(low=low, high=high, gain=1 - high, most=1 - low)
    reason = LAYOUTS[objective][1]
    assert said.replace("% to", " to").replace("%", " %") in reason


def test_what_sharing_cores_costs_is_xapis_figure() -> None:
    lost = sorted(
        s.value for s in samples("Xen, 2 nodes of 16 cores", "memory_first", "program-throughput")
    )
    assert [round(100 * (1 - one)) for one in lost] == [40, 75][::-1]
    assert "40 to 75 %" in LAYOUTS[Objective.THROUGHPUT][1]
