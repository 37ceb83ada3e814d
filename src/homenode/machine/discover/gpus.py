"""GPUs: links between them, and their parts, from sysfs and the vendors' tools.

`nvidia-smi -q -x` and AMD's tools print the address of each number. Without it NVIDIA's GPUs are
assumed to be numbered by address, among the GPUs of the driver; if the counts differ, no link is
guessed.

If several sources show a part, sysfs decides which parts exist, and the vendor's
tool their names. A virtual function that could carry a vGPU but carries none is not a part: it
cannot be passed through.

Source: Documentation/driver-api/vfio-mediated-device.rst; NVIDIA vGPU user guide (`nvidia/` below
a virtual function, since vGPU 17); the amdgpu driver's current_compute_partition.
"""

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import NodeIndex
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.discover.pci_nodes import Locality, ReportedNode
from homenode.machine.discover.readings import link_name, parse_address, read_lines, read_word
from homenode.machine.pci import (
    AMD,
    NVIDIA,
    DeviceKind,
    DeviceLink,
    GpuPart,
    LinkKind,
    PartKind,
    PciDevice,
    is_uuid,
    nominal_bytes,
    partition_count,
)
from homenode.machine.snapshot.contents import COMMAND_OF_NAME
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.tools.amd_smi import AmdTopology
from homenode.machine.tools.nvidia_smi import NvidiaGpu
from homenode.text import plural
from homenode.units import MIB

_C2C_GPUS = {
    0x2342,  # GH200 120GB
    0x2345,  # GH200 480GB
    0x2348,  # GH200 144GB
    0x2941,  # GB200
}
"""GPUs on one board with a Grace CPU, which NVLink-C2C joins. Source: pci.ids."""


_TOPO = " ".join(nvidia_smi.TOPOLOGY_COMMAND)


class DeviceLinks(Struct, frozen=True):
    """Links between GPUs, and their nodes according to tools."""

    links: tuple[DeviceLink, ...]  # ascending
    gpu_of_node: dict[NodeIndex, Bdf]  # GPUs whose memory is a node according to nvidia-smi
    # the node of each GPU without a node from firmware, if a tool reports it
    node_of_gpu: dict[Bdf, ReportedNode]
    # facts from NVIDIA's driver about its GPUs, in the order of the tool's numbers
    queried: dict[Bdf, NvidiaGpu]
    gaps: tuple[Gap, ...]


def read_device_links(
    snapshot: Snapshot,
    devices: tuple[PciDevice, ...],
    driver_gpus: tuple[Bdf, ...],
    locality: Locality,
) -> DeviceLinks:
    """Return the links of a snapshot's GPUs. driver_gpus: GPUs of the NVIDIA driver, () = unknown.
    locality: the host's. A tool runs only if its vendor's GPU is present."""
    gpus = [d for d in devices if d.kind is DeviceKind.GPU and d.physical_function is None]
    nvidia = [gpu for gpu in gpus if gpu.vendor_id == NVIDIA]
    amd = [gpu for gpu in gpus if gpu.vendor_id == AMD]
    gaps: list[Gap] = []
    nvidia_gpus = _query(snapshot, gaps) if nvidia else {}
    links: list[DeviceLink] = []
    gpu_of_node: dict[NodeIndex, Bdf] = {}
    node_of_gpu: dict[Bdf, ReportedNode] = {}
    topo = snapshot.command_output("nvidia-smi-topo") if nvidia else None
    if topo is not None:
        try:
            matrix = nvidia_smi.parse_topology(topo)
        except ParseError as error:
            gaps.append(Gap("NVLinks", str(error)))
        else:
            ordered_gpus = _order_gpus(matrix, nvidia, tuple(nvidia_gpus) or driver_gpus)
            links += _find_nvlinks(matrix, ordered_gpus, gpu_of_node, gaps)
            if len(ordered_gpus) == sum(row.name.startswith("GPU") for row in matrix.devices):
                node_of_gpu = _map_row_nodes(matrix, ordered_gpus, locality, gaps)
    elif len(nvidia) > 1:
        gaps.append(Gap("NVLinks", "nvidia-smi topo -m was not there or failed"))
    if amd:
        links += _list_amd_links(snapshot, amd, node_of_gpu, locality, gaps)
    for gpu in nvidia:
        stated_node = node_of_gpu.get(gpu.bdf)
        node = gpu.node if stated_node is None else stated_node.node
        if node is not None and _has_c2c(gpu, nvidia_gpus.get(gpu.bdf)):
            links.append(DeviceLink(LinkKind.C2C, gpu.bdf, None, node))
    ordered_links = sorted(links, key=lambda link: (link.a, link.kind, link.b or link.a))
    return DeviceLinks(tuple(ordered_links), gpu_of_node, node_of_gpu, nvidia_gpus, tuple(gaps))


