"""kill -9 of a real run, at many moments: --resume completes it, nothing is lost or doubled."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from homenode.results.store import read_run
from tests import probe_documents
from tests.probe_build import ROOT

KILLS = 12
STAND_IN = """#!/bin/sh
# Takes a moment, so that it can be killed while it runs, and says that it did.
sleep 0.03
cat "{folder}/$1-$5.json"
echo "$1" >> "{folder}/ended"
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with a probe that prints the same document for the same PUs."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for command in ("throughput", "core-to-core", "placement"):
        for pus in ("0", "0-3"):
            if command == "throughput" or pus == "0-3":
                text = probe_documents.answer(["homenode-probe", command, "--pus", pus])
                (folder / f"{command}-{pus}.json").write_text(text)
    probe = folder / "homenode-probe"
    probe.write_text(STAND_IN.format(folder=folder))
    probe.chmod(0o755)
    return folder


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


def order_of(root: Path) -> Path:
    return root / "cpu-only" / "killed" / "order.json"


def test_killed_many_times_it_comes_to_what_it_would_have(tools: Path, tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", tools)
    _, errors = whole.communicate(timeout=60)
    assert whole.returncode == 0, errors
    steps = len((tools / "ended").read_text().splitlines())
    (tools / "ended").unlink()

    rng = random.Random(4)
    root = tmp_path / "cut"
    killed = 0
    for _ in range(200):
        words = ["--resume"] if order_of(root).exists() else []
        child = start(root, tools, *words)
        if killed < KILLS:
            assert child.stdout is not None
            if rng.random() < 0.8:
                child.stdout.readline()  # the first step begins
            time.sleep(rng.uniform(0.0, 0.12))
            child.send_signal(signal.SIGKILL)
            _, errors = child.communicate(timeout=60)
            killed += child.returncode == -signal.SIGKILL
        else:
            _, errors = child.communicate(timeout=60)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, errors
    assert killed >= 5, "it was to be killed in the middle, and was not"
    cut, untouched = (read_run(path / "cpu-only" / "killed") for path in (root, tmp_path / "whole"))
    assert cut.head == untouched.head
    assert cut.head.unusable == ()
    assert cut.samples == untouched.samples
    ended = len((tools / "ended").read_text().splitlines())
    assert steps <= ended <= steps + killed, "a step that had ended was not run again"


def test_a_test_that_outlives_the_run_is_waited_for(tools: Path, tmp_path: Path) -> None:
    """Else two tests would measure at once after a crash, and both would be wrong."""
    slow = tools / "homenode-probe"
    slow.write_text(slow.read_text().replace("sleep 0.03", "sleep 1.5"))
    child = start(tmp_path, tools)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.4)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=10)
    slow.write_text(STAND_IN.format(folder=tools))
    assert not (tools / "ended").exists()
    again = start(tmp_path, tools, "--resume")
    assert again.stdout is not None
    again.stdout.readline()
    assert (tools / "ended").exists(), "the first step begins once the old test has ended"
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
