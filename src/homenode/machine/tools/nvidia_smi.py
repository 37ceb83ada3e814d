"""nvidia-smi -q -x: what NVIDIA's driver says of each GPU.

Only for GPUs that the driver holds: those given to vfio-pci are not listed. The PCIe generation
and width are those of the link while idle, unless performance_state says P0.

Seen of drivers 535 to 580 (nvsmi_device_v12.dtd, v13). Source: man nvidia-smi, "GPU ATTRIBUTES".

nvidia-smi topo -m: how GPUs and NICs reach each other, and the nodes of GPUs.

The only place that shows which node holds a GPU's own memory (GH200 and kin) where the driver's
numa_status is not readable. Seen of drivers 470 to 580; the header is underlined with terminal
codes, on a terminal or not.

    \x1b[4mGPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID\x1b[0m
    GPU0   X    NV18  PIX   0-71          0,5-11         4
    GPU1  NV18   X    SYS   72-143        1,13-19        12
    NIC0  PIX   SYS    X

Source: man nvidia-smi, "topo"; no grammar is published.

nvidia-smi mig -lgi and nvidia-smi -L: the MIG instances of NVIDIA's GPUs.

    |   0  MIG 1g.10gb         19        9          2:1     |

    GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5c8e...)
      MIG 1g.10gb     Device  0: (UUID: MIG-8d1a...)

The first lists GPU instances, and needs root; the second lists compute instances, which are what
programs see: a GPU instance may hold several, and none.

Seen of drivers 470 to 580. Source: NVIDIA MIG user guide, "Creating GPU Instances".
"""

import re

from lxml import etree
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.indices import NodeIndex
from homenode.machine.tools.xml_text import parse_xml
from homenode.units import MIB

QUERY_COMMAND = ("nvidia-smi", "-q", "-x")

_SOURCE = "nvidia-smi -q -x"
_WIDTH = re.compile(r"(\d{1,2})x", re.ASCII)
_MIB = re.compile(r"(\d{1,9}) MiB", re.ASCII)
_NUMBER = re.compile(r"(\d{1,9})", re.ASCII)
_ABSENT = frozenset(
    {
        "",
        "n/a",
        "none",
        "not supported",
        "unknown error",
        "insufficient permissions",
        "gpu is lost",
        "gpu requires reset",
        "not available",
        "not found",
        "requested functionality has been deprecated",
    }
)


class NvidiaMigDevice(Struct, frozen=True):
    """A compute instance. index: its number on its GPU. instance: of the GPU instance it is on.

    memory_bytes: of that GPU instance.
    """

    index: int
    instance: int
    memory_bytes: int | None


class NvidiaGpu(Struct, frozen=True):
    """One GPU. None where the driver says N/A, or where its version does not have the field.

    index:     position in the output: the number that other nvidia-smi commands use.
    max_gen:   PCIe generation that GPU and host both can; device_max_gen is the GPU's own.
    c2c:       an NVLink-C2C to the host's CPU is in use.
    addressing_mode: "ATS" where the CPU's page tables serve the GPU (GH200, GB200), "HMM", ...
    virtualization_mode: "Pass-Through" in a guest, "None" on a bare host.
    memory_bytes, bar1_bytes: totals. replays: packets that its link sent again since its driver
    was loaded; a sound machine has a hundred.
    """

    index: int
    bdf: Bdf
    uuid: str | None
    name: str | None
    architecture: str | None
    board_part_number: str | None
    vbios_version: str | None
    module_id: int | None
    current_gen: int | None
    max_gen: int | None
    device_max_gen: int | None
    current_width: int | None
    max_width: int | None
    c2c: bool | None
    mig: bool | None
    addressing_mode: str | None
    virtualization_mode: str | None
    performance_state: str | None
    memory_bytes: int | None
    bar1_bytes: int | None
    replays: int | None = None
    mig_devices: tuple[NvidiaMigDevice, ...] = ()


class NvidiaQuery(Struct, frozen=True):
    """gpus: in the tool's order.

    unread: (GPU, element, text) whose text we do not understand; its field is None.
    """

    driver_version: str | None
    cuda_version: str | None
    gpus: tuple[NvidiaGpu, ...]
    unread: tuple[tuple[Bdf, str, str], ...]


