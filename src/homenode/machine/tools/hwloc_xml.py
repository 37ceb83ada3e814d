"""hwloc XML: what `lstopo --of xml` (or hwloc-gather-topology) writes, as records.

COMMAND needs --disallowed, or CPUs outside the caller's cgroup are omitted; and io:all, or only
"important" PCI functions are there. Versions 2 and 3 of the format (hwloc 2.0 and newer) are read,
and version 1, whose records get the form of version 2: types, caches by level, a matrix of
distances for the NUMA nodes, and a node for the memory of a machine that shows none.
The document is untrusted: see xml_text.py. Its DOCTYPE is ordinary and nothing is loaded.

Source: hwloc2.dtd of hwloc 2.12, hwloc/topology-xml.c; seen: hwloc 1.11, 2.8, 2.9, 3.0
(development).
"""

import re

from lxml import etree
from msgspec import Struct, field
from msgspec.structs import replace

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.tools.xml_text import parse_xml
from homenode.text import plural
from homenode.units import parse_whole

COMMAND = ("lstopo-no-graphics", "--disallowed", "--filter", "io:all", "--of", "xml")


class HwlocObject(Struct, frozen=True):
    # "Package", "NUMANode", "L3Cache", "PCIDev", ... attributes and infos as written; memory, I/O
    # and normal children in document order.
    type: str
    attributes: dict[str, str]
    infos: dict[str, str]
    children: "tuple[HwlocObject, ...]"


class HwlocDistances(Struct, frozen=True):
    name: str
    by_os_index: bool  # those are OS indices, else gp_index
    # per row and column, its index with the type before it ("NUMANode:0", "OSDev:701")
    objects: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]  # shape (objects, objects), [from][to]


class HwlocTopology(Struct, frozen=True):
    machine: HwlocObject
    distances: tuple[HwlocDistances, ...]
    cpu_kinds: tuple[tuple[str, dict[str, str]], ...]  # (cpuset, infos)
    # info attributes of the machine and, in version 3, of the topology
    infos: dict[str, str] = field(default_factory=dict)


def parse(text: str | bytes, source: str = "hwloc XML") -> HwlocTopology:
    """Return the records of a document. Raises InputError for an unknown version and for a document
    that is too large, and ParseError for other XML, entities and malformed values."""
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ParseError(source, "UTF-8", repr(text[:20])) from None
    root = parse_xml(text, "topology", source)
    version = root.get("version", _VERSION_1)  # version 1 has no such attribute
    if not version.startswith(("1.", "2.", "3.")):
        raise InputError(
            f"{source}: expected hwloc XML version 1, 2 or 3, found {version}",
            hint="convert it with an hwloc that reads it: lstopo -i FILE --of xml NEW.xml",
        )
    is_old = version.startswith("1.")
    machines = [child for child in root if child.tag == "object"]
    if len(machines) != 1 or machines[0].get("type") not in _MACHINE_TYPES[is_old]:
        found_text = ", ".join(str(machine.get("type")) for machine in machines[:4]) or "no object"
        raise InputError(f"{source}: expected one object of type Machine, found {found_text}")
    machine = _parse_object(machines[0], source)
    if is_old:
        return HwlocTopology(
            machine=_add_node(_convert_object(machine)),
            distances=tuple(_read_old_distances(machines[0], source)),
            cpu_kinds=(),
            infos=machine.infos,
        )
    return HwlocTopology(
        machine=machine,
        distances=tuple(
            _parse_distances(child, source)
            for child in root
            if child.tag in ("distances2", "distances2hetero")
        ),
        cpu_kinds=tuple(
            (child.get("cpuset", "0x0"), _parse_infos(child))
            for child in root
            if child.tag == "cpukind"
        ),
        infos={**machine.infos, **_parse_infos(root)},
    )


def _parse_object(element: etree._Element, source: str) -> HwlocObject:
    """Depth is bounded: libxml2 rejects documents nested deeper than 256 elements."""
    attributes = {str(key): str(value) for key, value in element.attrib.items()}
    type_name = attributes.get("type")
    if type_name is None:
        raise ParseError(source, "an object with a type", str(attributes), line=_find_line(element))
    infos = _parse_infos(element)
    children: list[HwlocObject] = []
    for child in element:
        if child.tag == "object":
            children.append(_parse_object(child, source))
        # page_type, userdata: sizes of pages are kept as an info of their own
        elif child.tag == "page_type":
            infos[f"pages of {child.get('size', '')}"] = child.get("count", "")
    return HwlocObject(type_name, attributes, infos, tuple(children))


def _find_line(element: etree._Element) -> int | None:
    line: object = element.sourceline  # lxml-stubs types it as an ellipsis
    return line if isinstance(line, int) else None


def _parse_infos(element: etree._Element) -> dict[str, str]:
    infos: dict[str, str] = {}
    for child in element:
        if child.tag == "info":
            infos.setdefault(child.get("name", ""), child.get("value", ""))
    return infos


