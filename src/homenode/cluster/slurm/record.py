"""Record: a job's actual resources on a node, as written by the hooks below.

Root writes the lines about the machine and its GPUs, the job's user those about tasks: a separate
file, from which Epilog accepts only lines of the correct form, up to 512 KiB. The hooks never fail:
a failing Prolog drains its node. SLURM_JOB_GPUS has positions in Slurm's list of devices: by PCI
address with AutoDetect, a position for each MIG slice; else in the order of gres.conf, or of Gres=
for several types.

Source: docs/developer/formats/slurm-record.md; gres.conf(5), AutoDetect; slurm.conf(5), Prolog,
Epilog, TaskProlog; srun(1), --overlap; scontrol(1), listpids; proc(5).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.arguments import SPOOL
from homenode.cluster.slurm.job_allocation import (
    SEVERAL_TYPES,
    AllocatedGpu,
    JobAllocation,
    NodeTree,
)
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import ParseError, UsageError
from homenode.package_data import read_package_text

KIND = "homenode-slurm-record"
VERSION = 1
MAX_TEXT_CHARS = 1 << 20
MAX_SLICES = 64
"""Limit of MIG slices of a GPU; the hardware has 7."""


class TaskRecord(Struct, frozen=True):
    task: str  # "STEP.RANK"
    pus: CpuSet  # as /proc/self/status allows
    memory_nodes: CpuSet  # as /proc/self/status allows
    # of its memory, from /proc/self/numa_maps ("default", "bind:0"); None = unknown
    policy: str | None


class JobRecord(Struct, frozen=True):
    job: str
    node: str
    name: str
    user: str | None
    pus_of_node: tuple[tuple[NodeIndex, CpuSet], ...]  # CPUs of every NUMA node
    distances: tuple[tuple[NodeIndex, tuple[int, ...]], ...]
    gpu_memory: tuple[NodeIndex, ...]
    gpus: tuple[AllocatedGpu, ...]  # every GPU of the node, by the driver's number
    owned: CpuSet  # numbers of the job's GPUs, as Slurm counts
    tasks: tuple[TaskRecord, ...]
    # (the driver's number, how many) of each GPU that is cut into MIG slices
    slices: tuple[tuple[int, int], ...] = ()
    restart: int = 0  # how often it was started again


def parse_record(text: str, source: str) -> JobRecord:
    """Return the record of a text. Raises ParseError that names the line."""
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
            hint="hooks of a newer homenode wrote it: update this homenode",
        )
    fields: dict[str, str] = {}
    lists: dict[str, list[Any]] = {name: [] for name in _LISTS.values()}
    for number, line in enumerate(lines[1:], start=2):
        words = line.split()
        if words:
            _read(fields, lists, words, source, number)
    for key in ("job", "node"):
        if key not in fields:
            raise ParseError(source, f"a line {key!r}", line=len(lines))
    restart = fields.get("restart", "")
    return JobRecord(
        job=fields["job"],
        node=fields["node"],
        name=fields.get("name", ""),
        user=fields.get("user"),
        owned=CpuSet.parse(fields.get("held", ""), source),
        restart=int(restart) if _is_number(restart) else 0,
        **{name: tuple(values) for name, values in lists.items()},
    )


_SINGLE = frozenset({"job", "node", "user", "start", "end", "held", "name", "restart"})
_LISTS = {
    "numa": "pus_of_node",
    "distances": "distances",
    "gpumemory": "gpu_memory",
    "gpu": "gpus",
    "slices": "slices",
    "task": "tasks",
}
"""Lines of which a record has several, and the field of each."""


def parse_task(values: Sequence[str], source: str, line: int) -> TaskRecord:
    """Make a task from the values of a line. Raises ParseError that names the line."""
    if len(values) != 4:
        raise ParseError(source, "task STEP.RANK CPUS NODES POLICY", " ".join(values), line=line)
    try:
        pus, nodes = CpuSet.parse(values[1]), CpuSet.parse(values[2])
    except ParseError as error:
        raise ParseError(source, error.expected, error.found, line=line) from None
    return TaskRecord(values[0], pus, nodes, None if values[3] == "-" else values[3])


def _read(
    fields: dict[str, str], lists: dict[str, list[Any]], words: list[str], source: str, line: int
) -> None:
    key, *values = words
    try:
        if key in _SINGLE:
            fields[key] = " ".join(values)
        elif key in _LISTS:
            lists[_LISTS[key]].append(_parse_values(key, values, source, line))
        else:
            raise ParseError(source, "a line of a record", " ".join(words), line=line)
    except ParseError as error:
        if error.line is not None:
            raise
        raise ParseError(source, error.expected, error.found, line=line) from None


def _parse_values(key: str, values: list[str], source: str, line: int) -> Any:
    """Parse the values of a line. Raises ParseError."""
    match key, values:
        case "numa", [node, *pus] if len(pus) < 2:
            return _parse_node(node), CpuSet.parse("".join(pus))
        case "distances", [node, first, *rest]:
            return _parse_node(node), tuple(_parse_number(value) for value in (first, *rest))
        case "gpumemory", [node]:
            return _parse_node(node)
        case "gpu", [number, address, node]:
            at = None if node == "-1" else _parse_node(node)
            return AllocatedGpu(_parse_number(number), Bdf.parse(address), at)
        case "slices", [number, count]:
            return _parse_number(number), min(_parse_number(count), MAX_SLICES)
        case "task", _:
            return parse_task(values, source, line)
    raise ParseError(source, "a line of a record", " ".join((key, *values)), line=line)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


def _parse_node(text: str) -> NodeIndex:
    return NodeIndex(_parse_number(text))


def _parse_number(text: str) -> int:
    if not _is_number(text) or len(text) > 5:
        raise ParseError("", "a number of up to 5 digits", text)
    return int(text)


_RENDER = 128
_BINDS = re.compile(r"bind(?:[=:][a-z|]+)?:([0-9,-]+)\Z")


def build_recorded_allocation(
    record: JobRecord, numbers: Sequence[int] | None = None
) -> JobAllocation:
    """Return the job's allocation; `unknown` has the reason for missing values. numbers: the
    driver's number at each position, in the order of gres.conf (gres.py); () = unknown."""
    allocation = JobAllocation(
        job=record.job,
        node=record.node,
        name=record.name,
        user=record.user,
        pus=CpuSet.union(task.pus for task in record.tasks) if record.tasks else None,
        tree=_build_tree(record),
        restart=record.restart,
    )
    if numbers == () and record.owned:
        unknown, fix = SEVERAL_TYPES
        return replace(allocation, unknown=unknown, fix=fix)
    candidates = [_match_gpus(record, order) for order in _list_orders(record, numbers)]
    gpus = candidates[0]
    if gpus is None:
        return replace(
            allocation,
            unknown=f"the record has no address of GPU {max(record.owned)}",
            fix="--gres gres.conf, if its lines name the GPUs' files",
        )
    if any(other is None or _list_nodes(other) != _list_nodes(gpus) for other in candidates[1:]):
        return replace(
            allocation,
            unknown="the driver's order of GPUs is not that of their addresses, or some are cut "
            "into slices: which of them Slurm means depends on gres.conf",
            fix="--gres gres.conf, if its lines name the GPUs' files",
        )
    if record.owned and not record.tasks:
        return replace(
            allocation,
            unknown="no task of it was recorded: no TaskProlog, or none had started",
            fix="set TaskProlog=, as in the README of the hooks",
        )
    return add_tasks(replace(allocation, gpus=gpus), record.tasks)


