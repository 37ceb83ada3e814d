"""RecordHeld: what a job's record says that it had, as the audit judges it.

Of GPUs Slurm gives the Prolog places in its own list of the node's devices (SLURM_JOB_GPUS): by PCI
address where AutoDetect found them, a place for each MIG slice; else as gres.conf lists them.
Source: Slurm's gres_common_prep_set_env; gres.conf(5), AutoDetect.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.slurm.job_allocation import AllocatedGpu, JobAllocation, NodeTree
from homenode.slurm.record import JobRecord, TaskRecord

_RENDER = 128
_BINDS = re.compile(r"bind(?:[=:][a-z|]+)?:([0-9,-]+)\Z")


def recorded_allocation(record: JobRecord, numbers: Sequence[int] | None = None) -> JobAllocation:
    """What the job had; `unknown` says so where the record does not say.

    numbers: the driver's number at each place, as gres.conf lists them (device_order.py).
    """
    owned = JobAllocation(
        job=record.job,
        node=record.node,
        name=record.name,
        user=record.user,
        pus=CpuSet.union(task.pus for task in record.tasks) if record.tasks else None,
        gpus=(),
        tree=_tree(record),
        restart=record.restart,
    )
    found = [_at(record, order) for order in _orders(record, numbers)]
    gpus = found[0]
    if gpus is None:
        return replace(
            owned,
            unknown=f"the record gives no address of GPU {max(record.owned)}",
            remedy="--gres gres.conf, where its lines name the GPUs' files",
        )
    if any(other is None or _nodes(other) != _nodes(gpus) for other in found[1:]):
        return replace(
            owned,
            unknown="the driver's order of GPUs is not that of their addresses, or some are cut "
            "into slices: which of them Slurm means depends on gres.conf",
            remedy="--gres gres.conf, where its lines name the GPUs' files",
        )
    if record.owned and not record.tasks:
        return replace(
            owned,
            unknown="no task of it was recorded: no TaskProlog, or none had started",
            remedy="set TaskProlog=, as the hooks' README says",
        )
    return with_tasks(replace(owned, gpus=gpus), record.tasks)


def with_tasks(owned: JobAllocation, tasks: Sequence[TaskRecord]) -> JobAllocation:
    """The same with what its tasks say of memory; as it is without any."""
    if not tasks or owned.unknown is not None:
        return owned
    return replace(
        owned,
        memory_nodes=_indices(task.memory_nodes for task in tasks),
        bound_nodes=_bound(tasks),
    )


def _orders(
    record: JobRecord, numbers: Sequence[int] | None
) -> Iterator[list[AllocatedGpu | None]]:
    """What Slurm's list may be, the likeliest first: the GPU at each place."""
    by_number = {gpu.index: _at_home(record, gpu) for gpu in record.gpus}
    if numbers is not None:
        yield [by_number.get(number) for number in numbers]
        return
    slices = dict(record.slices)
    ordered = [by_number[gpu.index] for gpu in sorted(record.gpus, key=lambda gpu: str(gpu.bdf))]
    yield [gpu for gpu in ordered for _ in range(slices.get(gpu.index or 0, 1))]
    if slices:
        whole: list[AllocatedGpu | None] = [g for g in ordered if (g.index or 0) not in slices]
        cut = [g for g in ordered for _ in range(slices.get(g.index or 0, 0))]
        yield [*whole, *cut]
    else:
        last = max((gpu.index or 0 for gpu in record.gpus), default=-1)
        yield [by_number.get(number) for number in range(last + 1)]


def _at(record: JobRecord, order: Sequence[AllocatedGpu | None]) -> tuple[AllocatedGpu, ...] | None:
    """The job's GPUs in an order, each once; None where one has no place in it."""
    # Older versions called AMD's by the number of /dev/dri/renderD128 and on.
    places = [n - _RENDER if n >= max(len(order), _RENDER) else n for n in record.owned]
    found = [order[place] if place < len(order) else None for place in places]
    gpus = tuple(dict.fromkeys(gpu for gpu in found if gpu is not None))
    return gpus if None not in found else None


def _at_home(record: JobRecord, gpu: AllocatedGpu) -> AllocatedGpu:
    """With the node that has CPUs: the only one, or the nearest to memory of its own (GH200)."""
    with_cpus = [node for node, pus in record.pus_of_node if pus]
    if gpu.node in with_cpus:
        return gpu
    if len(with_cpus) == 1:
        return replace(gpu, node=with_cpus[0])
    distances = _distances(record)
    ranked = sorted(
        (distances.get((gpu.node, n), 255), n) for n in with_cpus if gpu.node is not None
    )
    if not ranked or ranked[0][0] == 255 or (len(ranked) > 1 and ranked[0][0] == ranked[1][0]):
        return replace(gpu, node=None)
    return replace(gpu, node=ranked[0][1])


def _nodes(gpus: Iterable[AllocatedGpu]) -> list[int]:
    return sorted(-1 if gpu.node is None else gpu.node for gpu in gpus)


def _distances(record: JobRecord) -> dict[tuple[NodeIndex | None, NodeIndex], int]:
    nodes = [node for node, _ in record.pus_of_node]
    return {
        (a, b): distance
        for a, row in record.distances
        for b, distance in zip(nodes, row, strict=False)
    }


def _tree(record: JobRecord) -> NodeTree:
    nodes = [node for node, _ in record.pus_of_node]
    gpus = [_at_home(record, gpu) for gpu in record.gpus]
    return NodeTree(
        pus_of_node=dict(record.pus_of_node),
        gpus_of_node={node: sum(gpu.node == node for gpu in gpus) for node in nodes},
        gpu_memory=frozenset(record.gpu_memory),
        distances={(a, b): d for (a, b), d in _distances(record).items() if a is not None},
    )


def _bound(tasks: Sequence[TaskRecord]) -> frozenset[NodeIndex] | None:
    """The nodes to which policies bind, where they bind every task."""
    found = [_BINDS.match(task.policy) if task.policy else None for task in tasks]
    if not found or None in found:
        return None
    try:
        return _indices(CpuSet.parse(match[1]) for match in found if match is not None)
    except ParseError:  # the user's own line
        return None


def _indices(sets: Iterable[CpuSet]) -> frozenset[NodeIndex]:
    return frozenset(NodeIndex(i) for i in CpuSet.union(sets))
