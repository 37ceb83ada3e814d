"""Nodes: NUMA nodes of a host, their CPUs, memory, huge pages and distances.

Source: Documentation/ABI/stable/sysfs-devices-node.
"""

import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import MAX_PU_INDEX, CpuSet, NodeIndex, PackageIndex
from homenode.errors import InputError, ParseError
from homenode.findings import Gap
from homenode.machine.discover.readings import (
    list_numbers,
    list_readable,
    parse_address,
    read_lines,
    read_mask,
    read_number,
    read_pus,
    read_word,
)
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import (
    LOCAL_DISTANCE,
    MemoryKind,
    NumaNode,
    Package,
    PagePool,
)
from homenode.text import format_cpus, plural
from homenode.units import KIB, parse_whole

NODE = "/sys/devices/system/node"
_MAX_NODES = 1024

_MEMORY_LINE = re.compile(
    r"(?:Node +\d+ +)?(MemTotal|MemFree|Active\(file\)|Inactive\(file\)|SReclaimable): +"
    r"(\d{1,16}) kB\s*",
    re.ASCII,
)
_POOL_NAME = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


class Nodes(Struct, frozen=True):
    """The online nodes, ascending."""

    nodes: tuple[NumaNode, ...]
    gaps: tuple[Gap, ...]
    online: tuple[int, ...]  # their numbers, with those of nodes that were omitted
    assumed: bool = False  # none is shown


def read_nodes(snapshot: Snapshot, online: CpuSet, packages: tuple[Package, ...]) -> Nodes:
    """Return the nodes of a snapshot; name_memory sets the kind of their memory.

    A kernel without NUMA has no node directory: the host then is one node, with a gap. A node with
    CPUs of a lower one is omitted, as hwloc does, with a gap: some firmware lists every CPU in
    each.
    Raises InputError if an online node has no directory, HostError if the
    directory cannot be read.
    """
    directories = list_numbers(list_readable(snapshot, NODE), "node")
    if not directories:
        return _make_single_node(snapshot, online, packages)
    if directories[-1] > MAX_PU_INDEX or len(directories) > _MAX_NODES:
        expected = f"directories node0 to node{MAX_PU_INDEX}, and as Linux at most {_MAX_NODES}"
        raise ParseError(
            f"{snapshot.name}: {NODE}", expected, f"{len(directories)} up to node{directories[-1]}"
        )
    gaps: list[Gap] = []
    numbers = _list_online_nodes(snapshot, directories, gaps)
    pus_of_node: dict[int, CpuSet] = {}
    in_use = CpuSet()
    for number in numbers:
        pus = _read_node_pus(snapshot, number, online, gaps)
        if shared_pus := pus & in_use:
            reason = f"CPUs {shared_pus} are in a lower node too; omitted, with its memory"
            gaps.append(Gap(f"node {number}", reason))
            continue
        pus_of_node[number] = pus
        in_use = in_use | pus
    if homeless := online - in_use:
        reason = f"not in any online node (online: {', '.join(map(str, numbers))})"
        gaps.append(Gap(f"node of {format_cpus(homeless)}", reason))
    initiators = read_pus(snapshot, f"{NODE}/has_generic_initiator") or CpuSet()
    nodes: list[NumaNode] = []
    for number, pus in pus_of_node.items():
        index = NodeIndex(number)
        total, free = _read_memory(snapshot, f"{NODE}/node{number}/meminfo")
        for quantity, value in (("memory", total), ("free memory", free)):
            if value is None:
                reason = f"{NODE}/node{number}/meminfo has no value"
                gaps.append(Gap(f"node {number} {quantity}", reason))
        nodes.append(
            NumaNode(
                index=index,
                pus=pus,
                memory_bytes=total,
                memory_free_bytes=free,
                page_pools=_page_pools(snapshot, f"{NODE}/node{number}/hugepages"),
                generic_initiator=number in initiators,
                package=find_package(pus, packages),
            )
        )
    return Nodes(tuple(nodes), tuple(gaps), numbers)


def find_package(pus: CpuSet, packages: tuple[Package, ...]) -> PackageIndex | None:
    """Return the package that holds all the CPUs; None for no CPUs and for several packages."""
    if not pus:
        return None
    return next((package.index for package in packages if pus <= package.pus), None)


