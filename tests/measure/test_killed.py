"""kill -9 of a real run: --resume waits for the test that outlives it.

A run is killed at every call in tests/measure/test_resume.py.
"""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests import probe_documents
from tests.probe_build import ROOT
from tests.processes import wait_for, write_program

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
    write_program(directory / "homenode-probe", STAND_IN.format(directory=directory))
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


def test_a_test_that_outlives_the_run_is_waited_for(tools: Path, tmp_path: Path) -> None:
    """Else two tests would measure at once after a crash, and both would be wrong."""
    probe = tools / "homenode-probe"
    probe.write_text(HELD.format(directory=tools))
    child = start(tmp_path, tools)
    wait_for((tools / "began").exists)
    child.kill()
    child.communicate(timeout=ENDS_S)
    # Another file in its place: the shell still reads the old one.
    write_program(tools / "new", STAND_IN.format(directory=tools))
    (tools / "new").rename(probe)
    again = start(tmp_path, tools, "--resume")
    assert again.stdout is not None
    assert not select.select([again.stdout], [], [], 2)[0], "it waits for the old test"
    (tools / "go").touch()
    again.stdout.readline()
    assert (tools / "ended").exists(), "the first step begins once the old test has ended"
    _, errors = again.communicate(timeout=ENDS_S)
    assert again.returncode == 0, errors
