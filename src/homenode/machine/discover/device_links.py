"""Device links: NVLink, xGMI and NVLink-C2C, from what the vendors' tools print.

`nvidia-smi -q -x`, `amd-smi topology --json` and rocm-smi's JSON print the address of each number.
Without them GPUs are taken to be numbered in the order of their addresses, over those that the
driver has; where the counts or the nodes differ, no link is guessed.
"""

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.machine.discover.device_kinds import AMD, NVIDIA
from homenode.machine.discover.pci_nodes import Locality, StatedNode
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind, PciDevice
from homenode.machine.snapshot.contents import COMMAND_OF_NAME
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.tools.amd_smi import RocmTopology
from homenode.machine.tools.nvidia_smi import NvidiaGpu

_C2C_GPUS = {
    0x2342,  # GH200 120GB
    0x2345,  # GH200 480GB
    0x2348,  # GH200 144GB
    0x2941,  # GB200
}
"""GPUs on one board with a Grace CPU, which NVLink-C2C joins. Source: pci.ids."""


_TOPO = " ".join(nvidia_smi.TOPOLOGY_COMMAND)


class DeviceLinks(Struct, frozen=True):
    """links: ascending. gpu_of_node: GPUs whose memory nvidia-smi says is a node. node_of_gpu: the
    node of each GPU that the firmware gives none, where a tool says it. queried: what NVIDIA's
    driver says of its GPUs, in the order of the tool's numbers."""

    links: tuple[DeviceLink, ...]
    gpu_of_node: dict[NodeIndex, Bdf]
    node_of_gpu: dict[Bdf, StatedNode]
    queried: dict[Bdf, NvidiaGpu]
    gaps: tuple[Gap, ...]


def read_device_links(
    snapshot: Snapshot,
    devices: tuple[PciDevice, ...],
    driver_gpus: tuple[Bdf, ...],
    locality: Locality,
) -> DeviceLinks:
    """The links of a snapshot's GPUs. driver_gpus: those that the NVIDIA driver has, () = unknown.
    locality: the host's.

    A tool is asked only where there is a GPU of its vendor.
    """
    gpus = [d for d in devices if d.kind is DeviceKind.GPU and d.physical_function is None]
    nvidia = [gpu for gpu in gpus if gpu.vendor_id == NVIDIA]
    amd = [gpu for gpu in gpus if gpu.vendor_id == AMD]
    gaps: list[Gap] = []
    queried = _query(snapshot, gaps) if nvidia else {}
    links: list[DeviceLink] = []
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    node_of_gpu: dict[Bdf, StatedNode] = {}
    topo = snapshot.command_output("nvidia-smi-topo") if nvidia else None
    if topo is not None:
        try:
            matrix = nvidia_smi.parse_topology(topo)
        except ParseError as error:
            gaps.append(Gap("NVLinks", str(error)))
        else:
            numbered = _numbered(matrix, nvidia, tuple(queried) or driver_gpus)
            links += _nvlinks(matrix, numbered, gpu_of_node, gaps)
            if len(numbered) == sum(row.name.startswith("GPU") for row in matrix.devices):
                node_of_gpu = _nodes_of_rows(matrix, numbered, locality, gaps)
    elif len(nvidia) > 1:
        gaps.append(Gap("NVLinks", "nvidia-smi topo -m was not there or failed"))
    if amd:
        links += _amd_links(snapshot, amd, node_of_gpu, locality, gaps)
    for gpu in nvidia:
        stated = node_of_gpu.get(gpu.bdf)
        node = gpu.node if stated is None else stated.node
        if node is not None and _has_c2c(gpu, queried.get(gpu.bdf)):
            links.append(DeviceLink(LinkKind.C2C, gpu.bdf, None, node))
    ordered = sorted(links, key=lambda link: (link.a, link.kind, link.b or link.a))
    return DeviceLinks(tuple(ordered), gpu_of_node, node_of_gpu, queried, tuple(gaps))