def _list_online_nodes(
    snapshot: Snapshot, directories: tuple[int, ...], gaps: list[Gap]
) -> tuple[int, ...]:
    online = read_pus(snapshot, f"{NODE}/online")
    if online is None:
        gaps.append(Gap("online nodes", f"{NODE}/online is absent; taken from the directories"))
        return directories
    missing = online - CpuSet(directories)
    if missing:
        raise InputError(
            f"{snapshot.name}: {NODE}/online lists nodes {online}, but nodes {missing} have no "
            "directory there",
            hint="the tree is incomplete: capture the host again",
        )
    for file in ("has_cpu", "has_memory"):
        named_nodes = read_pus(snapshot, f"{NODE}/{file}") or CpuSet()
        if named_nodes - online:
            gaps.append(
                Gap(f"nodes {named_nodes - online}", f"{NODE}/{file} names them, online does not")
            )
    return tuple(int(number) for number in online)


def _read_node_pus(snapshot: Snapshot, number: int, online: CpuSet, gaps: list[Gap]) -> CpuSet:
    directory = f"{NODE}/node{number}"
    pus = read_pus(snapshot, f"{directory}/cpulist", f"{directory}/cpumap")
    if pus is None:
        list_readable(snapshot, directory)
        raise InputError(
            f"{snapshot.name}: no {directory}/cpulist or cpumap",
            hint="the tree is incomplete: capture the host again",
        )
    mask = read_mask(snapshot, f"{directory}/cpumap")
    if mask is not None and mask & online != pus & online:
        reason = f"cpulist has {pus & online}, cpumap has {mask & online}; used cpulist"
        gaps.append(Gap(f"node {number} CPUs", reason))
    return pus & online


def _make_single_node(snapshot: Snapshot, online: CpuSet, packages: tuple[Package, ...]) -> Nodes:
    total, free = _read_memory(snapshot, "/proc/meminfo")
    node = NumaNode(
        index=NodeIndex(0),
        pus=online,
        memory_bytes=total,
        memory_free_bytes=free,
        page_pools=_page_pools(snapshot, "/sys/kernel/mm/hugepages"),
        package=find_package(online, packages),
    )
    gaps = [Gap("NUMA nodes", f"{NODE} is absent: the host counts as one node")]
    if total is None:
        gaps.append(Gap("node 0 memory", "/proc/meminfo has no value"))
    return Nodes((node,), tuple(gaps), (0,), assumed=True)


def _read_memory(snapshot: Snapshot, path: str) -> tuple[int | None, int | None]:
    """Return (total, free) in bytes of lines such as "Node 0 MemTotal: 32489480 kB" (kB is KiB).

    Free memory is that which a new VM can get, including the page cache and reclaimable slabs,
    which are most of the memory on a host with a long uptime. Nodes have no MemAvailable of their
    own. Source: si_mem_available() in mm/show_mem.c, less its reserves.
    """
    bytes_of_key: dict[str, int] = {}
    for line in read_lines(snapshot, path):
        match = _MEMORY_LINE.fullmatch(line)
        if match is not None:
            bytes_of_key.setdefault(match[1], int(match[2]) * KIB)
    free = bytes_of_key.get("MemFree")
    if free is not None:
        free += sum(
            bytes_of_key.get(name, 0) for name in ("Active(file)", "Inactive(file)", "SReclaimable")
        )
    return bytes_of_key.get("MemTotal"), free


def _page_pools(snapshot: Snapshot, directory: str) -> tuple[PagePool, ...]:
    pools: list[PagePool] = []
    for name in snapshot.list(directory) or ():
        match = _POOL_NAME.fullmatch(name)
        if match is None:
            continue
        total = read_number(snapshot, f"{directory}/{name}/nr_hugepages")
        free = read_number(snapshot, f"{directory}/{name}/free_hugepages")
        if total is not None and free is not None:
            pools.append(PagePool(int(match[1]) * KIB, total, free))
    return tuple(sorted(pools))


Distances = tuple[tuple[int, ...], ...]


def parse_distances(text: str, source: str = "distance") -> tuple[int, ...]:
    """Return distances from one NUMA node to every online node, in node order.

    Shape (nodes,); SLIT units, dimensionless, 10 = the node itself.
    Raises ParseError if a field is not an integer or the line is empty.
    Source: /sys/devices/system/node/nodeN/distance; ACPI SLIT.

    >>> parse_distances("10 21 31")
    (10, 21, 31)
    """
    distances = [parse_whole(field, digits=5) for field in text.split()]
    if not distances or None in distances:
        raise ParseError(source, "distances such as 10 21", text)
    return tuple(distance for distance in distances if distance is not None)


