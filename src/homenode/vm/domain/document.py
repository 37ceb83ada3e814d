"""Document: a domain's XML in its original bytes, with the offsets of every element; and numbers,
sizes, sets and addresses as libvirt spells them.

Reading and editing share this one parser. The parser is expat: it reports byte offsets, so an edit
replaces only the bytes concerned. Documents are untrusted: a DTD (and with it custom entities and
external references) is rejected before it is read, and size, depth and number of elements are
bounded.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple
from xml.parsers import expat

from msgspec import Struct

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.text import plural, printable
from homenode.units import KIB, to_bytes
from homenode.vm.model import GuestAddress

MAX_BYTES = 4 << 20
"""libvirt's own limit for XML in its protocol. Source: REMOTE_STRING_MAX, remote_protocol.x."""

MAX_DEPTH = 100
MAX_ELEMENTS = 20_000
MAX_ALIKE = 4096
MAX_DEVICES = 2048
MAX_ATTRIBUTES = 256
_ALIKE = {"sibling": 16_384, "cell": 128}
"""Elements: all, of one name, and in <devices>. QEMU has at most 4,096 vCPUs and 256 PCI buses; of
128 cells each may name its distance to all. ATTRIBUTES: of one element; libxml2, which virsh and
libvirtd use, compares each with all of them."""

_DECLARED = re.compile(rb"\A<\?xml[^>]*?\sencoding\s*=\s*[\"']([A-Za-z0-9._-]+)[\"']")
_CODECS = frozenset(
    {"utf-8", "ascii", "utf-16", "cp1252"} | {f"iso8859-{part}" for part in range(1, 17)}
)
_TAG_END = re.compile(rb"<(?:[^>\"']|\"[^\"]*\"|'[^']*')*>")
_ATTRIBUTE = re.compile(rb"(?<!\s)(\s+)([^\s=<>\"'/]+)\s*=\s*(\"[^\"]*\"|'[^']*')")


class Element(Struct, frozen=True):
    """An element and its offsets, in bytes of Document.text."""

    name: str  # the local name, or "{namespace}name"
    tag: str  # the name as written, with its prefix
    attributes: tuple[tuple[str, str], ...]
    start: int
    tag_end: int
    line: int
    # of the document, for messages. Paths below an element are of names: "target/node"; its
    # attributes are "@bus", "address/@bus".
    source: str
    children: tuple["Element", ...]
    # its own character data, in order, without that of its children. start..tag_end: the start tag.
    # tag_end..content_end: what is inside. ..end: the end tag; all three are equal if the element
    # closes itself.
    text: str
    content_end: int
    end: int

    @property
    def closes_itself(self) -> bool:
        return self.end == self.tag_end

    def get(self, attribute: str) -> str | None:
        return dict(self.attributes).get(attribute)

    def child(self, name: str) -> "Element | None":
        return next((child for child in self.children if child.name == name), None)

    def all(self, path: str) -> tuple["Element", ...]:
        """Return the elements at a path, in document order; of any name if it ends in "*"."""
        parent_path, _, name = path.rpartition("/")
        parent = self.find(parent_path) if parent_path else self
        children = () if parent is None else parent.children
        return tuple(child for child in children if name in ("*", child.name))

    def find(self, path: str) -> "Element | None":
        element: Element | None = self
        for name in path.split("/"):
            element = element.child(name) if element is not None else None
        return element

    def value(self, path: str) -> str | None:
        """The attribute at a path, or the stripped text of the element there; None if missing."""
        owner_path, _, name = path.rpartition("/")
        if not name.startswith("@"):
            element = self.find(path)
            return None if element is None else element.text.strip() or None
        owner = self.find(owner_path) if owner_path else self
        return None if owner is None else owner.get(name[1:])

    def walk(self) -> Iterator["Element"]:
        """Yield the element and all elements below it, in document order."""
        stack = [self]
        while stack:
            element = stack.pop()
            yield element
            stack.extend(reversed(element.children))


class AttributeSpan(Struct, frozen=True):
    """The offsets of an attribute. value: inside the quotes."""

    start: int  # its leading white space
    value_start: int
    value_end: int
    quote: str

    @property
    def end(self) -> int:
        return self.value_end + 1


