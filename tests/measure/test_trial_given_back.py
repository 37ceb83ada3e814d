"""What a trial must not take or leave changed: another's boot, edit, files and definitions."""

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.change.apply.definition import (
    apply_definition,
    read_saved_original,
    restore_definition,
)
from homenode.change.journal import ChangeState
from homenode.errors import InputError, UsageError
from homenode.measure.results.store import load_runs
from homenode.measure.trial import guest
from homenode.measure.trial.boot_steps import TrialDomain, hold_interrupts
from homenode.measure.trial.journal import (
    BOOT,
    COPY,
    LAYOUT,
    EntryKind,
    TrialCopy,
    TrialHead,
    TrialJournal,
    list_trials,
)
from homenode.measure.trial.prepare import find_latest_trial, preflight, prepare
from homenode.vm.domain.merge import is_same_definition
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.simulated_trial import (
    SimulatedGuest,
    SimulatedReach,
    begun,
    changed,
    host,
    new_trial,
    run_whole,
    trial_of,
    wanted,
)
from tests.virsh_stand_in import URI, UUID, StandIn

EQUAL = {"default": 1.0, "pin": 1.0, "pin-numa": 1.0}
BOOT_A, BOOT_B = "host boot a", "host boot b"


def run_one(root: Path, results: Path, reach: SimulatedReach) -> tuple[TrialHead, TrialJournal]:
    head, journal = begun(root, wanted(results, boots=1, layouts=("pin-numa",)))
    run_whole(trial_of(head, journal, root, reach))
    return head, journal


def test_a_vm_that_had_a_layout_applied_has_it_again(daemon: StandIn, tmp_path: Path) -> None:
    root, virsh = tmp_path / "state", Virsh(URI)
    apply_definition(virsh, UUID, tuned("pin"), virsh.read_definition(UUID), root)
    applied = daemon.definition()
    assert applied != ORIGINAL
    _, journal = run_one(root, tmp_path / "results", SimulatedReach(daemon, EQUAL))
    assert len(journal.load().state.measured_boots) == 1
    assert is_same_definition(daemon.definition(), applied)
    assert not journal.load().state.to_undo
    restore_definition(virsh, UUID, root)
    assert daemon.definition() == ORIGINAL, "and its first definition is still known"


def test_an_old_record_and_an_edit_are_no_obstacle(daemon: StandIn, tmp_path: Path) -> None:
    """Killed between the journal's line and what it shows, over an edit after an old restore."""
    root, virsh = tmp_path / "state", Virsh(URI)
    apply_definition(virsh, UUID, tuned("pin"), virsh.read_definition(UUID), root)
    restore_definition(virsh, UUID, root)
    edited = ORIGINAL.replace(b"<iothreads>1<", b"<iothreads>2<")
    (daemon.state / "definition.xml").write_bytes(edited)
    head, journal = begun(root, wanted(tmp_path / "results", boots=1))
    changed(journal, LAYOUT)
    TrialDomain(virsh, head, journal, root, 0.2).undo()
    assert daemon.definition() == edited
    assert not journal.load().state.to_undo


def test_a_vm_that_was_edited_is_not_resumed(daemon: StandIn, tmp_path: Path) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)
    edited = ORIGINAL.replace(b"<iothreads>1<", b"<iothreads>2<")
    (daemon.state / "definition.xml").write_bytes(edited)
    with pytest.raises(InputError, match="edited since") as raised:
        run_whole(trial)
    assert "trial undo" in str(raised.value.hint)
    assert daemon.definition() == edited
    assert not any(line.startswith("start") for line in daemon.commands())


def test_a_boot_of_somebody_else_is_left_alone(daemon: StandIn, tmp_path: Path) -> None:
    daemon.put("start-fails", "domain is already running")
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=1, layouts=("pin",))

    class Raced(Virsh):
        def start(self, uuid: str, kept_open: object = ()) -> None:
            daemon.put("id", "77")
            super().start(uuid)

    with pytest.raises(UsageError, match="not shut off"):
        run_whole(replace(trial, virsh=Raced(URI)))
    assert daemon.get("id") == "77"
    assert trial.journal.load().state.change(BOOT) is None


def test_a_number_from_before_the_host_was_started_anew_is_nobodys(
    daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=1)
    journal = trial.journal
    monkeypatch.setattr(guest, "get_host_boot", lambda virsh: BOOT_B)
    changed(journal, BOOT, ChangeState.DONE, host_boot=BOOT_A, run_id="1")
    daemon.put("id", "1")  # started with the host, and the first there too
    trial.domain.undo()
    assert daemon.get("id") == "1"
    assert not journal.load().state.to_undo
    stopped = [one.facts.get("how") for one in journal.changes.read_entries()]
    assert stopped[-1:] == ["was off: the host was started again since"]
    changed(journal, BOOT, ChangeState.DONE, host_boot=BOOT_B, run_id="1")
    trial.domain.undo()
    assert not (daemon.state / "id").exists(), "in the same boot of the host it is ours"


