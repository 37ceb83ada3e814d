"""xl info -n: the CPUs, nodes and functions of a Xen host, which dom0 itself does not see.

    cpu:    core    socket     node        device           node
      0:       0        0        0         0000:3b:00.0      0
    node:    memsize    memfree    distances
       0:     32768      30000      10,21

Sizes are MiB. The other lines are about Xen. Source: tools/xl/xl_info.c of Xen 4.17.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import MAX_PU_INDEX, CpuSet, NodeIndex, PuIndex
from homenode.findings import Gap
from homenode.machine.tools.lines import Line, Lines
from homenode.machine.tools.lscpu import MAX_CPUS, LscpuCpu, LscpuTable
from homenode.machine.tools.numactl import MAX_NODES, NumactlHardware, NumactlNode
from homenode.units import MIB

TOOL = "xl info -n"
_HEAD = re.compile(r"^(?:xen_caps +:|cpu: +core +socket +node\s*$)", re.MULTILINE)
_ROW = re.compile(r"(\d+): +(\d+) +(\d+) +([0-9,-]+)", re.ASCII)
_DEVICE = re.compile(r"([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) +(\d+)", re.ASCII)
_OTHER = re.compile(r"\w+ *:.*|No device topology data available", re.ASCII)


class XlInfo(Struct, frozen=True, kw_only=True):
    """The content of lscpu -e and numactl -H, and nodes of PCI functions."""

    cpus: LscpuTable
    nodes: NumactlHardware
    node_of_function: Mapping[Bdf, NodeIndex]  # only functions whose node Xen reports
    gaps: tuple[Gap, ...]


def looks_like_xl_info(text: str) -> bool:
    """Return whether a text shows a Xen host."""
    return _HEAD.search(text) is not None


def parse(text: str) -> XlInfo:
    """Parse the three tables. Raises ParseError."""
    lines = Lines(text, TOOL)
    table = ""
    cpus: dict[int, LscpuCpu] = {}
    nodes: dict[int, NumactlNode] = {}
    distances: dict[int, tuple[int, ...]] = {}
    node_of_function: dict[Bdf, NodeIndex] = {}
    for line in lines:
        row, device = _ROW.fullmatch(line.text), _DEVICE.fullmatch(line.text)
        if line.text.startswith(("cpu:", "device ", "node:")):
            table = line.text.split()[0]
        elif table == "cpu:" and row is not None:
            cpu = _parse_cpu(line, row)
            if cpus.setdefault(cpu.index, cpu) is not cpu or len(cpus) > MAX_CPUS:
                raise line.make_error(f"each CPU once, {MAX_CPUS} at most")
        elif table == "node:" and row is not None:
            index, size, free = (line.read_count(word, "a number") for word in row.groups()[:3])
            if index in nodes or index >= MAX_NODES:
                raise line.make_error(f"each node once, below {MAX_NODES}")
            words = (word for word in row[4].split(",") if word != "-1")  # of a node that is not
            distances[index] = tuple(line.read_count(word, "a distance") for word in words)
            nodes[index] = NumactlNode(
                index=NodeIndex(index),
                pus=CpuSet(cpu.index for cpu in cpus.values() if cpu.node == index),
                size_bytes=size * MIB,
                free_bytes=free * MIB,
            )
        elif table == "device" and device is not None:
            node = NodeIndex(line.read_count(device[2], "a node"))
            node_of_function[Bdf.parse(device[1])] = node
        elif not _OTHER.fullmatch(line.text):
            lines.add_unknown(line)
    if not cpus or not {cpu.node for cpu in cpus.values()} <= nodes.keys():
        raise lines.make_error("CPUs, and memory of each of their nodes")
    is_whole = all(len(row) == len(nodes) for row in distances.values())
    return XlInfo(
        cpus=LscpuTable(
            cpus=tuple(cpus[index] for index in sorted(cpus)),
            columns=("CPU", "CORE", "SOCKET", "NODE"),
            llc_level=None,
            gaps=(),
        ),
        nodes=NumactlHardware(
            nodes=tuple(nodes[index] for index in sorted(nodes)),
            distances=tuple(distances[index] for index in sorted(nodes)) if is_whole else None,
            gaps=(),
        ),
        node_of_function={bdf: n for bdf, n in node_of_function.items() if n in nodes},
        gaps=tuple(lines.gaps),
    )


def _parse_cpu(line: Line, row: "re.Match[str]") -> LscpuCpu:
    index, core, socket, node = (
        line.read_count(word, "a number", MAX_PU_INDEX) for word in row.groups()
    )
    return LscpuCpu(
        index=PuIndex(index), node=node, socket=socket, core=core, llc=None, is_online=True
    )
