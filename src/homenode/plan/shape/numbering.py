"""Numbering: which vCPU numbers each guest cell has.

One cell after the other, unless the document starts some vCPUs offline (<vcpu current=>, <vcpus>)
and the first cells would have the others: then the cells take turns, socket by socket, so that the
online vCPUs are spread over them as all are. A socket has consecutive numbers, in QEMU as in Linux.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.vm.layout import GuestCells
from homenode.vm.plan_model import PlanFinding, plan_finding

MOST_SOCKETS_PER_CELL = 4
"""Beyond, a vCPU more or less online in a cell is better than more sockets."""


class Numbering(Struct, frozen=True):
    """placement: in the order of the numbers. cells: vCPUs of each guest cell. socket_vcpus: size
    of the sockets where they are what the cells took turns by; None = left open."""

    placement: Placement
    cells: tuple[CpuSet, ...]
    socket_vcpus: int | None = None


def numbering(request: GuestRequest, placement: Placement, *, may_share_sockets: bool) -> Numbering:
    """The numbers of a placement that has its vCPUs cell by cell. may_share_sockets: sockets may
    hold parts of several cells.

    Raises InputError as cell_counts.
    """
    counts = cell_counts(request, placement)
    offline = offline_vcpus(request, sum(counts))
    runs = _Way(tuple(_runs(counts)), None)
    if len(counts) == 1 or not offline or not placement.vcpu_nodes:
        return Numbering(placement, runs.cells)
    ways = [_turns(counts, offline, size) for size in _sizes(counts, placement.threads_per_core)]
    way = _best((runs, *ways), counts, offline, may_share_sockets=may_share_sockets)
    order = [v for cell in way.cells for v in cell]
    at = sorted(range(len(order)), key=order.__getitem__)
    pins = placement.vcpu_pins
    placement = replace(
        placement,
        vcpu_pins=tuple(pins[i] for i in at) if pins else (),
        vcpu_nodes=tuple(placement.vcpu_nodes[i] for i in at),
    )
    return Numbering(placement, way.cells, way.socket_vcpus)


def cell_counts(request: GuestRequest, placement: Placement) -> tuple[int, ...]:
    """vCPUs of each guest cell, in cell order. A flat guest has one cell.

    Raises InputError if a cell has none, or its vCPUs are not one after the other.
    """
    total = len(placement.vcpu_nodes) or len(placement.vcpu_pins) or request.vcpus
    if request.layout.cells is GuestCells.FLAT:
        return (total,)
    cells = len(placement.nodes)
    if not placement.vcpu_nodes:
        # Cells without pins: nothing says which vCPU belongs where, so the counts are even.
        if cells == 0 or total % cells:
            raise InputError(
                f"{total} vCPUs on {cells} guest cells: expected equal cells where vCPUs are "
                f"not pinned",
                hint="pin the vCPUs, or choose a number of vCPUs that the cells divide",
            )
        return (total // cells,) * cells
    if any(a > b for a, b in pairwise(placement.vcpu_nodes)):
        raise InputError("vCPUs of one guest cell must be neighbours: expected node by node")
    counts = tuple(placement.vcpu_nodes.count(i) for i in range(cells))
    if 0 in counts:
        raise InputError(
            f"host node {placement.nodes[counts.index(0)]}: expected vCPUs on each chosen node, "
            f"found none"
        )
    return counts


def offline_vcpus(request: GuestRequest, vcpus: int) -> CpuSet:
    """vCPUs that are not there at the start; none where the document is of another number."""
    return request.guest.offline_vcpus if vcpus == request.guest.vcpus else CpuSet()


def online_text(vcpus: CpuSet, offline: CpuSet) -> str:
    """What to say behind the vCPUs of a cell of those that are online at the start.

    >>> online_text(CpuSet(range(4)), CpuSet(range(2, 8))), online_text(CpuSet([0]), CpuSet())
    (', of which 0-1 online,', '')
    """
    online = vcpus - offline
    return f", of which {online or 'none'} online," if online != vcpus else ""


def without_online(cells: Sequence[CpuSet], offline: CpuSet) -> Iterator[PlanFinding]:
    """A warning for each cell in which the guest starts without a CPU."""
    for cell, vcpus in enumerate(cells):
        if vcpus and vcpus <= offline:
            yield plan_finding(
                "cell-without-online-vcpu",
                f"guest cell {cell}",
                f"none of its vCPUs {vcpus} is online at the start: until one is, the "
                "cell's memory and devices are remote to every CPU of the guest",
                values={"cells": len(cells)},
            )


class _Way(Struct, frozen=True):
    cells: tuple[CpuSet, ...]
    socket_vcpus: int | None

    def deviation(self, counts: Sequence[int], offline: CpuSet) -> Fraction:
        """How far a cell is at most from its share of the online vCPUs, in vCPUs."""
        online = [len(cell - offline) for cell in self.cells]
        return max(
            abs(n - Fraction(sum(online) * count, sum(counts)))
            for n, count in zip(online, counts, strict=True)
        )


def _best(
    ways: Sequence[_Way], counts: Sequence[int], offline: CpuSet, *, may_share_sockets: bool
) -> _Way:
    """Of ways with smaller and smaller sockets the first that spreads the online vCPUs as all are,
    to less than a vCPU; to a vCPU rather than with many sockets; else the nearest to that. A cell
    without an online vCPU comes last."""
    far = {way: way.deviation(counts, offline) for way in ways}
    idle = {way: sum(cell <= offline for cell in way.cells) for way in ways}
    least = min(idle.values())
    ways = [way for way in ways if idle[way] == least]
    exact = [way for way in ways if far[way] < 1]
    most = MOST_SOCKETS_PER_CELL * len(counts)
    for way in exact:
        if way.socket_vcpus is None or sum(counts) // way.socket_vcpus <= most:
            return way
    if exact and may_share_sockets:
        return _Way(exact[0].cells, None)
    for way in ways:
        if far[way] <= 1:
            return way
    return min(ways, key=far.__getitem__)


def _sizes(counts: Sequence[int], threads: int) -> Iterator[int]:
    """Sizes of sockets that no cell cuts, the largest first."""
    step = gcd(*counts)
    for size in range(step, 0, -1):
        if not step % size and not size % threads:
            yield size


def _runs(counts: Sequence[int]) -> Iterator[CpuSet]:
    start = 0
    for count in counts:
        yield CpuSet(range(start, start + count))
        start += count


def _turns(counts: Sequence[int], offline: CpuSet, size: int) -> _Way:
    """Sockets of so many numbers: those with the most online vCPUs first, each for a cell without
    any, then for the one that lacks most of its share; those without for the emptiest cell."""
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
    return _Way(tuple(map(CpuSet, cells)), size)
