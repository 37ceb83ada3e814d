"""nvidia-smi -q -x: the NVIDIA driver's report on each GPU.

It lists only GPUs that are bound to the driver, not those of vfio-pci.

Seen with drivers 535 to 580 (nvsmi_device_v12.dtd, v13). Source: man nvidia-smi, "GPU ATTRIBUTES".

nvidia-smi topo -m: how GPUs and NICs reach each other, and the nodes of GPUs.

The only place that shows which node holds a GPU's own memory (GH200 and kin) where the driver's
numa_status is not readable. Seen with drivers 470 to 580; the header is underlined with terminal
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

The first lists GPU instances, and needs root; the second lists compute instances, which programs
see: a GPU instance may have several, or none.

Seen with drivers 470 to 580. Source: NVIDIA MIG user guide, "Creating GPU Instances".
"""

import re

from lxml import etree
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import ParseError
from homenode.machine.tools.lines import Line, Lines
from homenode.machine.tools.xml_text import parse_xml
from homenode.text import plural
from homenode.units import MIB, parse_whole

_SOURCE = "nvidia-smi -q -x"
_MIB = re.compile(r"(\d{1,9}) MiB", re.ASCII)
_NUMBER = re.compile(r"(\d{1,9})", re.ASCII)
_ABSENT = re.compile(
    r"|n/a|none|not supported|unknown error|insufficient permissions|gpu is lost|"
    r"gpu requires reset|not available|not found|requested functionality has been deprecated"
)


class NvidiaMigDevice(Struct, frozen=True):
    """A compute instance."""

    index: int  # its number on its GPU
    instance: int  # number of its GPU instance
    memory_bytes: int | None  # memory of that GPU instance


class NvidiaGpu(Struct, frozen=True, kw_only=True):
    """A GPU. None if the driver prints N/A, or if its version does not have the field."""

    bdf: Bdf
    name: str | None
    module_id: int | None
    c2c: bool | None  # an NVLink-C2C to the host's CPU is in use
    mig: bool | None
    performance_state: str | None
    # packets that its link sent again since its driver was loaded; a sound machine has a hundred
    replays: int | None
    mig_devices: tuple[NvidiaMigDevice, ...]


class NvidiaQuery(Struct, frozen=True):
    # in the tool's order, which is that of the numbers that other commands use
    gpus: tuple[NvidiaGpu, ...]
    # (GPU, element, text) whose text is not recognised; its field is None
    unread: tuple[tuple[Bdf, str, str], ...]


def parse_query(text: str) -> NvidiaQuery:
    """Return the GPUs. Unused elements are skipped: there are 300, and more in each release. Raises
    ParseError if the text is no such document or a GPU has no address, or another's."""
    root = parse_xml(text, "nvidia_smi_log", _SOURCE)
    unread: list[tuple[Bdf, str, str]] = []
    gpus = tuple(_parse_gpu(gpu, index, unread) for index, gpu in enumerate(root.findall("gpu")))
    if len({gpu.bdf for gpu in gpus}) != len(gpus):
        raise ParseError(_SOURCE, "each GPU once", ", ".join(str(gpu.bdf) for gpu in gpus))
    return NvidiaQuery(gpus, tuple(unread))


def _parse_gpu(gpu: etree._Element, index: int, unread: list[tuple[Bdf, str, str]]) -> NvidiaGpu:
    bdf = Bdf.parse(str(gpu.get("id", "")), f"{_SOURCE}: gpu {index}")

    def number(path: str) -> int | None:
        text = _find_text(gpu, path)
        match = None if text is None else _NUMBER.fullmatch(text)
        if text is not None and match is None:
            unread.append((bdf, path, text))
        return None if match is None else int(match[1])

    def switch(path: str) -> bool | None:
        text = _find_text(gpu, path)
        if text is not None and text not in ("Enabled", "Disabled"):
            unread.append((bdf, path, text))
        return {"Enabled": True, "Disabled": False}.get(text or "")

    return NvidiaGpu(
        bdf=bdf,
        name=_find_text(gpu, "product_name"),
        module_id=number("platformInfo/module_id"),
        c2c=switch("c2c_mode"),
        mig=switch("mig_mode/current_mig"),
        performance_state=_find_text(gpu, "performance_state"),
        replays=number("pci/replay_counter"),
        mig_devices=_list_mig_devices(gpu, bdf, unread),
    )