def _parse_distances(element: etree._Element, source: str) -> HwlocDistances:
    """Indices and values come in chunks of ten; a heterogeneous matrix has types in its indices."""
    indices: list[str] = []
    values: list[int] = []
    for child in element:
        words = (child.text or "").split()
        if child.tag == "indexes":
            indices += words
        elif child.tag == "u64values":
            numbers = [parse_whole(word) for word in words]
            if None in numbers:
                raise ParseError(source, "whole numbers", child.text or "", line=_find_line(child))
            values += [number for number in numbers if number is not None]
    count = len(indices)
    if str(count) != element.get("nbobjs") or len(values) != count * count:
        counts = f"{count} indices and {len(values)} values"
        expected = f"{element.get('nbobjs')} indices and their square of values"
        raise ParseError(source, expected, counts, line=_find_line(element))
    of_type = element.get("type")
    return HwlocDistances(
        name=element.get("name", ""),
        by_os_index=element.get("indexing") == "os",
        objects=tuple(index if of_type is None else f"{of_type}:{index}" for index in indices),
        values=tuple(tuple(values[i * count : (i + 1) * count]) for i in range(count)),
    )


_VERSION_1 = "1.0"
_MACHINE_TYPES = {False: ("Machine",), True: ("Machine", "System")}
_NODE_TYPES = ("NUMANode", "Node")
_NEW_TYPES = {"System": "Machine", "Node": "NUMANode", "Socket": "Package"}
"""Current names of the types of hwloc before 1.11."""

_INSTRUCTIONS = "2"
"""cache_type of a cache that holds no data."""

_LATENCY = re.compile(r"\d{1,9}(?:\.\d{1,9})?", re.ASCII)


def _convert_object(obj: HwlocObject) -> HwlocObject:
    """Return an object of version 1, and those below it, by the types of version 2."""
    of_type = _NEW_TYPES.get(obj.type, obj.type)
    if of_type == "Cache":
        holds = "i" if obj.attributes.get("cache_type") == _INSTRUCTIONS else ""
        of_type = f"L{obj.attributes.get('depth', '')}{holds}Cache"
    attributes = obj.attributes
    if subtype := obj.infos.get("Type"):  # "MCDRAM", of a node; "Die", of a group
        attributes = {"subtype": subtype, **attributes}
        of_type = "Die" if (of_type, subtype) == ("Group", "Die") else of_type
    children = tuple(_convert_object(child) for child in obj.children)
    return replace(obj, type=of_type, attributes=attributes, children=children)


def _add_node(machine: HwlocObject) -> HwlocObject:
    """Add a NUMA node to a machine without nodes (version 1) for its memory, as version 2 does."""

    def has_node(obj: HwlocObject) -> bool:
        return obj.type == "NUMANode" or any(has_node(child) for child in obj.children)

    if has_node(machine) or "local_memory" not in machine.attributes:
        return machine
    attributes = {**machine.attributes, "os_index": "0"}
    node = HwlocObject("NUMANode", attributes, machine.infos, ())
    return replace(machine, children=(node, *machine.children))


def _read_old_distances(machine: etree._Element, source: str) -> list[HwlocDistances]:
    """Return matrices of the NUMA nodes: multiples of `latency_base`, in the document's order.

    Version 1 does not name what a matrix compares. As in hwloc's own import, one of the whole
    machine with as many rows as it has nodes is theirs; others, which groups are made of, are left
    out.
    """
    nodes = [node for node in machine.iter("object") if node.get("type") in _NODE_TYPES]
    names = tuple(f"NUMANode:{node.get('os_index', '')}" for node in nodes)
    count = len(nodes)
    matrices: list[HwlocDistances] = []
    for matrix in machine.iterchildren("distances"):
        if matrix.get("nbobjs") != str(count) or matrix.get("latency_base") is None:
            continue
        base = _parse_latency(matrix.get("latency_base", ""), matrix, source)
        values = [
            round(base * _parse_latency(child.get("value", ""), child, source))
            for child in matrix.iterchildren("latency")
        ]
        if len(values) != count * count:
            expected = f"{plural(count * count, 'latency', 'latencies')}"
            raise ParseError(source, expected, str(len(values)), line=_find_line(matrix))
        rows = tuple(tuple(values[i * count : (i + 1) * count]) for i in range(count))
        matrices.append(HwlocDistances("NUMALatency", True, names, rows))
    return matrices


def _parse_latency(text: str, element: etree._Element, source: str) -> float:
    if _LATENCY.fullmatch(text) is None:
        raise ParseError(source, "a latency such as 2.100000", text, line=_find_line(element))
    return float(text)


def parse_pus(obj: HwlocObject, attribute: str, source: str) -> CpuSet:
    """Return the CPUs of an attribute such as cpuset; empty if it is absent. Raises ParseError."""
    text = obj.attributes.get(attribute)
    return CpuSet() if text is None else CpuSet.parse_mask(text, f"{source}: {attribute}")


def read_os_index(obj: HwlocObject, source: str) -> int:
    """Return the OS index of an object that must have one. Raises ParseError."""
    index = parse_whole(obj.attributes.get("os_index"))
    if index is None:
        raise ParseError(source, f"{obj.type} with an os_index", str(obj.attributes))
    return index
