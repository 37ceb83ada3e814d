"""What `pool export --for slurm` prints, under a real slurmctld, and captures made by a job."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.cluster.pool.capture import store_pool
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.sources import load_pool
from homenode.vm.sources import load_host
from tests.command_line import homenode
from tests.pool.pools import pool_of, with_vm
from tests.slurm import testbed

pytestmark = pytest.mark.slurm
HOST = str(Path(__file__).parent / "gpu-node.toml")
USED = {"gpu01": ("gpu4", "gpu1"), "gpu02": ("gpu2",), "gpu03": ()}
"""Sizes that the nodes have already: 3, 6 and 8 GPUs are left, on 1, 2 and 2 sockets."""

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


def test_a_job_captures_each_of_its_nodes(slurm: testbed.Testbed, tmp_path: Path) -> None:
    """As docs/tasks/slurm-pool.md has it."""
    slurm.client("scancel", "-u", "root")
    program = f"{sys.executable} -m homenode capture -o {tmp_path}/$SLURMD_NODENAME.tar.gz"
    slurm.client("srun", "-p", "parts", "-N3", "--ntasks-per-node=1", "bash", "-c", program)
    pool = load_pool([str(tmp_path)])
    assert [host.name for host in pool.hosts] == ["gpu01", "gpu02", "gpu03"]
    assert pool.failures == ()
