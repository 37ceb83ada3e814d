"""Codec: the format of a target as a table of rows, from which its reader and writer are made."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from msgspec import Struct

from homenode.errors import ParseError
from homenode.findings import Finding, Severity, finding
from homenode.machine.topology import Host
from homenode.vm.model import Vm, VmCell
from homenode.vm.plan import Plan
from homenode.vm.targets.target import (
    Feature,
    Rendering,
    Support,
    Target,
    get_default_machine,
    reject_unsafe_name,
    whole_mib,
)

File = TypeVar("File")
"""Result type of `Codec.parse`."""


class TargetEdit(Struct, Generic[File], frozen=True, kw_only=True):
    """A plan, and the file to write it into: a user's, or that of `Codec.new` (is_new)."""

    target: str
    plan: Plan
    guest: Vm
    host: Host | None
    file: File
    is_new: bool
    source: str

    @property
    def memory_mib(self) -> int:
        """The VM's memory. Raises InputError if it is not whole MiB."""
        return whole_mib(self.plan.vm.memory_bytes, "memory", self.target)

    def count_mib(self, cell: VmCell) -> int:
        """Return a cell's memory. Raises like `memory_mib`."""
        return whole_mib(cell.memory_bytes, f"memory of cell {cell.id}", self.target)


class FormatRow(Struct, frozen=True, kw_only=True):
    """One subject in a format."""

    # support level of a plan's features, with the option, or the reason
    says: Mapping[Feature, Support] = MappingProxyType({})
    read: Callable[[Any], Mapping[str, Any]] | None = None  # fields of a Vm that a file contains
    # entries of the file that express a plan, by their keys; None takes one away
    write: Callable[[Any], Mapping[str, Any]] | None = None
    # what is read is what was planned; False if the file has a part of it, or where another file
    # has it
    is_compared: bool = True


class Codec(Struct, frozen=True, kw_only=True):
    """Rows of a format, read and written."""

    name: str  # name of the target
    rows: Sequence[FormatRow]
    parse: Callable[[bytes, str], Any]
    new: Callable[[Vm, Plan], str]  # the text of a file without a plan
    edited: Callable[[Any, Mapping[str, Any]], str]  # that of a writing's file with entries in it
    refuse: Callable[[Any], None]
    # what only this plan or this file has, of the same as companions
    findings: Callable[[Any, Any], Iterable[Finding]] = lambda *_: ()
    # (suffix, content) of files next to it, of the same. refuse raises InputError for content that
    # the target cannot take safely.
    companions: Callable[[Any, Mapping[str, Any]], tuple[tuple[str, bytes], ...]] = lambda *_: ()
    # keys that a plan has; None = all: other keys are the user's alone
    placed: re.Pattern[str] | None = None

    def other_keys(self, content: bytes, source: str) -> tuple[str, ...]:
        """Return the keys of a file that a plan does not have. Raises ParseError or InputError."""
        if self.placed is None:
            return ()
        keys = self.parse(content, source).values
        return tuple(key for key in keys if not self.placed.fullmatch(key))

    def read_vm(self, content: bytes, source: str) -> Vm:
        """Return the VM of a file. Raises ParseError or InputError."""
        file = self.parse(content, source)
        fields: dict[str, Any] = {"cpu_mode": "host-passthrough"}
        for row in self.rows:
            if row.read is not None:
                fields |= row.read(file)
        fields.setdefault("machine", get_default_machine(fields.get("architecture", "x86_64")))
        if not fields.get("vcpu_pins"):
            fields["vcpu_pins"] = (None,) * fields["vcpus"]
        return Vm(source=source, **fields)

    def render(
        self, plan: Plan, guest: Vm, host: Host | None, original: bytes | None, source: str
    ) -> Rendering:
        """Return the file with the plan; other content stays. Raises InputError."""
        reject_unsafe_name(guest.name, source)
        content = self.new(guest, plan).encode() if original is None else original
        writing = TargetEdit(
            target=self.name,
            plan=plan,
            guest=guest,
            host=host,
            file=self.parse(content, source),
            is_new=original is None,
            source=source,
        )
        self.refuse(writing)
        values: dict[str, Any] = {}
        for row in self.rows:
            if row.write is not None:
                values |= row.write(writing)
        text = self.edited(writing, values)
        companions = self.companions(writing, values)
        return Rendering(text.encode(), companions, tuple(self.findings(writing, values)))

    def build_target(self, **more: Any) -> Target:
        """Return the target of this format. more: the other fields of a Target."""
        unread = (row for row in self.rows if row.read is None or not row.is_compared)
        return Target(
            support={
                feature: support for row in self.rows for feature, support in row.says.items()
            },
            unread=frozenset(
                fact for row in unread for feature in row.says for fact in feature.facts
            ),
            render=self.render,
            read_vm=self.read_vm,
            other_keys=self.other_keys,
            **more,
        )


def check_changed_keys(
    edit: TargetEdit[Any],
    lines: Mapping[str, Any],
    reason_of_key: Mapping[str, tuple[object, str]],
) -> Iterator[Finding]:
    """Yield a finding for each limit of the user's that a plan changes: (the size that it limits,
    why it changes) by its key. A limit that equals its size follows it."""
    for key, (size, reason) in reason_of_key.items():
        before, after = edit.file.values.get(key), lines.get(key)
        if before is not None and after is not None and str(before) not in (str(size), after):
            yield finding(
                "target-not-carried",
                f"{edit.target.capitalize()}: {key}",
                observed=f"{before} becomes {after}: {reason}",
                severity=Severity.WARNING,
                fix=None,
            )


def decode_text(content: bytes, source: str, meaning: str) -> str:
    """Raises ParseError for invalid UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ParseError(source, f"{meaning} in UTF-8", "other bytes") from None


class ConfigEntry(NamedTuple):
    """KEY VALUE in a text."""

    key: str
    value: Any  # what it means
    start: int  # where it is
    value_start: int  # where it is
    end: int  # where it is


def replace_entries(
    text: str,
    entries: Sequence[ConfigEntry],
    values_of_key: Mapping[str, Sequence[tuple[Any, str]]],
    joint: str = " = ",
) -> str:
    """Return the text with the (value, text) pairs of each key: changed in place, removed with
    lines that hold nothing else, or added at the end."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    edits, added_text = [], ""
    for key, values in values_of_key.items():
        entries_of_key = [entry for entry in entries if entry.key == key]
        for entry, value in zip_longest(entries_of_key, values):
            if entry is None:
                added_text += f"{key}{joint}{value[1]}{line_end}"
            elif value is None:
                edits.append((*_find_line_span(text, entry), ""))
            elif value[0] != entry.value:
                edits.append((entry.value_start, entry.end, value[1]))
    for first, last, new in sorted(edits, reverse=True):
        text = text[:first] + new + text[last:]
    return text + (line_end if added_text and text and not text.endswith("\n") else "") + added_text


def _find_line_span(text: str, entry: ConfigEntry) -> tuple[int, int]:
    """Start and end of an entry, with its line if nothing else is on it."""
    first = text.rfind("\n", 0, entry.start) + 1
    last = text.find("\n", entry.end) + 1 or len(text)
    if not text[first : entry.start].strip() and not text[entry.end : last].strip():
        return first, last
    tail = text[entry.end :].lstrip(" \t").removeprefix(";").lstrip(" \t")
    return entry.start, len(text) - len(tail)