def parse_query(text: str) -> NvidiaQuery:
    """The GPUs. Elements that we do not use are skipped: there are 300, and more in each release.

    Raises ParseError where the text is no such document or a GPU has no address, or another's.
    """
    root = parse_xml(text, "nvidia_smi_log", _SOURCE)
    unread: list[tuple[Bdf, str, str]] = []
    gpus = tuple(_gpu(gpu, index, unread) for index, gpu in enumerate(root.findall("gpu")))
    if len({gpu.bdf for gpu in gpus}) != len(gpus):
        raise ParseError(_SOURCE, "each GPU once", ", ".join(str(gpu.bdf) for gpu in gpus))
    return NvidiaQuery(
        _text(root, "driver_version"), _text(root, "cuda_version"), gpus, tuple(unread)
    )


def _gpu(gpu: etree._Element, index: int, unread: list[tuple[Bdf, str, str]]) -> NvidiaGpu:
    bdf = Bdf.parse(str(gpu.get("id", "")), f"{_SOURCE}: gpu {index}")

    def number(path: str, pattern: "re.Pattern[str]" = _NUMBER) -> int | None:
        found = _text(gpu, path)
        matched = None if found is None else pattern.fullmatch(found)
        if found is not None and matched is None:
            unread.append((bdf, path, found))
        return None if matched is None else int(matched[1])

    def switch(path: str) -> bool | None:
        found = _text(gpu, path)
        if found is not None and found not in ("Enabled", "Disabled"):
            unread.append((bdf, path, found))
        return {"Enabled": True, "Disabled": False}.get(found or "")

    memory_mib = number("fb_memory_usage/total", _MIB)
    bar1_mib = number("bar1_memory_usage/total", _MIB)
    link = "pci/pci_gpu_link_info"
    return NvidiaGpu(
        index=index,
        bdf=bdf,
        uuid=_text(gpu, "uuid"),
        name=_text(gpu, "product_name"),
        architecture=_text(gpu, "product_architecture"),
        board_part_number=_text(gpu, "board_part_number"),
        vbios_version=_text(gpu, "vbios_version"),
        module_id=number("platformInfo/module_id"),
        current_gen=number(f"{link}/pcie_gen/current_link_gen"),
        max_gen=number(f"{link}/pcie_gen/max_link_gen"),
        device_max_gen=number(f"{link}/pcie_gen/max_device_link_gen"),
        current_width=number(f"{link}/link_widths/current_link_width", _WIDTH),
        max_width=number(f"{link}/link_widths/max_link_width", _WIDTH),
        c2c=switch("c2c_mode"),
        mig=switch("mig_mode/current_mig"),
        addressing_mode=_text(gpu, "addressing_mode"),
        # "None" is a mode here: no virtualization.
        virtualization_mode=_plain(gpu, "gpu_virtualization_mode/virtualization_mode"),
        performance_state=_text(gpu, "performance_state"),
        memory_bytes=None if memory_mib is None else memory_mib * MIB,
        bar1_bytes=None if bar1_mib is None else bar1_mib * MIB,
        replays=number("pci/replay_counter"),
        mig_devices=_mig_devices(gpu, bdf, unread),
    )


def _mig_devices(
    gpu: etree._Element, bdf: Bdf, unread: list[tuple[Bdf, str, str]]
) -> tuple[NvidiaMigDevice, ...]:
    found: list[NvidiaMigDevice] = []
    for device in gpu.findall("mig_devices/mig_device"):
        index, instance = _text(device, "index"), _text(device, "gpu_instance_id")
        numbers = [_NUMBER.fullmatch(text or "") for text in (index, instance)]
        memory = _MIB.fullmatch(_text(device, "fb_memory_usage/total") or "")
        if numbers[0] is None or numbers[1] is None:
            unread.append((bdf, "mig_device", f"index {index}, gpu_instance_id {instance}"))
            continue
        size = None if memory is None else int(memory[1]) * MIB
        found.append(NvidiaMigDevice(int(numbers[0][1]), int(numbers[1][1]), size))
    return tuple(found)


def _plain(element: etree._Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in ("", "N/A", "[N/A]") else text


def _text(element: etree._Element, path: str) -> str | None:
    """The text at a path; None where it is missing or one of the many ways to say so."""
    text = (element.findtext(path) or "").strip()
    return None if text.strip("[]").lower() in _ABSENT else text


TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
MAX_DEVICES = 1024

_TOPOLOGY = "nvidia-smi topo -m"
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TOPO_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,40}", re.ASCII)
_LINK = re.compile(r"X|[A-Z]{2,5}\d{0,3}", re.ASCII)
_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)
_LEGEND = re.compile(r"\s+(?:X|NV#|[A-Z]{2,5}#?)\s+= ")
_NIC_NAME = re.compile(r"\s*(NIC\d+): (\S+)\s*")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


