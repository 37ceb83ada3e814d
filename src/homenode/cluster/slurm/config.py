"""Config: the lines of slurm.conf, gres.conf and cgroup.conf, which share one grammar.

Words are "Key=value", "Key = value" or "Key=\"a value\""; keys are case-insensitive; "#" begins a
comment, "\\" takes what follows for a plain letter, and at the end of a line joins the next one.
"Include file" stands for that file's lines; "%c" in its name is the cluster's name. 22.05.8 accepts
neither quotes around a name nor "*" in it; newer versions do. Source: slurm.conf(5) of 22.05,
24.11.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from msgspec import Struct

from homenode.errors import InputError, ParseError

MAX_TEXT_CHARS = 4 << 20
MAX_LINES = 300_000
"""Limit of lines in a file; a node that is listed alone takes one of 100 characters."""

MAX_INCLUDED = 256
"""Files of one configuration: more are a circle."""
MAX_DEPTH = 8

_WORD = re.compile(r'\s*([A-Za-z0-9_.]+)\s*([-+]?)=\s*(?:"([^"]*)"|(\S+))(?=\s|\Z)', re.ASCII)
_INCLUDE = re.compile(r"\s*include\s+(\S+)\s*\Z", re.IGNORECASE | re.ASCII)
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)#.*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
_CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*(\\)\s*\Z")


class ConfigLine(Struct, frozen=True):
    first: int  # number of its first physical line, from 1
    last: int  # number of its last physical line
    words: tuple[tuple[str, str], ...]  # (key in small letters, value), in their order
    source: str  # name of its file

    def get(self, *keys: str) -> str | None:
        """The value of the first of these keys that the line has; the last one if it repeats."""
        for key in keys:
            for name, value in reversed(self.words):
                if name == key:
                    return value
        return None


class ConfigFile(NamedTuple):
    """A file's name and its original text."""

    source: str
    text: str


class UnreadInclude(NamedTuple):
    """A file that an Include line names and whose lines are unknown."""

    path: str
    reason: str
    place: str  # the line


class SlurmConfig(Struct, frozen=True):
    source: str
    text: str  # as it was given
    lines: tuple[ConfigLine, ...]  # without blank lines and comments
    # files that Include lines name, whose lines replace these in `lines`
    included: tuple[ConfigFile, ...] = ()
    not_read: tuple[UnreadInclude, ...] = ()  # those whose lines do not

    @property
    def files(self) -> tuple[ConfigFile, ...]:
        return (ConfigFile(self.source, self.text), *self.included)

    def find_rows(self, line: ConfigLine) -> list[str]:
        """Return the physical lines of a logical line."""
        text = next(file.text for file in self.files if file.source == line.source)
        return text.split("\n")[line.first - 1 : line.last]

    def find_last(self, key: str) -> tuple[str, ConfigLine] | None:
        """Return the effective value of a cluster-wide key: the last value."""
        for line in reversed(self.lines):
            value = line.get(key)
            if value is not None and line.words[0][0] not in _LISTS:
                return value, line
        return None


_LISTS = frozenset({"nodename", "nodeset", "partitionname", "downnodes", "frontendname"})
"""Keys that open a line about some nodes or partitions, rather than about the cluster."""


_OF_SLURM_CONF = frozenset(
    {"clustername", "slurmctldhost", "partitionname", "selecttype", "grestypes"}
)
"""Keys that open lines of slurm.conf, and never of gres.conf."""


def is_slurm_conf(config: SlurmConfig) -> bool:
    return any(line.words[0][0] in _OF_SLURM_CONF for line in config.lines)


GRES_KEYS = "AutoDetect Count Cores CPUs File Flags Include Links MultipleFiles Name NodeName Type"
SLURM_KEYS = """
ClusterName GresTypes HashPlugin Include PartitionName SelectType SelectTypeParameters TaskPlugin
TaskPluginParam NodeName NodeHostname Boards CPUs CoresPerSocket Gres Sockets SocketsPerBoard
ThreadsPerCore"""
CGROUP_KEYS = "CgroupPlugin ConstrainCores ConstrainDevices"
"""Keys that are read, and the keys of slurm.conf that resemble them."""

_MAX_UNKNOWN_KEYS = 500
"""Limit of the different keys that are compared: releases have about 200 others."""


def reject_misspelt_keys(lines: Sequence[ConfigLine], names: str) -> None:
    """Raise ParseError for a key that resembles one of these names, which blanks separate: Slurm
    does not start with it. Other unknown keys may be of another release."""
    keys = {name.lower(): name for name in names.split()}
    line_of = {key: line for line in reversed(lines) for key, _ in line.words if key not in keys}
    for key in list(line_of)[:_MAX_UNKNOWN_KEYS]:
        if matches := get_close_matches(key, keys, 1, 0.8):
            line, expected = line_of[key], f"a key of Slurm (did you mean {keys[matches[0]]}=?)"
            raise ParseError(line.source, expected, f"{key}=", line=line.first)


Includer = Callable[[str, str], tuple[ConfigFile, ...] | str]
"""(a name as an Include line has it, the file with that line): the files, or why none is read."""


def parse_config(text: str, source: str, include: Includer | None = None) -> SlurmConfig:
    """Return the lines of a configuration file and its includes. include: reads an include; None =
    includes stay unknown, and `not_read` has them. Raises ParseError with the line of a word that
    is not Key=value, and for files that include each other."""
    reading = _ConfigReader(
        include or (lambda path, neighbours: "no other file was looked for"), [], [], []
    )
    reading.add(ConfigFile(source, text), 0)
    return SlurmConfig(
        source, text, tuple(reading.lines), tuple(reading.included), tuple(reading.not_read)
    )