def _query(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, NvidiaGpu]:
    """GPUs of `nvidia-smi -q -x` by address, in the order of their numbers."""
    text = snapshot.command_output("nvidia-smi-query")
    if text is None:
        return {}
    try:
        query = nvidia_smi.parse_query(text)
    except ParseError as error:
        gaps.append(Gap("GPUs as nvidia-smi names them", str(error)))
        return {}
    gaps += [
        Gap(f"{element} of {bdf}", f"nvidia-smi says {found!r}, which is not known here")
        for bdf, element, found in query.unread
    ]
    return {gpu.bdf: gpu for gpu in query.gpus}


def _has_c2c(gpu: PciDevice, queried: NvidiaGpu | None) -> bool:
    if queried is not None and queried.c2c is not None:
        return queried.c2c
    return gpu.device_id in _C2C_GPUS


def _numbered(
    matrix: nvidia_smi.TopoMatrix, gpus: list[PciDevice], known: tuple[Bdf, ...]
) -> list[PciDevice]:
    """The GPUs in the order of the tool's numbers; known: those that it or its driver names."""
    by_bdf = {gpu.bdf: gpu for gpu in gpus}
    if known:
        return [by_bdf[bdf] for bdf in known if bdf in by_bdf]
    count = sum(device.name.startswith("GPU") for device in matrix.devices)
    return _with_driver(gpus, "nvidia", count)


def _with_driver(gpus: list[PciDevice], driver: str, count: int) -> list[PciDevice]:
    """The GPUs that a tool sees, which are not those bound to vfio-pci; all of them where only
    that fits, as in a snapshot whose parts were taken at different times."""
    bound = [gpu for gpu in gpus if gpu.driver in (None, driver)]
    return bound if len(bound) == count or len(gpus) != count else gpus


def _nvlinks(
    matrix: nvidia_smi.TopoMatrix,
    gpus: list[PciDevice],
    gpu_of_node: dict[NodeIndex, Bdf],
    gaps: list[Gap],
) -> list[DeviceLink]:
    rows = [i for i, device in enumerate(matrix.devices) if device.name.startswith("GPU")]
    if len(rows) != len(gpus):
        reason = f"nvidia-smi has {len(rows)} GPUs, the PCI tree {len(gpus)} with its driver"
        gaps.append(Gap("NVLinks", reason))
        return []
    links: list[DeviceLink] = []
    for position, (row, gpu) in enumerate(zip(rows, gpus, strict=True)):
        device = matrix.devices[row]
        if device.memory_node is not None:
            gpu_of_node[device.memory_node] = gpu.bdf
        for other in range(position + 1, len(rows)):
            count = matrix.nvlinks(row, rows[other])
            if count:
                links.append(DeviceLink(LinkKind.NVLINK, gpu.bdf, gpus[other].bdf, None, count))
    return links


def _nodes_of_rows(
    matrix: nvidia_smi.TopoMatrix, gpus: list[PciDevice], locality: Locality, gaps: list[Gap]
) -> dict[Bdf, StatedNode]:
    """The nodes of GPUs that the firmware gives none, by their rows; a gap where a row and sysfs,
    or the two affinities of a row, name different nodes."""
    rows = (device for device in matrix.devices if device.name.startswith("GPU"))
    found: dict[Bdf, StatedNode] = {}
    for row, gpu in zip(rows, gpus, strict=True):
        # On GH200 the affinity lists the CPU's node and those kept for MIG.
        by_nodes = locality.node_listed(row.nodes or (), None)
        by_cpus = locality.node_listed((), row.cpus)
        node = by_cpus if by_nodes is None else by_nodes
        if None not in (by_nodes, by_cpus) and by_nodes != by_cpus:
            reason = f"{_TOPO} says node {by_nodes} and the CPUs of node {by_cpus}"
            gaps.append(Gap(f"node of {gpu.bdf}", f"{reason}; used neither"))
        elif gpu.node is None and node is not None:
            found[gpu.bdf] = StatedNode(node, _TOPO)
        elif node is not None and node != gpu.node:
            reason = f"{_TOPO} says {node}, sysfs says {gpu.node}; used sysfs"
            gaps.append(Gap(f"node of {gpu.bdf}", reason))
    return found


