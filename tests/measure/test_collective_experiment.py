"""The experiment on collectives, on guests that follow a mechanism and on guests that do not."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from homenode.decide.alternative import alternatives_of
from homenode.decide.collective_causes import Diagnosis, Standing, diagnose
from homenode.decide.collective_mechanisms import Cause
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
from tests.measure import random_guests
from tests.measure.collective_guests import (
    CollectiveGuest,
    Settings,
    by_cells,
    by_mechanism,
    by_virtual_machine,
)
from tests.measure.random_guests import (
    KNOWN,
    RandomGuests,
    diagnosis_of,
    guests_of,
    named,
    tally,
)
from tests.measure.random_guests import (
    LAYOUTS as ALL_LAYOUTS,
)

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
    machine: CollectiveGuest, root: Path, name: str, round: int = 0, repeats: int = 3
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


def quiet(cause: Cause, *, boots: int = 3, left: float = 0.5) -> RandomGuests:
    """Guests in which one mechanism acts, and everything was recorded."""
    guests = guests_of(3, (cause,), (1,), (boots,))
    return replace(
        guests,
        left={**dict.fromkeys(KNOWN, 1.0), cause: left},
        boot_noise=0.02,
        round_noise=0.005,
        two_states=False,
        logs="true",
        recorded=True,
        worst_counts=False,
    )


def standing(found: Diagnosis, cause: Cause) -> Standing:
    return next(one.standing for one in found.mechanisms if one.cause is cause)


def test_the_cause_is_placement_where_the_file_and_the_places_repair_it() -> None:
    one, three = (diagnosis_of(quiet(Cause.PLACEMENT, boots=boots)) for boots in (1, 3))
    assert one.cause is three.cause is Cause.PLACEMENT
    assert one.provisional and not three.provisional
    assert standing(three, Cause.GUEST_CELLS) is Standing.REFUTED
    assert standing(three, Cause.GUEST_BALANCING) is Standing.RECORDED_OFF


def test_where_every_cell_was_measured_no_next_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_guests, "ONE_BY_ONE", settings_of(Depth.FULL))
    guests = replace(quiet(Cause.PLACEMENT), logs="none", recorded=False)
    found = diagnosis_of(replace(guests, boots=1))
    assert found.next_cell is not None and found.next_cell.before is not None, "a switch is left"
    assert diagnosis_of(quiet(Cause.PLACEMENT)).next_cell is None


def test_a_refuted_mechanism_names_the_cells_that_refute_it_with_their_figures() -> None:
    found = diagnosis_of(quiet(Cause.PLACEMENT))
    (unknown,) = (one for one in found.mechanisms if one.cause is Cause.UNKNOWN_NODES)
    assert unknown.standing is Standing.REFUTED and unknown.ground is not None
    assert not {unknown.ground.first.layout, unknown.ground.second.layout} & {"pin-numa"}
    assert unknown.ground.is_same and f"{unknown.ground.ratio:.2f}" in unknown.because


@pytest.mark.parametrize(
    "cause",
    [one for one in KNOWN if one not in (Cause.GUEST_BALANCING, Cause.INTERRUPTS, Cause.RECLAIM)],
)
def test_a_mechanism_that_acts_alone_is_named_once_all_cells_are_measured(cause: Cause) -> None:
    assert named(diagnosis_of(quiet(cause))) - {Cause.NO_LOSS} == {cause}


@pytest.mark.parametrize("cause", [Cause.GUEST_BALANCING, Cause.INTERRUPTS, Cause.RECLAIM])
def test_a_rival_that_was_on_is_possible_and_the_next_cell_has_it_off(cause: Cause) -> None:
    found = diagnosis_of(quiet(cause))
    assert not named(found)
    assert standing(found, cause) is Standing.POSSIBLE
    assert found.next_cell is not None and found.next_cell.before is not None
    assert cause in found.next_cell.separates


def test_a_rival_is_named_once_a_boot_without_it_was_measured() -> None:
    on, off = (quiet(cause) for cause in (Cause.GUEST_BALANCING, Cause.PEERS))
    off = replace(off, left=dict.fromkeys(KNOWN, 1.0))
    runs = [run for layout in ALL_LAYOUTS[:-1] for run in on.runs(layout)]
    runs += [
        structs.replace(run, head=structs.replace(run.head, name=f"{run.head.name} off", boots=()))
        for run in off.runs("pin-numa")
    ]
    found = diagnose(alternatives_of([("trial", runs)]))
    assert found is not None
    assert found.cause is Cause.GUEST_BALANCING, found.because


def test_what_was_not_recorded_is_open_and_nothing_is_named_beside_it() -> None:
    found = diagnosis_of(replace(quiet(Cause.PLACEMENT), recorded=False))
    assert not named(found) and found.unrecorded
    assert standing(found, Cause.PLACEMENT) is Standing.POSSIBLE
    assert standing(found, Cause.INTERRUPTS) is Standing.POSSIBLE


def test_one_boot_says_nothing_of_layouts() -> None:
    for guests in (quiet(Cause.GUEST_CELLS, boots=1), quiet(Cause.PEERS, boots=1, left=1.0)):
        found = diagnosis_of(guests)
        assert not named(found)
        assert found.next_cell is not None and "--boots" in found.next_cell.trial


def test_the_same_is_said_with_an_interval_within_what_matters() -> None:
    found = diagnosis_of(replace(quiet(Cause.PEERS, left=1.0), boot_noise=0.005))
    assert found.cause is Cause.NO_LOSS
    noisy = replace(quiet(Cause.PEERS, left=1.0), boot_noise=0.1)
    assert diagnosis_of(noisy).cause is Cause.CANNOT_TELL


@pytest.mark.parametrize("effect", [by_cells, by_virtual_machine])
def test_a_whole_layouts_cost_is_not_named_from_one_boot(
    tmp_path: Path, effect: Callable[[Settings], float]
) -> None:
    found = concluded(tmp_path, effect, layouts=(*LAYOUTS, "bare"))
    assert found.cause is Cause.CANNOT_TELL, found.because


def test_figures_that_fit_need_a_log_that_fits() -> None:
    found = diagnosis_of(replace(quiet(Cause.PLACEMENT), logs="bound everywhere"))
    assert found.cause is Cause.CANNOT_TELL


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


def test_what_the_virtual_machine_costs_and_what_one_node_costs_are_kept_apart() -> None:
    guests = quiet(Cause.SCRIPT_BINDING)
    guests = replace(guests, left={**guests.left, Cause.VIRTUAL_MACHINE: 0.8}, boot_noise=0.001)
    found = diagnosis_of(guests)
    assert named(found) == {Cause.SCRIPT_BINDING, Cause.VIRTUAL_MACHINE}
    assert {layout: round(part, 1) for layout, part in found.of_bare} == dict.fromkeys(
        ("default", "pin", "pin-numa", "pin-numa-pci"), 0.8
    )
    assert {layout: round(part, 1) for layout, part in found.of_spread} == dict.fromkeys(
        ("pin-numa", "pin-numa-pci", "bare"), 0.5
    )


def test_what_costs_guests_with_p2p_off_alone_is_not_the_virtual_machine() -> None:
    """As an IOMMU in strict mode does: copies between GPUs do not pass through memory."""
    for seed in range(8):
        guests = RandomGuests(
            seed,
            {"guests without P2P": 0.78},
            boots=5,
            boot_noise=0.05,
            two_states=False,
            round_noise=0.01,
            logs="true",
        )
        assert Cause.VIRTUAL_MACHINE not in named(diagnosis_of(guests))


def test_guests_at_random_get_a_cause_that_they_have_or_none() -> None:
    counts, wrong = tally(range(40))
    assert not wrong
    assert sum(count for (_, how), count in counts.items() if how == "named") >= 4


@pytest.mark.lab
def test_of_a_thousand_guests_at_random_one_in_a_hundred_gets_a_wrong_cause() -> None:
    _, wrong = tally(range(1000))
    assert len(wrong) <= 10, wrong


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
    assert found.cause is not Cause.NO_LOSS


def test_the_experiment_alone_chooses_no_layout() -> None:
    guests = replace(guests_of(3), boots=3, logs="true")
    runs = [run for layout in LAYOUTS for run in guests.runs(layout)]
    machine = facts_of_host(load_host("small-2n8c-2gpu"), publications())
    found = conclude(runs, "vm", "qemu:///system", (), publications(), machine)
    assert found.causes is not None
    assert found.advice == () and found.of_this_trial().verdicts == ()
    (said,) = advice_text(found).parts
    assert isinstance(said, Text) and "chooses no layout" in plain(said.words)
