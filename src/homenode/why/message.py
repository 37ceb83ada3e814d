"""Message: lines that programs print when something fails, and the finding that each is a sign of.

The rows are in the files of messages/: `ID: SURE`, and below it texts in small letters, one a line:
`a & b` is a line with both, `a & !b` one without b, `{a|b} c` is `a c` and `b c`, and a $ at the
end is the line's; `a & @b` is a line with a where b is anywhere in the paste, `a & !@b` where it is
not. A text is looked for only where the paste has all of its words, in lines without
their digits, of which each is looked at once; what has digits itself in the lines as they are. So
time grows as the paste does.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from homenode.input_files import package_text

_TABLES = ("passthrough", "start", "kernel", "collectives", "schedulers", "unnamed")
_DIGITS = b"0123456789"
_MOST_TRIED = 20_000  # lines that have a text's letters
_MOST_JOINED = 4 << 20  # letters of different words; of more, words are taken as whole ones
_WORDS = bytes(c if chr(c) in "abcdefghijklmnopqrstuvwxyz_" else 32 for c in range(256))
"""For translate: all that is no word is a space."""
_PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\xa0", "''\"\" ")
_WORD = re.compile(rb"[a-z_]+")
_CHOICES = re.compile(r"[{}]")


class Sure(StrEnum):
    """How sure a cause is, the surest first. The words are those that are printed."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> "Sure":
        one = str.__new__(cls, word)
        one._value_, one.meaning = word, meaning
        return one

    CERTAIN = "certain", "the line says it itself, or the values were compared"
    LIKELY = "likely", "other causes print the same line, and are rarer"
    POSSIBLE = "possible", "one of several causes that fit"
    NOT_ENOUGH = "not enough", "nothing here names a cause"


_SURES = {str(one): one for one in Sure}


class Message(NamedTuple):
    """A row. texts: as the module says."""

    id: str
    sure: Sure
    texts: str


class Sign(Struct, frozen=True, kw_only=True):
    """A line that is a sign of a finding. order: its row's. text: the line as it was pasted.
    count: lines like it."""

    id: str
    sure: Sure
    order: int
    source: str
    line: int
    text: str
    count: int


class _Text(NamedTuple):
    order: int
    needle: bytes  # the longest of `all`
    all: tuple[bytes, ...]
    none: tuple[bytes, ...]
    around: tuple[bytes, ...]  # anywhere in the paste
    nowhere: tuple[bytes, ...]
    has_digits: bool
    inner: frozenset[bytes]  # its words with both of their ends in it
    edges: tuple[bytes, ...]  # the others, which may be parts of longer ones; the longest first


@cache
def rows() -> tuple[Message, ...]:
    """All rows: of two lines that are as sure, the one of the earlier row goes first."""
    texts = (package_text("why", "messages", f"{name}.txt") for name in _TABLES)
    return tuple(row for text in texts for row in read_rows(text))


def read_rows(text: str) -> Iterator[Message]:
    """The rows of a table.

    >>> [(row.id, row.texts) for row in read_rows("# on\\n\\na: likely\\n  one text\\n  more\\n")]
    [('a', 'one text\\nmore')]
    """
    for block in text.split("\n\n"):
        head, *texts = block.strip().splitlines()
        name, _, sure = head.partition(": ")
        if texts:
            yield Message(name, _SURES[sure], "\n".join(line.strip() for line in texts))


