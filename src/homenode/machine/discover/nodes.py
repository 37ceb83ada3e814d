"""Nodes: NUMA nodes of a host, their PUs, memory and huge pages, from sysfs.

Source: Documentation/ABI/stable/sysfs-devices-node.
"""

import re

from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, CpuSet, PuIndex
from homenode.errors import InputError, ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex, PackageIndex
from homenode.machine.discover.readings import (
    list_readable,
    numbered,
    read_lines,
    read_mask,
    read_number,
    read_pus,
)
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import NumaNode, Package, PagePool
from homenode.units import KIB

NODE = "/sys/devices/system/node"
_MOST_NODES = 1024

_MEMORY_LINE = re.compile(
    r"(?:Node +\d+ +)?(MemTotal|MemFree|Active\(file\)|Inactive\(file\)|SReclaimable): +"
    r"(\d{1,16}) kB\s*",
    re.ASCII,
)
_POOL_NAME = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


class Nodes(Struct, frozen=True):
    """The online nodes, ascending, and the node of each PU that has one. assumed: none is shown.
    online: their numbers, with those of nodes that were left out."""

    nodes: tuple[NumaNode, ...]
    node_of_pu: dict[PuIndex, NodeIndex]
    gaps: tuple[Gap, ...]
    online: tuple[int, ...]
    assumed: bool = False


def read_nodes(snapshot: Snapshot, online: CpuSet, packages: tuple[Package, ...]) -> Nodes:
    """The nodes of a snapshot; gpu_memory.py says what the memory of each is.

    A kernel without NUMA has no node folder: the host then is one node, with a gap. A node with PUs
    of a lower one is left out, as hwloc does, with a gap: some firmware lists every PU in each.
    Raises InputError where a node that is said to be online has no folder, HostError where the
    folder cannot be read.
    """
    folders = numbered(list_readable(snapshot, NODE), "node")
    if not folders:
        return _single_node(snapshot, online, packages)
    if folders[-1] > MAX_PU_INDEX or len(folders) > _MOST_NODES:
        expected = f"folders node0 to node{MAX_PU_INDEX}, and as Linux at most {_MOST_NODES}"
        raise ParseError(
            f"{snapshot.name}: {NODE}", expected, f"{len(folders)} up to node{folders[-1]}"
        )
    gaps: list[Gap] = []
    numbers = _online_nodes(snapshot, folders, gaps)
    pus_of_node: dict[int, CpuSet] = {}
    node_of_pu: dict[PuIndex, NodeIndex] = {}
    for number in numbers:
        pus = _pus_of_node(snapshot, number, online, gaps)
        shared = CpuSet(pu for pu in pus if pu in node_of_pu)
        if shared:
            reason = f"PUs {shared} are in a lower node too; left out, with its memory"
            gaps.append(Gap(f"node {number}", reason))
            continue
        pus_of_node[number] = pus
        node_of_pu |= dict.fromkeys(pus, NodeIndex(number))
    homeless = online - CpuSet(node_of_pu)
    if homeless:
        reason = f"in no online node (those are {', '.join(map(str, numbers))})"
        gaps.append(Gap(f"node of PUs {homeless}", reason))
    initiators = read_pus(snapshot, f"{NODE}/has_generic_initiator") or CpuSet()
    nodes: list[NumaNode] = []
    for number, pus in pus_of_node.items():
        index = NodeIndex(number)
        total, free = _memory(snapshot, f"{NODE}/node{number}/meminfo")
        for what, value in (("memory", total), ("free memory", free)):
            if value is None:
                reason = f"{NODE}/node{number}/meminfo does not say"
                gaps.append(Gap(f"node {number} {what}", reason))
        nodes.append(
            NumaNode(
                index=index,
                pus=pus,
                memory_bytes=total,
                memory_free_bytes=free,
                page_pools=_page_pools(snapshot, f"{NODE}/node{number}/hugepages"),
                generic_initiator=number in initiators,
                package=package_of(pus, packages),
            )
        )
    return Nodes(tuple(nodes), node_of_pu, tuple(gaps), numbers)


def package_of(pus: CpuSet, packages: tuple[Package, ...]) -> PackageIndex | None:
    """The package that holds all the PUs; None for no PUs and for PUs of several packages."""
    if not pus:
        return None
    return next((package.index for package in packages if pus <= package.pus), None)


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
        list_readable(snapshot, folder)
        raise InputError(
            f"{snapshot.name}: expected {folder}/cpulist or cpumap, found neither",
            hint="the tree is incomplete: capture the host again",
        )
    mask = read_mask(snapshot, f"{folder}/cpumap")
    if mask is not None and mask & online != pus & online:
        reason = f"cpulist says {pus & online}, cpumap says {mask & online}; used cpulist"
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
    return Nodes((node,), dict.fromkeys(online, NodeIndex(0)), tuple(gaps), (0,), assumed=True)


def _memory(snapshot: Snapshot, path: str) -> tuple[int | None, int | None]:
    """(total, free) in bytes of lines such as "Node 0 MemTotal:  32489480 kB" (kB is KiB).

    Free is what a VM that starts now can get: the page cache and reclaimable slabs give way, and
    on a host that is long up they are most of its memory. Nodes have no MemAvailable of their own.
    Source: si_mem_available() in mm/show_mem.c, less its reserves.
    """
    found: dict[str, int] = {}
    for line in read_lines(snapshot, path):
        match = _MEMORY_LINE.fullmatch(line)
        if match is not None:
            found.setdefault(match[1], int(match[2]) * KIB)
    free = found.get("MemFree")
    if free is not None:
        free += sum(
            found.get(name, 0) for name in ("Active(file)", "Inactive(file)", "SReclaimable")
        )
    return found.get("MemTotal"), free


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
