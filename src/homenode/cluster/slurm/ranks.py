"""Ranks: which GPUs, cores and node each task of a node gets.

Cores are the planner's, as for a VM with the rank's GPUs and as many vCPUs as it has cores: whole
cores of the GPU's node, the nearest ones first, no core twice.

In srun's and sbatch's words masks are of the kernel's PU numbers, lists of memory the kernel's
nodes: task/affinity translates the masks that it makes itself from abstract ids, and takes a user's
as they are. So LUMI's documentation binds MI250X (0xfe000000000000 is cores 49 to 55, of node 3).
Older versions take masks only in a job that has the whole node; newer ones refuse those that leave
the job's CPUs.
Source: srun(1), --cpu-bind, --mem-bind, --gpu-bind, --gpus-per-task; Slurm's
src/plugins/task/affinity/dist_tasks.c, lllp_distribution.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.cluster.slurm.numbering import (
    bindable_node,
    gpus_in_order,
    home_node,
    nodes_of,
    nodes_with_cpus,
)
from homenode.cluster.slurm.options import MemoryBind
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.findings import Finding
from homenode.indices import NodeIndex
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host, HostReserve
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Concession
from homenode.plan.search.place import place
from homenode.vm.layout import PRESETS
from homenode.vm.model import Vm
from homenode.vm.plan_model import Rejection, Unplannable
from homenode.vm.plan_options import EmulatorPolicy, PlanOptions
from homenode.wording import number_list, plural

_MEMORY_BYTES = 1 << 20
"""Asked of the planner for each rank: how much a program will use is not known, and any node that
has some will do."""


class RankGpu(Struct, frozen=True):
    """index: the driver's number, by address. node: with CPUs; None where the host gives none."""

    index: int
    bdf: Bdf
    node: NodeIndex | None


class RankPlace(Struct, frozen=True):
    """A task by its number on the node. cores: how many. pus: its mask. nodes: of its memory.

    naive: nodes that "GPU i belongs to node i / (GPUs per node)" would give; None = as it is.
    """

    rank: int
    gpus: tuple[RankGpu, ...]
    cores: int
    pus: CpuSet
    nodes: tuple[NodeIndex, ...]
    naive: tuple[NodeIndex, ...] | None


class RankBinding(Struct, frozen=True):
    """All tasks of a node. gpus_on_node: all that it has, so that Slurm's numbers are theirs."""

    ranks: tuple[RankPlace, ...]
    gpus_on_node: int
    findings: tuple[Finding, ...]


class RankOptions(Struct, frozen=True):
    """gpus: the driver's numbers; None = all. cores: of each task; None = as many as all can have.

    siblings: also the other threads of its cores. node: where all of them are to be bound, rather
    than at their GPUs.
    """

    tasks: int
    gpus: tuple[int, ...] | None = None
    cores: int | None = None
    siblings: bool = False
    node: NodeIndex | None = None


def bind_ranks(host: Host, wanted: RankOptions) -> RankBinding:
    """Where each task goes.

    Raises UsageError for tasks and GPUs that do not share out evenly, for GPUs and nodes that the
    host has not, and for a node that is memory only; Unplannable where the cores do not suffice.
    """
    if wanted.tasks < 1:
        raise UsageError(f"--tasks: expected at least 1, found {wanted.tasks}")
    if wanted.cores is not None and wanted.cores < 1:
        raise UsageError(f"--cores: expected at least 1, found {wanted.cores}")
    devices = gpus_in_order(host)
    gpus = _chosen(host, devices, wanted.gpus)
    if wanted.node is not None:
        bindable_node(host, wanted.node, "--node")
    shares = _shares(gpus, wanted.tasks)
    homes = [_homes(share, wanted.node) for share in shares]
    cores = wanted.cores or _cores_each(host, homes)
    naive = naive_nodes(host)
    ranks = []
    used = CpuSet()
    for rank, (share, home) in enumerate(zip(shares, homes, strict=True)):
        pus = _placed(host, rank, share, home, cores, used)
        whole = CpuSet.union(core.pus for core in host.cores if not core.pus.isdisjoint(pus))
        used = used | whole
        guess = tuple(sorted({naive[gpu.index] for gpu in share if gpu.index in naive}))
        ranks.append(
            RankPlace(
                rank,
                share,
                cores,
                whole if wanted.siblings else pus,
                home or nodes_of(host, pus),
                None if guess == home or not guess else guess,
            )
        )
    return RankBinding(tuple(ranks), len(devices), tuple(_findings(host, gpus, naive)))


