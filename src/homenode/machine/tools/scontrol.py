"""Scontrol: jobs from `scontrol show job -d` and nodes from `scontrol show node`.

Seen: 22.05.8 (Debian 12). Every version from 20.02 to 26.05 prints these lines in this order,
others between them:

JobId=7 JobName=train
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T10:00:00
   StartTime=2026-01-01T10:00:05 EndTime=2026-01-01T11:00:05 Deadline=N/A
   NodeList=gpu[01-02]
     Nodes=gpu[01-02] CPU_IDs=0-7 Mem=1000 GRES=gpu:h100:1(IDX:2)
   MinCPUsNode=8 MinMemoryNode=1000M MinTmpDiskNode=0

An empty line stands between two jobs. Names, comments, accounts and paths are printed as their
users wrote them, with newlines. A field is therefore read from its own line alone, and a job that
has one twice, or out of its place, is unreadable: what its user wrote may stand for it. squeue's
JSON leaves no such doubt.

Source: scontrol(1), "show job" with --details, "show node"; slurm_sprint_job_info.
"""

import re
from calendar import timegm
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.machine.tools.json_documents import whole
from homenode.machine.tools.slurm_hostlist import Hostlists
from homenode.machine.tools.slurm_job import RUNNING, Job, NodeShare, owned_gpus, plain_number

JOBS_COMMAND = ("scontrol", "--all", "show", "job", "-d")

MAX_TEXT_CHARS = 256 << 20

_NO_TASK = str(0xFFFFFFFE)
"""What an array that is still whole, and was cancelled, has for a task (NO_VAL of slurm.h)."""

_HEAD = re.compile(
    r"JobId=([0-9]{1,10}) (?:ArrayJobId=([0-9]+) ArrayTaskId=(\S+) (?:ArrayTaskThrottle=[0-9]+ )?|"
    r"HetJobId=([0-9]+) HetJobOffset=([0-9]+) )?JobName=(.*)",
    re.ASCII,
)
_LINES = {
    "   UserId=": re.compile(r"\A(.+?)\([0-9]+\) GroupId=.*", re.ASCII),
    "   JobState=": re.compile(r"\A(\S+)(?: .*)?", re.ASCII),
    "   SubmitTime=": re.compile(r"\A(.*) EligibleTime=(.*)"),
    "   StartTime=": re.compile(r"\A(.*) EndTime=.*"),
    "   NodeList=": re.compile(r"\A.*"),
    "     Nodes=": re.compile(r"\A(\S+) CPU_IDs=(\S*) Mem=[0-9]+ GRES=(\S*)", re.ASCII),
    "   MinCPUsNode=": re.compile(r"\A.*"),
}
"""How each line that is read begins, in scontrol's order, and what follows."""

_USER, _STATE, _SUBMIT, _START, _NODES, _SHARE, _END = _LINES
_NEEDED = (_USER, _STATE, _NODES, _END)
_PLACES = {beginning: place for place, beginning in enumerate(_LINES)}


class _Block(NamedTuple):
    """The text that may be a job's. first: number of its first line. lines: those after it."""

    number: str
    id: str
    name: str
    first: int
    lines: list[str]


