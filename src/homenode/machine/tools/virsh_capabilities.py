"""virsh capabilities: the nodes and CPUs of the host as libvirt sees them.

libvirt reads the same /sys independently: the results must agree.

Seen with libvirt 6.0 to 11.3. Source: docs/formatcaps.html of libvirt; schemas/capability.rng.
"""

from lxml import etree
from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, CpuSet, NodeIndex, PuIndex
from homenode.errors import ParseError
from homenode.machine.tools.xml_text import parse_xml
from homenode.units import parse_whole

COMMAND = ("virsh", "-r", "capabilities")
MAX_CELLS = 1024

_SOURCE = "virsh capabilities"
_MAX_NUMBER = 1 << 60


class CapabilitiesCell(Struct, frozen=True):
    node: NodeIndex
    distances: tuple[tuple[NodeIndex, int], ...]  # (node, SLIT), if libvirt reports them
    siblings_of_pu: dict[PuIndex, CpuSet | None]  # the CPUs of its core; None if it is offline


def parse(text: str) -> tuple[CapabilitiesCell, ...]:
    """Return the cells of the host, in the document's order; the guests that could be run are
    skipped. Raises ParseError if a used element is malformed."""
    root = parse_xml(text, "capabilities", _SOURCE)
    host = root.find("host")
    if host is None:
        raise ParseError(_SOURCE, "a <host>")
    cells = tuple(_parse_cell(cell) for cell in host.findall("topology/cells/cell"))
    if len(cells) > MAX_CELLS or len({cell.node for cell in cells}) != len(cells):
        raise ParseError(_SOURCE, "each cell once", f"{len(cells)} cells")
    return cells


def _parse_cell(cell: etree._Element) -> CapabilitiesCell:
    return CapabilitiesCell(
        NodeIndex(_number(cell, "id")),
        tuple(
            (NodeIndex(_number(sibling, "id")), _number(sibling, "value"))
            for sibling in cell.findall("distances/sibling")
        ),
        dict(_parse_cpu(cpu) for cpu in cell.findall("cpus/cpu")),
    )


def _parse_cpu(cpu: etree._Element) -> tuple[PuIndex, CpuSet | None]:
    siblings, pu = cpu.get("siblings"), _number(cpu, "id")
    if pu > MAX_PU_INDEX:
        raise ParseError(_SOURCE, f"CPUs up to {MAX_PU_INDEX}", str(pu))
    pus = None if siblings is None else CpuSet.parse(str(siblings), f"{_SOURCE}: siblings")
    return PuIndex(pu), pus


def _number(element: etree._Element, name: str) -> int:
    text, subject = str(element.get(name, "")), f"{element.tag} {name}"
    number = parse_whole(text.strip())
    if number is None or number > _MAX_NUMBER:
        raise ParseError(_SOURCE, f"a number below 2^60 for {subject}", text)
    return number
