"""Figures: a number as measuring tools print it, or that there is none.

Figures of measurements are finite and not negative. "N/A", "nan" and "-" are how tools say that
there is none: they become None, never 0.
"""

import math
import re

from homenode.errors import ParseError

LARGEST = 1e21
"""No bandwidth, time or count that a tool prints in its own unit comes near."""

_DECIMAL = re.compile(r"\d{1,25}(?:\.\d{0,25})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_ABSENT = frozenset({"n/a", "na", "nan", "-nan", "-"})


def figure(text: str, source: str, expected: str, line: int | None = None) -> float:
    """The number of a text such as 12.4 or 1.2e+06.

    >>> figure("1.2e+06", "tool", "a time")
    1200000.0

    Raises ParseError for anything else: infinite, negative, absent.
    """
    if not _DECIMAL.fullmatch(text):
        raise ParseError(source, expected, text, line=line)
    value = float(text)
    if not math.isfinite(value) or value > LARGEST:
        raise ParseError(source, f"{expected} below {LARGEST:g}", text, line=line)
    return value


def positive(text: str, source: str, expected: str, line: int | None = None) -> float:
    """As `figure`, above zero: a rate of zero is a run that measured nothing."""
    value = figure(text, source, f"{expected} above 0", line)
    if value == 0:
        raise ParseError(source, f"{expected} above 0", text, line=line)
    return value


def figure_or_none(text: str, source: str, expected: str, line: int | None = None) -> float | None:
    """As `figure`; None for N/A, nan and -.

    >>> figure_or_none("N/A", "tool", "a rate") is None
    True
    """
    if text.lower() in _ABSENT:
        return None
    return figure(text, source, expected, line)


def count(text: str, source: str, expected: str, line: int | None = None) -> int:
    """A whole number of at most 18 digits. Raises ParseError."""
    if not _COUNT.fullmatch(text):
        raise ParseError(source, expected, text, line=line)
    return int(text)
