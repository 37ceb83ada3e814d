"""Hostlist: node names as Slurm writes them, such as gpu[01-36,40],login1.

Source: slurm.conf(5), "NodeName"; scontrol(1), show hostnames.
"""

import re
from collections.abc import Iterable, Iterator

from homenode.errors import ParseError

MAX_NAMES = 65_536
"""More names than this are refused, so that a hostile n[0-999999999] costs nothing."""

MAX_ALL_NAMES = 250_000
"""In all expressions of one text: each of them names the same thousands again at no cost."""

MAX_NAME_CHARS = 256

_PLAIN = re.compile(r"[^\[\],\s]+")
_NUMBER_AT_END = re.compile(r"(.*?)([0-9]{1,9})\Z", re.DOTALL)


def expand_hostlist(
    text: str, source: str = "host list", *, line: int | None = None, most: int = MAX_NAMES
) -> tuple[str, ...]:
    """The names of an expression, in its order.

    >>> expand_hostlist("gpu[01-03,07],login")
    ('gpu01', 'gpu02', 'gpu03', 'gpu07', 'login')
    >>> expand_hostlist("/dev/nvidia[0-1]")
    ('/dev/nvidia0', '/dev/nvidia1')

    Raises ParseError for brackets that do not close, ranges that fall, and too many names.
    """
    names: list[str] = []
    for part in _parts(text, source, line):
        names += _expand(part, source, line, most - len(names))
    return tuple(names)


class Hostlists:
    """The expressions of one text, which have a limit together."""

    def __init__(self) -> None:
        self._left = MAX_ALL_NAMES

    def expand(self, text: str, source: str, *, line: int | None = None) -> tuple[str, ...]:
        """As `expand_hostlist`."""
        names = expand_hostlist(text, source, line=line, most=min(MAX_NAMES, self._left))
        self._left -= len(names)
        return names


def compress_hostlist(names: Iterable[str]) -> str:
    """The expression of names; runs of numbers of one width become ranges.

    >>> compress_hostlist(("gpu01", "gpu02", "gpu04", "login"))
    'gpu[01-02,04],login'
    """
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        match = _NUMBER_AT_END.match(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    said = [
        f"{prefix}{_bracketed(sorted(numbers), width)}"
        for (prefix, width), numbers in groups.items()
    ]
    return ",".join([*said, *plain])


def _bracketed(numbers: list[int], width: int) -> str:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs]
    return texts[0] if len(numbers) == 1 else f"[{','.join(texts)}]"


def _parts(text: str, source: str, line: int | None) -> Iterator[str]:
    """The expressions between the commas that stand outside brackets."""
    start = 0
    inside = False
    for at, letter in enumerate(text):
        if letter == "[" and not inside:
            inside = True
        elif letter == "]" and inside:
            inside = False
        elif letter in "[]":
            raise ParseError(source, "brackets that pair", text, line=line)
        elif letter == "," and not inside:
            yield text[start:at]
            start = at + 1
    if inside:
        raise ParseError(source, "a closing bracket", text, line=line)
    yield text[start:]


def _expand(part: str, source: str, line: int | None, space: int) -> list[str]:
    """All names of one expression; it may have several brackets."""
    names = [""]
    at = 0
    while at < len(part):
        if part[at] == "[":
            end = part.index("]", at)
            numbers = list(_numbers(part[at + 1 : end], source, line, space))
            if len(names) * len(numbers) > space:
                raise ParseError(source, f"at most {space} more names", part, line=line)
            names = [name + number for name in names for number in numbers]
            at = end + 1
            continue
        plain = _PLAIN.match(part, at)
        if plain is None:
            raise ParseError(source, "a name without blanks", part, line=line)
        if len(names[0]) + len(plain[0]) > MAX_NAME_CHARS:
            raise ParseError(source, f"names of at most {MAX_NAME_CHARS} letters", part, line=line)
        names = [name + plain[0] for name in names]
        at = plain.end()
    if names == [""] or not space:
        raise ParseError(source, "a name" if space else "fewer names", part, line=line)
    return names


def _numbers(text: str, source: str, line: int | None, space: int) -> Iterator[str]:
    """The numbers of a bracket, with the leading zeros that they have."""
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not (_digits(first) and (_digits(last) if dash else True)):
            raise ParseError(source, "numbers such as [01-36,40]", item, line=line)
        end = int(last) if dash else int(first)
        if end < int(first) or end - int(first) >= space:
            raise ParseError(
                source, f"an ascending range of at most {space} names", item, line=line
            )
        for number in range(int(first), end + 1):
            yield f"{number:0{len(first)}}"


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
