"""How a real Slurm numbers GPUs and CPUs where lines and CPUs= are not the plain ones."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.cluster.slurm.audit import audit
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import read_device_order
from homenode.cluster.slurm.job_allocation import build_allocation, node_machine
from homenode.cluster.slurm.scontrol import parse_scontrol_jobs
from homenode.cluster.slurm.slurm_nodes import read_shapes
from tests.slurm import testbed
from tests.slurm.gpu_nodes import TESTBED, machine

pytestmark = pytest.mark.slurm

GRES = """\
AutoDetect=off
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[4-7] Cores=16-31
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[0-3] Cores=0-15
"""
CORES = "CPUs=32 Sockets=2 CoresPerSocket=16 ThreadsPerCore=2"


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[testbed.Testbed]:
    """Nodes that give out cores, and whose gres.conf begins with the GPUs of socket 1."""
    node = testbed._NODE.replace("Sockets=2 CoresPerSocket=16 ThreadsPerCore=2", CORES)
    assert CORES in node
    monkeypatch.setattr(testbed, "_NODE", node)
    monkeypatch.setattr(testbed, "_GRES", GRES)
    with tempfile.TemporaryDirectory(prefix="homenode-") as directory:
        Path(directory).chmod(0o755)
        with testbed.running(Path(directory) / "slurm") as running:
            yield running


def test_its_numbers_are_places_in_gres_conf_and_its_ids_threads(slurm: testbed.Testbed) -> None:
    words = ("sbatch", "--parsable", "-p", "parts", "-o", "/dev/null", "--mem=100", "-n1", "-c4")
    near = ("--gres-flags=enforce-binding", "--gres=gpu:4", "--wrap=sleep 100")
    for _ in range(2):
        slurm.client(*words, "-w", "gpu01", *near)
    end = time.monotonic() + 180
    while len(slurm.client("squeue", "-h", "-t", "RUNNING").splitlines()) < 2:
        assert time.monotonic() < end, slurm.client("squeue")
        time.sleep(0.2)
    jobs = parse_scontrol_jobs(slurm.client("scontrol", "show", "job", "-d"))
    shape = read_shapes(slurm.client("scontrol", "show", "node", "gpu01"), "nodes")["gpu01"]
    # What stands behind a device file is known by its name alone, as with /dev/nvidiaN.
    text = (slurm.base / "gres.conf").read_text().replace(f"{slurm.base}/gpu/gpu", "/dev/nvidia")
    numbers = read_device_order(parse_config(text, "gres.conf")).list_numbers("gpu01")
    there = node_machine(machine(TESTBED))
    placed = [build_allocation(job, job.shares[0], there, shape, numbers) for job in jobs]
    assert sorted(len(one.pus or ()) for one in placed) == [8, 8]
    assert audit(placed).findings == ()
    # Counted by address all of them would be far.
    by_address = [build_allocation(job, job.shares[0], there, shape) for job in jobs]
    assert [f.id for f in audit(by_address).findings] == ["job-gpu-far"] * 2