def _query(snapshot: Snapshot, gaps: list[Gap]) -> dict[Bdf, NvidiaGpu]:
    """Return GPUs of `nvidia-smi -q -x` by address, in the order of their numbers."""
    text = snapshot.command_output("nvidia-smi-query")
    if text is None:
        return {}
    try:
        query = nvidia_smi.parse_query(text)
    except ParseError as error:
        gaps.append(Gap("GPUs as nvidia-smi names them", str(error)))
        return {}
    gaps += [
        Gap(f"{element} of {bdf}", f"unknown value {text_value!r} of nvidia-smi")
        for bdf, element, text_value in query.unread
    ]
    return {gpu.bdf: gpu for gpu in query.gpus}


def _has_c2c(gpu: PciDevice, nvidia_gpu: NvidiaGpu | None) -> bool:
    if nvidia_gpu is not None and nvidia_gpu.c2c is not None:
        return nvidia_gpu.c2c
    return gpu.device_id in _C2C_GPUS


def _order_gpus(
    matrix: nvidia_smi.TopoMatrix, gpus: list[PciDevice], driver_gpus: tuple[Bdf, ...]
) -> list[PciDevice]:
    """Return the GPUs in the order of the tool's numbers. driver_gpus: () = unknown."""
    by_bdf = {gpu.bdf: gpu for gpu in gpus}
    if driver_gpus:
        return [by_bdf[bdf] for bdf in driver_gpus if bdf in by_bdf]
    # Those bound to vfio-pci are not there, unless the parts of a snapshot are of different times.
    count = sum(device.name.startswith("GPU") for device in matrix.devices)
    bound = [gpu for gpu in gpus if gpu.driver in (None, "nvidia")]
    return bound if len(bound) == count or len(gpus) != count else gpus


def _find_nvlinks(
    matrix: nvidia_smi.TopoMatrix,
    gpus: list[PciDevice],
    gpu_of_node: dict[NodeIndex, Bdf],
    gaps: list[Gap],
) -> list[DeviceLink]:
    rows = [i for i, device in enumerate(matrix.devices) if device.name.startswith("GPU")]
    if len(rows) != len(gpus):
        text = plural(len(rows), "GPU")
        reason = f"nvidia-smi lists {text}; {len(gpus)} in the PCI tree are bound to its driver"
        gaps.append(Gap("NVLinks", reason))
        return []
    links: list[DeviceLink] = []
    for position, (row, gpu) in enumerate(zip(rows, gpus, strict=True)):
        device = matrix.devices[row]
        if device.memory_node is not None:
            gpu_of_node[device.memory_node] = gpu.bdf
        for other in range(position + 1, len(rows)):
            count = matrix.count_nvlinks(row, rows[other])
            if count:
                links.append(DeviceLink(LinkKind.NVLINK, gpu.bdf, gpus[other].bdf, None, count))
    return links