def _list_mig_devices(
    gpu: etree._Element, bdf: Bdf, unread: list[tuple[Bdf, str, str]]
) -> tuple[NvidiaMigDevice, ...]:
    devices: list[NvidiaMigDevice] = []
    for device in gpu.findall("mig_devices/mig_device"):
        index, instance = _find_text(device, "index"), _find_text(device, "gpu_instance_id")
        numbers = [_NUMBER.fullmatch(text or "") for text in (index, instance)]
        memory = _MIB.fullmatch(_find_text(device, "fb_memory_usage/total") or "")
        if numbers[0] is None or numbers[1] is None:
            unread.append((bdf, "mig_device", f"index {index}, gpu_instance_id {instance}"))
            continue
        size = None if memory is None else int(memory[1]) * MIB
        devices.append(NvidiaMigDevice(int(numbers[0][1]), int(numbers[1][1]), size))
    return tuple(devices)


def _find_text(element: etree._Element, path: str) -> str | None:
    """Return the text at a path; None if it is missing or one of the texts for a missing value."""
    text = (element.findtext(path) or "").strip()
    return None if _ABSENT.fullmatch(text.strip("[]").lower()) else text


TOPOLOGY_COMMAND = ("nvidia-smi", "topo", "-m")
MAX_DEVICES = 1024

_TOPOLOGY = "nvidia-smi topo -m"
TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TOPO_DEVICE = re.compile(r"GPU\d{1,4}|(?!GPU)[A-Za-z][A-Za-z0-9_.:-]{0,40}", re.ASCII)
_LINK = re.compile(r"X|[A-Z]{2,5}\d{0,3}", re.ASCII)
_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)
_LEGEND = re.compile(r"\s+(?:X|NV#|[A-Z]{2,5}#?)\s+= ")
_NIC_NAME = re.compile(r"\s*NIC\d+: \S+\s*")
_HEAD_CHARACTERS = 8192
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


class TopoDevice(Struct, frozen=True):
    """A row. None if the tool prints N/A or nothing."""

    name: str  # "GPU0", "NIC0", or the name of a NIC ("mlx5_0", drivers before 510)
    cpus: CpuSet | None  # CPUs near the GPU; only those that the caller's cpuset allows
    # NUMA nodes near the GPU. On GH200 these are many: its CPU's and those kept for MIG.
    nodes: tuple[NodeIndex, ...] | None
    memory_node: NodeIndex | None  # the node that the GPU's own memory is


class TopoMatrix(Struct, frozen=True):
    devices: tuple[TopoDevice, ...]  # in the tool's order
    # shape (devices, devices), [from][to]; "X" on the diagonal, then NV#, PIX, PXB, PHB, NODE or
    # SYS, nearest first; None for N/A
    links: tuple[tuple[str | None, ...], ...]

    def count_nvlinks(self, a: int, b: int) -> int:
        """Return the bonded NVLinks between the devices at two positions; 0 without NVLinks. To a
        switch's GPUs it is the number of links to the switches."""
        match = _NVLINKS.fullmatch(self.links[a][b] or "")
        return int(match[1]) if match else 0


def looks_like_topology(text: str) -> bool:
    """Return whether the header of a matrix is among the first lines."""
    lines = TERMINAL_CODE.sub("", text[:_HEAD_CHARACTERS]).split("\n")
    return any(line.split()[:1] == ["GPU0"] and _AFFINITIES[0] in line for line in lines)


