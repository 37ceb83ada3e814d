"""Steps that a backtracking matcher such as Python's takes, and inputs that make it take many.

Python's own matcher counts nothing, and its seconds say more of the machine than of the pattern.
"""

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import sys
from collections.abc import Callable, Iterator
from typing import Any

Then = Callable[[int], bool]
MAX = int(op.MAXREPEAT)
MANY = 16
"""A repeat that goes further is one that an input can make long."""

BAD = "\x01"  # in no set that names its letters
_WIDE = " a0=x-:\n"


class TooManyStepsError(Exception):
    """More than anything linear takes."""


class Matcher:
    """One pattern. `steps` counts letters looked at and alternatives tried."""

    def __init__(self, pattern: "re.Pattern[Any]", most: int = 100_000) -> None:
        text = pattern.pattern
        self.is_bytes = isinstance(text, bytes)
        self.flags = pattern.flags
        self.tree = list(parser.parse(text, pattern.flags & ~re.DEBUG))
        self.steps = 0
        self._most = most
        self._found = False
        self._text = ""
        self._groups: dict[int, tuple[int, int]] = {}
        self._known: dict[tuple[Any, int, str], bool] = {}  # by items of the tree, which stay

    def match(self, text: str) -> int:
        """Steps of pattern.match."""
        return self._run(text, range(1), lambda at: True)

    def fullmatch(self, text: str) -> int:
        return self._run(text, range(1), lambda at: at == len(text))

    def search(self, text: str) -> int:
        return self._run(text, range(len(text) + 1), lambda at: True)

    def everywhere(self, text: str) -> int:
        """Steps of finditer, sub and split."""
        self._text, self.steps, at = text, 0, 0
        while at <= len(text):
            end: list[int] = []

            def ended(where: int, end: list[int] = end) -> bool:
                end.append(where)
                return True

            self._groups = {}
            self._seq(self.tree, 0, at, ended)
            at = max(end[0], at + 1) if end else at + 1
        return self.steps

    def finds(self, method: str, text: str) -> bool:
        """Whether match, fullmatch or search finds anything."""
        getattr(self, method)(text)
        return self._found

    def _run(self, text: str, starts: range, then: Then) -> int:
        self._text, self.steps, self._found = text, 0, False
        for start in starts:
            self._groups = {}
            if self._seq(self.tree, 0, start, then):
                self._found = True
                break
        return self.steps

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self._most:
            raise TooManyStepsError

    def _seq(self, items: list[Any], index: int, at: int, then: Then) -> bool:
        if index == len(items):
            return then(at)
        kind, value = items[index]

        def rest(where: int) -> bool:
            return self._seq(items, index + 1, where, then)

        if is_letter(kind):
            self._step()
            return self.fits(kind, value, at) and rest(at + 1)
        if kind is op.SUBPATTERN:
            group, _, _, inside = value

            def close(where: int) -> bool:
                before = self._groups.get(group)
                self._groups[group] = (at, where)
                if rest(where):
                    return True
                if before is not None:
                    self._groups[group] = before
                return False

            return self._seq(list(inside), 0, at, close if group is not None else rest)
        if kind is op.BRANCH:
            for branch in value[1]:
                self._step()
                if self._seq(list(branch), 0, at, rest):
                    return True
            return False
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            return self._repeat(kind, value, at, rest)
        if kind is op.ATOMIC_GROUP:
            end = self._once(list(value), at)
            return end is not None and rest(end)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            direction, inside = value
            start = at - len(shortest(inside)) if direction < 0 else at  # back over a fixed width
            found = start >= 0 and self._once(list(inside), start) is not None
            return found is (kind is op.ASSERT) and rest(at)
        if kind is op.AT:
            self._step()
            return self._at(value, at) and rest(at)
        if kind is op.GROUPREF:
            first, last = self._groups.get(value, (0, 0))
            word = self._text[first:last]
            self.steps += len(word)
            return self._text.startswith(word, at) and rest(at + len(word))
        raise NotImplementedError(str(kind))

    def _once(self, items: list[Any], at: int) -> int | None:
        end: list[int] = []

        def ended(where: int) -> bool:
            end.append(where)
            return True

        return end[0] if self._seq(items, 0, at, ended) else None

    def _repeat(self, kind: Any, value: Any, at: int, rest: Then) -> bool:
        least, most, inside = value
        body = list(inside)
        if len(body) == 1 and is_letter(body[0][0]):
            return self._repeat_letter(kind, least, most, body[0], at, rest)
        if kind is op.POSSESSIVE_REPEAT:
            count, end = 0, at
            while count < most:
                further = self._once(body, end)
                if further is None or further == end:
                    break
                count, end = count + 1, further
            return count >= least and rest(end)

        def again(count: int, where: int) -> bool:
            self._step()

            def more(next_at: int) -> bool:
                return (next_at > where or count < least) and again(count + 1, next_at)

            if count < least:
                return self._seq(body, 0, where, more)
            if kind is op.MIN_REPEAT:
                return rest(where) or (count < most and self._seq(body, 0, where, more))
            return (count < most and self._seq(body, 0, where, more)) or rest(where)

        return again(0, at)

    def _repeat_letter(
        self, kind: Any, least: int, most: int, letter: tuple[Any, Any], at: int, rest: Then
    ) -> bool:
        count = 0
        wanted = least if kind is op.MIN_REPEAT else most
        while count < wanted:
            self._step()
            if not self.fits(*letter, at + count):
                break
            count += 1
        if count < least:
            return False
        if kind is op.POSSESSIVE_REPEAT:
            return rest(at + count)
        if kind is op.MAX_REPEAT:
            return any(self._tried(rest, at + one) for one in range(count, least - 1, -1))
        while True:
            if self._tried(rest, at + count):
                return True
            self._step()
            if count >= most or not self.fits(*letter, at + count):
                return False
            count += 1

    def _tried(self, rest: Then, at: int) -> bool:
        self._step()
        return rest(at)

    def _at(self, where: Any, at: int) -> bool:
        text = self._text
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            lines = where is op.AT_BEGINNING and self.flags & re.MULTILINE
            return at == 0 or bool(lines and text[at - 1] == "\n")
        if where is op.AT_END_STRING:
            return at == len(text)
        if where is op.AT_END:
            last = at == len(text) or (at == len(text) - 1 and text[at] == "\n")
            return last or bool(self.flags & re.MULTILINE and text[at] == "\n")
        before = at > 0 and is_word(text[at - 1])
        after = at < len(text) and is_word(text[at])
        return (before != after) is (where is op.AT_BOUNDARY)

    def fits(self, kind: Any, value: Any, at: int) -> bool:
        """Whether the letter there is one of an item's."""
        if at >= len(self._text):
            return False
        key = kind, id(value), self._text[at]
        if key not in self._known:
            self._known[key] = fits(kind, value, self._text[at], self.flags)
        return self._known[key]


