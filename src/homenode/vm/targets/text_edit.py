"""TextEdit: values of a JSON text, and of block mappings of a YAML text, replaced in place, with
every other byte as it was.

Enough YAML for what `incus config show` prints; anchors, tags and tabs are refused."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from homenode.errors import ParseError
from homenode.json_text import NotJsonError, decode_json
from homenode.vm.targets.codec import text_of

Entry = str | Mapping[str, str]
"""A text, or a mapping of texts."""

_ENTRY = re.compile(r"""( *)("(?:[^"\\]|\\.)*+"|'[^']*+'|[^\s#:][^:\n]*+):(?: ++(.*+))?\Z""")


class Block(NamedTuple):
    """An entry of a mapping: its key, its lines in the text, and the text behind its colon."""

    key: str
    first: int
    end: int
    value: str
    indent: int


def _blocks(lines: list[str], first: int, end: int, source: str) -> list[Block]:
    """The entries of the mapping in some lines, by the indentation of its first one."""
    found: list[Block] = []
    indent: int | None = None
    number = first
    while number < end:
        bare = lines[number].rstrip("\r\n")
        if not bare.strip() or bare.lstrip().startswith("#") or bare == "---":
            number += 1
            continue
        match = _ENTRY.match(bare)
        depth = len(bare) - len(bare.lstrip(" "))
        indent = depth if indent is None else indent
        if match is None or depth != indent:
            raise ParseError(source, "key: value", bare.strip()[:60], line=number + 1)
        start, number = number, number + 1
        while number < end:
            inner = lines[number].rstrip("\r\n")
            if inner.strip() and len(inner) - len(inner.lstrip(" ")) <= depth:
                is_item = (
                    inner.lstrip().startswith("- ") and len(inner) - len(inner.lstrip(" ")) == depth
                )
                if not is_item:
                    break
            number += 1
        while number > start + 1 and not lines[number - 1].strip():
            number -= 1
        key = _plain(match[2], source)
        if any(block.key == key for block in found):
            raise ParseError(source, f"{key} once", "it again", line=start + 1)
        found.append(Block(key, start, number, (match[3] or "").strip(), depth))
    return found


def _plain(text: str, source: str) -> str:
    """A scalar on one line."""
    if text.startswith('"'):
        try:
            return str(decode_json(text))
        except NotJsonError:
            raise ParseError(source, "a quoted text", text[:60]) from None
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    if text[:1] in ("&", "*", "!"):
        raise ParseError(source, "YAML without anchors and tags", text[:60])
    return text.partition(" #")[0].strip()


def quoted(text: str) -> str:
    """A scalar that YAML reads as this text."""
    plain = re.match(r"[A-Za-z][A-Za-z0-9_.-]*\Z|[0-9]+MiB\Z", text, re.ASCII)
    words = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return text if plain and text.lower() not in words else json.dumps(text)


def _entry_lines(indent: str, key: str, value: str, end: str) -> list[str]:
    if "\n" not in value:
        return [f"{indent}{key}: {quoted(value)}{end}"]
    body = [f"{indent}  {line}{end}" if line.strip() else end for line in value.splitlines()]
    return [f"{indent}{key}: |-{end}", *body]


def _mapping_lines(name: str, entries: Mapping[str, str], indent: str, end: str) -> list[str]:
    inner = [f"{indent}  {key}: {quoted(value)}{end}" for key, value in entries.items()]
    return [f"{indent}{name}:{end}", *inner]


