"""Config: the lines of slurm.conf, gres.conf and cgroup.conf, which share one grammar.

Words are "Key=value", "Key = value" or "Key=\"a value\"", several on a line; keys are
case-insensitive; "#" begins a comment, "\\#" does not; a "\\" at the end joins the next line.
Source: slurm.conf(5), gres.conf(5), cgroup.conf(5) of 22.05 and 24.11.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homenode.errors import ParseError

MAX_TEXT_CHARS = 16 << 20

_WORD = re.compile(r'\s*([A-Za-z0-9_.]+)\s*([-+]?)=\s*(?:"([^"]*)"|(\S+))(?=\s|\Z)', re.ASCII)
_INCLUDE = re.compile(r"\s*include\s+(\S+)\s*\Z", re.IGNORECASE | re.ASCII)
_COMMENT = re.compile(r"(?<!\\)#.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """One logical line that says something.

    first, last: numbers of the physical lines that it is made of, from 1.
    words: (key in small letters, value), in their order. Of an Include line: ("include", path).
    """

    first: int
    last: int
    words: tuple[tuple[str, str], ...]

    def get(self, *keys: str) -> str | None:
        """The value of the first of these keys that the line has; the last one where it repeats."""
        for key in keys:
            for name, value in reversed(self.words):
                if name == key:
                    return value
        return None


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration file. text: as it was given. lines: without blank ones and comments."""

    source: str
    text: str
    lines: tuple[ConfigLine, ...]

    def last(self, key: str) -> tuple[str, ConfigLine] | None:
        """The value that holds of a key that has one for the whole cluster: the last one given."""
        for line in reversed(self.lines):
            value = line.get(key)
            if value is not None and line.words[0][0] not in _LISTS:
                return value, line
        return None

    @property
    def includes(self) -> tuple[str, ...]:
        """Files whose lines belong here and that were not read."""
        return tuple(value for line in self.lines if (value := line.get("include")) is not None)


_LISTS = frozenset({"nodename", "nodeset", "partitionname", "downnodes", "frontendname"})
"""Keys that open a line about some nodes or partitions, rather than about the cluster."""


def parse_config(text: str, source: str) -> Config:
    """The lines of a configuration file.

    Raises ParseError that names the line where a word is no Key=value.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
    lines = tuple(_config_line(*joined, source) for joined in _joined(text))
    return Config(source, text, tuple(line for line in lines if line.words))


def _joined(text: str) -> Iterator[tuple[int, int, str]]:
    """(first line, last line, text) of each logical line, without its comment."""
    held: list[str] = []
    first = 1
    number = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        said = _COMMENT.sub("", raw.rstrip("\r"))
        if not held:
            first = number
        if said.rstrip().endswith("\\") and said == raw.rstrip("\r"):
            held.append(said.rstrip()[:-1])
            continue
        yield first, number, " ".join([*held, said])
        held = []
    if held:
        yield first, number, " ".join(held)


def _config_line(first: int, last: int, text: str, source: str) -> ConfigLine:
    include = _INCLUDE.match(text)
    if include is not None:
        return ConfigLine(first, last, (("include", include[1]),))
    words: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        match = _WORD.match(text, at)
        if match is None:
            raise ParseError(source, "Key=value", text[at:].strip()[:80], line=first)
        value = match[4] if match[3] is None else match[3]
        words.append((match[1].lower(), value.replace("\\#", "#")))
        at = match.end()
    return ConfigLine(first, last, tuple(words))
