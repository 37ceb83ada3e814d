"""RecordDirectory: a directory for one writer: atomic files, and a journal of lines. [I/O]

homenode stores records for undo, resume and results in such directories:

    .lock           held by the writer, and by the programs that it starts
    journal.jsonl   a head, then lines; each is on the disk before what it announces is done
    any file        whole or not there (see durable)

A process that is killed at any moment leaves complete files, and at most one incomplete line at the
journal's end: the step of that line has not begun.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from homenode.errors import HostError
from homenode.safe.durable import (
    PRIVATE,
    open_directory,
    open_existing,
    open_lock,
    replace_file,
    sweep_parts,
    sync_directory,
    try_lock,
    write_and_close,
)
from homenode.safe.input_files import NO_PLAIN_FILE, open_below, read_below

JOURNAL = "journal.jsonl"
LOCK = ".lock"
MAX_BYTES = 256 << 20
"""Size limit of one file."""

_LOOK_S = 0.5
"""flock does not report the holder of a file: `is_locked` shares the lock for less than this."""

_NOT_PLAIN = "only homenode writes there, only regular files: check the entry, and move it away"


class BusyError(HostError):
    """Another process holds the lock."""


class RecordDirectory:
    """A directory of records. File system errors become HostErrors; `hint` has the fix by errno.

    private: only its owner may read it (documents hold passwords). journal: the journal's name.
    below: a directory that the user named: links from it to `path` are not followed, and while the
    lock is held, files are written to the locked directory, even if it was renamed.
    """

    __slots__ = ("_below", "_directory", "_hint", "_journal", "_private", "path")

    def __init__(
        self,
        path: Path,
        *,
        private: bool = True,
        journal: str = JOURNAL,
        below: Path | None = None,
        hint: Callable[[int | None], str | None] = lambda number: None,
    ) -> None:
        self.path = path
        self._private = private
        self._journal = journal
        self._below = below
        self._directory: int | None = None
        self._hint = hint

    @property
    def journal_path(self) -> Path:
        return self.path / self._journal

    @property
    def has_journal(self) -> bool:
        """Whether the journal has a complete first line."""
        return b"\n" in (self.read(self._journal) or b"")

    @property
    def is_locked(self) -> bool:
        """Whether a process holds the lock. False without a lock file, or if not testable."""
        try:
            with open_below(self.path, LOCK) as file:  # shared
                return not try_lock(file.fileno(), shared=True)
        except OSError:
            return False

    @contextlib.contextmanager
    def hold_lock(
        self,
        message: str,
        hint: str | None = None,
        *,
        lock: str = LOCK,
        wait_s: float = _LOOK_S,
        on_wait: Callable[[], None] = lambda: None,
        holder: str = "",
    ) -> Iterator[int]:
        """Hold the lock; yield a descriptor for programs that must hold it until they end.

        holder: text in the lock file meanwhile, for waiting processes. Raises BusyError with
        `message` if another process holds it longer than wait_s. A file system without locks does
        not exclude a second writer.
        """
        with contextlib.ExitStack() as stack:
            with self.convert_errors():
                self.make()
                if self._directory is None and self._below is not None:
                    names = self.path.relative_to(self._below).parts
                    self._directory = open_directory(self._below, *names)
                    stack.callback(self._close_directory)
                descriptor = open_lock(self.path / lock, self._file_mode, directory=self._directory)
            stack.callback(os.close, descriptor)
            if not take_lock(descriptor, wait_s, on_wait):
                raise BusyError(f"{self.path}: {message}", hint=hint)
            if lock == LOCK:
                self.sweep()
            if holder:
                with contextlib.suppress(OSError):  # a full disk: the lock holds without it
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, holder.encode("utf-8", "replace"))
            yield descriptor

    def _close_directory(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def sweep(self) -> None:
        """Remove files that a killed writer left half-written. Only the lock's holder may."""
        directory = (
            self.path if self._directory is None else Path(f"/proc/self/fd/{self._directory}")
        )
        with self.convert_errors():
            sweep_parts(directory)

    def make(self) -> None:
        """Create the directory if it is not there."""
        if self._directory is not None:
            return
        with self.convert_errors():
            if self._below is not None:
                os.close(open_directory(self._below, *self.path.relative_to(self._below).parts))
            elif not self.path.is_dir():
                mode = 0o700 if self._private else 0o777
                self.path.mkdir(mode=mode, parents=True, exist_ok=True)
                sync_directory(self.path.parent)

    def read(self, name: str) -> bytes | None:
        """Read a file; None if it is missing."""
        with self.convert_errors():
            try:
                return read_below(self.path, name, MAX_BYTES, descriptor=self._directory)
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes, mode: int | None = None) -> Path:
        """Write a file atomically and sync it. mode: its permissions, if not the directory's."""
        path = self.path / name
        mode = PRIVATE if self._private else mode
        with self.convert_errors():
            if self._directory is None:
                replace_file(path, content, mode)
                return path
            own_path = Path(f"/proc/self/fd/{self._directory}")
            directory = open_directory(own_path, *Path(name).parts[:-1])
            try:
                replace_file(path, content, mode, directory=directory)
            finally:
                os.close(directory)
        return path

    def read_journal(self) -> bytes:
        """Return the journal's complete lines; empty without a journal."""
        content = self.read(self._journal) or b""
        return content[: content.rfind(b"\n") + 1]

    def begin(self, head: str) -> None:
        """Write the journal's first line. Raises HostError if the journal exists."""
        if self.has_journal:
            raise HostError(f"{self.journal_path}: this journal exists")
        self.make()
        self.write(self._journal, head.encode())

    def append(self, line: str) -> None:
        """Append a line and sync it. Only the lock's holder may call this."""
        with self.convert_errors():
            name = self.journal_path if self._directory is None else self._journal
            descriptor = open_existing(name, directory=self._directory)
            try:
                end = os.lseek(descriptor, 0, os.SEEK_END)
                if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a kill cut a line short
                    end = len(self.read_journal())
                    os.ftruncate(descriptor, end)
                os.lseek(descriptor, end, os.SEEK_SET)
            except OSError:
                os.close(descriptor)
                raise
            try:
                write_and_close(descriptor, line.encode())
            except OSError:
                with contextlib.suppress(OSError):  # a full disk: the partial line does not count
                    self._cut_journal(end)
                raise

    def _cut_journal(self, end: int) -> None:
        name = self.journal_path if self._directory is None else self._journal
        descriptor = open_existing(name, directory=self._directory)
        try:
            os.ftruncate(descriptor, end)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def convert_errors(self) -> Iterator[None]:
        """Convert file system errors to HostErrors with the file and the next step."""
        try:
            yield
        except OSError as error:
            raise HostError(
                f"{error.filename or self.path}: cannot read and write: {error.strerror or error}",
                hint=_NOT_PLAIN if error.errno in NO_PLAIN_FILE else self._hint(error.errno),
            ) from None

    @property
    def _file_mode(self) -> int:
        return PRIVATE if self._private else 0o644


def take_lock(descriptor: int, wait_s: float, on_wait: Callable[[], None]) -> bool:
    """Lock an open file or directory; False if another process holds it for longer than wait_s.
    on_wait: called once, before it waits."""
    end = time.monotonic() + wait_s
    has_waited = False
    while not try_lock(descriptor):
        if time.monotonic() >= end:
            return False
        if not has_waited:
            on_wait()
        has_waited = True
        time.sleep(0.05)
    return True
