"""What stands against comparing two alternatives: said in words that fit the runs."""

import random
from dataclasses import replace

import pytest

from homenode.analyse.alternative import alternatives
from homenode.analyse.comparison import Doubt
from homenode.analyse.doubts import doubts_between
from homenode.results.model import Condition, Origin, Run
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
def test_why_a_run_names_no_host_is_told_by_where_it_is_from(
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
