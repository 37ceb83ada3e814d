"""JobAllocation: a job's CPUs, GPU nodes and memory on a node, in the machine's own numbers.

Made from Slurm's data and a host (here), or from a job's own record (record.py).

Slurm counts sockets, then cores, then threads: id = (socket x cores + core) x threads + thread,
independent of the kernel's numbers, in hwloc's logical order. On GH200 a GPU has several nodes: one
with CPUs, and memory-only ones for itself and its MIG instances; programs are bound to the first.
Source: numactl issue 224; scontrol(1), CPU_IDs; gres.conf(5), Cores (the core number of lstopo -l).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.slurm.gres import DeviceOrder
from homenode.cluster.slurm.scontrol import Job, NodeShare
from homenode.cluster.slurm.slurm_nodes import NodeShape
from homenode.cpuset import CpuSet, NodeIndex
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host, MemoryKind, NumaNode
from homenode.text import format_nodes, plural


def list_cpu_nodes(host: Host) -> tuple[NumaNode, ...]:
    return tuple(node for node in host.nodes if node.pus)


def home_node(host: Host, gpu: PciDevice) -> NodeIndex | None:
    """Return the node with CPUs of a GPU, else that of its local CPUs; None if neither is known."""
    nodes = {node.index: node for node in list_cpu_nodes(host)}
    if gpu.node in nodes:
        return gpu.node
    if len(nodes) == 1:
        return next(iter(nodes))
    local_pus = gpu.local_pus or CpuSet()
    candidates = [index for index, node in nodes.items() if not node.pus.isdisjoint(local_pus)]
    return candidates[0] if len(candidates) == 1 else None


def find_gpu_memory_nodes(host: Host) -> dict[NodeIndex, Bdf | None]:
    """Return nodes of GPU memory with their GPU; None if the driver does not report the GPU. A node
    without CPUs but with an initiator other than a CPU counts too."""
    return {
        node.index: node.gpu
        for node in host.nodes
        if not node.pus and (node.memory_kind is MemoryKind.GPU or node.generic_initiator)
    }


def list_bindable_nodes(host: Host) -> tuple[NumaNode, ...]:
    """Return the nodes with CPUs and memory."""
    return tuple(node for node in list_cpu_nodes(host) if node.memory_bytes != 0)


_MODEL = re.compile(r"(?<![a-z0-9])(?:[abhlpv]|g[bh]|[gr]tx|mi)[0-9]{2,4}[a-z]?(?![a-z0-9])")


def is_other_model(kind: str, host: Host) -> bool:
    """Return whether a type, in lower case, names a model that none of the host's GPUs is."""
    names = [(gpu.name or "").lower() for gpu in host.whole_gpus]
    models = _MODEL.findall(kind)
    is_named = bool(models) and any(map(_MODEL.search, names))
    return is_named and not any(
        model in name.replace(" ", "") for model in models for name in names
    )


_MANY = 1 << 32