def _map_row_nodes(
    matrix: nvidia_smi.TopoMatrix, gpus: list[PciDevice], locality: Locality, gaps: list[Gap]
) -> dict[Bdf, ReportedNode]:
    """Return the nodes of GPUs without a firmware node, by their rows; a gap if a row and sysfs, or
    the two affinities of a row, name different nodes."""
    rows = (device for device in matrix.devices if device.name.startswith("GPU"))
    node_of_gpu: dict[Bdf, ReportedNode] = {}
    for row, gpu in zip(rows, gpus, strict=True):
        # On GH200 the affinity lists the CPU's node and those kept for MIG.
        by_nodes = locality.node_listed(row.nodes or (), None)
        by_cpus = locality.node_listed((), row.cpus)
        node = by_cpus if by_nodes is None else by_nodes
        if None not in (by_nodes, by_cpus) and by_nodes != by_cpus:
            reason = f"{_TOPO} says node {by_nodes} and the CPUs of node {by_cpus}"
            gaps.append(Gap(f"node of {gpu.bdf}", f"{reason}; used neither"))
        elif gpu.node is None and node is not None:
            node_of_gpu[gpu.bdf] = ReportedNode(node, _TOPO)
        elif node is not None and node != gpu.node:
            reason = f"{_TOPO} says {node}, sysfs says {gpu.node}; used sysfs"
            gaps.append(Gap(f"node of {gpu.bdf}", reason))
    return node_of_gpu


_AMD_TOOLS = (
    ("amd-smi-topology", amd_smi.parse_topology),
    ("rocm-smi-json", amd_smi.parse_rocm_topology),
)
"""Tools, the most trusted first."""


def _list_amd_links(
    snapshot: Snapshot,
    gpus: list[PciDevice],
    node_of_gpu: dict[Bdf, ReportedNode],
    locality: Locality,
    gaps: list[Gap],
) -> list[DeviceLink]:
    """Return the xGMI links of the first tool that has any; its nodes go to node_of_gpu."""
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
        if len(topology.bdf_of_gpu) > 1 and not topology.links:
            continue
        tool = COMMAND_OF_NAME[command].spellings[0][0]
        gpu_of_number = _map_amd_gpus(topology, gpus)
        if not gpu_of_number:
            failures.append(Gap("xGMI links", f"{tool} lists none of the GPUs of the PCI tree"))
            continue
        gaps += failures
        for number, listed_node in topology.node_of_gpu.items():
            gpu, node = gpu_of_number.get(number), locality.node_listed((listed_node,), None)
            if gpu is not None and gpu.node is None and node is not None:
                node_of_gpu[gpu.bdf] = ReportedNode(node, tool)
            elif gpu is not None and gpu.node not in (None, listed_node):
                reason = f"{tool} has {listed_node}, sysfs has {gpu.node}; used sysfs"
                gaps.append(Gap(f"node of {gpu.bdf}", reason))
        pairs = {
            tuple(sorted((gpu_of_number[link.a].bdf, gpu_of_number[link.b].bdf)))
            for link in topology.links
            if link.kind == "XGMI" and link.hops in (1, None)
            if link.a in gpu_of_number and link.b in gpu_of_number
        }
        # Partitions of one GPU have its address, and no link to each other.
        return [DeviceLink(LinkKind.XGMI, a, b) for a, b in sorted(pairs) if a != b]
    if not failures and len(gpus) > 1:
        reason = "amd-smi topology and rocm-smi --showtopo are missing or failed"
        failures = [Gap("xGMI links", reason)]
    gaps += failures
    return []


def _map_amd_gpus(topology: AmdTopology, gpus: list[PciDevice]) -> dict[int, PciDevice]:
    """Return the GPU of each number. Partitions may be functions that no PCI tree has."""
    by_bdf = {gpu.bdf: gpu for gpu in gpus}
    gpu_of_number = {
        number: by_bdf.get(bdf) or by_bdf.get(Bdf(bdf.domain, bdf.bus, bdf.device, 0))
        for number, bdf in topology.bdf_of_gpu.items()
    }
    return {number: gpu for number, gpu in gpu_of_number.items() if gpu is not None}


_PCI = "/sys/bus/pci/devices"
_MEDIATED = "/sys/bus/mdev/devices"
_MEDIATED_BUS = "/sys/class/mdev_bus"

_FRAMEBUFFER = re.compile(r"framebuffer=(\d{1,7})M(?:,|\Z)", re.ASCII)
_TYPE_NAME = re.compile(r"\s*(\d{1,6})\s*:\s*(\S.{0,79})", re.ASCII)