class TopoDevice(Struct, frozen=True):
    """One row. None where the tool says N/A or nothing.

    name:        "GPU0", "NIC0", or the name of a NIC ("mlx5_0", drivers before 510).
    cpus:        PUs near the GPU; only those that the caller's cpuset allows.
    nodes:       NUMA nodes near the GPU. On GH200 these are many: its CPU's and those kept for MIG.
    memory_node: the node that the GPU's own memory is.
    """

    name: str
    cpus: CpuSet | None
    nodes: tuple[NodeIndex, ...] | None
    memory_node: NodeIndex | None


class TopoMatrix(Struct, frozen=True):
    """devices: in the tool's order.

    links: shape (devices, devices), [from][to]; "X" on the diagonal, then NV#, PIX, PXB, PHB, NODE
    or SYS, nearest first; None for N/A.
    nic_names: (name in the matrix, name of the device), as in ("NIC0", "mlx5_0").
    """

    devices: tuple[TopoDevice, ...]
    links: tuple[tuple[str | None, ...], ...]
    nic_names: tuple[tuple[str, str], ...]

    def nvlinks(self, a: int, b: int) -> int:
        """Bonded NVLinks between the devices at two positions; 0 where there are none.

        To a switch's GPUs it is the number of links to the switches.
        """
        found = _NVLINKS.fullmatch(self.links[a][b] or "")
        return int(found[1]) if found else 0


def parse_topology(text: str) -> TopoMatrix:
    """The matrix. Raises ParseError, also where rows and columns are not the same devices."""
    names: list[str] = []
    affinities = 0
    rows: list[tuple[TopoDevice, tuple[str | None, ...]]] = []
    nic_names: list[tuple[str, str]] = []
    in_legend = False
    for number, raw in enumerate(text.split("\n"), start=1):
        line = _TERMINAL_CODE.sub("", raw).rstrip()
        if not line.strip():
            continue
        if not names:
            names, affinities = _header(line, number)
        elif line.strip() in ("Legend:", "NIC Legend:"):
            in_legend = True
        elif in_legend:
            nic = _NIC_NAME.fullmatch(line)
            if nic is not None:
                nic_names.append((nic[1], nic[2]))
            elif not _LEGEND.match(line):
                raise ParseError(_TOPOLOGY, "a line of the legend", line, line=number)
        else:
            if len(rows) == len(names):
                raise ParseError(_TOPOLOGY, f"{len(names)} rows", line, line=number)
            rows.append(_row(line, names[len(rows)], len(names), affinities, number))
    if not names or len(rows) != len(names):
        raise ParseError(_TOPOLOGY, f"{len(names) or 'some'} rows", f"{len(rows)} rows")
    return TopoMatrix(
        tuple(device for device, _ in rows), tuple(links for _, links in rows), tuple(nic_names)
    )


def _header(line: str, number: int) -> tuple[list[str], int]:
    """Names of the columns, and how many affinities stand behind them."""
    devices, _, tail = line.partition(_AFFINITIES[0])
    names = devices.split()
    found = " ".join((_AFFINITIES[0] + tail).split()) if tail or _AFFINITIES[0] in line else ""
    for count in range(len(_AFFINITIES) + 1):
        if found == " ".join(_AFFINITIES[:count]):
            break
    else:
        raise ParseError(_TOPOLOGY, f"columns {', '.join(_AFFINITIES)}", found, line=number)
    good = all(_TOPO_DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names)
    if not names or not good or len(names) > MAX_DEVICES or not names[0].startswith("GPU"):
        raise ParseError(_TOPOLOGY, "a header: GPU0 GPU1 ... CPU Affinity", line, line=number)
    return names, count


def _row(
    line: str, name: str, columns: int, affinities: int, number: int
) -> tuple[TopoDevice, tuple[str | None, ...]]:
    words = line.split()
    if words[0] != name:
        raise ParseError(_TOPOLOGY, f"the row of {name}", line, line=number)
    links = words[1 : columns + 1]
    if len(links) != columns or not all(link == "N/A" or _LINK.fullmatch(link) for link in links):
        raise ParseError(_TOPOLOGY, f"{columns} links such as NV18 or SYS", line, line=number)
    values = _affinities(line, words[columns + 1 :], columns, affinities, number)
    cpus, nodes, memory_node = (*values, None, None, None)[:3]
    return (
        TopoDevice(
            name,
            None if cpus is None else CpuSet.parse(cpus, f"{_TOPOLOGY}:{number}"),
            None if nodes is None else tuple(NodeIndex(node) for node in _nodes(nodes, number)),
            None if memory_node is None else _node(memory_node, number),
        ),
        tuple(None if link == "N/A" else link for link in links),
    )