def parse_topology(text: str) -> TopoMatrix:
    """Parse the matrix, also below a banner. Raises ParseError, also for too few rows."""
    names: list[str] = []
    affinities = place = 0
    rows: list[tuple[TopoDevice, tuple[str | None, ...]]] = []
    in_legend = False
    has_header = looks_like_topology(text)
    for line in Lines(TERMINAL_CODE.sub("", text), _TOPOLOGY, stripped=False):
        if not line.text.strip():
            continue
        if not names:
            if has_header and line.text.split()[0] != "GPU0":
                continue
            names, affinities = _parse_header(line)
            place = line.text.find(_AFFINITIES[0])
        elif line.text.strip() in ("Legend:", "NIC Legend:"):
            in_legend = True
        elif in_legend:
            if not _NIC_NAME.fullmatch(line.text) and not _LEGEND.match(line.text):
                raise line.make_error("a line of the legend")
        elif len(rows) == len(names):
            raise line.make_error(plural(len(names), "row"))
        else:
            rows.append(_parse_row(line, names[len(rows)], len(names), affinities, place))
    if not names or len(rows) != len(names):
        raise ParseError(_TOPOLOGY, f"{len(names) or 'some'} rows", plural(len(rows), "row"))
    return TopoMatrix(tuple(device for device, _ in rows), tuple(links for _, links in rows))


def _parse_header(line: Line) -> tuple[list[str], int]:
    """Return the names of the columns, and the number of affinities after them."""
    devices, _, tail = line.text.partition(_AFFINITIES[0])
    names = devices.split()
    headings = (
        " ".join((_AFFINITIES[0] + tail).split()) if tail or _AFFINITIES[0] in line.text else ""
    )
    for count in range(len(_AFFINITIES) + 1):
        if headings == " ".join(_AFFINITIES[:count]):
            break
    else:
        raise line.make_error(f"columns {', '.join(_AFFINITIES)}", headings)
    good = all(_TOPO_DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names)
    if not names or not good or len(names) > MAX_DEVICES or not names[0].startswith("GPU"):
        raise line.make_error("a header: GPU0 GPU1 ... CPU Affinity")
    return names, count


def _parse_row(
    line: Line, name: str, columns: int, affinities: int, place: int
) -> tuple[TopoDevice, tuple[str | None, ...]]:
    words = line.text.split()
    if words[0] != name:
        raise line.make_error(f"the row of {name}")
    links = words[1 : columns + 1]
    if len(links) != columns or not all(link == "N/A" or _LINK.fullmatch(link) for link in links):
        raise line.make_error(f"{plural(columns, 'link')} such as NV18 or SYS")
    values = _parse_affinities(line, words[columns + 1 :], columns, affinities, place)
    cpus, nodes, memory_node = (*values, None, None, None)[:3]
    position = f"{_TOPOLOGY}:{line.number}"
    return (
        TopoDevice(
            name,
            None if cpus is None else CpuSet.parse(cpus, position),
            # A list of nodes is written as one of CPUs is: 0,5-11.
            None if nodes is None else tuple(map(NodeIndex, CpuSet.parse(nodes, position))),
            None if memory_node is None else _parse_node(line, memory_node),
        ),
        tuple(None if link == "N/A" else link for link in links),
    )


_SPACED = 6
"""Columns of text by which a value may be off the name of its column."""


