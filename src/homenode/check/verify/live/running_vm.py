"""RunningVm: a running VM as its host's kernel shows it: threads, memory and neighbours."""

from enum import StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex


class ThreadKind(StrEnum):
    """What a thread of QEMU does."""

    VCPU = "vcpu"
    ALL_VCPUS = "all-vcpus"  # TCG with one thread for every vCPU
    IOTHREAD = "iothread"
    EMULATOR = "emulator"  # the main loop, and all that it starts


class VmThread(Struct, frozen=True):
    """A thread. name: its comm. number: of the vCPU or IOThread, None for the others.

    allowed: PUs that the scheduler may use, after pins and cgroups alike.
    """

    id: int
    name: str
    kind: ThreadKind
    number: int | None
    allowed: CpuSet


class BackendObject(Struct, frozen=True):
    """Memory that QEMU was asked for, by its command line. name: "ram-node0", "pc.ram".

    host_nodes: empty where it was not bound. policy: QEMU's word ("bind", "preferred", ...).
    """

    name: str
    size_bytes: int
    host_nodes: CpuSet
    policy: str | None


class RamArea(Struct, frozen=True):
    """A mapping of QEMU that is large enough to be guest memory.

    file: what backs it (hugetlbfs, memfd), None = anonymous. policy, policy_nodes: of mbind.
    page_bytes: of the pages that the kernel uses. pages_by_node: (node, pages of that size) that
    are there now; pages that nothing has touched yet are nowhere.
    """

    size_bytes: int
    file: str | None
    policy: str
    policy_nodes: CpuSet
    page_bytes: int
    pages_by_node: tuple[tuple[NodeIndex, int], ...]


class DeviceInterrupt(Struct, frozen=True):
    """A host interrupt of a passed-through device. name: "vfio-msix[0]".

    allowed: PUs that may serve it; effective: those that do, None where the kernel does not say.
    """

    device: Bdf
    irq: int
    name: str
    allowed: CpuSet | None
    effective: CpuSet | None


class Neighbour(Struct, frozen=True):
    """Threads of one other process that could meet the VM's threads on its cores.

    domain: name of the VM where it is a QEMU. threads: how many of its threads these are.
    allowed: PUs of them all. is_vcpu: they run another VM's vCPUs. floats: each may run anywhere.
    busy_ratio: CPU time on the VM's PUs over the time that was watched, 1.0 = one PU.
    """

    process: int
    name: str
    domain: str | None
    threads: int
    allowed: CpuSet
    is_vcpu: bool
    floats: bool
    busy_ratio: float


class HostPlaces(Struct, frozen=True):
    """The host's PUs, as far as a running VM is judged by them. Ascending.

    nodes: (node, its PUs). siblings: PUs of each core.
    """

    online: CpuSet
    nodes: tuple[tuple[NodeIndex, CpuSet], ...]
    siblings: tuple[CpuSet, ...]

    def pus_of_node(self, node: NodeIndex) -> CpuSet:
        return next((pus for index, pus in self.nodes if index == node), CpuSet())

    def cores_of(self, pus: CpuSet) -> CpuSet:
        """The PUs and their siblings."""
        return CpuSet.from_bits(
            pus.bits | sum(core.bits for core in self.siblings if not core.isdisjoint(pus))
        )


class RunningVm(Struct, frozen=True):
    """One running VM. process: of its QEMU. threads: ascending by id; emulator included.

    default_huge_bytes: the host's default huge page size. swapped_bytes: of QEMU, None = unknown.
    node_of_device: host node of each passed-through function that has one.
    watched_s: how long neighbours were watched.
    """

    name: str
    uuid: str
    process: int
    threads: tuple[VmThread, ...]
    backends: tuple[BackendObject, ...]
    areas: tuple[RamArea, ...]
    swapped_bytes: int | None
    default_huge_bytes: int | None
    interrupts: tuple[DeviceInterrupt, ...]
    node_of_device: tuple[tuple[Bdf, NodeIndex], ...]
    neighbours: tuple[Neighbour, ...]
    watched_s: float
    host: HostPlaces
    gaps: tuple[Gap, ...]
