"""SlurmJob: what a job has on its nodes, and GPUs as Slurm prints them in Gres= and GRES=.

Source: scontrol(1), show job; gres.conf(5) of 22.05.
"""

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError

_HELD = re.compile(
    r"(?P<name>gpu|shard|mps)(?::(?P<type>[^:(),]+?))?(?::(?P<count>[0-9]{1,6}))?(?:\((?P<detail>[^()]*)\))?\Z",
    re.ASCII,
)
_CNT = re.compile(r"CNT:([0-9]{1,9})\Z", re.ASCII)
_SHARES = re.compile(r"[0-9]{1,9}/[0-9]{1,9}(?:,[0-9]{1,9}/[0-9]{1,9})*\Z", re.ASCII)
_MIG_TYPE = re.compile(r"(?<![0-9])[0-9]+g\.[0-9]+gb", re.IGNORECASE | re.ASCII)


RUNNING = frozenset({"RUNNING", "SIGNALING", "RESIZING"})
"""States of jobs whose processes run: while a user signals a job, Slurm says only that."""


class OwnedGpus(Struct, frozen=True):
    """The GPUs that a job holds on a node, or has a share of (shard, mps).

    indices: places in the node's list of devices; None where Slurm gives only how many. sliced:
    True where some are parts of GPUs (MIG): each part has a place of its own in that list.
    """

    count: int
    indices: tuple[int, ...] | None
    sliced: bool = False


class NodeShare(Struct, frozen=True):
    """What a job holds on one node, in Slurm's own numbers.

    cpu_ids: abstract CPU ids (scontrol). cores: (socket, core of the socket) (squeue --json). One
    of the two is given where Slurm shows CPUs at all.
    """

    node: str
    cpu_ids: CpuSet | None
    cores: tuple[tuple[int, int], ...] | None
    gpus: OwnedGpus


class Job(Struct, frozen=True):
    """id: as users write it ("11_0" of an array, "12+1" of a heterogeneous job).

    number: what Slurm counts by, so that an array's tasks are found by either. state: "RUNNING",
    ... user: None where not given. shares: of a job that runs. queue_wait_s: from when it could
    have started; None where not known. unreadable: why its record gives nothing but its id and
    its name; None where it can be read.
    """

    id: str
    number: str
    name: str
    user: str | None
    state: str
    shares: tuple[NodeShare, ...]
    queue_wait_s: float | None = None
    unreadable: str | None = None

    @property
    def runs(self) -> bool:
        return self.state in RUNNING


def is_asked_for(job: Job, asked: tuple[str, ...]) -> bool:
    """True where a job is one of those that the user named, or a task of one; () = all."""
    whole = re.split("[_+]", job.id, maxsplit=1)[0]
    return not asked or bool({job.id, job.number, whole} & set(asked))


def plain_number(value: Any) -> int | None:
    """A number of Slurm's JSON: plain, or of {"set", "infinite", "number"}; None where not set."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


MAX_GPUS = 4096
"""Of a node, with MIG slices and shares."""


def owned_gpus(text: str, source: str) -> OwnedGpus:
    """The GPUs of a text such as "gpu:h100:6(IDX:0-1,4-7),nic:1".

    >>> owned_gpus("gpu:h100:3(IDX:0-1,4)", "job 7")
    OwnedGpus(count=3, indices=(0, 1, 4), sliced=False)
    >>> owned_gpus("gpu(CNT:2)", "job 7").indices, owned_gpus("(null)", "job 7").count
    (None, 0)
    >>> owned_gpus("shard:h100:3(0/4,3/4)", "job 7").indices
    (1,)

    Raises ParseError. Source: Slurm's gres_stepmgr_job_build_details.
    """
    count = 0
    indices: set[int] = set()
    known = True
    sliced = False
    for item in _outside_brackets(text):
        bare = item.removeprefix("gres/").removeprefix("gres:")
        if re.split("[:(]", bare, maxsplit=1)[0] not in ("gpu", "shard", "mps"):
            continue
        match = _HELD.match(bare)
        if match is None:
            raise ParseError(source, "GPUs such as gpu:h100:2(IDX:0-1)", item)
        kind, number = match["type"], match["count"]
        if number is None and kind is not None and _digits(kind):
            kind, number = None, kind
        found = _places(match["detail"] or "", source)
        if found is not None:
            indices |= set(found)
            count += len(found)
            sliced = sliced or bool(kind is not None and found and _MIG_TYPE.search(kind))
        else:
            counted = _CNT.match(match["detail"] or "")
            amount = int(number or (counted[1] if counted else "1"))
            count += amount
            known = known and not amount
    return OwnedGpus(count, tuple(sorted(indices)) if known else None, sliced)


def _places(detail: str, source: str) -> tuple[int, ...] | None:
    """The devices that "IDX:0-1" or, of shared ones, "0/4,3/4" names; None where none are."""
    its = detail.removeprefix("IDX:")
    if detail.startswith("IDX:") and its != "N/A":
        places = CpuSet.parse(its, source)
        if len(places) > MAX_GPUS:
            raise ParseError(source, f"at most {MAX_GPUS} GPUs of a node", its)
        return tuple(places)
    if _SHARES.match(detail):
        in_use = (int(share.partition("/")[0]) for share in detail.split(","))
        return tuple(place for place, amount in enumerate(in_use) if amount)
    return None


def gpu_types(text: str) -> dict[str, int]:
    """GPUs of a node's Gres= by their type in small letters, as Slurm compares them; "" = no type.

    >>> gpu_types("gpu:H100:6(S:0-1),gpu:a100:no_consume:2,nic:2"), gpu_types("gpu:8")
    ({'h100': 6, 'a100': 2}, {'': 8})
    """
    counts: dict[str, int] = {}
    for item in _outside_brackets(text):
        name, *rest = item.partition("(")[0].split(":")
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and _digits(rest[-1]) else 1
        kind = next((word.lower() for word in rest if word != "no_consume"), "")
        counts[kind] = counts.get(kind, 0) + count
    return counts


def gpu_count(text: str) -> int | None:
    """GPUs of a node's Gres= ("gpu:h100:8(S:0-1),nic:2"); None where it names none."""
    counts = gpu_types(text)
    return sum(counts.values()) if counts else None


def has_slices(text: str) -> bool:
    """True where a node's Gres=, or a line's Type=, names MIG slices ("gpu:1g.10gb:7")."""
    return _MIG_TYPE.search(text) is not None


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _outside_brackets(text: str) -> Iterator[str]:
    """The items between the commas that stand outside round brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
