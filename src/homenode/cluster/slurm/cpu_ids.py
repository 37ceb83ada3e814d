"""CpuIds: Slurm's abstract CPU ids and core numbers, as PUs of a host's own tree.

Slurm counts sockets, then cores, then threads: id = (socket x cores + core) x threads + thread,
whatever the kernel calls the PUs. Objects stand in hwloc's logical order: each level by its lowest
PU, a node's cores together.
Source: scontrol(1), CPU_IDs; gres.conf(5), Cores ("the logical core number seen in lstopo -l").
"""

from collections.abc import Iterable

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.machine.tools.slurm_nodes import NodeShape
from homenode.machine.topology import Host

_MANY = 1 << 32


class CoreOrder(Struct, frozen=True):
    """A host's cores as Slurm numbers them. pus: of each core, by its number."""

    pus: tuple[CpuSet, ...]

    @property
    def threads(self) -> int:
        """Of the core that has most."""
        return max((len(core) for core in self.pus), default=1)

    def numbers(self, pus: CpuSet) -> CpuSet:
        """Numbers of the cores that have any of these PUs."""
        return CpuSet(n for n, core in enumerate(self.pus) if not core.isdisjoint(pus))

    def pus_of_cores(self, numbers: Iterable[int]) -> CpuSet:
        """All PUs of these cores. Raises IndexError for a number that is none."""
        return CpuSet.union(self.pus[number] for number in numbers)

    def pus_of_ids(self, ids: CpuSet, ids_per_core: int) -> CpuSet:
        """The PUs of abstract CPU ids. Raises IndexError for an id that is none.

        With one id per core (ThreadsPerCore=1) an id is the whole core. A core with fewer threads
        than the others has ids that are no PU.
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
        """True where the shape has as many cores, and threads on them, as the host."""
        return shape.cores == len(self.pus) and shape.threads_per_core in (1, self.threads)


def core_order(host: Host) -> CoreOrder:
    """The cores in Slurm's order. Offline PUs have no place in it: slurmd does not count them.

    >>> from homenode.vm.sources import load_host
    >>> core_order(load_host("x86-2p2n8c16t-pus-interleaved")).pus[1]
    CpuSet('2,10')
    """
    by_index = {pu.index: pu for pu in host.pus}
    lowest: dict[tuple[str, object], int] = {}
    places = []
    for core in host.cores:
        first = by_index[next(iter(core.pus))]
        above = (("package", first.package), ("node", first.node), ("llc", first.llc))
        for level in above:
            lowest[level] = min(lowest.get(level, _MANY), first.index)
        places.append((above, first.index, core.pus))
    places.sort(key=lambda place: (*(lowest[level] for level in place[0]), place[1]))
    return CoreOrder(tuple(pus for _, _, pus in places))
