"""Lines: what a tool printed, line by line, and the values that are taken of it.

A reader of a tool's output says what it wants of a line; where the line stands, and whose output it
is, goes with the line into every error and gap.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.tools import figures

T = TypeVar("T")


class Line(NamedTuple):
    """One line. source: whose output it is of. number: counted from 1."""

    text: str
    number: int
    source: str

    def error(self, expected: str, found: str | None = None) -> ParseError:
        """What is wrong here. found: a part of the line; None = all of it."""
        return ParseError(
            self.source, expected, self.text if found is None else found, line=self.number
        )

    def whole(self, word: str, expected: str, most: int | None = None) -> int:
        """A whole number of at most 18 digits. Raises ParseError."""
        number = figures.count(word, self.source, expected, self.number)
        if most is not None and number > most:
            raise self.error(f"{expected}, at most {most}", word)
        return number

    def figure(self, word: str, expected: str) -> float:
        """A finite number that is not negative. Raises ParseError."""
        return figures.figure(word, self.source, expected, self.number)

    def positive(self, word: str, expected: str) -> float:
        """As `figure`, above zero."""
        return figures.positive(word, self.source, expected, self.number)

    def figure_or_none(self, word: str, expected: str, scale: float = 1.0) -> float | None:
        """As `figure`, times scale; None for N/A, nan and -."""
        value = figures.figure_or_none(word, self.source, expected, self.number)
        return None if value is None else value * scale

    def named(self, word: str, expected: str) -> str:
        """The word as it is, where one stands. Raises ParseError."""
        if not word:
            raise self.error(expected, word)
        return word


class Lines:
    """The lines of an output that are not empty, without blanks around them.

    gaps: of the lines that no reader knows. Values that an output has once are kept by their name
    as they are found, and taken at its end.
    """

    def __init__(self, text: str, source: str, *, stripped: bool = True) -> None:
        self.source = source
        self.gaps: list[Gap] = []
        self._text = text
        self._stripped = stripped
        self._values: dict[str, tuple[str, Line]] = {}

    def __iter__(self) -> Iterator[Line]:
        # Not splitlines: a name may hold other letters at which Python ends lines.
        for number, raw in enumerate(self._text.split("\n"), start=1):
            text = raw.strip() if self._stripped else raw.rstrip()
            if text:
                yield Line(text, number, self.source)

    def unknown(self, line: Line) -> None:
        """Nothing reads it: a gap."""
        where = f"{self.source} line {line.number}"
        self.gaps.append(Gap(where, f"not known: {line.text.strip()[:80]!r}"))

    def error(self, expected: str, found: str = "none", hint: str | None = None) -> ParseError:
        """What the output as a whole lacks."""
        return ParseError(self.source, expected, found, hint=hint)

    def keep(self, name: str, word: str, line: Line) -> None:
        """The value of a name. Raises ParseError where it has one."""
        if name in self._values:
            raise line.error(f"one value of {name!r}", word)
        self._values[name] = (word, line)

    def keep_same(self, name: str, word: str, line: Line) -> None:
        """As `keep`; the same value may stand there again."""
        if self._values.setdefault(name, (word, line))[0] != word:
            raise line.error(f"one value of {name!r}")

    def has(self, name: str) -> bool:
        """True where the name has a value that was not taken."""
        return name in self._values

    def take(self, name: str, read: Callable[[Line, str, str], T], expected: str) -> T:
        """The value of a name ("title:name"), read once. Raises ParseError."""
        if name not in self._values:
            hint = (
                self.gaps[0].reason if self.gaps else "the run ended early, or its output was cut"
            )
            raise self.error(f"a line {name.rpartition(':')[2]!r}", hint=hint)
        word, line = self._values.pop(name)
        return read(line, word, expected)

    def given(self, name: str, read: Callable[[Line, str, str], T], expected: str) -> T | None:
        """As `take`; None where the output does not have it."""
        return self.take(name, read, expected) if name in self._values else None

    def untaken(self) -> Iterator[tuple[str, str, Line]]:
        """Names whose values were not taken, in their order."""
        for name, (word, line) in self._values.items():
            yield name, word, line
