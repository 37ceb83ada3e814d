"""virsh capabilities: the nodes, PUs and caches of the host as libvirt sees them.

libvirt reads the same /sys that we read, on its own: the two must agree.

Seen of libvirt 6.0 to 11.3. Source: docs/formatcaps.html of libvirt; schemas/capability.rng.
"""

from lxml import etree
from msgspec import Struct

from homenode.cpuset import MAX_PU_INDEX, CpuSet, PuIndex
from homenode.errors import InputError, ParseError
from homenode.indices import NodeIndex, PackageIndex
from homenode.machine.tools.xml_text import parse_xml
from homenode.units import bytes_of

COMMAND = ("virsh", "-r", "capabilities")
MAX_CELLS = 1024

_SOURCE = "virsh capabilities"
_MAX_NUMBER = 1 << 60


class CapabilitiesCpu(Struct, frozen=True):
    """One PU of a cell. All but `pu` are None for PUs that are offline.

    siblings: the PUs of its core.
    """

    pu: PuIndex
    package: PackageIndex | None
    die: int | None
    core: int | None
    siblings: CpuSet | None


class CapabilitiesCell(Struct, frozen=True):
    """One NUMA node.

    pages:     (page size in bytes, count), as configured; not how many are free.
    distances: (node, SLIT), where libvirt gives them.
    """

    node: NodeIndex
    memory_bytes: int | None
    pages: tuple[tuple[int, int], ...]
    distances: tuple[tuple[NodeIndex, int], ...]
    cpus: tuple[CapabilitiesCpu, ...]


class CapabilitiesCache(Struct, frozen=True):
    """One cache bank: level, "both", "data" or "code", its size and PUs."""

    level: int
    kind: str
    size_bytes: int
    pus: CpuSet


class VirshCapabilities(Struct, frozen=True):
    """cells and caches in the document's order; caches is empty before libvirt 3.10."""

    architecture: str | None
    cpu_model: str | None
    iommu: bool | None
    cells: tuple[CapabilitiesCell, ...]
    caches: tuple[CapabilitiesCache, ...]


def parse(text: str) -> VirshCapabilities:
    """The host part; the guests that could be run are skipped, virsh domcapabilities prints more.

    Raises ParseError where an element that we use is not of its form.
    """
    root = parse_xml(text, "capabilities", _SOURCE)
    host = root.find("host")
    if host is None:
        raise ParseError(_SOURCE, "a <host>", "none")
    cells = tuple(_cell(cell) for cell in host.findall("topology/cells/cell"))
    if len(cells) > MAX_CELLS or len({cell.node for cell in cells}) != len(cells):
        raise ParseError(_SOURCE, "each cell once", f"{len(cells)} cells")
    iommu = host.find("iommu")
    return VirshCapabilities(
        host.findtext("cpu/arch"),
        host.findtext("cpu/model"),
        None if iommu is None else iommu.get("support") == "yes",
        cells,
        tuple(_cache(bank) for bank in host.findall("cache/bank")),
    )


def _cell(cell: etree._Element) -> CapabilitiesCell:
    memory = cell.find("memory")
    return CapabilitiesCell(
        NodeIndex(_number(cell, "id")),
        None if memory is None else _bytes(memory, _count(memory)),
        tuple(
            (_bytes(page, _number(page, "size")), _count(page)) for page in cell.findall("pages")
        ),
        tuple(
            (NodeIndex(_number(sibling, "id")), _number(sibling, "value"))
            for sibling in cell.findall("distances/sibling")
        ),
        tuple(_cpu(cpu) for cpu in cell.findall("cpus/cpu")),
    )


def _cpu(cpu: etree._Element) -> CapabilitiesCpu:
    siblings = cpu.get("siblings")
    package = _number_or_none(cpu, "socket_id")
    pu = _number(cpu, "id")
    if pu > MAX_PU_INDEX:
        raise ParseError(_SOURCE, f"PUs up to {MAX_PU_INDEX}", str(pu))
    return CapabilitiesCpu(
        PuIndex(pu),
        None if package is None else PackageIndex(package),
        _number_or_none(cpu, "die_id"),
        _number_or_none(cpu, "core_id"),
        None if siblings is None else CpuSet.parse(str(siblings), f"{_SOURCE}: siblings"),
    )


def _cache(bank: etree._Element) -> CapabilitiesCache:
    return CapabilitiesCache(
        _number(bank, "level"),
        str(bank.get("type", "")),
        _bytes(bank, _number(bank, "size")),
        CpuSet.parse(str(bank.get("cpus", "")), f"{_SOURCE}: cache"),
    )


def _bytes(element: etree._Element, count: int) -> int:
    try:
        return bytes_of(count, str(element.get("unit", "KiB")))
    except InputError as error:
        raise ParseError(_SOURCE, "a unit of bytes", error.message) from None


def _count(element: etree._Element) -> int:
    return _integer(element.text or "", str(element.tag))


def _number(element: etree._Element, name: str) -> int:
    return _integer(str(element.get(name, "")), f"{element.tag} {name}")


def _number_or_none(element: etree._Element, name: str) -> int | None:
    return None if element.get(name) is None else _number(element, name)


def _integer(text: str, where: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise ParseError(_SOURCE, f"a number for {where}", text)
    number = int(digits)
    if number > _MAX_NUMBER:
        raise ParseError(_SOURCE, f"a number below 2^60 for {where}", text)
    return number
