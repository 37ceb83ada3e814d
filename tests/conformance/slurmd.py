"""`slurmd -G` counts the GPUs of gres.conf, and their cores, as `homenode slurm check` does."""

import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random

from homenode.cluster.slurm.check import check
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.correction import correct
from homenode.cpuset import CpuSet
from homenode.findings import Severity
from tests.conformance.builds import directory, first_line
from tests.conformance.judge import Answer, Judge
from tests.processes import run_text
from tests.slurm import testbed
from tests.slurm.gpu_nodes import machine

HEAD = """\
ClusterName=c
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmdSpoolDir={base}
StateSaveLocation={base}
SlurmdParameters=config_overrides
"""
"""The machine of the test is no such node."""
_CONF = """\
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
NodeName=n NodeHostname={host} NodeAddr=127.0.0.1 Sockets={packages} CoresPerSocket={cores} \\
ThreadsPerCore={threads} RealMemory=8192{gres}
PartitionName=p Nodes=n
"""
_MACHINE = """\
name = "drawn"
packages = {packages}
cores_per_package = {cores}
threads_per_core = {threads}
memory_per_node = "8GiB"
[model.gpu]
class = "gpu"
vendor = 0x10de
device = 0x1db1
[[root]]
node = {nodes}
bus = {buses}
ports = [{ports}]
"""
_MAX_GPUS = 8


@cache
def device_files() -> Path:
    base = directory() / "slurm"
    base.mkdir()
    for gpu in range(_MAX_GPUS):
        os.mknod(base / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(4, 70 + gpu))
    return base


def version() -> str:
    return first_line("slurmd", "-V").rpartition(" ")[2]


def kept_gpus(slurm: str, gres: str, node: str = "n") -> dict[int, CpuSet | None] | None:
    """Cores of each GPU that slurmd has by these files; None where it does not start."""
    base = device_files()
    (base / "slurm.conf").write_text(slurm)
    (base / "gres.conf").write_text(gres)
    done = run_text(["slurmd", "-G", "-f", base / "slurm.conf", "-N", node], timeout=60)
    assert "auth context" not in done.stderr, "munged does not run, without which it reads no file"
    if done.returncode:
        return None
    found: dict[int, CpuSet | None] = {}
    for line in re.findall(r"Gres Name=gpu .*", done.stderr + done.stdout):
        numbers = re.search(r"File=\S+/gpu\[?([\d,-]+)", line)
        cores = re.search(r" Cores=(\S+)", line)
        assert numbers is not None, line
        own = None if cores is None else CpuSet.parse(cores[1], "Cores")
        found |= dict.fromkeys(CpuSet.parse(numbers[1], "File"), own)
    return found


def _lines(draw: Random, gpus: int, cores: int) -> tuple[str, int]:
    """A gres.conf, in one or two parts, and how many GPUs it lists; types and cores are right or
    are not."""
    last = draw.choice((gpus, gpus, gpus, max(1, gpus - 1)))
    cut = draw.choice((last, draw.randint(1, last)))
    lines = []
    for first, end in ((0, cut), (cut, last)):
        if first == end:
            continue
        kind = draw.choice(("h100", "h100", "h100", "a100", ""))
        start = draw.randrange(cores)
        own = draw.choice(("", "", f" Cores={start}-{draw.randrange(start, cores)}"))
        files = f"gpu[{first}-{end - 1}]" if end - first > 1 else f"gpu{first}"
        typed = f" Type={kind}" if kind else ""
        lines.append(f"Name=gpu{typed} File={device_files()}/{files}{own}\n")
    return "".join(lines), last


def _promise(draw: Random, gpus: int) -> str:
    part = draw.randint(0, gpus)
    return draw.choice(
        (
            "",
            f"gpu:{gpus}",
            f"gpu:h100:{gpus}",
            f"gpu:h100:{gpus}",
            f"gpu:H100:{gpus}",
            f"gpu:a100:{gpus}",
            f"gpu:h100:{gpus - 1}" if gpus > 1 else "",
            f"gpu:h100:{part},gpu:a100:{gpus - part}" if 0 < part < gpus else f"gpu:{gpus}",
        )
    )


def _is_near(own: CpuSet | None, package: int, cores: int, packages: int) -> bool:
    """Whether a GPU has cores of its package alone; without a set it has those of all."""
    if own is None:
        return packages == 1
    return bool(own) and own <= CpuSet(range(package * cores, (package + 1) * cores))


def _answer(name: str) -> Answer:
    draw = Random(f"slurmd {name}")
    packages, cores, threads = (
        draw.choice((1, 2, 2, 4)),
        draw.choice((2, 4, 12)),
        draw.choice((1, 2)),
    )
    per_root = draw.randint(1, _MAX_GPUS // packages)
    nodes = draw.sample(range(packages), packages)
    host = machine(
        _MACHINE.format(
            packages=packages,
            cores=cores,
            threads=threads,
            nodes=nodes,
            buses=[f"{0x10 + 0x20 * i}" for i in range(packages)],
            ports=", ".join(['"gpu"'] * per_root),
        ).replace("'", "")
    )
    gpus = packages * per_root
    promise = _promise(draw, gpus)
    slurm = (HEAD + _CONF).format(
        host=socket.gethostname().partition(".")[0],
        base=device_files(),
        packages=packages,
        cores=cores,
        threads=threads,
        gres=f" Gres={promise}" if promise else "",
    )
    gres, listed = _lines(draw, gpus, packages * cores)
    files = parse_config(gres, "gres.conf"), parse_config(slurm, "slurm.conf")
    critical = {f.id for f in check(*files, host).findings if f.severity is Severity.CRITICAL}
    is_usable = not critical & {"gres-count", "gres-type-differs"}
    promised = sum(int(n) for n in re.findall(r":(\d+)", promise))
    kept = kept_gpus(slurm, gres)
    planned: dict[str, object] = {"every listed GPU usable": is_usable}
    read: dict[str, object] = {
        "every listed GPU usable": kept is not None and len(kept) == listed == promised
    }
    corrected = correct(*files, host)
    right = corrected["slurm.conf"], corrected["gres.conf"]
    pair = parse_config(right[1], "gres.conf"), parse_config(right[0], "slurm.conf")
    if not any(f.severity is Severity.CRITICAL for f in check(*pair, host).findings):
        homes = [node for node in nodes for _ in range(per_root)]
        cores_of = kept_gpus(*right) or {}
        planned["GPUs of the corrected pair without cores of their own package"] = []
        read["GPUs of the corrected pair without cores of their own package"] = [
            gpu
            for gpu, home in enumerate(homes)
            if gpu not in cores_of or not _is_near(cores_of[gpu], home, cores, packages)
        ]
    about = f"{packages} packages of {cores} cores, {gpus} GPUs, {promise or 'no Gres='}: {gres}"
    return Answer(case=name, about=about, planned=planned, read=read)


def ask(names: Sequence[str]) -> Iterator[Answer]:
    return map(_answer, names)


SLURMD = Judge(
    name="slurmd",
    program="slurmd -G",
    reads="gres.conf and slurm.conf with and without slips: whether it keeps every GPU if slurm "
    "check finds nothing critical, and the cores of each in the pair that the check corrected",
    setup="slurmd and, for Slurm 24, a running munged; as root",
    version=version,
    missing=testbed.missing,
    ask=ask,
    marker="slurm",
    short=40,
)
