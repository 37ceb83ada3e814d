"""A command of Cloud Hypervisor as its options and their values.

Grammar as docs/cpu.md, memory.md, vfio.md and the tests of Cloud Hypervisor have it: an option has
one or more values; a value is KEY=VALUE pairs by commas; lists stand in [ ].
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from homenode.errors import ParseError
from homenode.vm.targets.codec import number_of, text_of
from homenode.vm.targets.script import shell_words, words_of

_PROGRAM = re.compile(r"(?:[^\s\"']*/)?cloud-hypervisor(?:-static)?\Z", re.ASCII)
_COMMAND = re.compile(
    r"^[^#\n'\"(]*(?:^|[\s/])cloud-hypervisor(?:-static)?[ \t\r\n\\]", re.MULTILINE
)


Keys = Mapping[str, str]
"""KEY=VALUE pairs of a value."""


class Option(NamedTuple):
    """An option with its values. start, end: in the text, from the option to its last value."""

    name: str
    values: tuple[str, ...]
    start: int
    end: int


class HypervisorCommand(NamedTuple):
    text: str
    options: tuple[Option, ...]
    source: str

    def all(self, name: str) -> list[Keys]:
        """Of each value of an option."""
        own = (option for option in self.options if option.name == name)
        return [fields_of(value) for option in own for value in option.values]

    def first(self, name: str, default: str) -> Keys:
        return next(iter(self.all(name)), fields_of(default))

    def number(self, keys: Keys, key: str) -> int:
        return number_of(keys.get(key, ""), f"{self.source}: {key}")

    @property
    def zones(self) -> dict[str, Keys]:
        return {keys.get("id", ""): keys for keys in self.all("--memory-zone")}


def is_command(content: bytes) -> bool:
    """Whether this is a command of Cloud Hypervisor."""
    return _COMMAND.search(content[:1_000_000].decode("utf-8", "replace")) is not None


def parse(content: bytes, source: str) -> HypervisorCommand:
    """Raises ParseError for what is no such command."""
    text = text_of(content, source, "a command")
    spans = list(shell_words(text, source))
    first = next((i for i, span in enumerate(spans) if _PROGRAM.match(span[0])), None)
    if first is None:
        raise ParseError(source, "a command of cloud-hypervisor", "none")
    options: list[Option] = []
    for word, start, end in spans[first + 1 :]:
        (bare,) = words_of(word, source)
        if bare.startswith("--"):
            name, equals, value = bare.partition("=")
            options.append(Option(name, (value,) if equals else (), start, end))
        elif bare == "$@" or not options:
            continue
        else:
            last = options.pop()
            options.append(Option(last.name, (*last.values, bare), last.start, end))
    for name in ("--cpus", "--memory", "--platform"):
        if sum(option.name == name for option in options) > 1:
            raise ParseError(source, f"{name} once", "it again")
    return HypervisorCommand(text, tuple(options), source)


def fields_of(value: str) -> dict[str, str]:
    """The keys of a value; commas in [ ] are of its list.

    >>> fields_of("guest_numa_id=0,cpus=[0-3,8],memory_zones=mem0")
    {'guest_numa_id': '0', 'cpus': '[0-3,8]', 'memory_zones': 'mem0'}
    """
    if value.count("[") != value.count("]"):
        raise ParseError("Cloud Hypervisor", "a value whose brackets are closed", value[:60])
    return {key: text for key, _, text in (one.partition("=") for one in _split(value, ",") if one)}


def list_of(value: str) -> list[str]:
    """The elements of [a,b] or a; those of older releases are separated by colons."""
    inside = value.removeprefix("[").removesuffix("]") if value.startswith("[") else value
    words = [word.strip() for word in _split(inside, ",:")]
    return words if words[-1] else words[:-1]


def _split(value: str, separators: str) -> list[str]:
    """The words between separators that are in no brackets."""
    words, depth = [""], 0
    for letter in value:
        depth += (letter == "[") - (letter == "]")
        if letter in separators and not depth:
            words.append("")
        else:
            words[-1] += letter
    return words
