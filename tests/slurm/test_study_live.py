"""homenode slurm study on a real Slurm: three nodes, from the first script to the report.

The GPU figures are replayed by stand-ins on the PATH (tests/slurm/programs), and jobs run homenode
on the described node (gpu_node_program.py). What goes wrong, goes wrong in the real scheduler.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homenode.measure.results.model import Origin
from homenode.measure.results.store import load_runs
from homenode.measure.results.vantage import Vantage
from tests.processes import write_program
from tests.slurm.testbed import Testbed, running, until
from tests.torch_programs import find_python

pytestmark = pytest.mark.slurm

HERE = Path(__file__).parent
HOMENODE = str(Path(sys.executable).parent / "homenode")
HOST = ("--host", str(HERE / "gpu-node.toml"), "--numa", "0", "--rounds", "1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with running(tmp_path_factory.mktemp("slurm") / "testbed") as testbed:
        equip(testbed)
        yield testbed


def equip(testbed: Testbed) -> None:
    """Its jobs find homenode on the described node, and the stand-ins."""
    homenode = testbed.base / "homenode"
    words = shlex.join((sys.executable, str(HERE / "gpu_node_program.py")))
    write_program(homenode, f'#!/bin/sh\nexec {words} "$@"\n')
    testbed.environment["STAND_IN_HOMENODE"] = str(homenode)
    testbed.environment["PATH"] = f"{HERE / 'programs'}:{os.environ['PATH']}"


def start(
    slurm: Testbed, directory: Path, *options: str, holds: Path | None = None
) -> "subprocess.Popen[str]":
    """A study of three nodes that goes on alone.

    holds: a directory: jobs whose names have the name of a file in it wait before they measure.
    """
    homenode = slurm.environment["STAND_IN_HOMENODE"]
    argv = (homenode, *"slurm study --poll 0.3 -o".split(), str(directory), *options)
    environment = {**slurm.environment, "COLUMNS": "200"}
    if holds is not None:
        environment["STAND_IN_HOLDS"] = str(holds)
    said = directory.with_name("said.txt").open("w")
    with said:
        return subprocess.Popen(argv, env=environment, stdout=said, stderr=said, text=True)


NEW = ("--partition-exclusive", "whole", "--partition-shared", "parts", "--nodes", "3", *HOST)


def ended(
    process: "subprocess.Popen[str]", directory: Path, seconds: float = 400
) -> tuple[int, str]:
    """The exit code, and all that it said."""
    said = directory.with_name("said.txt")
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"no end after {seconds:g} s:\n{said.read_text()}") from None
    return process.returncode, said.read_text()


def report(slurm: Testbed, directory: Path) -> dict[str, Any]:
    words = (HOMENODE, "slurm", "report", str(directory), "--json")
    found: dict[str, Any] = json.loads(slurm.client(*words, timeout=300))
    return found


def schedules(slurm: Testbed) -> bool:
    """Whether the controller has been through its queue since it was started."""
    try:
        return re.search(r"Total cycles:\s*[1-9]", slurm.client("sdiag")) is not None
    except subprocess.SubprocessError:
        return False


def fill_first_socket(slurm: Testbed, node: str, until_file: str) -> None:
    """Somebody else's job on 32 of a node's CPUs, until a file is there."""
    words = f"-p parts -c32 --mem=100 --nodelist={node} --job-name=filler --output=/dev/null"
    waiting = f"until ls {until_file} 2>/dev/null; do sleep 0.3; done"
    slurm.client("sbatch", *words.split(), "--wrap", waiting)
    until(lambda: "filler" in slurm.client("squeue", "-h", "-t", "R", "-o", "%j"), "the filler")


def test_a_study_of_three_nodes_runs_to_its_report(slurm: Testbed, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    fill_first_socket(slurm, "gpu01", f"{directory}/raw/shared-6gpu-gpu01-alone-r1/task-0/*/done")
    options = "--shared 6x1 --cpus-per-gpu 1 --tests none --between-nodes".split()
    app = ("--app", "seq 41 42", "--metric", "^([0-9]+)$")
    process = start(slurm, directory, *NEW, *options, *app)
    code, said = ended(process, directory)
    assert code == 0, said
    assert "7 of 7 jobs have results" in said
    assert "REPLAYED: figures made up by homenode's tests" in said

    found = report(slurm, directory)
    assert found["nodes"] == ["gpu01", "gpu02", "gpu03"]
    assert found["missing"] == []
    assert found["replayed"] == ["figures made up by homenode's tests; no GPU was measured"]

    # The planted misplacement: its CPUs are on socket 1, two of its GPUs on socket 0.
    lost = {job["name"]: job["reason"] for job in found["jobs"] if job["locality"] == "lost"}
    assert [name.partition("-task")[0] for name in lost] == ["shared-6gpu-gpu01-alone-r1"]
    (why,) = lost.values()
    assert "CPUs on node 0, where gpu0 (0000:11:00.0), gpu1 (0000:12:00.0) are" in why
    assert all(job["queue_wait_s"] is not None for job in found["jobs"])

    # The fault that the stand-ins replay: GPU 5 of gpu02.
    slow = {(one["node"], one["part"], one["metric"]) for one in found["outliers"]}
    assert ("gpu02", "0000:82:00.0 from NUMA node 0", "h2d-bandwidth") in slow
    assert {node for node, _, _ in slow} == {"gpu02"}

    first = next(m for m in found["matrices"] if m["metric"] == "h2d-bandwidth")
    assert (first["node"], first["rows"], len(first["columns"])) == ("gpu01", [0], 8)
    assert first["homes"] == [0, 0, 0, 0, 1, 1, 1, 1]
    queues = {answer["work"]: answer["queue"] for answer in found["recommendations"]}
    assert queues["memory-bound GPU codes"] == "exclusive"
    effects = [effect for one in found["comparisons"] for effect in one["effects"]]
    own = {round(one["value"], 6) for one in effects if one["metric"] == "app-rate:seq"}
    assert own == {42.0}

    runs = load_runs(directory / "results").runs
    assert len(runs) == 6
    assert {run.head.vantage for run in runs} == {Vantage.JOB}
    # Their figures are replayed.
    assert {run.head.origin for run in runs} == {Origin.SYNTHESISED}
    assert sorted(run.head.block or 0 for run in runs) == [0, 0, 1, 1, 2, 2]


@pytest.mark.lab
def test_trouble_in_the_middle_loses_nothing(slurm: Testbed, tmp_path: Path) -> None:
    directory, holds = tmp_path / "study", tmp_path / "holds"
    holds.mkdir()
    for name in ("gpu01-together", "gpu02-together"):
        (holds / name).touch()
    raw = directory / "raw"
    options = ("--shared", "1x2", "--tests", "none")
    slurm.client("scontrol", "update", "nodename=gpu03", "state=drain", "reason=fan")
    first = start(slurm, directory, *NEW, *options, holds=holds)
    pairs = "shared-1gpu-gpu0[12]-together-r1/task-*/*/started"
    until(lambda: len(list(raw.glob(pairs))) == 4, "pairs on gpu01 and gpu02")

    # homenode is killed: no one watches, the jobs go on.
    first.kill()
    first.wait()
    second = start(slurm, directory, holds=holds)

    def said() -> str:
        return directory.with_name("said.txt").read_text()

    # What is cancelled before its first look is submitted again.
    until(lambda: " pending" in said(), "a first look at the queue")
    pair = "shared-1gpu-gpu02-together-r1"
    # An array's last task has the array's own number: all of it is cancelled.
    job = next(raw.glob(f"{pair}/task-1/*")).name.partition(".")[0]
    slurm.client("scancel", job)
    states = ("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
    until(lambda: set(slurm.client(*states).split()) == {"CANCELLED"}, "a cancelled pair")
    slurm.stop_controller()
    time.sleep(1.5)
    slurm.start_controller()
    # A job that ends before it schedules again is gone, and Slurm takes its node for occupied.
    until(lambda: schedules(slurm), "a controller that schedules")
    (holds / "gpu01-together").unlink()

    def shows_what_it_waits_for() -> bool:
        assert second.poll() is None, said()
        last = said().splitlines()[-1]
        counts = all(text in last for text in ("6 of 12 jobs done", "4 pending", "2 cancelled"))
        return counts and "Dependency; ReqNodeNotAvail, " in last

    until(shows_what_it_waits_for, "a view of what is left")
    assert len(report(slurm, directory)["missing"]) == 6
    slurm.client("scontrol", "update", "nodename=gpu03", "state=resume")
    code, text = ended(second, directory)
    assert code == 1, text
    assert "10 of 12 jobs have results" in text
    assert f"missing: 2 cancelled: CANCELLED: {pair} (job" in text

    # What was cancelled is submitted again; its node is drained, and patience ends.
    slurm.client("scontrol", "update", "nodename=gpu02", "state=drain", "reason=fan")
    code, text = ended(start(slurm, directory, "--patience", "0.02", holds=holds), directory)
    assert code == 1, text
    assert "missing: 2 pending: ReqNodeNotAvail, " in text
    slurm.client("scontrol", "update", "nodename=gpu02", "state=resume")
    (holds / "gpu02-together").unlink()
    code, text = ended(start(slurm, directory), directory)
    assert code == 0, text
    assert "12 of 12 jobs have results" in text
    # Nothing was measured twice but the pair that was cancelled.
    tries = {task: len(list(task.iterdir())) for task in raw.glob("*/task-*")}
    assert {task.parent.name for task, count in tries.items() if count > 1} == {pair}
    found = report(slurm, directory)
    assert found["missing"] == []
    met = [job["met"] for job in found["jobs"] if job["mode"] == "together"]
    assert met == ["2 of 2"] * 6
    # Each task's record is its own, also that of the task with the array's number.
    for done in raw.glob("*-together-r1/task-*/*/done"):
        record = (done.parent / "job.txt").read_text()
        assert record.count("ArrayTaskId=") == 1
        assert f"ArrayTaskId={done.parents[1].name.removeprefix('task-')} " in record


@pytest.mark.lab
def test_slurmds_killed_while_jobs_run_lose_nothing(slurm: Testbed, tmp_path: Path) -> None:
    directory, holds = tmp_path / "study", tmp_path / "holds"
    holds.mkdir()
    nodes = ("gpu01", "gpu02", "gpu03")
    for node in nodes:
        (holds / f"{node}-together").touch()
    study = start(slurm, directory, *NEW, "--shared", "1x2", "--tests", "none", holds=holds)
    raw = directory / "raw"
    until(lambda: len(list(raw.glob("*-together-r1/task-*/*/started"))) == 6, "pairs on all nodes")
    for node in nodes:
        slurm.kill_node(node)
    study.kill()
    study.wait()
    study = start(slurm, directory, holds=holds)
    for node in nodes:
        slurm.kill_node(node)
        (holds / f"{node}-together").unlink()
    code, text = ended(study, directory)
    assert code == 0, text
    assert "12 of 12 jobs have results" in text
    assert {len(list(task.iterdir())) for task in raw.glob("*/task-*")} == {1}, "none ran twice"
    runs = load_runs(directory / "results").runs
    assert len(runs) == len({(run.head.name, run.head.block) for run in runs}) == 12


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.6", None])
def test_python_may_be_old_or_missing(slurm: Testbed, tmp_path: Path, version: str | None) -> None:
    """It watches the tools of a homenode that has its own, as on gpu01, and cannot run homenode."""
    directory, programs, homenode = (tmp_path / name for name in ("study", "bin", "homenode"))
    programs.mkdir()
    for path in Path("/usr/bin").iterdir():
        if not path.name.startswith("python"):
            (programs / path.name).symlink_to(path)
    if version is not None:
        (programs / "python3").symlink_to(find_python(version))
    ours = slurm.environment["STAND_IN_HOMENODE"]
    text = '#!/bin/sh\n[ "$SLURMD_NODENAME" = gpu02 ] && exec python3 -m homenode\n'
    write_program(homenode, f'{text}exec {ours} "$@"\n')
    options = "--nodelist gpu01,gpu02 --shared 1x1 --tests gpu-compute".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(slurm.environment, "PATH", f"{HERE / 'programs'}:{programs}")
        patch.setitem(slurm.environment, "STAND_IN_HOMENODE", str(homenode))
        if version is not None:
            patch.setitem(slurm.environment, "STAND_IN_PYTHON", "1")
        code, said = ended(start(slurm, directory, *NEW[:4], *HOST, *options), directory)
    assert code == 1, said
    assert "2 of 4 jobs have results" in said
    assert "homenode did not start, which needs its virtual environment" in said
    outputs = "".join(path.read_text() for path in directory.glob("results/*/*/raw/*"))
    assert ("# homenode watched: " in outputs) == (version is not None)
    found = report(slurm, directory)
    assert found["nodes"] == ["gpu01"] and len(found["missing"]) == 2
    reasons = [gap["reason"] for gap in found["gaps"] if gap["subject"] == "2 jobs: gpu-compute"]
    assert ["Python 3.8 or later with PyTorch" in reason for reason in reasons] == [True]


@pytest.mark.nightly
def test_nodes_that_no_one_described_are_looked_at_first(slurm: Testbed, tmp_path: Path) -> None:
    directory = tmp_path / "ada's study $(id) 1"  # as people call directories
    partitions = "--partition-exclusive whole --partition-shared parts"
    options = f"{partitions} --shared 1x1 --rounds 1".split()
    dry = start(slurm, directory, *options, "--nodelist", "gpu02", "--tests", "none", "--dry-run")
    code, said = ended(dry, directory)
    assert code == 0
    assert "jobs: 1 job of up to " in said
    assert (directory / "jobs/look-gpu02.sbatch").exists()
    assert not list((directory / "raw").iterdir())
    code, said = ended(start(slurm, directory), directory)
    assert code == 0, said
    assert (directory / "jobs" / "exclusive-gpu02-numa0-r1.sbatch").exists()
    assert next(directory.glob("raw/look-gpu02/task-0/*/host.tar.gz")).stat().st_size > 1000


@pytest.mark.nightly
def test_a_study_is_refused_by_name_where_slurm_says_no(slurm: Testbed, tmp_path: Path) -> None:
    nowhere = start(slurm, tmp_path / "a", "--partition-exclusive", "nowhere", *HOST)
    code, said = ended(nowhere, tmp_path / "a")
    assert code == 2
    assert "expected nodes with GPUs, found no such partition" in said
    assert "partitions with GPUs: parts, whole" in said
    directory = tmp_path / "b"
    options = "--partition-shared parts --account x --nodes 1 --minutes 100000 --shared 1x1"
    bad = start(slurm, directory, *HOST, *options.split(), "--patience", "0.02")
    code, said = ended(bad, directory)
    assert code == 1, said
    assert "PartitionTimeLimit" in said or "time limit" in said.lower()
