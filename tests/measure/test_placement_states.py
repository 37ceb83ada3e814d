"""Placement states over a whole run: never two in one, and no move overlooked."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode.decide.alternative import USUAL, group_runs, join_states
from homenode.machine.tools.homenode_probe import parse
from homenode.measure.probe_samples import read_probe_results
from homenode.measure.results.model import MOVING, UNSETTLED, Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.placement_states import (
    MAX_SPAN,
    Bracket,
    classify_brackets,
    classify_values,
)
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS
from tests import probe_documents

CAS_NS = {"near": (25.0, 33.0), "far": (103.0, 122.0), "sibling": (9.3, 11.2)}
State = str


def recorded(rng: random.Random, truth: list[tuple[State, State]]) -> list[probe_documents.Ends]:
    return [((rng.uniform(*CAS_NS[a]),), (rng.uniform(*CAS_NS[b]),)) for a, b in truth]


def history(rng: random.Random) -> tuple[list[tuple[State, State]], list[int]]:
    """(state before, after) of each sample, and the samples in or before which the CPUs moved."""
    here = rng.choice(list(CAS_NS))
    truth: list[tuple[State, State]] = [(here, here)] * 2
    moves: list[int] = []
    for _ in range(rng.randint(1, 7)):
        truth += [(here, here)] * rng.randint(0, 20)
        there = rng.choice([state for state in CAS_NS if state != here])
        moves.append(len(truth))
        if rng.random() < 0.5:  # in the middle of a sample, else between two
            truth.append((here, there))
        here = there
        truth += [(here, here)] * 2
    return truth, moves


@pytest.mark.parametrize("seed", range(20))
def test_on_replayed_runs_nothing_is_pooled_and_every_move_is_found(seed: int) -> None:
    """Cut into several documents at any place, as a run cuts its series into steps."""
    rng = random.Random(seed)
    truth, moves = history(rng)
    series = recorded(rng, truth)
    cuts = sorted({0, len(series), *(rng.randrange(len(series)) for _ in range(3))})
    brackets = []
    for first, last in pairwise(cuts):
        text = probe_documents.placement("0-1", series[first:last])
        placed = read_probe_results(parse(text)).placed
        brackets += [one.bracket for one in placed if one.bracket is not None]
    found = classify_brackets(brackets)
    assert list(found.transitions) == moves
    truths: dict[str, set[State]] = {}
    for (before, after), label in zip(truth, found.labels, strict=True):
        if before != after:
            assert label == UNSETTLED
        else:
            truths.setdefault(label, set()).add(before)
    assert UNSETTLED not in truths
    assert all(len(one) == 1 for one in truths.values()), truths
    assert len(truths) == len({state for pair in truth for state in pair})


def test_the_first_state_of_one_document_is_not_that_of_the_next() -> None:
    near, far = (
        read_probe_results(parse(probe_documents.bandwidth("0-1", [ends] * 6))).placed
        for ends in (probe_documents.NEAR, probe_documents.FAR)
    )
    found = classify_brackets([one.bracket for one in (*near, *far) if one.bracket is not None])
    assert set(found.labels[: len(near)]) == {"27 ns"}
    assert set(found.labels[len(near) :]) == {"108 ns"}


def test_a_team_whose_pairs_stand_differently_for_good_is_in_one_state() -> None:
    mesh = Bracket("0-3", (27.0, 110.0, 27.0), (28.0, 111.0, 27.0))
    assert len(set(classify_brackets([mesh] * 5).labels)) == 1
    moved = Bracket("0-3", (27.0, 27.0, 110.0), (28.0, 27.0, 111.0))
    found = classify_brackets([mesh, mesh, moved, moved])
    assert found.transitions == (2,)
    assert len(set(found.labels)) == 2, "like by their median, and yet two places"


def test_a_move_within_a_core_to_core_test_is_seen() -> None:
    document = json.loads(probe_documents.core_to_core("0-1"))
    document["pairs"][0]["samples_ns"] = [27.0, 28.0, 105.0, 104.0, 27.5, 27.0, 300.0, 26.0]
    placed = read_probe_results(parse(json.dumps(document))).placed
    found = classify_brackets([one.bracket for one in placed if one.bracket is not None])
    assert found.labels == ("27 ns",) * 2 + ("104 ns",) * 2 + ("27 ns",) * 2 + (UNSETTLED, "27 ns")
    assert found.transitions == (2, 4)


def test_one_disturbed_hand_over_is_no_place() -> None:
    calm = Bracket("0-1", (27.0,), (27.0,))
    found = classify_brackets([calm, calm, Bracket("0-1", (27.0,), (400.0,)), calm, calm])
    assert found.labels == ("27 ns", "27 ns", UNSETTLED, "27 ns", "27 ns")
    assert found.transitions == ()


def test_what_was_not_measured_has_no_state() -> None:
    assert classify_brackets([Bracket("0-1", (None,), (27.0,))]).labels == (UNSETTLED,)
    assert classify_brackets([Bracket("0-1", (), ())]).labels == (UNSETTLED,)
    assert classify_brackets([]).labels == ()


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40))
def test_no_class_spans_too_much_and_classes_follow_the_latency(values: list[float]) -> None:
    classes = classify_values(values)
    for number in set(classes):
        own = [value for value, at in zip(values, classes, strict=True) if at == number]
        assert max(own) <= MAX_SPAN * min(own)
    ordered = sorted(zip(values, classes, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(ordered))


def run(name: str, states: list[tuple[str, float]], layout: str = "pin") -> Run:
    switches, boots = Switches.from_layout(PRESETS[layout]), (f"boot of {name}",)
    head = RunHead(name, "cpu-only", Origin.MEASURED, Vantage.GUEST, switches, boots=boots)
    samples = [
        Sample("memory-bandwidth", "bytes_per_s", value, variant="triad", state=state)
        for state, value in states
    ]
    return Run(head, tuple(samples))


def states_in(runs: list[Run]) -> set[str | None]:
    return {key.state for one in group_runs(runs) for key in one.series}


def test_boots_that_saw_one_place_are_one_series() -> None:
    joint = join_states(group_runs([run("a", [("26 ns", 1e9)]), run("b", [("28 ns", 2e9)])]))
    (series,) = joint[0].series.values()
    assert sorted(series.medians) == [1e9, 2e9]


def test_two_places_of_one_run_stay_two_whatever_others_saw() -> None:
    runs = [run("a", [("27 ns", 1e9), ("40 ns", 2e9)]), run("b", [("33 ns", 3e9)])]
    assert states_in(runs) == {"27 ns", "40 ns", "33 ns"}
    runs = [run("a", [("27 ns", 1e9), ("110 ns", 2e9)]), run("b", [("105 ns", 1e9)])]
    assert states_in(runs) == {"27 ns", "108 ns"}
    assert states_in([run("a", [(UNSETTLED, 1e9), ("27 ns", 2e9)])]) == {"27 ns"}


def test_boots_in_places_that_only_their_run_can_name_stay_the_unit() -> None:
    runs = [run("a", [("27 ns, 2", 1e9)]), run("b", [("27 ns, 2", 2e9)])]
    assert states_in(runs) == {None}
    (series,) = (one for run_set in group_runs(runs) for one in run_set.series.values())
    assert sorted(series.medians) == [1e9, 2e9]


def test_layouts_that_stand_elsewhere_are_compared_where_they_usually_are() -> None:
    """Siblings under one layout, cores under the other: the difference is the layout's doing."""
    runs = [
        run("a", [("10 ns", 1e9)] * 9 + [("110 ns", 9e9)], "pin-numa-smt"),
        run("b", [("27 ns", 2e9)] * 9, "pin-numa"),
    ]
    first, second = once = group_runs(runs)
    assert join_states(once) == once, "naming twice is naming once"
    (shared,) = first.series.keys() & second.series.keys()
    assert shared.state == USUAL
    assert first.series[shared].medians == (1e9,), "the other place is not in it"
    assert {key.state for key in first.series} == {USUAL, "110 ns"}
    assert states_in([replace(one, samples=()) for one in runs]) == set()