def naive_nodes(host: Host) -> dict[int, NodeIndex]:
    """The node of each GPU for whoever counts them off: the first GPUs on the first node.

    Empty where the GPUs do not divide by the nodes with CPUs.
    """
    nodes = nodes_with_cpus(host)
    count = len(gpus_in_order(host))
    if not nodes or count % len(nodes):
        return {}
    return {gpu: nodes[gpu * len(nodes) // count].index for gpu in range(count)}


def _chosen(
    host: Host, devices: Sequence[PciDevice], wanted: tuple[int, ...] | None
) -> tuple[RankGpu, ...]:
    every = tuple(
        RankGpu(index, gpu.bdf, home_node(host, gpu)) for index, gpu in enumerate(devices)
    )
    if not every:
        raise UsageError(f"{host.name}: expected a host with GPUs, found none")
    for index in wanted or ():
        if index >= len(every):
            raise UsageError(
                f"--gpus: expected GPUs 0-{len(every) - 1} of {host.name}, found {index}"
            )
    return every if wanted is None else tuple(every[index] for index in dict.fromkeys(wanted))


def _shares(gpus: Sequence[RankGpu], tasks: int) -> list[tuple[RankGpu, ...]]:
    """The GPUs of each task: one after the other, or several of one node, or one of several."""
    count = len(gpus)
    if count % tasks and tasks % count:
        fitting = [n for n in range(1, 4 * count) if not (count % n and n % count)]
        near = sorted(sorted(fitting, key=lambda n: abs(n - tasks))[:2])
        raise UsageError(
            f"--tasks {tasks}: expected a number that shares {plural(count, 'GPU')} out evenly",
            hint=f"take {' or '.join(map(str, near))}, or name GPUs with --gpus",
        )
    if tasks >= count:
        return [(gpus[rank // (tasks // count)],) for rank in range(tasks)]
    each = count // tasks
    # GPUs of one node together, the nodes in the order of their first GPU.
    first: dict[NodeIndex | None, int] = {}
    for gpu in gpus:
        first.setdefault(gpu.node, gpu.index)
    grouped = sorted(gpus, key=lambda gpu: (first[gpu.node], gpu.index))
    return [tuple(grouped[each * rank : each * (rank + 1)]) for rank in range(tasks)]


def _homes(share: Sequence[RankGpu], node: NodeIndex | None) -> tuple[NodeIndex, ...]:
    if node is not None:
        return (node,)
    return tuple(sorted({gpu.node for gpu in share if gpu.node is not None}))


def _cores_each(host: Host, homes: Sequence[tuple[NodeIndex, ...]]) -> int:
    """The most cores that every task can have on its own nodes; all share all where unknown."""
    usable = CpuSet(pu.index for pu in host.pus if pu.online and pu.allowed)
    cores = [core.pus for core in host.cores if not core.pus.isdisjoint(usable)]
    counts = []
    for home in set(homes):
        sharing = sum(bool(set(other) & set(home)) or not other for other in homes)
        pus = CpuSet.union(n.pus for n in host.nodes if not home or n.index in home)
        own = sum(not core.isdisjoint(pus) for core in cores)
        counts.append(own // (sharing if home else len(homes)))
    return max(1, min(counts))


def _placed(
    host: Host,
    rank: int,
    share: Sequence[RankGpu],
    home: tuple[NodeIndex, ...],
    cores: int,
    used: CpuSet,
) -> CpuSet:
    """A PU on each of the rank's cores, as the planner places a VM with its GPUs."""
    every = CpuSet(pu.index for pu in host.pus)
    away = CpuSet()
    if home:
        away = every - CpuSet.union(n.pus for n in host.nodes if n.index in home)
    near = [gpu.local_pus for gpu in gpus_in_order(host) if gpu.bdf in {g.bdf for g in share}]
    local = CpuSet.union(near)
    # MI250X: of a node's two LLCs one is nearer to each GPU, and the firmware shows which.
    tries = [every - local] if local and not local.isdisjoint(every - away) else []
    for reserved in (*tries, away):
        free = [c for c in host.cores if c.pus.isdisjoint(reserved | used)]
        if reserved is not away and len(free) < cores:
            continue
        guest = _guest(host, rank, cores)
        request = GuestRequest(
            guest=guest,
            layout=PRESETS["pin-numa"],
            options=PlanOptions(
                "pin-numa",
                reserved_pus=reserved | used,
                emulator_policy=EmulatorPolicy.NONE,
                unequal_cells=True,
                mixed_kinds=True,
            ),
            devices=tuple(gpu.bdf for gpu in share),
            host_reserve=HostReserve(cores=0, memory_bytes=0),
        )
        try:
            placement = place(host, request)
        except Unplannable as error:
            raise _no_cores(rank, cores, error.message, error.rejections) from None
        if Concession.SHARED_CORES in placement.concessions:
            # Siblings share a core; a rank was asked to have each of its cores alone.
            raise _no_cores(rank, cores, "not as many cores are free", placement.rejections)
        return CpuSet.union(placement.vcpu_pins)
    raise AssertionError("the last try always places or raises")


def _no_cores(rank: int, cores: int, reason: str, rejections: tuple[Rejection, ...]) -> Unplannable:
    return Unplannable(
        f"rank {rank}, {plural(cores, 'core')}: {reason}",
        rejections,
        hint="lower --cores or --tasks",
    )


def _guest(host: Host, rank: int, cores: int) -> Vm:
    """A task as the planner knows guests."""
    return Vm(
        name=f"rank {rank}",
        domain_type="qemu",
        architecture=host.architecture or "x86_64",
        vcpus=cores,
        memory_bytes=_MEMORY_BYTES,
    )


def _findings(
    host: Host, gpus: Sequence[RankGpu], naive: dict[int, NodeIndex]
) -> Iterator[Finding]:
    blind = [gpu for gpu in gpus if gpu.node is None]
    if blind:
        yield finding(
            "bind-node-unknown",
            f"GPU {number_list(gpu.index for gpu in blind)} of {host.name}",
            expected="a GPU whose node is known",
            observed="the host gives no node",
            source=host.name,
        )
    off = [g for g in gpus if g.node is not None and naive.get(g.index, g.node) != g.node]
    if off:
        each = len(gpus_in_order(host)) // len(nodes_with_cpus(host))
        divided = f"/{each}" if each > 1 else ""
        yield finding(
            "gpu-order-naive",
            f"GPUs of {host.name}",
            expected=", ".join(f"GPU {gpu.index} on node {gpu.node}" for gpu in off),
            observed=f'"GPU i belongs to node i{divided}" gives '
            + ", ".join(f"GPU {gpu.index} on node {naive[gpu.index]}" for gpu in off),
            source=host.name,
        )


def srun_flags(
    binding: RankBinding, memory: MemoryBind, places: Mapping[int, int] | None = None
) -> tuple[str, ...]:
    """What srun needs, one option each. The job has its nodes to itself.

    places: Slurm's number of each GPU, as gres.conf lists them; None = by address as well.
    """
    ranks = binding.ranks
    # No --cpus-per-task: it implies --exact, and masks hold only in a step with every CPU.
    flags = [
        f"--ntasks-per-node={len(ranks)}",
        f"--cpu-bind=mask_cpu:{','.join(f'0x{rank.pus.bits:x}' for rank in ranks)}",
    ]
    if memory is not MemoryBind.NONE:
        flags.append(f"--mem-bind={_memory(binding, memory)}")
    each = len(ranks[0].gpus)
    if len(ranks) * each == binding.gpus_on_node:
        flags.append(f"--gpus-per-task={each}")
    else:
        flags.append(f"--gpus-per-node={binding.gpus_on_node}")
    shares = [[gpu.index for gpu in rank.gpus] for rank in ranks]
    if places is not None:
        shares = [[places[index] for index in share] for share in shares]
    flags.append(f"--gpu-bind={_gpus(shares)}")
    return tuple(flags)


def sbatch_lines(binding: RankBinding) -> tuple[str, ...]:
    """The head of a batch script that asks for what the flags need."""
    return (
        "#SBATCH --exclusive",
        f"#SBATCH --ntasks-per-node={len(binding.ranks)}",
        f"#SBATCH --gpus-per-node={binding.gpus_on_node}",
    )


def _memory(binding: RankBinding, memory: MemoryBind) -> str:
    several = any(len(rank.nodes) != 1 for rank in binding.ranks)
    if several:
        masks = (f"0x{sum(1 << node for node in rank.nodes):x}" for rank in binding.ranks)
        value = f"mask_mem:{','.join(masks)}"
    else:
        value = f"map_mem:{','.join(str(rank.nodes[0]) for rank in binding.ranks)}"
    return f"prefer,{value}" if memory is MemoryBind.PREFERRED else value


def _gpus(shares: Sequence[Sequence[int]]) -> str:
    if all(len(share) == 1 for share in shares):
        return f"map_gpu:{','.join(str(share[0]) for share in shares)}"
    masks = (f"0x{sum(1 << index for index in share):x}" for share in shares)
    return f"mask_gpu:{','.join(masks)}"
