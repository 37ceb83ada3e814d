"""NcclTopology: CPUs, PCIe switches, GPUs and NICs as NCCL's topology file gives a guest them.

NCCL does not use an XML library: it reads characters (no declaration, no tabs, one space between
attributes, a tag on one line), and a syntax error makes ncclCommInitRank fail. StrictReader follows
the same automaton, quirks and limits included, so that a file can be checked on the host. XML tools
accept more. It rejects one thing that NCCL accepts: closing tags without an open element.

Source: src/graph/{xml.h,xml.cc,topo.cc} of NVIDIA/nccl and ROCm/rccl: xmlGetNode, xmlGetToken,
xmlGetValue, xmlSkipComment and xmlLoadSub.
"""

import re
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct, field

from homenode.cpuset import CpuSet
from homenode.errors import ParseError

LINK_SPEEDS = {
    2.5: "2.5 GT/s PCIe",
    5.0: "5.0 GT/s PCIe",
    8.0: "8.0 GT/s PCIe",
    16.0: "16.0 GT/s PCIe",
    32.0: "32.0 GT/s PCIe",
    64.0: "64.0 GT/s PCIe",
}
"""GT/s per lane and the text that NCCL parses, as kernels since 5.7 print it."""

OLD_LINK_SPEEDS = ("2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s")
"""The texts of kernels up to 5.6. NCCL compares prefixes."""

SWITCH_CLASS = 0x060400
ADDED_FOR_GPU = 2  # NCCL adds <gpu>, and at least one <nvlink>
ADDED_FOR_NIC = 2  # <nic> and <net>
NO_DEVICE = 0xFFFF
"""Vendor and device of a virtual switch. Broadcom's 0x1000 makes NCCL search for peer links."""


class NcclVariant(StrEnum):
    """The library that reads the file."""

    NCCL = "nccl"
    RCCL = "rccl"

    @property
    def version(self) -> str:
        """The only <system version> that it accepts. Source: NCCL_TOPO_XML_VERSION of each."""
        return "1" if self is NcclVariant.NCCL else "2"

    @property
    def most_nodes(self) -> int:
        """Limit of elements in a file: of 256 slots (8,192 in RCCL) one is for the closing tag.
        Source: NCCL_TOPO_XML_MAX_NODES, RCCL's MAX_NODES, xmlLoadSub."""
        return 255 if self is NcclVariant.NCCL else 8191


class NcclPci(Struct, frozen=True, kw_only=True):
    """A <pci>: a switch with children, or a GPU or NIC without."""

    bus_id: str  # address in the guest's kernel; an unused one for a virtual switch
    class_code: int  # 24 bits
    gt_per_s: float | None  # a lane
    width: int | None  # lanes; None = the guest's sysfs decides
    children: tuple["NcclPci", ...] = ()

    def walk(self) -> Iterator["NcclPci"]:
        """Yield this element and all elements below it, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def is_virtual(self) -> bool:
        return self.bus_id.startswith("ffff:ff:")


class NcclCpu(Struct, frozen=True, kw_only=True):
    """A <cpu>: the guest's vCPUs that run on one host node, and the devices of that node."""

    numa_id: int  # the guest's node, if it has one for the host node
    affinity: CpuSet  # vCPUs
    architecture: str | None  # NCCL's word ("x86_64", "arm64", "ppc64")
    vendor: str | None  # CPUID vendor of the host's CPU; None if unknown
    family: int | None  # CPUID family of the host's CPU; None if unknown
    model: int | None  # CPUID model of the host's CPU; None if unknown
    children: tuple[NcclPci, ...]


class NcclTopology(Struct, frozen=True):
    flavour: NcclVariant
    cpus: tuple[NcclCpu, ...]  # ascending by host node

    @property
    def nodes(self) -> int:
        """Elements of the file."""
        return 1 + len(self.cpus) + sum(1 for _ in self.list_pcis())

    def list_pcis(self) -> Iterator[NcclPci]:
        """Yield every <pci>, in document order."""
        for cpu in self.cpus:
            for child in cpu.children:
                yield from child.walk()


def write_topology(topology: NcclTopology) -> str:
    """Return the file's text: ASCII, with a newline at the end."""
    lines = [f'<system version="{topology.flavour.version}">']
    vcpus = max((cpu.affinity.bits.bit_length() for cpu in topology.cpus), default=0)
    for cpu in topology.cpus:
        lines += _format_element(
            "  ", "cpu", _list_cpu_attributes(cpu, vcpus), _format_children(cpu.children, "    ")
        )
    lines.append("</system>")
    return "\n".join(lines) + "\n"


