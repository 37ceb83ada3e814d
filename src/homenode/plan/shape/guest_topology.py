"""Guest topology: sockets x dies x cores x threads, such that no cell cuts a socket."""

from dataclasses import dataclass
from math import gcd

from homenode.errors import InputError
from homenode.plan.layout import GuestCells, Siblings
from homenode.plan.model import GuestTopology, PlanFinding
from homenode.plan.request import GuestRequest
from homenode.topology import Host

AMD_VENDORS = frozenset({"AuthenticAMD", "HygonGenuine"})
"""CPUID vendors whose siblings are told by leaf 0x8000001E, which QEMU shows with topoext only."""


@dataclass(frozen=True, slots=True)
class TopologyChoice:
    """topology: None = the document's stays. topoext: the CPU feature must be added."""

    topology: GuestTopology | None
    topoext: bool
    findings: tuple[PlanFinding, ...] = ()


def guest_topology(
    host: Host | None,
    request: GuestRequest,
    cell_vcpus: tuple[int, ...],
    threads: int,
    dies_per_cell: int = 1,
) -> TopologyChoice:
    """The topology for these cells. dies_per_cell: LLCs of each cell where they are equal (caches).

    Raises InputError if a cell's vCPUs are not whole cores of that many threads.
    """
    vcpus = sum(cell_vcpus)
    findings: tuple[PlanFinding, ...] = ()
    if request.layout.cells is GuestCells.FLAT:
        topology = _flat(request, vcpus, threads)
    else:
        _check_threads(cell_vcpus, threads)
        if len(set(cell_vcpus)) == 1:
            cores = cell_vcpus[0] // threads
            dies = dies_per_cell if cores % dies_per_cell == 0 else 1
            topology = GuestTopology(len(cell_vcpus), dies, cores // dies, threads)
        else:
            topology, findings = _unequal(cell_vcpus, threads)
    is_amd = host is not None and host.cpu.vendor in AMD_VENDORS
    # Without siblings the guest can do without it, and libvirt takes it only with a CPU model.
    can_say = threads > 1 or request.guest.cpu_mode is not None
    is_x86 = request.guest.architecture == "x86_64"
    topoext = is_amd and is_x86 and can_say and topology is not None
    return TopologyChoice(topology, topoext, findings)


def _flat(request: GuestRequest, vcpus: int, threads: int) -> GuestTopology | None:
    """What a flat guest is told: nothing new, unless what it was told is no longer true."""
    told = request.guest.cpu_topology
    fits = told is None or told[0] * told[1] * told[2] * told[3] == vcpus
    siblings = request.layout.siblings
    if siblings is Siblings.EXPOSED and threads > 1:
        _check_threads((vcpus,), threads)
        return GuestTopology(1, 1, vcpus // threads, threads)
    # Exposed ones come here too, where the host had none to give.
    no_siblings = siblings is not Siblings.AS_THEY_WERE
    if fits and not (no_siblings and told is not None and told[3] > 1):
        return None
    return GuestTopology(1, 1, vcpus, 1)


def _check_threads(cell_vcpus: tuple[int, ...], threads: int) -> None:
    for cell, count in enumerate(cell_vcpus):
        if count % threads:
            raise InputError(
                f"guest cell {cell}: expected whole cores of {threads} threads, found {count} "
                f"vCPUs",
                hint=f"use {count // threads * threads} or {-(-count // threads) * threads} vCPUs "
                f"there, or a layout that hides siblings",
            )


def _unequal(
    cell_vcpus: tuple[int, ...], threads: int
) -> tuple[GuestTopology, tuple[PlanFinding, ...]]:
    """Sockets of the greatest size that divides every cell: a cell is then several sockets."""
    cores = [count // threads for count in cell_vcpus]
    size = gcd(*cores)
    sockets = sum(cores) // size
    finding = PlanFinding(
        "sockets-exceed-cells",
        "warning",
        f"{sockets} sockets for {len(cores)} guest cells",
        f"cells of {', '.join(map(str, cell_vcpus))} vCPUs have no common socket larger than "
        f"{size} cores; licences and some operating systems limit sockets",
        "choose a number of vCPUs that the cells divide evenly",
    )
    return GuestTopology(sockets, 1, size, threads), (finding,)
