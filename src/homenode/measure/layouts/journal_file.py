"""JournalFile: a trial's folder: its journal, each line on disk before anything happens. [I/O]

One folder for each trial: journal.jsonl, .lock, known_hosts, and the plan and document of each
layout. Only their owner may read them: documents hold passwords.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homenode import formats
from homenode.errors import HostError, InputError
from homenode.measure.layouts.journal import KIND, Entry, Head, State, What, state_of
from homenode.record_folder import JOURNAL, LOCK, RecordFolder

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Known:
    """A trial that is on disk. reason: why it cannot be read; then there is no head."""

    folder: Path
    head: Head | None
    entries: tuple[Entry, ...]
    reason: str | None = None

    @property
    def state(self) -> State:
        return state_of(self.entries)


class JournalFile:
    """One trial's folder. Errors of the file system are HostErrors."""

    __slots__ = ("_files", "folder")

    def __init__(self, root: Path, id: str) -> None:
        if not _ID.match(id):
            raise InputError(f"trial {id!r}: expected letters, digits, dots and dashes")
        self.folder = root / "trials" / id
        self._files = RecordFolder(self.folder)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Only one homenode at work on a trial: a descriptor for programs that must keep the lock
        to their end. Raises HostError where another is, or what one left behind."""
        with _owned(self._files, "this trial") as lock:
            yield lock

    @property
    def is_locked(self) -> bool:
        """Whether a homenode is at work on it now."""
        return self._files.is_locked

    def refuse_begun(self) -> None:
        """Raises HostError where such a trial is there: nothing of it may be written over."""
        if self._files.has_journal:
            raise HostError(
                f"{self._files.journal_path}: expected no trial of this name, found one",
                hint="give another --name, or homenode trial resume it",
            )

    def begin(self, head: Head) -> None:
        """Write the head. Raises HostError where such a trial is there."""
        self.refuse_begun()
        self._files.begin(formats.head_line(KIND, head))

    def add(self, what: What, number: int | None = None, detail: str = "", **more: Any) -> Entry:
        """Write a line; it is on disk when this returns."""
        entry = Entry(_now(), what, number, detail, **more)
        self._files.append(formats.line(entry))
        return entry

    def known(self) -> Known:
        """What is on disk."""
        return _known(self.folder)

    def keep(self, name: str, content: bytes) -> Path:
        """Keep a file next to the journal, whole or not at all."""
        self._files.make()
        return self._files.write(name, content)

    def kept(self, name: str) -> bytes:
        """A file that was kept."""
        content = self._files.read(name)
        if content is None:
            raise HostError(f"{self.folder / name}: expected a file of the trial, found none")
        return content


@contextmanager
def domain_locked(root: Path, uuid: str) -> Iterator[None]:
    """Only one homenode with a trial of this domain, from its look at it on: two that both saw no
    other would boot it in turns. Raises HostError where another is, or InputError for no UUID."""
    if not _ID.match(uuid):
        raise InputError(f"domain: expected a UUID, found {uuid!r}")
    with _owned(RecordFolder(root / "trials"), "a trial of this domain", f".{uuid}.lock"):
        yield


def known_trials(root: Path, domain: str | None = None) -> tuple[Known, ...]:
    """Trials on disk, the oldest first. domain: only those of this domain, or of this id."""
    try:
        folders = [folder for folder in (root / "trials").iterdir() if (folder / JOURNAL).exists()]
    except OSError:
        return ()
    found = [_known(folder) for folder in folders]
    found = [
        one
        for one in found
        if domain is None
        or one.folder.name == domain
        or (one.head is not None and domain in names_of(one.head))
    ]
    return tuple(sorted(found, key=lambda one: (one.folder / JOURNAL).stat().st_mtime))


def names_of(head: Head) -> tuple[str, ...]:
    """What a trial's domain may be called, and the copy of it."""
    return head.source, head.source_uuid, head.domain, head.uuid


def _known(folder: Path) -> Known:
    files = RecordFolder(folder)
    try:
        content = files.journal()
        head, entries = formats.decode_journal(content, KIND, Head, Entry, str(files.journal_path))
    except (InputError, HostError) as error:
        return Known(folder, None, (), error.message)
    return Known(folder, head, entries)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def _owned(files: RecordFolder, what: str, lock: str = LOCK) -> Iterator[int]:
    expected = f"no other homenode at work on {what}, found one"
    hint = "homenode trial status shows how far it is"
    with files.locked(expected, hint, lock=lock) as descriptor:
        yield descriptor
