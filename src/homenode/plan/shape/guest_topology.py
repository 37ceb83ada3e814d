"""Guest topology: sockets x dies x cores x threads, such that a booted guest prints no warning.

Linux complains where CPUs of one last-level cache are on two nodes ("sched: CPU #4's llc-sibling
CPU #0 is not on the same node!"). Booted under QEMU 7.2 with Linux 6.1, cells of 4 and 3, of 6 and
4, of 29 and 28 vCPUs in one socket: with an Intel model it is silent, for there it expects sub-NUMA
clusters (Linux 5.15, commit 2c88d45edbb8), and the cell bounds the cache. With an AMD model it
complains, with dies and without the L3 (<cache mode='disable'/>) as well: only sockets that no cell
cuts are silent there.
"""

from dataclasses import dataclass
from math import gcd

from homenode.errors import InputError
from homenode.plan.layout import GuestCells, Siblings
from homenode.plan.model import GuestTopology, PlanFinding
from homenode.plan.request import GuestRequest
from homenode.topology import Host

INTEL_VENDOR = "GenuineIntel"
AMD_VENDORS = frozenset({"AuthenticAMD", "HygonGenuine"})
"""CPUID vendors whose siblings are given by leaf 0x8000001E, which QEMU shows with topoext only."""


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
    package_vcpus: tuple[int, ...] = (),
) -> TopologyChoice:
    """The topology for these cells. dies_per_cell: LLCs of each cell where they are equal (caches).

    package_vcpus: vCPUs on each host package, in vCPU order; () = not known, or not one after the
    other. Raises InputError if a cell's vCPUs are not whole cores of that many threads.
    """
    vcpus = sum(cell_vcpus)
    findings: tuple[PlanFinding, ...] = ()
    if request.layout.cells is GuestCells.FLAT:
        topology = _flat(request, vcpus, threads, package_vcpus)
    else:
        _check_threads(cell_vcpus, threads)
        if len(set(cell_vcpus)) == 1:
            cores = cell_vcpus[0] // threads
            dies = dies_per_cell if cores % dies_per_cell == 0 else 1
            topology = GuestTopology(len(cell_vcpus), dies, cores // dies, threads)
        else:
            topology, findings = _unequal(host, request, cell_vcpus, threads, package_vcpus)
    is_amd = host is not None and host.cpu.vendor in AMD_VENDORS
    # Without siblings the guest can do without it, and libvirt takes it only with a CPU model.
    can_say = threads > 1 or request.guest.cpu_mode is not None
    is_x86 = request.guest.architecture == "x86_64"
    topoext = is_amd and is_x86 and can_say and topology is not None
    return TopologyChoice(topology, topoext, findings)


def _flat(
    request: GuestRequest, vcpus: int, threads: int, package_vcpus: tuple[int, ...]
) -> GuestTopology | None:
    """What a flat guest is shown: nothing new, unless what it was given is no longer true."""
    stated = request.guest.cpu_topology
    fits = stated is None or stated[0] * stated[1] * stated[2] * stated[3] == vcpus
    siblings = request.layout.siblings
    sockets = _sockets(package_vcpus, vcpus, threads)
    if siblings is Siblings.EXPOSED and threads > 1:
        _check_threads((vcpus,), threads)
        return GuestTopology(sockets, 1, vcpus // threads // sockets, threads)
    # Exposed ones come here too, where the host had none to give.
    no_siblings = siblings is not Siblings.AS_THEY_WERE
    if fits and not (no_siblings and stated is not None and stated[3] > 1):
        return None
    return GuestTopology(sockets, 1, vcpus // sockets, 1)


def _sockets(package_vcpus: tuple[int, ...], vcpus: int, threads: int) -> int:
    """Packages under the vCPUs, where each has as many whole cores; else 1."""
    sizes = set(package_vcpus)
    if len(sizes) != 1 or sum(package_vcpus) != vcpus or sizes.pop() % threads:
        return 1
    return len(package_vcpus)


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
    host: Host | None,
    request: GuestRequest,
    cell_vcpus: tuple[int, ...],
    threads: int,
    package_vcpus: tuple[int, ...],
) -> tuple[GuestTopology, tuple[PlanFinding, ...]]:
    """On Intel the sockets are the host's packages, or one, and the cells share them; elsewhere
    sockets of the greatest size that divides every cell: a cell is then several sockets."""
    cores = [count // threads for count in cell_vcpus]
    subject = f"cells of {', '.join(map(str, cell_vcpus))} vCPUs"
    fix = "choose a number of vCPUs that the cells divide evenly"
    is_intel = host is not None and host.cpu.vendor == INTEL_VENDOR
    if is_intel and request.guest.domain_type == "kvm":
        sockets = _sockets(package_vcpus, sum(cell_vcpus), threads)
        size = sum(cores) // sockets
        finding = PlanFinding(
            id="cells-share-socket",
            severity="info",
            subject=subject,
            detail=f"they share {'a socket' if sockets == 1 else f'{sockets} sockets'} of "
            f"{size} cores, "
            "as sub-NUMA clusters do; Linux older than 5.15 prints a warning at boot",
            fix=fix,
        )
        return GuestTopology(sockets, 1, size, threads), (finding,)
    size = gcd(*cores)
    sockets = sum(cores) // size
    finding = PlanFinding(
        id="sockets-exceed-cells",
        severity="warning",
        subject=f"{sockets} sockets for {len(cores)} guest cells",
        detail=f"{subject} have no common socket larger than {size} "
        f"core{'' if size == 1 else 's'}; "
        "licences and some operating systems limit sockets",
        fix=fix,
    )
    return GuestTopology(sockets, 1, size, threads), (finding,)
