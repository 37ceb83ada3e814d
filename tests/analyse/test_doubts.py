"""What stands against comparing two alternatives: said in words that fit the runs."""

import random
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.decide.alternative import alternatives
from homenode.decide.comparison import make_doubt
from homenode.decide.doubts import doubts_between, doubts_of
from homenode.findings import Doubt
from homenode.measure.results.model import Condition, Origin, Run, Sample
from homenode.package_data import package_text
from tests.simulated_runs import simulated_run

FIGURES = {"triad": ("bytes_per_s", 1e10)}


def doubts(first: Run, second: Run) -> dict[str, Doubt]:
    one, other = alternatives([first, second])
    return {doubt.id: doubt for doubt in doubts_between(one, other)}


def run_of(layout: str, *, origin: Origin = Origin.MEASURED, host: str | None = "a") -> Run:
    made = simulated_run(layout, FIGURES, random.Random(1), host=host)
    return replace(made, head=replace(made.head, origin=origin))


def test_runs_without_a_host_are_named() -> None:
    nameless = doubts(run_of("default", origin=Origin.IMPORTED), run_of("pin", host=None))
    assert nameless["host-unknown"].remedy
    assert "host-unknown" not in doubts(run_of("default"), run_of("pin"))


def test_every_doubt_has_a_cause_a_fix_and_a_line_in_the_documents() -> None:
    page = Path("docs/formats/comparison.md").read_text()
    for name in tomllib.loads(package_text("decide", "doubts.toml")):
        made = make_doubt(name, "x", "y")
        assert made.cause and made.remedy and f"`{name}`" in page, name


@pytest.mark.parametrize("name", ["microcode", "clock limit"])
def test_other_microcode_or_clocks_are_another_machine(name: str) -> None:
    def under(layout: str, value: str) -> Run:
        conditions = (Condition(name, value),)
        return simulated_run(layout, FIGURES, random.Random(1), conditions=conditions)

    assert doubts(under("default", "a"), under("pin", "b"))["other-conditions"].blocks
    assert "other-conditions" not in doubts(under("default", "a"), under("pin", "a"))


def test_doubts_of_some_metrics_leave_out_what_was_refused_of_others() -> None:
    run = run_of("pin")
    refused = Sample("memory-latency", "ns", 0.0)
    (one,) = alternatives([replace(run, samples=(*run.samples, refused))])
    for metric, number in (("memory-latency", 1), (run.samples[0].metric, 0)):
        found = [doubt.id for doubt in doubts_of(one, frozenset({metric}))]
        assert found.count("refused-figures") == number


def test_samples_of_thousands_of_positions_are_grouped_in_one_pass() -> None:
    samples = [Sample("h2d-bandwidth", "bytes_per_s", 1e9 + i, index=i) for i in range(2000)]
    (one,) = alternatives([replace(run_of("pin"), samples=tuple(samples))])
    found = one.series
    assert {(key.worst, series.medians) for key, series in found.items()} == {
        (False, (1e9 + 999.5,)),
        (True, (1e9,)),
    }