def test_where_unpinned_vcpus_happen_to_stand_is_not_their_layouts_doing() -> None:
    runs = [run("a", [("110 ns", 9e9)] * 9, "default"), run("b", [("27 ns", 2e9)] * 9, "pin")]
    first, second = group_runs(runs)
    assert not first.series.keys() & second.series.keys()
    moving = run("a", [(MOVING, 1e9)] * 9, "default")
    assert states_in([moving, runs[1]]) == {USUAL}, "that they never stand still is its doing"


def test_a_layout_without_a_usual_place_is_compared_place_by_place() -> None:
    runs = [
        run("a", [("27 ns", 1e9)] * 5 + [("110 ns", 2e9)] * 5, "default"),
        run("b", [("28 ns", 2e9)] * 9, "pin"),
    ]
    first, second = group_runs(runs)
    assert {key.state for key in first.series.keys() & second.series.keys()} == {"28 ns"}


def test_many_pus_that_are_never_in_one_place_are_moving_and_few_are_not() -> None:
    rng = random.Random(1)

    def bracket(pus: int) -> Bracket:
        ends = [tuple(rng.choice((27.0, 110.0)) for _ in range(pus - 1)) for _ in range(2)]
        return Bracket(f"0-{pus - 1}", *ends)

    assert set(classify_brackets([bracket(32) for _ in range(100)]).labels) == {MOVING}
    assert MOVING not in classify_brackets([bracket(2) for _ in range(100)]).labels
    steady = Bracket("0-31", (27.0,) * 31, (27.0,) * 31)
    mostly = classify_brackets([steady] * 90 + [bracket(32) for _ in range(10)])
    assert mostly.labels[:90] == ("27 ns",) * 90
    assert MOVING not in mostly.labels
