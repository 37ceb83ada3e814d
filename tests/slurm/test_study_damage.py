"""Reports of half done, damaged or hostile study directories: read or refused, never worse."""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.arguments import SharedJobShape, StudyOptions
from homenode.cluster.slurm.slurm_nodes import ClusterNode
from homenode.cluster.slurm.study.directory import StudyDirectory, read_sources
from homenode.cluster.slurm.study.experiments import Study, plan_experiments
from homenode.cluster.slurm.study.report import StudyReport, build_study_report
from homenode.cluster.slurm.study.text import format_slurm_study
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.formats import encode
from homenode.measure.results.model import UNKNOWN_SWITCHES, Condition, Origin, Run, RunHead, Sample
from homenode.measure.results.store import run_text, write_run
from homenode.measure.results.vantage import Vantage
from homenode.show.terminal_text import PrintableConsole
from homenode.vm.sources import load_host
from tests.seeds import part
from tests.slurm.gpu_nodes import job_text

GPU_NODE = str(Path(__file__).parent / "gpu-node.toml")
JOB = job_text(7, "11:00:00", "11:02:05", "CPU_IDs=32-37 Mem=100 GRES=gpu:h100:2(IDX:4-5)")
FILES = {
    "node": "n1\n",
    "started": "1000\n",
    "ended": "2800\n",
    "exit": "0\n",
    "job.txt": JOB,
    "others.txt": "7\n9\n",
    "met": "2 of 2\n",
    "bench.txt.err": "exit status 1\n",
    "node-n1.txt": "replayed: x\n",
    "pair-n1+n2.txt": "nonsense\n",
}
RESULTS = "results.jsonl"
NAME = "exclusive-n1-numa0-r1-task0-7.0"


def a_study(directory: Path) -> Study:
    """Two nodes, every kind of job, everything done."""
    nodes = tuple(ClusterNode(n, "p", True, "idle", 64, 512_000, 8) for n in ("n1", "n2"))
    shapes = (SharedJobShape(1, 1), SharedJobShape(2, 2))
    options = StudyOptions(nodes=2, rounds=1, between_nodes=True, shapes=shapes)
    host = load_host(GPU_NODE)
    planned = plan_experiments(nodes, nodes, {"n1": host, "n2": host}, options)
    made = Study("abc", options, nodes, nodes, GPU_NODE, (), planned)
    owned = StudyDirectory(directory)
    owned.create(made)
    owned.close()
    for one in made.experiments:
        for task in range(one.jobs):
            attempt = directory / f"raw/{one.id}/task-{task}/7.0"
            attempt.mkdir(parents=True)
            for name, text in {**FILES, "done": ""}.items():
                (attempt / name).write_text(text)
            write_run(directory / "results", a_run(f"{one.id}-task{task}-7.0", one.block))
    return made


def a_run(name: str, block: int | None, said: str = "made up") -> Run:
    head = RunHead(name, "nvidia-h100", Origin.SYNTHESISED, Vantage.JOB, UNKNOWN_SWITCHES)
    place: dict[str, Any] = {"nodes": (0,), "pus": CpuSet([0, 1]), "experiment": "abc"}
    notes = (Condition("replayed", said),)
    head = replace(head, conditions=notes, unusable=(said,), block=block, **place)
    gpu = Bdf.parse("81:00.0")
    return Run(head, (Sample("h2d-bandwidth", "bytes_per_s", 50e9, device=gpu),))


def shown(directory: Path, width: int = 40) -> str:
    """The report in both of its forms."""
    found = read_sources([directory])
    made: StudyReport = build_study_report("x", found)
    json.loads(encode("slurm-report", made))
    out = io.StringIO()
    console = PrintableConsole(file=out, width=width, color_system=None)
    console.print(format_slurm_study(made))
    return out.getvalue()


def test_a_whole_study_is_read(tmp_path: Path) -> None:
    a_study(tmp_path)
    text = shown(tmp_path, 100)
    assert "12 jobs on 2 nodes" in text
    assert len(read_sources([tmp_path, tmp_path / "."]).jobs) == 12


HOSTILE = ("\x1b]0;owned\x07\x1b[31m", "[red]x[/red]", "\x9b2J", "\u202eevil", "a\rb")


@pytest.mark.parametrize("name", part(sorted({*FILES, RESULTS}), 0))
def test_one_damaged_file_costs_one_job_at_most(tmp_path: Path, name: str) -> None:
    a_study(tmp_path)
    chance = random.Random(name)
    path = tmp_path / f"raw/exclusive-n1-numa0-r1/task-0/7.0/{name}"
    if name == RESULTS:
        path = tmp_path / "results/nvidia-h100" / NAME / RESULTS
    if name.startswith(("node-", "pair-")):
        path = tmp_path / f"raw/collective/task-0/7.0/{name}"
    for _ in range(2):
        text = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text) + 1)
            text[at : at + chance.randint(0, 3)] = chance.choice(
                (b"", b"\x00", b"\xff\xfe", b"-", b"9" * 30, b"5-3", b"\n", b"nan", b"\x1b[31m")
            )
        path.write_bytes(text)
        report = shown(tmp_path)
        assert "shared-1gpu-n2-alone" in report
        assert "\x1b" not in report
        assert "\x00" not in report


@pytest.mark.parametrize("said", HOSTILE)
def test_what_files_say_never_reaches_the_terminal_raw(tmp_path: Path, said: str) -> None:
    a_study(tmp_path)
    for path in tmp_path.glob("raw/*/*/*/*"):
        if path.name in ("met", "job.txt", "bench.txt.err"):
            path.write_text(said)
        elif path.name == "node-n1.txt":
            path.write_text(f"replayed: {said}\n{path.read_text()}")
    for path in tmp_path.glob(f"results/*/*/{RESULTS}"):
        path.write_text(run_text(a_run(path.parent.name, 0, said)))
    text = shown(tmp_path, 200)
    for character in "\x1b\x07\x9b\u202e\r":
        assert character not in text


def test_files_of_odd_kinds_are_passed_over(tmp_path: Path) -> None:
    a_study(tmp_path)
    attempt = tmp_path / "raw/exclusive-n1-numa0-r1/task-0/7.0"
    os.mkfifo(attempt / "fifo")
    (attempt / "met").unlink()
    (attempt / "met").symlink_to("/dev/zero")
    (attempt / "job.txt").unlink()
    (attempt / "job.txt").mkdir()
    run = tmp_path / "results/nvidia-h100" / NAME / RESULTS
    run.unlink()
    os.mkfifo(run)
    text = shown(tmp_path)
    assert "shared-1gpu-n1-alone" in text
    assert NAME in text.replace("\n", "")


def test_a_damaged_journal_is_read_or_refused(tmp_path: Path) -> None:
    a_study(tmp_path)
    journal = tmp_path / "study.jsonl"
    whole = journal.read_bytes()
    chance = random.Random(3)
    for _ in range(12):
        text = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text) + 1)
            text[at : at + chance.randint(0, 30)] = chance.choice((b"", b"\n", b'"', b"0", b"\x00"))
        journal.write_bytes(text)
        try:
            shown(tmp_path)
        except HomenodeError as error:
            assert "study.jsonl" in error.message
