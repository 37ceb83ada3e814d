"""numactl --hardware and numactl --show: the nodes, and how a process is bound to them.

    numactl --hardware            numactl --show

Seen of 2.0.12 to 2.0.18. Source: numactl.c of numactl 2.0.16.

* "MB" is 2^20 bytes. The sizes need not add up to the machine's memory: a guest with hot-plugged
  memory shows 13,530 of 24,105 MB. Nothing here adds them.
* Nodes may be sparse (0-3,4,12,20,28 on a GH200), have no PUs (an empty list) or no memory (0 MB).
* Distances may be missing in guests ("No distance information available.").
"""

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TypeVar

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.tools.figures import count
from homenode.units import MIB

HARDWARE_COMMAND = ("numactl", "--hardware")
SHOW_COMMAND = ("numactl", "--show")
MAX_NODES = 1024

Key = TypeVar("Key")

_HARDWARE = "numactl --hardware"
_SHOW = "numactl --show"
_AVAILABLE = re.compile(r"available: (\d+) nodes \(([0-9,-]+)\)", re.ASCII)
_CPUS = re.compile(r"node (\d+) cpus:((?: \d+)*) ?", re.ASCII)
_MEMORY = re.compile(r"node (\d+) (size|free): (\d+|<not available>) ?(?:MB)?", re.ASCII)
_DISTANCE_HEADER = re.compile(r"node((?: +\d+)+) *", re.ASCII)
_DISTANCE_ROW = re.compile(r" *(\d+):((?: +\d+)+) *", re.ASCII)
_SHOW_LINE = re.compile(
    r"(policy|preferred node|physcpubind|cpubind|nodebind|membind|interleavemask|interleavenode|"
    r"preferred): ?(.*)",
    re.ASCII,
)
_NUMBERS = re.compile(r"\d{1,6}(?: \d{1,6})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class NumactlNode:
    """None where the tool does not say."""

    index: NodeIndex
    pus: CpuSet
    size_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class NumactlHardware:
    """nodes: ascending. distances: shape (from node, to node), in their order; may be None."""

    nodes: tuple[NumactlNode, ...]
    distances: tuple[tuple[int, ...], ...] | None
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class NumactlShow:
    """How the process that asked was bound.

    policy: "default", "bind", "preferred", "interleave" or "preferred-many". pus: where its threads
    may run. cpu_nodes: the nodes of these. memory_nodes: where its memory may be.
    """

    policy: str
    pus: CpuSet
    cpu_nodes: tuple[NodeIndex, ...]
    memory_nodes: tuple[NodeIndex, ...]


def parse_hardware(text: str) -> NumactlHardware:
    """The nodes. Lines of --show behind them are skipped. Raises ParseError."""
    listed: tuple[int, ...] | None = None
    pus: dict[int, CpuSet] = {}
    memory: dict[tuple[int, str], int | None] = {}
    columns: list[int] = []
    rows: dict[int, tuple[int, ...]] = {}
    gaps: list[Gap] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.rstrip("\r\n")
        if found := _AVAILABLE.fullmatch(line.strip()):
            listed = _listed(found, listed, number)
        elif found := _CPUS.fullmatch(line):
            node = _new(count(found[1], _HARDWARE, "a node", number), pus, number)
            pus[node] = _pus(found[2].split(), number)
        elif found := _MEMORY.fullmatch(line.rstrip()):
            key = (count(found[1], _HARDWARE, "a node", number), found[2])
            is_known = not found[3].startswith("<")
            memory[_new(key, memory, number)] = (
                count(found[3], _HARDWARE, "MB", number) * MIB if is_known else None
            )
        elif found := _DISTANCE_HEADER.fullmatch(line):
            columns = [count(word, _HARDWARE, "a node", number) for word in found[1].split()]
        elif found := _DISTANCE_ROW.fullmatch(line):
            node = _new(count(found[1], _HARDWARE, "a node", number), rows, number)
            rows[node] = tuple(
                count(word, _HARDWARE, "a distance", number) for word in found[2].split()
            )
        elif line.startswith("No distance information"):
            gaps.append(Gap("distances", "numactl: no distance information available"))
        elif line.startswith("No NUMA support"):
            raise ParseError(_HARDWARE, "a kernel with NUMA", line, line=number)
        elif line.strip() and line.strip() != "node distances:" and not _SHOW_LINE.fullmatch(line):
            gaps.append(Gap(f"{_HARDWARE} line {number}", f"not known: {line[:80]!r}"))
    if listed is None:
        raise ParseError(_HARDWARE, "a line 'available: 2 nodes (0-1)'", "none")
    if set(pus) != set(listed) or not {node for node, _ in memory} <= set(listed):
        raise ParseError(_HARDWARE, f"PUs and memory of the nodes {_words(listed)}", _words(pus))
    nodes = tuple(
        NumactlNode(NodeIndex(n), pus[n], memory.get((n, "size")), memory.get((n, "free")))
        for n in listed
    )
    return NumactlHardware(nodes, _distances(listed, columns, rows), tuple(gaps))


def parse_show(text: str) -> NumactlShow:
    """How a process was bound. Other lines are skipped: it often heads a log.

    Raises ParseError where there is none, or more than one.
    """
    found: dict[str, tuple[str, int]] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        matched = _SHOW_LINE.fullmatch(raw.rstrip())
        if matched is None:
            continue
        if matched[1] in found:
            raise ParseError(_SHOW, f"one line {matched[1]!r}", raw, line=number)
        found[matched[1]] = (matched[2].strip(), number)
    for name in ("policy", "cpubind", "membind"):
        if name not in found:
            raise ParseError(_SHOW, f"a line {name!r}", "none")
    nodes = {
        name: tuple(NodeIndex(node) for node in _numbers(*found[name]))
        for name in ("cpubind", "membind")
    }
    pus = _numbers(*found["physcpubind"]) if "physcpubind" in found else ()
    return NumactlShow(found["policy"][0], CpuSet(pus), nodes["cpubind"], nodes["membind"])


def _listed(found: "re.Match[str]", before: tuple[int, ...] | None, number: int) -> tuple[int, ...]:
    nodes = tuple(CpuSet.parse(found[2], f"{_HARDWARE}:{number}"))
    if before is not None or len(nodes) != int(found[1]) or not 0 < len(nodes) <= MAX_NODES:
        raise ParseError(_HARDWARE, f"one list of 1 to {MAX_NODES} nodes", found[0], line=number)
    return nodes


def _new(key: Key, among: Container[Key], number: int) -> Key:
    if key in among:
        raise ParseError(_HARDWARE, "one line of each node", str(key), line=number)
    return key


def _pus(words: list[str], number: int) -> CpuSet:
    return CpuSet(count(word, _HARDWARE, "a PU", number) for word in words)


def _numbers(text: str, number: int) -> tuple[int, ...]:
    if text and not _NUMBERS.fullmatch(text):
        raise ParseError(_SHOW, "numbers such as '0 1 2'", text, line=number)
    return tuple(int(word) for word in text.split())


def _distances(
    listed: tuple[int, ...], columns: list[int], rows: dict[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...] | None:
    if not columns and not rows:
        return None
    square = all(len(row) == len(listed) for row in rows.values())
    if tuple(columns) != listed or set(rows) != set(listed) or not square:
        raise ParseError(
            _HARDWARE, f"distances between the nodes {_words(listed)}", _words(columns)
        )
    return tuple(rows[node] for node in listed)


def _words(nodes: Iterable[int]) -> str:
    return ",".join(str(node) for node in nodes)
