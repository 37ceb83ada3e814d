"""Another host, and a Kubernetes job, as places of bench."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.errors import UsageError
from homenode.measure.access.remote import RemoteHost, SshHost
from homenode.measure.model import PROBE
from homenode.measure.results.store import read_run
from homenode.process import ToolMissingError
from tests.processes import is_running, wait_for
from tests.ssh_daemon import ssh_daemon

HELD = b'#!/bin/sh\necho $$ >"$1"\nexec sleep 300\n'


pytestmark = pytest.mark.root


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ssh_daemon(tmp_path, monkeypatch) as port:
        yield f"ssh://root@127.0.0.1:{port}"


def host_at(on: str, run: str, probe: bytes = HELD) -> RemoteHost:
    return RemoteHost(SshHost(on), run, probe)


@pytest.mark.nightly
def test_a_run_elsewhere_is_a_run_like_any_other(on: str, tmp_path: Path) -> None:
    words = f"bench --name far --on {on} --quick --repeat 1 --tests cpu-single".split()
    probe = next(Path(__file__).parents[2].glob("build/probe/homenode-probe-static"), None)
    assert probe is not None, "make probe"
    program = (sys.executable, "-m", "homenode.cli.main", *words, "--probe", str(probe))
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    (directory,) = (tmp_path / "results").glob("*/far")
    run = read_run(directory)
    assert run.samples


@pytest.mark.lab
def test_what_runs_since_a_kill_is_ended_by_who_continues(on: str, tmp_path: Path) -> None:
    first = host_at(on, str(tmp_path)).with_descriptor(os.open(os.devnull, os.O_RDONLY))
    pid_file = tmp_path / "pid"

    ended: list[int] = []

    def killed_meanwhile() -> None:
        ended.append(first.run((PROBE, str(pid_file)), 200).returncode)

    thread = threading.Thread(target=killed_meanwhile)
    thread.start()
    wait_for(lambda: pid_file.exists() and bool(pid_file.read_text()))
    pid = int(pid_file.read_text())
    again = host_at(on, str(tmp_path)).with_descriptor(os.open(os.devnull, os.O_RDONLY))
    assert not is_running(pid)
    thread.join()
    assert ended == [-signal.SIGKILL]
    with pytest.raises(ToolMissingError):
        again.run(("no-such-program",), 20)
    assert again.run(("cat",), 20, "from here").stdout == "from here"
    again.clean_up()


@pytest.mark.lab
def test_a_process_of_another_start_is_not_ended(on: str, tmp_path: Path) -> None:
    host = host_at(on, str(tmp_path)).with_descriptor(os.open(os.devnull, os.O_RDONLY))
    directory = host.run(("sh", "-c", f"dirname $(command -v {PROBE} || echo $0)"), 20)
    assert directory.returncode == 0
    other = subprocess.Popen(("sleep", "60"), start_new_session=True)
    step = Path(host.put_program(PROBE, HELD)).with_name("step.running")
    step.write_text(f"{other.pid} {other.pid} 1\n")
    host.clean_up()
    assert other.poll() is None
    other.kill()
    assert not step.parent.exists()


@pytest.mark.parametrize(
    "url",
    ["ssh://", "ssh://-oProxyCommand=x", "ssh://a b", "http://gpu7", "kubernetes://n1"],
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--on"):
        SshHost(url)
