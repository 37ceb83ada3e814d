"""Guest topology: sockets x dies x cores x threads without warnings at the guest's boot.

Linux warns if CPUs of one last-level cache are on two nodes ("sched: CPU #4's llc-sibling CPU #0 is
not on the same node!"). Booted under QEMU 7.2 with Linux 6.1, cells of 4 and 3, of 6 and 4, of 29
and 28 vCPUs in one socket: with an Intel model it is silent, for there it expects sub-NUMA clusters
(Linux 5.15, commit 2c88d45edbb8), and the cell bounds the cache. With an AMD model it warns, with
dies and without the L3 (<cache mode='disable'/>) as well: only sockets within one cell avoid the
warning there.

vCPU numbers: one cell after the other, unless the document starts some vCPUs offline (<vcpu
current=>, <vcpus>) and the first cells would have all online vCPUs: then the cells take turns,
socket by socket, so that online vCPUs are spread over them in proportion. A socket has consecutive
numbers, in QEMU as in Linux.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding, Severity, finding
from homenode.machine.topology import Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.text import plural
from homenode.vm.layout import GuestCells, Siblings
from homenode.vm.model import GuestTopology

MAX_SOCKETS_PER_CELL = 4
"""If a cell needed more sockets, an imbalance of one online vCPU is better."""


class VcpuNumbering(Struct, frozen=True):
    """The order in which vCPUs are numbered."""

    placement: Placement  # in the order of the numbers
    cells: tuple[CpuSet, ...]  # vCPUs of each guest cell
    # size of the sockets by which the cells take turns; None = open
    socket_vcpus: int | None = None


def choose_numbering(
    request: GuestRequest, placement: Placement, *, may_share_sockets: bool
) -> VcpuNumbering:
    """Return the numbering for a placement with its vCPUs cell by cell. may_share_sockets: sockets
    may hold parts of several cells. Raises InputError as count_cell_vcpus."""
    counts = count_cell_vcpus(request, placement)
    offline = list_offline_vcpus(request, sum(counts))
    runs = _SocketAssignment(tuple(_list_runs(counts)), None)
    if not offline or not placement.vcpu_nodes:
        return VcpuNumbering(placement, runs.cells)
    ways = [
        _assign(counts, offline, size) for size in _list_sizes(counts, placement.threads_per_core)
    ]
    way = _choose_way((runs, *ways), counts, offline, may_share_sockets=may_share_sockets)
    order = [v for cell in way.cells for v in cell]
    at = sorted(range(len(order)), key=order.__getitem__)
    pins = placement.vcpu_pins
    placement = replace(
        placement,
        vcpu_pins=tuple(pins[i] for i in at) if pins else (),
        vcpu_nodes=tuple(placement.vcpu_nodes[i] for i in at),
    )
    return VcpuNumbering(placement, way.cells, way.socket_vcpus)


def count_cell_vcpus(request: GuestRequest, placement: Placement) -> tuple[int, ...]:
    """Return the number of vCPUs of each guest cell, in cell order. A flat guest has one cell.
    Raises InputError if a cell has no vCPU, or its vCPUs are not consecutive."""
    total = len(placement.vcpu_nodes) or len(placement.vcpu_pins) or request.vcpus
    if request.layout.cells is GuestCells.SINGLE:
        return (total,)
    cells = len(placement.nodes)
    if not placement.vcpu_nodes:
        # Without pins vCPUs belong to no particular cell, so the counts are even.
        if cells == 0 or total % cells:
            raise InputError(
                f"{total} vCPUs on {cells} guest NUMA nodes: expected equal guest NUMA nodes "
                "where vCPUs are not pinned",
                hint="pin the vCPUs, or choose a number of vCPUs that the guest NUMA nodes divide",
            )
        return (total // cells,) * cells
    if any(a > b for a, b in pairwise(placement.vcpu_nodes)):
        raise InputError("vCPUs of one guest NUMA node must be neighbours: expected node by node")
    counts = tuple(placement.vcpu_nodes.count(i) for i in range(cells))
    if 0 in counts:
        raise InputError(
            f"host node {placement.nodes[counts.index(0)]} was chosen, but has no vCPU of the VM"
        )
    return counts


def list_offline_vcpus(request: GuestRequest, vcpus: int) -> CpuSet:
    """Return the vCPUs that are offline at the start; none if the vCPU count changes."""
    return request.guest.offline_vcpus if vcpus == request.guest.vcpus else CpuSet()


def format_online(vcpus: CpuSet, offline: CpuSet) -> str:
    """Return the text about online vCPUs that follows the vCPUs of a cell.

    >>> format_online(CpuSet(range(4)), CpuSet(range(2, 8))), format_online(CpuSet([0]), CpuSet())
    (', of which 0-1 online,', '')
    """
    online = vcpus - offline
    return f", of which {online or 'none'} online," if online != vcpus else ""


def check_online_vcpus(cells: Sequence[CpuSet], offline: CpuSet) -> Iterator[Finding]:
    """Yield a warning for each cell without an online vCPU at the start."""
    for cell, vcpus in enumerate(cells):
        if vcpus and vcpus <= offline:
            yield finding(
                "cell-without-online-vcpu",
                f"guest cell {cell}",
                observed=f"none of its vCPUs {vcpus} is online at the start: until one is, the "
                "guest NUMA node's memory and devices are remote to every CPU of the guest",
                values={"cells": len(cells)},
            )


class _SocketAssignment(Struct, frozen=True):
    cells: tuple[CpuSet, ...]
    socket_vcpus: int | None

    def deviation(self, counts: Sequence[int], offline: CpuSet) -> Fraction:
        """Return the largest deviation of a cell from its share of online vCPUs, in vCPUs."""
        online = [len(cell - offline) for cell in self.cells]
        return max(
            abs(n - Fraction(sum(online) * count, sum(counts)))
            for n, count in zip(online, counts, strict=True)
        )


def _choose_way(
    ways: Sequence[_SocketAssignment],
    counts: Sequence[int],
    offline: CpuSet,
    *,
    may_share_sockets: bool,
) -> _SocketAssignment:
    """Return the first numbering, from the largest sockets down, that spreads the online vCPUs to
    within less than a vCPU; to within a vCPU rather than with many sockets; else the closest. A
    numbering with a cell without online vCPUs comes last."""
    deviations = {way: way.deviation(counts, offline) for way in ways}
    idle = {way: sum(cell <= offline for cell in way.cells) for way in ways}
    least = min(idle.values())
    ways = [way for way in ways if idle[way] == least]
    exact = [way for way in ways if deviations[way] < 1]
    limit = MAX_SOCKETS_PER_CELL * len(counts)
    for way in exact:
        if way.socket_vcpus is None or sum(counts) // way.socket_vcpus <= limit:
            return way
    if exact and may_share_sockets:
        return _SocketAssignment(exact[0].cells, None)
    for way in ways:
        if deviations[way] <= 1:
            return way
    return min(ways, key=deviations.__getitem__)


def _list_sizes(counts: Sequence[int], threads: int) -> Iterator[int]:
    """Yield sizes of sockets within cells, the largest first."""
    step = gcd(*counts)
    for size in range(step, 0, -1):
        if not step % size and not size % threads:
            yield size


def _list_runs(counts: Sequence[int]) -> Iterator[CpuSet]:
    start = 0
    for count in counts:
        yield CpuSet(range(start, start + count))
        start += count


def _assign(counts: Sequence[int], offline: CpuSet, size: int) -> _SocketAssignment:
    """Assign sockets of this size: those with the most online vCPUs first, to a cell without any,
    then to the cell that lacks most of its share; offline sockets go to the emptiest cell."""
    total = sum(counts)
    cells: list[list[int]] = [[] for _ in counts]
    online = [0] * len(counts)
    blocks = [range(first, first + size) for first in range(0, total, size)]
    on = {block: sum(vcpu not in offline for vcpu in block) for block in blocks}
    share = [Fraction((total - len(offline)) * count, total) for count in counts]

    def wants(cell: int) -> tuple[bool, Fraction, int]:
        return bool(online[cell]), online[cell] - share[cell], cell

    def fills(cell: int) -> tuple[Fraction, int]:
        return Fraction(len(cells[cell]), counts[cell]), cell

    for block in sorted(blocks, key=lambda block: (-on[block], block.start)):
        free = [c for c, count in enumerate(counts) if len(cells[c]) + size <= count]
        cell = min(free, key=wants) if on[block] else min(free, key=fills)
        cells[cell] += block
        online[cell] += on[block]
    return _SocketAssignment(tuple(map(CpuSet, cells)), size)


INTEL_VENDOR = "GenuineIntel"
AMD_VENDORS = frozenset({"AuthenticAMD", "HygonGenuine"})
"""CPUID vendors whose siblings are in leaf 0x8000001E, which QEMU exposes only with topoext."""
INTEL_MODELS = tuple(
    """
    Nehalem Westmere SandyBridge IvyBridge Haswell Broadwell Skylake Cascadelake Cooperlake
    Icelake Snowridge SapphireRapids GraniteRapids SierraForest Denverton KnightsMill
