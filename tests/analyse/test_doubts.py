"""What stands against comparing two alternatives: said in words that fit the runs."""

import random

import pytest
from msgspec.structs import replace

from homenode.decide.alternative import alternatives
from homenode.decide.doubts import doubts_between, doubts_of
from homenode.findings import Doubt
from homenode.measure.results.model import Condition, Origin, Run, Sample
from tests.simulated_runs import simulated_run

FIGURES = {"triad": ("bytes_per_s", 1e10)}


def doubts(first: Run, second: Run) -> dict[str, Doubt]:
    one, other = alternatives([first, second])
    return {doubt.id: doubt for doubt in doubts_between(one, other)}


def run_of(layout: str, *, origin: Origin = Origin.MEASURED, host: str | None = "a") -> Run:
    made = simulated_run(layout, FIGURES, random.Random(1), host=host)
    return replace(made, head=replace(made.head, origin=origin))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Origin.MEASURED, Origin.MEASURED, ["without its plan"]),
        (Origin.IMPORTED, Origin.IMPORTED, ["other tools"]),
        (Origin.MEASURED, Origin.IMPORTED, ["without its plan", "other tools"]),
    ],
)
def test_why_a_run_names_no_host_depends_on_where_it_is_from(
    first: Origin, second: Origin, says: list[str]
) -> None:
    found = doubts(
        run_of("default", origin=first, host=None), run_of("pin", origin=second, host=None)
    )
    cause = found["host-unknown"].cause
    assert [word for word in ("without its plan", "other tools") if word in cause] == sorted(
        says, reverse=True
    )


def test_only_the_run_without_a_host_is_explained() -> None:
    found = doubts(run_of("default", origin=Origin.IMPORTED), run_of("pin", host=None))
    assert "other tools" not in found["host-unknown"].cause
    assert "host-unknown" not in doubts(run_of("default"), run_of("pin"))


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
