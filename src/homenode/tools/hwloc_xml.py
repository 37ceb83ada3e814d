"""hwloc XML: what `lstopo --of xml` (or hwloc-gather-topology) writes, as records.

COMMAND needs --disallowed, or PUs outside the caller's cgroup are left out; and io:all, or only
"important" PCI functions are there. Versions 2 and 3 of the format (hwloc 2.0 and newer) are read.
The document is untrusted: see tools/xml_text.py. Its DOCTYPE is ordinary and nothing is loaded.

Source: hwloc2.dtd of hwloc 2.12, hwloc/topology-xml.c; seen: hwloc 2.8, 2.9, 3.0 (development).
"""

from dataclasses import dataclass, field

from lxml import etree

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.tools.xml_text import parse_xml

COMMAND = ("lstopo-no-graphics", "--disallowed", "--filter", "io:all", "--of", "xml")


@dataclass(frozen=True, slots=True)
class HwlocObject:
    """One <object>. type: "Package", "NUMANode", "L3Cache", "PCIDev", ... attributes and infos as
    written; memory, I/O and normal children in document order."""

    type: str
    attributes: dict[str, str]
    infos: dict[str, str]
    children: "tuple[HwlocObject, ...]"


@dataclass(frozen=True, slots=True)
class HwlocDistances:
    """One <distances2> or <distances2hetero>.

    objects: per row and column, its index with the type before it ("NUMANode:0", "OSDev:701").
    by_os_index: those are OS indices, else gp_index. values: shape (objects, objects), [from][to].
    """

    name: str
    kind: int
    by_os_index: bool
    objects: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HwlocCpuKind:
    """One <cpukind>. efficiency: higher = faster; None where hwloc could not rank."""

    cpuset: str
    efficiency: int | None
    infos: dict[str, str]


@dataclass(frozen=True, slots=True)
class HwlocTopology:
    """A whole document. infos: of the machine and, in version 3, of the topology."""

    version: str
    machine: HwlocObject
    distances: tuple[HwlocDistances, ...]
    cpu_kinds: tuple[HwlocCpuKind, ...]
    infos: dict[str, str] = field(default_factory=dict)


def parse(text: str | bytes, source: str = "hwloc XML") -> HwlocTopology:
    """The records of a document.

    Raises InputError for version 1 and for a document that is too large, and ParseError for other
    XML, entities and malformed values.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ParseError(source, "UTF-8", repr(text[:20])) from None
    root = parse_xml(text, "topology", source)
    version = root.get("version")
    if version is None or not version.startswith(("2.", "3.")):
        raise InputError(
            f"{source}: expected hwloc XML version 2 or 3, found {version or 'version 1'}",
            hint="export it again with `lstopo --of xml` of hwloc 2.0 or newer",
        )
    machines = [child for child in root if child.tag == "object"]
    if len(machines) != 1 or machines[0].get("type") != "Machine":
        raise InputError(f"{source}: expected one object of type Machine, found {len(machines)}")
    machine = _object(machines[0], source)
    return HwlocTopology(
        version=version,
        machine=machine,
        distances=tuple(
            _distances(child, source)
            for child in root
            if child.tag in ("distances2", "distances2hetero")
        ),
        cpu_kinds=tuple(_cpu_kind(child) for child in root if child.tag == "cpukind"),
        infos={**machine.infos, **_infos(root)},
    )


def _object(element: etree._Element, source: str) -> HwlocObject:
    """Depth is bounded: libxml2 refuses documents nested deeper than 256 elements."""
    attributes = {str(key): str(value) for key, value in element.attrib.items()}
    type_name = attributes.get("type")
    if type_name is None:
        raise ParseError(source, "an object with a type", str(attributes), line=_line(element))
    infos: dict[str, str] = {}
    children: list[HwlocObject] = []
    for child in element:
        if child.tag == "object":
            children.append(_object(child, source))
        elif child.tag == "info":
            infos.setdefault(child.get("name", ""), child.get("value", ""))
        # page_type, userdata: sizes of pages are kept as an info of their own
        elif child.tag == "page_type":
            infos[f"pages of {child.get('size', '')}"] = child.get("count", "")
    return HwlocObject(type_name, attributes, infos, tuple(children))


def _line(element: etree._Element) -> int | None:
    line: object = element.sourceline  # lxml-stubs types it as an ellipsis
    return line if isinstance(line, int) else None


def _infos(element: etree._Element) -> dict[str, str]:
    infos: dict[str, str] = {}
    for child in element:
        if child.tag == "info":
            infos.setdefault(child.get("name", ""), child.get("value", ""))
    return infos


def _cpu_kind(element: etree._Element) -> HwlocCpuKind:
    efficiency = element.get("forced_efficiency")
    known = efficiency is not None and efficiency.isascii() and efficiency.isdigit()
    return HwlocCpuKind(
        element.get("cpuset", "0x0"), int(efficiency or 0) if known else None, _infos(element)
    )


def _distances(element: etree._Element, source: str) -> HwlocDistances:
    """Indices and values come in chunks of ten; a heterogeneous matrix has types in its indices."""
    indices: list[str] = []
    values: list[int] = []
    for child in element:
        words = (child.text or "").split()
        if child.tag == "indexes":
            indices += words
        elif child.tag == "u64values":
            if not all(word.isascii() and word.isdigit() and len(word) <= 20 for word in words):
                raise ParseError(source, "whole numbers", child.text or "", line=_line(child))
            values += [int(word) for word in words]
    count = len(indices)
    if str(count) != element.get("nbobjs") or len(values) != count * count:
        found = f"{count} indices and {len(values)} values"
        expected = f"{element.get('nbobjs')} indices and their square of values"
        raise ParseError(source, expected, found, line=_line(element))
    kind = element.get("kind", "0")
    of_type = element.get("type")
    return HwlocDistances(
        name=element.get("name", ""),
        kind=int(kind) if kind.isascii() and kind.isdigit() and len(kind) < 10 else 0,
        by_os_index=element.get("indexing") == "os",
        objects=tuple(index if of_type is None else f"{of_type}:{index}" for index in indices),
        values=tuple(tuple(values[i * count : (i + 1) * count]) for i in range(count)),
    )


def pus_of(obj: HwlocObject, attribute: str, source: str) -> CpuSet:
    """The PUs of an attribute such as cpuset; empty where it is absent. Raises ParseError."""
    text = obj.attributes.get(attribute)
    return CpuSet() if text is None else CpuSet.parse_mask(text, f"{source}: {attribute}")


def os_index(obj: HwlocObject, source: str) -> int:
    """The OS index of an object that must have one. Raises ParseError."""
    index = number(obj.attributes.get("os_index"))
    if index is None:
        raise ParseError(source, f"{obj.type} with an os_index", str(obj.attributes))
    return index


def number(text: str | None) -> int | None:
    """The whole number of a text; None where there is none."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    return int(text)
