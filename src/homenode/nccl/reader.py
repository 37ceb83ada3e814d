"""StrictReader: a topology file as NCCL's own parser reads it, quirks and limits included.

NCCL does not use an XML library: it reads characters, and a syntax error makes ncclCommInitRank
fail. This parser follows the same automaton, so that a file can be checked on the host. XML tools
accept more. It rejects one thing that NCCL accepts: closing tags without an open element.

Source: xmlGetNode, xmlGetToken, xmlGetValue, xmlSkipComment and xmlLoadSub in src/graph/xml.cc.
"""

import re
from collections.abc import Iterator

from msgspec import Struct, field

from homenode.errors import ParseError
from homenode.nccl.topology import LINK_SPEEDS, OLD_LINK_SPEEDS, NcclVariant

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
