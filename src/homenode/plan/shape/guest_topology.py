"""Guest topology: sockets x dies x cores x threads, such that a booted guest prints no warning.

Linux complains where CPUs of one last-level cache are on two nodes ("sched: CPU #4's llc-sibling
CPU #0 is not on the same node!"). Booted under QEMU 7.2 with Linux 6.1, cells of 4 and 3, of 6 and
4, of 29 and 28 vCPUs in one socket: with an Intel model it is silent, for there it expects sub-NUMA
clusters (Linux 5.15, commit 2c88d45edbb8), and the cell bounds the cache. With an AMD model it
complains, with dies and without the L3 (<cache mode='disable'/>) as well: only sockets that no cell
cuts are silent there.
"""

from math import gcd

from msgspec import Struct

from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.plan.request import GuestRequest
from homenode.plan.shape.numbering import Numbering
from homenode.vm.layout import GuestCells, Siblings
from homenode.vm.model import GuestTopology
from homenode.vm.plan_model import PlanFinding, plan_finding
from homenode.wording import plural

INTEL_VENDOR = "GenuineIntel"
AMD_VENDORS = frozenset({"AuthenticAMD", "HygonGenuine"})
"""CPUID vendors whose siblings are given by leaf 0x8000001E, which QEMU shows with topoext only."""


class TopologyChoice(Struct, frozen=True):
    """topology: None = the document's stays."""

    topology: GuestTopology | None
    findings: tuple[PlanFinding, ...] = ()


def may_share_sockets(host: Host | None, request: GuestRequest) -> bool:
    """Whether cells of a guest may share a socket: on Intel, where Linux expects sub-NUMA clusters
    since 5.15."""
    is_intel = host is not None and host.cpu.vendor == INTEL_VENDOR
    return is_intel and request.guest.domain_type == "kvm"


def guest_topology(
    host: Host | None,
    request: GuestRequest,
    numbers: Numbering,
    *,
    llc_vcpus: int = 0,
    package_vcpus: tuple[int, ...] = (),
    shares_llc: bool = False,
) -> TopologyChoice:
    """The topology for these cells. llc_vcpus: consecutive vCPUs on each LLC where all have as
    many; 0 = dies say nothing. package_vcpus: vCPUs on each host package, in vCPU order; () = not
    known, or not one after the other. shares_llc: an LLC has vCPUs of several cells.

    Raises InputError if a cell's vCPUs are not whole cores.
    """
    threads = numbers.placement.threads_per_core
    counts = tuple(map(len, numbers.cells))
    findings: tuple[PlanFinding, ...] = ()
    if request.layout.cells is GuestCells.FLAT:
        topology = _flat(request, counts[0], threads, package_vcpus)
    else:
        _check_threads(counts, threads)
        sockets, findings = _sockets_of_cells(
            host, request, numbers, package_vcpus, shares_llc=shares_llc
        )
        topology = GuestTopology(sockets, 1, sum(counts) // sockets // threads, threads)
    return TopologyChoice(_with_dies(topology, llc_vcpus), findings)


def _with_dies(topology: GuestTopology | None, llc_vcpus: int) -> GuestTopology | None:
    """The sockets as dies of so many vCPUs each, where they divide."""
    if topology is None or not llc_vcpus or llc_vcpus % topology.threads:
        return topology
    dies, rest = divmod(topology.cores * topology.threads, llc_vcpus)
    if rest:
        return topology
    return topology._replace(dies=dies, cores=llc_vcpus // topology.threads)


def _flat(
    request: GuestRequest,
    vcpus: int,
    threads: int,
    package_vcpus: tuple[int, ...],
) -> GuestTopology | None:
    """What a flat guest is shown: nothing new, unless what it was given is no longer true, or
    nothing was and its layout is chosen for it: without a topology each vCPU is a socket."""
    stated = request.guest.cpu_topology
    fits = stated is None or stated[0] * stated[1] * stated[2] * stated[3] == vcpus
    siblings = request.layout.siblings
    sockets = _sockets(package_vcpus, vcpus, threads)
    if siblings is Siblings.EXPOSED and threads > 1:
        _check_threads((vcpus,), threads)
        return GuestTopology(sockets, 1, vcpus // threads // sockets, threads)
    # Exposed ones come here too, where the host had none to give.
    hides = siblings is not Siblings.AS_THEY_WERE and stated is not None and stated[3] > 1
    is_chosen = stated is None and request.options.objective is not None and vcpus > 1
    if fits and not hides and not is_chosen:
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


def _sockets_of_cells(
    host: Host | None,
    request: GuestRequest,
    numbers: Numbering,
    package_vcpus: tuple[int, ...],
    *,
    shares_llc: bool,
) -> tuple[int, tuple[PlanFinding, ...]]:
    """How many sockets, and what is to be said of them: one for each cell where these are equal.

    On Intel cells that are not, or lie on one LLC, share the sockets of the host's packages, or
    one. Elsewhere sockets are of the greatest size that divides every cell, or of that by which
    cells take turns: a cell is then several sockets.
    """
    counts = tuple(map(len, numbers.cells))
    threads = numbers.placement.threads_per_core
    vcpus, size = sum(counts), numbers.socket_vcpus
    subject = f"cells of {', '.join(map(str, counts))} vCPUs"
    is_equal = len(set(counts)) == 1
    may_share = may_share_sockets(host, request)
    in_turns = any(len(cell) < max(cell) - min(cell) + 1 for cell in numbers.cells)
    if may_share and (shares_llc or (size is None and (in_turns or not is_equal))):
        sockets = _sockets(package_vcpus, vcpus, threads)
        finding = plan_finding(
            "cells-share-socket",
            subject,
            f"they share {'a socket' if sockets == 1 else f'{sockets} sockets'} of "
            f"{vcpus // threads // sockets} cores, "
            "as sub-NUMA clusters do; Linux older than 5.15 prints a warning at boot",
            case=None if is_equal else "unequal cells",
        )
        return sockets, (finding,)
    if size is None:
        size = gcd(*counts)
    sockets = vcpus // size
    if sockets == len(counts):
        return sockets, ()
    reason = f"have no common socket larger than {plural(size // threads, 'core')}"
    if in_turns:
        reason = f"take turns by {plural(size // threads, 'core')}, so that each has its part "
        reason += "of the vCPUs that are online at the start"
    finding = plan_finding(
        "sockets-exceed-cells",
        f"{sockets} sockets for {len(counts)} guest cells",
        f"{subject} {reason}; licences and some operating systems limit sockets",
        severity="info" if in_turns and sockets <= 4 * len(counts) else "warning",
        case="in turns" if in_turns else None,
    )
    return sockets, (finding,)
