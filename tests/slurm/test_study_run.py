"""homenode slurm study as a program, against a stand-in for Slurm's clients that records it all."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HOMENODE = str(Path(sys.executable).parent / "homenode")


class StandIn:
    """A queue in a folder, and a study that asks it."""

    __test__ = False

    def __init__(self, base: Path) -> None:
        self.base = base
        self.study = base / "study"
        (base / "bin").mkdir()
        for name in ("sinfo", "squeue", "sbatch", "scancel"):
            program = base / "bin" / name
            start = f"exec {sys.executable} -S {HERE / 'stand_in_queue.py'} {base} {name}"
            program.write_text(f'#!/bin/sh\n{start} "$@"\n')
            program.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{base / 'bin'}:{os.environ['PATH']}"}

    def start(self, *options: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            (HOMENODE, "slurm", "study", "-o", str(self.study), "--poll", "0.05", *options),
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *options: str) -> tuple[int, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def jobs(self) -> list[dict[str, Any]]:
        file = self.base / "queue.json"
        found: list[dict[str, Any]] = json.loads(file.read_text() or "[]") if file.exists() else []
        return found

    def submissions(self) -> Counter[str]:
        return Counter(job["experiment"] for job in self.jobs())


@pytest.fixture
def queue(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


NEW = (
    "--host", str(HERE / "gpu-node.toml"), "--nodes", "2", "--tests", "none", "--shared", "1x2",
    "--numa", "0",
)  # fmt: skip
EXPERIMENTS = 2 * 3  # on each node: one shape alone and together, one NUMA node


def test_a_study_ends_with_every_job_submitted_once(queue: StandIn) -> None:
    code, said = queue.run(*NEW)
    assert code == 0, said
    assert "8 of 8 jobs have results" in said
    assert set(queue.submissions().values()) == {1}
    assert len(queue.submissions()) == EXPERIMENTS


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_sbatch_is_under_way_it_submits_nothing_twice(
    queue: StandIn, when: str
) -> None:
    assert queue.run(*NEW, "--dry-run")[0] == 0
    for _ in range(3):
        (queue.base / "kill").write_text(when)
        assert queue.run()[0] == -9
    code, said = queue.run()
    assert code == 0, said
    assert queue.submissions() == dict.fromkeys(queue.submissions(), 1)
    assert len(queue.submissions()) == EXPERIMENTS


def test_killed_at_any_moment_it_loses_nothing_and_submits_nothing_twice(queue: StandIn) -> None:
    moments = random.Random(7)
    kills = 0
    while kills < 20:
        process = queue.start(*NEW)
        time.sleep(moments.uniform(0.0, 0.9))
        if process.poll() is not None:
            break
        process.kill()
        process.communicate()
        kills += 1
    code, said = queue.run(*NEW)
    assert code == 0, said
    assert "8 of 8 jobs have results" in said
    assert queue.submissions() == dict.fromkeys(queue.submissions(), 1)
