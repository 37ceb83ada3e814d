"""gres.conf of 2 to 8 GPUs on the described machines, judged as its text says."""

from functools import cache
from itertools import product

import pytest

from homenode.cluster.slurm.check import check
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import RightGpu, right_gpus
from homenode.cluster.slurm.numbering import core_order
from homenode.cpuset import CpuSet
from homenode.findings import Severity
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.slurm.gpu_nodes import MESH, MI250X, TESTBED, machine
from tests.slurm.test_check import CGROUP, CLUSTER, NEW

DESCRIBED = (
    "hgx-h100",
    "gh200x4",
    "hgx-a100-ibm",
    "mi350x-epyc9575f",
    "rtx4090-epyc7702",
    "h200-xeon8558",
    "rtxpro6000-xeon8468v",
    "epyc-nps4-gpu-nic",
    "small-2n8c-2gpu",
)
OWN = {"testbed": TESTBED, "mi250x": MI250X, "mesh": MESH}
CASES = tuple(product((*DESCRIBED, *OWN), ("right", "none", "wrong"), ("right", "none", "wrong")))


@cache
def host(name: str) -> Host:
    return machine(OWN[name]) if name in OWN else load_host(name)


@cache
def right(name: str) -> tuple[RightGpu, ...]:
    return right_gpus(host(name))


def elsewhere(name: str, gpu: RightGpu) -> CpuSet | None:
    """Cores of the first other node."""
    every = CpuSet(range(len(core_order(host(name)).pus)))
    away = every - (gpu.cores or CpuSet())
    first = away.first()
    return None if first is None else CpuSet([first])


def gres_line(name: str, gpu: RightGpu, cores: str, links: str) -> str:
    words = [f"Name=gpu File=/dev/nvidia{gpu.index}"]
    if cores != "none":
        words.append(f"Cores={gpu.cores if cores == 'right' else elsewhere(name, gpu)}")
    count = len(right(name))
    own = gpu.links or tuple(-1 if n == gpu.index else 0 for n in range(count))
    if links == "right":
        words.append(f"Links={','.join(map(str, own))}")
    if links == "wrong":
        words.append(f"Links={','.join(str(number + 1) for number in own)}")
    return " ".join(words)


@pytest.mark.parametrize(("name", "cores", "links"), CASES)
def test_variants_are_judged_as_their_text_says(name: str, cores: str, links: str) -> None:
    for count in range(2, min(8, len(right(name))) + 1):
        judge(name, count, cores, links)


def judge(name: str, count: int, cores: str, links: str) -> None:
    gpus = right(name)
    nodes = [node for node in host(name).nodes if node.pus]
    each = len(core_order(host(name)).pus) // len(nodes)
    gres = "\n".join(gres_line(name, gpu, cores, links) for gpu in gpus[:count])
    slurm = (
        f"{CLUSTER}NodeName=n Sockets={len(nodes)} CoresPerSocket={each} "
        f"ThreadsPerCore={core_order(host(name)).threads} Gres=gpu:{count}\n"
    )
    found = check(
        parse_config(gres, "gres.conf"),
        parse_config(slurm, "slurm.conf"),
        host(name),
        cgroup=parse_config(CGROUP, "cgroup.conf"),
        version=NEW,
    )
    expected = set()
    if len(nodes) > 1 and cores != "right":
        expected.add("gres-cores-missing" if cores == "none" else "gres-cores-wrong")
    if links == "wrong":
        expected.add("gres-links-wrong")
    bad = {f.id for f in found.findings.findings if f.severity is not Severity.INFO}
    assert bad == expected
    stated = {f.id for f in found.findings.findings} - bad
    assert ("gres-count" in stated) == (count < len(gpus))
    again = check(
        parse_config(found.gres, "gres.conf"),
        parse_config(found.slurm, "slurm.conf"),
        host(name),
        cgroup=parse_config(CGROUP, "cgroup.conf"),
        version=NEW,
    )
    assert {f.id for f in again.findings.findings if f.severity is not Severity.INFO} == set()