def parse_scontrol_jobs(
    text: str, source: str = "scontrol show job -d", listed: Collection[str] | None = None
) -> tuple[Job, ...]:
    """The jobs of a listing, in its order; () for "No jobs in the system".

    Jobs whose record may be another's text, or cannot be read, are unreadable. listed: the numbers
    of all jobs that squeue gives, where it was asked: a record of another one is text that somebody
    wrote into the record before it, and counts for nothing.

    Raises ParseError for a text that shows no job and does not say so, or has a line for each job.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
    blocks = tuple(_blocks(text))
    if not blocks and text.strip() and "No jobs in the system" not in text:
        raise ParseError(source, "jobs that begin with JobId=", text.strip()[:80], line=1)
    if blocks and f"\n{_STATE}" not in text and " JobState=" in text:
        raise ParseError(
            source,
            "each field on its own line",
            "each job on one line",
            hint="scontrol show job -d without --oneliner, or better squeue --json",
        )
    return tuple(_trusted(blocks, source, listed))


def _blocks(text: str) -> Iterator[_Block]:
    """The text of each job. A JobId= behind another line than an empty one begins none."""
    block: _Block | None = None
    is_free = True
    # Not splitlines: a name may hold other letters at which Python ends lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("JobId=") and (is_free or block is None):
            if block is not None:
                yield block
            head = _HEAD.match(line)
            if head is None:  # cut off, or somebody's text
                block = _Block("", line[6:40], "", number, [])
            else:
                block = _Block(head[1], _id(head), head[6].strip(), number, [])
        elif block is not None:
            block.lines.append(line.rstrip())
        is_free = not line.strip()
    if block is not None:
        yield block


def _id(head: re.Match[str]) -> str:
    if head[2] is not None and head[3].isdigit() and head[3] != _NO_TASK:
        return f"{head[2]}_{head[3]}"
    return head[1] if head[4] is None else f"{head[4]}+{head[5]}"


def _trusted(
    blocks: tuple[_Block, ...], source: str, listed: Collection[str] | None
) -> Iterator[Job]:
    """The jobs of blocks; unreadable where a record may be text of the one before it."""
    counts = Counter(block.number for block in blocks)
    fields = [_fields(block) for block in blocks]
    lists = Hostlists()
    unlisted = [listed is not None and block.number not in listed for block in blocks]
    odd = [no or counts[block.number] > 1 for block, no in zip(blocks, unlisted, strict=True)]
    for at, block in enumerate(blocks):
        doubt: str | None = None
        if counts[block.number] > 1:
            doubt = "the listing has two records of it"
        elif at + 1 < len(blocks) and odd[at + 1]:
            doubt = f"the record of job {blocks[at + 1].id} after it may be its own text"
        elif at and listed is None and not fields[at - 1].is_whole:
            doubt = f"the record of job {blocks[at - 1].id} before it has no end"
        if not unlisted[at]:
            yield _job(block, fields[at], doubt, source, lists)


class _Fields(NamedTuple):
    """What the lines of a block give. odd: beginnings of those that are twice, or out of place."""

    found: dict[str, list[re.Match[str]]]
    odd: list[str]

    @property
    def is_whole(self) -> bool:
        """True where nothing is missing, even if somebody wrote more."""
        return all(one in self.found or one in self.odd for one in _NEEDED)

    def doubt(self) -> str | None:
        """Why its user may have written some of them; None where all are where they should be."""
        if self.odd:
            return f"{self.odd[0].strip()} stands twice, out of its place or without its value"
        missing = next((one for one in _NEEDED if one not in self.found), None)
        if missing is not None:
            return f"no line begins with {missing.strip()}"
        if self.state in RUNNING and _SHARE not in self.found:
            return "it runs, and no CPUs are shown: scontrol show job needs -d"
        return None

    @property
    def state(self) -> str:
        return self.found[_STATE][0][1]

    def queue_wait_s(self) -> float | None:
        """From when it could have started; both times are of the same time zone."""
        if _SUBMIT not in self.found or _START not in self.found:
            return None
        submitted, eligible = self.found[_SUBMIT][0].groups()
        begin, start = _seconds(eligible) or _seconds(submitted), _seconds(self.found[_START][0][1])
        return None if begin is None or start is None else float(max(0, start - begin))


_TIME = re.compile(r"([1-9]\d{3})-(0[1-9]|1[0-2])-(\d\d)T(\d\d):(\d\d):(\d\d)", re.ASCII)


def _seconds(text: str) -> int | None:
    """Of a time, as if it were UTC."""
    match = _TIME.fullmatch(text)
    return None if match is None else timegm((*map(int, match.groups()), 0, 0, 0)[:9])


def _fields(block: _Block) -> _Fields:
    found: dict[str, list[re.Match[str]]] = {}
    odd: list[str] = []
    last, before = -1, ""
    for line in block.lines:
        beginning = line[: line.find("=") + 1]
        place = _PLACES.get(beginning)
        if place is not None:
            match = _LINES[beginning].fullmatch(line[len(beginning) :])
            is_next_share = beginning == before == _SHARE
            if match is None or (place <= last and not is_next_share):
                odd.append(beginning)
            else:
                found.setdefault(beginning, []).append(match)
            last = max(last, place)
        before = beginning
    return _Fields(found, odd)


def _job(block: _Block, fields: _Fields, doubt: str | None, source: str, lists: Hostlists) -> Job:
    unreadable = Job(block.id, block.number, block.name, None, "", ())
    doubt = doubt or fields.doubt()
    if doubt is not None:
        return replace(unreadable, unreadable=doubt)
    try:
        shares = tuple(
            share
            for match in fields.found.get(_SHARE, ())
            if fields.state in RUNNING
            for share in _shares(*match.groups(), source=source, line=block.first, lists=lists)
        )
    except ParseError as error:
        return replace(unreadable, unreadable=f"expected {error.expected}, found {error.found!r}")
    return replace(
        unreadable,
        user=fields.found[_USER][0][1],
        state=fields.state,
        shares=shares,
        queue_wait_s=fields.queue_wait_s(),
    )


def _shares(
    nodes: str, ids: str, gres: str, *, source: str, line: int, lists: Hostlists
) -> Iterator[NodeShare]:
    cpu_ids = CpuSet.parse(ids, source) if ids and ids != "(null)" else None
    gpus = owned_gpus(gres, source)
    for node in lists.expand(nodes, source, line=line):
        yield NodeShare(node, cpu_ids, None, gpus)


class NodeShape(Struct, frozen=True):
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


_SHAPE = {
    "sockets": re.compile(r"(?:^|\s)Sockets=(\S*)"),
    "corespersocket": re.compile(r"(?:^|\s)CoresPerSocket=(\S*)"),
    "threadspercore": re.compile(r"(?:^|\s)ThreadsPerCore=(\S*)"),
    "cpus": re.compile(r"(?:^|\s)CPUTot=(\S*)"),
}


def shown_shapes(text: str, source: str) -> dict[str, NodeShape | None]:
    """Shapes by node name from `scontrol show node`: as text, with --oneliner too, or with --json.

    None for a node that stands twice, or that has one of these numbers twice or without a value:
    comments, reasons and features of nodes are printed as somebody wrote them. Raises ParseError
    for a text that shows no node.
    """
    shown: list[tuple[str, dict[str, str] | None]]
    if text.lstrip().startswith("{"):
        shown = list(_json_nodes(text, source))
    else:
        shown = [(block.split(maxsplit=1)[0], _text_shape(block)) for block in _node_blocks(text)]
    if not shown:
        raise ParseError(source, "nodes that begin with NodeName=", text.strip()[:80], line=1)
    shapes: dict[str, NodeShape | None] = {}
    for name, values in shown:
        shapes[name] = None if name in shapes or values is None else _shape(values, source)
    return shapes


def _shape(values: dict[str, str], source: str) -> NodeShape | None:
    try:
        return node_shape(values, source, None)
    except ParseError:
        return None


def _text_shape(block: str) -> dict[str, str] | None:
    found = {key: pattern.findall(block) for key, pattern in _SHAPE.items()}
    if any(len(values) != 1 for values in found.values()):
        return None
    return {key: values[0] for key, values in found.items()}


def _node_blocks(text: str) -> Iterator[str]:
    """The text of each node: from behind its NodeName= up to the next one."""
    for block in re.split(r"^NodeName=", text, flags=re.MULTILINE)[1:]:
        if block[:1].strip():
            yield block


def _json_nodes(text: str, source: str) -> Iterator[tuple[str, dict[str, str] | None]]:
    nodes = whole(text, source).get("nodes")
    keys = {
        "sockets": "sockets",
        "corespersocket": "cores",
        "threadspercore": "threads",
        "cpus": "cpus",
    }
    for node in nodes if isinstance(nodes, list) else ():
        if isinstance(node, dict) and isinstance(node.get("name"), str):
            yield (
                node["name"],
                {ours: str(plain_number(node.get(its))) for ours, its in keys.items()},
            )


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
