"""JSON documents within an output: tools print warnings before, between and behind them."""

import json
from collections.abc import Iterator
from typing import Any

from homenode.errors import ParseError

MAX_DOCUMENTS = 64

_DECODER = json.JSONDecoder()


def whole(text: str, source: str) -> dict[str, Any]:
    """The one object that a text is. Raises ParseError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested thousands deep, or a number of megabytes
        raise ParseError(source, "JSON", f"{error}"[:100]) from None
    if not isinstance(value, dict):
        raise ParseError(source, "a JSON object", type(value).__name__)
    return value


def first_value(text: str, source: str) -> Any:
    """The first object or list that begins a line; what tools print around it is skipped.

    Raises ParseError where none is there, or it is no JSON.
    """
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        start = at + len(text[at:end]) - len(text[at:end].lstrip("\ufeff \t\r"))
        # "[WARNING] ..." is a line of some tools
        if (
            text[start : start + 1] == "{"
            or text[start:end].rstrip() == "["
            or (text[start : start + 1] == "[" and text[start + 1 : end].lstrip()[:1] in ("{", "]"))
        ):
            try:
                return _DECODER.raw_decode(text, start)[0]
            except (ValueError, RecursionError) as error:
                line = text.count("\n", 0, start) + 1
                raise ParseError(source, "JSON", f"{error}"[:100], line=line) from None
        at = end + 1
    raise ParseError(source, "JSON", text.strip()[:80])


def embedded(text: str, source: str) -> Iterator[dict[str, Any]]:
    """Objects that begin with a line that is just "{", in their order; other lines are skipped.

    A line such as "{warning}" begins none. Raises ParseError for one that begins so and is no JSON.
    """
    at, found = 0, 0
    while (start := _opening_line(text, at)) is not None:
        try:
            value, at = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, start) + 1
            raise ParseError(source, "a JSON document", f"{error}"[:100], line=line) from None
        found += 1
        if found > MAX_DOCUMENTS:
            raise ParseError(source, f"at most {MAX_DOCUMENTS} documents", "more")
        if isinstance(value, dict):
            yield value


def _opening_line(text: str, at: int) -> int | None:
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip() == "{":
            return text.index("{", at)
        at = end + 1
    return None
