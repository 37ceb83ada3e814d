"""GPU memory: nodes that are the memory of a GPU or another device, and not the host's own DRAM."""

from collections.abc import Mapping

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.discover.readings import read_lines, read_word
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import MemoryKind, NumaNode

_GPUS = "/proc/driver/nvidia/gpus"
_DAX = "/sys/bus/dax/devices"


def read_driver_gpus(snapshot: Snapshot) -> tuple[dict[NodeIndex, Bdf], tuple[Bdf, ...]]:
    """GPUs by the node of their memory, and every GPU that the NVIDIA driver has, ascending.

    Source: numa_status of NVIDIA's driver, such as "Node: 4" and "Status: online" on lines; seen on
    a POWER9 with V100s, documented for GH200. "Status: offline" or node -1 means no node.
    """
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    gpus: list[Bdf] = []
    for name in snapshot.list(_GPUS) or ():
        try:
            bdf = Bdf.parse(name)
        except ParseError:
            continue  # a control file of some driver version
        gpus.append(bdf)
        fields: dict[str, str] = {}
        for line in read_lines(snapshot, f"{_GPUS}/{name}/numa_status"):
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        node = fields.get("Node", "")
        is_online = fields.get("Status", "online").lower() == "online"
        if is_online and node.isascii() and node.isdigit() and len(node) < 7:
            gpu_of_node[NodeIndex(int(node))] = bdf
    return gpu_of_node, tuple(sorted(gpus))


def name_memory(
    snapshot: Snapshot,
    nodes: tuple[NumaNode, ...],
    by_driver: Mapping[NodeIndex, Bdf],
    by_tool: Mapping[NodeIndex, Bdf],
) -> tuple[tuple[NumaNode, ...], tuple[Gap, ...]]:
    """The nodes with the kind of their memory. by_driver, by_tool: GPU by node, of numa_status and
    of nvidia-smi; the driver decides.

    A node with PUs has DRAM unless something else is known of it. One without PUs may be anything:
    its kind is unknown unless a GPU's driver or a DAX device names it.
    """
    gaps: list[Gap] = []
    gpu_of_node = {**by_tool, **by_driver}
    for index in sorted(set(by_driver) & set(by_tool)):
        if by_driver[index] != by_tool[index]:
            reason = f"the driver says {by_driver[index]}, nvidia-smi says {by_tool[index]}"
            gaps.append(Gap(f"GPU of node {index}", f"{reason}; used the driver's"))
    present = {node.index for node in nodes}
    for index in sorted(set(gpu_of_node) - present):
        reason = f"{gpu_of_node[index]} has its memory there, but the node is not online"
        gaps.append(Gap(f"node {index}", reason))
    dax = _dax_nodes(snapshot)
    named: list[NumaNode] = []
    for node in nodes:
        gpu = gpu_of_node.get(node.index)
        kind = MemoryKind.DRAM if node.pus else None
        if gpu is not None:
            kind = MemoryKind.GPU
        elif node.index in dax:
            kind = MemoryKind.OTHER
        elif kind is None and node.memory_bytes != 0:
            reason = "no PUs, and neither the GPU driver nor a DAX device names the node"
            gaps.append(Gap(f"node {node.index} kind of memory", reason))
        named.append(replace(node, memory_kind=kind, gpu=gpu))
    return tuple(named), tuple(gaps)


def _dax_nodes(snapshot: Snapshot) -> set[int]:
    """Nodes whose memory came online from a DAX device: persistent, CXL or high-bandwidth."""
    nodes: set[int] = set()
    for device in snapshot.list(_DAX) or ():
        word = read_word(snapshot, f"{_DAX}/{device}/target_node")
        if word is not None and word.isascii() and word.isdigit() and len(word) < 7:
            nodes.add(int(word))
    return nodes
