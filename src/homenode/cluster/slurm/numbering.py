"""Numbering: a host's cores and GPUs in Slurm's numbers, and the node and model of each GPU.

Slurm counts sockets, then cores, then threads: id = (socket x cores + core) x threads + thread,
independent of the kernel's numbers, in hwloc's logical order. On GH200 a GPU has several nodes: one
with CPUs, and memory-only ones for itself and its MIG instances; programs are bound to the first.
Source: numactl issue 224; scontrol(1), CPU_IDs; gres.conf(5), Cores (the core number of lstopo -l).
"""

import re
from collections.abc import Iterable

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cluster.slurm.tools.slurm_nodes import NodeShape
from homenode.cpuset import CpuSet, NodeIndex
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host, MemoryKind, NumaNode


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