class Document(Struct, frozen=True, dict=True):
    """A well-formed document. text is UTF-8 whatever the file's own encoding is."""

    text: bytes
    root: Element
    source: str  # its name in messages
    codec: str = "utf-8"  # encoding for output
    mark: bytes = b""  # byte-order mark for output

    def to_bytes(self) -> bytes:
        """Return the document in its own encoding, byte-order mark included."""
        if self.codec == "utf-8":
            return self.mark + self.text
        codec = self.codec if self.codec != "utf-16" else _name_utf16(self.mark)
        return self.mark + self.text.decode("utf-8").encode(codec)

    @cached_property
    def parent_of(self) -> dict[int, Element]:
        """Map the start offset of each element to its parent."""
        return {child.start: parent for parent in self.root.walk() for child in parent.children}

    @cached_property
    def quote(self) -> str:
        """The quote of the document's first attribute; libvirt's without attributes."""
        spans = list(self.attribute_spans(self.root).values())
        return spans[0].quote if spans else "'"

    def attribute_spans(self, element: Element) -> dict[str, AttributeSpan]:
        """Return the offsets of each attribute of an element, by name as written, in order."""
        spans: dict[str, AttributeSpan] = {}
        tag = self.text[element.start : element.tag_end]
        for match in _ATTRIBUTE.finditer(tag):
            value_start = element.start + match.start(3) + 1
            spans[match[2].decode()] = AttributeSpan(
                element.start + match.start(),
                value_start,
                element.start + match.end(3) - 1,
                match[3][:1].decode(),
            )
        return spans


def parse_document(xml: bytes, source: str) -> Document:
    """Parse bytes; `source` names them in messages. Raises ParseError for malformed XML, InputError
    for XML that homenode rejects."""
    if len(xml) > MAX_BYTES:
        raise InputError(
            f"{source}: expected a domain XML of at most {MAX_BYTES} bytes, found {len(xml)}",
            hint="libvirt accepts no larger definition; check that this is the right file",
        )
    if not xml.strip():
        raise InputError(f"{source}: the file is empty", hint="try: virsh dumpxml NAME")
    codec, mark = _detect_encoding(xml, source)
    try:
        text = xml[len(mark) :].decode(codec if codec != "utf-16" else _name_utf16(mark))
    except UnicodeDecodeError as error:
        raise ParseError(
            source,
            f"text in {codec}, as declared",
            f"byte {error.start}: {error.reason}",
            hint="virsh dumpxml --inactive NAME > VM.xml",
        ) from None
    return _index(text.encode("utf-8", "surrogatepass"), source, codec, mark)


def _name_utf16(mark: bytes) -> str:
    return "utf-16-le" if mark == codecs.BOM_UTF16_LE else "utf-16-be"


def _detect_encoding(xml: bytes, source: str) -> tuple[str, bytes]:
    if xml.startswith(codecs.BOM_UTF8):
        return "utf-8", codecs.BOM_UTF8
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        if xml.startswith(mark):
            return "utf-16", mark
    declaration = _DECLARED.match(xml)
    if declaration is None:
        return "utf-8", b""
    label = declaration[1].decode()
    try:
        name = codecs.lookup(label).name
    except LookupError:
        name = ""
    if name not in _CODECS or name == "utf-16":
        raise ParseError(
            source,
            "a definition in UTF-8, UTF-16 with its mark, ISO 8859 or Windows 1252",
            label,
            hint="convert the definition to UTF-8",
        )
    return name, b""


