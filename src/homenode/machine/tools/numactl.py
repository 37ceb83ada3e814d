"""numactl --hardware and numactl --show: the nodes, and how a process is bound to them.

    numactl --hardware            numactl --show

Seen with 2.0.12 to 2.0.18. Source: numactl.c of numactl 2.0.16.

* "MB" is 2^20 bytes. The sizes need not add up to the machine's memory: a guest with hot-plugged
  memory shows 13,530 of 24,105 MB. Nothing here adds them.
* Nodes may be sparse (0-3,4,12,20,28 on a GH200), have no CPUs (an empty list) or no memory (0 MB).
* Distances may be missing in guests ("No distance information available.").
"""

import re
from collections.abc import Container, Iterable
from typing import TypeVar

from msgspec import Struct

from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.units import MIB

MAX_NODES = 1024
_HEAD_LINES = 8

Key = TypeVar("Key")

_HARDWARE = "numactl --hardware"
_SHOW = "numactl --show"
_AVAILABLE = re.compile(r"available: (\d{1,6}) nodes \(([0-9,-]+)\)", re.ASCII)
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


class NumactlNode(Struct, frozen=True, kw_only=True):
    """A node; a field is None if the tool does not report it."""

    index: NodeIndex
    pus: CpuSet
    size_bytes: int | None
    free_bytes: int | None


class NumactlHardware(Struct, frozen=True, kw_only=True):
    """The nodes that numactl --hardware prints."""

    nodes: tuple[NumactlNode, ...]  # ascending
    # shape (from node, to node), in their order; may be None
    distances: tuple[tuple[int, ...], ...] | None
    gaps: tuple[Gap, ...]


def looks_like_hardware(text: str) -> bool:
    """Return whether the line that lists the nodes is among the first lines."""
    lines = text.split("\n", _HEAD_LINES)[:_HEAD_LINES]
    return any(_AVAILABLE.fullmatch(line.strip()) for line in lines)


def parse_hardware(text: str) -> NumactlHardware:
    """Return the nodes. Lines of --show behind them are skipped. Raises ParseError."""
    lines = Lines(text, _HARDWARE, stripped=False)
    listed_nodes: tuple[int, ...] | None = None
    pus: dict[int, CpuSet] = {}
    memory: dict[tuple[int, str], int | None] = {}
    columns: tuple[int, ...] = ()
    rows: dict[int, tuple[int, ...]] = {}
    for line in lines:
        if match := _AVAILABLE.fullmatch(line.text.strip()):
            listed_nodes = _parse_nodes(line, match, listed_nodes)
        elif match := _CPUS.fullmatch(line.text):
            pus[_parse_node(line, match[1], pus)] = CpuSet(_split_numbers(line, match[2], "a CPU"))
        elif match := _MEMORY.fullmatch(line.text):
            key = (line.read_count(match[1], "a node"), match[2])
            is_known = not match[3].startswith("<")
            memory[_check_new(line, key, memory)] = (
                line.read_count(match[3], "MB") * MIB if is_known else None
            )
        elif match := _DISTANCE_HEADER.fullmatch(line.text):
            columns = _split_numbers(line, match[1], "a node")
        elif match := _DISTANCE_ROW.fullmatch(line.text):
            rows[_parse_node(line, match[1], rows)] = _split_numbers(line, match[2], "a distance")
        elif line.text.startswith("No distance information"):
            lines.gaps.append(Gap("distances", "numactl: no distance information available"))
        elif line.text.startswith("No NUMA support"):
            raise line.make_error("a kernel with NUMA")
        elif line.text.strip() != "node distances:" and not _SHOW_LINE.fullmatch(line.text):
            lines.add_unknown(line)
    if listed_nodes is None:
        raise lines.make_error("a line 'available: 2 nodes (0-1)'")
    if set(pus) != set(listed_nodes) or not {node for node, _ in memory} <= set(listed_nodes):
        raise lines.make_error(
            f"CPUs and memory of the nodes {_format_nodes(listed_nodes)}", _format_nodes(pus)
        )
    if (columns or rows) and not (
        columns == listed_nodes
        and set(rows) == set(listed_nodes)
        and all(len(row) == len(listed_nodes) for row in rows.values())
    ):
        raise lines.make_error(
            f"distances between the nodes {_format_nodes(listed_nodes)}", _format_nodes(columns)
        )
    return NumactlHardware(
        nodes=tuple(
            NumactlNode(
                index=NodeIndex(node),
                pus=pus[node],
                size_bytes=memory.get((node, "size")),
                free_bytes=memory.get((node, "free")),
            )
            for node in listed_nodes
        ),
        distances=tuple(rows[node] for node in listed_nodes) if columns else None,
        gaps=tuple(lines.gaps),
    )


