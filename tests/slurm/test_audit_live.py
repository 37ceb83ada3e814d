"""The planted misplacement, the hooks, the flags and captures of nodes, on a real Slurm."""

import json
import sys
import time
from pathlib import Path

import pytest

from homenode.cluster.slurm.client import ask_jobs, ask_tasks
from homenode.cluster.slurm.record import parse_record, render_hooks
from homenode.cluster.slurm.scontrol import parse_scontrol_jobs
from homenode.cluster.slurm.slurm_nodes import SHAPES_COMMAND, parse_shapes, read_shapes
from homenode.cluster.slurm.squeue import parse_squeue_jobs
from homenode.vm.host_sources import read_hosts
from tests.command_line import homenode
from tests.slurm.testbed import Testbed, submit, until, until_runs

pytestmark = pytest.mark.slurm

NODE = str(Path(__file__).with_name("gpu-node.toml"))


def test_a_job_captures_each_of_its_nodes(slurm: Testbed, tmp_path: Path) -> None:
    """First: it needs all nodes, of which the planted job takes a part."""
    program = f"{sys.executable} -m homenode capture -o {tmp_path}/$SLURMD_NODENAME.tar.gz"
    slurm.client("srun", "-p", "parts", "-N3", "--ntasks-per-node=1", "bash", "-c", program)
    pool = read_hosts([str(tmp_path)])
    assert [host.name for host in pool.hosts] == ["gpu01", "gpu02", "gpu03"]
    assert pool.unread == ()


def test_the_planted_misplacement_is_named(slurm: Testbed, far: str) -> None:
    conf = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    done = homenode("slurm", "audit", "--host", NODE, "--json", env=conf, whole=True)
    bad = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "warning"]
    assert done.exit_code == 1 and [f["id"] for f in bad] == ["job-gpu-far"]
    assert bad[0]["subject"].startswith(f"job {far} (")
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


def test_both_of_slurms_listings_tell_the_same(slurm: Testbed, far: str) -> None:
    several = submit(slurm, "-N2", "-n3", "-c4", "--gres=gpu:1")
    until_runs(slurm, several)
    every = {job.number: job for job in parse_squeue_jobs(slurm.client("squeue", "--json"))}
    for number in (far, several):
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
    shown = read_shapes(slurm.client("scontrol", "show", "node"), "nodes")
    assert shown == parse_shapes(slurm.client(*SHAPES_COMMAND)) and len(shown) == 3


def test_its_files_are_found_good_but_for_what_a_testbed_lacks(slurm: Testbed) -> None:
    files = [str(slurm.base / name) for name in ("gres.conf", "slurm.conf")]
    words = (*files, "--host", NODE, "--cgroup", str(slurm.base / "cgroup.conf"), "--json")
    done = homenode("slurm", "check", *words, whole=True)
    found = {f["id"] for f in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 1 and "slurm-task-plugin" in found
    assert not [f for f in found if f.startswith(("gres-c", "gres-l", "slurm-s"))]


def test_the_hooks_keep_what_a_job_had(slurm: Testbed) -> None:
    spool, directory = slurm.base / "records", slurm.base / "hooks"
    directory.mkdir()
    for name, text in render_hooks(str(spool), str(directory)).items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    with (slurm.base / "slurm.conf").open("a") as file:
        file.write(
            f"Prolog={directory}/prolog.sh\nEpilog={directory}/epilog.sh\n"
            f"TaskProlog={directory}/task_prolog.sh\nPrologFlags=Alloc\n"
        )
    slurm.client("scontrol", "reconfigure")
    job = _kept_job(slurm, spool)
    slurm.client("scancel", job)
    path = spool / f"done/{job}.gpu02.rec"
    until(lambda: path.exists() and path.read_text(), f"{path}")
    record = parse_record(path.read_text(), "record")
    assert (record.job, record.node, record.name) == (job, "gpu02", "kept job")
    assert str(record.owned) == "0-1"
    assert record.tasks and record.tasks[0].pus
    assert any(pus for _, pus in record.pus_of_node)
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
            if tasks.exists() and "\ntask " in tasks.read_text():
                return job
            time.sleep(0.2)
        slurm.client("scancel", job)
        end = time.monotonic() + 180
        while "gpu02" in slurm.client("squeue", "-h", "-j", job, "-t", "R,CG", "-o", "%N"):
            assert time.monotonic() < end, slurm.client("squeue")
            time.sleep(0.2)
    raise AssertionError("expected hooks that keep what a job had")
