"""SlurmJob: jobs from `scontrol show job -d`, and GPUs as Slurm prints them in Gres= and GRES=.

Versions 20.02 to 26.05 print these lines in this order, others between them (seen: 22.05.8):

JobId=7 JobName=train
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   SubmitTime=2026-01-01T10:00:00 EligibleTime=2026-01-01T10:00:00
   StartTime=2026-01-01T10:00:05 EndTime=2026-01-01T11:00:05 Deadline=N/A
   NodeList=gpu[01-02]
     Nodes=gpu[01-02] CPU_IDs=0-7 Mem=1000 GRES=gpu:h100:1(IDX:2)
   MinCPUsNode=8 MinMemoryNode=1000M MinTmpDiskNode=0

Users' names, comments and paths are printed as they are, with newlines: a field is read from its
own line alone, and a job that has one twice or out of its place is unreadable. squeue's JSON does
not have this problem. Source: scontrol(1), show job --details; gres.conf(5); slurm_sprint_job_info.
"""

import re
from calendar import timegm
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.slurm.slurm_nodes import Hostlists, has_slices
from homenode.cpuset import CpuSet
from homenode.errors import ParseError

_HELD = re.compile(
    r"(?P<name>gpu|shard|mps)(?::(?P<type>[^:(),]+?))?(?::(?P<count>[0-9]{1,6}))?(?:\((?P<detail>[^()]*)\))?\Z",
    re.ASCII,
)
_CNT = re.compile(r"CNT:([0-9]{1,9})\Z", re.ASCII)
_SHARES = re.compile(r"[0-9]{1,9}/[0-9]{1,9}(?:,[0-9]{1,9}/[0-9]{1,9})*\Z", re.ASCII)


RUNNING = frozenset({"RUNNING", "SIGNALING", "RESIZING"})
"""States of jobs whose processes run; while a user signals a job, Slurm reports only that state."""


class OwnedGpus(Struct, frozen=True):
    """The GPUs that a job has on a node, whole or shared (shard, mps)."""

    count: int
    # places in the node's list of devices; None if Slurm gives only how many
    indices: tuple[int, ...] | None
    # True if some are parts of GPUs (MIG): each part has a place of its own in that list
    sliced: bool = False
    types: frozenset[str] = frozenset()  # in lower case


class NodeShare(Struct, frozen=True):
    """A job's resources on one node, in Slurm's own numbers."""

    node: str
    cpu_ids: CpuSet | None  # abstract CPU ids (scontrol)
    # (socket, core of the socket) (squeue --json). Either of the two is set if Slurm shows CPUs.
    cores: tuple[tuple[int, int], ...] | None
    gpus: OwnedGpus


class Job(Struct, frozen=True):
    id: str  # as users write it ("11_0" of an array, "12+1" of a heterogeneous job)
    number: str  # what Slurm counts by, so that an array's tasks are found by either
    name: str
    user: str | None  # None if not given
    state: str  # "RUNNING", ..
    shares: tuple[NodeShare, ...]  # resources of a running job, by node
    queue_wait_s: float | None = None  # from when it could have started; None if not known
    # why its record gives nothing but its id and its name; None if it can be read
    unreadable: str | None = None

    @property
    def runs(self) -> bool:
        return self.state in RUNNING


def is_asked_for(job: Job, names: tuple[str, ...]) -> bool:
    """Return whether a job is a named one, or a task of a named array; () = all."""
    base = re.split("[_+]", job.id, maxsplit=1)[0]
    return not names or bool({job.id, job.number, base} & set(names))


MAX_GPUS = 4096
"""Limit of GPUs in a node, with MIG slices and shares."""


def parse_owned_gpus(text: str, source: str) -> OwnedGpus:
    """Return the GPUs of a text such as "gpu:h100:6(IDX:0-1,4-7),nic:1".

    >>> parse_owned_gpus("gpu:h100:3(IDX:0-1,4)", "job 7")
    OwnedGpus(count=3, indices=(0, 1, 4), sliced=False, types=frozenset({'h100'}))
    >>> parse_owned_gpus("gpu(CNT:2)", "job 7").indices, parse_owned_gpus("(null)", "job 7").count
    (None, 0)
    >>> parse_owned_gpus("shard:h100:3(0/4,3/4)", "job 7").indices
    (1,)

    Raises ParseError. Source: Slurm's gres_stepmgr_job_build_details.
    """
    count = 0
    indices: set[int] = set()
    types: set[str] = set()
    is_complete = True
    sliced = False
    for item in _split_outside_brackets(text):
        bare = item.removeprefix("gres/").removeprefix("gres:")
        if re.split("[:(]", bare, maxsplit=1)[0] not in ("gpu", "shard", "mps"):
            continue
        match = _HELD.match(bare)
        if match is None:
            raise ParseError(source, "GPUs such as gpu:h100:2(IDX:0-1)", item)
        kind, number = match["type"], match["count"]
        if number is None and kind is not None and _is_decimal(kind):
            kind, number = None, kind
        types |= {kind.lower()} if kind else set()
        places = _parse_places(match["detail"] or "", source)
        if places is not None:
            indices |= set(places)
            count += len(places)
            sliced = sliced or bool(kind is not None and places and has_slices(kind))
        else:
            count_match = _CNT.match(match["detail"] or "")
            amount = int(number or (count_match[1] if count_match else "1"))
            count += amount
            is_complete = is_complete and not amount
    places = tuple(sorted(indices)) if is_complete else None
    return OwnedGpus(count, places, sliced, frozenset(types))


