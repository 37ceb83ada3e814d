"""kill -9 of a real run on another machine: --resume completes it, nothing is lost or doubled.

On this machine a run is killed at every call in tests/measure/test_resume.py.
"""

import hashlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.measure.results.store import read_run
from tests import probe_documents
from tests.measure.test_resume import untimed
from tests.probe_build import ROOT
from tests.ssh_daemon import ssh_daemon

KILLS = 1
ENDS_S = 300
STAND_IN = """#!/bin/sh
# Takes a moment, so that it can be killed while it runs, and says that it did.
sleep 0.03
cat "{directory}/$1-$5.json"
echo "$1" >> "{directory}/ended"
"""
HELD = """#!/bin/sh
# Says that it began, and ends when it may.
touch "{directory}/began"
until [ -e "{directory}/go" ]; do sleep 0.05; done
cat "{directory}/$1-$5.json"
echo "$1" >> "{directory}/ended"
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with a probe that prints the same document for the same CPUs."""
    directory = tmp_path / "tools"
    directory.mkdir()
    for command in ("throughput", "core-to-core", "placement"):
        for pus in ("0", "0-3"):
            if command == "throughput" or pus == "0-3":
                text = probe_documents.answer(["homenode-probe", command, "--pus", pus])
                (directory / f"{command}-{pus}.json").write_text(text)
    probe = directory / "homenode-probe"
    probe.write_text(STAND_IN.format(directory=directory))
    probe.chmod(0o755)
    return directory


def start(root: Path, tools: Path, *words: str) -> "subprocess.Popen[str]":
    path = f"{tools}:{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench_child", str(root), *words],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def directory_of(root: Path) -> str:
    """What a run's directory on another host is called."""
    return f"homenode-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"


def order_of(root: Path) -> Path:
    return root / "cpu-only" / "killed" / "journal.jsonl"


def cut(root: Path, tools: Path, kills: int, rng: random.Random, where: tuple[str, ...]) -> int:
    """A run that is killed at most so often and then completed; how often it was."""
    killed = 0
    while True:
        words = ["--resume"] if order_of(root).exists() else []
        child = start(root, tools, *words, *where)
        if killed < kills:
            assert child.stdout is not None
            if rng.random() < 0.8:
                child.stdout.readline()  # the first step begins
            time.sleep(rng.uniform(0.0, 0.6))
            child.send_signal(signal.SIGKILL)
        _, errors = child.communicate(timeout=ENDS_S)
        if child.returncode == 0:
            return killed
        assert child.returncode == -signal.SIGKILL, errors
        killed += 1


@pytest.fixture
def where(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, ...]]:
    """Options that say which machine is measured: this one, over ssh."""
    probe = ("--probe", str(tools / "homenode-probe"))
    with ssh_daemon(tmp_path, monkeypatch) as port:
        yield ("--on", f"ssh://root@127.0.0.1:{port}", *probe)
    for name in map(directory_of, tmp_path.glob("cut after *")):
        assert not list(Path("/").glob(f"run/{name}")) + list(Path("/tmp").glob(name))


@pytest.mark.root
@pytest.mark.lab
def test_killed_many_times_it_comes_to_what_it_would_have(
    tools: Path, tmp_path: Path, where: tuple[str, ...]
) -> None:
    ended = tools / "ended"
    whole = start(tmp_path / "whole", tools)
    _, errors = whole.communicate(timeout=ENDS_S)
    assert whole.returncode == 0, errors
    untouched = read_run(tmp_path / "whole" / "cpu-only" / "killed")
    steps = len(ended.read_text().splitlines())

    rng = random.Random(4)
    total = 0
    while total < KILLS:  # a busy machine may wake us only when a run is through
        ended.unlink()
        root = tmp_path / f"cut after {total}"
        killed = cut(root, tools, KILLS - total, rng, where)
        run = read_run(root / "cpu-only" / "killed")
        assert untimed(run).head == untimed(untouched).head
        assert run.head.unusable == ()
        assert run.samples == untouched.samples
        again = len(ended.read_text().splitlines()) - steps
        assert 0 <= again <= killed, "a step that had ended was not run again"
        total += killed


def test_a_test_that_outlives_the_run_is_waited_for(tools: Path, tmp_path: Path) -> None:
    """Else two tests would measure at once after a crash, and both would be wrong."""
    probe = tools / "homenode-probe"
    probe.write_text(HELD.format(directory=tools))
    child = start(tmp_path, tools)
    until_there(tools / "began")
    child.kill()
    child.communicate(timeout=ENDS_S)
    # Another file in its place: the shell still reads the old one.
    (tools / "new").write_text(STAND_IN.format(directory=tools))
    (tools / "new").chmod(0o755)
    (tools / "new").rename(probe)
    again = start(tmp_path, tools, "--resume")
    assert again.stdout is not None
    assert not select.select([again.stdout], [], [], 2)[0], "it waits for the old test"
    (tools / "go").touch()
    again.stdout.readline()
    assert (tools / "ended").exists(), "the first step begins once the old test has ended"
    _, errors = again.communicate(timeout=ENDS_S)
    assert again.returncode == 0, errors


def until_there(path: Path) -> None:
    deadline = time.monotonic() + ENDS_S
    while not path.exists():
        assert time.monotonic() < deadline, f"expected {path}"
        time.sleep(0.02)
