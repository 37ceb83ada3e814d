"""The memory of a host: /sys/devices/system/node, huge pages, and which nodes are no plain DRAM.

Source: Documentation/ABI/stable/sysfs-devices-node, Documentation/admin-guide/mm/hugetlbpage.rst.
"""

from collections.abc import Iterable

from homenode.cpuset import CpuSet
from homenode.description.masks import mask
from homenode.topology import Host, MemoryKind, NumaNode, PagePool
from homenode.units import KIB

NODE = "/sys/devices/system/node"


def render_memory(host: Host) -> dict[str, str]:
    """Files by path; no distance files where the host gives no distances."""
    width = max(pu.index for pu in host.pus) + 1
    files = {
        f"{NODE}/online": _nodes(host.nodes),
        f"{NODE}/possible": _nodes(host.nodes),
        f"{NODE}/has_cpu": _nodes(node for node in host.nodes if node.pus),
        f"{NODE}/has_memory": _nodes(node for node in host.nodes if node.memory_bytes),
        f"{NODE}/has_normal_memory": _nodes(node for node in host.nodes if node.memory_bytes),
        f"{NODE}/has_generic_initiator": _nodes(n for n in host.nodes if n.generic_initiator),
        "/proc/meminfo": _meminfo(
            "",
            sum(node.memory_bytes or 0 for node in host.nodes),
            sum(node.memory_free_bytes or 0 for node in host.nodes),
        ),
    }
    pools: dict[int, list[PagePool]] = {}
    for row, node in enumerate(host.nodes):
        folder = f"{NODE}/node{node.index}"
        files[f"{folder}/cpulist"] = f"{node.pus}\n"
        files[f"{folder}/cpumap"] = f"{mask(node.pus, width)}\n"
        if host.distances is not None:
            files[f"{folder}/distance"] = " ".join(map(str, host.distances[row])) + "\n"
        if node.memory_bytes is not None:
            files[f"{folder}/meminfo"] = _meminfo(
                f"Node {node.index} ", node.memory_bytes, node.memory_free_bytes
            )
        for pool in node.page_pools:
            files |= _pool(f"{folder}/hugepages", pool)
            pools.setdefault(pool.page_bytes, []).append(pool)
        files |= _kind(node)
    for page_bytes, same in pools.items():
        whole = PagePool(
            page_bytes, sum(p.total_pages for p in same), sum(p.free_pages for p in same)
        )
        files |= _pool("/sys/kernel/mm/hugepages", whole)
    return files


def _nodes(nodes: Iterable[NumaNode]) -> str:
    return f"{CpuSet(node.index for node in nodes)}\n"


def _meminfo(prefix: str, total_bytes: int, free_bytes: int | None) -> str:
    lines = [f"{prefix}MemTotal:       {total_bytes // KIB} kB"]
    if free_bytes is not None:
        lines.append(f"{prefix}MemFree:        {free_bytes // KIB} kB")
        lines.append(f"{prefix}MemUsed:        {(total_bytes - free_bytes) // KIB} kB")
    return "\n".join(lines) + "\n"


def _pool(folder: str, pool: PagePool) -> dict[str, str]:
    name = f"{folder}/hugepages-{pool.page_bytes // KIB}kB"
    return {
        f"{name}/nr_hugepages": f"{pool.total_pages}\n",
        f"{name}/free_hugepages": f"{pool.free_pages}\n",
        f"{name}/surplus_hugepages": "0\n",
    }


def _kind(node: NumaNode) -> dict[str, str]:
    """What shows that a node's memory is no plain DRAM: NVIDIA's driver, or a DAX device."""
    if node.memory_kind is MemoryKind.GPU and node.gpu is not None:
        return {
            f"/proc/driver/nvidia/gpus/{node.gpu}/numa_status": (
                f"Node:      {node.index}\nStatus:    online\n"
                f"Size:      {node.memory_bytes or 0:x}\n"
            )
        }
    if node.memory_kind is MemoryKind.OTHER:
        return {f"/sys/bus/dax/devices/dax{node.index}.0/target_node": f"{node.index}\n"}
    return {}
