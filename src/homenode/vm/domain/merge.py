"""Merge: take a layout out of a document and keep later edits.

A three-way merge by element of the original, the applied and the current definition. A change by
both the layout and a user is a conflict, which the caller rejects.
"""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.units import KIB, parse_whole
from homenode.vm.domain.controllers import pci_controllers
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import (
    Document,
    Element,
    parse_document,
    require_attribute,
    size_bytes,
)
from homenode.vm.domain.edits import (
    Edit,
    apply,
    drop_attribute,
    remove,
    set_attribute,
    set_text,
    transplant,
)
from homenode.vm.domain.hostdevs import list_addressed

_IDENTITY: dict[str, tuple[str, ...]] = {
    "vcpupin": ("@vcpu",),
    "vcpusched": ("@vcpus",),
    "iothreadpin": ("@iothread",),
    "memnode": ("@cellid",),
    "cell": ("@id",),
    "sibling": ("@id",),
    "vcpu": ("@id",),
    "feature": ("@name",),
    "page": ("@size", "@unit", "@nodeset"),
    "controller": ("@type", "@index"),
    "disk": ("target/@dev",),
    "filesystem": ("target/@dir",),
    "interface": (
        "mac/@address",
        *(f"source/address/@{name}" for name in ("bus", "slot", "function")),
    ),
    "hostdev": (
        "@type",
        *(
            f"source/address/@{name}"
            for name in ("domain", "bus", "slot", "function", "uuid", "device")
        ),
    ),
}
"""Paths of the values that identify an element; other elements are identified by order."""

_Key = tuple[str, ...]


class MergeResult(Struct, frozen=True):
    """The current document without the layout; unchanged if there are conflicts."""

    document: Document
    # elements that both the layout and a user changed, and references that would break, as text
    conflicts: tuple[str, ...]
    # devices that lost their address with a controller of the layout; libvirt assigns a new address
    moved: tuple[str, ...]


def take_out(original: Document, applied_document: Document, now: Document) -> MergeResult:
    """Return the current document with all changes from `original` to `applied` reverted. Raises
    ParseError or InputError if a document cannot be read."""
    work = _Merge(original, now, [], [])
    work.merge_element("", original.root, applied_document.root, now.root)
    if work.conflicts:
        return MergeResult(now, tuple(sorted(work.conflicts)), ())
    merged_document, moved = _remove_addresses(apply(now, work.edits), now)
    known_facts = {*check_references(now), *check_references(original)}
    broken_facts = [
        contradiction.fact
        for contradiction in check_references(merged_document)
        if contradiction not in known_facts
    ]
    return MergeResult(merged_document, tuple(broken_facts), moved)


_SIZES = {"cell": "memory", "page": "size"}
"""The attribute that holds a size, by element."""

_SIZE_TEXTS = {"memory", "currentMemory", "maxMemory", "pcihole64"}
_SETS = ("cpus", "cpuset", "nodeset", "vcpus")
_LEVELS = ("dies", "clusters")


def add_libvirt_parts(document: Document, now: Document) -> Document:
    """Return the tuned document with libvirt's additions, taken from `now`, edited since.

    Sizes are in KiB, sets are ranges, a topology has all levels; devices have libvirt's addresses
    and ports. Raises ParseError or InputError.
    """
    edits: list[Edit] = []
    for element in document.root.walk():
        edits += _convert_to_kib(document, element)
        for name in _SETS:
            if text := element.get(name):
                edits += set_attribute(document, element, name, str(CpuSet.parse(text)))
    topology, printed_topology = document.root.find("cpu/topology"), now.root.find("cpu/topology")
    if topology is not None and printed_topology is not None:
        for name in _LEVELS:
            if topology.get(name) is None and printed_topology.get(name) == "1":
                edits += set_attribute(document, topology, name, "1")
    devices, stored_devices = document.root.child("devices"), now.root.child("devices")
    if devices is None or stored_devices is None or not devices.children:
        return apply(document, edits)
    ports = list_added_ports(document, now)
    elements = [element for index, element in pci_controllers(now) if index in ports]
    edits += transplant(document, devices, devices.children[-1], now, elements)
    printed_children = _map_children(stored_devices)
    for key, device in _map_children(devices).items():
        address = printed_children[key].child("address") if key in printed_children else None
        if device.children and device.child("address") is None and address is not None:
            edits += transplant(document, device, device.children[-1], now, [address])
    return apply(document, edits)