def signs(text: str, source: str, rows: Sequence[Message]) -> Iterator[Sign]:
    """The first line of each row that is a sign of it, in the order of the rows."""
    data = text.translate(_PLAIN).replace('\\"', '"').encode(errors="replace").lower() + b"\n"
    shapes = data.translate(None, _DIGITS).split(b"\n")
    blob = b"\n".join(dict.fromkeys(shapes)) + b"\n"
    first: dict[int, int] = {}
    for one in _possible(blob, _texts(tuple(rows))):
        where = data if one.has_digits else blob
        if any(part not in data for part in one.around) or any(
            part in data for part in one.nowhere
        ):
            continue
        if (begin := _line_of(one.needle, one.all, one.none, where)) is not None:
            at = (
                where.count(b"\n", 0, begin)
                if one.has_digits
                else shapes.index(where[begin : where.index(b"\n", begin)])
            )
            first[one.order] = min(at, first.get(one.order, at))
    own = text.split("\n") if first else []
    for order, at in sorted(first.items()):
        yield Sign(
            id=rows[order].id,
            sure=rows[order].sure,
            order=order,
            source=source,
            line=at + 1,
            text=own[at].strip(),
            count=shapes.count(shapes[at]),
        )


def _possible(blob: bytes, texts: Iterable[_Text]) -> Iterator[_Text]:
    """The texts of which a paste has each word, or a longer one in place of the first or last; of
    those with digits, the ones that a line has without them."""
    words = set(blob.translate(_WORDS).split())
    joined = b" ".join(words) if sum(map(len, words)) < _MOST_JOINED else b""
    known: dict[bytes, bool] = {}
    lines: dict[tuple[bytes, ...], bool] = {}
    for one in texts:
        if not one.inner <= words:
            continue
        for edge in one.edges:
            if edge not in known:
                known[edge] = edge in words or edge in joined
            if not known[edge]:
                break
        else:
            if one.has_digits:
                plain = tuple(part.translate(None, _DIGITS) for part in one.all)
                if plain not in lines:
                    longest = max(plain, key=len)
                    lines[plain] = _line_of(longest, plain, (), blob) is not None
                if not lines[plain]:
                    continue
            yield one


def _line_of(
    needle: bytes, parts: tuple[bytes, ...], none: tuple[bytes, ...], blob: bytes
) -> int | None:
    """Where the first line begins that has all parts. needle: one of them."""
    at = blob.find(needle)
    for _ in range(_MOST_TRIED):
        if at < 0:
            return None
        begin, end = blob.rfind(b"\n", 0, at) + 1, blob.index(b"\n", at)
        line = blob[begin : end + 1]
        if all(part in line for part in parts) and not any(part in line for part in none):
            return begin
        at = blob.find(needle, end)
    return None


@cache
def _texts(rows: tuple[Message, ...]) -> tuple[_Text, ...]:
    return tuple(
        _text(order, variant)
        for order, row in enumerate(rows)
        for line in row.texts.splitlines()
        for variant in variants(line)
    )


def variants(text: str) -> Iterator[str]:
    """A text with one of each braces' choices.

    >>> [*variants("{bar|rom} {0|1}: no space")][:2]
    ['bar 0: no space', 'bar 1: no space']
    """
    pieces = [piece.split("|") for piece in _CHOICES.split(text)]
    yield from ("".join(chosen) for chosen in product(*pieces))


def _text(order: int, text: str) -> _Text:
    parts = [part.strip().replace("$", "\n").encode() for part in text.split(" & ")]
    wanted = tuple(part for part in parts if not part.startswith((b"!", b"@")))
    words: set[bytes] = set()
    inner: set[bytes] = set()
    for part in (part.translate(None, _DIGITS) for part in wanted):
        for word in _WORD.finditer(part):
            is_whole = word.start() > 0 and word.end() < len(part)
            (inner if is_whole else words).add(word[0])
    return _Text(
        order=order,
        needle=max(wanted, key=len),
        all=wanted,
        none=tuple(part[1:] for part in parts if part[:1] == b"!" and part[1:2] != b"@"),
        around=tuple(part[1:] for part in parts if part.startswith(b"@")),
        nowhere=tuple(part[2:] for part in parts if part.startswith(b"!@")),
        has_digits=any(part.translate(None, _DIGITS) != part for part in wanted),
        inner=frozenset(inner),
        edges=tuple(sorted(words - inner, key=len, reverse=True)),
    )
