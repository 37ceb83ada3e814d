"""homenode slurm study as a program, against a stand-in for Slurm's clients that records it all."""

import contextlib
import fcntl
import io
import itertools
import json
import os
import random
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from homenode.cli import main, terminal
from tests.processes import code_of, start_child, write_program

HERE = Path(__file__).parent
HOMENODE = str(Path(sys.executable).parent / "homenode")


class StandIn:
    """A queue in a directory, and a study that asks it."""

    __test__ = False

    def __init__(self, base: Path) -> None:
        self.base = base
        self.study = base / "study"
        for name in ("sinfo", "squeue", "sbatch", "scancel"):
            words = (sys.executable, "-S", str(HERE / "stand_in_queue.py"), str(base), name)
            write_program(base / "bin" / name, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.environment = {**os.environ, "PATH": f"{base / 'bin'}:{os.environ['PATH']}"}

    def _words(self, *options: str) -> tuple[str, ...]:
        return (HOMENODE, "slurm", "study", "-o", str(self.study), "--poll", "0.05", *options)

    def run(self, *options: str) -> tuple[int, str]:
        """The exit code, and all that the command says, in this process."""
        said = io.StringIO()
        terminal.make_console.cache_clear()
        code: object = 0
        with (
            patch.dict(os.environ, self.environment, clear=True),
            patch.object(sys, "argv", list(self._words(*options))),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                main.main()
            except SystemExit as end:
                code = end.code
        terminal.make_console.cache_clear()
        return int(str(code or 0)), said.getvalue()

    def run_killed(self, when: str, *options: str) -> int:
        """The exit code in a process of its own, which the queue kills: see stand_in_queue.py."""
        (self.base / "kill").write_text(when)
        return code_of(start_child(lambda: self.run(*options)))

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs of the queue; a client that killed the study may still write them."""
        with (self.base / "queue.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            file.seek(0)
            found: list[dict[str, Any]] = json.loads(file.read() or "[]")
        return found

    def submissions(self) -> Counter[str]:
        return Counter(job["experiment"] for job in self.jobs())


@pytest.fixture
def queue(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


OPTIONS = "--nodes 2 --tests none --shared 1x2 --numa 0 --rounds 1"
NEW = ("--host", str(HERE / "gpu-node.toml"), *OPTIONS.split())
EXPERIMENTS = 2 * 3  # on each node: one shape alone and together, one NUMA node


def test_a_study_ends_with_every_job_submitted_once(queue: StandIn) -> None:
    code, said = queue.run(*NEW)
    assert code == 0, said
    assert "8 of 8 jobs have results" in said
    assert set(queue.submissions().values()) == {1}
    assert len(queue.submissions()) == EXPERIMENTS


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_during_sbatch_it_submits_nothing_twice(queue: StandIn, when: str) -> None:
    assert queue.run(*NEW, "--dry-run")[0] == 0
    for _ in range(2):
        assert queue.run_killed(f"sbatch {when} 1") == -9
    code, said = queue.run()
    assert code == 0, said
    assert queue.submissions() == dict.fromkeys(queue.submissions(), 1)
    assert len(queue.submissions()) == EXPERIMENTS


def test_killed_at_any_question_it_loses_nothing_and_submits_nothing_twice(queue: StandIn) -> None:
    chance = random.Random(7)
    for _ in range(6):
        when = f"any {chance.choice(('before', 'after'))} {chance.randint(1, 4)}"
        assert queue.run_killed(when, *NEW) == -9
    code, said = queue.run(*NEW)
    assert code == 0, said
    assert "8 of 8 jobs have results" in said
    assert queue.submissions() == dict.fromkeys(queue.submissions(), 1)


def test_what_sbatch_takes_no_more_of_goes_in_later(queue: StandIn) -> None:
    (queue.base / "most").write_text("2")
    code, said = queue.run(*NEW)
    assert code == 0, said
    assert queue.submissions() == dict.fromkeys(queue.submissions(), 1)
    assert len(queue.submissions()) == EXPERIMENTS


def test_a_limit_that_leaves_nothing_at_all_is_named(queue: StandIn) -> None:
    (queue.base / "most").write_text("0")
    code, said = queue.run(*NEW)
    assert code == 1
    assert "rejected: sbatch: error: AssocMaxSubmitJobLimit; Batch job submission failed" in said


def test_sbatchs_variables_move_no_job(queue: StandIn) -> None:
    queue.environment |= {"SBATCH_PARTITION": "elsewhere", "SBATCH_ACCOUNT": "physics"}
    assert queue.run(*NEW)[0] == 0
    assert {tuple(job["environment"]) for job in queue.jobs()} == {()}
    scripts = [path.read_text() for path in (queue.study / "jobs").glob("*.sbatch")]
    assert all("#SBATCH --account=physics\n" in text for text in scripts)


def test_a_job_that_is_submitted_again_waits_for_those_behind_it(queue: StandIn) -> None:
    assert queue.run(*NEW)[0] == 0
    rows = queue.jobs()
    again = next(job for job in rows if job["experiment"] == "shared-1gpu-n1-alone-r1")
    behind = next(job for job in rows if job["experiment"] == "exclusive-n1-numa0-r1")
    again["state"], behind["state"], behind["after"] = "CANCELLED", "PENDING", [999]
    (queue.base / "queue.json").write_text(json.dumps(rows))
    for job in (again, behind):
        for done in (queue.study / f"raw/{job['experiment']}").glob("*/*/done"):
            done.unlink()
    queue.run_killed("squeue before 3")
    last = queue.jobs()[-1]
    assert (last["experiment"], last["after"]) == ("shared-1gpu-n1-alone-r1", [behind["id"]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodes", "5"), "expected as many nodes with GPUs in partition whole, found 2"),
        (("--nodelist", "n8,n9"), "--nodelist: no node n8"),
        (("--poll", "nan"), "--poll: 'nan' is not a number"),
        (("--patience", "inf"), "--patience: 'inf' is not a number"),
        (("--minutes", "0"), "--minutes: 0 is out of range"),
        (("--cpus-per-gpu", "0"), "--cpus-per-gpu: 0 is out of range"),
        (("--setup", "nowhere.sh"), "--setup: nowhere.sh: no such file"),
        (("--partition-exclusive", "a b;rm"), "--partition-exclusive: expected a name of letters"),
        (("--partition-shared", "gone"), "no such partition"),
    ],
)
def test_bad_options_write_nothing(queue: StandIn, options: tuple[str, str], said: str) -> None:
    others = dict(zip(NEW[::2], NEW[1::2], strict=True)) | dict([options])
    code, text = queue.run(*itertools.chain(*others.items()))
    assert code == 2, text
    assert said in text
    assert not queue.study.exists()


def test_a_study_goes_on_with_its_own_options_and_names_others(queue: StandIn) -> None:
    queue.environment["SBATCH_ACCOUNT"] = "physics"
    assert queue.run(*NEW, "--dry-run")[0] == 0
    code, said = queue.run(*NEW, "--minutes", "7", "--dry-run")
    assert code == 2
    assert "found others: --minutes" in said
    assert queue.run(*NEW, "--dry-run")[0] == 0


def test_a_directory_that_cannot_be_written_is_said(queue: StandIn) -> None:
    queue.study.write_text("a file")
    code, said = queue.run(*NEW)
    assert code == 2
    assert "a file, not a directory" in said


def test_without_sbatch_every_job_is_rejected_by_name(queue: StandIn) -> None:
    (queue.base / "bin/sbatch").unlink()
    queue.environment["PATH"] = str(queue.base / "bin")
    code, said = queue.run(*NEW)
    assert code == 1
    assert "rejected: sbatch: " in said


def test_a_program_that_gave_no_figure_in_any_job_is_no_result(queue: StandIn) -> None:
    code, said = queue.run(*NEW, "--app", "nosuch", "--metric", r"(\d+) img/s")
    assert code == 1
    total = said.count("no result of nosuch")
    assert total > 1
    assert f"0 of {total} jobs have results" in said


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ("homenode: --tests: no test\nnext\n", "--tests: no test"),
        pytest.param("sh: /a: bad inter\n", "sh: /a: bad inter", marks=pytest.mark.nightly),
        pytest.param("", "", marks=pytest.mark.nightly),
    ],
)
def test_jobs_without_a_figure_are_no_results(queue: StandIn, errors: str, reason: str) -> None:
    (queue.base / "errors").write_text(errors)
    code, said = queue.run(*NEW)
    assert code == 1
    assert "0 of 8 jobs have results" in said
    assert f"its script ended with exit status 2{reason and ': '}{reason}" in said
