"""JournalFile: a trial's folder: its journal, each line on disk before anything happens. [I/O]

One folder for each trial: journal.jsonl, lock, known_hosts, and the plan and document of each
layout. Only their owner may read them: documents hold passwords.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homenode.durable import (
    create_file,
    open_lock,
    replace_file,
    sync_folder,
    write_and_close,
)
from homenode.errors import HostError, InputError
from homenode.trial.journal import (
    Entry,
    Head,
    State,
    What,
    decode_journal,
    encode_entry,
    encode_head,
    state_of,
    whole_lines,
)

_FILE = "journal.jsonl"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\Z", re.ASCII)
_MOST_BYTES = 64 << 20


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

    __slots__ = ("folder",)

    def __init__(self, root: Path, id: str) -> None:
        if not _ID.match(id):
            raise InputError(f"trial {id!r}: expected letters, digits, dots and dashes")
        self.folder = root / "trials" / id

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Only one homenode at work on a trial: a descriptor for programs that must keep the lock
        to their end. Raises HostError where another is, or what one left behind."""
        with _held(self.folder, "lock", "this trial") as lock:
            yield lock

    def refuse_begun(self) -> None:
        """Raises HostError where such a trial is there: nothing of it may be written over."""
        if (self.folder / _FILE).exists():
            raise self._taken()

    def _taken(self) -> HostError:
        return HostError(
            f"{self.folder / _FILE}: expected no trial of this name, found one",
            hint="give another --name, or --resume it",
        )

    def begin(self, head: Head) -> None:
        """Write the head. Raises HostError where such a trial is there."""
        path = self.folder / _FILE
        with _told(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                create_file(path, encode_head(head))
            except FileExistsError:
                raise self._taken() from None
            sync_folder(self.folder)
            sync_folder(self.folder.parent)

    def add(self, what: What, number: int | None = None, detail: str = "", **more: Any) -> Entry:
        """Write a line; it is on disk when this returns."""
        entry = Entry(_now(), what, number, detail, **more)
        with _told(self.folder):
            path = self.folder / _FILE
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                content = whole_lines(_read(descriptor))
                os.ftruncate(descriptor, len(content))  # a line that a kill cut short
                os.lseek(descriptor, 0, os.SEEK_END)
            except OSError:
                os.close(descriptor)
                raise
            write_and_close(descriptor, encode_entry(entry))
        return entry

    def known(self) -> Known:
        """What is on disk."""
        return _known(self.folder)

    def keep(self, name: str, content: bytes) -> Path:
        """Keep a file beside the journal, whole or not at all."""
        path = self.folder / name
        with _told(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, content)
        return path

    def kept(self, name: str) -> bytes:
        """A file that was kept."""
        with _told(self.folder):
            return (self.folder / name).read_bytes()


@contextmanager
def domain_locked(root: Path, uuid: str) -> Iterator[None]:
    """Only one homenode with a trial of this domain, from its look at it on: two that both saw no
    other would boot it in turns. Raises HostError where another is, or InputError for no UUID."""
    if not _ID.match(uuid):
        raise InputError(f"domain: expected a UUID, found {uuid!r}")
    with _held(root / "trials", f".{uuid}.lock", "a trial of this domain"):
        yield


def known_trials(root: Path, domain: str | None = None) -> tuple[Known, ...]:
    """Trials on disk, the oldest first. domain: only those of this domain, or of this id."""
    try:
        folders = [folder for folder in (root / "trials").iterdir() if (folder / _FILE).exists()]
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
    return tuple(sorted(found, key=lambda one: (one.folder / _FILE).stat().st_mtime))


def names_of(head: Head) -> tuple[str, ...]:
    """What a trial's domain may be called, and the copy of it."""
    return head.source, head.source_uuid, head.domain, head.uuid


def _known(folder: Path) -> Known:
    try:
        with (folder / _FILE).open("rb") as file:
            content = file.read(_MOST_BYTES)
        head, entries = decode_journal(content, str(folder / _FILE))
    except InputError as error:
        return Known(folder, None, (), error.message)
    except OSError as error:
        return Known(folder, None, (), error.strerror or str(error))
    return Known(folder, head, entries)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read(descriptor: int) -> bytes:
    content = b""
    while piece := os.read(descriptor, 1 << 20):
        content += piece
    return content


@contextmanager
def _held(folder: Path, name: str, what: str) -> Iterator[int]:
    with _told(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_lock(folder / name)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HostError(
                f"{folder}: expected no other homenode at work on {what}, found one",
                hint="homenode trial --status shows how far it is",
            ) from None
        yield lock
    finally:
        os.close(lock)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostError(
            f"{error.filename or folder}: expected to keep the trial's journal there, found: "
            f"{error.strerror}"
        ) from None