class _Builder:
    """Collects expat's events into elements."""

    def __init__(self, text: bytes, source: str) -> None:
        self.text = text
        self.source = source
        self.open: list[_OpenElement] = []
        self.root: Element | None = None
        self.count = self.devices = self.namespaces = 0
        self.alike: dict[str, int] = {}
        # The input is already UTF-8, whatever the declaration is.
        self.parser = expat.ParserCreate("utf-8", namespace_separator="\n")
        self.parser.namespace_prefixes = True
        self.parser.ordered_attributes = True
        self.parser.buffer_text = True
        self.parser.StartNamespaceDeclHandler = self.namespace
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.finish
        self.parser.CharacterDataHandler = self.characters
        self.parser.StartDoctypeDeclHandler = self.doctype

    def doctype(self, name: str, *_: object) -> None:
        raise InputError(
            f"{self.source}:{self.parser.CurrentLineNumber}: expected no DOCTYPE, found "
            f"{name[:60]!r}; entities and external references are rejected",
            hint="remove the DOCTYPE",
        )

    def namespace(self, *_: object) -> None:
        """Count a namespace of the element that starts next."""
        self.namespaces += 1

    def start(self, name: str, attributes: list[str]) -> None:
        self.count += 1
        if len(self.open) >= MAX_DEPTH or self.count > MAX_ELEMENTS:
            raise self.too_many(f"{MAX_DEPTH} levels and {MAX_ELEMENTS} elements")
        of_name = self.alike[name] = self.alike.get(name, 0) + 1
        if of_name > _ALIKE.get(name, MAX_ALIKE):
            raise self.too_many(f"{plural(of_name - 1, 'element')} <{printable(name)[:60]}>")
        if len(self.open) == 2 and self.open[1].fields["name"] == "devices":
            self.devices += 1
            if self.devices > MAX_DEVICES:
                raise self.too_many(f"{MAX_DEVICES} elements in <devices>")
        if len(attributes) // 2 + self.namespaces > MAX_ATTRIBUTES:
            raise self.too_many(f"{MAX_ATTRIBUTES} attributes of an element")
        self.namespaces = 0
        offset = self.parser.CurrentByteIndex
        match = _TAG_END.match(self.text, offset)
        assert match is not None, "expat found a start tag here"
        local, tag = _split_name(name)
        pairs = tuple(
            (_split_name(attributes[i])[0], attributes[i + 1]) for i in range(0, len(attributes), 2)
        )
        self.open.append(
            _OpenElement(
                {
                    "name": local,
                    "tag": tag,
                    "attributes": pairs,
                    "start": offset,
                    "tag_end": match.end(),
                    "line": self.parser.CurrentLineNumber,
                    "source": self.source,
                },
                [],
                [],
            )
        )

    def too_many(self, limit: str) -> InputError:
        line = self.parser.CurrentLineNumber
        return InputError(
            f"{self.source}:{line}: expected at most {limit}, found more",
            hint="no QEMU has a machine of that size; is this the right file?",
        )

    def finish(self, _name: str) -> None:
        opened = self.open.pop()
        tag_end = opened.fields["tag_end"]
        if self.text[tag_end - 2 : tag_end] == b"/>":
            content_end = end = tag_end
        else:
            content_end = self.parser.CurrentByteIndex
            end = self.text.index(b">", content_end) + 1
        element = Element(
            **opened.fields,
            children=tuple(opened.children),
            text="".join(opened.text),
            content_end=content_end,
            end=end,
        )
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element

    def characters(self, data: str) -> None:
        self.open[-1].text.append(data)


class _OpenElement(NamedTuple):
    """An element whose end tag has not been read: its start, and its content so far."""

    fields: dict[str, Any]
    children: list[Element]
    text: list[str]


def _split_name(expat_name: str) -> tuple[str, str]:
    """Return ("{uri}local", "prefix:local") of expat's "uri, local, prefix" triplet."""
    parts = expat_name.split("\n")
    if len(parts) == 1:
        return parts[0], parts[0]
    tag = f"{parts[2]}:{parts[1]}" if len(parts) > 2 and parts[2] else parts[1]
    return f"{{{parts[0]}}}{parts[1]}", tag


def _index(text: bytes, source: str, codec: str, mark: bytes) -> Document:
    builder = _Builder(text, source)
    try:
        builder.parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ParseError(
            source,
            "well-formed XML",
            expat.errors.messages[error.code],
            line=error.lineno,
            hint="virt-xml-validate or xmllint shows the place",
        ) from None
    assert builder.root is not None, "expat rejects a definition without an element"
    return Document(text, builder.root, source, codec, mark)


ORDER: dict[str, tuple[str, ...]] = {
    name: tuple(children.split())
    for name, children in {
        "domain": """
            name uuid hwuuid genid title description metadata maxMemory memory currentMemory
            blkiotune memtune memoryBacking vcpu vcpus iothreads iothreadids defaultiothread cputune
            numatune iommufd resource sysinfo bootloader bootloader_args os idmap features cpu clock
            on_poweroff on_reboot on_crash on_lockfailure pm perf devices seclabel keywrap
            launchSecurity
        """,
        "cpu": "model vendor maxphysaddr topology cache feature numa",
        "memoryBacking": "hugepages nosharepages locked source access allocation discard",
        "numatune": "memory memnode",
        "features": "acpi apic pae hap viridian hyperv kvm pvspinlock ioapic",
        "devices": "emulator disk filesystem controller lease smartcard serial",
    }.items()
}
"""Children of these elements in libvirt's order; of <devices> only the first: controllers follow
the disks. Source: virDomainDefFormatInternalSetRootName, libvirt 9.0, 12.2; virCPUDefFormatBuf and
virDomainNumaDefFormatXML, libvirt 9.0."""


_DECIMAL = re.compile(r"\s*\+?(\d{1,19})\s*\Z", re.ASCII)
_ANY_BASE = re.compile(r"\s*(0[xX][0-9a-fA-F]{1,8}|0[0-7]{1,10}|0|[1-9]\d{0,9})\s*\Z", re.ASCII)


def name_place(element: Element) -> str:
    """Return SOURCE:LINE: <TAG>, for messages."""
    return f"{element.source}:{element.line}: <{element.tag}>"


def parse_decimal(element: Element, text: str, meaning: str) -> int:
    """Parse a whole number in decimal digits. Raises ParseError."""
    match = _DECIMAL.match(text)
    if match is None:
        raise ParseError(element.source, f"{meaning}, a whole number", text, line=element.line)
    return int(match[1])


