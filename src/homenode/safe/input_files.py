"""Input files: read only regular files, completely, up to a size limit. [I/O]

homenode reads files only through this module, and writes them only through `durable`. The owner of
a directory that root reads can put anything there. So a file's type is checked before it is opened:
opening a pipe blocks, and opening some devices has effects (a watchdog starts). Bytes are counted
while reading, since a size checked before may have changed. Standard input, kernel files and the
serial lines of guests are exceptions with their own functions. Texts of the package: package_data.

Programs that root starts accept more than paths: "nbd:10.0.0.1:10809" is a connection, "json:{…}" a
tree of drivers, "fat:/root" a directory as a disk. Paths of a definition are passed to them only
after `open_host_file` has checked them.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from homenode.errors import InputError, NotKnownError, of_os

MAX_BYTES = 64 << 20
"""Size limit of a file that a user names, unless its reader sets a lower one."""

MAX_KERNEL_BYTES = 16 << 20
"""Size limit of a file of the kernel; those that homenode reads are far smaller."""

STANDARD_INPUT = "/dev/stdin"
NO_PLAIN_FILE = (errno.ENXIO, errno.EISDIR)
"""errno values of this module's errors for a path that is not a regular file."""

_PIECE, _LARGE_PIECE = 1 << 16, 1 << 20
_LATE_PIECES = 64
"""Reads after as much was read as the file had when it was opened: a writer as fast as the reader
cannot block it for longer."""

_PLAIN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_CLOEXEC
_DIRECTORY = _LOOK | os.O_DIRECTORY
_MAX_LINKS = 40
"""Limit of links in one path, as in the kernel."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a link"),
)


def read_input(path: str | Path, expected: str, *, hint: str | None = None) -> bytes:
    """Read the user's file, or standard input for -. See `read_file`."""
    return read_file(STANDARD_INPUT if str(path) == "-" else path, expected, hint=hint)


def read_subject(path: str | Path, expected: str, *, hint: str | None = None) -> bytes:
    """Read a file to check. Raises NotKnownError if it is empty."""
    content = read_input(path, expected, hint=hint)
    if not content.strip():
        raise NotKnownError(f"{path}: nothing was checked: the file is empty")
    return content


def read_file(
    path: str | Path, expected: str, *, max_bytes: int = MAX_BYTES, hint: str | None = None
) -> bytes:
    """Read a file; standard input for /dev/stdin.

    expected: what the file should be, for messages. Raises InputError if it is missing, not a
    regular file or larger than `max_bytes`, HostError if it cannot be read.
    """
    try:
        if str(path) == STANDARD_INPUT:
            return _read_standard_input(max_bytes)
        return read_plain(path, max_bytes)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if getattr(error, "errno", None) in NO_PLAIN_FILE:
            hint = f"name a regular file, or pipe it in and name {STANDARD_INPUT}"
        raise of_os(error, str(path), expected, hint) from None


