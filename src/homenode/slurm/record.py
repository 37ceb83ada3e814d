"""Record: what a job really had on a node, as the hooks wrote it while it ran (hooks.py).

The lines about the machine and the GPUs are written by root, those about tasks by the job's user.
Source: docs/formats/slurm-record.md.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.slurm.held import Held, HeldGpu, NodeTree

KIND = "homenode-slurm-record"
VERSION = 1
MAX_TEXT_CHARS = 1 << 20

_RENDER = 128
_BINDS = re.compile(r"bind(?:[=:][a-z|]+)?:([0-9,-]+)\Z")


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task as it started. task: "STEP.RANK". pus, memory_nodes: as /proc/self/status allows.

    policy: of its memory, as /proc/self/numa_maps says ("default", "bind:0"); None = not told.
    """

    task: str
    pus: CpuSet
    memory_nodes: CpuSet
    policy: str | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job on a node. start_s, end_s: seconds since 1970; None where it has not ended.

    pus_of_node: of every NUMA node. gpus: every GPU of the node, by the driver's number.
    held: numbers of the job's GPUs.
    """

    job: str
    node: str
    name: str
    user: str | None
    start_s: int | None
    end_s: int | None
    pus_of_node: tuple[tuple[NodeIndex, CpuSet], ...]
    distances: tuple[tuple[NodeIndex, tuple[int, ...]], ...]
    gpu_memory: tuple[NodeIndex, ...]
    gpus: tuple[HeldGpu, ...]
    held: CpuSet
    tasks: tuple[TaskRecord, ...]


@dataclass(slots=True)
class _Open:
    """A record whose lines are still being read."""

    said: dict[str, str] = field(default_factory=dict)
    pus_of_node: list[tuple[NodeIndex, CpuSet]] = field(default_factory=list)
    distances: list[tuple[NodeIndex, tuple[int, ...]]] = field(default_factory=list)
    gpu_memory: list[NodeIndex] = field(default_factory=list)
    gpus: list[HeldGpu] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)


def parse_record(text: str, source: str) -> JobRecord:
    """The record of a text. Raises ParseError that names the line."""
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
    lines = text.splitlines()
    head = lines[0].split() if lines else []
    if len(head) != 2 or head[0] != KIND or not _is_number(head[1]):
        raise ParseError(source, f"{KIND} {VERSION}", lines[0] if lines else "", line=1)
    if int(head[1]) > VERSION:
        raise ParseError(
            source, f"{KIND} up to version {VERSION}", head[1], line=1,
            hint="it was written by hooks of a newer homenode: update this one",
        )  # fmt: skip
    record = _Open()
    for number, line in enumerate(lines[1:], start=2):
        words = line.split()
        if words:
            _read(record, words, source, number)
    for needed in ("job", "node"):
        if needed not in record.said:
            raise ParseError(source, f"a line {needed!r}", "none", line=len(lines))
    return JobRecord(
        job=record.said["job"],
        node=record.said["node"],
        name=record.said.get("name", ""),
        user=record.said.get("user"),
        start_s=_seconds(record.said.get("start")),
        end_s=_seconds(record.said.get("end")),
        pus_of_node=tuple(record.pus_of_node),
        distances=tuple(record.distances),
        gpu_memory=tuple(record.gpu_memory),
        gpus=tuple(record.gpus),
        held=CpuSet.parse(record.said.get("held", ""), source),
        tasks=tuple(record.tasks),
    )


def held_of_record(record: JobRecord) -> Held:
    """What the job had; `unknown` says so where the record does not tell."""

    def unknown(reason: str) -> Held:
        return Held(
            record.job, record.node, record.name, record.user, None, (), None, unknown=reason
        )

    by_index = {gpu.index: gpu for gpu in record.gpus}
    # AMD's: Slurm's number is that of /dev/dri/renderD128 and on.
    numbers = [n - _RENDER if n not in by_index and n >= _RENDER else n for n in record.held]
    missing = [index for index in numbers if index not in by_index]
    if missing:
        return unknown(f"the record tells no address of GPU {missing[0]}")
    if record.held and not record.tasks:
        return unknown("no task of it was recorded: no TaskProlog, or none had started")
    held = Held(
        job=record.job,
        node=record.node,
        name=record.name,
        user=record.user,
        pus=CpuSet.from_bits(_union(task.pus for task in record.tasks)) if record.tasks else None,
        gpus=tuple(by_index[index] for index in numbers),
        tree=_tree(record),
    )
    return with_tasks(held, record.tasks)


def parse_task(values: Sequence[str], source: str, line: int) -> TaskRecord:
    """The task of the values of a line. Raises ParseError that names the line."""
    if len(values) != 4:
        raise ParseError(source, "task STEP.RANK PUS NODES POLICY", " ".join(values), line=line)
    try:
        pus, nodes = CpuSet.parse(values[1]), CpuSet.parse(values[2])
    except ParseError as error:
        raise ParseError(source, error.expected, error.found, line=line) from None
    return TaskRecord(values[0], pus, nodes, None if values[3] == "-" else values[3])


def with_tasks(held: Held, tasks: Sequence[TaskRecord]) -> Held:
    """The same with what its tasks say of memory; as it is without any."""
    if not tasks or held.unknown is not None:
        return held
    return replace(
        held,
        memory_nodes=_indices(task.memory_nodes for task in tasks),
        bound_nodes=_bound(tasks),
    )


def _read(record: _Open, words: list[str], source: str, line: int) -> None:
    key, *values = words
    try:
        if key in ("job", "node", "user", "start", "end", "held", "name"):
            record.said[key] = " ".join(values)
        elif key == "numa" and len(values) in (1, 2):
            record.pus_of_node.append((_node(values[0]), CpuSet.parse("".join(values[1:]))))
        elif key == "distances" and len(values) > 1:
            record.distances.append((_node(values[0]), tuple(_small(v) for v in values[1:])))
        elif key == "gpumemory" and len(values) == 1:
            record.gpu_memory.append(_node(values[0]))
        elif key == "gpu" and len(values) == 3:
            node = None if values[2] == "-1" else _node(values[2])
            record.gpus.append(HeldGpu(_small(values[0]), Bdf.parse(values[1]), node))
        elif key == "task":
            record.tasks.append(parse_task(values, source, line))
        else:
            raise ParseError(source, "a line of a record", " ".join(words), line=line)
    except ParseError as error:
        if error.line is not None:
            raise
        raise ParseError(source, error.expected, error.found, line=line) from None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


def _node(text: str) -> NodeIndex:
    return NodeIndex(_small(text))


def _small(text: str) -> int:
    if not _is_number(text) or len(text) > 5:
        raise ParseError("", "a number of up to 5 digits", text)
    return int(text)


def _seconds(text: str | None) -> int | None:
    return int(text) if text is not None and _is_number(text) else None


def _tree(record: JobRecord) -> NodeTree:
    nodes = [node for node, _ in record.pus_of_node]
    return NodeTree(
        pus_of_node=dict(record.pus_of_node),
        gpus_of_node={node: sum(gpu.node == node for gpu in record.gpus) for node in nodes},
        gpu_memory=frozenset(record.gpu_memory),
        distances={
            (a, b): distance
            for a, row in record.distances
            for b, distance in zip(nodes, row, strict=False)
        },
    )


def _bound(tasks: Sequence[TaskRecord]) -> frozenset[NodeIndex] | None:
    """The nodes to which policies bind, where they bind every task."""
    found = [_BINDS.match(task.policy) if task.policy else None for task in tasks]
    if not found or None in found:
        return None
    return _indices(CpuSet.parse(match[1]) for match in found if match is not None)


def _indices(sets: Iterable[CpuSet]) -> frozenset[NodeIndex]:
    return frozenset(NodeIndex(i) for i in CpuSet.from_bits(_union(sets)))


def _union(sets: Iterable[CpuSet]) -> int:
    bits = 0
    for one in sets:
        bits |= one.bits
    return bits