def list_added_ports(tuned_document: Document, document: Document) -> frozenset[int]:
    """Return the indices of PCI controllers that libvirt added to plug a device in.

    libvirt assigns missing addresses, on a bridge or root port that it adds if none is free. A
    controller without devices is a user's edit.
    """
    before = {index for index, _ in pci_controllers(tuned_document)}
    used = {address.bus for address, _ in list_addressed(document)}
    return frozenset(i for i, _ in pci_controllers(document) if i not in before and i in used)


def _convert_to_kib(document: Document, element: Element) -> list[Edit]:
    attribute, unit = _SIZES.get(element.name), element.get("unit")
    if unit in (None, "KiB") or (attribute is None and element.name not in _SIZE_TEXTS):
        return []
    text = element.text if attribute is None else require_attribute(element, attribute)
    size = str(size_bytes(element, text.strip(), unit) // KIB)
    edits = set_attribute(document, element, "unit", "KiB")
    if attribute is None:
        return edits + set_text(document, element, size)
    return edits + set_attribute(document, element, attribute, size)


class _Merge(Struct, frozen=True):
    """One merge: the edits to the current document, and the conflicts."""

    original: Document
    now: Document
    edits: list[Edit]
    conflicts: list[str]

    def merge_element(
        self, place: str, was: Element | None, put: Element | None, current: Element
    ) -> None:
        """Merge an element of `now`. was, put: the original and the applied element, or None."""
        if _is_same(was, put):
            return
        if was is None and put is not None and _is_the_layouts(put, current):
            self.edits.extend(remove(self.now, current))
            return
        place = f"{place}/{current.tag}{_name_suffix(current)}"
        edits = [
            *self._merge_attributes(place, was, put, current),
            *self._merge_text(place, was, put, current),
        ]
        before = len(self.edits)
        child_count = self._merge_children(place, was, put, current)
        if was is None and not child_count and self._is_empty(put, current):
            del self.edits[before:]
            self.edits.extend(remove(self.now, current))
            return
        if not child_count and current.children and was is not None and was.closes_itself:
            del self.edits[before:]
            self.edits.append(Edit(current.tag_end - 1, current.end, b"/>"))
        self.edits.extend(edits)

    def _is_empty(self, put: Element | None, current: Element) -> bool:
        """Return whether the element has only content that the layout added."""
        extras = dict(current.attributes).items() - dict(put.attributes if put else ()).items()
        return not extras and current.text.strip() == (put.text.strip() if put else "")

    def _merge_attributes(
        self, place: str, was: Element | None, put: Element | None, current: Element
    ) -> list[Edit]:
        edits: list[Edit] = []
        names = [
            name
            for element in (was, put, current)
            if element is not None
            for name, _ in element.attributes
        ]
        for name in dict.fromkeys(names):
            value = self._merge_value(
                f"{place}/@{name}",
                *(None if e is None else e.get(name) for e in (was, put, current)),
            )
            if value == current.get(name):
                continue
            if value is None:
                edits += drop_attribute(self.now, current, name)
            else:
                edits += set_attribute(self.now, current, name, value)
        return edits

    def _merge_text(
        self, place: str, was: Element | None, put: Element | None, current: Element
    ) -> list[Edit]:
        texts = [None if e is None else e.text.strip() or None for e in (was, put, current)]
        text = self._merge_value(place, *texts)
        if text == texts[2] or current.children:
            return []
        return set_text(self.now, current, text or "")

    def _merge_value(
        self, place: str, was: str | None, put: str | None, current: str | None
    ) -> str | None:
        if current == put:
            return was
        if put != was and current != was:
            self.conflicts.append(
                f"{place}: original {was or 'none'}, applied {put or 'none'}, "
                f"now {current or 'none'}"
            )
        return current

    def _merge_children(
        self, place: str, was: Element | None, put: Element | None, current: Element
    ) -> int:
        """Merge the children; return how many remain or come back."""
        first, second, third = (
            _map_children(was),
            _map_children(put),
            _map_children(current),
        )
        unchanged_pairs = _list_unchanged(first, second)
        child_count = 0
        for key, child in third.items():
            if key[0] in unchanged_pairs:
                child_count += 1
                continue
            before = len(self.edits)
            self.merge_element(place, first.get(key), second.get(key), child)
            child_count += not _is_removed(self.edits[before:], child)
        if current.name != "devices":  # a device that was detached stays detached
            self.conflicts.extend(
                f"{place}/{child.tag}{_name_suffix(child)}: changed by the layout, removed since"
                for key, child in first.items()
                if key[0] not in unchanged_pairs and key in second and key not in third
                if not _is_same(child, second[key])
            )
        # A child that comes back follows the sibling that it followed, if that still exists.
        after: Element | None = None
        back: dict[int, tuple[Element | None, list[Element]]] = {}
        for key, child in first.items():
            if key in third:
                after = third[key]
            elif key[0] not in unchanged_pairs and key not in second:
                back.setdefault(after.end if after else 0, (after, []))[1].append(child)
        for sibling, children in back.values():
            self.edits.extend(transplant(self.now, current, sibling, self.original, children))
        return child_count + sum(len(children) for _, children in back.values())


def _is_same(element: Element | None, other: Element | None) -> bool:
    if element is None or other is None:
        return element is other
    return normalize(element, is_devices=element.name == "devices") == normalize(
        other, is_devices=other.name == "devices"
    )


def _is_the_layouts(put: Element, current: Element) -> bool:
    """Whether an element of the layout is unchanged, but for defaults that libvirt writes."""
    return _has_all(put, current) if put.name == "controller" else _is_same(put, current)


def _has_all(put: Element, current: Element) -> bool:
    """Whether an element is contained in another, which may have more attributes and children."""
    return (
        dict(put.attributes).items() <= dict(current.attributes).items()
        and put.text.strip() == current.text.strip()
        and all(
            len(current.all(name)) == len(put.all(name))
            and all(map(_has_all, put.all(name), current.all(name)))
            for name in {child.name for child in put.children}
        )
    )


def _map_children(element: Element | None) -> dict[_Key, Element]:
    """Map the children by name and key; by order if two have the same key."""
    counts: Counter[_Key] = Counter()
    child_of_key: dict[_Key, Element] = {}
    for child in () if element is None else element.children:
        key = (child.name, *_identify(child))
        child_of_key[(*key, str(counts[key]))] = child
        counts[key] += 1
    return child_of_key


def _identify(element: Element) -> tuple[str, ...]:
    return tuple(element.value(path) or "" for path in _IDENTITY.get(element.name, ()))


def _list_unchanged(was: dict[_Key, Element], put: dict[_Key, Element]) -> frozenset[str]:
    """Return the element names that the layout did not change."""
    names = {key[0] for key in (*was, *put)}
    return frozenset(
        name
        for name in names
        if [(k, normalize(e)) for k, e in sorted(was.items(), key=_sort_key) if k[0] == name]
        == [(k, normalize(e)) for k, e in sorted(put.items(), key=_sort_key) if k[0] == name]
    )


def _sort_key(item: tuple[_Key, Element]) -> _Key:
    return item[0]


def _is_removed(edits: Sequence[Edit], element: Element) -> bool:
    """Return whether edits remove the whole element."""
    return any(e.start <= element.start and e.end == element.end and not e.new for e in edits)


def _name_suffix(element: Element) -> str:
    names = [value for value in _identify(element) if value]
    return f"[{','.join(names)}]" if names else ""


def _remove_addresses(merged_document: Document, now: Document) -> tuple[Document, tuple[str, ...]]:
    """Return the document without addresses on the layout's buses, and the devices concerned."""
    lost_buses = _list_buses(now) - _list_buses(merged_document)
    edits: list[Edit] = []
    moved = []
    for address, element in list_addressed(merged_document):
        place = element.child("address")
        if address.bus in lost_buses and place is not None:
            edits += remove(merged_document, place)
            moved.append(f"<{element.tag}>{_name_suffix(element)}")
    return apply(merged_document, edits), tuple(moved)


def _list_buses(document: Document) -> frozenset[int]:
    controllers = document.root.all("devices/controller")
    indices = (parse_whole(c.get("index")) for c in controllers if c.get("type") == "pci")
    return frozenset(index for index in indices if index is not None)


Tree = tuple[str, tuple[tuple[str, str], ...], str, tuple["Tree", ...]]


def is_same_definition(definition: bytes, other: bytes) -> bool:
    """Return whether two definitions are equivalent. Device types and controllers may be in another
    order; disks, NICs and cells may not. Raises ParseError or InputError."""
    if definition == other:
        return True
    first, second = parse_document(definition, "definition"), parse_document(other, "definition")
    return normalize(first.root) == normalize(second.root)


def normalize(element: Element, *, is_devices: bool = False) -> Tree:
    """Return an element as a value, equal for equivalent elements. is_devices: it is <devices>."""
    children = [
        normalize(child, is_devices=element.name == "domain" and child.name == "devices")
        for child in element.children
    ]
    if is_devices:
        children.sort(key=lambda child: (child[0], child if child[0] == "controller" else ()))
    # White space next to elements is formatting; without elements it is the value.
    text = element.text.strip() if element.children else element.text
    return element.name, tuple(sorted(element.attributes)), text, tuple(children)
