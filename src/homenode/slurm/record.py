"""Record: what a job really had on a node, as the hooks wrote it while it ran (hooks.py).

The lines about the machine and the GPUs are written by root, those about tasks by the job's user.
Source: docs/formats/slurm-record.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.slurm.job_allocation import AllocatedGpu

KIND = "homenode-slurm-record"
VERSION = 2
MAX_TEXT_CHARS = 1 << 20
MAX_SLICES = 64
"""Of a GPU; the hardware has 7."""


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task as it started. task: "STEP.RANK". pus, memory_nodes: as /proc/self/status allows.

    policy: of its memory, as /proc/self/numa_maps says ("default", "bind:0"); None = unknown.
    """

    task: str
    pus: CpuSet
    memory_nodes: CpuSet
    policy: str | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job on a node. start_s, end_s: seconds since 1970; None where it has not ended.

    pus_of_node: of every NUMA node. gpus: every GPU of the node, by the driver's number.
    owned: numbers of the job's GPUs, as Slurm counts. slices: (the driver's number, how
    many) of each GPU that is cut into MIG slices. restart: how often it was started again.
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
    gpus: tuple[AllocatedGpu, ...]
    owned: CpuSet
    tasks: tuple[TaskRecord, ...]
    slices: tuple[tuple[int, int], ...] = ()
    restart: int = 0


@dataclass(slots=True)
class _Open:
    """A record whose lines are still being read."""

    said: dict[str, str] = field(default_factory=dict)
    pus_of_node: list[tuple[NodeIndex, CpuSet]] = field(default_factory=list)
    distances: list[tuple[NodeIndex, tuple[int, ...]]] = field(default_factory=list)
    gpu_memory: list[NodeIndex] = field(default_factory=list)
    gpus: list[AllocatedGpu] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    slices: list[tuple[int, int]] = field(default_factory=list)


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
            source,
            f"{KIND} up to version {VERSION}",
            head[1],
            line=1,
            hint="it was written by hooks of a newer homenode: update this one",
        )
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
        owned=CpuSet.parse(record.said.get("held", ""), source),
        tasks=tuple(record.tasks),
        slices=tuple(record.slices),
        restart=_seconds(record.said.get("restart")) or 0,
    )


def parse_task(values: Sequence[str], source: str, line: int) -> TaskRecord:
    """The task of the values of a line. Raises ParseError that names the line."""
    if len(values) != 4:
        raise ParseError(source, "task STEP.RANK PUS NODES POLICY", " ".join(values), line=line)
    try:
        pus, nodes = CpuSet.parse(values[1]), CpuSet.parse(values[2])
    except ParseError as error:
        raise ParseError(source, error.expected, error.found, line=line) from None
    return TaskRecord(values[0], pus, nodes, None if values[3] == "-" else values[3])


def _read(record: _Open, words: list[str], source: str, line: int) -> None:
    key, *values = words
    try:
        if key in ("job", "node", "user", "start", "end", "held", "name", "restart"):
            record.said[key] = " ".join(values)
        elif key == "numa" and len(values) in (1, 2):
            record.pus_of_node.append((_node(values[0]), CpuSet.parse("".join(values[1:]))))
        elif key == "distances" and len(values) > 1:
            record.distances.append((_node(values[0]), tuple(_small(v) for v in values[1:])))
        elif key == "gpumemory" and len(values) == 1:
            record.gpu_memory.append(_node(values[0]))
        elif key == "gpu" and len(values) == 3:
            node = None if values[2] == "-1" else _node(values[2])
            record.gpus.append(AllocatedGpu(_small(values[0]), Bdf.parse(values[1]), node))
        elif key == "slices" and len(values) == 2:
            record.slices.append((_small(values[0]), min(_small(values[1]), MAX_SLICES)))
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
