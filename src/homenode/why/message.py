"""Message: lines that programs print when something fails, and the finding that each is a sign of.

The rows are in the files of messages/: `ID: SURE`, and below it texts in small letters, one a line:
`a & b` is a line with both, `a & !b` one without b, `{a|b} c` is one with `a c` or `b c`; a $ is
the end of a line, and each begins with a space. `a & @b` is a line with a where b is anywhere in
the paste, `a & !@b` where it is not. `@ b` is a word that begins with b at either end of the paste,
where people say what they see, whatever is between words; a text may be of these alone. Others are
looked for only where the paste has all of their words, in lines without their digits, of which each
is looked at once; what has digits itself in the lines as they are. So time grows as the paste does.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from homenode.input_files import package_text
from homenode.why.pieces import Piece

_TABLES = "platforms passthrough start kernel collectives schedulers jobs asked said unnamed"
_DIGITS = b"0123456789"
_MOST_TRIED = 20_000  # lines that have a text's letters
_MOST_JOINED = 4 << 20  # letters of different words; of more, words are taken as whole ones
_WORDS = bytes(c if chr(c) in "abcdefghijklmnopqrstuvwxyz_" else 32 for c in range(256))
"""For translate: all that is no word is a space."""
_FLAT = bytes(c if chr(c).isalnum() or c == 95 else 32 for c in range(128)).ljust(256, b" ")
_SAID = 32 << 10  # letters of each end of a paste, where people say what they see
_PLAIN = str.maketrans("\u2018\u2019\u201c\u201d\xa0", "''\"\" ")
_HEALTHY = re.compile(rb"^[^:\n]*[ \t]: (?:0|n/a|no|none|not active)[ \t]*$", re.MULTILINE)
"""A field of nvidia-smi -q, such as `Double Bit ECC  : N/A`: that there is none is no sign."""
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


Choices = tuple[bytes, ...]
"""Texts of which one is enough."""


class _Text(NamedTuple):
    order: int
    all: tuple[Choices, ...]
    none: tuple[bytes, ...]
    around: tuple[Choices, ...]  # anywhere in the paste; words, at its ends
    nowhere: Choices
    has_digits: bool


@cache
def rows() -> tuple[Message, ...]:
    """All rows: of two lines that are as sure, the one of the earlier row goes first."""
    texts = (package_text("why", "messages", f"{name}.txt") for name in _TABLES.split())
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


def signs(
    text: str, source: str, rows: Sequence[Message], printed: Sequence[Piece] = ()
) -> Iterator[Sign]:
    """The first line of each row that is a sign of it, in the order of the rows. printed: the
    pieces of the text that programs printed: what people say is looked for outside of them."""
    data = _HEALTHY.sub(b"", _plain(text))
    shapes = data.translate(None, _DIGITS).split(b"\n")
    blob = b"\n".join(dict.fromkeys(shapes)) + b"\n"
    own = _plain(_without(text, printed)) if printed else data
    said = _said(own if len(own) < 2 * _SAID else own[:_SAID] + own[-_SAID:])

    @cache
    def is_in(choice: bytes) -> bool:
        return choice in (said if choice.startswith(b" ") else data)

    first: dict[int, int] = {}
    for one in _possible(blob, _texts(tuple(rows))):
        where = data if one.has_digits else blob
        if any(map(is_in, one.nowhere)) or not all(any(map(is_in, part)) for part in one.around):
            continue
        if not one.all:
            first.setdefault(one.order, _line_that_says(one.around[0], own))
        elif (begin := _line_of(one.all, one.none, where)) is not None:
            at = (
                where.count(b"\n", 0, begin)
                if one.has_digits
                else shapes.index(where[begin : where.index(b"\n", begin)])
            )
            first[one.order] = min(at, first.get(one.order, at))
    lines = [*map(str.strip, text.split("\n"))] if first else []  # once: a line may be long
    for order, at in sorted(first.items()):
        yield Sign(
            id=rows[order].id,
            sure=rows[order].sure,
            order=order,
            source=source,
            line=at + 1,
            text=lines[at],
            count=shapes.count(shapes[at]),
        )


def _plain(text: str) -> bytes:
    plain = f" {text}".translate(_PLAIN).replace('\\"', '"').replace("\n", "\n ")
    return plain.encode(errors="replace").lower() + b"\n"


def _without(text: str, printed: Sequence[Piece]) -> str:
    lines = text.split("\n")
    for piece in printed:
        for number, line in enumerate(piece.text.split("\n"), piece.line - 1):
            if line and number < len(lines):
                lines[number] = ""
    return "\n".join(lines)


def _possible(blob: bytes, texts: Iterable[_Text]) -> Iterator[_Text]:
    """The texts of which a paste has each word, or a longer one in place of the first or last; of
    those with digits, the ones that a line has without them."""
    words = set(blob.translate(_WORDS).split())
    joined = b" ".join(words) if sum(map(len, words)) < _MOST_JOINED else b""
    is_part = cache(joined.__contains__)

    @cache
    def has_words(choice: bytes) -> bool:
        inner, edges = _words_of(choice)
        return inner <= words and all(edge in words or is_part(edge) for edge in edges)

    @cache
    def has_line(plain: tuple[Choices, ...]) -> bool:
        return _line_of(plain, (), blob) is not None

    for one in texts:
        if all(any(map(has_words, part)) for part in one.all) and (
            not one.has_digits or has_line(tuple(map(_without_digits, one.all)))
        ):
            yield one


def _line_of(parts: Sequence[Choices], none: Sequence[bytes], blob: bytes) -> int | None:
    """Where the first line begins that has one choice of each part, and none of `none`."""
    first: int | None = None
    tries = iter(range(_MOST_TRIED))
    for choice in max(parts, key=lambda part: min(map(len, part))):
        at = blob.find(choice)
        for _ in tries:
            if at < 0 or (first is not None and at > first):
                break
            begin, end = blob.rfind(b"\n", 0, at) + 1, blob.index(b"\n", at)
            has = blob[begin : end + 1].__contains__
            if all(any(map(has, part)) for part in parts) and not any(map(has, none)):
                first = begin
                break
            at = blob.find(choice, end)
    return first


@cache
def _texts(rows: tuple[Message, ...]) -> tuple[_Text, ...]:
    return tuple(
        _text(order, line) for order, row in enumerate(rows) for line in row.texts.splitlines()
    )


def variants(part: str) -> Iterator[str]:
    """A part of a text with one of each braces' choices.

    >>> [*variants("{bar|rom} {0|1}: no space")][:2]
    ['bar 0: no space', 'bar 1: no space']
    """
    pieces = [piece.split("|") for piece in _CHOICES.split(part)]
    yield from ("".join(chosen) for chosen in product(*pieces))


def _text(order: int, text: str) -> _Text:
    kinds: dict[str, list[Choices]] = {"": [], "!": [], "@": [], "!@": []}
    for part in text.split(" & "):
        kind = part[: len(part) - len(part.lstrip("!@"))]
        choices = variants(part[len(kind) :].rstrip().replace("$", "\n"))
        encoded = tuple(choice.encode() for choice in choices)
        kinds[kind].append(tuple(map(_word_of, encoded)) if "@" in kind else encoded)
    wanted = tuple(kinds[""])
    return _Text(
        order=order,
        all=wanted,
        none=sum(kinds["!"], ()),
        around=tuple(kinds["@"]),
        nowhere=sum(kinds["!@"], ()),
        has_digits=any(_without_digits(part) != part for part in wanted),
    )


def _without_digits(part: Choices) -> Choices:
    return tuple(choice.translate(None, _DIGITS) for choice in part)


@cache
def _words_of(choice: bytes) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """The words with both of their ends in a text; the others, which may be parts of longer."""
    plain = choice.translate(None, _DIGITS)
    words = [*_WORD.finditer(plain)]
    inner = {word[0] for word in words if word.start() > 0 and word.end() < len(plain)}
    return frozenset(inner), frozenset(word[0] for word in words) - inner


def _word_of(choice: bytes) -> bytes:
    """As it is said, where it begins with a space: a word's beginning, or with its end."""
    if not choice.startswith(b" "):
        return choice
    return _said(choice) if choice.endswith(b"\n") else _said(choice)[:-1]


def _said(text: bytes) -> bytes:
    """The words, with a space before and behind each."""
    return b" %s " % b" ".join(text.translate(_FLAT).split())


def _line_that_says(words: Choices, data: bytes) -> int:
    begins = {word.split()[0] for word in words}
    for at, line in enumerate(data.split(b"\n")):
        if any(one in line for one in begins) and any(word in _said(line) for word in words):
            return at
    return 0