_AMD_TOOLS = (
    ("amd-smi-topology", amd_smi.parse_topology),
    ("rocm-smi-json", amd_smi.parse_rocm_json),
    ("rocm-smi-topo", amd_smi.parse_rocm_topology),
)
"""In the order of trust: those that print addresses first."""


def _amd_links(
    snapshot: Snapshot,
    gpus: list[PciDevice],
    node_of_gpu: dict[Bdf, StatedNode],
    locality: Locality,
    gaps: list[Gap],
) -> list[DeviceLink]:
    """The xGMI links by the first tool that gives any; what the others lack is no gap then."""
    failures: list[Gap] = []
    for command, parse in _AMD_TOOLS:
        text = snapshot.command_output(command)
        if text is None:
            continue
        try:
            topology = parse(text)
        except ParseError as error:
            failures.append(Gap("xGMI links", str(error)))
            continue
        if len(topology.gpus) > 1 and not any(cell for row in topology.links for cell in row):
            continue
        tool = COMMAND_OF_NAME[command].spellings[0][0]
        links = _xgmi(topology, gpus, tool, failures)
        if links is not None:
            gpu_of_number = _amd_numbers(topology, gpus) or {}
            for number, listed in topology.node_of_gpu:
                gpu, node = gpu_of_number.get(number), locality.node_listed((listed,), None)
                if gpu is not None and gpu.node is None and node is not None:
                    node_of_gpu[gpu.bdf] = StatedNode(node, tool)
            gaps += failures
            return links
    if not failures and len(gpus) > 1:
        reason = "neither amd-smi topology nor rocm-smi --showtopo was there, or they failed"
        failures = [Gap("xGMI links", reason)]
    gaps += failures
    return []


def _xgmi(
    topology: RocmTopology, gpus: list[PciDevice], tool: str, gaps: list[Gap]
) -> list[DeviceLink] | None:
    """The links of a tool's tables; None with a gap where its numbers cannot be distinguished."""
    gpu_of_number = _amd_numbers(topology, gpus)
    if gpu_of_number is None:
        reason = f"{tool} has {len(topology.gpus)} GPUs, the PCI tree {len(gpus)}"
        gaps.append(Gap("xGMI links", reason))
        return None
    for index, node in topology.node_of_gpu:
        gpu = gpu_of_number.get(index)
        if gpu is None or gpu.node in (None, node):
            continue
        reason = f"{tool} has GPU{index} on node {node}, {gpu.bdf} is on {gpu.node}"
        if topology.bdf_of_gpu:
            gaps.append(Gap(f"node of {gpu.bdf}", f"{reason}; used sysfs"))
        else:
            gaps.append(Gap("xGMI links", f"{reason}: its order is not that of the addresses"))
            return None
    joined = {
        tuple(sorted((gpu_of_number[a].bdf, gpu_of_number[b].bdf)))
        for i, (a, row) in enumerate(zip(topology.gpus, topology.links, strict=True))
        for j, b in enumerate(topology.gpus)
        if row[j] == "XGMI" and (not topology.hops or topology.hops[i][j] in (1, None))
        if a in gpu_of_number and b in gpu_of_number
    }
    # Partitions of one GPU have its address, and no link to each other.
    return [DeviceLink(LinkKind.XGMI, a, b) for a, b in sorted(joined) if a != b]


def _amd_numbers(topology: RocmTopology, gpus: list[PciDevice]) -> dict[int, PciDevice] | None:
    """The GPU of each number: by its address where the tool prints it, else by their order; None
    where the counts differ. Partitions may be functions of their own, that no PCI tree has."""
    if topology.bdf_of_gpu:
        by_bdf = {gpu.bdf: gpu for gpu in gpus}
        found = {
            number: by_bdf.get(bdf) or by_bdf.get(Bdf(bdf.domain, bdf.bus, bdf.device, 0))
            for number, bdf in topology.bdf_of_gpu
        }
        known = {number: gpu for number, gpu in found.items() if gpu is not None}
        return known or None
    bound = _with_driver(gpus, "amdgpu", len(topology.gpus))
    if len(topology.gpus) != len(bound):
        return None
    return dict(zip(topology.gpus, bound, strict=True))
