"""Another host, and a Kubernetes job, as places of bench."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.cluster.kubevirt import job_channel
from homenode.cluster.kubevirt.job_channel import JobChannel
from homenode.errors import UsageError
from homenode.measure.access.remote_host import HostChannel, RemoteHost, SshHost
from homenode.measure.model import PROBE
from homenode.measure.results.store import read_run
from homenode.measure.results.vantage import Vantage
from homenode.process import ToolMissingError, ToolTimeoutError
from tests.kubevirt.stand_in_kubectl import kubectl_on_path
from tests.ssh_daemon import ssh_daemon

HELD = b'#!/bin/sh\necho $$ >"$1"\nexec sleep 300\n'


SSH = pytest.param("ssh", marks=pytest.mark.root)


@pytest.fixture(params=["kubernetes", SSH])
def on(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    if request.param == "ssh":
        with ssh_daemon(tmp_path, monkeypatch) as port:
            yield f"ssh://root@127.0.0.1:{port}"
    else:
        with kubectl_on_path(tmp_path, monkeypatch):
            yield "kubernetes://n1"


def channel_to(on: str, run: str) -> HostChannel:
    return SshHost(on) if on.startswith("ssh") else JobChannel.of(on, run)


def host_at(on: str, run: str, probe: bytes = HELD) -> RemoteHost:
    return RemoteHost(channel_to(on, run), run, probe)


@pytest.mark.root
def test_a_run_elsewhere_is_a_run_like_any_other(on: str, tmp_path: Path) -> None:
    words = ("bench", "far", "--on", on, "--quick", "--repeat", "1", "--tests", "cpu-single")
    probe = next(Path(__file__).parents[2].glob("build/probe/homenode-probe-static"), None)
    assert probe is not None, "make probe"
    program = (sys.executable, "-m", "homenode.cli.main", *words, "--probe", str(probe))
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    (folder,) = (tmp_path / "results").glob("*/far")
    run = read_run(folder)
    assert run.samples
    if on.startswith("kubernetes"):
        assert run.head.vantage is Vantage.JOB
        assert (tmp_path / "jobs.json").read_text() == "{}"


def test_what_runs_since_a_kill_is_ended_by_who_continues(on: str, tmp_path: Path) -> None:
    first = host_at(on, str(tmp_path)).holding(os.open(os.devnull, os.O_RDONLY))
    pid_file = tmp_path / "pid"

    ended: list[int] = []

    def killed_meanwhile() -> None:
        ended.append(first.run((PROBE, str(pid_file)), 200).returncode)

    thread = threading.Thread(target=killed_meanwhile)
    thread.start()
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    again = host_at(on, str(tmp_path)).holding(os.open(os.devnull, os.O_RDONLY))
    assert is_gone(pid)
    thread.join()
    assert ended == [-signal.SIGKILL]
    with pytest.raises(ToolMissingError):
        again.run(("no-such-program",), 20)
    assert again.run(("cat",), 20, "from here").stdout == "from here"
    again.clean_up()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except FileNotFoundError:
        return True
    return state.startswith("Z")


@pytest.mark.parametrize("on", [SSH], indirect=True)
def test_a_process_of_another_start_is_not_ended(on: str, tmp_path: Path) -> None:
    host = host_at(on, str(tmp_path)).holding(os.open(os.devnull, os.O_RDONLY))
    folder = host.run(("sh", "-c", f"dirname $(command -v {PROBE} || echo $0)"), 20)
    assert folder.returncode == 0
    other = subprocess.Popen(("sleep", "60"), start_new_session=True)
    step = Path(host.put_program(PROBE, HELD)).with_name("step.running")
    step.write_text(f"{other.pid} {other.pid} 1\n")
    host.clean_up()
    assert other.poll() is None
    other.kill()
    assert not step.parent.exists()


@pytest.mark.parametrize(
    "url",
    [
        *("ssh://", "ssh://-oProxyCommand=x", "ssh://a b", "http://gpu7", "kubernetes://"),
        *("kubernetes://N1", "kubernetes://n1?gpus=-1", "kubernetes://a/b/c", "kubernetes://n?x=1"),
    ],
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--on"):
        channel_to(url, "r") if url.startswith("kube") else SshHost(url)


def test_a_job_is_as_the_place_says() -> None:
    url = "kubernetes://ml/gpu7?gpus=8&image=reg.example:5000/b@sha256:0"
    options = JobChannel.of(url, "r").options
    assert (options.namespace, options.node, options.gpus) == ("ml", "gpu7", 8)
    assert options.bench_image == "reg.example:5000/b@sha256:0"
    assert JobChannel.of("kubernetes://gpu7?image=b", "r").options.bench_image == "b"


class TestJob:
    @pytest.fixture(autouse=True)
    def _kubectl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(job_channel, "_POLL_S", 0.01)
        with kubectl_on_path(tmp_path, monkeypatch) as self.jobs:
            yield

    def test_a_pod_that_does_not_start_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_channel, "START_S", 0.2)
        (tmp_path / "why").write_text("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
        channel = JobChannel.of("kubernetes://n1?gpus=8", "r")
        with pytest.raises(ToolTimeoutError, match=r"Insufficient nvidia\.com/gpu"):
            channel.execute("true", 5)
        channel.close()
        assert self.jobs() == []

    def test_after_its_deadline_it_is_made_again(self, tmp_path: Path) -> None:
        channel = JobChannel.of("kubernetes://ml/n1", "r")
        assert channel.execute("echo here", 5).stdout == "here\n"
        (tmp_path / "ends").touch()
        again = JobChannel.of("kubernetes://ml/n1", "r")
        assert again.execute("cat", 5, "there").stdout == "there"
        assert self.jobs() == [channel.job] == [again.job]

    def test_the_job_of_another_homenode_is_left(self) -> None:
        first = JobChannel.of("kubernetes://n1", "r")
        first.execute("true", 5)
        second = JobChannel.of("kubernetes://n1", "r")
        second.execute("true", 5)
        second.close()
        assert self.jobs() == [first.job]
        first.close()
        assert self.jobs() == []
