"""Reports of study folders that are half done, damaged or hostile: read or refused, never worse."""

import io
import json
import os
import random
from pathlib import Path

import pytest
from rich.console import Console

from homenode.analyse.study_report import StudyReport, study_report
from homenode.errors import HomenodeError
from homenode.formats import encode
from homenode.measure.bindings.experiments import ClusterNode, Shape, StudyWishes, experiments_for
from homenode.measure.bindings.folder import StudyFolder
from homenode.measure.bindings.progress import Study
from homenode.measure.bindings.reading import read_sources
from homenode.report.slurm_study_text import slurm_study_text
from homenode.sources import load_host
from tests import sdumont_study

GPU_NODE = str(Path(__file__).parent / "gpu-node.toml")
JOB = """\
JobId=7 JobName=hn-x
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T11:00:00
   StartTime=2026-01-01T11:02:05 EndTime=2026-01-01T12:00:00 Deadline=N/A
   NodeList=n1
     Nodes=n1 CPU_IDs=32-37 Mem=100 GRES=gpu:h100:2(IDX:4-5)
"""
FILES = {
    "node": "n1\n",
    "started": "1000\n",
    "ended": "2800\n",
    "exit": "0\n",
    "job.txt": JOB,
    "others.txt": "7|4|gres:gpu:2\n9|4|gres:gpu:1\n",
    "allowed.txt": "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0-1\n",
    "numactl-show.txt": "policy: bind\nphyscpubind: 0 1 \ncpubind: 0 \nmembind: 0 \n",
    "numactl-hardware.txt": "available: 2 nodes (0-1)\nnode 0 cpus: 0 1\nnode 0 size: 100 MB\n"
    "node 0 free: 90 MB\nnode 1 cpus: 2 3\nnode 1 size: 100 MB\nnode 1 free: 90 MB\n"
    "node distances:\nnode   0   1\n  0:  10  21\n  1:  21  10\n",
    "gpu-places.txt": "gpu 0000:81:00.0 1 /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0\n",
    "nic-places.txt": "mlx5_0 0000:19:00.0 0 /sys/devices/pci0000:17/0000:19:00.0\n",
    "gpu-list.txt": "GPU 0: NVIDIA H100\n  MIG 1g.10gb  Device  0:\n",
    "met": "2 of 2\n",
    "nvbandwidth.txt": sdumont_study.exclusive(0),
    "times.txt": "host_to_device_memcpy_ce 100.0 110.0 1/9 7/9\n",
    "power.csv": "105.0, 00000000:81:00.0, 300.0\n",
    "bench.txt.err": "exit status 1\n",
    "node-n1.txt": "replayed: x\n",
    "pair-n1+n2.txt": "nonsense\n",
}


def a_study(folder: Path) -> Study:
    """Two nodes, every kind of job, everything done."""
    nodes = tuple(ClusterNode(n, "p", True, "idle", 64, 512_000, 8) for n in ("n1", "n2"))
    wishes = StudyWishes(nodes=2, between_nodes=True, shapes=(Shape(1, 1), Shape(2, 2)))
    host = load_host(GPU_NODE)
    planned = experiments_for(nodes, nodes, {"n1": host, "n2": host}, wishes)
    made = Study("abc", wishes, nodes, nodes, GPU_NODE, (), planned)
    held = StudyFolder(folder)
    held.create(made)
    held.close()
    for one in made.experiments:
        for task in range(one.jobs):
            attempt = folder / f"raw/{one.id}/task-{task}/7.0"
            attempt.mkdir(parents=True)
            for name, text in {**FILES, "node": f"{one.nodes[0]}\n", "done": ""}.items():
                (attempt / name).write_text(text)
    return made


def shown(folder: Path, width: int = 40) -> str:
    """The report in both of its forms."""
    found = read_sources([folder])
    made: StudyReport = study_report("x", found.jobs, found.collective, found.missing, found.gaps)
    json.loads(encode("slurm-report", made))
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(slurm_study_text(made, everything=True))
    return out.getvalue()


def test_a_whole_study_is_read(tmp_path: Path) -> None:
    a_study(tmp_path)
    text = shown(tmp_path, 100)
    assert "12 jobs on 2 nodes" in text
    assert len(read_sources([tmp_path, tmp_path / "."]).jobs) == 12


HOSTILE = ("\x1b]0;owned\x07\x1b[31m", "[red]x[/red]", "\x9b2J", "\u202eevil", "a\rb")


@pytest.mark.parametrize("name", sorted(FILES))
def test_one_damaged_file_costs_one_job_at_most(tmp_path: Path, name: str) -> None:
    a_study(tmp_path)
    chance = random.Random(name)
    path = tmp_path / f"raw/exclusive-n1-numa0/task-0/7.0/{name}"
    if name.startswith(("node-", "pair-")):
        path = tmp_path / f"raw/collective/task-0/7.0/{name}"
    for _ in range(2):
        text = bytearray(FILES[name].encode())
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


@pytest.mark.parametrize("text", ["Cpus_allowed_list:\t5-3\n", "Mems_allowed_list:\t-\n"])
def test_a_list_that_is_none_is_a_gap(tmp_path: Path, text: str) -> None:
    a_study(tmp_path)
    (tmp_path / "raw/exclusive-n1-numa0/task-0/7.0/allowed.txt").write_text(text)
    assert "allowed.txt" in shown(tmp_path, 200)


@pytest.mark.parametrize("said", HOSTILE)
def test_what_files_say_never_reaches_the_terminal_raw(tmp_path: Path, said: str) -> None:
    a_study(tmp_path)
    for path in tmp_path.glob("raw/*/*/*/*"):
        if path.name in ("node", "met", "nvbandwidth.txt.err", "bench.txt.err"):
            path.write_text(said)
        elif path.name in ("nvbandwidth.txt", "node-n1.txt"):
            path.write_text(f"replayed: {said}\n{path.read_text()}")
    text = shown(tmp_path, 200)
    for character in "\x1b\x07\x9b\u202e\r":
        assert character not in text


def test_files_of_odd_kinds_are_passed_over(tmp_path: Path) -> None:
    a_study(tmp_path)
    attempt = tmp_path / "raw/exclusive-n1-numa0/task-0/7.0"
    os.mkfifo(attempt / "fifo")
    (attempt / "power.csv").unlink()
    (attempt / "power.csv").symlink_to("/dev/zero")
    (attempt / "job.txt").unlink()
    (attempt / "job.txt").mkdir()
    assert "exclusive-n1-numa0" in shown(tmp_path)


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
