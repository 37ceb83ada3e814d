"""A trial on a simulated hypervisor: order, verdicts, what goes wrong, and what is left behind."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.change.journal import ChangeEntry, ChangeState, DomainStore
from homenode.decide.alternative import group_by_argument
from homenode.decide.compare import compare
from homenode.decide.comparison import EvidenceLevel
from homenode.decide.machine_facts import collect_run_facts
from homenode.decide.recommendation import Recommendation
from homenode.decide.sentences import format_sentence
from homenode.decide.switch_effects import Conclusion, conclude
from homenode.errors import HostError, UsageError
from homenode.machine.topology import PagePool, RunningDomain
from homenode.measure.model import SuiteGroup
from homenode.measure.results.model import Run
from homenode.measure.results.store import read_run
from homenode.measure.trial.boot_steps import TrialDomain
from homenode.measure.trial.journal import (
    BARE,
    BOOT,
    LAYOUT,
    EntryKind,
    TrialHead,
    TrialJournal,
    list_trials,
)
from homenode.measure.trial.prepare import find_latest_trial, preflight
from homenode.measure.trial.runner import get_outcome_code, run_trial, schedule_steps
from homenode.objective import Objective
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import load_host
from tests.apply_documents import NAME, ORIGINAL
from tests.simulated_trial import (
    LAYOUTS,
    SimulatedGuest,
    SimulatedReach,
    begun,
    host,
    new_trial,
    run_whole,
    trial_of,
    wanted,
)
from tests.virsh_stand_in import URI, UUID, StandIn

EQUAL = {"default": 1.0, "pin": 1.0, "pin-numa": 1.0}
CELLS_HELP = {"default": 1.0, "pin": 1.3, "pin-numa": 1.9}
CELLS_HURT = {"default": 1.0, "pin": 1.25, "pin-numa": 0.5}


def run(
    tmp_path: Path, reach: SimulatedReach, stated: list[str] | None = None, **asked: object
) -> tuple[TrialHead, TrialJournal]:
    """A whole trial."""
    trial = new_trial(tmp_path, reach, **asked)
    run_whole(replace(trial, notify=trial.notify if stated is None else stated.append))
    return trial.head, trial.journal


def runs_of(head: TrialHead, journal: TrialJournal) -> list[Run]:
    state = journal.load().state
    order = {layout: at for at, layout in enumerate((*head.layouts, BARE))}
    steps = sorted(schedule_steps(head), key=lambda step: (order[step.variant], step.round))
    return [
        read_run(next(Path(head.results).glob(f"*/{state.outcomes[step.number].run}")))
        for step in steps
        if step.number in state.measured_boots
    ]


def conclusion(head: TrialHead, journal: TrialJournal) -> Conclusion:
    words = ("--policy", "spread")
    runs = runs_of(head, journal)
    machine = collect_run_facts("the host", runs)
    return conclude(runs, head.argument, URI, words, machine)


def bandwidth(found: Conclusion) -> list[Recommendation]:
    return [one for one in found.recommendations if one.objective is Objective.MEMORY_BANDWIDTH]


@pytest.mark.parametrize(
    ("effects", "best"),
    [
        pytest.param(CELLS_HELP, "pin-numa", marks=pytest.mark.nightly),
        (CELLS_HURT, "pin"),
        pytest.param(EQUAL, "pin-numa", marks=pytest.mark.nightly),
    ],
)
def test_known_effects_come_to_the_right_verdict(
    effects: Mapping[str, float], best: str, daemon: StandIn, tmp_path: Path
) -> None:
    head, journal = run(tmp_path, SimulatedReach(daemon, effects), boots=3)
    assert get_outcome_code(journal.load().state) == 0
    found = conclusion(head, journal)
    (verdict,) = bandwidth(found)
    assert str(verdict.choice).split(", ")[0] == best, format_sentence(verdict)
    assert (verdict.level is EvidenceLevel.NO_DIFFERENCE) is (effects is EQUAL)
    bound = "pin-numa" if best == "pin-numa" else "pin-bound"
    assert verdict.layout == bound
    command = found.commands[Objective.MEMORY_BANDWIDTH]
    assert command == f"homenode apply {UUID} --policy spread --layout {bound}"
    assert daemon.definition() == ORIGINAL
    comparison = compare(group_by_argument([("trial", runs_of(head, journal))]))
    compared = [one for one in comparison.effects if one.metric == "memory-bandwidth"]
    numa = (one for one in compared if one.alternative.startswith("pin-numa"))
    effect = next(one for one in numa if one.primary)
    assert effect.boots == (3, 3)
    assert effect.low is not None and effect.high is not None
    assert effect.low < effects["pin-numa"] < effect.high


def test_one_boot_of_each_is_provisional(daemon: StandIn, tmp_path: Path) -> None:
    head, journal = run(tmp_path, SimulatedReach(daemon, CELLS_HELP), boots=1)
    found = conclusion(head, journal)
    (verdict,) = bandwidth(found)
    assert (verdict.level, verdict.boots) == (EvidenceLevel.PROVISIONAL, (1, 1))


def test_each_run_records_its_block_and_its_times(daemon: StandIn, tmp_path: Path) -> None:
    begun_s = time.time()
    head, journal = run(tmp_path, SimulatedReach(daemon, EQUAL), boots=2)
    heads = [one.head for one in runs_of(head, journal)]
    assert {one.experiment for one in heads} == {head.id}
    blocks = [(one.switches.name, one.block) for one in heads]
    assert blocks == [(layout, block) for layout in LAYOUTS for block in (0, 1)]
    for one in heads:
        assert one.started_s is not None
        assert one.ended_s is not None
        assert begun_s <= one.started_s <= one.ended_s <= time.time() + 1
    first = max(one.started_s or 0 for one in heads if one.block == 0)
    assert all((one.started_s or 0) > first for one in heads if one.block == 1)


def test_every_boot_is_written_down_before_and_after(daemon: StandIn, tmp_path: Path) -> None:
    head, journal = run(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)
    known = journal.load()
    assert known.head == head
    of_first = [entry.what for entry in known.entries if entry.number == 0]
    assert of_first == [EntryKind.MEASURING, EntryKind.MEASURED]
    assert known.entries[-1].what == EntryKind.ENDED
    layout = [(LAYOUT, ChangeState.BEGIN), (LAYOUT, ChangeState.DONE)]
    guest_up = [(BOOT, ChangeState.BEGIN), *[(BOOT, ChangeState.DONE)] * 2]
    guest_off = [(BOOT, ChangeState.UNDOING), (BOOT, ChangeState.UNDONE)]
    given_back = [(LAYOUT, ChangeState.UNDOING), (LAYOUT, ChangeState.UNDONE)]
    assert [(one.kind, one.what) for one in journal.changes.read_entries()] == [
        *(layout + guest_up + guest_off) * len(LAYOUTS),
        *given_back,
    ]
    boots = {one.by_hand for one in journal.changes.read_entries() if one.kind == BOOT}
    assert boots == {f"virsh -c {head.connect} destroy {head.uuid}"}
    assert known.state.ended
    assert not known.state.to_undo
    started = [line for line in daemon.commands() if line.startswith("start")]
    assert len(started) == len(LAYOUTS)


def test_a_guest_that_is_not_as_planned_is_not_measured(daemon: StandIn, tmp_path: Path) -> None:
    stated: list[str] = []
    reach = SimulatedReach(daemon, EQUAL, wrong=["pin-numa"])
    head, journal = run(tmp_path, reach, stated, boots=1)
    state = journal.load().state
    assert get_outcome_code(state) == 1
    by_layout = {step.variant: state.outcomes[step.number] for step in schedule_steps(head)}
    assert by_layout["pin-numa"].what == EntryKind.MISMATCHED
    assert any("guest-nodes" in line for line in by_layout["pin-numa"].findings)
    assert by_layout["pin"].what == EntryKind.MEASURED
    assert any("not as planned" in line for line in stated)
    assert daemon.definition() == ORIGINAL


def test_a_wrong_key_is_named_and_the_rest_goes_on(daemon: StandIn, tmp_path: Path) -> None:
    reach = SimulatedReach(daemon, EQUAL, silent=["pin"])
    head, journal = run(tmp_path, reach, boots=1, answer_s=0.05)
    state = journal.load().state
    by_layout = {step.variant: state.outcomes[step.number] for step in schedule_steps(head)}
    assert by_layout["pin"].what == EntryKind.FAILED
    assert "Permission denied" in by_layout["pin"].detail
    assert "key" in by_layout["pin"].detail
    assert [by_layout[one].what for one in ("default", "pin-numa")] == [EntryKind.MEASURED] * 2
    assert get_outcome_code(state) == 3
    assert daemon.definition() == ORIGINAL
    # With the right key, what failed is tried again, and nothing else.
    before = sum(line.startswith("start") for line in daemon.commands())
    run_whole(trial_of(head, journal, tmp_path / "state", SimulatedReach(daemon, EQUAL)))
    assert sum(line.startswith("start") for line in daemon.commands()) == before + 1
    assert get_outcome_code(journal.load().state) == 0


def test_a_guest_left_running_is_not_another_boot(daemon: StandIn, tmp_path: Path) -> None:
    """The boot that failed comes first where the time is up for the round of the one that runs."""
    layouts = ("default", "pin")
    reach = SimulatedReach(daemon, EQUAL)
    trial = new_trial(tmp_path, reach, layouts=layouts, boots=2, answer_s=0.1)
    head, journal = trial.head, trial.journal
    first, *_, last = schedule_steps(head)[:3]
    trial = replace(trial, reach=SimulatedReach(daemon, EQUAL, silent=(first.variant,)))

    def die_in_the_second_round(progress: object) -> None:
        if last.number in {entry.number for entry in journal.contents()[1]}:
            os._exit(9)

    if (child := os.fork()) == 0:
        run_whole(replace(trial, on_progress=die_in_the_second_round))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    reach = SimulatedReach(daemon, EQUAL)
    run_whole(trial_of(head, journal, tmp_path / "state", reach, within_s=1e-3))
    assert journal.load().state.outcomes[first.number].what == EntryKind.MEASURED


def test_a_layout_that_libvirt_refuses_costs_no_other(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("drops", "<memnode ")  # a libvirt that loses where cells lie
    head, journal = run(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)
    state = journal.load().state
    by_layout = {step.variant: state.outcomes[step.number] for step in schedule_steps(head)}
    assert by_layout["pin-numa"].what == EntryKind.REJECTED
    assert "libvirt changed memory of cell 0" in by_layout["pin-numa"].detail
    assert by_layout["default"].what == EntryKind.MEASURED
    assert get_outcome_code(state) == 3
    assert daemon.definition() == ORIGINAL


def test_a_layout_whose_cores_are_taken_is_not_booted(daemon: StandIn, tmp_path: Path) -> None:
    """Planned when they were free: the host is read again at each boot."""
    reach = SimulatedReach(daemon, EQUAL)
    trial = new_trial(tmp_path, reach, boots=1, layouts=("default", "pin"))
    head, journal = trial.head, trial.journal
    pins = trial.layouts["pin"].plan.vcpu_pins
    other = RunningDomain("other", True, pins[:1], None, (), 0, False, (), None, ())
    now = [load_host("hgx-h100")]  # the state directory of another machine
    with journal.hold() as lock:
        run_trial(replace(trial, read_host=lambda: now[0]), lock)
        assert {one.what for one in journal.load().state.outcomes.values()} == {EntryKind.REJECTED}
        now = [structs.replace(host(), domains=(other,))]
        run_trial(replace(trial, read_host=lambda: now[0]), lock)
    outcomes = journal.load().state.outcomes
    by_layout = {step.variant: outcomes[step.number] for step in schedule_steps(head)}
    assert by_layout["default"].what == EntryKind.MEASURED
    assert by_layout["pin"].what == EntryKind.REJECTED
    assert f"CPUs {pins[0]}" in by_layout["pin"].detail
    assert daemon.definition() == ORIGINAL
    now = [host()]  # that one has gone
    run_whole(replace(trial, read_host=lambda: now[0]))
    assert len(journal.load().state.measured_boots) == 2


def test_a_vm_that_does_not_start_is_named(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("start-fails", "cannot allocate huge pages")
    _, journal = run(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)
    state = journal.load().state
    assert {one.what for one in state.outcomes.values()} == {EntryKind.FAILED}
    assert all("huge pages" in one.detail for one in state.outcomes.values())
    assert daemon.definition() == ORIGINAL


@pytest.mark.parametrize(
    ("fault", "what", "said", "code", "figures"),
    [
        ("code", EntryKind.FAILED, "every test failed", 3, 0),
        ("stream_fails", EntryKind.INCOMPLETE, "stream", 1, 1),
    ],
)
def test_a_boot_with_a_failed_test_is_made_anew(
    fault: str, what: str, said: str, code: int, figures: int, daemon: StandIn, tmp_path: Path
) -> None:
    """Where every program of the suite fails, and where one of them does."""

    class Broken(SimulatedReach):
        def machine(self, uuid: str) -> SimulatedGuest:
            guest = super().machine(uuid)
            setattr(guest, fault, 1)
            return guest

    head, journal = run(tmp_path, Broken(daemon, EQUAL), boots=1, layouts=("pin",))
    state = journal.load().state
    (outcome,) = state.outcomes.values()
    assert (outcome.what, bool(outcome.samples)) == (what, bool(figures))
    assert any(said in one for one in (outcome.detail, *outcome.findings))
    assert (get_outcome_code(state), len(state.with_figures)) == (code, figures)
    assert not state.measured_boots
    run_whole(trial_of(head, journal, tmp_path / "state", SimulatedReach(daemon, EQUAL)))
    assert get_outcome_code(journal.load().state) == 0
    assert [entry.what for entry in journal.load().entries].count(EntryKind.SET_ASIDE) == 1
    assert len(runs_of(head, journal)) == 1


@pytest.mark.parametrize("memory_kib", [b"262144", b"524288"])
def test_a_guest_too_small_for_stream(memory_kib: bytes, daemon: StandIn, tmp_path: Path) -> None:
    """Linux leaves 440 MiB of 512: four fifths of these are less than the 390 of the probe."""
    small = ORIGINAL.replace(b"1048576", memory_kib)
    (daemon.state / "definition.xml").write_bytes(small)
    asked = wanted(tmp_path / "results")
    found = preflight(Virsh(URI), NAME, asked, host(), tmp_path / "state")
    assert len([one for one in found.obstacles if "for STREAM" in one]) == len(LAYOUTS)
    options = replace(asked.measuring.suite, groups=(SuiteGroup.CPU_SINGLE,))
    others = replace(asked, measuring=replace(asked.measuring, suite=options))
    found = preflight(Virsh(URI), NAME, others, host(), tmp_path / "state")
    assert not [one for one in found.obstacles if "for STREAM" in one]


def test_a_guest_that_does_not_shut_down_is_ended(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("deaf", "yes")
    _, journal = run(tmp_path, SimulatedReach(daemon, EQUAL), boots=1, layouts=("pin",))
    (end,) = [one.facts["how"] for one in journal.changes.read_entries() if "how" in one.facts]
    denied = "and poweroff: exit status 1: Interactive authentication required."
    assert "did not shut down" in end and denied in end
    assert not (daemon.state / "id").exists()
    assert daemon.definition() == ORIGINAL


def test_a_full_disk_is_named_and_the_vm_is_as_it_was(daemon: StandIn, tmp_path: Path) -> None:
    blocked = tmp_path / "results"
    blocked.write_text("not a directory: nothing can be written below it")
    head, journal = begun(tmp_path / "state", wanted(blocked, boots=1))
    run_whole(trial_of(head, journal, tmp_path / "state", SimulatedReach(daemon, EQUAL)))
    state = journal.load().state
    assert {one.what for one in state.outcomes.values()} == {EntryKind.FAILED}
    assert get_outcome_code(state) == 3
    assert daemon.definition() == ORIGINAL


@pytest.mark.root
def test_a_full_journal_keeps_no_guest_running(daemon: StandIn, tmp_path: Path) -> None:
    root = tmp_path / "state"
    root.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", root], check=False)
    if mounted.returncode:
        pytest.skip("may not mount here")
    filler = root / "filler"
    line = ChangeEntry(what=ChangeState.UNDONE, kind="pin-threads", subject=UUID)

    class Full(SimulatedReach):
        def equip(self, machine: object) -> None:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 1024)
            with suppress(HostError):  # what is left of the journals' own pages
                while True:
                    journal.note(EntryKind.SET_ASIDE)
            with suppress(HostError):
                while True:
                    DomainStore(root, URI, UUID).journal.write(line)

    try:
        head, journal = begun(root, wanted(tmp_path / "results", boots=1))
        trial = trial_of(head, journal, root, Full(daemon, EQUAL))
        with journal.hold() as lock, pytest.raises(HostError, match="No space left"):
            run_trial(trial, lock)
        assert not (daemon.state / "id").exists(), "the guest is off all the same"
        filler.unlink()
        TrialDomain(Virsh(URI), head, journal, root, 0.2).undo()
        assert daemon.definition() == ORIGINAL
        assert not journal.load().state.to_undo
    finally:
        subprocess.run(["umount", root], check=True)


def test_undo_repairs_what_a_lost_libvirt_left(daemon: StandIn, tmp_path: Path) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)

    class Gone(SimulatedReach):
        def equip(self, machine: object) -> None:
            daemon.put("down", "")
            raise HostError("virsh: Disconnected from qemu:///system due to end of file")

    with pytest.raises(HostError, match="failed to connect"):
        run_whole(replace(trial, reach=Gone(daemon, EQUAL)))
    assert trial.journal.load().state.to_undo
    (daemon.state / "down").unlink()
    trial.domain.undo()
    assert not trial.journal.load().state.to_undo
    assert daemon.definition() == ORIGINAL
    assert not (daemon.state / "id").exists()


def test_ctrl_c_puts_the_vm_back_and_resume_completes(daemon: StandIn, tmp_path: Path) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=2)
    root, journal = trial.root, trial.journal
    count = 0

    class Interrupted(SimulatedReach):
        def equip(self, machine: object) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_whole(replace(trial, reach=Interrupted(daemon, EQUAL)))
    assert daemon.definition() == ORIGINAL
    assert not (daemon.state / "id").exists()
    state = journal.load().state
    assert len(state.measured_boots) == 2
    assert not state.to_undo
    assert find_latest_trial(root, NAME).directory == journal.path
    with pytest.raises(UsageError, match="is unfinished") as raised:
        preflight(Virsh(URI), NAME, wanted(tmp_path / "results", id="other"), host(), root)
    assert "trial resume" in str(raised.value.hint)
    run_whole(trial)
    assert len(journal.load().state.measured_boots) == 6
    assert len(runs_of(trial.head, journal)) == 6


def test_a_running_vm_is_refused_first(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("id", "4")
    with pytest.raises(UsageError, match="it is running"):
        preflight(Virsh(URI), NAME, wanted(tmp_path / "results"), host(), tmp_path / "state")
    assert list_trials(tmp_path / "state") == ()


def test_obstacles_are_found_before_the_first_boot(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("saved", "yes")
    found = preflight(Virsh(URI), NAME, wanted(tmp_path / "results"), host(), tmp_path / "state")
    assert any("managed-save" in one for one in found.obstacles)
    daemon.put("saved", "no")
    asked = wanted(tmp_path / "results")
    pools = (PagePool(2 << 20, 300, 200),)
    nodes = tuple(structs.replace(node, page_pools=pools) for node in host().nodes)
    small = structs.replace(host(), nodes=nodes)
    asked = replace(asked, placing=structs.replace(asked.placing, page_bytes=2 << 20))
    found = preflight(Virsh(URI), NAME, asked, small, tmp_path / "state")
    assert all("huge-pages-short" in " ".join(one.against) for one in found.fitted)
    placing = structs.replace(asked.placing, page_bytes=None, memory_bytes=300 << 30)
    asked = replace(asked, placing=placing)
    found = preflight(Virsh(URI), NAME, asked, small, tmp_path / "state")
    assert [one.tuning is None for one in found.fitted] == [False, True, True]
    assert "memory-short" in found.fitted[0].against[0]
    assert not any(line.startswith(("define", "start")) for line in daemon.commands())


def test_the_host_itself_is_measured_on_the_plans_pus(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homenode.measure.trial import runner
    from tests.bench_machines import FakeMachine
    from tests.simulated_trial import HOST

    machine = FakeMachine(host=HOST)
    monkeypatch.setattr(runner, "LocalMachine", lambda: machine)
    effects = dict.fromkeys(LAYOUTS, 0.9)
    head, journal = run(tmp_path, SimulatedReach(daemon, effects), boots=2, bare=True)
    assert len(journal.load().state.measured_boots) == 8
    used = {call[call.index("--pus") + 1] for call in machine.calls if "--pus" in call}
    assert used <= {"0-1,8-9", "0"}, used
    found = conclusion(head, journal)
    assert found.of_bare is not None
    assert found.of_bare.bare
    shares = [one.ratio for one in found.of_bare.effects if one.metric == "memory-bandwidth"]
    assert shares
    assert all(one < 1.0 for one in shares)


def test_figures_of_emulated_guests_come_to_no_verdict(daemon: StandIn, tmp_path: Path) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, CELLS_HELP), boots=1)
    run_whole(replace(trial, config=replace(trial.config, emulated=True)))
    found = conclusion(trial.head, trial.journal)
    assert found.emulated
    assert found.recommendations == ()
    assert found.commands == {}