def format_affinity(vcpus: CpuSet, size: int) -> str:
    """Format a mask of at least `size` bits in groups of 32, the highest first, as NCCL reads it.

    >>> format_affinity(CpuSet(range(32, 48)), 64)
    '0000ffff,00000000'
    >>> format_affinity(CpuSet(range(48)), 96), format_affinity(CpuSet(), 0)
    ('00000000,0000ffff,ffffffff', '00000000')
    """
    groups = max(1, -(-max(size, vcpus.bits.bit_length()) // 32))
    return ",".join(
        f"{vcpus.bits >> 32 * group & 0xFFFFFFFF:08x}" for group in reversed(range(groups))
    )


def format_link_speed(gt_per_s: float) -> str:
    """Return NCCL's text for a speed; for an unknown speed that of the next lower one.

    >>> [format_link_speed(speed) for speed in (1.0, 20.0, 32.0, 128.0)]
    ['2.5 GT/s PCIe', '16.0 GT/s PCIe', '32.0 GT/s PCIe', '64.0 GT/s PCIe']
    """
    lower_speeds = [speed for speed in LINK_SPEEDS if speed <= gt_per_s]
    return LINK_SPEEDS[max(lower_speeds, default=min(LINK_SPEEDS))]


def _list_cpu_attributes(cpu: NcclCpu, vcpus: int) -> Iterator[tuple[str, str]]:
    yield "numaid", str(cpu.numa_id)
    yield "affinity", format_affinity(cpu.affinity, vcpus)
    if cpu.architecture is not None:
        yield "arch", cpu.architecture
    if cpu.vendor is not None:
        yield "vendor", cpu.vendor
    # NCCL fills in both if familyid is missing, and fails if only modelid is missing.
    if cpu.family is not None and cpu.model is not None:
        yield "familyid", str(cpu.family)
        yield "modelid", str(cpu.model)


def _format_children(children: tuple[NcclPci, ...], indent: str) -> Iterator[str]:
    for child in children:
        child_lines = _format_children(child.children, indent + "  ")
        yield from _format_element(indent, "pci", _list_pci_attributes(child), child_lines)


def _list_pci_attributes(pci: NcclPci) -> Iterator[tuple[str, str]]:
    yield "busid", pci.bus_id
    yield "class", f"0x{pci.class_code:06x}"
    if pci.is_virtual:
        for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
            yield name, f"0x{NO_DEVICE:04x}"
    if pci.gt_per_s is not None:
        yield "link_speed", format_link_speed(pci.gt_per_s)
    if pci.width is not None:
        yield "link_width", str(pci.width)


def _format_element(
    indent: str, name: str, attributes: Iterator[tuple[str, str]], child_lines: Iterator[str]
) -> Iterator[str]:
    tag = " ".join([name, *(f'{key}="{value}"' for key, value in attributes)])
    lines = list(child_lines)
    if not lines:
        yield f"{indent}<{tag}/>"
        return
    yield f"{indent}<{tag}>"
    yield from lines
    yield f"{indent}</{name}>"


DEFAULT_PATH = "/var/run/nvidia-topologyd/virtualTopology.xml"
KEPT_PATH = "/etc/nccl/virtualTopology.xml"
_TMPFILES_PATH = "/etc/tmpfiles.d/nccl-topology.conf"
_RUN_PATH = DEFAULT_PATH.removeprefix("/var")


def render_cloud_config(topology: str) -> str:
    """Return the cloud-config for a file's text; merge it with the VM's other cloud-configs.

    NCCL and RCCL read NCCL_TOPO_FILE, else DEFAULT_PATH. That is on a tmpfs, so the file itself is
    in /etc, and systemd-tmpfiles copies it at each boot. A symbolic link would be broken in a
    container that mounts the directory.

    The text is indented, so it must have no tabs and no control characters, as from write_topology.
    """
    directory = _RUN_PATH.rpartition("/")[0]
    rules = f"d {directory} 0755 root root -\nC {_RUN_PATH} 0644 root root - {KEPT_PATH}\n"
    return (
        "#cloud-config\n"
        "write_files:\n"
        f"{_format_file(KEPT_PATH, topology)}"
        f"{_format_file(_TMPFILES_PATH, rules)}"
        "runcmd:\n"
        f"  - [install, -D, -m, '0644', {KEPT_PATH}, {DEFAULT_PATH}]\n"
    )


def _format_file(path: str, content: str) -> str:
    indented_lines = "".join(f"      {line}\n" for line in content.splitlines())
    return (
        f"  - path: {path}\n    owner: root:root\n    permissions: '0644'\n"
        f"    content: |\n{indented_lines}"
    )


_PLACES = 255
MAX_CHARACTERS = _PLACES - 2
"""Longest name or value: its buffer less the closing character and the terminator."""

MAX_ATTRIBUTES = 16
MAX_CHILDREN = 640
MAX_FILE = 1 << 20
MAX_DEPTH = 255
"""Limit of levels: no machine has as many buses, and Python can recurse deeper."""

_CHILDREN = {
    None: ("system",),
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "c2c", "xgmi"),
    "nic": ("net", "gin", "rma"),
}
"""Elements that are read below each element; others are ignored with their content."""

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", re.ASCII)
_BLANK = " \n\r"
_ENDS_WORD = " >/\n\r"


class XmlNode(Struct, frozen=True, kw_only=True):
    """An element as NCCL keeps it."""

    name: str
    line: int
    attributes: tuple[tuple[str, str], ...]  # in order; a lost slot is ("", "")
    children: tuple["XmlNode", ...]
    surplus: int = 0  # attributes beyond the 16 that it keeps

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.attributes if key == name), None)

    def walk(self) -> Iterator["XmlNode"]:
        """Yield this element and all elements below it, in document order."""
        yield self
        for child in self.children:
            yield from child.walk()


