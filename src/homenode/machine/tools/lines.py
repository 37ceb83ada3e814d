"""Lines: a tool's output line by line, and the values taken from it; numbers and JSON.

A reader of a tool's output states the expected value of a line; every error and gap contains the
line's number and source. Results are finite and not negative. "N/A", "nan" and "-" mean no value:
they become None, never 0. Tools print warnings before, between and after JSON documents.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from homenode.errors import ParseError
from homenode.findings import Gap

MAX_VALUE = 1e21
"""Upper limit of parsed numbers, far above any bandwidth, time or count in a tool's own unit."""

_DECIMAL = re.compile(r"\d{1,25}(?:\.\d{0,25})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_ABSENT = frozenset({"n/a", "na", "nan", "-nan", "-"})

Whole = Annotated[int, Meta(ge=0)]
Figure = Annotated[float, Meta(ge=0, lt=MAX_VALUE)]
"""Readers of numbers in JSON, like `Line.read_count` and `Line.figure` for text."""

MAX_DOCUMENTS = 64

_DECODER = json.JSONDecoder()

T = TypeVar("T")


def record(
    value: object, kind: type[T], source: str, line: int | None = None, *, at: str = "$"
) -> T:
    """Convert a JSON value to a record. Raises ParseError with the malformed part and its place.
    at: the value's place in its document."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeError, RecursionError) as error:
        expected = f"what {source} writes"
        raise ParseError(source, expected, str(error).replace("$", at), line=line) from None


def find_value(document: object, path: str, kind: Any, source: str) -> Any:
    """Return the value down a path of keys ("config/ngpus"), as a kind; None if it is not there.
    Raises ParseError for one of another kind."""
    keys = path.split("/")
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    at = ".".join(("$", *keys))
    return None if document is None else record(document, kind, source, at=at)


def json_object(
    text: str, source: str, parse_constant: Callable[[str], object] | None = None
) -> dict[str, Any]:
    """Parse a text as one JSON object. parse_constant: for NaN and Infinity. Raises ParseError."""
    try:
        value = json.loads(text, parse_constant=parse_constant)
    except (ValueError, RecursionError) as error:  # nested thousands deep, or a number of megabytes
        raise ParseError(source, "JSON", f"{error}"[:100]) from None
    if not isinstance(value, dict):
        raise ParseError(source, "a JSON object", type(value).__name__)
    return value


def decode_first_json(text: str, source: str) -> Any:
    """Return the first object or list that begins a line; other output is skipped. Raises
    ParseError if none is there, or it is not JSON."""
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


def parse_json_objects(text: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield objects that begin with a line that is just "{"; other lines are skipped.

    A line such as "{warning}" does not begin an object. Raises ParseError for an object that is not
    JSON.
    """
    at, count = 0, 0
    while (start := _find_opening_line(text, at)) is not None:
        try:
            value, at = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, start) + 1
            raise ParseError(source, "a JSON document", f"{error}"[:100], line=line) from None
        count += 1
        if count > MAX_DOCUMENTS:
            raise ParseError(source, f"at most {MAX_DOCUMENTS} documents", "more")
        if isinstance(value, dict):
            yield value


def _find_opening_line(text: str, at: int) -> int | None:
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip() == "{":
            return text.index("{", at)
        at = end + 1
    return None


class Line(NamedTuple):
    text: str
    number: int | None  # counted from 1; None = not from a line
    source: str  # whose output it is of

    def make_error(self, expected: str, part: str | None = None) -> ParseError:
        """Return the error of this line. found: a part of the line; None = all of it."""
        return ParseError(
            self.source, expected, self.text if part is None else part, line=self.number
        )

    def read_count(self, word: str, expected: str, limit: int | None = None) -> int:
        """Return a whole number of at most 18 digits. Raises ParseError."""
        if not _COUNT.fullmatch(word):
            raise self.make_error(expected, word)
        if limit is not None and int(word) > limit:
            raise self.make_error(f"{expected}, at most {limit}", word)
        return int(word)

    def parse_number(self, word: str, expected: str) -> float:
        """Return a finite number that is not negative, such as 12.4 or 1.2e+06. Raises ParseError.

        >>> Line("", None, "tool").parse_number("1.2e+06", "a time")
        1200000.0
        """
        if not _DECIMAL.fullmatch(word):
            raise self.make_error(expected, word)
        value = float(word)
        if not math.isfinite(value) or value > MAX_VALUE:
            raise self.make_error(f"{expected} below {MAX_VALUE:g}", word)
        return value

    def parse_positive(self, word: str, expected: str) -> float:
        """Return `parse_number` if it is above zero: a rate of zero means a failed run."""
        value = self.parse_number(word, f"{expected} above 0")
        if value == 0:
            raise self.make_error(f"{expected} above 0", word)
        return value

    def value_or_none(self, word: str, expected: str, scale: float = 1.0) -> float | None:
        """Return `parse_number` times scale; None for N/A, nan and -."""
        return None if word.lower() in _ABSENT else self.parse_number(word, expected) * scale

    def read_word(self, word: str, expected: str) -> str:
        """Return the word unchanged. Raises ParseError if it is empty."""
        if not word:
            raise self.make_error(expected, word)
        return word