def test_a_trial_of_a_used_name_writes_nothing(daemon: StandIn, tmp_path: Path) -> None:
    root = tmp_path / "state"
    _, journal = run_one(root, tmp_path / "results", SimulatedReach(daemon, EQUAL))
    before = {path.name: path.read_bytes() for path in journal.path.iterdir() if path.is_file()}
    asked = wanted(tmp_path / "elsewhere", boots=2, layouts=("pin", "pin-numa"))
    checked = preflight(Virsh(URI), NAME, asked, host(), root)
    with journal.hold(), pytest.raises(UsageError, match="a trial of this name exists"):
        prepare(checked, journal)
    after = {path.name: path.read_bytes() for path in journal.path.iterdir() if path.is_file()}
    assert after == before


def test_nothing_of_a_copy_is_remembered_once_it_is_gone(daemon: StandIn, tmp_path: Path) -> None:
    """Else the next copy, of the same UUID but other disks, would be mistaken for edited."""
    root, virsh = tmp_path / "state", Virsh(URI)
    head, journal = begun(root, wanted(tmp_path / "results", boots=1))
    head = replace(head, copy=TrialCopy(UUID, NAME, ()))
    for by_hand in (False, True):
        (daemon.state / "undefined").unlink(missing_ok=True)
        (daemon.state / "definition.xml").write_bytes(ORIGINAL)
        changed(journal, COPY, ChangeState.DONE)
        changed(journal, LAYOUT)
        apply_definition(virsh, UUID, tuned("pin"), virsh.read_definition(UUID), root)
        if by_hand:
            virsh.undefine(UUID)
        TrialDomain(virsh, head, journal, root, 0.2).undo()
        assert (daemon.state / "undefined").exists()
        (daemon.state / "undefined").unlink()
        assert read_saved_original(virsh, UUID, root) is None
        assert not journal.load().state.to_undo


def test_a_copy_is_not_booted_while_its_original_runs(daemon: StandIn, tmp_path: Path) -> None:
    trial = new_trial(tmp_path, SimulatedReach(daemon, EQUAL), boots=1, layouts=("pin",))
    head, journal = replace(trial.head, copy=TrialCopy(UUID, NAME, ())), trial.journal
    changed(journal, COPY, ChangeState.DONE)
    daemon.put("id", "5")

    class Kept(Virsh):
        def undefine(self, uuid: str) -> None:
            """The stand-in has one domain, which is both here."""

    run_whole(replace(trial, head=head, copy=None, virsh=Kept(URI)))
    (outcome,) = journal.load().state.outcomes.values()
    assert outcome.what == EntryKind.FAILED
    assert "back the copy's disks" in outcome.detail
    assert daemon.get("id") == "5"


def test_figures_of_a_restarted_guest_are_set_aside(daemon: StandIn, tmp_path: Path) -> None:
    class Restarting(SimulatedReach):
        def machine(self, uuid: str) -> SimulatedGuest:
            found = super().machine(uuid)
            bandwidth = found._bandwidth

            def restarted(argv: object) -> str:
                found.boot = "another boot"
                return bandwidth(argv)  # type: ignore[arg-type]

            found._bandwidth = restarted  # type: ignore[method-assign]
            return found

    head, journal = run_one(tmp_path / "state", tmp_path / "results", Restarting(daemon, EQUAL))
    (outcome,) = journal.load().state.outcomes.values()
    assert outcome.what == EntryKind.FAILED
    assert "stay in its boot" in outcome.detail
    assert list((journal.path / "set-aside").iterdir())
    assert not list((tmp_path / "results").glob(f"*/{head.id}-*"))
    run_whole(trial_of(head, journal, tmp_path / "state", SimulatedReach(daemon, EQUAL)))
    assert len(load_runs(tmp_path / "results").runs) == 1


def test_a_second_interrupt_is_reported_and_only_a_third_one_ends_the_run() -> None:
    stated: list[str] = []
    with hold_interrupts(stated.append):
        os.kill(os.getpid(), signal.SIGINT)
        assert len(stated) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert "once more" in stated[0]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_does_not_stop_the_undo(daemon: StandIn, tmp_path: Path) -> None:
    stated: list[str] = []

    class Interrupted(SimulatedReach):
        def equip(self, machine: object) -> None:
            raise KeyboardInterrupt

    trial = new_trial(tmp_path, Interrupted(daemon, EQUAL), boots=1, layouts=("pin",))
    journal = trial.journal

    class Impatient(Virsh):
        def read_definition(self, uuid: str) -> bytes:
            found = super().read_definition(uuid)
            if any(one.what is ChangeState.UNDOING for one in journal.changes.read_entries()):
                os.kill(os.getpid(), signal.SIGINT)
                Impatient.read_definition = Virsh.read_definition  # type: ignore[method-assign]
            return found

    with pytest.raises(KeyboardInterrupt):
        run_whole(replace(trial, notify=stated.append, virsh=Impatient(URI)))
    assert daemon.definition() == ORIGINAL
    assert not journal.load().state.to_undo
    assert any("being restored" in line for line in stated)


def test_a_damaged_journal_is_named_with_another_way_back(daemon: StandIn, tmp_path: Path) -> None:
    root = tmp_path / "state"
    head, journal = begun(root, wanted(tmp_path / "results", boots=1))
    path = journal.path / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b"\x00\x00\n")
    with pytest.raises(InputError, match="expected a line of JSON") as raised:
        find_latest_trial(root, head.id)
    assert "homenode restore" in str(raised.value.hint)
    assert (journal.path / "original.xml").read_bytes().strip() == ORIGINAL.strip()
    assert list_trials(root)[0].reason is not None
