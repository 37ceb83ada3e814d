"""YamlEdit: entries of block mappings of a YAML text, read and replaced line by line.

Enough for what `incus config show` prints; anchors, tags and tabs are refused.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.json_text import NotJsonError, decode_json

_ENTRY = re.compile(r"""( *)("(?:[^"\\]|\\.)*+"|'[^']*+'|[^\s#:][^:\n]*+):(?: ++(.*+))?\Z""")


@dataclass(frozen=True, slots=True)
class Block:
    """An entry of a mapping: its key, its lines in the text, and the text behind its colon."""

    key: str
    first: int
    end: int
    value: str
    indent: int


def lines_of(content: bytes, source: str) -> list[str]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, "YAML in UTF-8", "other bytes") from None
    if "\t" in text.replace("\\t", ""):
        raise ParseError(source, "YAML without tabs", "a tab")
    return text.splitlines(keepends=True)


def blocks_of(lines: list[str], first: int, end: int, source: str) -> list[Block]:
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


def scalar_of(lines: list[str], block: Block, source: str) -> str:
    """The text of an entry; a block (|) keeps its lines."""
    rest = lines[block.first + 1 : block.end]
    if block.value[:1] in ("|", ">"):
        bodies = [line.rstrip("\r\n") for line in rest]
        depth = min((len(b) - len(b.lstrip(" ")) for b in bodies if b.strip()), default=0)
        return "\n".join(body[depth:] for body in bodies)
    joined = " ".join([block.value, *(line.strip() for line in rest)]).strip()
    return _plain(joined, source)


def quoted(text: str) -> str:
    """A scalar that YAML reads as this text."""
    plain = re.match(r"[A-Za-z][A-Za-z0-9_.-]*\Z|[0-9]+MiB\Z", text, re.ASCII)
    words = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
    return text if plain and text.lower() not in words else json.dumps(text)


def entry_lines(indent: str, key: str, value: str, end: str) -> list[str]:
    if "\n" not in value:
        return [f"{indent}{key}: {quoted(value)}{end}"]
    body = [f"{indent}  {line}{end}" if line.strip() else end for line in value.splitlines()]
    return [f"{indent}{key}: |-{end}", *body]


def mapping_lines(name: str, entries: Mapping[str, str], indent: str, end: str) -> list[str]:
    inner = [f"{indent}  {key}: {quoted(value)}{end}" for key, value in entries.items()]
    return [f"{indent}{name}:{end}", *inner]


Entry = str | Mapping[str, str]


def mapping_edits(
    lines: list[str],
    top: list[Block],
    name: str,
    blocks: list[Block],
    wanted: Mapping[str, Entry | None],
    end: str,
) -> Iterator[tuple[int, int, list[str]]]:
    """(first line, end, new lines) that change entries of the mapping `name` in place, remove those
    that are None, and add new ones behind the last. blocks: the entries that it has."""
    left = dict(wanted)
    for block in blocks:
        if block.key not in left:
            continue
        value = left.pop(block.key)
        if value is None:
            yield block.first, block.end, []
        elif isinstance(value, str) and scalar_of(lines, block, name) != value:
            yield block.first, block.end, entry_lines(" " * block.indent, block.key, value, end)
    new: list[str] = []
    indent = " " * (blocks[0].indent if blocks else 2)
    for key, value in left.items():
        if isinstance(value, str):
            new += entry_lines(indent, key, value, end)
        elif value is not None:
            new += mapping_lines(key, value, indent, end)
    if not new:
        return
    there = next((block for block in top if block.key == name), None)
    if blocks:
        yield blocks[-1].end, blocks[-1].end, new
    elif there is not None:
        yield there.first, there.end, [f"{name}:{end}", *new]
    else:
        yield len(lines), len(lines), [f"{name}:{end}", *new]