def read_plain(path: str | Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises OSError, such as ENXIO for other types of file, EFBIG for more
    than `max_bytes`."""
    with open_regular(path) as file:
        return _read_whole(file.fileno(), max_bytes, str(path))


def read_start(path: str | Path, max_bytes: int) -> bytes:
    """Read at most this many first bytes of a regular file. Raises OSError."""
    with open_regular(path) as file:
        return _read_up_to(file.fileno(), max_bytes, str(path))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; the reader counts the bytes. Raises OSError."""
    handle = os.open(path, _LOOK)
    try:
        return _open_handle(handle, str(path))
    finally:
        os.close(handle)


def _open_disk(path: str) -> int:
    """Open a regular file or a block device of this host. Raises OSError for other files."""
    handle = open_path(path)
    try:
        if str(Path(f"/proc/self/fd/{handle}").readlink()).startswith(("/proc/", "/sys/")):
            raise OSError(errno.ENXIO, "a file of the kernel's", path)
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise OSError(errno.ENXIO, f"{_format_kind(mode)}, which is neither", path)
        return os.open(f"/proc/self/fd/{handle}", _PLAIN)
    finally:
        os.close(handle)


def open_path(path: str | Path) -> int:
    """Return an O_PATH descriptor of a path's target, last link included. Raises OSError.

    Root follows no link of another user, who could point it anywhere, such as /etc: each part is
    opened before it is checked, so that it cannot be replaced in between. Other users follow all
    links.
    """
    if os.geteuid() != 0:
        return os.open(path, _LOOK)
    try:
        return _open_parts(Path(path))
    except OSError as error:
        error.filename = str(path)
        raise


def resolve_links(path: Path) -> Path:
    """Resolve a path, also through a dangling link. Raises like `open_path`."""
    with contextlib.ExitStack() as stack:

        def hold(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/self/fd/{hold(open_path(path))}").readlink()
        try:
            directory = hold(open_path(path.parent))
        except FileNotFoundError:
            return path.absolute()
        place = Path(f"/proc/self/fd/{directory}").readlink()
        try:
            link = hold(os.open(path.name, _LOOK | os.O_NOFOLLOW, dir_fd=directory))
        except FileNotFoundError:
            return place / path.name
        return resolve_links(place / _read_link(link, path.name))


def _read_link(link: int, name: str) -> str:
    """Return an opened link's target, if this user may follow it. Raises OSError."""
    owner = os.fstat(link).st_uid
    if os.geteuid() == 0 and owner != 0:
        raise OSError(errno.ELOOP, f"{name} is a link of user {owner}, which root does not follow")
    return os.readlink("", dir_fd=link)


def _open_parts(path: Path) -> int:
    pending, links = [*path.absolute().parts[:0:-1]], 0
    with contextlib.ExitStack() as stack:

        def hold(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        parent_descriptor = hold(os.open("/", _LOOK))
        while pending:
            name = pending.pop()
            part = hold(_open_part(name, parent_descriptor))
            if not stat.S_ISLNK(os.fstat(part).st_mode):
                parent_descriptor = part
                continue
            links += 1
            target = Path(_read_link(part, name))
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            parent_descriptor = (
                hold(os.open("/", _LOOK)) if target.is_absolute() else parent_descriptor
            )
            pending += [name for name in target.parts[::-1] if name != target.anchor]
        return os.dup(parent_descriptor)


def _open_part(name: str, place: int) -> int:
    """Open a part of a path, first as a directory, which triggers an automounter."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    except NotADirectoryError:
        return os.open(name, _LOOK | os.O_NOFOLLOW, dir_fd=place)


def read_below(
    directory: Path, file_path: str, max_bytes: int, *, descriptor: int | None = None
) -> bytes:
    """Read a regular file in or below a directory; see `open_below`."""
    with open_below(directory, file_path, descriptor=descriptor) as file:
        return _read_whole(file.fileno(), max_bytes, str(directory / file_path))


def open_below(directory: Path, file_path: str, *, descriptor: int | None = None) -> BinaryIO:
    """Open a regular file in or below a directory, such as a path from stored data.

    The directory may be a link; links below it are not followed. descriptor: the open directory,
    used instead of its path. Raises OSError, EXDEV for a name that leads out of the directory.
    """
    path = str(directory / file_path)
    parts = Path(file_path).parts
    if not parts or Path(file_path).is_absolute() or ".." in parts:
        raise OSError(errno.EXDEV, f"a name that leads out of {directory}", file_path)
    opened = os.open(directory, _DIRECTORY) if descriptor is None else os.dup(descriptor)
    try:
        for name in parts[:-1]:
            child = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = child
        handle = os.open(parts[-1], _LOOK | os.O_NOFOLLOW, dir_fd=opened)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(opened)
    try:
        return _open_handle(handle, path)
    finally:
        os.close(handle)


def read_kernel_file(path: str) -> bytes | None:
    """Read a file of /proc or /sys, or of a copy of them, up to MAX_KERNEL_BYTES; None if it is
    absent or unreadable.

    A link is not followed and a FIFO does not block. read(2) of a /sys file may fail with any error
    of its driver (EINVAL, EIO, ENODEV), which counts as unreadable.
    """
    try:
        descriptor = os.open(path, _PLAIN | os.O_NOFOLLOW)
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return _read_up_to(descriptor, MAX_KERNEL_BYTES, path)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def open_registers(path: str, *, to_write: bool = False) -> int:
    """Open a /sys file whose registers are read or written one by one. Raises OSError."""
    return os.open(path, (os.O_WRONLY if to_write else os.O_RDONLY) | os.O_CLOEXEC)


def _open_handle(handle: int, name: str) -> BinaryIO:
    """Open the file of an O_PATH descriptor, whose type can no longer change."""
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, "a directory, not a regular file", name)
        raise OSError(errno.ENXIO, f"{_format_kind(mode)}, not a regular file", name)
    try:
        return os.fdopen(os.open(f"/proc/self/fd/{handle}", _PLAIN), "rb")
    except OSError as error:
        error.filename = name
        raise


def _format_kind(mode: int) -> str:
    return next((word for holds, word in _KINDS if holds(mode)), "something else")


def _read_standard_input(max_bytes: int) -> bytes:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "it is closed", "standard input")
    content = sys.stdin.buffer.read(max_bytes + 1)
    _check_size(content, max_bytes, "standard input")
    return content


def _read_whole(descriptor: int, max_bytes: int, name: str) -> bytes:
    content = _read_up_to(descriptor, max_bytes + 1, name)
    _check_size(content, max_bytes, name)
    return content


def _check_size(content: bytes, max_bytes: int, name: str) -> None:
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {_format_size(max_bytes)}", name)


def _read_up_to(descriptor: int, max_bytes: int, name: str) -> bytes:
    reported_bytes = os.fstat(descriptor).st_size  # 0 for kernel files
    size = _PIECE if reported_bytes < _LARGE_PIECE else _LARGE_PIECE
    content = bytearray()
    late = 0
    while len(content) < max_bytes and (
        piece := os.read(descriptor, min(max_bytes - len(content), size))
    ):
        content += piece
        late += 0 < reported_bytes < len(content)
        if late > _LATE_PIECES:
            raise OSError(errno.EBUSY, "a file that grows while it is read", name)
    return bytes(content)


def _format_size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"


_EXPECTED = "the absolute path of a regular file or block device of this host"


class OpenFile:
    """An open file to read. descriptor: closed at the end of the block that opened it."""

    __slots__ = ("descriptor", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @property
    def is_block(self) -> bool:
        return stat.S_ISBLK(os.fstat(self.descriptor).st_mode)

    @property
    def size_bytes(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_END)

    def start(self, limit: int) -> bytes:
        """Read at most this many first bytes. Raises HostError."""
        content = b""
        try:
            while piece := os.pread(self.descriptor, limit - len(content), len(content)):
                content += piece
        except OSError as error:
            raise of_os(error, self.path, "the file") from None
        return content


@contextmanager
def open_host_file(path: str, subject: str) -> Iterator[OpenFile]:
    """Open a regular file or a block device. subject: the source of the path, for messages.

    The type is checked first, and other types are not opened. Root follows no other user's link.
    Raises InputError for a wrong path or type, HostError if it cannot be read.
    """
    if not path.startswith("/"):
        raise InputError(f"{subject}: expected {_EXPECTED}, found {path[:200]!r}")
    try:
        descriptor = _open_disk(path)
    except (OSError, ValueError) as error:
        raise of_os(error, f"{subject}: {path}", _EXPECTED) from None
    try:
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)
