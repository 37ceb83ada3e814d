"""The experiment on collectives, on guests that follow a mechanism and on guests that do not."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from homenode.decide.alternative import alternatives_of
from homenode.decide.collective_causes import BandwidthChange, Cause, Diagnosis, diagnose
from homenode.decide.evidence.documents import publications
from homenode.decide.machine_facts import facts_of_host
from homenode.decide.trial_conclusion import conclude
from homenode.doc import Text, plain
from homenode.measure import runner
from homenode.measure.gpu.collectives import settings_of
from homenode.measure.model import CollectiveSettings, Depth, Group, SuiteOptions
from homenode.measure.orders import BenchOptions, BenchOutcome
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run, Switches
from homenode.measure.results.vantage import Vantage
from homenode.show.trial_text import advice_text
from homenode.vm.layout import PRESETS
from homenode.vm.sources import load_host
from tests.measure.collective_guests import (
    CollectiveGuest,
    Settings,
    by_binding,
    by_cells,
    by_channels,
    by_mechanism,
    by_virtual_machine,
)
from tests.measure.random_guests import diagnosis_of, guests_of, tally

LAYOUTS = ("pin", "pin-numa", "pin-numa-pci")
FILE = """<system version="1">
  <cpu numaid="0"><pci busid="0000:11:00.0" class="0x030200"/></cpu>
  <cpu numaid="1"><pci busid="0000:81:00.0" class="0x030200"/></cpu>
  <cpu numaid="2"><pci busid="0000:91:00.0" class="0x020700"/></cpu>