class ParsedTopology(Struct, frozen=True, kw_only=True):
    """The file as NCCL keeps it."""

    source: str
    systems: tuple[XmlNode, ...]  # usually one
    ignored: tuple[tuple[str, int], ...]  # elements that NCCL ignores: (name, line)
    nodes: int  # elements kept
    single_quotes: tuple[int, ...] = ()  # lines with values in single quotes, ascending

    def walk(self, name: str | None = None) -> Iterator[XmlNode]:
        """Yield all elements, or all with a name, in document order."""
        nodes = (node for system in self.systems for node in system.walk())
        return (node for node in nodes if name in (None, node.name))


def read_topology(data: bytes, source: str) -> ParsedTopology:
    """Parse the file as NCCL does. Raises ParseError, with the line, if NCCL would fail."""
    if len(data) > MAX_FILE:
        raise ParseError(source, f"at most {MAX_FILE} bytes", f"{len(data)} bytes")
    reader = _Reader(text=data.decode("latin-1"), source=source)
    systems = reader.read_children(None)
    lines = tuple(dict.fromkeys(reader.single_quotes))
    return ParsedTopology(
        source=source,
        systems=systems,
        ignored=tuple(reader.ignored),
        nodes=reader.nodes,
        single_quotes=lines,
    )


def read_number(text: str | None) -> int | None:
    """Return a number as NCCL's strtol reads it, with base 0 and trailing text ignored; else None.

    >>> [read_number(text) for text in ("16", "0x10", "010", "08", "-1x", "x", " 7", "+7", "0x")]
    [16, 16, 8, 0, -1, None, 7, 7, 0]
    """
    match = _NUMBER.match(text or "")
    if match is None:
        return None
    sign, digits = match[1], match[2].lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    return int(digits, base) * (-1 if sign == "-" else 1)


def read_link_speed(text: str) -> float | None:
    """Return a link_speed in GT/s, by the first of NCCL's words that it begins with; None if
    unknown, which NCCL treats as Gen3. Source: kvConvertToInt, kvDictPciGen in topo.cc."""
    for word in (*OLD_LINK_SPEEDS, *LINK_SPEEDS.values()):
        if text.startswith(word):
            return float(word.partition(" ")[0])
    return None


class _Tag(Struct, kw_only=True):
    kind: str  # "open", "close", "single"
    name: str
    line: int
    attributes: tuple[tuple[str, str], ...] = ()
    surplus: int = 0


