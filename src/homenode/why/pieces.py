"""Pieces: what a paste holds, one after another: each a file, or the output of one command.

A paste mixes prompts, files and logs. A row of pieces.toml says how a piece begins, and how it goes
on: with lines that a pattern takes, or up to a text that ends it. What no row takes is left to the
messages, which are looked for in everything.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice

from msgspec import Struct
from msgspec.toml import decode

from homenode.input_files import package_text


class PieceKind(Struct, frozen=True, kw_only=True):
    """A row. id: also of the reader. hints: one of them is in the first line. starts: of the
    first line. goes_on: of those that follow; or ends: a text in the last line. least: lines that a
    piece has. scattered: its lines stand among others, and are one piece of a file."""

    id: str
    title: str
    hints: tuple[str, ...]
    starts: str
    goes_on: str = ""
    ends: str = ""
    least: int = 1
    scattered: bool = False


KINDS = decode(package_text("why", "pieces.toml"), type=dict[str, tuple[PieceKind, ...]])["kinds"]
TITLES = {kind.id: kind.title for kind in KINDS}

_STARTS = [re.compile(kind.starts) for kind in KINDS]
_GOES_ON = [re.compile(kind.goes_on) if kind.goes_on else None for kind in KINDS]
_MOST_LINE = 2048
_MOST_PIECES = 256
_MOST_TRIED = 20_000
"""Lines that have the hint of a kind and are none of its first."""
_MOST_BROKEN = 16
"""Beginnings of JSON documents that are none: each is read to where it breaks."""

_MOST_JSON = 16 << 20
_FENCE = re.compile(r"\s{0,3}(?:```|~~~)")


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a file. kind: of KINDS. line: its first, from 1. text: in place of lines between
    scattered ones, empty lines."""

    kind: str
    source: str
    line: int
    text: str

    @property
    def lines(self) -> int:
        """Lines that are not empty."""
        return sum(1 for line in self.text.split("\n") if line)


def pieces(text: str, source: str) -> tuple[Piece, ...]:
    """The pieces of a text, in their order; those whose lines are scattered come last."""
    lines = text.split("\n")
    ends = [*accumulate(len(line) + 1 for line in lines)]  # where the next line begins
    made: list[Piece] = []
    scattered: dict[str, Piece] = {}
    begun: list[tuple[int, int]] = []
    for number, kind in enumerate(KINDS):
        if not any(hint in text for hint in kind.hints):
            continue
        if kind.scattered:
            is_in = _STARTS[number].search(text)
            own = [n for n, line in enumerate(lines) if is_in and _STARTS[number].search(line)]
            if own and kind.id not in scattered:
                between = ["" for _ in range(own[-1] - own[0] + 1)]
                for at in own:
                    between[at - own[0]] = lines[at]
                scattered[kind.id] = _piece(number, source, own[0], between)
        else:
            found = (_lines_of(re.compile(re.escape(hint)), text, ends) for hint in kind.hints)
            having = sorted({at for lines_of in found for at in islice(lines_of, _MOST_TRIED)})
            begun += [(at, number) for at in having if _begins(number, lines[at])]
    free = 0
    broken = 0
    for at, number in sorted(begun):
        if at < free or len(made) >= _MOST_PIECES or broken > _MOST_BROKEN:
            continue
        is_json = KINDS[number].id == "json"
        end = _end_of_json(lines, at) if is_json else _end(number, lines, at)
        broken += is_json and end == at
        if end - at >= KINDS[number].least:
            made.append(_piece(number, source, at, lines[at:end]))
            free = end
    return (*_joined(made), *scattered.values())


def _lines_of(pattern: re.Pattern[str], text: str, ends: Sequence[int]) -> Iterator[int]:
    """The lines in which a pattern is found."""
    found = pattern.search(text)
    while found:
        line = bisect_right(ends, found.start())
        yield line
        found = pattern.search(text, ends[line])


def _begins(number: int, line: str) -> bool:
    return _STARTS[number].match(line, 0, _MOST_LINE) is not None


def _piece(number: int, source: str, at: int, lines: Sequence[str]) -> Piece:
    return Piece(kind=KINDS[number].id, source=source, line=at + 1, text="\n".join(lines))


def _end(number: int, lines: Sequence[str], at: int) -> int:
    """The line behind a piece."""
    ends, goes_on = KINDS[number].ends, _GOES_ON[number]
    if ends:
        return next((n + 1 for n in range(at, len(lines)) if ends in lines[n]), len(lines))
    following = at + 1
    while following < len(lines):
        line = lines[following]
        if goes_on is None or goes_on.match(line, 0, _MOST_LINE) is None or _FENCE.match(line):
            break
        following += 1
    return following


def _end_of_json(lines: Sequence[str], at: int) -> int:
    """The line behind a JSON object of several members or lines; `at` where it is none."""
    text = "\n".join(islice(lines, at, None))[:_MOST_JSON]
    try:
        value, length = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return at
    return (
        at + text.count("\n", 0, length) + 1 if "kubeletconfig" in value or "kind" in value else at
    )


def _joined(made: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces of lspci that only a blank or foreign line parts are one listing."""
    for kind, group in groupby(made, key=lambda one: one.kind):
        same = list(group)
        if kind == "lspci" and len(same) > 1:
            text = "\n".join(one.text for one in same)
            yield Piece(kind=kind, source=same[0].source, line=same[0].line, text=text)
        else:
            yield from same