def _parse_affinities(
    line: Line, words: list[str], columns: int, affinities: int, place: int
) -> list[str | None]:
    """Return the last columns of a row, with None for what is not there.

    Short values have a tab more behind them, so that tabs do not count columns:
        X \\t0-7\\t\\tN/A\\t\\tN/A          CPUs 0-7
        X \\t0-63,128-191\\t0\\t\\tN/A      CPUs 0-63,128-191, node 0
        X \\t\\t1\\t\\tN/A                  no CPUs (none that the cpuset allows), node 1
        X \\t\\t\\t\\t                      a NIC
    In a paste with spaces for tabs, CPUs stand below the name of their column. place: of it.
    """
    if not words:
        return []
    if len(words) < affinities:
        cells = [cell.strip() for cell in line.text.split("\t")][columns + 1 :]
        if "\t" not in line.text and words[-1] == "N/A" and affinities == len(_AFFINITIES):
            start = [word.start() for word in re.finditer(r"\S+", line.text)][columns + 1]
            cells = [words[0] if abs(start - place) < _SPACED else ""]
        elif "\t" not in line.text or not cells:
            raise line.make_error(plural(affinities, "affinity", "affinities"))
        # The last column always has a text; one or both of the first two are empty.
        last = [words[-1]] if affinities == len(_AFFINITIES) else []
        middle = words[: len(words) - len(last)]
        first = [*([] if cells[0] else ["N/A"]), *middle]
        words = [*first, *["N/A"] * (affinities - len(last) - len(first)), *last]
    if len(words) != affinities:
        raise line.make_error(plural(affinities, "affinity", "affinities"))
    return [None if word == "N/A" else word for word in words]


def _parse_node(line: Line, text: str) -> NodeIndex | None:
    if text == "-1":
        return None
    node = parse_whole(text, digits=5)
    if node is None:
        raise line.make_error("a node or N/A", text)
    return NodeIndex(node)


MAX_ROWS = 4096

_INSTANCES = "nvidia-smi mig -lgi"
_LIST = "nvidia-smi -L"


class MigInstance(Struct, frozen=True):
    """A GPU instance."""

    gpu: int  # the tool's number of its GPU
    number: int
    profile: str  # "1g.10gb+me"


class MigDevice(Struct, frozen=True):
    """A compute instance."""

    gpu: int
    device: int  # its number on its GPU, as `index` of nvidia-smi -q -x
    profile: str
    uuid: str | None


def parse_instances(text: str) -> tuple[MigInstance, ...]:
    """Return the GPU instances, in the tool's order. Headings, borders and remarks such as "No GPU
    instances found" are skipped.

    Raises ParseError for a row of a MIG profile without its four numbers, and for an instance that
    is listed twice.
    """
    instance_of: dict[tuple[int, int], MigInstance] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip().strip("|").split()
        if len(words) < 2 or words[1] != "MIG":
            continue
        start, colon, size = words[-1].partition(":")
        numbers = [_parse_small_number(word) for word in (words[0], *words[3:-1], start, size)]
        if len(words) != 6 or not colon or None in numbers or len(instance_of) >= MAX_ROWS:
            expected = "GPU, MIG, profile, profile's ID, instance's ID, start:size"
            raise ParseError(_INSTANCES, expected, line.strip()[:80], line=number)
        gpu, _, instance, *_ = (digits or 0 for digits in numbers)
        if (gpu, instance) in instance_of:
            raise ParseError(_INSTANCES, "each instance once", line.strip()[:80], line=number)
        instance_of[gpu, instance] = MigInstance(gpu, instance, words[2])
    return tuple(instance_of.values())


def parse_list(text: str) -> tuple[MigDevice, ...]:
    """Return the compute instances, in the tool's order. Raises ParseError for one below no GPU."""
    devices: list[MigDevice] = []
    gpu: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(":", " ").split()
        if words[:1] == ["GPU"] and len(words) > 1:
            gpu = _parse_small_number(words[1])
        elif words[:1] == ["MIG"]:
            device = (
                _parse_small_number(words[3]) if len(words) > 3 and words[2] == "Device" else None
            )
            if gpu is None or device is None or len(devices) >= MAX_ROWS:
                expected = "GPU N, then lines MIG PROFILE Device N: (UUID: ...)"
                raise ParseError(_LIST, expected, line.strip()[:80], line=number)
            uuid = words[5].rstrip(")") if len(words) == 6 and words[4] == "(UUID" else None
            devices.append(MigDevice(gpu, device, words[1], uuid))
    return tuple(devices)


def _parse_small_number(word: str) -> int | None:
    return parse_whole(word, digits=5)
