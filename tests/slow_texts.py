"""Texts that make a regular expression that is not linear take long, and whether one does.

Seconds are those of this process alone, so that neighbours do not count.
"""

import re
import re._compiler as compiler  # type: ignore[import-not-found]
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import signal
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

MAX_LINEAR_S = 0.06
LENGTH = 20_000
"""Times that a part is repeated: linear patterns take under 10 ms for it, the fastest of those that
are quadratic 0.11 s."""

MANY = 16
"""A repeat that goes further is one that an input can make long."""

BAD = "\x01"  # in no set that names its letters
_WIDE = " a0=x-:\n"


class TooSlowError(Exception):
    """More seconds than anything linear takes."""


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise TooSlowError


def takes_long(pattern: "re.Pattern[Any]", method: str, text: str) -> bool:
    """Whether a method of the pattern takes more than MAX_LINEAR_S for the text."""
    tried = text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text
    before = signal.signal(signal.SIGVTALRM, _stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_LINEAR_S)
        if method == "finditer":
            deque(pattern.finditer(tried), maxlen=0)
        else:
            getattr(pattern, method)(tried)
    except TooSlowError:
        return True
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return False


def slow_text(pattern: "re.Pattern[Any]", method: str) -> str | None:
    """A text that takes long, in parts; None if there is none."""
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    for prefix, pump in attacks(tree):
        for suffix in (BAD, "", "\n" + BAD):
            if takes_long(pattern, method, prefix + pump * LENGTH + suffix):
                return f"{prefix!r} {pump!r} {suffix!r}"
    return None


def is_letter(kind: Any) -> bool:
    return kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)


def fits(item: Any, letter: str) -> bool:
    """Whether a letter is one of an item's."""
    key = str(item)
    if key not in _ITEMS:
        _ITEMS[key] = compiler.compile(parser.SubPattern(parser.State(), [item]))
    return _ITEMS[key].match(letter) is not None


_ITEMS: dict[str, "re.Pattern[Any]"] = {}


def shortest(items: Any) -> str:
    """A short text that the items match."""
    text = ""
    for kind, value in items:
        if is_letter(kind):
            text += _letter((kind, value))
        elif kind is op.SUBPATTERN:
            text += shortest(value[3])
        elif kind is op.BRANCH:
            text += min((shortest(branch) for branch in value[1]), key=len)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            text += shortest(value[2]) * value[0]
        elif kind is op.ATOMIC_GROUP:
            text += shortest(value)
    return text


def _letter(item: Any) -> str:
    return chr(item[1]) if item[0] is op.LITERAL else next(x for x in _likely() if fits(item, x))


def _likely() -> Iterator[str]:
    yield from "a0 -=:.\n\t"
    yield from map(chr, range(33, 0x3000))


def attacks(tree: Any) -> Iterator[tuple[str, str]]:
    """(what leads to a repeat, what to repeat in it), for every long repeat of a pattern."""
    letters = sorted(set(_letters(tree)))
    seen: set[tuple[str, str]] = set()
    for before, body in _repeats(list(tree), ""):
        pumps = {shortest(body)} | {
            one for one in letters if any(fits(item, one) for item in _items(body))
        }
        for pump in sorted(filter(None, pumps)):
            for prefix in ("", before):
                if (prefix, pump) not in seen:
                    seen.add((prefix, pump))
                    yield prefix, pump


def _letters(tree: Any) -> Iterator[str]:
    """Letters that distinguish the pattern's sets, more or less."""
    yield from _WIDE
    for kind, value in _items(tree):
        if kind in (op.LITERAL, op.NOT_LITERAL):
            yield chr(value)
        elif kind is op.IN:
            yield _letter((kind, value))


def _items(tree: Any) -> Iterator[tuple[Any, Any]]:
    for kind, value in tree:
        if is_letter(kind):
            yield kind, value
        for below in _below(kind, value):
            yield from _items(below)


def _below(kind: Any, value: Any) -> list[Any]:
    if kind is op.SUBPATTERN:
        return [value[3]]
    if kind is op.BRANCH:
        return list(value[1])
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return [value[2]]
    if kind is op.ATOMIC_GROUP:
        return [value]
    return [value[1]] if kind in (op.ASSERT, op.ASSERT_NOT) else []


def _repeats(items: list[Any], before: str) -> Iterator[tuple[str, Any]]:
    for index, (kind, value) in enumerate(items):
        here = before + shortest(items[:index])
        long = kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT) and value[1] >= MANY
        if long:
            yield here, value[2]
        for below in _below(kind, value):
            yield from _repeats(list(below), here)