_NODES_OF = {"-N": 0, "--cpunodebind": 0}
_NODES_OF |= dict.fromkeys(("-m", "--membind", "-p", "--preferred"), 1)
_INTERLEAVE = ("-i", "--interleave")
_COMMAND = re.compile(r"(?:^|[\s/])numactl ", re.ASCII)


def bound_by_command(line: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return nodes of the CPUs and of the memory of a command in a log; () if it does not report
    it, or interleaves memory over nodes. None if numactl starts nothing there.

    >>> bound_by_command("+ numactl -N 0 --membind=0,1 ./stream")
    ((0,), (0, 1))
    >>> bound_by_command("+ numactl --cpunodebind=1 ./stream")
    ((1,), ())
    >>> bound_by_command("numactl --show"), bound_by_command("$ numactl -N 0 -i all ./stream")
    (None, ((), ()))
    """
    match = _COMMAND.search(line)
    words = line[match.end() :].split() if match else []
    nodes: list[tuple[int, ...]] = [(), ()]
    interleaves = False
    while words and words[0].startswith("-"):
        word, _, value = words.pop(0).partition("=")
        if word[:2] in ("-N", "-m", "-p", "-i") and len(word) > 2:
            word, value = word[:2], word[2:]
        if not value and word in _WITH_VALUE and words:
            value = words.pop(0)
        if word in _NODES_OF and _LIST.fullmatch(value):
            nodes[_NODES_OF[word]] = tuple(CpuSet.parse(value))
        interleaves = interleaves or word in _INTERLEAVE
    if interleaves:
        nodes = [(), ()]
    return (nodes[0], nodes[1]) if words else None


_LIST = re.compile(r"\d{1,4}(?:[-,]\d{1,4}){0,64}", re.ASCII)
_WITH_VALUE = frozenset({*_NODES_OF, *_INTERLEAVE, "-C", "--physcpubind"})


def parse_show(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nodes where a process may run, and those where its memory may be. Other lines are
    skipped, because the output often heads a log. Raises ParseError for no binding or several."""
    lines = Lines(text, _SHOW, stripped=False)
    for line in lines:
        if match := _SHOW_LINE.fullmatch(line.text):
            lines.keep(match[1], match[2].strip(), line)
    lines.take("policy", Line.read_word, "a policy")
    expected = "numbers such as '0 1 2'"
    cpu_nodes = lines.take("cpubind", _parse_numbers, expected)
    return cpu_nodes, lines.take("membind", _parse_numbers, expected)


def _parse_nodes(
    line: Line, match: "re.Match[str]", before: tuple[int, ...] | None
) -> tuple[int, ...]:
    nodes = tuple(CpuSet.parse(match[2], f"{_HARDWARE}:{line.number}"))
    if before is not None or len(nodes) != int(match[1]) or not 0 < len(nodes) <= MAX_NODES:
        raise line.make_error(f"one list of 1 to {MAX_NODES} nodes")
    return nodes


def _parse_node(line: Line, word: str, among: Container[int]) -> int:
    return _check_new(line, line.read_count(word, "a node"), among)


def _check_new(line: Line, key: Key, among: Container[Key]) -> Key:
    if key in among:
        raise line.make_error("one line of each node", str(key))
    return key


def _split_numbers(line: Line, text: str, expected: str) -> tuple[int, ...]:
    return tuple(line.read_count(word, expected) for word in text.split())


def _parse_numbers(line: Line, text: str, expected: str) -> tuple[int, ...]:
    if text and not _NUMBERS.fullmatch(text):
        raise line.make_error(expected, text)
    return _split_numbers(line, text, expected)


def _format_nodes(nodes: Iterable[int]) -> str:
    return str(CpuSet(nodes)) or "none"
