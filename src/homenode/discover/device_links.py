"""Device links: NVLink, xGMI and NVLink-C2C, from what the vendors' tools print.

`nvidia-smi -q -x` prints the address of each number. Without it, and with rocm-smi, GPUs are taken
to be numbered in the order of their addresses, over those that the driver has; where the counts or
the nodes differ, no link is guessed.
"""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.discover.device_kinds import AMD, NVIDIA
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, DeviceLink, LinkKind, PciDevice
from homenode.snapshot.protocol import Snapshot
from homenode.tools import nvidia_smi_query, nvidia_smi_topo, rocm_smi_topo
from homenode.tools.nvidia_smi_query import NvidiaGpu

_C2C_GPUS = {
    0x2342,  # GH200 120GB
    0x2345,  # GH200 480GB
    0x2348,  # GH200 144GB
    0x2941,  # GB200
}
"""GPUs on one board with a Grace CPU, which NVLink-C2C joins. Source: pci.ids."""


@dataclass(frozen=True, slots=True)
class DeviceLinks:
    """links: ascending. gpu_of_node: GPUs whose memory nvidia-smi says is a node. name_of_gpu: the
    driver's names of its GPUs. performance_of_gpu: their states, "P0" is busy.
    replays_of_gpu: packets that their links sent again. module_of_gpu: seats on their board."""

    links: tuple[DeviceLink, ...]
    gpu_of_node: dict[NodeIndex, Bdf]
    name_of_gpu: dict[Bdf, str]
    performance_of_gpu: dict[Bdf, str]
    replays_of_gpu: dict[Bdf, int]
    module_of_gpu: dict[Bdf, int]
    gaps: tuple[Gap, ...]


def read_device_links(
    snapshot: Snapshot, devices: tuple[PciDevice, ...], driver_gpus: tuple[Bdf, ...]
) -> DeviceLinks:
    """The links of a snapshot's GPUs. driver_gpus: those that the NVIDIA driver has, () = unknown.

    A tool is asked only where there is a GPU of its vendor.
    """
    gpus = [d for d in devices if d.kind is DeviceKind.GPU and d.physical_function is None]
    nvidia = [gpu for gpu in gpus if gpu.vendor_id == NVIDIA]
    amd = [gpu for gpu in gpus if gpu.vendor_id == AMD]
    gaps: list[Gap] = []
    queried = _query(snapshot, gaps) if nvidia else {}
    links = [
        DeviceLink(LinkKind.C2C, gpu.bdf, None, gpu.node)
        for gpu in nvidia
        if gpu.node is not None and _has_c2c(gpu, queried.get(gpu.bdf))
    ]
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    topo = snapshot.command_output("nvidia-smi-topo") if nvidia else None
    if topo is not None:
        try:
            matrix = nvidia_smi_topo.parse(topo)
        except ParseError as error:
            gaps.append(Gap("NVLinks", str(error)))
        else:
            numbered = _numbered(matrix, nvidia, tuple(queried) or driver_gpus)
            links += _nvlinks(matrix, numbered, gpu_of_node, gaps)
    elif len(nvidia) > 1:
        gaps.append(Gap("NVLinks", "nvidia-smi topo -m was not there or failed"))
    rocm = snapshot.command_output("rocm-smi-topo") if amd else None
    if rocm is not None:
        try:
            links += _xgmi(rocm_smi_topo.parse(rocm), amd, gaps)
        except ParseError as error:
            gaps.append(Gap("xGMI links", str(error)))
    elif len(amd) > 1:
        gaps.append(Gap("xGMI links", "rocm-smi --showtopo was not there or failed"))
    ordered = sorted(links, key=lambda link: (link.a, link.kind, link.b or link.a))
    names = {bdf: gpu.name for bdf, gpu in queried.items() if gpu.name is not None}
    states = {
        bdf: gpu.performance_state
        for bdf, gpu in queried.items()
        if gpu.performance_state is not None
    }
    replays = {bdf: gpu.replays for bdf, gpu in queried.items() if gpu.replays is not None}
    modules = {bdf: gpu.module_id for bdf, gpu in queried.items() if gpu.module_id is not None}
    return DeviceLinks(tuple(ordered), gpu_of_node, names, states, replays, modules, tuple(gaps))


def _query(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, NvidiaGpu]:
    """GPUs of `nvidia-smi -q -x` by address, in the order of their numbers."""
    text = snapshot.command_output("nvidia-smi-query")
    if text is None:
        return {}
    try:
        query = nvidia_smi_query.parse(text)
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
    matrix: nvidia_smi_topo.TopoMatrix, gpus: list[PciDevice], known: tuple[Bdf, ...]
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
    matrix: nvidia_smi_topo.TopoMatrix,
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
        # On GH200 the affinity lists the CPU's node and those kept for MIG.
        if device.nodes and gpu.node is not None and gpu.node not in device.nodes:
            reason = f"nvidia-smi says {device.nodes[0]}, sysfs says {gpu.node}; used sysfs"
            gaps.append(Gap(f"node of {gpu.bdf}", reason))
        for other in range(position + 1, len(rows)):
            count = matrix.nvlinks(row, rows[other])
            if count:
                links.append(DeviceLink(LinkKind.NVLINK, gpu.bdf, gpus[other].bdf, None, count))
    return links


def _xgmi(
    topology: rocm_smi_topo.RocmTopology, gpus: list[PciDevice], gaps: list[Gap]
) -> list[DeviceLink]:
    bound = _with_driver(gpus, "amdgpu", len(topology.gpus))
    if len(topology.gpus) != len(bound):
        reason = f"rocm-smi has {len(topology.gpus)} GPUs, the PCI tree {len(bound)}"
        gaps.append(Gap("xGMI links", reason))
        return []
    gpu_of_number = dict(zip(topology.gpus, bound, strict=True))
    for index, node in topology.node_of_gpu:
        gpu = gpu_of_number.get(index)
        if gpu is not None and gpu.node is not None and gpu.node != node:
            reason = f"rocm-smi has GPU{index} on node {node}, {gpu.bdf} is on {gpu.node}"
            gaps.append(Gap("xGMI links", f"{reason}: its order is not that of the addresses"))
            return []
    return [
        DeviceLink(LinkKind.XGMI, bound[i].bdf, bound[j].bdf)
        for i, row in enumerate(topology.links)
        for j in range(i + 1, len(row))
        if row[j] == "XGMI" and (not topology.hops or topology.hops[i][j] in (1, None))
    ]
