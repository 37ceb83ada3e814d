"""Distances: how far nodes are apart, in SLIT units and, where HMAT gives, in ns and bytes/s."""

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.discover.nodes import NODE
from homenode.machine.discover.readings import numbered, read_number, read_word
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import LOCAL_DISTANCE, MemoryPath, NumaNode

Distances = tuple[tuple[int, ...], ...]

_BYTES_PER_MB = 1_000_000
"""The kernel says MB/s, as ACPI does, and fills the same files of CXL memory from the rates of PCIe
links, in millions. Source: Documentation/ABI/stable/sysfs-devices-node, accessY/initiators;
ACPI 6.5, 5.2.28.4; pcie_link_speed_mbps() in cxl_pci_get_bandwidth()."""


def parse_distances(text: str, source: str = "distance") -> tuple[int, ...]:
    """Distances from one NUMA node to every online node, in node order.

    Shape (nodes,); SLIT units, dimensionless, 10 = the node itself.
    Raises ParseError if a field is not an integer or the line is empty.
    Source: /sys/devices/system/node/nodeN/distance; ACPI SLIT.

    >>> parse_distances("10 21 31")
    (10, 21, 31)
    """
    fields = text.split()
    if not fields or not all(_is_distance(field) for field in fields):
        raise ParseError(source, "distances such as 10 21", text)
    return tuple(int(field) for field in fields)


def read_distances(
    snapshot: Snapshot, nodes: tuple[NumaNode, ...], online: tuple[int, ...]
) -> tuple[Distances | None, tuple[Gap, ...]]:
    """SLIT distances, shape (nodes, nodes), [from][to]; None with a gap where they do not fit.

    online: the numbers of all online nodes, which are the columns of the kernel's table.
    """
    if len(nodes) == 1:
        return ((LOCAL_DISTANCE,),), ()
    rows: list[tuple[int, ...]] = []
    for node in nodes:
        path = f"{NODE}/node{node.index}/distance"
        text = read_word(snapshot, path)
        if text is None:
            return None, (Gap("distances", f"{path} is absent or empty"),)
        row = parse_distances(text, f"{snapshot.name}: {path}")
        if len(row) != len(online):
            reason = f"{path} has {len(row)} columns, {len(online)} nodes are online"
            return None, (Gap("distances", reason),)
        distance_to = dict(zip(online, row, strict=True))
        rows.append(tuple(distance_to[other.index] for other in nodes))
    odd = [
        Gap(f"distance of node {node.index} to itself", f"firmware says {rows[i][i]}, not 10")
        for i, node in enumerate(nodes)
        if rows[i][i] != LOCAL_DISTANCE
    ]
    return tuple(rows), tuple(odd)


def read_memory_paths(snapshot: Snapshot, nodes: tuple[NumaNode, ...]) -> tuple[MemoryPath, ...]:
    """HMAT's figures for the best initiators of each target node, by (initiator, target).

    access0 counts any initiator, access1 CPUs only; one folder gives one set of figures for all of
    its initiators. Source: Documentation/admin-guide/mm/numaperf.rst.
    """
    known = CpuSet(node.index for node in nodes)
    paths: dict[tuple[int, int], MemoryPath] = {}
    for node in nodes:
        for access in ("access0", "access1"):
            folder = f"{NODE}/node{node.index}/{access}/initiators"
            initiators = numbered(snapshot.list(folder), "node")
            if not initiators:
                continue
            figures = [
                read_number(snapshot, f"{folder}/{file}")
                for file in ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")
            ]
            # 0 is what the kernel prints for figures that the firmware left out
            known_figures = [figure or None for figure in figures]
            if not any(known_figures):
                continue
            read_ns, write_ns, read_mb, write_mb = known_figures
            for initiator in initiators:
                if initiator in known:
                    paths.setdefault(
                        (initiator, node.index),
                        MemoryPath(
                            initiator=NodeIndex(initiator),
                            target=node.index,
                            read_latency_ns=read_ns,
                            write_latency_ns=write_ns,
                            read_bytes_per_s=read_mb and read_mb * _BYTES_PER_MB,
                            write_bytes_per_s=write_mb and write_mb * _BYTES_PER_MB,
                        ),
                    )
    return tuple(paths[key] for key in sorted(paths))


def _is_distance(field: str) -> bool:
    return field.isascii() and field.isdigit() and len(field) <= 5