class _ConfigReader(NamedTuple):
    """Reader of a file and its includes."""

    include: Includer
    lines: list[ConfigLine]
    included: list[ConfigFile]
    not_read: list[UnreadInclude]

    def add(self, file: ConfigFile, depth: int) -> None:
        """Add the lines of a file, in their places among the other lines."""
        source, text = file
        if len(text) > MAX_TEXT_CHARS:
            raise ParseError(source, f"at most {MAX_TEXT_CHARS} characters", str(len(text)))
        if text.count("\n") > MAX_LINES:
            raise ParseError(source, f"at most {MAX_LINES} lines", str(text.count("\n")))
        for first, last, statement in _split_logical_lines(text):
            include = _INCLUDE.match(statement)
            if include is not None:
                self._include(include[1], f"{source}:{first}", source, depth)
            elif words := _split_words(statement, source, first):
                self.lines.append(ConfigLine(first, last, words, source))

    def _include(self, path: str, place: str, neighbours: str, depth: int) -> None:
        name = self._add_cluster(path)
        files = self.include(name, neighbours) if name else "ClusterName= is missing before it"
        if isinstance(files, str):
            self.not_read.append(UnreadInclude(path, files, place))
            return
        for file in files:
            if depth >= MAX_DEPTH or len(self.included) >= MAX_INCLUDED:
                raise ParseError(
                    place,
                    f"at most {MAX_INCLUDED} included files, {MAX_DEPTH} deep",
                    f"Include {path}",
                )
            if all(other.source != file.source for other in self.included):
                self.included.append(file)
            self.add(file, depth + 1)

    def _add_cluster(self, path: str) -> str | None:
        if "%c" not in path:
            return path
        names = (name for line in reversed(self.lines) if (name := line.get("clustername")))
        cluster = next(names, None)
        return None if cluster is None else path.replace("%c", cluster)


def _split_logical_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (first line, last line, text) of each logical line, without comment and escapes."""
    owned: list[str] = []
    first = 1
    number = 0
    for number, raw in enumerate(text.split("\n"), start=1):
        if not owned:
            first = number
        end = _end_of(raw)
        if end < len(raw) and raw[end] == "\\":
            owned.append(raw[:end])
            continue
        yield first, number, _ESCAPED.sub(r"\1", "".join([*owned, raw[:end]]))
        owned = []
    if owned:
        yield first, number, _ESCAPED.sub(r"\1", "".join(owned))


def _end_of(row: str) -> int:
    """Return the end of a physical line's content: its comment, a "\\" that continues the line, or
    the line's end."""
    comment = _COMMENT.search(row)
    if comment is not None:
        return comment.end(1)
    continuation = _CONTINUED.search(row)
    return len(row.rstrip("\r")) if continuation is None else continuation.start(1)


def config_word(key: str, value: str) -> str:
    """Return a word that is read as this key and value.

    >>> config_word("Type", "h100"), config_word("Flags", "a b"), config_word("NodeName", "gpu#1")
    ('Type=h100', 'Flags="a b"', 'NodeName=gpu\\\\#1')

    Raises InputError for a value that no line can hold.
    """
    text = value.replace("\\", "\\\\").replace("#", "\\#")
    is_one_word = re.fullmatch(r"\S+", text) is not None
    if not is_one_word and ('"' in text or not set(text).isdisjoint("\r\n")):
        raise InputError(
            f"{key}: expected a value without quotes or ends of lines, found {value!r}"
        )
    return f"{key}={text}" if is_one_word else f'{key}="{text}"'


def replace_words(rows: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """Return the physical lines of a logical line with these words' values replaced and missing
    words appended; everything else, and its comment, is unchanged."""
    text = "\n".join(rows)
    statement, places = _join_rows(rows)
    missing = {key.lower(): key for key in words}
    edits: list[tuple[int, int, str]] = []
    at = 0
    while (match := _WORD.match(statement, at)) is not None:
        at = match.end()
        key = next((name for name in words if name.lower() == match[1].lower()), None)
        if key is not None:
            start = match.start(4) if match[3] is None else match.start(3) - 1
            begin = places[start] - (text[places[start] - 1] == "\\")
            value = config_word(key, words[key]).partition("=")[2]
            edits.append((begin, places[at - 1] + 1, value))
            missing.pop(key.lower(), None)
    added_words = "".join(f" {config_word(key, words[key])}" for key in missing.values())
    last = places[at - 1] + 1 if at else 0
    for start, end, value in [(last, last, added_words), *reversed(edits)]:
        text = text[:start] + value + text[end:]
    return tuple(text.split("\n"))


def _join_rows(rows: Sequence[str]) -> tuple[str, list[int]]:
    """Return the letters of a statement in physical lines, and their positions."""
    letters, places = [], []
    first = 0
    for row in rows:
        is_escaped = False
        for at, letter in enumerate(row[: _end_of(row)], start=first):
            if letter == "\\" and not is_escaped:
                is_escaped = True
                continue
            is_escaped = False
            letters.append(letter)
            places.append(at)
        first += len(row) + 1
    return "".join(letters), places


def _split_words(text: str, source: str, first: int) -> tuple[tuple[str, str], ...]:
    words: list[tuple[str, str]] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _WORD.match(text, at)
        if match is None:
            raise ParseError(
                source,
                "Key=value",
                text[at:].strip()[:80],
                line=first,
                hint="homenode slurm check gres.conf slurm.conf",
            )
        value = match[4] if match[3] is None else match[3]
        words.append((match[1].lower(), value))
        at = match.end()
    return tuple(words)
