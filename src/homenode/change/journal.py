"""Journal: the steps of one owner in one record directory, as lines; do, resume, undo. [I/O]

    journal.jsonl   a head, then a line before each act and one after it
    SHA256.xml      documents that the lines name

Root's records lie in /var/lib/homenode, another user's below XDG_STATE_HOME.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from homenode import formats
from homenode.change.step import (
    UNSETTLED,
    ChangeEntry,
    ChangeHead,
    ChangeState,
    ChangeStep,
    last_lines,
    to_undo,
)
from homenode.errors import HomenodeError
from homenode.safe.record_directory import RecordDirectory
from homenode.vm.hypervisor.domain_state import domain_argument

KIND = "change"

_FULL = (
    "free some space; nothing is lost: homenode restore --list shows what is open and what can be "
    "undone"
)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def default_root() -> Path:
    """/var/lib/homenode for root; for another user a directory below XDG_STATE_HOME."""
    if os.geteuid() == 0:
        return Path("/var/lib/homenode")
    state = os.environ.get("XDG_STATE_HOME", "")
    directory = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return directory / "homenode"


def state_hint(number: int | None) -> str | None:
    """The hint for a record that cannot be written, by its errno."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _FULL
    if number not in _NOT_WRITABLE:
        return None
    if os.geteuid() == 0:
        return f"make {default_root()} a directory on a file system that can be written and stays"
    return "as root, or with XDG_STATE_HOME naming a directory that this user may write to"


class Journal:
    """A directory's steps. Errors of the file system are HostErrors.

    Writers hold the host's lock. head: of a journal that does not exist yet.
    """

    __slots__ = ("files", "head")

    def __init__(self, files: RecordDirectory, head: ChangeHead) -> None:
        self.files = files
        self.head = head

    def stored_head(self) -> ChangeHead:
        """The journal's head, or the head that it would get."""
        first = self._first_line()
        if formats.kind_of(first) != KIND:
            return self.head
        return formats.decode_head(first, KIND, ChangeHead, str(self.files.journal_path))

    def entries(self) -> tuple[ChangeEntry, ...]:
        """All lines. Raises InputError."""
        if not self._first_line():
            return ()
        source, content = str(self.files.journal_path), self.files.journal()
        return formats.decode_journal(content, KIND, ChangeHead, ChangeEntry, source)[1]

    def last(self, kind: str, subject: str) -> ChangeEntry | None:
        """The last line of a step; None if nothing was ever done."""
        return last_lines(self.entries()).get((kind, subject))

    def to_undo(self) -> tuple[ChangeEntry, ...]:
        """The steps that changed or may have changed the host, in the order of their start."""
        return to_undo(self.entries())

    def write(self, *entries: ChangeEntry) -> None:
        """Write lines and sync them to disk."""
        text = "".join(map(formats.line, entries))
        if formats.kind_of(self._first_line()) == KIND:
            self.files.append(text)
            return
        self.entries()  # rejects an invalid journal
        self.files.make()
        head = formats.head_line(KIND, self.head)
        self.files.write(self.files.journal_path.name, f"{head}{text}".encode())

    def settle(self, step_of: Callable[[ChangeEntry], ChangeStep]) -> tuple[ChangeEntry, ...]:
        """Determine from the host which interrupted steps happened, and record these; the others
        remain to be done or undone."""
        unsettled = []
        for entry in self.to_undo():
            if entry.what is ChangeState.BEGIN and step_of(entry).is_done(entry):
                self.write(entry.now(ChangeState.DONE))
            elif entry.what in UNSETTLED:
                unsettled.append(entry)
        return tuple(unsettled)

    def undo(self, step_of: Callable[[ChangeEntry], ChangeStep]) -> tuple[ChangeEntry, ...]:
        """Undo the steps in reverse order, and return the outcome of each."""
        return tuple(step_of(entry).undo(entry, self.write) for entry in reversed(self.to_undo()))

    def _first_line(self) -> bytes:
        return self.files.journal().partition(b"\n")[0]


class OpenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step that changed or may have changed the host."""

    command: str
    kind: str
    subject: str  # the changed object
    is_cut_short: bool  # a kill left it half done, or it is being done
    undo: str  # homenode's command


def open_changes(journals: Iterable[Journal]) -> Iterator[OpenChange | HomenodeError]:
    """The open steps of each journal, oldest first, or the error of an unreadable journal."""
    for journal in journals:
        try:
            head, entries = journal.stored_head(), journal.to_undo()
        except HomenodeError as error:
            yield error
            continue
        for entry in entries:
            name, undo = entry.facts.get("name", entry.subject), head.undo
            if head.run == entry.subject:  # a domain's UUID
                undo = undo.replace(head.run, domain_argument(name, head.run))
            yield OpenChange(
                command=head.command,
                kind=entry.kind,
                subject=name,
                is_cut_short=entry.what in UNSETTLED,
                undo=undo,
            )
