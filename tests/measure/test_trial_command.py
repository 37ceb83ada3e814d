"""homenode trial as a user meets it: what it refuses, shows, and undoes."""

import shutil
import sys
from pathlib import Path

import pytest

from homenode.change.journal import ChangeState
from homenode.cli import trial as trial_work
from homenode.errors import HomenodeError
from homenode.measure.trial.journal import (
    BOOT,
    LAYOUT,
    EntryKind,
    TrialJournal,
    domain_locked,
    list_trials,
)
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL
from tests.command_line import Result, be_host, homenode
from tests.simulated_trial import HOST, SimulatedReach, begun, changed, daemon_in, trial_of, wanted
from tests.virsh_stand_in import URI, UUID, StandIn

WIDE = {"COLUMNS": "100"}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = daemon_in(tmp_path / "daemon")
    monkeypatch.setenv("PATH", f"{found.bin}:/usr/bin:/bin")
    be_host(monkeypatch, HOST)
    monkeypatch.setattr(trial_work, "default_root", lambda: tmp_path / "state")
    return found


def trial(*words: str) -> Result:
    is_begun = words[0] not in ("status", "resume", "undo") and "--dry-run" not in words
    return homenode("trial", *words[:-2], *(["--yes"] if is_begun else []), *words[-2:], env=WIDE)


def refusal(*words: str) -> HomenodeError:
    done = trial(*words)
    assert isinstance(done.exception, HomenodeError), done.output
    return done.exception


HERE = ("--policy", "spread")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("pin,pin --policy spread", "each once", None),
        ("default --bare-metal", "a layout that pins", "default,pin"),
        (",", "--layouts: missing", "default,pin"),
        ("pin --tests x", "--tests", None),
        ("pin --address -oProxyCommand=x", "--address", None),
        ("pin --ssh-user -oX", "--ssh-user", None),
        ("pin --ssh-port 0", "--ssh-port", None),
        ("pin --ssh-key /no/key", "--ssh-key /no/key", None),
        ("pin --app x", "--app requires --metric", None),
        ("pin --connect qemu+ssh://a/system", "--host", "capture"),
    ],
)
def test_what_contradicts_itself_is_refused_with_a_way_out(
    words: str, message: str, hint: str | None, daemon: StandIn
) -> None:
    error = refusal("--in-place", "--layouts", *words.split(), "--", NAME)
    assert error.exit_code == 2
    assert message in str(error)
    if hint is not None:
        assert hint in str(error.hint)
    assert daemon.definition() == ORIGINAL
    assert not (daemon.state / "id").exists()


def test_resuming_refuses_an_address_that_is_an_option(daemon: StandIn) -> None:
    assert "--address" in str(refusal("resume", "--address", "-oX", "--", NAME))


def test_resuming_without_a_trial_says_how_to_list_them(daemon: StandIn) -> None:
    assert "trial status" in str(refusal("resume", "--", NAME).hint)


def test_a_layout_that_does_not_fit_boots_nothing(daemon: StandIn, tmp_path: Path) -> None:
    words = "--layouts default,pin --in-place --page-size 1GiB --reserved-cpus 0-15"
    done = trial(*words.split(), *HERE, "--", NAME)
    assert done.exit_code == 4, done.output
    assert "no VM was started" in done.output
    assert list_trials(tmp_path / "state") == ()


@pytest.mark.parametrize("how", ["--dry-run", "--quick"])
@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("kvm", ("is emulated (type='qemu'): its results would be meaningless", "virsh edit")),
        ("probe", ("homenode-probe-static not found", "make setup")),
        ("disk", ("needs 64 MiB of free disk, 1000 B free", "--results")),
        ("ssh", ("ssh: command not found", "apt install openssh-client")),
        ("agent", ("org.qemu.guest_agent.0", "--guest-access")),
        ("memory", ("STREAM", "--tests")),
    ],
)
def test_what_a_trial_needs_is_looked_at_before_it_asks_and_in_a_dry_run(
    missing: str,
    says: tuple[str, str],
    how: str,
    daemon: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    access = () if missing != "agent" else ("--guest-access", "agent")
    if missing == "kvm":
        monkeypatch.delenv(trial_work.EMULATED)
    elif missing == "probe":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    elif missing == "disk":
        usage = shutil.disk_usage("/")._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    elif missing == "ssh":
        found = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda *a, **k: None if a[0] == "ssh" else found(*a, **k)
        )
    elif missing == "memory":
        daemon.put_definition(ORIGINAL.replace(b"1048576", b"262144"))
    done = trial("--layouts", "pin", "--in-place", how, *access, *HERE, "--", NAME)
    assert done.exit_code == 2
    said = f"{done.output} {done.exception} {getattr(done.exception, 'hint', '')}"
    assert all(text in said for text in says), said
    assert list_trials(tmp_path / "state") == ()


def test_two_trials_of_a_vm_are_not_begun_at_once(daemon: StandIn, tmp_path: Path) -> None:
    words = ("--layouts", "pin", "--in-place", *HERE, "--", NAME)
    with domain_locked(tmp_path / "state", UUID):
        error = refusal(*words)
        assert "is running a trial of this domain" in str(error)
        assert trial("--dry-run", *words).exit_code == 0
    assert list_trials(tmp_path / "state") == ()