class _Reader(Struct, kw_only=True):
    text: str
    source: str
    at: int = 0
    line: int = 1
    nodes: int = 0
    ignored: list[tuple[str, int]] = field(default_factory=list)
    single_quotes: list[int] = field(default_factory=list)
    most_nodes: int = NcclVariant.NCCL.most_nodes

    def read_children(self, parent_tag: _Tag | None, depth: int = 0) -> tuple[XmlNode, ...]:
        self.check_depth(depth)
        names = _CHILDREN.get(None if parent_tag is None else parent_tag.name, ())
        nodes: list[XmlNode] = []
        while True:
            if self.nodes > self.most_nodes:
                raise self.make_error(f"at most {self.most_nodes} elements", "more")
            tag = self.tag()
            if tag is None:
                if parent_tag is not None:
                    raise self.make_error(f"</{parent_tag.name}>", "the end of the file")
                return tuple(nodes)
            if tag.kind == "close":
                if parent_tag is None or tag.name != parent_tag.name:
                    expected = "no closing tag" if parent_tag is None else f"</{parent_tag.name}>"
                    raise self.make_error(expected, f"</{tag.name}>")
                return tuple(nodes)
            if tag.name not in names:
                self.ignored.append((tag.name, tag.line))
                self.skip(tag)
                continue
            if len(nodes) == MAX_CHILDREN:
                raise self.make_error(f"at most {MAX_CHILDREN} elements in one", "more")
            self.nodes += 1
            if tag.name == "system" and ("version", NcclVariant.RCCL.version) in tag.attributes:
                self.most_nodes = NcclVariant.RCCL.most_nodes
            children = () if tag.kind == "single" else self.read_children(tag, depth + 1)
            nodes.append(
                XmlNode(
                    name=tag.name,
                    line=tag.line,
                    attributes=tag.attributes,
                    children=children,
                    surplus=tag.surplus,
                )
            )

    def skip(self, tag: _Tag) -> None:
        """Skip the content of an element that NCCL ignores: its tags must still be closed."""
        depth = 0 if tag.kind == "single" else 1
        while depth:
            inner = self.tag()
            if inner is None:
                raise self.make_error(f"</{tag.name}>", "the end of the file")
            depth += {"open": 1, "close": -1, "single": 0}[inner.kind]
            self.check_depth(depth)

    def check_depth(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self.make_error(f"at most {MAX_DEPTH} levels", "more")

    def tag(self) -> _Tag | None:
        """Return the next tag, comments skipped; None at the end of the file."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self.take()
            if self.at == len(self.text):
                return None
            line = self.line
            start = self.take()
            if start != "<":
                raise self.make_error("'<'", start)
            name, _, last = self.read_token(with_value=False)
            if not name.startswith("!--"):
                break
            self.skip_comment(name[3:] + last)
        if name == "" and last == "/":
            name, _, last = self.read_token(with_value=False)
            if last != ">":
                raise self.make_error(f"'>' right after </{name}", last)
            return _Tag(kind="close", name=name, line=line)
        attributes: list[tuple[str, str]] = []
        while last == " ":
            key, value, last = self.read_token(with_value=True)
            attributes.append((key, value))
        kind = "open"
        if last == "/":
            kind = "single"
            _, _, last = self.read_token(with_value=False)
        if last != ">":
            raise self.make_error(f"'>' at the end of <{name}, on one line", last)
        surplus = max(0, len(attributes) - MAX_ATTRIBUTES)
        return _Tag(
            kind=kind,
            name=name,
            line=line,
            attributes=tuple(attributes[:MAX_ATTRIBUTES]),
            surplus=surplus,
        )

    def read_token(self, *, with_value: bool) -> tuple[str, str, str]:
        """Return (name, value, the character that ended the token)."""
        start = self.at
        while True:
            character = self.take()
            name = _c_string(self.text[start : self.at - 1])
            if character == "=":
                if not with_value:
                    raise self.make_error("a name without '='", f"{name}=")
                value, last = self.read_value()
                return name, value, last
            if self.at - start == _PLACES:
                raise self.make_error(f"a name of at most {MAX_CHARACTERS} characters", name)
            if character in _ENDS_WORD:
                return name, "", character

    def read_value(self) -> tuple[str, str]:
        quote = self.take()
        if quote not in "\"'":
            raise self.make_error("a quote after '='", quote)
        if quote == "'":
            self.single_quotes.append(self.line)
        start = self.at
        while self.take() != quote:
            if self.at - start > MAX_CHARACTERS:
                raise self.make_error(
                    f"a value of at most {MAX_CHARACTERS} characters", self.text[start : self.at]
                )
        return _c_string(self.text[start : self.at - 1]), self.take()

    def skip_comment(self, seen_text: str) -> None:
        while seen_text[-3:] != "-->":
            if self.at == len(self.text):
                raise self.make_error("'-->'", "the end of the file")
            seen_text = seen_text[-2:] + self.take()

    def take(self) -> str:
        if self.at == len(self.text):
            raise self.make_error("more of a tag", "the end of the file")
        character = self.text[self.at]
        self.at += 1
        if character == "\n":
            self.line += 1
        return character

    def make_error(self, expected: str, actual: str) -> ParseError:
        line = self.line - (self.text[self.at - 1 : self.at] == "\n")
        return ParseError(
            self.source,
            f"{expected} (NCCL's parser)",
            actual,
            line=line,
            hint="let homenode nccl-topo write the file: NCCL fails on this line",
        )


def _c_string(text: str) -> str:
    """Return the part that C sees: up to the first NUL."""
    return text.partition("\0")[0]