class YamlText(NamedTuple):
    """A text that is a mapping, some of whose entries are mappings, too. top: its entries."""

    lines: list[str]
    top: list[Block]
    source: str

    def block(self, name: str) -> Block | None:
        return next((block for block in self.top if block.key == name), None)

    def inside(self, name: str) -> list[Block]:
        """The entries of the mapping of that name."""
        block = self.block(name)
        return [] if block is None else self.entries(block)

    def entries(self, block: Block) -> list[Block]:
        """Those of the mapping in an entry. Raises ParseError where it is none, or in braces."""
        value = block.value.partition("#")[0].strip()
        if value in ("{}", "null", "~"):
            return []
        if value:
            what = f"{block.key} as a mapping, a line for each key"
            raise ParseError(self.source, what, value[:60], line=block.first + 1)
        return _blocks(self.lines, block.first + 1, block.end, self.source)

    def scalar(self, block: Block) -> str:
        """The text of an entry; a block (|) keeps its lines."""
        rest = self.lines[block.first + 1 : block.end]
        if block.value[:1] in ("|", ">"):
            bodies = [line.rstrip("\r\n") for line in rest]
            depth = min((len(b) - len(b.lstrip(" ")) for b in bodies if b.strip()), default=0)
            return "\n".join(body[depth:] for body in bodies)
        joined = " ".join([block.value, *(line.strip() for line in rest)]).strip()
        return _plain(joined, self.source)

    def edited(self, wanted: Mapping[str, Mapping[str, Entry | None]]) -> str:
        """The text with these entries of the mappings of these names: changed in place, taken away
        where None, new ones behind the last."""
        lines = list(self.lines)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += end
        edits = (
            edit for name, entries in wanted.items() for edit in self._edits(name, entries, end)
        )
        for first, last, new in sorted(edits, key=lambda edit: edit[0], reverse=True):
            lines[first:last] = new
        return "".join(lines)

    def _edits(
        self, name: str, wanted: Mapping[str, Entry | None], end: str
    ) -> Iterator[tuple[int, int, list[str]]]:
        """(first line, end, new lines)."""
        left, blocks, there = dict(wanted), self.inside(name), self.block(name)
        for block in blocks:
            value = left.pop(block.key, "")
            if block.key in wanted and value is None:
                yield block.first, block.end, []
            elif block.key in wanted and isinstance(value, str) and self.scalar(block) != value:
                yield (
                    block.first,
                    block.end,
                    _entry_lines(" " * block.indent, block.key, value, end),
                )
        new: list[str] = []
        indent = " " * (blocks[0].indent if blocks else 2)
        for key, value in left.items():
            if isinstance(value, str):
                new += _entry_lines(indent, key, value, end)
            elif value is not None:
                new += _mapping_lines(key, value, indent, end)
        if not new:
            return
        if blocks:
            yield blocks[-1].end, blocks[-1].end, new
        elif there is not None:
            yield there.first, there.end, [f"{name}:{end}", *new]
        else:
            yield len(self.lines), len(self.lines), [f"{name}:{end}", *new]


def parse_yaml(content: bytes, source: str) -> YamlText:
    """Raises ParseError for what is no such text."""
    text = text_of(content, source, "YAML")
    if "\t" in text.replace("\\t", ""):
        raise ParseError(source, "YAML without tabs", "a tab")
    lines = text.splitlines(keepends=True)
    return YamlText(lines, _blocks(lines, 0, len(lines), source), source)


_BLANK = " \t\r\n"
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """Where a key begins, and where its value begins and ends."""

    key: int
    start: int
    end: int


def members(text: str, at: int, source: str) -> tuple[dict[str, Member], int]:
    """The members of the object at an offset, and where its closing brace is.

    Raises ParseError for what is no object, and for a key given twice.
    """
    at = _skip(text, at)
    if text[at : at + 1] != "{":
        raise ParseError(source, "a JSON object", text[at : at + 40])
    found: dict[str, Member] = {}
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        key = at
        try:
            name, at = scanstring(text, at + 1)
            at = _skip(text, at)
            start = _skip(text, at + 1)
            _, end = _DECODER.raw_decode(text, start)
        except (ValueError, IndexError, RecursionError):
            raise ParseError(source, "JSON", text[key : key + 40]) from None
        if name in found:
            raise ParseError(source, f"the key {name!r} once", "it again")
        found[name] = Member(key, start, end)
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ParseError(source, "a comma or the end of the object", text[at : at + 40])
    return found, at


def offset_of(text: str, path: Sequence[str], source: str) -> int:
    """Where the value is that is found by these keys. Raises ParseError for objects that are none,
    KeyError where there is none."""
    at = 0
    for key in path:
        at = members(text, at, source)[0][key].start
    return at


def with_members(text: str, at: int, wanted: dict[str, Any], source: str) -> str:
    """The text with these members of the object at an offset; None removes one."""
    for name, value in wanted.items():
        there, close = members(text, at, source)
        member = there.get(name)
        if value is None:
            if member is not None:
                text = _without(text, there, member, close)
        elif member is not None:
            if json.loads(text[member.start : member.end]) != value:
                text = text[: member.start] + json.dumps(value) + text[member.end :]
        else:
            text = _added(text, at, there, close, name, value)
    return text


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return at


def _without(text: str, there: dict[str, Member], member: Member, close: int) -> str:
    ordered = sorted(there.values())
    index = ordered.index(member)
    if index:
        return text[: ordered[index - 1].end] + text[member.end :]
    if len(ordered) > 1:
        return text[: member.key] + text[ordered[1].key :]
    return text[: member.key].rstrip(_BLANK) + text[close:]


def _added(text: str, at: int, there: dict[str, Member], close: int, name: str, value: Any) -> str:
    new = f"{json.dumps(name)}: {json.dumps(value)}"
    if there:
        ordered = sorted(there.values())
        last = ordered[-1]
        before = _skip(text, at) + 1
        gap = text[before : ordered[0].key]
        return f"{text[: last.end]},{gap or ' '}{new}{text[last.end :]}"
    inner = text[_skip(text, at) + 1 : close]
    return text[: close - len(inner)] + new + text[close:]
