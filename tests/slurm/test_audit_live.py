"""The planted misplacement, the hooks and the flags, on a real Slurm."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.cli import main, terminal
from homenode.cluster.slurm.client import ask_jobs, ask_tasks
from homenode.cluster.slurm.record import hooks, parse_record
from homenode.cluster.slurm.tools.scontrol import parse_scontrol_jobs
from homenode.cluster.slurm.tools.slurm_nodes import SHAPES_COMMAND, parse_shapes, shown_shapes
from homenode.cluster.slurm.tools.squeue import parse_squeue_jobs
from tests.slurm.testbed import Testbed, running

pytestmark = pytest.mark.slurm

NODE = str(Path(__file__).with_name("gpu-node.toml"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Testbed]:
    # A socket's path must be short: pytest's own folders may be too deep.
    with tempfile.TemporaryDirectory(prefix="homenode-") as folder:
        base = Path(folder) / "slurm"
        base.parent.chmod(0o755)
        with running(base) as testbed:
            yield testbed


def submit(slurm: Testbed, *options: str) -> str:
    words = ("sbatch", "--parsable", "-p", "parts", "-o", "/dev/null", "--mem=100", *options)
    return slurm.client(*words, "--wrap=sleep 300").strip()


def until_runs(slurm: Testbed, job: str) -> None:
    end = time.monotonic() + 180
    while slurm.client("squeue", "-h", "-j", job, "-o", "%T").strip() != "RUNNING":
        assert time.monotonic() < end, slurm.client("squeue")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def planted(slurm: Testbed) -> str:
    """A job with CPUs on socket 1, since socket 0 is full, and two of its GPUs on socket 0."""
    until_runs(slurm, submit(slurm, "-w", "gpu01", "-n1", "-c32"))
    job = submit(slurm, "-w", "gpu01", "-n1", "-c8", "--gres=gpu:6")
    until_runs(slurm, job)
    return job


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    terminal.console.cache_clear()
    monkeypatch.setattr("sys.argv", ["homenode", "slurm", *arguments])
    code: object = 0
    try:
        main.main()
    except SystemExit as end:
        code = end.code
    return int(str(code or 0)), capsys.readouterr().out


def test_the_planted_misplacement_is_named(
    slurm: Testbed,
    planted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    code, out = run(["audit", "--host", NODE, "--json"], monkeypatch, capsys)
    bad = [f for f in json.loads(out)["findings"] if f["severity"] == "warning"]
    assert code == 1 and [f["id"] for f in bad] == ["job-gpu-far"]
    assert bad[0]["subject"].startswith(f"job {planted} (")
    assert "gpu0 (0000:11:00.0), gpu1 (0000:12:00.0) are" in bad[0]["expected"]
    assert bad[0]["observed"].endswith("on node 1")


def test_processes_of_a_job_are_looked_at(slurm: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    job = submit(slurm, "-w", "gpu03", "-n1", "-c2", "--gres=gpu:1")
    until_runs(slurm, job)
    (one,) = ask_jobs([job])
    end = time.monotonic() + 180
    while not (tasks := ask_tasks(one, "gpu03")):  # the batch shell may not have started yet
        assert time.monotonic() < end
    assert all(task.task.startswith("batch.") for task in tasks)
    assert {task.policy for task in tasks} == {"default"} and tasks[0].memory_nodes
    slurm.client("scancel", job)


def test_both_of_slurms_listings_tell_the_same(slurm: Testbed, planted: str) -> None:
    several = submit(slurm, "-N2", "-n3", "-c4", "--gres=gpu:1")
    until_runs(slurm, several)
    every = {job.number: job for job in parse_squeue_jobs(slurm.client("squeue", "--json"))}
    for number in (planted, several):
        (text,) = parse_scontrol_jobs(slurm.client("scontrol", "show", "job", "-d", number))
        listed = every[number]
        assert (text.id, text.name, text.state) == (listed.id, listed.name, listed.state)
        assert text.queue_wait_s == listed.queue_wait_s is not None
        for a, b in zip(text.shares, listed.shares, strict=True):
            assert a.gpus == b.gpus and a.node == b.node
            assert b.cores is not None and a.cpu_ids is not None
            assert {(cpu // 2 // 16, cpu // 2 % 16) for cpu in a.cpu_ids} == set(b.cores)
    slurm.client("scancel", several)


def test_both_of_slurms_listings_give_a_node_its_shape(slurm: Testbed) -> None:
    shown = shown_shapes(slurm.client("scontrol", "show", "node"), "nodes")
    assert shown == parse_shapes(slurm.client(*SHAPES_COMMAND)) and len(shown) == 3


def test_its_files_are_found_good_but_for_what_a_testbed_lacks(
    slurm: Testbed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(slurm.base / name) for name in ("gres.conf", "slurm.conf")]
    cgroup = ["--cgroup", str(slurm.base / "cgroup.conf")]
    code, out = run(["check", *files, "--host", NODE, *cgroup, "--json"], monkeypatch, capsys)
    found = {f["id"] for f in json.loads(out)["findings"]}
    assert code == 1 and "slurm-task-plugin" in found
    assert not [f for f in found if f.startswith(("gres-c", "gres-l", "slurm-s"))]


def test_the_hooks_keep_what_a_job_had(slurm: Testbed) -> None:
    spool, folder = slurm.base / "records", slurm.base / "hooks"
    folder.mkdir()
    for name, text in hooks(str(spool), str(folder)).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with (slurm.base / "slurm.conf").open("a") as file:
        file.write(
            f"Prolog={folder}/prolog.sh\nEpilog={folder}/epilog.sh\n"
            f"TaskProlog={folder}/task_prolog.sh\nPrologFlags=Alloc\n"
        )
    slurm.client("scontrol", "reconfigure")
    job = _kept_job(slurm, spool)
    slurm.client("scancel", job)
    _until(spool / f"done/{job}.gpu02.rec")
    record = parse_record((spool / f"done/{job}.gpu02.rec").read_text(), "record")
    assert (record.job, record.node, record.name) == (job, "gpu02", "kept job")
    assert str(record.owned) == "0-1" and record.end_s is not None and record.start_s is not None
    assert record.tasks and record.tasks[0].pus and record.pus_of_node
    state = slurm.client("sinfo", "-h", "-n", "gpu02", "-N", "-p", "parts", "-o", "%T")
    assert "drain" not in state


def _kept_job(slurm: Testbed, spool: Path) -> str:
    """A job that the hooks saw: a slurmd runs them when it has read the files again, and says so to
    no one."""
    for _ in range(20):
        job = submit(slurm, "-w", "gpu02", "-n1", "-c2", "--gres=gpu:2", "-J", "kept job")
        until_runs(slurm, job)
        tasks = spool / f"live/{job}.gpu02.tasks"
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if tasks.exists() and tasks.read_text():
                return job
            time.sleep(0.2)
        slurm.client("scancel", job)
        end = time.monotonic() + 180
        while "gpu02" in slurm.client("squeue", "-h", "-j", job, "-t", "R,CG", "-o", "%N"):
            assert time.monotonic() < end, slurm.client("squeue")
            time.sleep(0.2)
    raise AssertionError("expected hooks that keep what a job had")


def _until(path: Path) -> None:
    end = time.monotonic() + 180
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, f"expected {path}"
        time.sleep(0.2)