def is_letter(kind: Any) -> bool:
    return kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)


def is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def fits(kind: Any, value: Any, letter: str, flags: int) -> bool:
    if kind is op.ANY:
        return bool(flags & re.DOTALL) or letter != "\n"
    letters = {letter, letter.lower(), letter.upper()} if flags & re.IGNORECASE else {letter}
    if kind is op.LITERAL:
        return value in map(ord, letters)
    if kind is op.NOT_LITERAL:
        return value not in map(ord, letters)
    negated = value[0][0] is op.NEGATE
    return any(_in(value, one) for one in letters) is not negated


def _in(items: Any, letter: str) -> bool:
    for kind, value in items:
        if kind is op.LITERAL and value == ord(letter):
            return True
        if kind is op.RANGE and value[0] <= ord(letter) <= value[1]:
            return True
        if kind is op.CATEGORY and _CATEGORIES[value](letter):
            return True
    return False


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    op.CATEGORY_WORD: is_word,
    op.CATEGORY_NOT_WORD: lambda letter: not is_word(letter),
}


def shortest(items: Any) -> str:
    """A short text that the items match."""
    text = ""
    for kind, value in items:
        if is_letter(kind):
            text += _letter(kind, value)
        elif kind is op.SUBPATTERN:
            text += shortest(value[3])
        elif kind is op.BRANCH:
            text += min((shortest(branch) for branch in value[1]), key=len)
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            text += shortest(value[2]) * value[0]
        elif kind is op.ATOMIC_GROUP:
            text += shortest(value)
    return text


def _letter(kind: Any, value: Any) -> str:
    if kind is op.LITERAL:
        return chr(value)
    return next(one for one in _likely() if fits(kind, value, one, 0))


def _likely() -> Iterator[str]:
    yield from "a0 -=:.\n\t"
    yield from map(chr, range(33, 0x3000))


def attacks(tree: Any) -> Iterator[tuple[str, str]]:
    """(what leads to a repeat, what to repeat in it), for every long repeat of a pattern."""
    letters = sorted(set(_letters(tree)))
    seen: set[tuple[str, str]] = set()
    for before, body in _repeats(list(tree), ""):
        pumps = {shortest(body)} | {
            one for one in letters if any(fits(*item, one, 0) for item in _items(body))
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
            yield _letter(kind, value)


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


def superlinear(matcher: Matcher, method: str, limit: float) -> str | None:
    """An attack whose steps grow by more than `limit` where it is twice as long; None = there is
    none. What grows so while it is short, as a bounded repeat does, is tried much longer."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    for prefix, pump in attacks(matcher.tree):
        for suffix in (BAD, "", "\n" + BAD):
            if all(
                _growth(matcher, method, (prefix, pump, suffix), size) > limit for size in (24, 260)
            ):
                return f"{prefix!r} {pump!r} {suffix!r}"
    return None


def _growth(matcher: Matcher, method: str, attack: tuple[str, str, str], size: int) -> float:
    prefix, pump, suffix = attack
    count = getattr(matcher, method)
    try:
        few, many = (int(count(prefix + pump * n + suffix)) for n in (size, 2 * size))
    except TooManyStepsError:
        return float("inf")
    return many / max(1, few)
