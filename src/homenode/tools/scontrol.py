"""Scontrol: jobs from `scontrol show job -d` and nodes from `scontrol show node`.

Seen: 22.05.8 (Debian 12); the layout has hardly changed since 20.02. Newer versions add lines
(AllocTRES=, ReqTRES=) and keep those read here:

     Nodes=gpu[01-02] CPU_IDs=0-7 Mem=1000 GRES=gpu:h100:1(IDX:2)

Source: scontrol(1), "show job" with --details, "show node".
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.tools.slurm_hostlist import expand_hostlist
from homenode.tools.slurm_job import Job, NodeShare, owned_gpus

JOBS_COMMAND = ("scontrol", "show", "job", "-d")
NODES_COMMAND = ("scontrol", "show", "node", "--oneliner")

MAX_TEXT_CHARS = 256 << 20

_NO_TASK = str(0xFFFFFFFE)
"""What an array that is still whole, and was cancelled, has for a task (NO_VAL of slurm.h)."""

_FIRST = re.compile(r"JobId=([0-9]+)")
_ARRAY = re.compile(r"\sArrayJobId=([0-9]+) ArrayTaskId=(\S+)")
_HETEROGENEOUS = re.compile(r"\sHetJobId=([0-9]+) HetJobOffset=([0-9]+)")
_SHOWN = re.compile(r"(?:^|\s)([A-Za-z:]+)=(\S*)")
_NAME = re.compile(r"\sJobName=(.*?)(?= UserId=|\n|\Z)")
_USER = re.compile(r"\sUserId=([^\s(]+)")
_STATE = re.compile(r"\sJobState=(\S+)")
# A line of its own, so that a job called "Nodes=gpu01 CPU_IDs=0 ..." says nothing; with --oneliner
# the last words of this kind are Slurm's: names and comments stand before or behind them.
_SHARE = re.compile(
    r"^[ \t]+Nodes=(\S+) CPU_IDs=(\S*) Mem=\S* GRES=(\S*)[ \t\r]*$", re.MULTILINE | re.ASCII
)
_SHARE_IN_LINE = re.compile(r"\sNodes=(\S+) CPU_IDs=(\S*) Mem=\S* GRES=(\S*)", re.ASCII)


def parse_scontrol_jobs(text: str, source: str = "scontrol show job -d") -> tuple[Job, ...]:
    """The jobs of a listing, in its order; () for "No jobs in the system".

    Raises ParseError for a text that shows no job and does not say so, and for what a job holds
    where it cannot be read.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
    jobs = tuple(_job(line, block, source) for line, block in _blocks(text))
    if not jobs and text.strip() and "No jobs in the system" not in text:
        raise ParseError(source, "jobs that begin with JobId=", text.strip()[:80], line=1)
    return jobs


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of each job."""
    owned: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if _FIRST.match(line):
            if owned:
                yield first, "\n".join(owned)
            owned, first = [], number
        if owned or _FIRST.match(line):
            owned.append(line)
    if owned:
        yield first, "\n".join(owned)


def _job(line: int, block: str, source: str) -> Job:
    first = _FIRST.match(block)
    assert first is not None
    array, heterogeneous = _ARRAY.search(block), _HETEROGENEOUS.search(block)
    said = first[1]
    if array is not None and array[2].isascii() and array[2].isdigit() and array[2] != _NO_TASK:
        said = f"{array[1]}_{array[2]}"
    elif heterogeneous is not None:
        said = f"{heterogeneous[1]}+{heterogeneous[2]}"
    name, user, state = (pattern.search(block) for pattern in (_NAME, _USER, _STATE))
    if state is None:
        raise ParseError(source, f"JobState= of job {said}", block[:60], line=line)
    shares = _SHARE.findall(block) if "\n" in block else _SHARE_IN_LINE.findall(block)
    return Job(
        id=said,
        number=first[1],
        name="" if name is None else name[1].strip(),
        user=None if user is None else user[1],
        state=state[1],
        shares=tuple(
            share
            for nodes, ids, gres in shares
            for share in _shares(nodes, ids, gres, f"{source}, job {said}", line)
        ),
    )


def _shares(nodes: str, ids: str, gres: str, source: str, line: int) -> Iterator[NodeShare]:
    cpu_ids = CpuSet.parse(ids, source) if ids and ids != "(null)" else None
    gpus = owned_gpus(gres, source)
    for node in expand_hostlist(nodes, source, line=line):
        yield NodeShare(node, cpu_ids, None, gpus)


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Sockets x cores x threads. cpus: Slurm's CPUs; as many as cores where it schedules cores.

    A core has as many abstract ids as threads either way (seen: 22.05.8, CPUs=32 of 2 x 16 x 2,
    where a job of 4 CPUs is given as CPU_IDs=0-7; scontrol counts by ThreadsPerCore alone).
    """

    sockets: int
    cores_per_socket: int
    threads_per_core: int
    cpus: int

    @property
    def cores(self) -> int:
        return self.sockets * self.cores_per_socket

    def __str__(self) -> str:
        return f"{self.sockets} x {self.cores_per_socket} x {self.threads_per_core}"


def shown_shapes(text: str, source: str) -> dict[str, NodeShape]:
    """Shapes by node name from `scontrol show node`, in its usual layout or with --oneliner.

    Raises ParseError for a node whose numbers are no numbers.
    """
    shapes: dict[str, NodeShape] = {}
    for block in _node_blocks(text):
        values = {key.lower(): value for key, value in _SHOWN.findall(block)}
        shape = node_shape(
            {
                "sockets": values.get("sockets", ""),
                "corespersocket": values.get("corespersocket", ""),
                "threadspercore": values.get("threadspercore", ""),
                "cpus": values.get("cputot", ""),
            },
            source,
            None,
        )
        if shape is not None and values.get("nodename"):
            shapes[values["nodename"]] = shape
    return shapes


def _node_blocks(text: str) -> Iterator[str]:
    """The text of each node: from its NodeName= up to the next one."""
    owned: list[str] = []
    for line in text.splitlines():
        if line.startswith("NodeName=") and owned:
            yield "\n".join(owned)
            owned = []
        if line.startswith("NodeName=") or owned:
            owned.append(line)
    if owned:
        yield "\n".join(owned)


def node_shape(values: dict[str, str], source: str, line: int | None) -> NodeShape | None:
    """The shape of a node's keys, in lower case; None where they give too little of it."""

    def number(*keys: str) -> int | None:
        text = next((values[key] for key in keys if values.get(key)), None)
        if text is None:
            return None
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        if not is_number or not 0 < int(text) <= 65_536:
            raise ParseError(source, f"{keys[0]}= with a number from 1", text, line=line)
        return int(text)

    sockets = number("sockets")
    if sockets is None and (of_board := number("socketsperboard")) is not None:
        sockets = of_board * (number("boards") or 1)
    cores, threads = number("corespersocket"), number("threadspercore")
    cpus = number("cpus", "procs")
    if cores is None and sockets is None:
        # Seen: 22.05.8 takes every CPU for a socket then, of one core.
        return None if cpus is None else NodeShape(cpus, 1, 1, cpus)
    cores, threads = cores or 1, threads or 1
    if sockets is None:
        sockets = max(1, (cpus or cores * threads) // (cores * threads))
    return NodeShape(sockets, cores, threads, cpus or sockets * cores * threads)
