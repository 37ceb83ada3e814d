"""Host files: whether a path of a document is a regular file or a block device of this host. [I/O]

Programs that root starts take more than paths where they expect one: "nbd:10.0.0.1:10809" is a
connection, "json:{…}" a tree of drivers, "fat:/root" a directory as a disk. What a document names
goes to them only after it was found here.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from homenode.errors import InputError, of_os
from homenode.safe.input_files import open_disk

_EXPECTED = "the absolute path of a regular file or block device of this host"


class HostFile:
    """One that is open for reading. descriptor: its own; closed with the block that opened it."""

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
        """Its first bytes, at most so many. Raises HostError."""
        content = b""
        try:
            while piece := os.pread(self.descriptor, limit - len(content), len(content)):
                content += piece
        except OSError as error:
            raise of_os(error, self.path, "the file") from None
        return content


@contextmanager
def host_file(path: str, subject: str) -> Iterator[HostFile]:
    """Open a regular file or a block device. subject: where the path stands, for messages.

    Nothing else is opened: what it is, is looked at first. Root follows no other user's link.
    Raises InputError for what is no such path or nothing of the kind, HostError where it cannot be
    read.
    """
    if not path.startswith("/"):
        raise InputError(f"{subject}: expected {_EXPECTED}, found {path[:200]!r}")
    try:
        descriptor = open_disk(path)
    except (OSError, ValueError) as error:
        raise of_os(error, f"{subject}: {path}", _EXPECTED) from None
    try:
        yield HostFile(path, descriptor)
    finally:
        os.close(descriptor)
