"""Gres: what gres.conf says of the GPUs of each node, and GPUs as jobs hold them.

Source: gres.conf(5) of 22.05; scontrol(1), show job.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.slurm.config import Config, ConfigLine
from homenode.slurm.hostlist import expand_hostlist

_COUNT = re.compile(r"([0-9]{1,15})([kmgtp]?)\Z", re.IGNORECASE | re.ASCII)
_HELD = re.compile(
    r"(?P<name>gpu|shard|mps)(?::(?P<type>[^:(),]+?))?(?::(?P<count>[0-9]{1,6}))?(?:\((?P<detail>[^()]*)\))?\Z",
    re.ASCII,
)
_CNT = re.compile(r"CNT:([0-9]{1,9})\Z", re.ASCII)
_SHARES = re.compile(r"[0-9]{1,9}/[0-9]{1,9}(?:,[0-9]{1,9}/[0-9]{1,9})*\Z", re.ASCII)
_MIG_TYPE = re.compile(r"(?<![0-9])[0-9]+g\.[0-9]+gb", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class GresLine:
    """One line of gres.conf.

    nodes: whom it is about; None = every node that reads the file. name: "gpu", "nic", ...; None
    on a line that only sets AutoDetect. files: device files in their order. cores: Slurm's core
    numbers (Cores=, or CPUs= as it was once called); None where not given. links: of the one
    device of the line to each other one.
    """

    line: ConfigLine
    nodes: tuple[str, ...] | None
    autodetect: str | None
    name: str | None
    type: str | None
    files: tuple[str, ...]
    cores: CpuSet | None
    links: tuple[int, ...] | None
    count: int | None
    is_multiple: bool = False

    @property
    def devices(self) -> int:
        """How many devices the line is about."""
        if self.is_multiple:
            return 1
        return len(self.files) if self.files else self.count if self.count is not None else 1


@dataclass(frozen=True, slots=True)
class OwnedGpus:
    """The GPUs that a job holds on a node, or has a share of (shard, mps).

    indices: places in the node's list of devices; None where Slurm gives only how many. sliced:
    True where some are parts of GPUs (MIG): each part has a place of its own in that list.
    """

    count: int
    indices: tuple[int, ...] | None
    sliced: bool = False


def gres_lines(config: Config) -> tuple[GresLine, ...]:
    """The lines of a gres.conf. Raises ParseError that names the line."""
    return tuple(_gres_line(line, line.source) for line in config.lines)


def lines_for(lines: tuple[GresLine, ...], node: str) -> tuple[GresLine, ...]:
    """The lines about the GPUs of one node, in their order."""
    return tuple(
        line for line in lines if line.name == "gpu" and (line.nodes is None or node in line.nodes)
    )


def autodetect_for(lines: tuple[GresLine, ...], node: str) -> str | None:
    """What detects the node's GPUs: its own setting, else that of all; None where nothing does."""
    of_all: str | None = None
    for line in lines:
        if line.autodetect is None:
            continue
        if line.nodes is not None and node in line.nodes:
            return None if line.autodetect == "off" else line.autodetect
        # On a line about GPUs it is for all nodes too: it is the line's nodes that count.
        if line.nodes is None and line.name in (None, "gpu"):
            of_all = line.autodetect
    return None if of_all in (None, "off") else of_all


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
        return tuple(CpuSet.parse(its, source))
    if _SHARES.match(detail):
        in_use = (int(share.partition("/")[0]) for share in detail.split(","))
        return tuple(place for place, amount in enumerate(in_use) if amount)
    return None


def gpu_count(text: str) -> int | None:
    """GPUs of a node's Gres= ("gpu:h100:8(S:0-1),nic:2"); None where it names none."""
    count: int | None = None
    for item in _outside_brackets(text):
        name, _, rest = item.partition("(")[0].partition(":")
        if name != "gpu":
            continue
        number = rest.rpartition(":")[2]
        count = (count or 0) + (int(number) if _digits(number) else 1)
    return count


def has_slices(text: str) -> bool:
    """True where a node's Gres=, or a line's Type=, names MIG slices ("gpu:1g.10gb:7")."""
    return _MIG_TYPE.search(text) is not None


def _gres_line(line: ConfigLine, source: str) -> GresLine:
    def listed(*keys: str) -> tuple[str, ...]:
        value = line.get(*keys)
        return () if value is None else expand_hostlist(value, source, line=line.first)

    nodes = line.get("nodename")
    cores = line.get("cores", "cpus")
    links = line.get("links")
    count = line.get("count")
    autodetect = line.get("autodetect")
    multiple = listed("multiplefiles")
    return GresLine(
        line=line,
        nodes=None if nodes is None else expand_hostlist(nodes, source, line=line.first),
        autodetect=None if autodetect is None else autodetect.lower(),
        name=line.get("name"),
        type=line.get("type"),
        files=multiple or listed("file"),
        cores=None if cores is None else _cores(cores, source, line.first),
        links=None if links is None else _links(links, source, line.first),
        count=None if count is None else _count(count, source, line.first),
        is_multiple=bool(multiple),
    )


def _cores(text: str, source: str, line: int) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except ParseError as error:
        raise ParseError(source, "core numbers such as 0-15,32", error.found, line=line) from None


def _links(text: str, source: str, line: int) -> tuple[int, ...]:
    numbers = []
    for item in text.split(","):
        digits = item.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 5):
            raise ParseError(source, "Links= with a number for each GPU", item, line=line)
        numbers.append(int(item))
    return tuple(numbers)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def _count(text: str, source: str, line: int) -> int:
    match = _COUNT.match(text)
    if match is None:
        raise ParseError(source, "a count such as 8 or 10G", text, line=line)
    return int(match[1]) << 10 * " kmgtp".index(match[2].lower() or " ")


def _outside_brackets(text: str) -> Iterator[str]:
    """The items between the commas that stand outside round brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
