"""What a study measures, and which slow nodes it may name.

Slurm's clients and nvbandwidth are stand-ins; homenode is real on a described node.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.arguments import StudyOptions
from homenode.cluster.slurm.study.directory import StudyDirectory, read_study
from homenode.cluster.slurm.study.evidence import StudySources, parse_collective, parse_record
from homenode.cluster.slurm.study.experiments import Experiment, NodeSharing, Study, render_script
from homenode.cluster.slurm.study.locality import CGROUP, VISIBLE, parse_gpus
from homenode.cluster.slurm.study.maps import StudyMatrix, find_slow_copies
from homenode.cluster.slurm.study.report import build_study_report
from homenode.measure.results.model import Origin
from tests.processes import write_program
from tests.slurm.gpu_nodes import job_text

HERE = Path(__file__).parent
GPU_NODE = str(HERE / "gpu-node.toml")
JOB = job_text(5, "10:00:00", "10:00:07", "CPU_IDs=32-35 Mem=100 GRES=gpu:h100:2(IDX:3-4)")
ALONE = Experiment(
    "shared-2gpu-n1-alone-r1", NodeSharing.ALONE, ("n1",), "parts", 2, cpus=4, block=3
)
BOUND = replace(ALONE, id="exclusive-n1-numa1-r1", mode=NodeSharing.EXCLUSIVE, numa=1, cpus=None)
TOGETHER = replace(ALONE, id="shared-2gpu-n1-together-r1", mode=NodeSharing.TOGETHER, jobs=3)


NOTHING = "#!/bin/sh\n"


def run_job(
    tmp_path: Path,
    one: Experiment,
    options: StudyOptions,
    program_text: str | None = None,
    **variables: str,
) -> tuple[int, dict[str, str]]:
    """The exit status of a job, and the files of its attempt. program_text: of another homenode."""
    directory = tmp_path / "study"
    directory.mkdir(exist_ok=True)
    tools = tmp_path / "bin"
    write_program(tools / "scontrol", f"#!/bin/bash\ncat <<X\n{JOB}X\n")
    write_program(tools / "squeue", "#!/bin/bash\necho 5; echo 9\n")
    words = shlex.join((sys.executable, str(HERE / "gpu_node_program.py")))
    homenode = tools / "homenode"
    write_program(homenode, program_text or f'#!/bin/sh\nexec {words} "$@"\n')
    environment = {
        "PATH": f"{tools}:{HERE / 'programs'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "5",
        "SLURMD_NODENAME": "n1",
        "HOME": str(tmp_path),
        "STAND_IN_HOMENODE": str(homenode),
        **variables,
    }
    script = render_script(one, replace(options, homenode=str(homenode)), "abc")
    done = subprocess.run(
        ["bash", "-c", script], cwd=directory, env=environment, capture_output=True, timeout=300
    )
    attempt = directory / f"raw/{one.id}/task-0/5.{variables.get('SLURM_RESTART_COUNT', '0')}"
    return done.returncode, {path.name: path.read_text() for path in attempt.iterdir()}


def a_study(options: StudyOptions, *experiments: Experiment) -> Study:
    return Study("abc", options, (), (), GPU_NODE, (), experiments)


def test_a_job_leaves_an_ordinary_run_with_raw_output_and_time(tmp_path: Path) -> None:
    app, given = ("sh", "-c", "echo speed $OMP_NUM_THREADS"), {"OMP_NUM_THREADS": "7"}
    options = StudyOptions(tests=(), app=app, metric="speed ([0-9]+)", app_directory=str(tmp_path))
    for one in (ALONE, BOUND):
        code, files = run_job(tmp_path, one, options, CUDA_VISIBLE_DEVICES="3,4", **given)
        assert code == 0, files
        assert {"done", "ended", "exit", "job.txt", "bench.txt"} <= set(files)
    found = read_study(tmp_path / "study", a_study(options, ALONE, BOUND))
    assert not found.unmeasured and not found.missing
    alone, bound = found.jobs
    head = bound.run.head
    assert (head.experiment, head.block, head.boots, head.nodes) == ("abc", 3, ("5.0",), (1,))
    assert head.started_s is not None
    assert head.origin is Origin.SYNTHESISED  # the stand-in says that it made its figures up
    directory = tmp_path / "study/results" / head.system / head.name
    assert len(list((directory / "raw").iterdir())) == 3
    assert {s.value for s in bound.samples if s.metric == "app-rate:sh"} == {7.0}
    # Of GPUs 3 and 4 the second is on node 1.
    copies = [s for s in bound.samples if (s.metric, s.variant) == ("h2d-bandwidth", None)]
    rates = {str(copy.device): copy.value / 1e9 for copy in copies}
    assert rates == {"0000:14:00.0": 34.1, "0000:81:00.0": 55.3}
    assert (alone.record.queue_wait_s, alone.record.other_jobs) == (7.0, 1)
    # CPU ids 32-35 are the first cores of socket 1, and GPU 3 is on socket 0.
    assert alone.cpu_nodes == (1,)
    report = build_study_report("x", StudySources(jobs=found.jobs))
    assert [str(job.locality) for job in report.jobs] == ["lost", "bound by the study"]


def test_a_job_notes_which_gpus_its_cgroup_lets_it_open(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for minor, (address, is_open) in enumerate((("0009:01:00.0", False), ("0019:01:00.0", True))):
        directory = root / f"proc/driver/nvidia/gpus/{address}"
        directory.mkdir(parents=True)
        text = f"Model: \t NVIDIA GH200\nGPU UUID: \t GPU-{minor}a\nDevice Minor: \t {minor}\n"
        (directory / "information").write_text(text)
        (root / "dev").mkdir(exist_ok=True)
        if is_open:
            (root / f"dev/nvidia{minor}").touch()
    given = {"SLURM_JOB_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0", "node_root": str(root)}
    _, files = run_job(tmp_path, ALONE, StudyOptions(tests=()), NOTHING, **given)
    shown, numbers = parse_gpus(files["gpus.txt"])
    own = (Bdf.parse("0019:01:00.0"),)
    assert (shown, str(numbers)) == ({CGROUP: own, VISIBLE: own}, "1")
    renamed = files["gpus.txt"].replace("visible 0", "visible GPU-1a")
    assert parse_gpus(renamed)[0] == shown


def test_a_job_that_can_measure_nothing_fails_and_says_why(tmp_path: Path) -> None:
    options = StudyOptions(tests=())
    (tmp_path / "bin").mkdir()
    code, files = run_job(tmp_path, ALONE, options, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert code == 2
    assert "done" not in files
    assert files["exit"] == "2\n"
    assert "no test of gpu-bandwidth, gpu-peer" in files["bench.txt.err"]
    assert "neither nvbandwidth nor PyTorch" in files["bench.txt.err"]


@pytest.mark.parametrize("one", [ALONE, replace(ALONE, id="look-n1", mode=NodeSharing.LOOK)])
@pytest.mark.parametrize(
    ("program_text", "code", "reason"),
    [
        (
            f"#!{sys.executable} -IS\nimport homenode\n",  # a virtual environment's older Python
            1,
            "homenode did not start, which needs its virtual environment and Python 3.11 or later "
            "on the node: ModuleNotFoundError: No module named 'homenode'",
        ),
        ("#!/nowhere/python\n", 12, "needs its virtual environment and Python 3.11 or later"),
        ("#!/bin/sh\necho homenode: no space >&2; exit 3\n", 3, "no space"),
        ("#!/bin/sh\necho 3 of 12 steps done >&2; kill -9 $$\n", 137, "3 of 12 steps done"),
    ],
    ids=["older Python", "no Python", "error", "killed"],
)
def test_a_job_without_results_is_not_done_and_names_what_its_node_lacks(
    tmp_path: Path, one: Experiment, program_text: str, code: int, reason: str
) -> None:
    status, files = run_job(tmp_path, one, StudyOptions(tests=()), program_text)
    assert status // 10 == code if code == 12 else status == code
    assert "done" not in files
    study = a_study(StudyOptions(), one)
    _, exits = StudyDirectory(tmp_path / "study").collect_outcomes(study)
    (text,) = exits.values()
    assert text.startswith(f"{status}: ") and reason in text
    (line,) = read_study(tmp_path / "study", study).missing
    assert line == f"{one.id}: its script ended with exit status {text} (job 5.0)"


def test_an_app_in_a_directory_that_the_node_lacks_is_no_result(tmp_path: Path) -> None:
    options = StudyOptions(tests=(), app=("true",), app_directory="/nowhere")
    code, files = run_job(tmp_path, ALONE, options, NOTHING)
    assert code != 0 and "done" not in files
    assert "/nowhere: No such file or directory" in files["bench.txt.err"]


def test_how_far_a_benchmark_came_is_no_open_point_and_how_it_ended_is() -> None:
    progress = "".join(f"{n} of 12 steps done: stream, {60 - n} s left\n" for n in range(2, 9))
    well = f"warning: CPUs 0-3: expected x, found y (bench-busy)\n{progress}wrote results/g/x\n"
    assert parse_record({"bench.txt.err": well}, 1).gaps == ()
    badly = f"{progress}homenode: no space\nhint: x\n"
    (gap,) = parse_record({"bench.txt.err": badly}, 1).gaps
    assert (gap.subject, gap.reason) == ("bench.txt", "homenode: no space; hint: x")


@pytest.mark.parametrize(
    ("others", "restart", "expected"),
    [((1, 2), "0", "3 of 3\n"), ((), "0", "1 of 3\n"), ((1, 2), "1", "1 of 3\n")],
)
def test_jobs_wait_for_each_other_before_they_measure(
    tmp_path: Path, others: tuple[int, ...], restart: str, expected: str
) -> None:
    meeting = tmp_path / f"study/raw/{TOGETHER.id}/meeting-5.0"
    meeting.mkdir(parents=True)
    for other in others:
        (meeting / str(other)).touch()
    given = {"meet_seconds": "1", "SLURM_RESTART_COUNT": restart}
    _, files = run_job(tmp_path, TOGETHER, StudyOptions(tests=()), NOTHING, **given)
    assert files["met"] == expected
    # One that comes later does not count one that went on without it.
    left = meeting.with_name(f"meeting-5.{restart}")
    assert (left / "0.gone").exists() is (expected[0] == "1")


def on_nodes(figures: dict[str, list[float]]) -> list[StudyMatrix]:
    shape: dict[str, Any] = {"rows": (0,), "columns": tuple("abcd"), "homes": (0,) * 4}
    shape |= {"metric": "h2d-bandwidth", "homes_measured": False}
    return [StudyMatrix(node=n, cells=(tuple(of),), **shape) for n, of in figures.items()]


def test_slow_nodes_are_named_with_their_slowest_place() -> None:
    of_nodes = {
        "n1": [50.0, 50.0, 50.0, 50.0],
        "n2": [50.0, 30.0, 49.0, 50.0],
        "n3": [40.0, 38.0, 40.0, 46.0],
        "n4": [51.0, 50.0, 50.0, 50.0],
    }
    found = {one.node: one.part for one in find_slow_copies(on_nodes(of_nodes))}
    assert found == {"n2": "b from NUMA node 0", "n3": "a from NUMA node 0 and 2 more"}
    assert find_slow_copies(on_nodes({"n1": [50] * 4, "n2": [10] * 4})) == ()


def test_of_two_nodes_that_have_a_gpu_nothing_says_which_is_slow() -> None:
    three = on_nodes({"n1": [50.0] * 4, "n2": [50.0] * 4, "n3": [50.0] * 4})
    fewer = replace(three[0], node="n3", columns=("a",), cells=((50.0,),), homes=(0,))
    slow = replace(three[1], cells=((50.0, 30.0, 50.0, 50.0),))
    assert find_slow_copies((three[0], slow, fewer)) == ()


def test_an_all_reduce_that_failed_is_a_gap() -> None:
    found = parse_collective({"node-a.txt": "srun: error\n", "node-a.err": "exit status 1\n"})
    assert found.nodes == ()
    assert len(found.gaps) == 2
