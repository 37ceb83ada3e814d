"""What `pool export --for slurm` prints, under a real slurmctld, and captures made by a job."""

import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.cluster.pool.capture import store_pool
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.sources import load_pool
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.pool.pools import pool_of, with_vm
from tests.seeds import seeds
from tests.slurm import testbed

pytestmark = pytest.mark.slurm
HOST = str(Path(__file__).parent / "gpu-node.toml")
USED = {"gpu01": ("gpu4", "gpu1"), "gpu02": ("gpu2",), "gpu03": ()}
"""Sizes that the nodes have already: 3, 6 and 8 GPUs are left, on 1, 2 and 2 sockets."""

JOBS = 12
EXPECTED = {1: "gpu01", 2: "gpu01", 4: "gpu02", 8: "gpu03"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[testbed.Testbed]:
    with tempfile.TemporaryDirectory(prefix="homenode-") as folder:
        Path(folder).chmod(0o755)
        with testbed.running(Path(folder) / "slurm") as running:
            yield running


def submit(slurm: testbed.Testbed, gpus: int, *words: str) -> str:
    return slurm.client(
        *("sbatch", "--parsable", "-p", "parts", "-o", "/dev/null", "--mem=100", "-n1"),
        *(f"--gres=gpu:{gpus}", *words, "--wrap", "sleep 600"),
    ).strip()


def node_of(slurm: testbed.Testbed, job: str) -> str:
    def node() -> str:
        return slurm.client("squeue", "-h", "-j", job, "-t", "R", "-o", "%N").strip()

    testbed._until(lambda: bool(node()), f"job {job} to run")
    return node()


def until_ended(slurm: testbed.Testbed, job: str) -> None:
    testbed._until(lambda: not slurm.client("squeue", "-h", "-j", job), f"job {job} to end")


def test_jobs_go_where_the_pool_says(slurm: testbed.Testbed, tmp_path: Path) -> None:
    sizes = {one.name: one for one in default_flavours()}
    hosts = []
    for name, used in USED.items():
        host = load_host(HOST)
        for number, flavour in enumerate(used):
            host = with_vm(host, sizes[flavour], f"vm-{number}")
            # What the pool counts, Slurm has given out as well.
            assert node_of(slurm, submit(slurm, sizes[flavour].gpus, "-w", name)) == name
        hosts.append((name, host))
    store_pool(pool_of(hosts), tmp_path / "pool")
    exported = homenode("pool", "export", "--pool", tmp_path / "pool", "--for", "slurm").stdout
    for line in exported.splitlines():
        slurm.client("scontrol", *line.split())
    weights = {}
    for name in USED:
        shown = slurm.client("scontrol", "show", "node", name)
        weights[name] = int(re.findall(r"\bWeight=(\d+)", shown)[0])
        assert re.findall(r"ActiveFeatures=(\S+)", shown) == re.findall(
            rf"NodeName={name} .*ActiveFeatures=(\S+)", exported
        )
    assert weights["gpu01"] < weights["gpu02"] < weights["gpu03"]
    for gpus, node in EXPECTED.items():
        job = submit(slurm, gpus, f"--constraint=homenode_gpu{gpus}")
        assert node_of(slurm, job) == node, f"{gpus} GPUs"
        slurm.client("scancel", job)
        until_ended(slurm, job)


@pytest.mark.parametrize("seed", seeds(20, 20))
def test_a_stream_of_jobs_goes_where_the_pool_says(
    slurm: testbed.Testbed, tmp_path: Path, seed: int
) -> None:
    """Jobs arrive and leave; each goes to the node of least weight with its feature."""
    slurm.client("scancel", "-u", "root")
    testbed._until(lambda: not slurm.client("squeue", "-h"), "no job to run")
    draw, sizes = random.Random(seed), {one.gpus: one for one in default_flavours()}
    hosts, jobs = {name: load_host(HOST) for name in USED}, dict[str, str]()
    refused = 0
    for number in range(JOBS):
        if jobs and draw.random() < 0.4:
            job = draw.choice(sorted(jobs))
            slurm.client("scancel", job)
            until_ended(slurm, job)
            name = jobs.pop(job)
            left = tuple(vm for vm in hosts[name].domains if vm.name != job)
            hosts[name] = replace(hosts[name], domains=left)
        store_pool(pool_of(list(hosts.items())), tmp_path / f"pool{number}")
        export = ("pool", "export", "--pool", tmp_path / f"pool{number}", "--for", "slurm")
        lines = homenode(*export).stdout.splitlines()
        for line in lines:
            slurm.client("scontrol", *line.split())
        gpus = draw.choice((1, 1, 2, 2, 3, 4, 8)) if draw.random() < 0.9 else 8
        feature = next(f"homenode_gpu{size}" for size in sorted(sizes) if size >= gpus)
        able = [
            (int(re.findall(r"\bWeight=(\d+)", line)[0]), re.findall(r"NodeName=(\S+)", line)[0])
            for line in lines
            if feature in re.findall(r"\bActiveFeatures=(\S+)", line)[0].split(",")
        ]
        if not able:
            refused += 1
            continue
        job = submit(slurm, gpus, f"--constraint={feature}")
        name = node_of(slurm, job)
        assert name in [node for weight, node in able if weight == min(able)[0]], (number, lines)
        size = next(one for size, one in sorted(sizes.items()) if size >= gpus)
        hosts[name], jobs[job] = with_vm(hosts[name], size, job), name
    assert refused < JOBS / 2


def test_a_job_captures_each_of_its_nodes(slurm: testbed.Testbed, tmp_path: Path) -> None:
    """As docs/tasks/slurm-pool.md has it."""
    slurm.client("scancel", "-u", "root")
    program = f"{sys.executable} -m homenode capture -o {tmp_path}/$SLURMD_NODENAME.tar.gz"
    slurm.client("srun", "-p", "parts", "-N3", "--ntasks-per-node=1", "bash", "-c", program)
    pool = load_pool([str(tmp_path)])
    assert [host.name for host in pool.hosts] == ["gpu01", "gpu02", "gpu03"]
    assert pool.failures == ()
