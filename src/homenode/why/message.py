"""Message: lines that programs print when something fails, and the finding that each is a sign of.

A row is an id, how sure it is, and texts, one a line, in small letters: `a & b` is a line with
both, `a ~ pattern` one with the text that the pattern matches as well. They are searched as texts,
which takes time in proportion to the paste; a pattern sees the start of such lines alone. Of lines
that differ in digits only the first is looked at, but for texts that have digits themselves.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from msgspec import Struct

_DIGITS = b"0123456789"
_MOST_SEEN = 4096  # letters of a line that a pattern sees
_MOST_TRIED = 2000  # lines that have a text's letters
_FEW = 3  # texts of a group for which the lines with its word are not put together first
_LONG = 6  # letters of a word that few lines have
_WORD = re.compile(rb"[a-z_]{3,}")


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
    needle: bytes
    all: tuple[bytes, ...]
    pattern: re.Pattern[bytes] | None
    has_digits: bool


_Groups = tuple[tuple[bytes, tuple[_Text, ...]], ...]


def signs(text: str, source: str, rows: Sequence[Message]) -> Iterator[Sign]:
    """The first line of each row that is a sign of it, in the order of the rows."""
    data = text.encode("utf-8", "surrogateescape").lower()
    lines = data.split(b"\n")
    shapes = data.translate(None, _DIGITS).split(b"\n")
    counts = Counter(shapes)
    found: dict[int, int] = {}
    with_digits, without = _grouped(tuple(rows))
    for keys, groups in ((lines, with_digits), (shapes, without)):
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        for one, at in _places(b"\n".join(first), groups, first, lines):
            found[one.order] = min(at, found.get(one.order, at))
    own = text.split("\n") if found else []
    for order, at in sorted(found.items()):
        row = rows[order]
        yield Sign(
            id=row.id,
            sure=row.sure,
            order=order,
            source=source,
            line=at + 1,
            text=own[at].strip(),
            count=counts[shapes[at]],
        )


def _places(
    blob: bytes, groups: _Groups, first: dict[bytes, int], lines: Sequence[bytes]
) -> Iterator[tuple[_Text, int]]:
    """Each text that a line has, with the line. Texts that share a word are looked for only among
    the lines that have it."""
    for word, texts in groups:
        if word not in blob:
            continue
        few = b"\n".join(_having(blob, word)) if len(texts) > _FEW else blob
        for one in texts:
            if (at := _line_of(one, few, first, lines)) is not None:
                yield one, at


def _having(blob: bytes, word: bytes) -> Iterator[bytes]:
    """The lines that have a word."""
    at = blob.find(word)
    while at >= 0:
        end = blob.find(b"\n", at)
        end = len(blob) if end < 0 else end
        yield blob[blob.rfind(b"\n", 0, at) + 1 : end]
        at = blob.find(word, end)


def _line_of(
    one: _Text, blob: bytes, first: dict[bytes, int], lines: Sequence[bytes]
) -> int | None:
    at = blob.find(one.needle)
    for _ in range(_MOST_TRIED):
        if at < 0:
            return None
        end = blob.find(b"\n", at)
        end = len(blob) if end < 0 else end
        number = first[blob[blob.rfind(b"\n", 0, at) + 1 : end]]
        line = lines[number]
        if all(part in line for part in one.all) and (
            one.pattern is None or one.pattern.search(line[:_MOST_SEEN])
        ):
            return number
        at = blob.find(one.needle, end)
    return None


@cache
def _grouped(rows: tuple[Message, ...]) -> tuple[_Groups, _Groups]:
    """The texts with digits, and those without."""
    texts = tuple(
        _text(order, line.strip())
        for order, row in enumerate(rows)
        for line in row.texts.strip().splitlines()
    )
    return _by_word(one for one in texts if one.has_digits), _by_word(
        one for one in texts if not one.has_digits
    )


def _by_word(texts: Iterable[_Text]) -> _Groups:
    """The texts in groups that share a word; words that many texts share come first."""
    rest = tuple(texts)
    groups = []
    while rest:
        shared = Counter(
            word for one in rest for word in set(_WORD.findall(one.needle) or [one.needle])
        )
        best = max(shared, key=lambda word: (len(word) >= _LONG, shared[word], len(word)))
        taken = tuple(one for one in rest if best in one.needle)
        groups.append((best, taken))
        rest = tuple(one for one in rest if best not in one.needle)
    return tuple(groups)


def _text(order: int, line: str) -> _Text:
    words, _, pattern = line.partition(" ~ ")
    parts = tuple(part.strip(" ").encode() for part in words.split(" & "))
    compiled = re.compile(pattern.encode()) if pattern else None
    has_digits = any(part.translate(None, _DIGITS) != part for part in parts)
    return _Text(order, max(parts, key=len), parts, compiled, has_digits)
