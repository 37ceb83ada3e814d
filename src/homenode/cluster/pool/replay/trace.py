"""Trace: requests and machines of production clusters, read from CSV by their columns.

Sources: the node and task lists of kubernetes-scheduler-simulator (FGD, USENIX ATC'23), and the
servers and requests of Dataset-for-topology-aware-VM-placement.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

from homenode.errors import InputError

MOST_ROWS = 1_000_000
MILLI = 1000
"""Parts of a GPU that a task can ask for."""


class TraceKind(StrEnum):
    """What a list of requests is about."""

    TASKS = "tasks"  # CPUs, memory, GPUs or a part of one
    CELLS = "cells"  # VMs of one or two NUMA cells


class Replay(Struct, frozen=True, kw_only=True):
    """One order of arrivals, replayed. figures: what came of it, by name. curve: points of what had
    arrived, and what was placed then."""

    figures: Mapping[str, float]
    curve: tuple[tuple[float, float], ...]


class TraceNode(Struct, frozen=True, kw_only=True):
    """A machine. cpu_milli: thousandths of a CPU. gpus: how many, each of a thousand parts."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str


class Task(Struct, frozen=True, kw_only=True):
    """A task. gpus: whole GPUs, or 1 of which it asks for gpu_milli parts; 0 = none. models: of
    GPUs that it takes, () = any."""

    cpu_milli: int
    memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...] = ()

    @property
    def total_gpu_milli(self) -> int:
        return self.gpus * self.gpu_milli


class TwoNodeServer(Struct, frozen=True):
    """Free cores and GiB of each node."""

    cores: tuple[int, int]
    memory_gib: tuple[int, int]


class GroupPolicy(StrEnum):
    """What VMs of one group have to do with each other."""

    NONE = ""
    AFFINITY = "affinity"  # one server
    ANTI_AFFINITY = "anti-affinity"  # no two on one server
    FAULT_DOMAINS = "fault_domain"  # those of different domains on different servers


class CellVm(Struct, frozen=True, kw_only=True):
    """A VM of so many cells, each with an equal part of cores and memory on a node of its own."""

    cores: int
    memory_gib: int
    cells: int
    spread: GroupPolicy = GroupPolicy.NONE
    group: str = ""
    domain: str = ""


def rows_of(text: str, source: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """(line number, cells by column) of a CSV without quotes. Raises InputError."""
    lines = text.splitlines()
    if not lines:
        raise InputError(f"{source}: expected a head with columns, found an empty file")
    head = [name.strip() for name in lines[0].removeprefix("\ufeff").split(",")]
    if len(lines) > MOST_ROWS:
        raise InputError(f"{source}: expected at most {MOST_ROWS} lines, found {len(lines)}")
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(head):
            raise InputError(f"{source}:{number}: expected {len(head)} columns, found {len(cells)}")
        yield number, dict(zip(head, cells, strict=True))


def _count(row: Mapping[str, str], key: str, where: str, *, least: int = 0) -> int:
    text = row.get(key)
    if text is None:
        raise InputError(f"{where}: expected a column {key}, found none")
    if not (text.isascii() and text.isdigit() and len(text) < 13) or int(text) < least:
        raise InputError(f"{where}: {key}: expected a whole number from {least}, found {text!r}")
    return int(text)


def trace_kind(text: str, source: str) -> TraceKind:
    """What the list is about, by its columns. Raises InputError."""
    head = {name.strip() for name in text.partition("\n")[0].split(",")}
    if {"cpu_milli", "num_gpu", "gpu_milli"} <= head:
        return TraceKind.TASKS
    if {"flavor_vcpus", "flavor_ram", "numa"} <= head:
        return TraceKind.CELLS
    raise InputError(
        f"{source}: expected columns cpu_milli, memory_mib, num_gpu, gpu_milli (tasks) or "
        "flavor_vcpus, flavor_ram, numa (VMs of cells), found others"
    )


def parse_gpu_nodes(text: str, source: str) -> tuple[TraceNode, ...]:
    """Machines with columns cpu_milli, memory_mib, gpu and model. Raises InputError."""
    nodes = []
    for number, row in rows_of(text, source):
        where = f"{source}:{number}"
        nodes.append(
            TraceNode(
                cpu_milli=_count(row, "cpu_milli", where),
                memory_mib=_count(row, "memory_mib", where),
                gpus=_count(row, "gpu", where),
                model=row.get("model", ""),
            )
        )
    if not nodes:
        raise InputError(f"{source}: expected machines, found none")
    return tuple(nodes)


def parse_tasks(text: str, source: str) -> tuple[Task, ...]:
    """Tasks with columns cpu_milli, memory_mib, num_gpu, gpu_milli and perhaps gpu_spec."""
    tasks = []
    for number, row in rows_of(text, source):
        where = f"{source}:{number}"
        gpus = _count(row, "num_gpu", where)
        milli = _count(row, "gpu_milli", where) if gpus else 0
        if milli > MILLI or (gpus > 1 and milli != MILLI) or (gpus and not milli):
            raise InputError(
                f"{where}: gpu_milli: expected 1 to {MILLI} of one GPU or {MILLI} of each of "
                f"several, found {milli} of {gpus}"
            )
        models = tuple(filter(None, row.get("gpu_spec", "").split("|")))
        tasks.append(
            Task(
                cpu_milli=_count(row, "cpu_milli", where),
                memory_mib=_count(row, "memory_mib", where),
                gpus=gpus,
                gpu_milli=milli,
                models=models,
            )
        )
    if not tasks:
        raise InputError(f"{source}: expected tasks, found none")
    return tuple(tasks)


def parse_two_node_servers(text: str, source: str) -> tuple[TwoNodeServer, ...]:
    """Servers with columns CPU1, RAM1, CPU2, RAM2."""
    servers = tuple(
        TwoNodeServer(
            (_count(row, "CPU1", f"{source}:{n}"), _count(row, "CPU2", f"{source}:{n}")),
            (_count(row, "RAM1", f"{source}:{n}"), _count(row, "RAM2", f"{source}:{n}")),
        )
        for n, row in rows_of(text, source)
    )
    if not servers:
        raise InputError(f"{source}: expected servers, found none")
    return servers


def parse_cell_vms(text: str, source: str) -> tuple[CellVm, ...]:
    """VMs with columns flavor_vcpus, flavor_ram, numa, strategy, group and domain."""
    vms = []
    for number, row in rows_of(text, source):
        where = f"{source}:{number}"
        cells = _count(row, "numa", where, least=1)
        cores, memory = (
            _count(row, "flavor_vcpus", where, least=1),
            _count(row, "flavor_ram", where),
        )
        try:
            spread = GroupPolicy(row.get("strategy", ""))
        except ValueError:
            raise InputError(
                f"{where}: strategy: expected one of {', '.join(GroupPolicy)}, found "
                f"{row['strategy'][:40]!r}"
            ) from None
        if cells > 2 or cores % cells or memory % cells:
            raise InputError(
                f"{where}: expected a VM of 1 or 2 equal cells, found {cells} of "
                f"{cores} cores and {memory} GiB"
            )
        vms.append(
            CellVm(
                cores=cores,
                memory_gib=memory,
                cells=cells,
                spread=spread,
                group=row.get("group", ""),
                domain=row.get("domain", ""),
            )
        )
    if not vms:
        raise InputError(f"{source}: expected VMs, found none")
    return tuple(vms)
