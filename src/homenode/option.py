"""Opt, Flag and Arg: how a field of a record is typed on a command line.

They are on the field itself, Annotated[int | None, Opt("--vcpus", "N", ge=1)] = None.
The field's type determines the accepted words (a choice, a number, a path, or the result of
`parse`), and tuple[X, ...] allows repetition; its default is the option's.
"""

import re
from collections.abc import Callable
from typing import Any

from homenode.errors import InputError, UsageError, find_near
from homenode.units import parse_bytes

Parser = Callable[[str, str], Any]
"""A value of a text; the option's name is for messages. Raises HomenodeError."""


class Opt:
    """An option with a value: its names ("--output -o"), and the placeholder of the value.

    help: what it does, if the docstring of its record does not describe it. parse: None = by the
    field's type; show: a value as it is typed. ge, le: the range of a number. panel: the title
    above it in the help. rare: `--help-all` shows it, `--help` does not. complete: the function of
    cli/completion that lists its values.
    """

    def __init__(
        self,
        names: str,
        metavar: str,
        help: str = "",
        *,
        parse: Parser | None = None,
        show: Callable[[Any], str] = str,
        ge: float | None = None,
        le: float | None = None,
        panel: str = "Options",
        rare: bool = False,
        complete: str = "",
    ) -> None:
        self.names = tuple(names.split())
        self.metavar, self.help, self.panel = metavar, help, panel
        self.parse, self.show, self.ge, self.le = parse, show, ge, le
        self.rare, self.complete = rare, complete


class Flag(Opt):
    """An option without a value. off: names of the opposite option."""

    def __init__(
        self,
        names: str,
        help: str = "",
        *,
        off: str = "",
        panel: str = "Options",
        rare: bool = False,
    ) -> None:
        super().__init__(names, "", help, panel=panel, rare=rare)
        self.off = tuple(off.split())


class Arg(Opt):
    """A word by its position."""

    def __init__(
        self, metavar: str, help: str = "", *, parse: Parser | None = None, complete: str = ""
    ) -> None:
        super().__init__("", metavar, help, parse=parse, complete=complete)


def size_bytes(text: str, option: str) -> int:
    """Return the bytes of a size that must name its unit: "64" could mean MiB or GiB to whoever
    types it. Raises UsageError."""
    if text.strip().isdigit():
        typed = f"{option.partition(': ')[2]}=" if ": " in option else f"{option} "
        raise UsageError(f"{option}: unit missing in {text!r}", hint=f"{typed}{text.strip()}GiB")
    try:
        return parse_bytes(text)
    except InputError as error:
        raise UsageError(f"{option}: {error.message}", hint=error.hint) from None


def format_size(size: int) -> str:
    """Format a size as an option value, without rounding."""
    return f"{size}B"


def parse_key_values(
    option: str, text: str, needed_keys: tuple[str, ...], optional: tuple[str, ...]
) -> dict[str, str]:
    """Return the key=value parts of an option's value, each key once. Raises UsageError."""
    keys = (*needed_keys, *optional)
    parts: dict[str, str] = {}
    texts = [part.strip() for part in text.split(",") if part.strip()]
    for number, part in enumerate(texts):
        key, _, value = (half.strip() for half in part.partition("="))
        if key not in keys or not value or key in parts:
            texts[number] = _nearest_pair(part, keys)
            raise UsageError(
                f"{option}: expected {', '.join(f'{key}=...' for key in keys)}, each once, "
                f"found {part!r}",
                hint=f"{option} {','.join(texts)}",
            )
        parts[key] = value
    missing = [name for name in needed_keys if name not in parts]
    if missing:
        raise UsageError(f"{option} {text!r}: missing {' and '.join(f'{key}=' for key in missing)}")
    return parts


def _nearest_pair(part: str, keys: tuple[str, ...]) -> str:
    """Return the key=value that a text may mean.

    >>> [_nearest_pair(part, ("gpus", "memory")) for part in ("2gpu", "64GiB", "4", "gpu=1", "x")]
    ['gpus=2', 'memory=64GiB', 'gpus=4', 'gpus=1', 'gpus=N']
    """
    key, _, value = part.partition("=")
    digits = re.sub("[^0-9]", "", part)
    if "memory" in keys and re.fullmatch(r"\d+ ?[kmgt]i?b?", part, re.ASCII | re.IGNORECASE):
        return f"memory={part}"
    name = key if value else re.sub("[^a-z]", "", part.lower())
    match = find_near(name, set(keys) - {key})
    return f"{match or keys[0]}={value if match and value else digits or 'N'}"


def parse_whole(option: str, text: str) -> int:
    """Raises UsageError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f"{option}: expected a whole number, found {text!r}")
    return int(text)


def version(text: str, option: str) -> tuple[int, int, int]:
    """Return a version as "12", "12.1" or "12.1.0". Raises UsageError."""
    words = text.split(".")
    if not 1 <= len(words) <= 3 or not all(
        word.isascii() and word.isdigit() and len(word) < 5 for word in words
    ):
        raise UsageError(f"{option}: expected a version such as 12.1, found {text!r}")
    numbers = [*map(int, words), 0, 0]
    return numbers[0], numbers[1], numbers[2]
