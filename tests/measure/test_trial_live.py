"""Trials on a real libvirt with real guests under TCG: nothing by hand, all of it undone."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from homenode.cli import trial as trial_work
from homenode.measure.results.model import Origin
from homenode.measure.results.store import load_runs
from homenode.measure.trial.journal import BOOT, EntryKind, StoredTrial, TrialJournal, list_trials
from homenode.measure.trial.runner import schedule_steps
from homenode.vm.sources import load_host
from tests.command_line import be_host, homenode
from tests.lab.serial_agent import agent_virsh
from tests.probe_build import make
from tests.trial_guest import NAME, trial_guest
from tests.two_node_libvirt import TwoNodes, two_nodes

pytestmark = [pytest.mark.libvirt, pytest.mark.qemu, pytest.mark.root]


@pytest.fixture(scope="module")
def daemon() -> Iterator[TwoNodes]:
    """A libvirt of two nodes with one domain, whose guest has the probe and a shell."""
    probe = make("homenode-probe-static")
    with two_nodes() as found:
        directory = found.directory
        # The very same program: one that was built again meanwhile would be sent over the line.
        (directory / "probe").write_bytes(probe.read_bytes())
        programs, socket = {"homenode-probe": probe.read_bytes()}, directory / "run" / "agent"
        document = trial_guest(directory, found.emulator, programs, socket)
        agent_virsh(directory, socket)
        defined = found.virsh("define", str(document))
        assert defined.returncode == 0, defined.stderr
        # From its own print, in which what libvirt added stands in its order.
        (directory / "printed.xml").write_text(definition(found))
        assert found.virsh("define", str(directory / "printed.xml")).returncode == 0
        yield found


@pytest.fixture
def state(daemon: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "state"
    monkeypatch.setenv("PATH", f"{daemon.directory}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(trial_work, "default_root", lambda: root)
    be_host(monkeypatch, str(daemon.host))
    return root


def definition(daemon: TwoNodes) -> str:
    return daemon.virsh("dumpxml", "--inactive", "--security-info", NAME).stdout


def options(daemon: TwoNodes, directory: Path, layouts: str, boots: int, *how: str) -> list[str]:
    return [
        *("trial", NAME, "--layouts", layouts, "--boots", str(boots)),
        *"--yes --guest-access agent".split(),
        *"--tests cpu-single,core-to-core --quick --repeat 1".split(),
        *"--boot-timeout 600 --shutdown-timeout 1".split(),
        *(*how, "--connect", daemon.uri, "--probe", str(daemon.directory / "probe")),
        *(f"--results={directory}/results", f"--report={directory}/report.html"),
    ]


def only(state: Path) -> StoredTrial:
    (found,) = list_trials(state)
    return found


def boots(state: Path) -> set[str | None]:
    """libvirt's numbers of the instances that were started."""
    changes = TrialJournal(state, only(state).directory.name).changes.read_entries()
    return {one.facts.get("run_id") for one in changes if one.kind == BOOT} - {None}


@pytest.mark.lab
def test_three_layouts_come_to_their_report(daemon: TwoNodes, state: Path, tmp_path: Path) -> None:
    """One boot of each: a second one of the same layout is that of the guest that dies, below."""
    before = definition(daemon)
    started = time.monotonic()
    done = homenode(*options(daemon, tmp_path, "default,pin,pin-numa", 1, "--in-place"))
    print(f"{time.monotonic() - started:.0f} s")
    assert done.exit_code == 0, done.output
    assert definition(daemon) == before
    assert NAME not in daemon.virsh("list", "--name").stdout
    known = only(state)
    assert known.head is not None
    assert len(known.state.measured_boots) == 3
    assert known.state.ended
    runs = load_runs(tmp_path / "results").runs
    assert sorted(run.head.switches.name for run in runs) == ["default", "pin", "pin-numa"]
    assert {run.head.origin for run in runs} == {Origin.EMULATED}
    assert len({run.head.boots for run in runs}) == 3, "each boot has an identity of its own"
    for step in schedule_steps(known.head):
        name = known.state.outcomes[step.number].run
        (directory,) = (tmp_path / "results").glob(f"*/{name}")
        (capture,) = directory.glob("host*")
        guest = load_host(str(capture))
        assert len(guest.nodes) == (2 if step.variant == "pin-numa" else 1)
    assert "its results are meaningless" in done.output
    page = (tmp_path / "report.html").read_text()
    assert "emulated" in page


def invoked_until(
    what: EntryKind, state: Path, arguments: list[str], then: Callable[[int], object]
) -> int:
    """The command in a process of its own; `then` gets its number once the journal says so."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = homenode(*arguments).exit_code
        finally:
            os._exit(code)
    for _ in range(6000):
        known = list_trials(state)
        if known and any(entry.what == what for entry in known[0].entries):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"it never came to {what}")
    then(child)
    _, how = os.waitpid(child, 0)
    return -os.WTERMSIG(how) if os.WIFSIGNALED(how) else os.WEXITSTATUS(how)


@pytest.mark.nightly
def test_a_killed_tool_loses_no_boot(daemon: TwoNodes, state: Path, tmp_path: Path) -> None:
    before = definition(daemon)
    arguments = options(daemon, tmp_path, "pin-numa", 1, "--in-place")
    code = invoked_until(
        EntryKind.MEASURING, state, arguments, lambda child: os.kill(child, signal.SIGKILL)
    )
    assert code == -signal.SIGKILL
    assert definition(daemon) != before
    assert only(state).state.to_undo
    status = homenode("trial", "status")
    assert "not undone" in status.output
    done = homenode("trial", "resume", NAME, "--probe", str(daemon.directory / "probe"))
    assert done.exit_code == 0, done.output
    assert definition(daemon) == before
    whats = [entry.what for entry in only(state).entries]
    assert len(boots(state)) == 1, "the guest that was there was measured on"
    assert whats.count(EntryKind.MEASURED) == 1
    assert len(load_runs(tmp_path / "results").runs) == 1


@pytest.mark.lab
def test_a_dead_guest_costs_one_boot(daemon: TwoNodes, state: Path, tmp_path: Path) -> None:
    before = definition(daemon)
    arguments = options(daemon, tmp_path, "pin-numa", 1)
    code = invoked_until(
        EntryKind.MEASURING, state, arguments, lambda _: daemon.virsh("destroy", f"{NAME}-trial")
    )
    assert code == 3
    assert definition(daemon) == before
    assert only(state).state.outcomes[0].what == EntryKind.FAILED

    killed = []

    def kill_daemon() -> None:
        for _ in range(6000):
            if len(boots(state)) == 2:
                daemon.kill()
                time.sleep(2)
                daemon.start()
                killed.append(True)
                return
            time.sleep(0.1)

    thread = threading.Thread(target=kill_daemon)
    thread.start()
    resume = ["trial", "resume", NAME, "--probe", str(daemon.directory / "probe")]
    homenode(*resume)
    thread.join(700)
    assert killed
    assert definition(daemon) == before
    if not only(state).state.measured_boots:
        done = homenode(*resume)
        assert done.exit_code == 0, done.output
    assert definition(daemon) == before
    assert daemon.virsh("list", "--all", "--name").stdout.split("\n")[0] == NAME
    assert f"{NAME}-trial" not in daemon.virsh("list", "--all", "--name").stdout
    assert len(load_runs(tmp_path / "results").runs) == 1