Take = Callable[[Line, "re.Match[str]"], bool | None]
"""Action for a line that matches a row; False = the row does not apply here."""

Row = tuple["re.Pattern[str]", Take | str | None]
"""The pattern of a line, and its action: a function, a name to store the first group under (may
repeat), or None to skip the line."""


class Lines:
    """The non-empty lines of an output, stripped. gaps: of unknown lines. Values that occur once
    are kept by name, and taken at the end."""

    def __init__(
        self, text: str, source: str, *, stripped: bool = True, blank: bool = False
    ) -> None:
        self.source = source
        self.gaps: list[Gap] = []
        self._text = text
        self._stripped, self._blank = stripped, blank
        self._values: dict[str, tuple[str, Line]] = {}

    def __iter__(self) -> Iterator[Line]:
        # Not splitlines: a name may hold other letters at which Python ends lines.
        for number, raw in enumerate(self._text.split("\n"), start=1):
            text = raw.strip() if self._stripped else raw.rstrip()
            if text or self._blank:
                yield Line(text, number, self.source)

    def read(self, rows: Iterable[Row]) -> None:
        """Read each line with the first row that matches and accepts it; other lines become gaps.
        Blank lines are included if the lines have them."""
        rows = tuple(rows)
        for line in self:
            if not any(self._has_taken(line, pattern, take) for pattern, take in rows):
                self.add_unknown(line)

    def _has_taken(self, line: Line, pattern: "re.Pattern[str]", take: Take | str | None) -> bool:
        match = pattern.fullmatch(line.text)
        if match is None:
            return False
        if isinstance(take, str):
            self.keep_same(take, match[1], line)
            return True
        return take is None or take(line, match) is not False

    def add_unknown(self, line: Line) -> None:
        """Add a gap for an unknown line."""
        position = f"{self.source} line {line.number}"
        self.gaps.append(Gap(position, f"not known: {line.text.strip()[:80]!r}"))

    def make_error(
        self, expected: str, observed: str | None = None, hint: str | None = None
    ) -> ParseError:
        """Return the error for something that the output as a whole lacks."""
        return ParseError(self.source, expected, observed, hint=hint)

    def keep(self, name: str, word: str, line: Line) -> None:
        """Keep the value of a name. Raises ParseError if the name has a value."""
        if name in self._values:
            raise line.make_error(f"one value of {name!r}", word)
        self._values[name] = (word, line)

    def keep_same(self, name: str, word: str, line: Line) -> None:
        """Store a value as `keep` does; the same value may be repeated."""
        if self._values.setdefault(name, (word, line))[0] != word:
            raise line.make_error(f"one value of {name!r}")

    def has(self, name: str) -> bool:
        """Return whether the name has a value that was not taken."""
        return name in self._values

    def take(self, name: str, read: Callable[[Line, str, str], T], expected: str) -> T:
        """Return the value of a name ("title:name"), read once. Raises ParseError."""
        if name not in self._values:
            hint = (
                self.gaps[0].reason if self.gaps else "the run ended early, or its output was cut"
            )
            raise self.make_error(f"a line {name.rpartition(':')[2]!r}", hint=hint)
        word, line = self._values.pop(name)
        return read(line, word, expected)

    def take_optional(
        self, name: str, read: Callable[[Line, str, str], T], expected: str
    ) -> T | None:
        """Return a value as `take` does; None if the output does not have it."""
        return self.take(name, read, expected) if name in self._values else None

    def list_untaken(self) -> Iterator[tuple[str, str, Line]]:
        """Yield names whose values were not taken, in their order."""
        for name, (word, line) in self._values.items():
            yield name, word, line
