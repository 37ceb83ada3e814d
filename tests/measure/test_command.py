"""homenode bench, as its users call it."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, ParseError, UsageError
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.measure.environment import is_virtual
from homenode.measure.model import AppCommand
from homenode.measure.results.model import Switches
from homenode.measure.results.store import read_run
from homenode.measure.results.vantage import Vantage
from homenode.measure.runner import read_metric
from tests import probe_documents
from tests.command_line import Result, homenode
from tests.processes import wait_for, wait_for_end, write_program

SHORT = (*"--quick --repeat 1 --tests cpu-single,core-to-core --context host --force".split(),)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a probe that answers at once, whatever it is asked; we are above it."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "tools"
    directory.mkdir()
    for name in ("throughput", "core-to-core"):
        pus = "0" if name == "throughput" else "0-1"
        text = probe_documents.answer(["homenode-probe", name, "--pus", pus])
        (directory / f"{name}.json").write_text(text)
    write_program(directory / "homenode-probe", f'#!/bin/sh\nexec cat "{directory}/$1.json"\n')
    return directory


def environment(probe: Path) -> dict[str, str]:
    path = f"{probe}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "100", "TERM": "xterm"}


def bench(probe: Path, *words: str) -> Result:
    return homenode("bench", "--name", *words, env=environment(probe), whole=True)


def test_a_run_is_shown_stored_and_refused_a_second_time(probe: Path) -> None:
    done = bench(probe, "mine", *SHORT, "--layout", "pin", "--boot", "b1", "--arrangement", "q")
    assert done.exit_code in (0, 1), done.stderr  # 1: this machine is busy, say
    assert "one thread" in done.stdout
    assert "wrote results/cpu-only/mine" in done.stderr or "wrote results/" in done.stderr
    (directory,) = (probe.parent / "results").glob("*/mine")
    head = read_run(directory).head
    assert (head.vantage, head.boots, head.arrangement) == (Vantage.HOST, ("b1",), "q")
    assert head.switches.name == "pin"
    assert "\x1b" not in done.stdout + done.stderr
    assert "2 of 3 steps done: cpu-single, " in done.stderr  # a batch job's log shows that
    again = bench(probe, "mine", *SHORT)
    assert again.exit_code == 2
    assert "a run of this name exists" in again.stderr
    other = bench(probe, "mine", *SHORT, "--resume", "--seed", "9", "--boot", "b1")
    assert other.exit_code == 2
    assert "seed 1 before, 9 now" in other.stderr


def test_json_is_the_findings_and_nothing_else(probe: Path) -> None:
    done = bench(probe, "mine", *SHORT, "--json")
    document = json.loads(done.stdout)
    assert document["format"] == "homenode.findings/1"
    bad = any(one["severity"] in ("critical", "warning") for one in document["findings"])
    assert done.exit_code == int(bad)


def test_a_dry_run_shows_every_step_and_runs_none(probe: Path) -> None:
    done = bench(probe, "mine", *SHORT, "--dry-run")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("cpu-single (control)") == 2
    assert "homenode-probe core-to-core" in done.stdout
    assert "about" in done.stdout
    assert not (probe.parent / "results").exists()


def test_the_users_own_program_needs_no_shell(probe: Path) -> None:
    words = r"mine --quick --repeat 1 --context host --force --lower-is-better --metric"
    done = bench(probe, *words.split(), r"([0-9.]+) s$", "--app", "echo 'took $HOME 2.5 s'")
    assert done.exit_code in (0, 1), done.stderr
    (directory,) = (probe.parent / "results").glob("*/mine")
    assert read_run(directory).head.switches == Switches(None, None, None, None, None)
    samples = [one for one in read_run(directory).samples if one.metric == "app-time:echo"]
    assert [one.value for one in samples] == [2.5e9]
    (output,) = (directory / "raw").glob("*-app.txt")
    assert output.read_text() == "took $HOME 2.5 s\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mine", "--app", "true"), "--app requires --metric"),
        (("mine", "--app", "'", "--metric", "(a)"), "--app: not a command"),
        (("mine", "--app", "true", "--metric", "a"), "expected one group"),
        (("mine", "--cpus", "0-"), "--cpus"),
        (("mine", "--cpus", "60000"), "--cpus 60000: expected CPUs of"),
        (("mine", "--nccl-max-msg", "1"), "is out of range (8 B to 1 TiB)"),
        (("../mine", *SHORT), "cannot name a directory"),
        ((".mine", *SHORT), "no leading dot"),
        (("m" * 121, *SHORT), "1 to 120 characters"),
        (("mine", "--plan", "absent.json"), "absent.json: no such file"),
        (("mine", "--domain", "vm.xml"), "--domain requires --plan"),
        (("mine", "--resume", *SHORT, "--results", "elsewhere"), "no run to continue"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: tuple[str, ...], says: str, probe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{probe}:{os.environ['PATH']}")
    monkeypatch.chdir(probe.parent)
    result = homenode("bench", "--name", *words)
    assert isinstance(result.exception, HomenodeError)
    assert says in str(result.exception)
    assert result.exception.exit_code == 2


def test_ctrl_c_says_how_to_go_on_and_that_works(probe: Path) -> None:
    script = probe / "homenode-probe"
    fast = script.read_text()
    script.write_text(fast.replace("exec", "test $1 = throughput || sleep 30\nexec"))
    words = [sys.executable, "-m", "homenode.cli.main", "bench", "--name", "it's mine", *SHORT]
    leader, follower = pty.openpty()
    given = {"env": environment(probe), "cwd": probe.parent, "start_new_session": True}
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=follower, **given)  # type: ignore[call-overload]
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + 300
    while b"core-to-core" not in shown and time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            shown += os.read(leader, 65536)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=300)
    while select.select([leader], [], [], 0.2)[0]:
        try:
            shown += os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
    os.close(leader)
    assert child.returncode == 130
    text = " ".join(shown.decode("utf-8", "replace").split())
    assert "left" in text, "a bar with the time left, on a terminal"
    assert "Continue: homenode bench" in text
    assert "--resume" in text
    script.write_text(fast)
    done = bench(probe, "it's mine", *SHORT, "--resume")
    assert done.exit_code in (0, 1), done.stderr
    (directory,) = (probe.parent / "results").glob("*/it's mine")
    metrics = {one.metric for one in read_run(directory).samples}
    assert metrics == {"cpu-single", "core-to-core-latency"}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_kill_leaves_no_test_running(sent: signal.Signals, probe: Path) -> None:
    """A batch system's way to end a job: what ran then would run on next to what comes next."""
    child, number = started(probe)
    child.send_signal(sent)
    _, said = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "Continue: homenode bench" in said
    wait_for_end(number)  # whoever adopts it buries it a moment later


