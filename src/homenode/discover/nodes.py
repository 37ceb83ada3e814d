"""Nodes: NUMA nodes of a host, their PUs, memory and huge pages, from sysfs.

Source: Documentation/ABI/stable/sysfs-devices-node.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.discover.readings import numbered, read_number, read_pus, read_word
from homenode.errors import InputError, ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex, PackageIndex
from homenode.snapshot.protocol import Snapshot
from homenode.topology import MemoryKind, NumaNode, Package, PagePool
from homenode.units import KIB

NODE = "/sys/devices/system/node"

_MEMORY_LINE = re.compile(r"(?:Node +\d+ +)?(MemTotal|MemFree): +(\d{1,16}) kB\s*", re.ASCII)
_POOL_NAME = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The online nodes, ascending, and the node of each PU that has one."""

    nodes: tuple[NumaNode, ...]
    node_of_pu: dict[PuIndex, NodeIndex]
    gaps: tuple[Gap, ...]


def read_nodes(
    snapshot: Snapshot,
    online: CpuSet,
    packages: tuple[Package, ...],
    gpu_of_node: Mapping[NodeIndex, Bdf],
) -> Nodes:
    """The nodes of a snapshot. gpu_of_node: GPUs whose memory is known to be a node.

    A kernel without NUMA has no node folder: the host then is one node, with a gap.
    Raises InputError where a node that is said to be online has no folder.
    """
    folders = numbered(snapshot.list(NODE), "node")
    if not folders:
        return _single_node(snapshot, online, packages)
    gaps: list[Gap] = []
    numbers = _online_nodes(snapshot, folders, gaps)
    pus_of_node: dict[int, CpuSet] = {}
    node_of_pu: dict[PuIndex, NodeIndex] = {}
    for number in numbers:
        pus = _pus_of_node(snapshot, number, online, gaps)
        shared = CpuSet(pu for pu in pus if pu in node_of_pu)
        if shared:
            raise InputError(
                f"{snapshot.name}: {NODE}: expected each PU in one node, found PUs {shared} in "
                f"node {number} and in an earlier one"
            )
        pus_of_node[number] = pus
        node_of_pu |= dict.fromkeys(pus, NodeIndex(number))
    homeless = online - CpuSet(node_of_pu)
    if homeless:
        reason = f"in no online node (those are {', '.join(map(str, numbers))})"
        gaps.append(Gap(f"node of PUs {homeless}", reason))
    initiators = read_pus(snapshot, f"{NODE}/has_generic_initiator") or CpuSet()
    extra_memory = _dax_nodes(snapshot)
    nodes: list[NumaNode] = []
    for number in numbers:
        index, pus = NodeIndex(number), pus_of_node[number]
        total, free = _memory(snapshot, f"{NODE}/node{number}/meminfo")
        for what, value in (("memory", total), ("free memory", free)):
            if value is None:
                reason = f"{NODE}/node{number}/meminfo does not say"
                gaps.append(Gap(f"node {number} {what}", reason))
        gpu = gpu_of_node.get(index)
        kind = _memory_kind(bool(pus), total, gpu, number in extra_memory)
        if kind is None and total != 0:
            reason = "no PUs, and neither the GPU driver nor a DAX device names the node"
            gaps.append(Gap(f"node {number} kind of memory", reason))
        nodes.append(
            NumaNode(
                index=index,
                pus=pus,
                memory_bytes=total,
                memory_free_bytes=free,
                page_pools=_page_pools(snapshot, f"{NODE}/node{number}/hugepages"),
                memory_kind=kind,
                gpu=gpu,
                generic_initiator=number in initiators,
                package=package_of(pus, packages),
            )
        )
    return Nodes(tuple(nodes), node_of_pu, tuple(gaps))


def package_of(pus: CpuSet, packages: tuple[Package, ...]) -> PackageIndex | None:
    """The package that holds all the PUs; None for no PUs and for PUs of several packages."""
    if not pus:
        return None
    return next((package.index for package in packages if pus <= package.pus), None)


def _memory_kind(
    has_pus: bool, memory_bytes: int | None, gpu: Bdf | None, is_dax: bool
) -> MemoryKind | None:
    """What a node's memory is. A node with PUs has DRAM unless something else is known of it."""
    if gpu is not None:
        return MemoryKind.GPU
    if is_dax:
        return MemoryKind.OTHER
    return MemoryKind.DRAM if has_pus else None