def _parse_places(detail: str, source: str) -> tuple[int, ...] | None:
    """Return the devices that "IDX:0-1" or, of shared ones, "0/4,3/4" names; None if none are."""
    numbers = detail.removeprefix("IDX:")
    if detail.startswith("IDX:") and numbers != "N/A":
        places = CpuSet.parse(numbers, source)
        if len(places) > MAX_GPUS:
            raise ParseError(source, f"at most {MAX_GPUS} GPUs of a node", numbers)
        return tuple(places)
    if _SHARES.match(detail):
        in_use = (int(share.partition("/")[0]) for share in detail.split(","))
        return tuple(place for place, amount in enumerate(in_use) if amount)
    return None


def parse_gpu_types(text: str) -> dict[str, int]:
    """GPUs of a node's Gres= by their type in small letters, as Slurm compares them; "" = no type.

    >>> parse_gpu_types("gpu:H100:6(S:0-1),gpu:a100:no_consume:2,nic:2"), parse_gpu_types("gpu:8")
    ({'h100': 6, 'a100': 2}, {'': 8})
    """
    counts: dict[str, int] = {}
    for item in _split_outside_brackets(text):
        name, *words = item.partition("(")[0].split(":")
        if name != "gpu":
            continue
        count = int(words.pop()) if words and _is_decimal(words[-1]) else 1
        kind = next((word.lower() for word in words if word != "no_consume"), "")
        counts[kind] = counts.get(kind, 0) + count
    return counts


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _split_outside_brackets(text: str) -> Iterator[str]:
    """Return the items between commas outside round brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


JOBS_COMMAND = ("scontrol", "--all", "show", "job", "-d")

MAX_TEXT_CHARS = 256 << 20

_NO_TASK = str(0xFFFFFFFE)
"""Task number of a job array that was cancelled before it was split (NO_VAL of slurm.h)."""

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
"""Beginning of each parsed line, in scontrol's order, and the pattern of the rest."""

_USER, _STATE, _SUBMIT, _START, _NODES, _SHARE, _END = _LINES
_NEEDED = (_USER, _STATE, _NODES, _END)
_PLACES = {beginning: place for place, beginning in enumerate(_LINES)}


class _JobText(NamedTuple):
    """A text that may be a job's record."""

    number: str
    id: str
    name: str
    first: int  # number of its first line
    lines: list[str]  # those after it


def parse_scontrol_jobs(
    text: str, source: str = "scontrol show job -d", listed_jobs: Collection[str] | None = None
) -> tuple[Job, ...]:
    """Return the jobs of a listing, in its order; () for "No jobs in the system".

    A job is unreadable if its record cannot be parsed, or may be text that another user wrote.
    listed_jobs: the ids of all jobs of squeue, if it was run: a record of any other job is text
    that a user wrote into the record before it, and is ignored.

    Raises ParseError for a text without jobs or "No jobs", or with a line for each job.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
    blocks = tuple(_split_blocks(text))
    if not blocks and text.strip() and "No jobs in the system" not in text:
        raise ParseError(
            source,
            "jobs that begin with JobId=",
            text.strip().splitlines()[0][:80],
            line=1,
            hint="scontrol show job -d > jobs.txt",
        )
    if blocks and f"\n{_STATE}" not in text and " JobState=" in text:
        raise ParseError(
            source,
            "each field on its own line",
            "each job on one line",
            hint="scontrol show job -d without --oneliner, or better squeue --json",
        )
    return tuple(_readable_jobs(blocks, source, listed_jobs))


def _split_blocks(text: str) -> Iterator[_JobText]:
    """Yield each job's text. A JobId= that does not follow an empty line does not begin a job."""
    block: _JobText | None = None
    is_free = True
    # Not splitlines: a name may hold other letters at which Python ends lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("JobId=") and (is_free or block is None):
            if block is not None:
                yield block
            head = _HEAD.match(line)
            if head is None:  # cut off, or somebody's text
                block = _JobText("", line[6:40], "", number, [])
            else:
                block = _JobText(head[1], _parse_id(head), head[6].strip(), number, [])
        elif block is not None:
            block.lines.append(line.rstrip())
        is_free = not line.strip()
    if block is not None:
        yield block