def _affinities(
    line: str, words: list[str], columns: int, affinities: int, number: int
) -> list[str | None]:
    """The last columns of a row, with None for what is not there.

    Short values have a tab more behind them, so that tabs do not count columns:
        X \\t0-7\\t\\tN/A\\t\\tN/A          CPUs 0-7
        X \\t0-63,128-191\\t0\\t\\tN/A      CPUs 0-63,128-191, node 0
        X \\t\\t1\\t\\tN/A                  no CPUs (none that the cpuset allows), node 1
        X \\t\\t\\t\\t                      a NIC
    """
    if not words:
        return []
    if len(words) < affinities:
        cells = [cell.strip() for cell in line.split("\t")][columns + 1 :]
        if "\t" not in line or not cells:
            raise ParseError(_TOPOLOGY, f"{affinities} affinities", line, line=number)
        # The last column always says something; of the first two one is empty, or both.
        last = [words[-1]] if affinities == len(_AFFINITIES) else []
        rest = words[: len(words) - len(last)]
        first = [*([] if cells[0] else ["N/A"]), *rest]
        words = [*first, *["N/A"] * (affinities - len(last) - len(first)), *last]
    if len(words) != affinities:
        raise ParseError(_TOPOLOGY, f"{affinities} affinities", line, line=number)
    return [None if word == "N/A" else word for word in words]


def _nodes(text: str, number: int) -> CpuSet:
    """A list of nodes is written as one of PUs is: 0,5-11."""
    return CpuSet.parse(text, f"{_TOPOLOGY}:{number}")


def _node(text: str, number: int) -> NodeIndex | None:
    if text == "-1":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ParseError(_TOPOLOGY, "a node or N/A", text, line=number)
    return NodeIndex(int(text))


INSTANCES_COMMAND = ("nvidia-smi", "mig", "-lgi")
LIST_COMMAND = ("nvidia-smi", "-L")
MAX_ROWS = 4096

_INSTANCES = "nvidia-smi mig -lgi"
_LIST = "nvidia-smi -L"


class MigInstance(Struct, frozen=True):
    """A GPU instance. gpu: the tool's number of its GPU. profile: "1g.10gb+me".

    start, size: its place among the GPU's memory slices.
    """

    gpu: int
    number: int
    profile: str
    start: int
    size: int


class MigDevice(Struct, frozen=True):
    """A compute instance. device: its number on its GPU, as `index` of nvidia-smi -q -x."""

    gpu: int
    device: int
    profile: str
    uuid: str | None


def parse_instances(text: str) -> tuple[MigInstance, ...]:
    """The GPU instances, in the tool's order. Headings, borders and remarks such as "No GPU
    instances found" are skipped.

    Raises ParseError for a row of a MIG profile without its four numbers, and for an instance that
    is listed twice.
    """
    found: dict[tuple[int, int], MigInstance] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip().strip("|").split()
        if len(words) < 2 or words[1] != "MIG":
            continue
        start, colon, size = words[-1].partition(":")
        numbers = [_small_number(word) for word in (words[0], *words[3:-1], start, size)]
        if len(words) != 6 or not colon or None in numbers or len(found) >= MAX_ROWS:
            expected = "GPU, MIG, profile, profile's ID, instance's ID, start:size"
            raise ParseError(_INSTANCES, expected, line.strip()[:80], line=number)
        gpu, _, instance, first, slices = (one or 0 for one in numbers)
        if (gpu, instance) in found:
            raise ParseError(_INSTANCES, "each instance once", line.strip()[:80], line=number)
        found[gpu, instance] = MigInstance(gpu, instance, words[2], first, slices)
    return tuple(found.values())


def parse_list(text: str) -> tuple[MigDevice, ...]:
    """The compute instances, in the tool's order. Raises ParseError for one below no GPU."""
    found: list[MigDevice] = []
    gpu: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(":", " ").split()
        if words[:1] == ["GPU"] and len(words) > 1:
            gpu = _small_number(words[1])
        elif words[:1] == ["MIG"]:
            device = _small_number(words[3]) if len(words) > 3 and words[2] == "Device" else None
            if gpu is None or device is None or len(found) >= MAX_ROWS:
                expected = "GPU N, then lines MIG PROFILE Device N: (UUID: ...)"
                raise ParseError(_LIST, expected, line.strip()[:80], line=number)
            uuid = words[5].rstrip(")") if len(words) == 6 and words[4] == "(UUID" else None
            found.append(MigDevice(gpu, device, words[1], uuid))
    return tuple(found)


def _small_number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 6 else None
