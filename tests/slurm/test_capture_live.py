"""Captures that a Slurm job makes of its nodes are a pool."""

import sys
from pathlib import Path

import pytest

from homenode.vm.host_sources import read_hosts
from tests.slurm import testbed

pytestmark = pytest.mark.slurm


def test_a_job_captures_each_of_its_nodes(slurm: testbed.Testbed, tmp_path: Path) -> None:
    program = f"{sys.executable} -m homenode capture -o {tmp_path}/$SLURMD_NODENAME.tar.gz"
    slurm.client("srun", "-p", "parts", "-N3", "--ntasks-per-node=1", "bash", "-c", program)
    pool = read_hosts([str(tmp_path)])
    assert [host.name for host in pool.hosts] == ["gpu01", "gpu02", "gpu03"]
    assert pool.unread == ()