def read_distances(
    snapshot: Snapshot, nodes: tuple[NumaNode, ...], online: tuple[int, ...]
) -> tuple[Distances | None, tuple[Gap, ...]]:
    """Return SLIT distances, shape (nodes, nodes), [from][to]; None with a gap if they do not fit.
    online: the numbers of all online nodes, which are the columns of the kernel's table."""
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
            reason = (
                f"{path} has {plural(len(row), 'column')} for {plural(len(online), 'online node')}"
            )
            return None, (Gap("distances", reason),)
        distance_to = dict(zip(online, row, strict=True))
        rows.append(tuple(distance_to[other.index] for other in nodes))
    odd = [
        Gap(f"distance of node {node.index} to itself", f"firmware says {rows[i][i]}, not 10")
        for i, node in enumerate(nodes)
        if rows[i][i] != LOCAL_DISTANCE
    ]
    return tuple(rows), tuple(odd)


_GPUS = "/proc/driver/nvidia/gpus"
_DAX = "/sys/bus/dax/devices"


def read_driver_gpus(snapshot: Snapshot) -> tuple[dict[NodeIndex, Bdf], tuple[Bdf, ...]]:
    """Return GPUs by the node of their memory, and every GPU that the NVIDIA driver has, ascending.

    Source: numa_status of NVIDIA's driver, such as "Node: 4" and "Status: online" on lines; seen on
    a POWER9 with V100s, documented for GH200. "Status: offline" or node -1 means no node.
    """
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    gpus: list[Bdf] = []
    for name in snapshot.list(_GPUS) or ():
        bdf = parse_address(name)
        if bdf is None:
            continue  # a control file of some driver version
        gpus.append(bdf)
        fields: dict[str, str] = {}
        for line in read_lines(snapshot, f"{_GPUS}/{name}/numa_status"):
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        node = parse_whole(fields.get("Node"), digits=6)
        is_online = fields.get("Status", "online").lower() == "online"
        if is_online and node is not None:
            gpu_of_node[NodeIndex(node)] = bdf
    return gpu_of_node, tuple(sorted(gpus))


def name_memory(
    snapshot: Snapshot,
    nodes: tuple[NumaNode, ...],
    by_driver: Mapping[NodeIndex, Bdf],
    by_tool: Mapping[NodeIndex, Bdf],
) -> tuple[tuple[NumaNode, ...], tuple[Gap, ...]]:
    """Return the nodes with the kind of their memory. by_driver, by_tool: GPU by node, of
    numa_status and of nvidia-smi; the driver decides.

    A node with CPUs has DRAM unless another kind is known. A node without CPUs has an unknown kind
    unless a GPU's driver or a DAX device names it.
    """
    gaps: list[Gap] = []
    gpu_of_node = {**by_tool, **by_driver}
    for index in sorted(set(by_driver) & set(by_tool)):
        if by_driver[index] != by_tool[index]:
            reason = f"the driver has {by_driver[index]}, nvidia-smi has {by_tool[index]}"
            gaps.append(Gap(f"GPU of node {index}", f"{reason}; used the driver's"))
    present = {node.index for node in nodes}
    for index in sorted(set(gpu_of_node) - present):
        reason = f"{gpu_of_node[index]} has its memory there, but the node is not online"
        gaps.append(Gap(f"node {index}", reason))
    dax = _find_dax_nodes(snapshot)
    named_nodes: list[NumaNode] = []
    for node in nodes:
        gpu = gpu_of_node.get(node.index)
        kind = MemoryKind.DRAM if node.pus else None
        if gpu is not None:
            kind = MemoryKind.GPU
        elif node.index in dax:
            kind = MemoryKind.OTHER
        elif kind is None and node.memory_bytes != 0:
            reason = "no CPUs, and neither the GPU driver nor a DAX device names the node"
            gaps.append(Gap(f"node {node.index} kind of memory", reason))
        named_nodes.append(replace(node, memory_kind=kind, gpu=gpu))
    return tuple(named_nodes), tuple(gaps)


def _find_dax_nodes(snapshot: Snapshot) -> set[int]:
    """Return nodes with memory of a DAX device: persistent, CXL or high-bandwidth."""
    words = (
        read_word(snapshot, f"{_DAX}/{device}/target_node") for device in snapshot.list(_DAX) or ()
    )
    nodes = (parse_whole(word, digits=6) for word in words)
    return {node for node in nodes if node is not None}
