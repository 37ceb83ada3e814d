"""A Slurm of its own for each file of tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.testbed import Testbed, running, submit, until_runs


@pytest.fixture(scope="module")
def slurm() -> Iterator[Testbed]:
    # A socket's path must be short: pytest's own directories may be too deep.
    with tempfile.TemporaryDirectory(prefix="homenode-") as directory:
        base = Path(directory) / "slurm"
        base.parent.chmod(0o755)
        with running(base) as testbed:
            yield testbed


@pytest.fixture(scope="module")
def far(slurm: Testbed) -> str:
    """A job with CPUs on socket 1, since socket 0 is full, and two of its GPUs on socket 0."""
    until_runs(slurm, submit(slurm, "-w", "gpu01", "-n1", "-c32"))
    job = submit(slurm, "-w", "gpu01", "-n1", "-c8", "--gres=gpu:6")
    until_runs(slurm, job)
    return job
