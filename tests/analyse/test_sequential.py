"""Sequences of rounds: their error over all looks, and what others say of their runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.decide.alternative import alternatives
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.rounds import FIRST_LOOK, error_at
from homenode.decide.sequential import look_at
from homenode.decide.verdict import verdict
from homenode.measure.results.model import SequentialPlan
from homenode.measure.sequence import SequenceEnd
from homenode.objective import Objective
from tests.sequences import LAYOUTS, boot, is_wrong, simulated

BANDWIDTH = Objective.HOST_BANDWIDTH


@given(st.floats(0.001, 0.05), st.integers(2, 7), st.integers(2, 100))
def test_the_looks_share_the_error(error: float, variants: int, rounds: int) -> None:
    plan = SequentialPlan(error, variants, rounds)
    shares = [error_at(plan, number) for number in range(FIRST_LOOK, rounds + 1)]
    assert all(share > 0 for share in shares)
    assert sum(shares) == pytest.approx(error)


def test_of_equal_layouts_few_are_left_out_however_often_somebody_looks() -> None:
    """At most 5 %: of 150 more than 13 come in 1 of 100 cases. 10,000 of each number of layouts:
    docs/decisions/0023."""
    rng, equal = random.Random(2), dict.fromkeys(LAYOUTS[:2], 1.0)
    wrong = 0
    for _ in range(150):
        look, runs = simulated(equal, rng, noise=0.05, drift=0.1)
        wrong += is_wrong(equal, look, verdict("", alternatives(runs), BANDWIDTH))
    assert wrong <= 13


def test_what_was_left_out_or_decided_is_what_the_stored_runs_say() -> None:
    rng = random.Random(4)
    left_out_early = 0
    for _ in range(40):
        effects = {name: rng.choice((1.0, 1.1, 1.2, 1.4, 3.0)) for name in LAYOUTS[:4]}
        look, runs = simulated(effects, rng, noise=0.03, drift=0.1)
        rng.shuffle(runs)
        found = verdict("", alternatives(runs), BANDWIDTH)
        assert set(effects) - set(look.kept) == set(found.avoid)
        assert (look.ended is SequenceEnd.DECIDED) <= (
            {found.choice, *found.also} == set(look.kept)
        )
        last = {run.head.switches.name: run.head.block or 0 for run in runs}
        left_out_early += len(set(last.values())) > 1
    assert left_out_early > 10


def test_a_layout_that_was_fast_in_its_rounds_alone_is_not_taken_for_the_best() -> None:
    """The machine slows down: what was left out has the higher figures, of the early rounds."""
    rng = random.Random(4)
    effects = {"default": 1.0, "pin": 1.10, "pin-numa": 1.13}
    look, runs = simulated(effects, rng, noise=0.015, drift=-0.5)
    every = {one.label: one for one in alternatives(runs)}
    key = next(iter(every["default"].series))
    assert every["default"].series[key].value > every["pin-numa"].series[key].value
    found = verdict("", tuple(every.values()), BANDWIDTH)
    assert found.avoid == ("default",)
    assert set(look.kept) == {"pin", "pin-numa"}


def test_after_two_boots_nothing_is_left_out_that_boots_of_one_layout_have_differed_by() -> None:
    plan = SequentialPlan(0.05, 2, 8)
    for ratio, kept in ((1.7, ("default", "pin")), (1.9, ("pin",))):
        runs = [
            boot(name, number, number * 2.0 + place, plan, [value, value * 1.0001])
            for number in range(2)
            for place, (name, value) in enumerate((("default", 1e9), ("pin", ratio * 1e9)))
        ]
        assert look_at(runs, ("default", "pin"), BANDWIDTH)[0] == kept
        level = verdict("", alternatives(runs), BANDWIDTH).level
        assert level in (None, EvidenceLevel.PROVISIONAL)


def test_one_boot_of_each_decides_nothing_and_what_means_nothing_ends_it() -> None:
    plan = SequentialPlan(0.05, 2, 8)
    runs = [
        boot(name, 0, float(place), plan, [value])
        for place, (name, value) in enumerate((("default", 1e9), ("pin", 9e9)))
    ]
    assert look_at(runs, ("default", "pin"), BANDWIDTH) == (("default", "pin"), None)
    ended = look_at(runs, ("default", "pin"), Objective.LATENCY)
    assert ended == (("default", "pin"), SequenceEnd.STOPPED)