def parse_any_base(element: Element, text: str, meaning: str) -> int:
    """Parse a number in C syntax: 0x1f, 037 or 31, as libvirt reads addresses and busNr. Raises
    ParseError. Source: virStrToLong_uip with base 0 in virPCIDeviceAddressParseXML."""
    match = _ANY_BASE.match(text)
    if match is None:
        raise ParseError(element.source, f"{meaning}, such as 0x1f or 31", text, line=element.line)
    digits = match[1]
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    return int(digits, 8 if digits.startswith("0") else 10)


def size_bytes(element: Element, text: str, unit: str | None) -> int:
    """Return the bytes of a size with libvirt's unit attribute; by default KiB. Rounded up to whole
    KiB, in which libvirt keeps every size of a domain. Raises ParseError or InputError."""
    number = parse_decimal(element, text, f"the size in <{element.tag}>")
    try:
        return -(-to_bytes(number, "KiB" if unit is None else unit) // KIB) * KIB
    except InputError as error:
        raise InputError(f"{name_place(element)}: {error.message}") from None


def read_size(element: Element) -> int:
    """Return the bytes of a size element. Raises like size_bytes."""
    return size_bytes(element, element.text, element.get("unit"))


def number(element: Element, attribute: str, meaning: str | None = None) -> int:
    """Return the whole number in a required attribute. Raises ParseError."""
    return parse_decimal(element, require_attribute(element, attribute), meaning or attribute)


def pu_set(element: Element, attribute: str) -> CpuSet | None:
    """Return the set in an attribute, None if it is missing. Raises ParseError."""
    text = element.get(attribute)
    if text is None:
        return None
    return CpuSet.parse(text, f"{name_place(element)} {attribute}")


def require_attribute(element: Element, attribute: str) -> str:
    """Return the value of a required attribute. Raises ParseError."""
    value = element.get(attribute)
    if value is None:
        raise ParseError(
            element.source,
            f"<{element.tag}> with {attribute}=",
            f"<{element.tag}> without it",
            line=element.line,
        )
    return value


def _read_parts(address: Element) -> tuple[int, int, int, int]:
    """Return (domain, bus, device, function); a missing attribute is 0."""
    numbers = []
    for name, limit in (("domain", 1 << 32), ("bus", 256), ("slot", 32), ("function", 8)):
        text = address.get(name) or "0"
        number = parse_any_base(address, text, f"a PCI {name}")
        if number >= limit:
            raise ParseError(
                address.source, f"a PCI {name} below {limit:#x}", text, line=address.line
            )
        numbers.append(number)
    return numbers[0], numbers[1], numbers[2], numbers[3]


def host_address(address: Element) -> Bdf:
    """Return the host function in a <source>'s <address>. Raises ParseError."""
    return Bdf(*_read_parts(address))


def guest_address(owner: Element) -> GuestAddress | None:
    """Return a device's guest address; None if libvirt chooses it. An address of zeros means
    "choose one" too. Source: virDeviceInfoPCIAddressIsWanted."""
    address = owner.child("address")
    if address is None or address.get("type") != "pci":
        return None
    parts = _read_parts(address)
    return GuestAddress(*parts) if any(parts[:3]) else None


def address_attributes(address: PciAddress) -> dict[str, str | None]:
    """Return the attributes of an address as libvirt prints them."""
    return {
        "domain": f"0x{address.domain:04x}",
        "bus": f"0x{address.bus:02x}",
        "slot": f"0x{address.device:02x}",
        "function": f"0x{address.function:x}",
    }


def format_set(numbers: Iterable[int]) -> str:
    """Format a set as the study does: pairs are listed, three or more consecutive are a range.

    >>> format_set([28, 29]), format_set(range(28)), format_set([0, 1, 4, 5, 6])
    ('28,29', '0-27', '0,1,4-6')
    """
    parts = (
        f"{first}-{last}" if last - first > 1 else ",".join(map(str, range(first, last + 1)))
        for first, last in CpuSet(numbers).ranges()
    )
    return ",".join(parts)


def format_size(size: int, units: tuple[str, ...]) -> tuple[str, str]:
    """Return (number, unit) in the first unit that represents the size exactly, else in KiB.

    >>> format_size(768 << 30, ("MiB",)), format_size(1536, ("GiB", "MiB"))
    (('786432', 'MiB'), ('2', 'KiB'))

    Sizes are rounded up to whole KiB, as libvirt does.
    """
    for unit in units:
        if size % to_bytes(1, unit) == 0:
            return str(size // to_bytes(1, unit)), unit
    return str(-(-size // KIB)), "KiB"