def add_parts(
    snapshot: Snapshot, devices: tuple[PciDevice, ...], nvidia_gpus: Mapping[Bdf, NvidiaGpu]
) -> tuple[tuple[PciDevice, ...], tuple[Gap, ...]]:
    """Return the functions, GPUs with their parts. nvidia_gpus: of nvidia-smi in its order."""
    gpus = {
        device.bdf: device
        for device in devices
        if device.kind is DeviceKind.GPU and device.physical_function is None
    }
    if not gpus:
        return devices, ()
    division = _GpuDivision({bdf: [] for bdf in gpus}, {}, {})
    _read_mediated(snapshot, devices, division)
    _read_virtual_functions(snapshot, devices, division)
    _read_mig(snapshot, nvidia_gpus, division)
    _read_amd(snapshot, gpus, division)
    divided_devices = tuple(
        replace(
            device,
            parts=tuple(division.parts[device.bdf]),
            partition_mode=division.mode.get(device.bdf),
            memory_partition_mode=division.memory_mode.get(device.bdf),
        )
        if device.bdf in gpus
        else device
        for device in devices
    )
    return divided_devices, tuple(division.gaps)


class _GpuDivision(Struct, frozen=True):
    """Parts and modes by the address of the GPU."""

    parts: dict[Bdf, list[GpuPart]]
    mode: dict[Bdf, str]
    memory_mode: dict[Bdf, str]
    carriers: set[Bdf] = field(default_factory=set)  # functions with mediated devices
    gaps: list[Gap] = field(default_factory=list)


def _read_mediated(
    snapshot: Snapshot, devices: tuple[PciDevice, ...], division: _GpuDivision
) -> None:
    physical_of = {device.bdf: device.physical_function or device.bdf for device in devices}
    for name in snapshot.list(_MEDIATED_BUS) or ():
        bdf = parse_address(name)
        if bdf is not None:
            division.carriers.add(bdf)
    for uuid in snapshot.list(_MEDIATED) or ():
        real = snapshot.real_path(f"{_MEDIATED}/{uuid}")
        function = (
            None if real is None else parse_address(real.rpartition("/")[0].rpartition("/")[2])
        )
        if not is_uuid(uuid) or function is None:
            reason = f"{_MEDIATED} reports no PCI function below it"
            division.gaps.append(Gap(f"mediated device {uuid[:60]!r}", reason))
            continue
        division.carriers.add(function)
        parts = division.parts.get(physical_of.get(function, function))
        if parts is None:
            continue  # not of a GPU, for example a crypto adapter
        kind = f"{_MEDIATED}/{uuid}/mdev_type"
        profile = read_word(snapshot, f"{kind}/name") or link_name(snapshot, kind)
        size = _FRAMEBUFFER.search(read_word(snapshot, f"{kind}/description") or "")
        memory = nominal_bytes(profile) if size is None else int(size[1]) * MIB
        parts.append(GpuPart(PartKind.MEDIATED, profile, memory, function, uuid))


def _read_virtual_functions(
    snapshot: Snapshot, devices: tuple[PciDevice, ...], division: _GpuDivision
) -> None:
    virtual = [device for device in devices if device.physical_function in division.parts]
    names: dict[tuple[Bdf | None, str], str] = {}
    for device in virtual:
        for line in read_lines(snapshot, f"{_PCI}/{device.bdf}/nvidia/creatable_vgpu_types"):
            match = _TYPE_NAME.fullmatch(line)
            if match is not None:
                names[device.physical_function, match[1]] = match[2].strip()
    for device in virtual:
        if device.bdf in division.carriers or device.physical_function is None:
            continue
        number = read_word(snapshot, f"{_PCI}/{device.bdf}/nvidia/current_vgpu_type")
        if number == "0":
            continue
        profile = None
        if number is not None:
            profile = names.get((device.physical_function, number), f"nvidia-{number[:6]}")
        part = GpuPart(PartKind.VIRTUAL_FUNCTION, profile, nominal_bytes(profile), device.bdf)
        division.parts[device.physical_function].append(part)