</system>
"""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_S", 0.0)


def measured(
    machine: CollectiveGuest, root: Path, name: str, round: int = 0, repeats: int = 1
) -> BenchOutcome:
    options = SuiteOptions((Group.COLLECTIVES,), Depth.NORMAL, 65536, topology=FILE)
    is_bare = machine.layout == "bare"
    orders = BenchOptions(
        name,
        options,
        repeats=repeats,
        switches=UNKNOWN_SWITCHES if is_bare else Switches.of(PRESETS[machine.layout]),
        vantage=Vantage.HOST if is_bare else Vantage.GUEST,
        experiment="trial",
        block=round,
        host="the host",
        boot=f"{name} {round}",
    )
    return runner.run_bench(machine, orders, root, lambda progress: None)


def concluded(
    root: Path,
    effect: Callable[[Settings], float],
    *,
    layouts: tuple[str, ...] = LAYOUTS,
    fewer_channels: bool = False,
    lies: frozenset[str] = frozenset(),
) -> Diagnosis:
    guests: list[Run] = []
    bare: list[Run] = []
    for layout in layouts:
        machine = CollectiveGuest(
            layout=layout, effect=effect, fewer_channels=fewer_channels, lies=lies
        )
        run = measured(machine, root, layout).run
        assert run is not None
        (bare if layout == "bare" else guests).append(run)
    found = diagnose(
        alternatives_of([("trial", guests)]), alternatives_of([("bare", bare)]) if bare else ()
    )
    assert found is not None
    return found


def test_the_cause_is_placement_where_the_file_and_the_places_repair_it(tmp_path: Path) -> None:
    found = concluded(tmp_path, by_mechanism)
    assert found.cause is Cause.PLACEMENT and found.provisional
    changes = {one.question.id: one.change for one in found.answers}
    assert changes["cells"] is BandwidthChange.LOWER
    assert changes["file"] is changes["places"] is BandwidthChange.HIGHER


def test_three_boots_of_each_make_it_measured() -> None:
    quiet = replace(guests_of(3), boots=3, boot_noise=0.01, round_noise=0.001, two_states=False)
    left = {**dict.fromkeys(quiet.left, 1.0), "placement": 0.45}
    found = diagnosis_of(replace(quiet, left=left, logs="true"))
    assert found.cause is Cause.PLACEMENT and not found.provisional


@pytest.mark.parametrize(
    ("effect", "fewer_channels", "layouts", "cause"),
    [
        (by_cells, False, LAYOUTS, Cause.GUEST_CELLS),
        (by_cells, True, LAYOUTS, Cause.CANNOT_TELL),
        (by_binding, False, LAYOUTS, Cause.SCRIPT_BINDING),
        (by_channels, True, LAYOUTS, Cause.CHANNELS),
        (by_virtual_machine, False, (*LAYOUTS, "bare"), Cause.VIRTUAL_MACHINE),
    ],
)
def test_guests_that_follow_another_mechanism_get_its_cause_or_none(
    tmp_path: Path,
    effect: Callable[[Settings], float],
    fewer_channels: bool,
    layouts: tuple[str, ...],
    cause: Cause,
) -> None:
    found = concluded(tmp_path, effect, fewer_channels=fewer_channels, layouts=layouts)
    assert found.cause is cause, found.because


def test_figures_that_fit_need_a_log_that_fits(tmp_path: Path) -> None:
    found = concluded(tmp_path, by_mechanism, lies=frozenset({"bound"}))
    assert found.cause is Cause.CANNOT_TELL and "bound" in found.because


def test_a_difference_within_that_of_boots_tells_nothing(tmp_path: Path) -> None:
    found = concluded(tmp_path, lambda one: 0.8 if one.layout == "pin-numa" else 1.0)
    assert found.cause is Cause.CANNOT_TELL
    assert "boots" in found.because


@pytest.mark.parametrize(
    ("lie", "left"),
    [
        ("file", "NCCL file"),
        ("nodes", "NCCL file"),
        ("peers", "the study's settings"),
        ("graph", "the study's settings"),
    ],
)
def test_a_run_whose_log_contradicts_it_is_excluded_by_name(
    tmp_path: Path, lie: str, left: str
) -> None:
    machine = CollectiveGuest(layout="pin-numa", lies=frozenset({lie}))
    outcome = measured(machine, tmp_path, "x")
    assert outcome.run is not None
    assert left not in {sample.variant for sample in outcome.run.samples}
    failed = [one for one in outcome.findings if one.subject == f"collectives: {left}"]
    assert failed and "excluded" in failed[0].observed


def test_what_the_log_says_becomes_conditions_of_the_run(tmp_path: Path) -> None:
    run = measured(CollectiveGuest(layout="pin-numa"), tmp_path, "x").run
    assert run is not None
    found = {one.name: one.value for one in run.head.conditions}
    assert found["nccl graph, the study's settings"] == "nodes -1; rings 0 1"
    assert found["nccl search, the study's settings"] == "pattern 4: 2 x 11 GB/s, SYS"
    assert found["nccl proxy threads, the study's settings"] == "GPU 0 on CPU 3; GPU 1 on CPU 7"
    assert found["nccl HOST_NUMA_ID, the study's settings"] == "-1 -1"
    assert "GPU 0 on 0-3" in found["nccl threads, NCCL file"]
    assert found["nccl memory allocated, the study's settings"] == "node 0 1024 MiB, node 1 0 MiB"
    shares = {
        one.variant: one.value for one in run.samples if one.metric == "collective-fullest-node"
    }
    assert (shares["the study's settings"], shares["NCCL file"]) == (1.0, 0.5)


def test_settings_that_cannot_be_run_are_left_out_by_name(tmp_path: Path) -> None:
    machine = CollectiveGuest(layout="pin-numa-pci")
    outcome = measured(machine, tmp_path, "x")
    reasons = [gap.reason for gap in outcome.gaps]
    assert any(one.startswith("a process for each GPU: needs PyTorch") for one in reasons)


def test_the_default_is_seven_settings_and_the_whole_twenty() -> None:
    assert len(settings_of(Depth.NORMAL)) == 7
    whole = settings_of(Depth.FULL)
    assert len(set(whole)) == 20 and set(settings_of(Depth.NORMAL)) <= set(whole)
    assert len({one.name for one in whole}) == 20
    assert structs.replace(CollectiveSettings(), ring=True) in whole


def channels_in(run: Run, settings: str) -> set[float]:
    return {
        one.value
        for one in run.samples
        if (one.metric, one.variant) == ("collective-channels", settings)
    }


def test_a_round_with_other_channels_than_most_is_excluded_by_name(tmp_path: Path) -> None:
    machine = CollectiveGuest(layout="pin-numa", odd_rounds=frozenset({1}))
    outcome = measured(machine, tmp_path, "x", repeats=3)
    assert outcome.run is not None
    (excluded,) = [one for one in outcome.findings if one.id == "bench-other-channels"]
    assert excluded.subject == "collectives: NCCL file, round 2"
    assert "raw/" in (excluded.fix or "")
    peaks = [one for one in outcome.run.samples if one.metric == "allreduce-busbw-peak"]
    assert [one.variant for one in peaks].count("NCCL file") == 2
    assert channels_in(outcome.run, "NCCL file") == {2.0}


def test_where_no_number_of_channels_comes_most_often_none_is_the_intended(tmp_path: Path) -> None:
    machine = CollectiveGuest(layout="pin-numa", odd_rounds=frozenset({1}))
    outcome = measured(machine, tmp_path, "x", repeats=2)
    assert outcome.run is not None
    excluded = [one for one in outcome.findings if one.id == "bench-other-channels"]
    assert len(excluded) == 2 and not channels_in(outcome.run, "NCCL file")


def test_a_boot_with_other_channels_than_its_layouts_others_is_excluded_by_name() -> None:
    guests = replace(guests_of(3), left=dict.fromkeys(guests_of(3).left, 1.0), boots=3, logs="true")
    runs = [run for layout in LAYOUTS for run in guests.runs(layout)]
    odd = next(run for run in runs if run.head.name == "pin-numa-1")
    samples = [
        msgspec.structs.replace(one, value=1.0)
        if (one.metric, one.variant) == ("collective-channels", "NCCL file")
        else one
        for one in odd.samples
    ]
    runs[runs.index(odd)] = structs.replace(odd, samples=tuple(samples))
    found = diagnose(alternatives_of([("trial", runs)]))
    assert found is not None
    (excluded,) = found.excluded
    assert (excluded.run, excluded.settings) == ("pin-numa-1", "NCCL file")
    assert (excluded.channels, excluded.intended) == (1, 2)
    assert next(one for one in found.answers if one.question.id == "file").boots == 2


def test_what_the_virtual_machine_costs_and_what_one_node_costs_are_kept_apart() -> None:
    quiet = replace(guests_of(3), boots=3, boot_noise=0.001, round_noise=0.001, two_states=False)
    left = {"placement": 1.0, "cells": 1.0, "channels": 1.0, "binding": 0.5, "vm": 0.8}
    found = diagnosis_of(replace(quiet, left=left, logs="true"))
    assert {found.cause, *(cause for cause, _ in found.also)} == {
        Cause.SCRIPT_BINDING,
        Cause.VIRTUAL_MACHINE,
    }
    assert {layout: round(part, 1) for layout, part in found.of_bare} == dict.fromkeys(
        ("default", "pin", "pin-numa", "pin-numa-pci"), 0.8
    )
    assert {layout: round(part, 1) for layout, part in found.of_spread} == dict.fromkeys(
        ("pin-numa", "pin-numa-pci", "bare"), 0.5
    )


def test_guests_at_random_get_a_cause_that_they_have_or_none() -> None:
    counts, wrong = tally(range(60))
    assert not wrong
    assert sum(count for (_, how), count in counts.items() if how == "named") > 30


@pytest.mark.lab
def test_of_a_thousand_guests_at_random_one_in_two_hundred_gets_a_wrong_cause() -> None:
    counts, wrong = tally(range(1000))
    assert len(wrong) <= 5, wrong
    assert sum(count for (_, how), count in counts.items() if how == "named") > 600


def test_figures_of_zero_decide_nothing(tmp_path: Path) -> None:
    guests = []
    for layout, number in product(("pin", "pin-numa"), range(2)):
        machine = CollectiveGuest(layout=layout, effect=by_mechanism)
        run = measured(machine, tmp_path, f"{layout}-{number}", number).run
        assert run is not None
        samples = [
            msgspec.structs.replace(one, value=0.0)
            if number and one.variant == CollectiveSettings(file=True).name
            else one
            for one in run.samples
        ]
        guests.append(structs.replace(run, samples=tuple(samples)))
    found = diagnose(alternatives_of([("trial", guests)]))
    assert found is not None
    answer = next(one for one in found.answers if one.question.id == "file")
    assert answer.change is BandwidthChange.HIGHER and answer.boots == 1


def test_the_experiment_alone_chooses_no_layout() -> None:
    guests = replace(guests_of(3), boots=3, logs="true")
    runs = [run for layout in LAYOUTS for run in guests.runs(layout)]
    machine = facts_of_host(load_host("small-2n8c-2gpu"), publications())
    found = conclude(runs, "vm", "qemu:///system", (), publications(), machine)
    assert found.causes is not None
    assert found.advice == () and found.of_this_trial().verdicts == ()
    (said,) = advice_text(found).parts
    assert isinstance(said, Text) and "chooses no layout" in plain(said.words)
