"""JsonEdit: values of a JSON text replaced in place, with every other byte as it was."""

import json
from collections.abc import Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from homenode.errors import ParseError

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