def _read_mig(snapshot: Snapshot, gpus: Mapping[Bdf, NvidiaGpu], division: _GpuDivision) -> None:
    """GPU instances: their numbers and profiles by `mig -lgi`; without it (it needs root) those
    that hold a compute instance, which `-q -x` and `-L` list."""
    divided = {n: bdf for n, bdf in enumerate(gpus) if gpus[bdf].mig and bdf in division.parts}
    for bdf in divided.values():
        division.mode[bdf] = "mig"
    if not divided:
        return
    try:
        instances = nvidia_smi.parse_instances(snapshot.command_output("nvidia-smi-mig") or "")
        devices = nvidia_smi.parse_list(snapshot.command_output("nvidia-smi-list") or "")
    except ParseError as error:
        division.gaps.append(Gap("MIG instances", str(error)))
        return
    by_number = {(row.gpu, row.device): row for row in devices}
    for gpu, bdf in divided.items():
        profiles = {row.number: row.profile for row in instances if row.gpu == gpu}
        rows = gpus[bdf].mig_devices
        memory = {row.instance: row.memory_bytes for row in rows}
        uuids: dict[int, str | None] = {}
        for row in rows:
            device = by_number.get((gpu, row.index))
            if device is not None:
                # "1c.3g.40gb" is one compute slice of a GPU instance 3g.40gb.
                profiles.setdefault(row.instance, device.profile.rpartition("c.")[2])
                uuids[row.instance] = None if row.instance in uuids else device.uuid
        for number in sorted({*profiles, *memory}):
            profile = profiles.get(number)
            size = memory.get(number) or nominal_bytes(profile)
            uuid = uuids.get(number)
            division.parts[bdf].append(
                GpuPart(PartKind.MIG, profile, size, uuid=uuid, number=number)
            )


def _read_amd(snapshot: Snapshot, gpus: Mapping[Bdf, PciDevice], division: _GpuDivision) -> None:
    amd = [gpu for gpu in gpus.values() if gpu.vendor_id == AMD]
    counts = dict(_count_amd_parts(snapshot, amd, division)) if amd else {}
    for gpu in amd:
        mode = _read_word(snapshot, gpu.bdf, "current_compute_partition") or division.mode.get(
            gpu.bdf
        )
        memory = _read_word(snapshot, gpu.bdf, "current_memory_partition")
        if memory is not None:
            division.memory_mode[gpu.bdf] = memory
        if mode is None:
            continue
        division.mode[gpu.bdf] = mode
        count = counts.get(gpu.bdf) or partition_count(mode, gpu.device_id)
        if not count:
            reason = f"mode {mode!r} is not known here, and amd-smi partition lists no profile"
            division.gaps.append(Gap(f"partitions of {gpu.bdf}", reason))
        if count > 1:
            division.parts[gpu.bdf] += [
                GpuPart(PartKind.PARTITION, mode, number=number) for number in range(count)
            ]


def _count_amd_parts(
    snapshot: Snapshot, gpus: list[PciDevice], division: _GpuDivision
) -> Iterator[tuple[Bdf, int]]:
    """Yield the partitions of each GPU as amd-smi counts them; modes that it prints are kept."""
    text = snapshot.command_output("amd-smi-partition")
    if text is None:
        return
    try:
        rows = amd_smi.parse_partitions(text)
        topology = snapshot.command_output("amd-smi-topology")
        gpu_of_number = {}
        if topology is not None:
            gpu_of_number = _map_amd_gpus(amd_smi.parse_topology(topology), gpus)
    except ParseError as error:
        division.gaps.append(Gap("partitions of AMD GPUs", str(error)))
        return
    bdfs = {number: gpu.bdf for number, gpu in gpu_of_number.items()}
    if not bdfs and len(rows) == len(gpus):
        bdfs = {row.number: gpu.bdf for row, gpu in zip(rows, gpus, strict=True)}
    for row in rows:
        bdf = bdfs.get(row.number)
        if bdf is None:
            reason = f"amd-smi partition has GPU {row.number}, whose address is not known"
            division.gaps.append(Gap("partitions of AMD GPUs", reason))
            continue
        if row.compute is not None:
            division.mode.setdefault(bdf, row.compute)
            yield bdf, row.count
        if row.memory is not None:
            division.memory_mode.setdefault(bdf, row.memory)


def _read_word(snapshot: Snapshot, bdf: Bdf, file: str) -> str | None:
    word = read_word(snapshot, f"{_PCI}/{bdf}/{file}")
    return word if word and word.isascii() and word.isalnum() and word != "UNKNOWN" else None
