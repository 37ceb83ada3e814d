"""Nearest cells: where devices go whose host node is none of the guest's."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.vm.plan_model import PlanFinding, plan_finding


class NearestCell(Struct, frozen=True):
    """The guest's cell that is nearest to a host node without one. distance: the host's SLIT."""

    cell: int
    node: NodeIndex
    distance: int


def nearest_cells(host: Host, nodes: Sequence[NodeIndex]) -> dict[NodeIndex, NearestCell]:
    """For each host node that is no cell's the nearest cell, the lowest among equals.

    nodes: host node of each cell. Empty where the host gives no distances: then none is nearest.
    """
    known = {node.index for node in host.nodes}
    if host.distances is None or not nodes or not known.issuperset(nodes):
        return {}
    found: dict[NodeIndex, NearestCell] = {}
    for node in known.difference(nodes):
        far = [host.distance(node, other) or 0 for other in nodes]
        cell = far.index(min(far))
        found[node] = NearestCell(cell, nodes[cell], far[cell])
    return found


def nearest_cell_finding(
    devices: Iterable[tuple[Bdf, NodeIndex]], nearest: Mapping[NodeIndex, NearestCell]
) -> tuple[PlanFinding, ...]:
    """One finding for all devices on a cell that is not their node's. devices: with their nodes."""
    by_node: dict[NodeIndex, list[Bdf]] = {}
    for bdf, node in devices:
        by_node.setdefault(node, []).append(bdf)
    if not by_node:
        return ()
    stated = "; ".join(
        f"{', '.join(map(str, bdfs))} of host node {node} on cell {nearest[node].cell} (host node "
        f"{nearest[node].node}), at distance {nearest[node].distance}"
        for node, bdfs in sorted(by_node.items())
    )
    count = sum(map(len, by_node.values()))
    return (
        plan_finding(
            "device-on-nearest-cell",
            f"{count} device{'' if count == 1 else 's'}",
            f"their host nodes have no cell, so each hangs on the nearest one: {stated}",
        ),
    )
