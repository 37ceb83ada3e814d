"""Threads: PUs for QEMU's own threads and the IOThreads, after the vCPUs have theirs.

Order of places: whole cores without vCPUs on the chosen nodes, those nearest the devices first (on
hybrid hosts efficiency cores first); such cores of the nearest other nodes; free siblings of vCPU
cores, with a finding; the vCPUs' own PUs, with a finding. Never isolated PUs, and never those of
other VMs. The emulator gets one core on each of at most EMULATOR_CORES chosen nodes: its main loop
is one thread, and a second node's core keeps its workers near that node's memory. Each IOThread
gets one PU, from cores after the emulator's; where those run out it shares with the emulator.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.plan.model import PlanFinding
from homenode.plan.search.supply import FreeCore, Usable
from homenode.topology import CoreKind

EMULATOR_CORES = 2


@dataclass(frozen=True, slots=True)
class ThreadPlaces:
    """emulator_pus: None = not pinned. iothread_pus: per IOThread."""

    emulator_pus: CpuSet | None
    iothread_pus: tuple[CpuSet, ...]
    findings: tuple[PlanFinding, ...]


def shared_places(vcpu_pus: CpuSet, iothreads: int) -> ThreadPlaces:
    """Everything on the vCPUs' own PUs."""
    return ThreadPlaces(vcpu_pus, (vcpu_pus,) * iothreads, ())


def thread_places(
    usable: Usable,
    node_order: Sequence[int],
    chosen: int,
    vcpu_pus: CpuSet,
    iothreads: int,
    emulator_pus: CpuSet | None = None,
) -> ThreadPlaces:
    """Places beside these vCPUs.

    node_order: positions in usable.nodes, the nearest to the devices first; the first `chosen` are
    the VM's own. emulator_pus: the emulator's, where they are given already.
    """
    spare = list(_spare_cores(usable, node_order[:chosen], vcpu_pus))
    far = list(_spare_cores(usable, node_order[chosen:], vcpu_pus))
    siblings = _free_siblings(usable, node_order[:chosen], vcpu_pus)
    findings: list[PlanFinding] = []
    emulator = emulator_pus
    left: list[int] = []
    if emulator is None:
        first_of_node: dict[int, int] = {}
        for node, pus in spare:
            first_of_node.setdefault(node, pus)
        cores = list(first_of_node.values())[:EMULATOR_CORES] or [pus for _, pus in far[:1]]
        bits = sum(cores)
        left = [pus for _, pus in (*spare, *far) if not pus & bits]
        if not cores and siblings:
            bits = siblings[0]
            findings.append(_on_siblings(CpuSet.from_bits(bits)))
        emulator = CpuSet.from_bits(bits) if bits else None
        if emulator is None and not vcpu_pus.bits & usable.isolated.bits:
            emulator = vcpu_pus
            findings.append(_shares(vcpu_pus))
        elif emulator is None:
            findings.append(_unpinned())
    else:
        left = [pus for _, pus in (*spare, *far)]
    single = (1 << bit for pus in left for bit in CpuSet.from_bits(pus))
    places = [CpuSet.from_bits(bits) for _, bits in zip(range(iothreads), single, strict=False)]
    if emulator is not None:
        places += [emulator] * (iothreads - len(places))
    elif len(places) < iothreads:
        # Not pinned at all rather than some on PUs and some adrift.
        places = []
    return ThreadPlaces(emulator, tuple(places), tuple(findings))


def _spare_cores(
    usable: Usable, nodes: Sequence[int], vcpu_pus: CpuSet
) -> Iterator[tuple[int, int]]:
    """(node, PUs) of whole cores without vCPUs and without isolated PUs, in order of preference."""
    mine = {
        core.llc for node in nodes for core in usable.nodes[node].cores if core.free & vcpu_pus.bits
    }
    for node in nodes:
        cores = [
            core
            for core in usable.nodes[node].cores
            if core.whole and not core.free & (vcpu_pus.bits | usable.isolated.bits)
        ]
        room: dict[int, int] = {}
        for core in cores:
            room[core.llc] = room.get(core.llc, 0) + 1

        def rank(core: FreeCore, room: dict[int, int] = room) -> tuple[bool, bool, int, int]:
            # LLCs that the VM is in already, then the fullest, so that free LLCs stay whole.
            fresh = core.llc not in mine
            return (
                core.kind is not CoreKind.EFFICIENCY,
                fresh,
                room[core.llc],
                core.free & -core.free,
            )

        yield from ((node, core.free) for core in sorted(cores, key=rank))


def _free_siblings(usable: Usable, nodes: Sequence[int], vcpu_pus: CpuSet) -> list[int]:
    """Free PUs beside a vCPU on its core, core by core."""
    return [
        idle
        for node in nodes
        for core in usable.nodes[node].cores
        if core.free & vcpu_pus.bits
        and (idle := core.free & ~(vcpu_pus.bits | usable.isolated.bits))
    ]


def _on_siblings(pus: CpuSet) -> PlanFinding:
    return PlanFinding(
        "emulator-on-siblings",
        "warning",
        f"PUs {pus}",
        "no core without vCPUs is free, so QEMU's own threads share a core with a vCPU",
        "ask for one vCPU less, or free a core",
    )


def _shares(pus: CpuSet) -> PlanFinding:
    return PlanFinding(
        "emulator-shares-vcpus",
        "warning",
        f"PUs {pus}",
        "no PU is left beside the vCPUs', so QEMU's own threads run on them",
        "ask for fewer vCPUs, or free a core",
    )


def _unpinned() -> PlanFinding:
    return PlanFinding(
        "emulator-not-pinned",
        "warning",
        "emulator",
        "every PU that is left is isolated, so QEMU's own threads are not pinned",
        "leave some PUs out of isolcpus and nohz_full",
    )
