"""hwloc nodes: NUMA nodes and their distances from hwloc's XML."""

from collections.abc import Sequence

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.discover.distances import Distances
from homenode.machine.discover.nodes import package_of
from homenode.machine.tools.hwloc_xml import HwlocDistances, HwlocObject, number, os_index
from homenode.machine.topology import LOCAL_DISTANCE, MemoryKind, NumaNode, Package, PagePool

_BASE_PAGE_BYTES = 65536  # the largest base page of any architecture; huge pages are larger


def read_hwloc_nodes(
    found: Sequence[tuple[HwlocObject, CpuSet]],
    listed: CpuSet,
    packages: tuple[Package, ...],
    source: str,
) -> tuple[tuple[NumaNode, ...], tuple[Gap, ...]]:
    """The nodes. hwloc gives a CPU-less node the PUs that are nearest to it; here such a node has
    no PUs. Of the nodes that share PUs, the one with the fewest and then the lowest number has
    them, nodes of special memory last."""
    gaps: list[Gap] = []
    order = sorted(
        found,
        key=lambda pair: (
            _special_kind(pair[0]) is not None,
            len(pair[1]),
            os_index(pair[0], source),
        ),
    )
    in_use = CpuSet()
    own: dict[int, CpuSet] = {}
    shared: list[int] = []
    for obj, near in order:
        index = os_index(obj, source)
        own[index] = CpuSet() if _special_kind(obj) else (near & listed) - in_use
        in_use = in_use | own[index]
        if near & listed and not own[index]:
            shared.append(index)
    if shared:
        names = ", ".join(str(number) for number in sorted(shared))
        reason = "hwloc shows which PUs are nearest to a node, not which are its own"
        gaps.append(Gap(f"PUs of nodes {names}", f"{reason}; counted as CPU-less"))
    if listed - in_use:
        gaps.append(Gap(f"node of PUs {listed - in_use}", "in no node of the XML"))
    nodes: list[NumaNode] = []
    for obj, _ in sorted(found, key=lambda pair: os_index(pair[0], source)):
        index = os_index(obj, source)
        memory = number(obj.attributes.get("local_memory"))
        if memory is None and not any(key.startswith("pages of ") for key in obj.infos):
            gaps.append(Gap(f"node {index} memory", "the XML does not say"))
        elif memory is None:
            memory = 0  # hwloc leaves local_memory out where it is 0
        pools, unknown_pools = _pools(obj)
        if unknown_pools:
            sizes = ", ".join(map(str, unknown_pools))
            reason = "the XML holds totals, not what is free"
            gaps.append(Gap(f"node {index} huge pages of {sizes} bytes", reason))
        special = _special_kind(obj)
        kind = special or (MemoryKind.DRAM if own[index] else None)
        if kind is None and memory != 0:
            gaps.append(Gap(f"node {index} kind of memory", "no PUs, and hwloc names no kind"))
        nodes.append(
            NumaNode(
                index=NodeIndex(index),
                pus=own[index],
                memory_bytes=memory,
                page_pools=pools,
                memory_kind=kind,
                gpu=_gpu_of(obj),
                package=package_of(own[index], packages),
            )
        )
    if not nodes:
        gaps.append(Gap("NUMA nodes", "the XML holds none: the host counts as one node"))
        nodes.append(NumaNode(NodeIndex(0), listed, None, package=package_of(listed, packages)))
    return tuple(nodes), tuple(gaps)


def _special_kind(obj: HwlocObject) -> MemoryKind | None:
    """Memory that is no plain DRAM, by subtype ("GPUMemory", "NVM", "HBM", "CXL-DRAM")."""
    subtype = obj.attributes.get("subtype", "") or obj.infos.get("DAXType", "")
    if subtype.startswith("GPUMemory"):
        return MemoryKind.GPU
    return None if subtype in ("", "DRAM") else MemoryKind.OTHER


def _gpu_of(obj: HwlocObject) -> Bdf | None:
    text = obj.infos.get("PCIBusID")
    return Bdf.parse(text) if text and _special_kind(obj) is MemoryKind.GPU else None


def _pools(obj: HwlocObject) -> tuple[tuple[PagePool, ...], tuple[int, ...]]:
    """Pools of huge pages that are empty, and the page sizes of those that are not: hwloc shows how
    many pages there are, and not how many of them are free."""
    empty: list[PagePool] = []
    unknown: list[int] = []
    for key, count in obj.infos.items():
        size, total = number(key.removeprefix("pages of ")), number(count)
        if not key.startswith("pages of ") or not size or size <= _BASE_PAGE_BYTES:
            continue
        if total == 0:
            empty.append(PagePool(size, 0, 0))
        else:
            unknown.append(size)
    return tuple(sorted(empty)), tuple(sorted(unknown))


def node_distances(
    matrices: tuple[HwlocDistances, ...], nodes: tuple[NumaNode, ...]
) -> tuple[Distances | None, tuple[Gap, ...]]:
    """SLIT distances, shape (nodes, nodes), [from][to]; None with a gap where there are none."""
    if len(nodes) == 1:
        return ((LOCAL_DISTANCE,),), ()
    wanted = [f"NUMANode:{node.index}" for node in nodes]
    for matrix in matrices:
        # "NUMALatency" is the SLIT; other matrices of nodes are somebody's measurements
        if matrix.name not in ("", "NUMALatency") or not matrix.by_os_index:
            continue
        place = {name: i for i, name in enumerate(matrix.objects)}
        if all(name in place for name in wanted):
            rows = [[matrix.values[place[a]][place[b]] for b in wanted] for a in wanted]
            return tuple(tuple(row) for row in rows), ()
    return None, (Gap("distances", "the XML holds none for these nodes"),)