def left_behind(daemon: StandIn, tmp_path: Path) -> None:
    """As a kill does: a layout's definition, a guest that runs, and the journal."""
    from homenode.change.apply.definition import apply_definition

    root = tmp_path / "state"
    head, journal = begun(root, wanted(tmp_path / "results", boots=1))
    virsh = Virsh(URI)
    document = trial_of(head, journal, root, SimulatedReach(daemon, {})).layouts["pin"].document
    changed(journal, LAYOUT)
    apply_definition(virsh, UUID, document, virsh.read_definition(UUID), root)
    changed(journal, LAYOUT, ChangeState.DONE)
    changed(journal, BOOT)
    virsh.start(UUID)


def test_status_says_what_is_left_and_undo_takes_it_back(daemon: StandIn, tmp_path: Path) -> None:
    left_behind(daemon, tmp_path)
    shown = trial("status")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"{NAME}: 0 of 3 boots measured, some steps are not undone")
    assert "its guest may be running (boot 1)" in shown.output
    assert f"undo     homenode trial undo {UUID}" in shown.output
    assert daemon.definition() != ORIGINAL
    done = trial("undo", "--shutdown-timeout", "0.2", "--", NAME)
    assert done.exit_code == 0, done.output
    assert daemon.definition() == ORIGINAL
    assert not (daemon.state / "id").exists()
    assert "no step to undo" in trial("status").output
    assert "no step to undo" in trial("undo", "--", NAME).output


def test_status_of_a_running_trial_says_that_it_runs(daemon: StandIn, tmp_path: Path) -> None:
    left_behind(daemon, tmp_path)
    (known,) = list_trials(tmp_path / "state")
    assert known.head is not None
    with TrialJournal(tmp_path / "state", known.head.id).hold():
        shown = trial("status").output
    assert "another homenode is running it now" in shown
    assert "trial undo" not in shown
    assert "another homenode is running it now" not in trial("status").output


def test_status_of_one_name_shows_its_last_trial(daemon: StandIn, tmp_path: Path) -> None:
    root = tmp_path / "state"
    for name in ("first", "second"):
        _, journal = begun(root, wanted(tmp_path / "results", boots=1, id=name))
        journal.note(EntryKind.ENDED)
    shown = trial("status", "--", NAME)
    assert "trial  second" in shown.output
    assert "trial  first" not in shown.output
    assert f"homenode trial resume {UUID}" in shown.output
    shown = trial("status", "first")
    assert "trial  first" in shown.output
    assert "homenode trial resume first" in shown.output, "by the id: the VM has a later trial"


def test_status_without_any_trial_is_no_error(daemon: StandIn, tmp_path: Path) -> None:
    assert trial("status").exit_code == 0


def test_an_instance_of_somebody_is_left_alone(daemon: StandIn, tmp_path: Path) -> None:
    left_behind(daemon, tmp_path)
    (known,) = list_trials(tmp_path / "state")
    assert known.head is not None
    journal = TrialJournal(tmp_path / "state", known.head.id)
    changed(journal, BOOT, ChangeState.DONE, run_id="1")
    daemon.put("id", "9")
    error = refusal("undo", "--shutdown-timeout", "0.2", "--", NAME)
    assert "not shut off" in str(error)
    assert daemon.get("id") == "9"
    assert "some steps are not undone" in trial("status").output


def test_without_a_static_probe_it_says_how_to_make_one(daemon: StandIn, tmp_path: Path) -> None:
    dynamic = tmp_path / "probe"
    dynamic.write_bytes(Path("/bin/ls").read_bytes())
    error = refusal("--layouts", "pin", "--in-place", "--probe", str(dynamic), *HERE, "--", NAME)
    assert error.exit_code == 2
    assert "make -C native static" in str(error.hint)
    assert list_trials(tmp_path / "state") == ()


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_without_the_reports_library_a_trial_is_none_the_worse(
    is_asked_for: bool, daemon: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only whoever asked for the report by name hears of it in the exit code."""
    monkeypatch.setattr(trial_work, "GuestReach", lambda *_: SimulatedReach(daemon, {"pin": 1.0}))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    probe, report = tmp_path / "probe", tmp_path / "report.html"
    probe.write_text("put there by the reach, which is simulated")
    words = "--layouts pin --boots 1 --in-place --tests cpu-single --quick --repeat 1".split()
    words += ["--probe", str(probe), "--shutdown-timeout", "0.2", *HERE]
    words += [f"--results={tmp_path}/results", *([f"--report={report}"] if is_asked_for else [])]
    done = trial(*words, "--", NAME)
    assert done.exit_code == (3 if is_asked_for else 0), done.output
    assert "no report: report: Python package jinja2 is not installed" in done.output
    assert daemon.definition() == ORIGINAL
    (known,) = list_trials(tmp_path / "state")
    assert known.state.ended
    assert known.state.measured_boots == {0}
