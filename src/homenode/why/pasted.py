"""Pasted: a text as the programs printed it, without what terminals, forums and log drivers add.

Every line stays where it was, so that a place in the one is the place in the other.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from html import unescape
from typing import NamedTuple

_MOST_LINE = 1 << 20  # letters of a line of JSON that is read


class _Wrapping(NamedTuple):
    """hint: a text that is in every paste with it. is_in: whether this one has it, where the hint
    alone does not say. unwrapped: the text without it."""

    hint: str
    unwrapped: Callable[[str], str]
    is_in: Callable[[str], bool] = lambda _: True


_COLOURS = re.compile(r"\x1b(?:\[[0-9;:?]{0,32}[A-Za-z]|\][^\x07\x1b\n]{0,256}\x07?|[()][0AB])")
_OF_CONTAINER = re.compile(
    r"^\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] ", re.MULTILINE
)
_QUOTED = re.compile(r"^(?:> ?){1,5}", re.MULTILINE)
_INDENTED = re.compile(r"^ {4}", re.MULTILINE)


def _of_json_log(text: str) -> str:
    return "\n".join(_log_of(line) for line in text.split("\n"))


def _log_of(line: str) -> str:
    """What a line of Docker's json-file driver holds."""
    if not line.startswith('{"log":"') or len(line) > _MOST_LINE:
        return line
    try:
        said = json.loads(line)["log"]
    except (ValueError, KeyError, RecursionError):
        return line
    return " ".join(said.split("\n")).rstrip(" ") if isinstance(said, str) else line


_WRAPPINGS = (
    _Wrapping("\r\n", lambda text: text.replace("\r\n", "\n")),
    _Wrapping("\x1b", partial(_COLOURS.sub, "")),
    _Wrapping('{"log":"', _of_json_log),
    _Wrapping(" std", partial(_OF_CONTAINER.sub, "")),
    _Wrapping("\n> ", partial(_QUOTED.sub, ""), lambda text: text.count("\n> ") > 1),
    _Wrapping("&lt;", unescape, lambda text: "</" not in text),
    _Wrapping(
        "\n    ",
        partial(_INDENTED.sub, ""),
        lambda text: 2 * text.count("\n    ") > text.count("\n"),
    ),
)


def as_printed(text: str) -> str:
    """The text without colours, quotation marks, prefixes of container logs and indentation.

    >>> as_printed("> \\x1b[31mXid\\x1b[0m\\r\\n> a\\r\\n> b")
    'Xid\\na\\nb'
    """
    for one in _WRAPPINGS:
        if one.hint in text and one.is_in(text):
            text = one.unwrapped(text)
    return text