def add_tasks(allocation: JobAllocation, tasks: Sequence[TaskRecord]) -> JobAllocation:
    """Return the allocation with the memory of its tasks; unchanged without tasks."""
    if not tasks or allocation.unknown is not None:
        return allocation
    return replace(
        allocation,
        memory_nodes=_list_indices(task.memory_nodes for task in tasks),
        bound_nodes=_bound_nodes(tasks),
    )


def _list_orders(
    record: JobRecord, numbers: Sequence[int] | None
) -> Iterator[list[AllocatedGpu | None]]:
    """Yield the possible orders of Slurm's list, the likeliest first: the GPU at each position."""
    by_number = {gpu.index: _set_home_node(record, gpu) for gpu in record.gpus}
    if numbers is not None:
        yield [by_number.get(number) for number in numbers]
        return
    slices = dict(record.slices)
    gpus = [by_number[gpu.index] for gpu in sorted(record.gpus, key=lambda gpu: str(gpu.bdf))]
    yield [gpu for gpu in gpus for _ in range(slices.get(gpu.index or 0, 1))]
    if slices:
        whole_gpus: list[AllocatedGpu | None] = [g for g in gpus if (g.index or 0) not in slices]
        cut = [g for g in gpus for _ in range(slices.get(g.index or 0, 0))]
        yield [*whole_gpus, *cut]
        yield [*cut, *whole_gpus]
    else:
        last = max((gpu.index or 0 for gpu in record.gpus), default=-1)
        yield [by_number.get(number) for number in range(last + 1)]


def _match_gpus(
    record: JobRecord, order: Sequence[AllocatedGpu | None]
) -> tuple[AllocatedGpu, ...] | None:
    """Return the job's GPUs in an order, each once; None if a position is missing."""
    # Older versions called AMD's by the number of /dev/dri/renderD128 and on.
    places = [n - _RENDER if n >= max(len(order), _RENDER) else n for n in record.owned]
    placed_gpus = [order[place] if place < len(order) else None for place in places]
    gpus = tuple(dict.fromkeys(gpu for gpu in placed_gpus if gpu is not None))
    return gpus if None not in placed_gpus else None


