"""RecordDirectory: a directory for one writer: atomic files, and a journal of lines. [I/O]

homenode stores records for undo, resume and results in such directories:

    .lock           held by the writer, and by the programs that it starts
    journal.jsonl   a head, then lines; each is on the disk before what it announces is done
    any file        whole or not there (see durable)

A process that is killed at any moment leaves complete files, and at most one incomplete line at the
journal's end: the step of that line has not begun.

Programs that root runs, and files that root and its child processes open by name, must not be
writable for other users: the file, every directory above it, and those of every link on the path.
"""

import contextlib
import errno
import grp
import os
import pwd
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
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


_LINKS = 40
_ACL = "system.posix_acl_access"
_OWNER, _USER, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x10, 0x20
READ, ENTER = 4, 1
"""Rights of an entry of an access control list."""


def find_other_writer(paths: Iterable[Path], *, user: int = 0, sticky: bool = False) -> str | None:
    """Return which other user could change a path's target, for a message; None if no user could.

    user: whose files and directories are trusted like root's. sticky: directories like /tmp are
    trusted too, where users cannot rename or remove each other's files: for a path whose last part
    belongs to `user`, or is about to be created.

    The path is checked from / downwards, so that checked parts cannot be replaced.
    """
    users = _list_trusted_users(user)
    for path in paths:
        try:
            for part in walk_components(path):
                reason = _find_other_writer(str(part), part.lstat(), users, user, sticky=sticky)
                if reason is not None:
                    return f"{part} {reason}"
        except OSError as error:
            return f"{error.filename or path}: {error.strerror}"
    return None


def _list_trusted_users(user: int) -> frozenset[int]:
    """Return root, the user and the owner of /, who can replace everything (user namespaces)."""
    return frozenset((0, user, os.lstat("/").st_uid))


def _find_other_writer(
    path: str,
    status: os.stat_result,
    trusted_users: frozenset[int],
    user: int,
    *,
    sticky: bool = False,
) -> str | None:
    if status.st_uid not in trusted_users:
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode):
        return None  # only its directory's mode counts
    if sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP:
        if not _is_group_of_one(status.st_gid, user):
            return f"can be written by group {status.st_gid}"
        with contextlib.suppress(OSError):  # it has no list, or the file system has no lists
            os.getxattr(path, _ACL, follow_symlinks=False)
            return "can be written by other users in its access control list"
    return None


def _is_group_of_one(group: int, user: int) -> bool:
    """Return whether only root and the user are in a group: root's, or the user's private group."""
    if group == 0:
        return True
    try:
        group_entry, user_entry = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    members = set(group_entry.gr_mem) - {user_entry.pw_name}
    return user_entry.pw_gid == group and user_entry.pw_name == group_entry.gr_name and not members


@contextlib.contextmanager
def create_private_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a directory with an unguessable name that only this user can enter; removed
    afterwards.

    parent: its directory; None = the directory of temporary files. Raises HostError if another user
    could replace it.
    """
    import tempfile

    parent = find_temporary_root() if parent is None else parent
    check_private(parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as path:
        yield Path(path)


def find_temporary_root() -> Path:
    """Return the parent of private directories: $TMPDIR, else /tmp."""
    import tempfile

    return Path(tempfile.gettempdir())


def check_private(parent: Path) -> None:
    """Raise HostError if another user could rename files created in a directory."""
    reason = find_other_writer((parent,), user=os.geteuid(), sticky=True)
    if reason is not None:
        from homenode.errors import HostError

        raise HostError(
            f"{parent}: other users can replace files in this directory: {reason}",
            hint="TMPDIR=DIR, such as /var/tmp",
        )


def allow_user(descriptor: int, user: int, rights: int) -> None:
    """Give one other user access to a file or directory of this user, and nobody else.

    rights: READ for a file, ENTER for a directory, whose names that user cannot list then. Raises
    OSError if the file system has no access control lists. Source: acl(5);
    include/uapi/linux/posix_acl_xattr.h.
    """
    no_one = 0xFFFFFFFF
    owner_rights = os.fstat(descriptor).st_mode >> 6 & 7
    entries = (
        (_OWNER, owner_rights, no_one),
        (_USER, rights, user),
        (_GROUP, 0, no_one),
        (_MASK, rights, no_one),
        (_OTHERS, 0, no_one),
    )
    packed_entries = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(descriptor, _ACL, struct.pack("<I", 2) + packed_entries)


def walk_components(path: Path) -> Iterator[Path]:
    """Yield the directories above a path, then the path; for a link those of its target instead."""
    directory, links = Path("/"), 0
    pending = [*path.absolute().parts[:0:-1]]
    yield directory
    while pending:
        name = pending.pop()
        if name == "..":  # of a directory without links, as all were followed
            directory = directory.parent
            continue
        part = directory / name
        yield part
        if not part.is_symlink():
            directory = part
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = part.readlink()
        directory = Path("/") if target.is_absolute() else directory
        pending += [name for name in target.parts[::-1] if name != target.anchor]
