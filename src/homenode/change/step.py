"""Step: one atomic change of a host, and the data that undoes it. Decision 0018 describes the state
after a kill.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

import msgspec


class ChangeState(StrEnum):
    """The state of a step. BEGIN and UNDOING are on disk before the act."""

    BEGIN = "begin"
    DONE = "done"
    UNDOING = "undoing"
    UNDONE = "undone"
    REFUSED = "refused"  # by the host: it is as it was
    KEPT = "kept"  # edited since by the user, so not restored


UNSETTLED = frozenset({ChangeState.BEGIN, ChangeState.UNDOING})
"""The act may have happened or not: the host says which."""

TO_UNDO = UNSETTLED | {ChangeState.DONE}


class ChangeHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a journal."""

    run: str  # its name, unique among those of its owner
    command: str  # what homenode was asked to do
    undo: str  # the command that undoes it
    connect: str = ""  # the libvirt daemon that is changed; "" = the host itself


class ChangeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a journal. The last line of a step suffices for another process to undo it."""

    what: ChangeState
    kind: str  # which step
    subject: str  # the changed object: a domain's UUID, a path, a port
    # of the changed object: the sha256 of a kept document, or a value; None = none existed
    before: str | None = None
    after: str | None = None
    made: tuple[str, ...] = ()  # directories and files that a killed act leaves
    by_hand: str = ""  # the command that undoes it without homenode, for who reads the journal
    facts: dict[str, str] = {}  # what else its kind needs

    @property
    def step(self) -> tuple[str, str]:
        """The step of the line."""
        return self.kind, self.subject

    def now(self, state: ChangeState) -> "ChangeEntry":
        """Return the step with a new state."""
        return msgspec.structs.replace(self, what=state)


Note = Callable[[ChangeEntry], None]
"""Has a line on the disk when it returns."""


class ChangeStep(Protocol):
    """A change of one subject. All methods raise HomenodeError."""

    def do(self, note: Note) -> ChangeEntry:
        """Make the change; `note` is called with the entry before the change, and with its outcome
        if that is known. Returns the last of these."""

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Undo the change of an entry; as `do`."""

    def is_done(self, entry: ChangeEntry) -> bool:
        """Whether the host is in the state after the entry; reads the host, never a journal."""


def last_lines(entries: Iterable[ChangeEntry]) -> dict[tuple[str, str], ChangeEntry]:
    """Return the last line of each step, in the order of their start.

    >>> lines = [ChangeEntry(what=ChangeState.BEGIN, kind="file", subject="/a")]
    >>> last_lines([*lines, lines[0].now(ChangeState.DONE)])["file", "/a"].what
    <ChangeState.DONE: 'done'>
    """
    last_entries: dict[tuple[str, str], ChangeEntry] = {}
    for entry in entries:
        before = last_entries.get(entry.step)
        if before is not None and before.what not in TO_UNDO:
            del last_entries[
                entry.step
            ]  # begun again: it takes its place behind those begun meanwhile
        last_entries[entry.step] = entry
    return last_entries


def to_undo(entries: Iterable[ChangeEntry]) -> tuple[ChangeEntry, ...]:
    """The steps that did something, or may have, in the order in which they were begun."""
    return tuple(entry for entry in last_lines(entries).values() if entry.what in TO_UNDO)