def _parse_id(head: re.Match[str]) -> str:
    if head[2] is not None and head[3].isdigit() and head[3] != _NO_TASK:
        return f"{head[2]}_{head[3]}"
    return head[1] if head[4] is None else f"{head[4]}+{head[5]}"


def _readable_jobs(
    blocks: tuple[_JobText, ...], source: str, listed_jobs: Collection[str] | None
) -> Iterator[Job]:
    """Return the jobs of blocks; unreadable if a record may be text of the previous one."""
    counts = Counter(block.number for block in blocks)
    fields = [_parse_fields(block) for block in blocks]
    lists = Hostlists()
    is_unlisted = [listed_jobs is not None and block.number not in listed_jobs for block in blocks]
    odd = [no or counts[block.number] > 1 for block, no in zip(blocks, is_unlisted, strict=True)]
    for at, block in enumerate(blocks):
        reason: str | None = None
        if counts[block.number] > 1:
            reason = "the listing has two records of it"
        elif at + 1 < len(blocks) and odd[at + 1]:
            reason = f"the record of job {blocks[at + 1].id} after it may be its own text"
        elif at and listed_jobs is None and not fields[at - 1].is_whole:
            reason = f"the record of job {blocks[at - 1].id} before it has no end"
        if not is_unlisted[at]:
            yield _parse_job(block, fields[at], reason, source, lists)


class _Fields(NamedTuple):
    """The fields of a block's lines."""

    matches: dict[str, list[re.Match[str]]]
    odd: list[str]  # beginnings of those that are twice, or out of place

    @property
    def is_whole(self) -> bool:
        """Whether no field is missing, even if there are forged ones."""
        return all(beginning in self.matches or beginning in self.odd for beginning in _NEEDED)

    def find_forgery(self) -> str | None:
        """Return why its user may have forged some fields; None if all are in their places."""
        if self.odd:
            return f"{self.odd[0].strip()} is repeated, out of order or without a value"
        missing = next((beginning for beginning in _NEEDED if beginning not in self.matches), None)
        if missing is not None:
            return f"no line begins with {missing.strip()}"
        if self.state in RUNNING and _SHARE not in self.matches:
            return "it runs, and no CPUs are shown: scontrol show job needs -d"
        return None

    @property
    def state(self) -> str:
        return self.matches[_STATE][0][1]

    def queue_wait_s(self) -> float | None:
        """Return the seconds since its earliest start; both times are of the same time zone."""
        if _SUBMIT not in self.matches or _START not in self.matches:
            return None
        submit_time, eligible = self.matches[_SUBMIT][0].groups()
        begin, start = (
            _parse_seconds(eligible) or _parse_seconds(submit_time),
            _parse_seconds(self.matches[_START][0][1]),
        )
        return None if begin is None or start is None else float(max(0, start - begin))


_TIME = re.compile(r"([1-9]\d{3})-(0[1-9]|1[0-2])-(\d\d)T(\d\d):(\d\d):(\d\d)", re.ASCII)


def _parse_seconds(text: str) -> int | None:
    """Return the seconds of a time, read as UTC."""
    match = _TIME.fullmatch(text)
    return None if match is None else timegm((*map(int, match.groups()), 0, 0, 0)[:9])


def _parse_fields(block: _JobText) -> _Fields:
    matches: dict[str, list[re.Match[str]]] = {}
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
                matches.setdefault(beginning, []).append(match)
            last = max(last, place)
        before = beginning
    return _Fields(matches, odd)


def _parse_job(
    block: _JobText, fields: _Fields, reason: str | None, source: str, lists: Hostlists
) -> Job:
    unreadable = Job(block.id, block.number, block.name, None, "", ())
    if (reason := reason or fields.find_forgery()) is not None:
        return replace(unreadable, unreadable=reason)
    try:
        shares = tuple(
            share
            for match in fields.matches.get(_SHARE, ())
            if fields.state in RUNNING
            for share in _list_shares(*match.groups(), source=source, line=block.first, lists=lists)
        )
    except ParseError as error:
        return replace(unreadable, unreadable=error.reason)
    return replace(
        unreadable,
        user=fields.matches[_USER][0][1],
        state=fields.state,
        shares=shares,
        queue_wait_s=fields.queue_wait_s(),
    )


def _list_shares(
    nodes: str, ids: str, gres: str, *, source: str, line: int, lists: Hostlists
) -> Iterator[NodeShare]:
    cpu_ids = CpuSet.parse(ids, source) if ids and ids != "(null)" else None
    gpus = parse_owned_gpus(gres, source)
    for node in lists.expand(nodes, source, line=line):
        yield NodeShare(node, cpu_ids, None, gpus)
