"""nvidia-smi topo -m: how GPUs and NICs reach each other, and the nodes of GPUs.

The only place that shows which node holds a GPU's own memory (GH200 and kin) where the driver's
numa_status is not readable. Seen of drivers 470 to 580; the header is underlined with terminal
codes, on a terminal or not.

    \\x1b[4mGPU0  GPU1  NIC0  CPU Affinity  NUMA Affinity  GPU NUMA ID\\x1b[0m
    GPU0   X    NV18  PIX   0-71          0,5-11         4
    GPU1  NV18   X    SYS   72-143        1,13-19        12
    NIC0  PIX   SYS    X

Source: man nvidia-smi, "topo"; no grammar is published.
"""

import re

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.indices import NodeIndex

COMMAND = ("nvidia-smi", "topo", "-m")
MAX_DEVICES = 1024

_SOURCE = "nvidia-smi topo -m"
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,40}", re.ASCII)
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


def parse(text: str) -> TopoMatrix:
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
                raise ParseError(_SOURCE, "a line of the legend", line, line=number)
        else:
            if len(rows) == len(names):
                raise ParseError(_SOURCE, f"{len(names)} rows", line, line=number)
            rows.append(_row(line, names[len(rows)], len(names), affinities, number))
    if not names or len(rows) != len(names):
        raise ParseError(_SOURCE, f"{len(names) or 'some'} rows", f"{len(rows)} rows")
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
        raise ParseError(_SOURCE, f"columns {', '.join(_AFFINITIES)}", found, line=number)
    good = all(_DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names)
    if not names or not good or len(names) > MAX_DEVICES or not names[0].startswith("GPU"):
        raise ParseError(_SOURCE, "a header: GPU0 GPU1 ... CPU Affinity", line, line=number)
    return names, count


def _row(
    line: str, name: str, columns: int, affinities: int, number: int
) -> tuple[TopoDevice, tuple[str | None, ...]]:
    words = line.split()
    if words[0] != name:
        raise ParseError(_SOURCE, f"the row of {name}", line, line=number)
    links = words[1 : columns + 1]
    if len(links) != columns or not all(link == "N/A" or _LINK.fullmatch(link) for link in links):
        raise ParseError(_SOURCE, f"{columns} links such as NV18 or SYS", line, line=number)
    values = _affinities(line, words[columns + 1 :], columns, affinities, number)
    cpus, nodes, memory_node = (*values, None, None, None)[:3]
    return (
        TopoDevice(
            name,
            None if cpus is None else CpuSet.parse(cpus, f"{_SOURCE}:{number}"),
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
            raise ParseError(_SOURCE, f"{affinities} affinities", line, line=number)
        # The last column always says something; of the first two one is empty, or both.
        last = [words[-1]] if affinities == len(_AFFINITIES) else []
        rest = words[: len(words) - len(last)]
        first = [*([] if cells[0] else ["N/A"]), *rest]
        words = [*first, *["N/A"] * (affinities - len(last) - len(first)), *last]
    if len(words) != affinities:
        raise ParseError(_SOURCE, f"{affinities} affinities", line, line=number)
    return [None if word == "N/A" else word for word in words]


def _nodes(text: str, number: int) -> CpuSet:
    """A list of nodes is written as one of PUs is: 0,5-11."""
    return CpuSet.parse(text, f"{_SOURCE}:{number}")


def _node(text: str, number: int) -> NodeIndex | None:
    if text == "-1":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ParseError(_SOURCE, "a node or N/A", text, line=number)
    return NodeIndex(int(text))
