"""What `slurmd -G` makes of gres.conf and slurm.conf, and what the check says of them."""

import os
import re
import socket
import stat
import subprocess
from itertools import product
from pathlib import Path

import pytest

from homenode.findings import Severity, are_bad
from homenode.slurm.check import Checked, check
from homenode.slurm.check_slurm import SlurmVersion
from homenode.slurm.config import parse_config
from tests.slurm.gpu_nodes import MESH, machine
from tests.slurm.testbed import missing

pytestmark = pytest.mark.slurm

# The machine of the test is no such node: config_overrides.
CONF = """\
ClusterName=c
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmdSpoolDir={base}
StateSaveLocation={base}
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
SlurmdParameters=config_overrides
NodeName=n NodeHostname={host} NodeAddr=127.0.0.1 Sockets=2 CoresPerSocket=4 \
ThreadsPerCore=1 RealMemory=8192{gres}
PartitionName=p Nodes=n
"""
PROMISES = (
    "",
    "gpu:4",
    "gpu:3",
    "gpu:h100:4",
    "gpu:H100:4",
    "gpu:a100:4",
    "gpu:h100:2,gpu:a100:2",
    "gpu:h100:3,gpu:a100:1",
    "gpu:h100:2,gpu:2",
)
LINES = (
    ("", "0-3"),
    ("h100", "0-3"),
    ("h100", "0-1", "a100", "2-3"),
    ("h100", "0-1", "", "2-3"),
    ("h100", "0-1"),
)


def gres_of(base: Path, words: tuple[str, ...]) -> str:
    return "".join(
        f"Name=gpu {f'Type={kind} ' if kind else ''}File={base}/gpu[{gpus}]\n"
        for kind, gpus in zip(words[::2], words[1::2], strict=True)
    )


def slurm_keeps(base: Path, slurm: str, gres: str) -> int:
    """How many GPUs slurmd has by these files; 0 where it does not start."""
    (base / "slurm.conf").write_text(slurm)
    (base / "gres.conf").write_text(gres)
    done = subprocess.run(
        ["slurmd", "-G", "-f", str(base / "slurm.conf"), "-N", "n"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    counts = re.findall(r"Gres Name=gpu .*?Count=(\d+)", done.stderr + done.stdout)
    return 0 if done.returncode else sum(map(int, counts))


def judged(slurm: str, gres: str) -> Checked:
    return check(
        parse_config(gres, "gres.conf"),
        parse_config(slurm, "slurm.conf"),
        machine(MESH),
        cgroup=parse_config("ConstrainCores=yes\nConstrainDevices=yes\n", "cgroup.conf"),
        version=SlurmVersion(22, 5, 8),
    )


def test_gpus_that_slurmd_ignores_are_critical_and_faultless_files_are_not(tmp_path: Path) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    for gpu in range(4):
        os.mknod(tmp_path / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(4, 70 + gpu))
    host = socket.gethostname().partition(".")[0]
    faultless = 0
    for promise, words in product(PROMISES, LINES):
        text = CONF.format(
            host=host,
            base=tmp_path,
            gres=f" Gres={promise}" if promise else "",
        )
        gres = gres_of(tmp_path, words)
        listed = 2 if words == ("h100", "0-1") else 4
        promised = sum(int(n) for n in re.findall(r":(\d+)", promise))
        is_right = slurm_keeps(tmp_path, text, gres) == listed == promised
        found = judged(text, gres).findings.findings
        wrong = {f.id for f in found if f.severity is Severity.CRITICAL}
        assert bool(wrong & {"gres-count", "gres-type-differs"}) != is_right, (promise, words)
        if is_right:
            cores = gres.replace("[0-1]\n", "[0-1] Cores=0-3\n").replace(
                "[2-3]\n", "[2-3] Cores=4-7\n"
            )
            faultless += "[0-3]" not in cores and not are_bad(judged(text, cores).findings.findings)
    assert faultless >= 2
