"""Checks: what was expected of a guest next to what it reports, with a finding where they differ.

Cells and nodes are matched by their vCPUs: a guest's kernel numbers nodes by the order in which it
meets them, which is that of the vCPUs, whatever their cells are called.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Severity
from homenode.units import MIB, format_bytes
from homenode.verify.guest.expectation import Expectation
from homenode.verify.guest.observation import Observation, ObservedNode
from homenode.vm.model import VmCell

KERNEL_SHARE = 16
"""One part in so many of a node's memory may be the kernel's own tables."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the comparison. finding: None where expected and observed agree."""

    subject: str
    expected: str
    observed: str
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What the observer must forgive.

    cpu_substituted: why sockets, siblings and LLCs say nothing; None where they do.
    kernel_bytes: memory on any node that the guest's kernel may keep for itself.
    ballooned_bytes: what a balloon may have taken, of any node.
    """

    cpu_substituted: str | None = None
    kernel_bytes: int = 1024 * MIB
    ballooned_bytes: int = 0


def compare(
    expected: Expectation, observed: Observation, tolerance: Tolerance
) -> tuple[Check, ...]:
    """Every line of the comparison but devices, in the order of a reader's interest."""
    node_of_cell = match_nodes(expected, observed)
    return (
        *_vcpus(expected, observed),
        *_nodes(expected, observed, node_of_cell),
        *_distances(expected, observed, node_of_cell),
        *_memory(expected, observed, node_of_cell, tolerance),
        *_cpu_groups(expected, observed, tolerance),
    )


def match_nodes(expected: Expectation, observed: Observation) -> dict[int, ObservedNode]:
    """Cell -> the guest's node that holds most of its vCPUs; the rest in order of their numbers."""
    left = list(observed.nodes)
    found: dict[int, ObservedNode] = {}

    def shared(cell: VmCell, node: ObservedNode) -> int:
        return len(cell.vcpus & node.vcpus)

    pairs = sorted(
        ((shared(cell, node), cell, node) for cell in expected.cells for node in left),
        key=lambda pair: (-pair[0], pair[1].id, pair[2].index),
    )
    for count, cell, node in pairs:
        if count and cell.id not in found and node in left:
            found[cell.id] = node
            left.remove(node)
    for cell in expected.cells:
        if cell.id not in found and left:
            found[cell.id] = left.pop(0)
    return found


def check(
    id: str,
    subject: str,
    expected: str,
    observed: str,
    agree: bool,
    source: str,
    *,
    severity: Severity | None = None,
    cost: str | UnsetType | None = UNSET,
    fix: str | UnsetType | None = UNSET,
) -> Check:
    """A line, with the finding `guest-ID` unless the two agree."""
    if agree:
        return Check(subject, expected, observed, None)
    wrong = finding(
        f"guest-{id}", subject, expected, observed, source, severity=severity, cost=cost, fix=fix
    )
    return Check(subject, expected, observed, wrong)


def _vcpus(expected: Expectation, observed: Observation) -> Iterator[Check]:
    wanted = CpuSet(range(expected.vm.vcpus))
    yield check(
        "vcpus",
        "vCPUs",
        str(wanted),
        str(observed.vcpus),
        wanted == observed.vcpus,
        observed.source,
    )


def _nodes(
    expected: Expectation, observed: Observation, node_of_cell: dict[int, ObservedNode]
) -> Iterator[Check]:
    wanted, found = len(expected.cells), len(observed.nodes)
    yield check(
        "nodes",
        "NUMA nodes",
        str(wanted),
        str(found),
        wanted == found,
        observed.source,
    )
    for cell in expected.cells:
        node = node_of_cell.get(cell.id)
        yield check(
            "node-vcpus",
            f"cell {cell.id}",
            f"vCPUs {cell.vcpus or 'none'}",
            "no such node" if node is None else f"node {node.index}: vCPUs {node.vcpus or 'none'}",
            node is not None and node.vcpus == cell.vcpus,
            observed.source,
        )


def _distances(
    expected: Expectation, observed: Observation, node_of_cell: dict[int, ObservedNode]
) -> Iterator[Check]:
    if expected.distances is None:
        return
    position = {node.index: i for i, node in enumerate(observed.nodes)}
    nodes = [node_of_cell.get(cell.id) for cell in expected.cells]
    for cell, row in zip(expected.cells, expected.distances, strict=True):
        here = node_of_cell.get(cell.id)
        found = None
        if observed.distances is not None and here is not None and None not in nodes:
            whole = observed.distances[position[here.index]]
            found = tuple(whole[position[node.index]] for node in nodes if node is not None)
        yield check(
            "distances",
            f"distances from cell {cell.id}",
            " ".join(map(str, row)),
            "none" if found is None else " ".join(map(str, found)),
            found == row,
            observed.source,
        )


def _memory(
    expected: Expectation,
    observed: Observation,
    node_of_cell: dict[int, ObservedNode],
    tolerance: Tolerance,
) -> Iterator[Check]:
    for cell in expected.cells:
        node = node_of_cell.get(cell.id)
        if node is None:
            continue
        found = node.memory_bytes
        least = cell.memory_bytes - cell.memory_bytes // KERNEL_SHARE - tolerance.kernel_bytes
        least -= tolerance.ballooned_bytes
        more = expected.memory_device_bytes(cell.id)
        wanted = f"{format_bytes(cell.memory_bytes)} less the kernel's own"
        if more:
            wanted += f", up to {format_bytes(more)} more in memory devices"
        if tolerance.ballooned_bytes:
            wanted += f", {format_bytes(tolerance.ballooned_bytes)} for the balloon"
        yield check(
            "node-memory",
            f"memory of cell {cell.id}",
            wanted,
            "not given" if found is None else format_bytes(found),
            found is not None and least <= found <= cell.memory_bytes + more + MIB,
            observed.source,
            severity=None if found is not None else Severity.INCONCLUSIVE,
        )


def _cpu_groups(
    expected: Expectation, observed: Observation, tolerance: Tolerance
) -> Iterator[Check]:
    topology = expected.vm.cpu_topology
    reason = tolerance.cpu_substituted
    if topology is not None:
        _, dies, per_die, threads = topology
        sockets = expected.runs_of(dies * per_die * threads)
        yield _groups(
            "sockets",
            "sockets",
            sockets,
            observed.packages or None,
            observed.source,
            None,
        )
        cores = expected.runs_of(threads)
        yield _groups(
            "siblings",
            "cores, siblings",
            cores,
            observed.cores or None,
            observed.source,
            reason,
        )
    if expected.l3 is not None:
        yield _groups(
            "llcs",
            "L3 caches",
            expected.l3,
            observed.l3,
            observed.source,
            reason,
        )


def _groups(
    id: str,
    subject: str,
    wanted: tuple[CpuSet, ...],
    found: tuple[CpuSet, ...] | None,
    source: str,
    reason: str | None,
) -> Check:
    expected, observed = _stated(wanted), "not given" if found is None else _stated(found)
    if reason is not None or found is None:
        why = observed if reason is None else f"{observed}; {reason}"
        doubt = check(
            id,
            subject,
            expected,
            why,
            False,
            source,
            severity=Severity.INCONCLUSIVE,
            cost=None,
            fix=None,
        )
        return Check(subject, expected, observed, doubt.finding)
    return check(
        id,
        subject,
        expected,
        observed,
        set(wanted) == set(found),
        source,
    )


def _stated(groups: tuple[CpuSet, ...]) -> str:
    if not groups:
        return "none"
    shown = " ".join(str(group) for group in groups[:8])
    more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
    return f"{len(groups)}: vCPUs {shown}{more}"