""".split()
)
"""Prefixes of Intel's CPU models in QEMU, which have no topoext."""


def may_share_sockets(host: Host | None, request: GuestRequest) -> bool:
    """Return whether cells may share a socket: on Intel, for sub-NUMA clusters since Linux 5.15."""
    is_intel = host is not None and host.cpu.vendor == INTEL_VENDOR
    return is_intel and request.guest.domain_type == "kvm"


def build_guest_topology(
    host: Host | None,
    request: GuestRequest,
    numbers: VcpuNumbering,
    *,
    llc_vcpus: int = 0,
    package_vcpus: tuple[int, ...] = (),
    shares_llc: bool = False,
) -> tuple[GuestTopology | None, tuple[Finding, ...]]:
    """Return (topology for these cells, None = the definition's; findings).

    llc_vcpus: consecutive vCPUs on each LLC if equal on all; 0 = no dies. package_vcpus: vCPUs on
    each host package, in vCPU order; () = unknown or not consecutive. shares_llc: an LLC has vCPUs
    of several cells.

    Raises InputError if a cell's vCPUs are not whole cores.
    """
    threads = numbers.placement.threads_per_core
    counts = tuple(map(len, numbers.cells))
    findings: tuple[Finding, ...] = ()
    if request.layout.cells is GuestCells.SINGLE:
        topology = _choose_flat_topology(request, counts[0], threads, package_vcpus)
    else:
        _check_threads(counts, threads)
        sockets, findings = _count_cell_sockets(
            host, request, numbers, package_vcpus, shares_llc=shares_llc
        )
        topology = GuestTopology(sockets, 1, sum(counts) // sockets // threads, threads)
    return _add_dies(topology, llc_vcpus), findings


def _add_dies(topology: GuestTopology | None, llc_vcpus: int) -> GuestTopology | None:
    """Divide the sockets into dies of this many vCPUs, if divisible."""
    if topology is None or not llc_vcpus or llc_vcpus % topology.threads:
        return topology
    dies, remainder = divmod(topology.cores * topology.threads, llc_vcpus)
    if remainder:
        return topology
    return topology._replace(dies=dies, cores=llc_vcpus // topology.threads)


def _choose_flat_topology(
    request: GuestRequest,
    vcpus: int,
    threads: int,
    package_vcpus: tuple[int, ...],
) -> GuestTopology | None:
    """Return a flat guest's topology: unchanged, unless the definition's no longer fits, or it has
    no topology and homenode chose the layout: without a topology each vCPU is a socket."""
    topology = request.guest.cpu_topology
    fits = topology is None or topology.vcpus == vcpus
    siblings = request.layout.siblings
    sockets = _count_sockets(package_vcpus, vcpus, threads)
    if siblings is Siblings.EXPOSED and threads > 1:
        _check_threads((vcpus,), threads)
        return GuestTopology(sockets, 1, vcpus // threads // sockets, threads)
    # Exposed siblings end here too, if the host has no siblings.
    hides = siblings is not Siblings.KEEP and topology is not None and topology.threads > 1
    is_chosen = topology is None and request.options.objective is not None and vcpus > 1
    if fits and not hides and not is_chosen:
        return None
    return GuestTopology(sockets, 1, vcpus // sockets, 1)


def _count_sockets(package_vcpus: tuple[int, ...], vcpus: int, threads: int) -> int:
    """Return the number of packages under the vCPUs if whole cores are equal on each; else 1."""
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


def _count_cell_sockets(
    host: Host | None,
    request: GuestRequest,
    numbers: VcpuNumbering,
    package_vcpus: tuple[int, ...],
    *,
    shares_llc: bool,
) -> tuple[int, tuple[Finding, ...]]:
    """Return the number of sockets, with findings: one for each cell if cells are equal.

    On Intel, unequal cells, or cells on one LLC, share the sockets of the host's packages, or one.
    Elsewhere sockets have the greatest size that divides every cell, or the size by which cells
    take turns: a cell then has several sockets.
    """
    counts = tuple(map(len, numbers.cells))
    threads = numbers.placement.threads_per_core
    vcpus, size = sum(counts), numbers.socket_vcpus
    subject = f"cells of {', '.join(map(str, counts))} vCPUs"
    is_equal = len(set(counts)) == 1
    may_share = may_share_sockets(host, request)
    in_turns = any(len(cell) < max(cell) - min(cell) + 1 for cell in numbers.cells)
    if may_share and (shares_llc or (size is None and (in_turns or not is_equal))):
        sockets = _count_sockets(package_vcpus, vcpus, threads)
        note = finding(
            "cells-share-socket",
            subject,
            observed=f"they share {'a socket' if sockets == 1 else f'{sockets} sockets'} of "
            f"{plural(vcpus // threads // sockets, 'core')}, "
            "as sub-NUMA clusters do; Linux older than 5.15 prints a warning at boot",
            case=None if is_equal else "unequal cells",
        )
        return sockets, (note,)
    if size is None:
        size = gcd(*counts)
    sockets = vcpus // size
    if sockets == len(counts):
        return sockets, ()
    reason = f"have no common socket larger than {plural(size // threads, 'core')}"
    if in_turns:
        reason = f"take turns by {plural(size // threads, 'core')}, so that each has its part "
        reason += "of the vCPUs that are online at the start"
    note = finding(
        "sockets-exceed-cells",
        f"{sockets} sockets for {len(counts)} guest NUMA nodes",
        observed=f"{subject} {reason}; licences and some operating systems limit sockets",
        severity=Severity.INFO if in_turns and sockets <= 4 * len(counts) else Severity.WARNING,
        case="in turns" if in_turns else None,
    )
    return sockets, (note,)