def test_a_run_outlives_the_terminal_that_nohup_keeps_it_from(probe: Path) -> None:
    child, _ = started(probe, "nohup")
    try:
        child.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=1)
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=300)


def started(probe: Path, *before: str) -> tuple["subprocess.Popen[str]", int]:
    """A run in the midst of the user's program, and the number of that program."""
    number = probe / "number"
    work = f'echo $$ >"{number}.part" && mv "{number}.part" "{number}" && exec sleep 600'
    words = (*"mine --quick --repeat 1 --context host --force --app".split(), f"sh -c '{work}'")
    command = "-m homenode.cli.main bench --metric (x) --name".split()
    child = subprocess.Popen(
        [*before, sys.executable, *command, *words],
        env=environment(probe),
        cwd=probe.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    wait_for(number.exists)
    return child, int(number.read_text())


def test_a_program_that_hangs_is_stopped_when_its_time_is_up(probe: Path) -> None:
    words = "mine --quick --repeat 1 --context host --force --metric (x) --app-timeout 1 --app"
    done = bench(probe, *words.split(), "sleep 60")
    assert "sleep: no end after 1 s" in done.stdout


def test_a_dry_run_refuses_what_the_run_would(probe: Path) -> None:
    for words, says in (
        (("../x", *SHORT), "cannot name a directory"),
        (("x", "--app", "true", "--metric", "("), "expected a regular expression"),
        (("x", "--json"), "--dry-run and --json cannot be used together"),
    ):
        done = bench(probe, *words, "--dry-run")
        assert (done.exit_code, says in done.stderr) == (2, True)


def test_a_pattern_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homenode.measure.runner.SEARCH_S", 0.5)
    order = AppCommand(("true",), r"((?:a+)+)$")
    with pytest.raises(ParseError, match="a match within"):
        read_metric(order, "a" * 60 + "!\n")


@pytest.mark.parametrize(
    ("output", "value"),
    [("x 1\nx 2.5\n", 2.5), ("x 1,234.5\n", 1234.5), ("x 7", 7.0), ("x 1e3\nnothing\n", 1000.0)],
)
def test_the_last_figure_of_an_output_counts(output: str, value: float) -> None:
    assert read_metric(AppCommand(("true",), "x ([0-9.,e]+)"), output) == value


@pytest.mark.parametrize("output", ["", "nothing\n", "x ...\n", "x 0\n", "x 1,5\n"])
def test_an_output_without_a_figure_is_refused(output: str) -> None:
    with pytest.raises(ParseError, match="expected"):
        read_metric(AppCommand(("true",), "x ([0-9.,]+)"), output)


def test_a_vm_is_not_measured_as_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_virtual(LiveSnapshot()):
        pytest.skip("this machine is no virtual one")
    monkeypatch.chdir(tmp_path)
    words = ("x", "--quick", "--repeat", "1", "--tests", "cpu-single", "--context", "host")
    result = homenode("bench", "--name", *words)
    assert isinstance(result.exception, UsageError)
    assert "found a virtual machine" in result.exception.message
    assert not list(tmp_path.iterdir())