def _set_home_node(record: JobRecord, gpu: AllocatedGpu) -> AllocatedGpu:
    """The GPU with its node with CPUs: the only one, or the nearest to its memory (GH200)."""
    with_cpus = [node for node, pus in record.pus_of_node if pus]
    if gpu.node in with_cpus:
        return gpu
    if len(with_cpus) == 1:
        return replace(gpu, node=with_cpus[0])
    distances = _find_distances(record)
    nodes = sorted(
        (distances.get((gpu.node, n), 255), n) for n in with_cpus if gpu.node is not None
    )
    if not nodes or nodes[0][0] == 255 or (len(nodes) > 1 and nodes[0][0] == nodes[1][0]):
        return replace(gpu, node=None)
    return replace(gpu, node=nodes[0][1])


def _list_nodes(gpus: Iterable[AllocatedGpu]) -> list[int]:
    return sorted(-1 if gpu.node is None else gpu.node for gpu in gpus)


def _find_distances(record: JobRecord) -> dict[tuple[NodeIndex | None, NodeIndex], int]:
    nodes = [node for node, _ in record.pus_of_node]
    return {
        (a, b): distance
        for a, row in record.distances
        for b, distance in zip(nodes, row, strict=False)
    }


def _build_tree(record: JobRecord) -> NodeTree:
    nodes = [node for node, _ in record.pus_of_node]
    gpus = [_set_home_node(record, gpu) for gpu in record.gpus]
    return NodeTree(
        pus_of_node=dict(record.pus_of_node),
        gpus_of_node={node: sum(gpu.node == node for gpu in gpus) for node in nodes},
        gpu_memory=frozenset(record.gpu_memory),
        distances={(a, b): d for (a, b), d in _find_distances(record).items() if a is not None},
    )


def _bound_nodes(tasks: Sequence[TaskRecord]) -> frozenset[NodeIndex] | None:
    """Return the nodes to which memory policies bind, if they bind every task."""
    matches = [_BINDS.match(task.policy) if task.policy else None for task in tasks]
    if not matches or None in matches:
        return None
    try:
        return _list_indices(CpuSet.parse(match[1]) for match in matches if match is not None)
    except ParseError:  # the user's own line
        return None


def _list_indices(sets: Iterable[CpuSet]) -> frozenset[NodeIndex]:
    return frozenset(NodeIndex(i) for i in CpuSet.union(sets))


MAX_PROCESSES = 256
"""Limit of processes that are recorded of a job on a node."""

_SCRIPT = f"""\
scontrol listpids "$SLURM_JOB_ID" "$SLURMD_NODENAME" | head -n {MAX_PROCESSES} |
while read -r pid _ step _; do
  case $pid in *[!0-9]*) continue ;; esac
  [ "$step" != "$SLURM_STEP_ID" ] && [ "$step" != extern ] || continue
  pus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$pid/status") || continue
  nodes=$(sed -n 's/^Mems_allowed_list:[[:space:]]*//p' "/proc/$pid/status") || continue
  read -r _ policy _ <"/proc/$pid/numa_maps"
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status") || continue
  echo "task $step.$pid $pus $nodes ${{policy:--}} $parent"
  policy=
done 2>/dev/null
"""


def look_command(job: str, node: str) -> tuple[str, ...]:
    """Return the command for a job, by its number, on one of its nodes."""
    return (
        "srun",
        "--overlap",
        f"--jobid={job}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        "--quiet",
        "sh",
        "-c",
        _SCRIPT,
    )


def parse_look(text: str, source: str) -> tuple[TaskRecord, ...]:
    """Return the processes of an answer that started no other process: shells and numactl
    themselves do not matter. Raises ParseError for any other line."""
    tasks = []
    parents = set()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if words[0] != "task" or len(words) != 6:
            raise ParseError(source, "lines about tasks", line, line=number)
        tasks.append(parse_task(words[1:5], source, number))
        parents.add(words[5])
    return tuple(task for task in tasks if task.task.rpartition(".")[2] not in parents)


_SCRIPTS = ("prolog.sh", "task_prolog.sh", "epilog.sh", "README")


def _read_script(name: str) -> str:
    return read_package_text("cluster", "slurm", "scripts", name)


def render_hooks(spool: str = SPOOL, directory: str = "/etc/slurm/homenode") -> dict[str, str]:
    """Return the scripts and the README by file name. spool: directory on each node for the
    records. directory: of the scripts. Raises UsageError for a path that a shell would misread."""
    for path in (spool, directory):
        plain = path.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
        if not path.startswith("/") or not (plain.isascii() and plain.isalnum()):
            raise UsageError(
                f"{path}: expected an absolute path of letters, digits, '.', '-' and '_'"
            )
    hooks = {}
    for name in _SCRIPTS:
        text = _read_script(name).replace("@ROOT@\n", _read_script("root.sh"))
        hooks[name] = text.replace("@SPOOL@", spool).replace("@DIRECTORY@", directory)
    return hooks
