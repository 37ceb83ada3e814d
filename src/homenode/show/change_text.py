"""ChangeText: lines that a change of a domain's definition adds and removes, by section."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from homenode.bdf import Bdf
from homenode.doc import Doc, Text
from homenode.text import plural
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.hostdevs import list_hostdev_elements
from homenode.vm.domain.merge import normalize
from homenode.vm.domain.read import open_domain

_Key = tuple[Any, ...]
_Counts = Counter[tuple[str, ...]]
_OTHER = "other"
_SECTION_OF = {
    **{name: name for name in ("cputune", "cpu", "numatune")},
    **dict.fromkeys(("memoryBacking", "memory", "currentMemory"), "memory"),
    **{name: f"{name}s" for name in ("controller", "hostdev")},
}
_COUNTED = ("guest node", "GPU", "device")
_TAINTS = "qemu:commandline (libvirt marks it tainted)"
_PER_NODE = "for each guest node"
_HANG = 25  # behind section, lines added, lines removed


def count_line_changes(before: bytes, after: bytes) -> tuple[int, int]:
    """Return the lines that a change adds and removes, regardless of position."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return (new - old).total(), (old - new).total()


def build_change_doc(
    name: str, before: bytes, after: bytes, gpus: frozenset[Bdf] = frozenset()
) -> Doc:
    """Describe each section in a line: lines added and removed, elements. gpus: of the host."""
    old, new = (open_domain(xml, name) for xml in (before, after))
    added, removed = _count_changes(_list_lines(old), _list_lines(new), size=1)
    new_parts, old_parts = _count_changes(_list_parts(old, gpus), _list_parts(new, gpus), size=2)
    head = f"change: {plural(added.total(), 'line')} added, {removed.total()} removed"
    texts = [Text(f"{head} in the definition of {name} (all: --diff)", hang=2)]
    sections = {key for (key,) in (*added, *removed)}
    for section in sorted(sections, key=lambda s: (s == _OTHER, -added[(s,)], s)):
        # Removed elements are named only if nothing replaces them.
        counts = new_parts if any(s == section for s, _ in new_parts) else old_parts
        parts = [(label, count) for (s, label), count in counts.items() if s == section]
        parts.sort(key=lambda part: part[1] == 1 or part[0] == _PER_NODE)
        text = ", ".join(_format_part(*part) for part in parts)
        text += " removed" if counts is old_parts and text else ""
        plus, minus = added[(section,)], removed[(section,)]
        line = f"  {section:<12}{f'+{plus}' if plus else '':>5}{f'-{minus}' if minus else '':>4}"
        texts.append(Text(f"{line}  {text}".rstrip(), hang=_HANG))
    return Doc("", tuple(texts))


def _count_changes(
    old: Iterator[_Key], new: Iterator[_Key], *, size: int
) -> tuple[_Counts, _Counts]:
    """Count what each side has more than the other, by the first fields of the keys."""
    before, after = Counter(old), Counter(new)
    added, removed = _Counts(), _Counts()
    for counts, changes in ((after - before, added), (before - after, removed)):
        for key, count in counts.items():
            changes[key[:size]] += count
    return added, removed


def _list_sections(document: Document) -> Iterator[tuple[str, Element]]:
    """Yield (section, element) of each child of <domain>, and of each device."""
    for child in document.root.children:
        for element in child.children if child.name == "devices" else (child,):
            yield _SECTION_OF.get(element.name, _OTHER), element


def _list_lines(document: Document) -> Iterator[tuple[str, bytes]]:
    lines = document.text.split(b"\n")
    sections = [_OTHER] * len(lines)
    for section, element in _list_sections(document):
        count = document.text.count(b"\n", element.start, element.end) + 1
        sections[element.line - 1 : element.line - 1 + count] = [section] * count
    return zip(sections, lines, strict=True)


def _list_parts(document: Document, gpus: frozenset[Bdf]) -> Iterator[tuple[str, str, object]]:
    """Yield (section, label, content) of the elements that a change names."""
    of_gpus = {element.start for bdf, element in list_hostdev_elements(document) if bdf in gpus}
    for section, element in _list_sections(document):
        is_whole = section in ("controllers", "hostdevs", _OTHER) or not element.children
        for child in (element,) if is_whole else element.children:
            for part in child.children if child.name == "numa" else (child,):
                yield section, _label(section, part, part.start in of_gpus), normalize(part)


def _label(section: str, element: Element, is_gpu: bool) -> str:
    if section == "controllers":
        has_hole = element.child("pcihole64") is not None
        return "pcihole64" if has_hole else element.get("model") or element.get("type") or "pci"
    if section == "hostdevs":
        return "GPU" if is_gpu else "device"
    if section == "numatune":
        return _PER_NODE if element.name == "memnode" else element.get("mode") or "strict"
    if element.name == "cell":
        return "guest node"
    return _TAINTS if element.tag == "qemu:commandline" else element.tag


def _format_part(label: str, count: int) -> str:
    if label in _COUNTED:
        return plural(count, label)
    return label if count == 1 or label == _PER_NODE else f"{count} {label}"
