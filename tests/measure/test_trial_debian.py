"""Trials of an installed Debian that is reached by ssh: an end in one sentence, and no traces."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from homenode.cli import trial as trial_work
from homenode.measure.trial.journal import EntryKind, list_trials
from tests.command_line import Result, homenode
from tests.debian_guest import NAME, DebianVm, debian_vm, virsh
from tests.probe_build import make
from tests.processes import code_of, start_child

pytestmark = [pytest.mark.libvirt, pytest.mark.qemu, pytest.mark.root]

KILLS = int(os.environ.get("HOMENODE_KILLS", "20"))
SEED = int(os.environ.get("HOMENODE_SEED", "20261129"))
BOOT_S = 900
"""Until a guest answers: half a minute where nothing else runs."""


@pytest.fixture(scope="module")
def debian() -> Iterator[DebianVm]:
    with debian_vm() as vm:
        yield vm


@pytest.fixture
def vm(debian: DebianVm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DebianVm:
    monkeypatch.setattr(trial_work, "default_root", lambda: tmp_path / "state")
    # What a killed homenode leaves among temporary files is seen here.
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    debian.define()
    return debian


def begin(
    vm: DebianVm,
    directory: Path,
    *more: str,
    user: str = "root",
    layout: str = "pin",
    boot_s: int = BOOT_S,
    stop_s: int = 1,
) -> Result:
    """The trial of docs/howto/run-a-trial.md, with a single boot and a single test."""
    return homenode(
        *f"trial {NAME} --within 1h --ssh-user {user} --ssh-key {vm.key} --yes".split(),
        *f"--layouts {layout} --boots 1 --tests cpu-single --quick --repeat 1".split(),
        *f"--boot-timeout {boot_s} --shutdown-timeout {stop_s}".split(),
        *(f"--results={directory}/results", "--probe", str(make("homenode-probe-static")), *more),
    )


def outcome(directory: Path) -> tuple[str, str]:
    """What the only boot came to."""
    (trial,) = list_trials(directory / "state")
    (entry,) = trial.state.outcomes.values()
    return entry.what, entry.detail


def check_ended(vm: DebianVm, directory: Path, before: dict[str, str]) -> None:
    assert vm.traces() == before
    assert not any(trial.state.to_undo for trial in list_trials(directory / "state"))
    assert not list((directory / "temporary").iterdir())


@contextmanager
def when_measuring(directory: Path, work: Callable[[], str]) -> Iterator[list[str]]:
    """Do the work in a thread as soon as the first guest is measured; gives what it returned."""
    results: list[str] = []
    ended = threading.Event()

    def wait() -> None:
        while not ended.wait(0.2):
            trials = list_trials(directory / "state")
            if trials and any(entry.what == EntryKind.MEASURING for entry in trials[0].entries):
                results.append(work())
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield results
    finally:
        ended.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "timeout_s"),
    [("", 3), pytest.param("systemd.mask=ssh.service", 120, marks=pytest.mark.lab)],
    ids=["still boots", "no sshd"],
)
def test_a_silent_guest_is_ended(vm: DebianVm, tmp_path: Path, words: str, timeout_s: int) -> None:
    vm.define(words)
    before = vm.traces()
    # No layout that needs free cores: other domains of this libvirtd may be pinned to them all.
    done = begin(vm, tmp_path, layout="default", boot_s=timeout_s)
    print(done.output)
    assert done.exit_code == 3
    what, detail = outcome(tmp_path)
    assert what == EntryKind.FAILED
    assert f"did not answer within {timeout_s} s" in detail
    assert "no conclusion" in done.stdout
    check_ended(vm, tmp_path, before)


@pytest.mark.lab
def test_programs_leave_a_guest_without_python(vm: DebianVm, tmp_path: Path) -> None:
    """In place, where its disk keeps what is left on it, by a user whose login shell is csh."""
    assert "python3" not in vm.guest_files("/usr/bin")
    before = vm.traces()
    with when_measuring(tmp_path, lambda: vm.ssh("ls /tmp", "tcsh")) as seen:
        done = begin(vm, tmp_path, "--in-place", user="tcsh", stop_s=600)
    print(done.output)
    assert done.exit_code in (0, 5), done.output
    assert outcome(tmp_path)[0] == EntryKind.MEASURED
    assert "homenode-" in seen[0]
    for directory in ("/tmp", "/var/tmp", "/root", "/home/tcsh"):
        assert not [name for name in vm.guest_files(directory) if name.startswith("homenode")]
    disk = str(vm.directory / "disk.ext4")
    check_ended(vm, tmp_path, before | {disk: vm.traces()[disk]})


@pytest.mark.lab
@pytest.mark.parametrize(
    ("words", "directory"), [("", "/tmp"), ("homenode.full", "/dev/shm")], ids=["", "disk full"]
)
def test_a_plain_user_measures(vm: DebianVm, tmp_path: Path, words: str, directory: str) -> None:
    """A guest with a full disk is measured in its memory."""
    vm.define(words)
    before = vm.traces()

    def look() -> str:
        copy = tmp_path / "copy.xml"
        copy.write_text(virsh("dumpxml", f"{NAME}-trial").stdout)
        guest = f"ssh:bench@{vm.address()}"
        argv = (sys.executable, "-m", "homenode.cli.main", "verify", str(copy), "--guest", guest)
        environment = vm.ssh_environment(tmp_path / "bin")
        verified = subprocess.run(argv, env=environment, capture_output=True, text=True)
        listed = vm.ssh(f"id -u; ls {directory}; df /", "bench")
        return f"{verified.stdout}{verified.stderr}{listed}"

    with when_measuring(tmp_path, look) as seen:
        done = begin(vm, tmp_path, user="bench")
    print(done.output, seen)
    assert outcome(tmp_path)[0] == EntryKind.MEASURED
    assert "facts equal, 0 unknown, 0 different" in seen[0]
    assert "\n1000\n" in seen[0] and "homenode-" in seen[0]
    assert ("100%" in seen[0]) == bool(words)
    check_ended(vm, tmp_path, before)


@pytest.mark.lab
def test_a_guest_that_restarts_itself_is_not_measured(vm: DebianVm, tmp_path: Path) -> None:
    before = vm.traces()
    with when_measuring(tmp_path, lambda: vm.ssh("systemctl --force --force reboot")):
        done = begin(vm, tmp_path)
    print(done.output)
    assert done.exit_code == 3
    what, detail = outcome(tmp_path)
    assert what == EntryKind.FAILED
    # Where its connection was closed, or at the end, by the identity of its boot.
    assert "restart" in detail
    assert "no conclusion" in done.stdout
    check_ended(vm, tmp_path, before)


@pytest.mark.lab
def test_a_kill_at_any_moment_can_be_undone(vm: DebianVm, tmp_path: Path) -> None:
    before = vm.traces()
    choose = random.Random(SEED)
    started = time.monotonic()
    assert begin(vm, tmp_path).exit_code in (0, 5)
    longest_s = time.monotonic() - started
    late = 0
    for number in range(KILLS):
        child = start_child(partial(begin, vm, tmp_path, "--name", f"kill-{number}"))
        time.sleep(choose.uniform(0, longest_s))
        listed = Path(f"/proc/{child}/task/{child}/children").read_text().split()
        for process in (*(map(int, listed) if choose.random() < 0.5 else ()), child):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        late += code_of(child) >= 0
        if list_trials(tmp_path / "state", f"kill-{number}"):
            finish("resume" if choose.random() < 0.2 else "undo", vm)
        check_ended(vm, tmp_path, before)
    print(f"seed {SEED}: {KILLS} kills, {late} too late")
    assert late <= KILLS // 2


def finish(action: str, vm: DebianVm) -> None:
    """To its end, past a virsh that was left behind."""
    words = ["--probe", str(make("homenode-probe-static"))] if action == "resume" else []
    deadline = time.monotonic() + 120
    while True:
        done = homenode("trial", action, NAME, *words)
        if "another homenode is running" not in str(done.exception):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert done.exit_code in (0, 5), (done.output, done.exception)