class CoreOrder(Struct, frozen=True):
    """A host's cores in Slurm's numbers."""

    pus: tuple[CpuSet, ...]  # CPUs of each core, by its number

    @property
    def threads(self) -> int:
        return max((len(core) for core in self.pus), default=1)

    def numbers(self, pus: CpuSet) -> CpuSet:
        """Return the numbers of the cores that have any of these CPUs."""
        return CpuSet(n for n, core in enumerate(self.pus) if not core.isdisjoint(pus))

    def pus_of_cores(self, numbers: Iterable[int]) -> CpuSet:
        """Return all CPUs of these cores. Raises IndexError for an unknown number."""
        return CpuSet.union(self.pus[number] for number in numbers)

    def pus_of_ids(self, ids: CpuSet, ids_per_core: int) -> CpuSet:
        """The kernel's CPUs of Slurm's abstract CPU ids. Raises IndexError for an unknown id.

        With one id per core (ThreadsPerCore=1) an id is the whole core. A core with fewer threads
        than the others has ids without a CPU.
        """
        if ids_per_core == 1:
            return self.pus_of_cores(ids)
        bits = 0
        for number in ids:
            threads = tuple(self.pus[number // ids_per_core])
            if number % ids_per_core < len(threads):
                bits |= 1 << threads[number % ids_per_core]
        return CpuSet.from_bits(bits)

    def fits(self, shape: NodeShape) -> bool:
        """Return whether the shape has the same numbers of cores and threads as the host."""
        return shape.cores == len(self.pus) and shape.threads_per_core in (1, self.threads)


def build_core_order(host: Host) -> CoreOrder:
    """The cores in Slurm's order. Offline CPUs have no place in it: slurmd does not count them.

    >>> from homenode.vm.sources import load_host
    >>> build_core_order(load_host("x86-2p2n8c16t-pus-interleaved")).pus[1]
    CpuSet('2,10')
    """
    by_index = {pu.index: pu for pu in host.pus}
    lowest: dict[tuple[str, object], int] = {}
    places = []
    for core in host.cores:
        first = by_index[next(iter(core.pus))]
        levels = (("package", first.package), ("node", first.node), ("llc", first.llc))
        for level in levels:
            lowest[level] = min(lowest.get(level, _MANY), first.index)
        places.append((levels, first.index, core.pus))
    places.sort(key=lambda place: (*(lowest[level] for level in place[0]), place[1]))
    return CoreOrder(tuple(pus for _, _, pus in places))


class AllocatedGpu(Struct, frozen=True):
    index: int | None  # Slurm's number on the node
    bdf: Bdf | None
    node: NodeIndex | None  # with CPUs; None if unknown

    def __str__(self) -> str:
        number = "GPU" if self.index is None else f"gpu{self.index}"
        return number if self.bdf is None else f"{number} ({self.bdf})"


class NodeTree(Struct, frozen=True):
    """The part of a machine that an audit needs."""

    pus_of_node: Mapping[NodeIndex, CpuSet]  # CPUs of every node; empty for memory-only nodes
    gpus_of_node: Mapping[NodeIndex, int] | None  # how many GPUs are on each; None if not known
    gpu_memory: frozenset[NodeIndex]  # nodes that are a GPU's memory
    # (from, to) -> SLIT; empty if not given
    distances: Mapping[tuple[NodeIndex, NodeIndex], int]
    package_of_node: Mapping[NodeIndex, int | None] = {}
    # True if "nodes" are the sets of Cores= of gres.conf, and CPUs Slurm's core numbers
    is_of_gres: bool = False

    def names(self, nodes: Sequence[NodeIndex]) -> str:
        """Return the nodes as text; with gres.conf, their cores."""
        if self.is_of_gres:
            return f"cores {CpuSet.union(self.pus_of_node[node] for node in nodes)}"
        return format_nodes(nodes) if nodes else "no node"

    def find_nodes(self, pus: CpuSet) -> tuple[NodeIndex, ...]:
        return tuple(n for n, node_pus in self.pus_of_node.items() if not node_pus.isdisjoint(pus))


class JobAllocation(Struct, frozen=True, kw_only=True):
    """A job's resources on one node. subject: its name in a finding."""

    job: str  # its id
    node: str
    name: str = ""
    user: str | None = None
    pus: CpuSet | None = None
    gpus: tuple[AllocatedGpu, ...] = ()
    tree: NodeTree | None = None
    # mems_allowed of its tasks; None if not recorded
    memory_nodes: frozenset[NodeIndex] | None = None
    # to which a memory policy binds every task; None if none does or none was recorded
    bound_nodes: frozenset[NodeIndex] | None = None
    unknown: str | None = None  # reason why the allocation is unknown; None if it is known
    fix: str | None = None  # fix for an unknown allocation; None = name the node's machine
    restart: int = 0  # how often Slurm had started it again by then

    @property
    def subject(self) -> str:
        restart = f", restart {self.restart}," if self.restart else ""
        return f"job {self.job} ({self.name or 'no name'}){restart} on {self.node}"


SEVERAL_TYPES = (
    "GPUs of several types, which Slurm numbers in the order of Gres= in slurm.conf",
    "`srun --overlap --jobid=ID nvidia-smi -L` shows them",
)
"""Reason and fix. Seen: 22.05.8, IDX and SLURM_JOB_GPUS, whatever the order of gres.conf."""


class NodeMachine(Struct, frozen=True):
    """A host in the form of the audit, computed once for all identical nodes."""

    host: Host
    order: CoreOrder
    tree: NodeTree
    gpus: tuple[AllocatedGpu, ...]

    @property
    def has_nodes_in_packages(self) -> bool:
        """Whether SlurmdParameters=numa_node_as_socket would change the sockets."""
        return len(list_cpu_nodes(self.host)) > len(self.host.packages)


def node_machine(host: Host) -> NodeMachine:
    """Return the host's cores, nodes and GPUs by Slurm's numbers."""
    gpus = tuple(
        AllocatedGpu(number, gpu.bdf, home_node(host, gpu))
        for number, gpu in enumerate(host.whole_gpus)
    )
    indices = [node.index for node in host.nodes]
    counts = {index: sum(gpu.node == index for gpu in gpus) for index in indices}
    distances = {} if host.distances is None else host.distances
    tree = NodeTree(
        pus_of_node={node.index: node.pus for node in host.nodes},
        gpus_of_node=counts,
        gpu_memory=frozenset(find_gpu_memory_nodes(host)),
        package_of_node={node.index: node.package for node in host.nodes},
        distances={
            (a, b): row[column]
            for a, row in zip(indices, distances, strict=False)
            for column, b in enumerate(indices)
        },
    )
    return NodeMachine(host, build_core_order(host), tree, gpus)


def build_allocation(
    job: Job,
    share: NodeShare,
    machine: NodeMachine | None,
    shape: NodeShape | None,
    numbers: Sequence[int] | None = None,
) -> JobAllocation:
    """Return a job's resources on a node, in the machine's numbers. shape: the node's shape in
    Slurm; None = the machine's. If the two differ, the ids are meaningless on this machine, and
    `unknown` states it. numbers: the GPU of each of Slurm's numbers, in the order of gres.conf
    (gres.py); None = by address, () = unknown."""
    # Long because it checks each reason, in the order in which they decide.
    unknown = partial(unknown_allocation, job, share.node)
    if not share.gpus.count and share.gpus.indices is not None:
        return _make_allocation(job, share.node)
    if machine is None:
        return unknown("no host is specified for this node")
    if shape is not None and not machine.order.fits(shape):
        return unknown(
            f"Slurm lists the node as {shape} (sockets x cores x threads), and the host "
            f"{machine.host.name} has {plural(len(machine.order.pus), 'core')} of "
            f"{plural(machine.order.threads, 'CPU')}"
        )
    if other_types := [kind for kind in share.gpus.types if is_other_model(kind, machine.host)]:
        return unknown(
            f"Slurm shows GPUs of type {', '.join(sorted(other_types))}, and the host "
            f"{machine.host.name} has {machine.host.whole_gpus[0].name}"
        )
    if share.gpus.indices is None:
        return unknown(
            "Slurm shows the number of GPUs, not which: no File= in gres.conf",
            "lines with File= in gres.conf, or AutoDetect: `homenode slurm check`",
        )
    if numbers == ():
        return unknown(*SEVERAL_TYPES)
    if share.gpus.sliced and numbers is None:
        return unknown(
            "MIG slices, which have numbers of their own in Slurm's list of devices",
            "--gres gres.conf if it has a line for each slice; else records: --hooks DIR",
        )
    indices = share.gpus.indices
    if numbers is not None and indices and max(indices) >= len(numbers):
        return unknown(
            f"Slurm shows GPU {max(indices)}, and gres.conf lists {plural(len(numbers), 'GPU')}",
            "--gres gres.conf of these nodes",
        )
    if numbers is not None:
        indices = tuple(sorted({numbers[index] for index in indices}))
    if indices and not 0 <= min(indices) <= max(indices) < len(machine.gpus):
        return unknown(
            f"Slurm shows GPU {max(indices)}, and the host {machine.host.name} has "
            f"{plural(len(machine.gpus), 'GPU')}"
        )
    if share.cores is not None and shape is None and machine.has_nodes_in_packages:
        return unknown(
            f"Slurm assigns cores by socket, and a socket of {machine.host.name} may be a package "
            "or a NUMA node to it",
            "--nodes FILE with `scontrol show node`, which has the number of sockets",
        )
    try:
        pus = _find_pus(share, machine, shape)
    except IndexError:
        return unknown(
            f"CPU ids beyond the {plural(len(machine.order.pus), 'core')} of {machine.host.name}"
        )
    gpus = tuple(machine.gpus[index] for index in indices)
    return replace(_make_allocation(job, share.node), pus=pus, gpus=gpus, tree=machine.tree)


def build_gres_allocation(
    job: Job, share: NodeShare, shape: NodeShape, gres: DeviceOrder
) -> JobAllocation | None:
    """Return a job's resources on a node by the Cores= of its GPUs in gres.conf, if the machine is
    unknown; None if gres.conf does not give them."""
    places = gres.list_cores(share.node)
    indices = share.gpus.indices
    if not indices or share.gpus.sliced or max(indices) >= len(places):
        return None
    if share.cpu_ids is not None:
        cores = CpuSet(number // shape.threads_per_core for number in share.cpu_ids)
    elif share.cores is not None:
        per_socket = shape.cores_per_socket
        cores = CpuSet(socket * per_socket + core for socket, core in share.cores)
    else:
        return None
    sets = list(dict.fromkeys(places))
    if None in sets or max(cores, default=0) >= shape.cores:
        return None
    if excess := CpuSet.union(pus for pus in sets if pus) - CpuSet(range(shape.cores)):
        return unknown_allocation(
            job,
            share.node,
            f"gres.conf names core {max(excess)}, and Slurm lists {plural(shape.cores, 'core')}",
            "`homenode slurm check` corrects Cores=",
        )
    return replace(
        _make_allocation(job, share.node),
        pus=cores,
        gpus=tuple(AllocatedGpu(i, None, NodeIndex(sets.index(places[i]))) for i in indices),
        tree=NodeTree(
            pus_of_node={NodeIndex(n): pus for n, pus in enumerate(sets) if pus is not None},
            gpus_of_node=None,
            gpu_memory=frozenset(),
            distances={},
            is_of_gres=True,
        ),
    )


def unknown_allocation(job: Job, node: str, reason: str, fix: str | None = None) -> JobAllocation:
    """Return the allocation of a job whose resources on a node are unknown."""
    return replace(_make_allocation(job, node), unknown=reason, fix=fix)


def _make_allocation(job: Job, node: str) -> JobAllocation:
    """Return an allocation of a job on a node, with all other fields unknown."""
    return JobAllocation(job=job.id, node=node, name=job.name, user=job.user)


def _find_pus(share: NodeShare, machine: NodeMachine, shape: NodeShape | None) -> CpuSet | None:
    """Return the CPUs that a share names. Raises IndexError for cores that the machine lacks."""
    if share.cpu_ids is not None:
        per_core = machine.order.threads if shape is None else shape.threads_per_core
        return machine.order.pus_of_ids(share.cpu_ids, per_core)
    if share.cores is None:
        return None
    sockets = len(machine.host.packages) or 1
    of_socket = len(machine.order.pus) // sockets if shape is None else shape.cores_per_socket
    return machine.order.pus_of_cores(socket * of_socket + core for socket, core in share.cores)