def _online_nodes(snapshot: Snapshot, folders: tuple[int, ...], gaps: list[Gap]) -> tuple[int, ...]:
    online = read_pus(snapshot, f"{NODE}/online")
    if online is None:
        gaps.append(Gap("online nodes", f"{NODE}/online is absent; taken from the folders"))
        return folders
    missing = online - CpuSet(folders)
    if missing:
        raise InputError(
            f"{snapshot.name}: {NODE}/online lists nodes {online}, but nodes {missing} have no "
            "folder there",
            hint="the tree is incomplete: capture the host again",
        )
    for file in ("has_cpu", "has_memory"):
        named = read_pus(snapshot, f"{NODE}/{file}") or CpuSet()
        if named - online:
            gaps.append(
                Gap(f"nodes {named - online}", f"{NODE}/{file} names them, online does not")
            )
    return tuple(int(number) for number in online)


def _pus_of_node(snapshot: Snapshot, number: int, online: CpuSet, gaps: list[Gap]) -> CpuSet:
    folder = f"{NODE}/node{number}"
    pus = read_pus(snapshot, f"{folder}/cpulist", f"{folder}/cpumap")
    if pus is None:
        raise InputError(
            f"{snapshot.name}: expected {folder}/cpulist or cpumap, found neither",
            hint="the tree is incomplete: capture the host again",
        )
    mask = snapshot.read_text(f"{folder}/cpumap")
    if mask is not None:
        from_mask = CpuSet.parse_mask(mask.strip(), f"{snapshot.name}: {folder}/cpumap")
        if from_mask & online != pus & online:
            reason = f"cpulist says {pus & online}, cpumap says {from_mask & online}; used cpulist"
            gaps.append(Gap(f"node {number} PUs", reason))
    return pus & online


def _single_node(snapshot: Snapshot, online: CpuSet, packages: tuple[Package, ...]) -> Nodes:
    total, free = _memory(snapshot, "/proc/meminfo")
    node = NumaNode(
        index=NodeIndex(0),
        pus=online,
        memory_bytes=total,
        memory_free_bytes=free,
        page_pools=_page_pools(snapshot, "/sys/kernel/mm/hugepages"),
        package=package_of(online, packages),
    )
    gaps = [Gap("NUMA nodes", f"{NODE} is absent: the host counts as one node")]
    if total is None:
        gaps.append(Gap("node 0 memory", "/proc/meminfo does not say"))
    return Nodes((node,), dict.fromkeys(online, NodeIndex(0)), tuple(gaps))


def _memory(snapshot: Snapshot, path: str) -> tuple[int | None, int | None]:
    """(total, free) in bytes of lines such as "Node 0 MemTotal:  32489480 kB" (kB is KiB)."""
    found: dict[str, int] = {}
    for line in (snapshot.read_text(path) or "").splitlines():
        match = _MEMORY_LINE.fullmatch(line)
        if match is not None:
            found.setdefault(match[1], int(match[2]) * KIB)
    return found.get("MemTotal"), found.get("MemFree")


def _page_pools(snapshot: Snapshot, folder: str) -> tuple[PagePool, ...]:
    pools: list[PagePool] = []
    for name in snapshot.list(folder) or ():
        match = _POOL_NAME.fullmatch(name)
        if match is None:
            continue
        total = read_number(snapshot, f"{folder}/{name}/nr_hugepages")
        free = read_number(snapshot, f"{folder}/{name}/free_hugepages")
        if total is not None and free is not None:
            pools.append(PagePool(int(match[1]) * KIB, total, free))
    return tuple(sorted(pools))


def _dax_nodes(snapshot: Snapshot) -> set[int]:
    """Nodes whose memory came online from a DAX device: persistent, CXL or high-bandwidth."""
    nodes: set[int] = set()
    for device in snapshot.list("/sys/bus/dax/devices") or ():
        word = read_word(snapshot, f"/sys/bus/dax/devices/{device}/target_node")
        if word is not None and word.isascii() and word.isdigit():
            nodes.add(int(word))
    return nodes


def read_gpu_status(snapshot: Snapshot) -> tuple[dict[NodeIndex, Bdf], tuple[Bdf, ...]]:
    """GPUs by the node of their memory, and every GPU that the NVIDIA driver has.

    Source: numa_status of NVIDIA's driver, such as "Node: 4\\nStatus: online"; seen on a POWER9
    with V100 and documented for GH200. "Status: offline" or node -1 means no node.
    """
    folder = "/proc/driver/nvidia/gpus"
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    gpus: list[Bdf] = []
    for name in snapshot.list(folder) or ():
        try:
            bdf = Bdf.parse(name)
        except ParseError:
            continue  # a control file of some driver version
        gpus.append(bdf)
        fields: dict[str, str] = {}
        for line in (snapshot.read_text(f"{folder}/{name}/numa_status") or "").splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        node = fields.get("Node", "")
        if node.isascii() and node.isdigit() and fields.get("Status", "online").lower() == "online":
            gpu_of_node[NodeIndex(int(node))] = bdf
    return gpu_of_node, tuple(sorted(gpus))
