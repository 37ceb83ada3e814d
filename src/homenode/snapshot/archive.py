"""Archive: a tar of a host's files, read into memory and never unpacked. [I/O]

Plain, gzip, bzip2 or xz, recognised by content. Devices, sockets and FIFOs in it are skipped: their
content is no text, and opening one is never needed.
"""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase, RawIOBase
from pathlib import Path

from homenode.errors import InputError, of_os

MAX_MEMBERS = 500_000
MAX_FOLDERS = 500_000
MAX_FILE_BYTES = 16 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_PATH_CHARS = 4096
MAX_DEPTH = 64
"""Limits on what an archive may hold; the largest real tree that we know has 64,266 members."""

_OPENERS: tuple[tuple[bytes, str, Callable[[Path], BufferedIOBase]], ...] = (
    (b"\x1f\x8b", "gzip", gzip.GzipFile),
    (b"BZh", "bzip2", bz2.BZ2File),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMAFile),
)
_NOT_READ = ((b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"7z\xbc\xaf", "7z"))


@dataclass(frozen=True, slots=True)
class ArchiveTree:
    """What a tar holds. Paths have no leading slash, no "." and no "..".

    files: path -> text (see MemorySnapshot for bytes that are no UTF-8). links: path -> target.
    folders: every folder, also those that only the paths below imply.
    """

    files: dict[str, str]
    links: dict[str, str]
    folders: frozenset[str]


def read_archive(path: Path, most_bytes: int | None = None) -> ArchiveTree:
    """The members of a tar. Where a name comes twice, the last one counts, as tar itself does.

    Raises InputError where the file is no tar, is cut short, names something outside of itself, or
    exceeds a limit above. most_bytes: unpacked; None = MAX_TOTAL_BYTES.
    """
    compression, opener = _opener(path)
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    folders: set[str] = {""}
    count = 0
    try:
        with opener(path) as stream:
            bounded = _Bounded(
                stream, str(path), MAX_TOTAL_BYTES if most_bytes is None else most_bytes
            )
            with tarfile.open(fileobj=bounded, mode="r|") as tar:
                for member in tar:
                    count += 1
                    if count > MAX_MEMBERS:
                        raise _too_much(str(path), f"at most {MAX_MEMBERS} members", "more")
                    name = _inner_path(member.name, str(path))
                    if not name:
                        continue
                    _add_folders(folders, name if member.isdir() else _parent(name), str(path))
                    files.pop(name, None)
                    links.pop(name, None)
                    if member.issym():
                        links[name] = member.linkname
                    elif member.islnk():
                        files[name] = _hardlink(files, member, str(path))
                    elif member.isreg():
                        files[name] = _text(tar, member, str(path))
                    # tarfile keeps every member that it has seen; we do not need them.
                    tar.members = []  # type: ignore[attr-defined]
                # Reads the checksum of a compressed stream, which stands at its end.
                while bounded.read(1 << 20):
                    pass
                # tarfile takes the end of a stream between two members for the end of a tar.
                if not bounded.ends_with_zeros():
                    raise EOFError("it does not end as a tar ends")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _not_whole(path, compression, count, error) from None
    except OSError as error:
        if error.errno is None:  # gzip's BadGzipFile and bz2's "Invalid data stream"
            raise _not_whole(path, compression, count, error) from None
        raise of_os(error, str(path), "a tar of a host's /sys") from None
    if not count:
        raise InputError(f"{path}: expected a tar of a host's /sys, found one with no members")
    return ArchiveTree(files, links, frozenset(folders))


class _Bounded(RawIOBase):
    """A stream that refuses to give more than so many bytes: an archive bomb ends here."""

    def __init__(self, stream: BufferedIOBase, source: str, most: int) -> None:
        self._stream = stream
        self._source = source
        self._left = self._most = most
        self._tail = b""

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise _too_much(self._source, f"at most {self._most} bytes unpacked", "more")
        self._tail = (self._tail + chunk)[-512:] if len(chunk) < 512 else chunk[-512:]
        return chunk

    def ends_with_zeros(self) -> bool:
        """True where what was read so far ends with a block of zeros."""
        return self._tail == bytes(512)


def _opener(path: Path) -> tuple[str, Callable[[Path], BufferedIOBase]]:
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise of_os(error, str(path), "a tar of a host's /sys") from None
    for magic, name, opener in _OPENERS:
        if head.startswith(magic):
            return name, opener
    for magic, name in _NOT_READ:
        if head.startswith(magic):
            raise InputError(
                f"{path}: expected a tar (plain, gzip, bzip2 or xz), found {name}",
                hint="unpack it and give the folder, or pack it with tar -czf",
            )
    return "plain", lambda plain: plain.open("rb")


def _inner_path(name: str, source: str) -> str:
    """A member's name as a clean path inside the archive; "" for the top itself."""
    if len(name) > MAX_PATH_CHARS:
        raise _too_much(source, f"names of at most {MAX_PATH_CHARS} characters", name[:60] + "...")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise InputError(f"{source}: expected names inside the archive, found {name[:120]!r}")
    if len(parts) > MAX_DEPTH:
        raise _too_much(source, f"paths of at most {MAX_DEPTH} parts", name[:60] + "...")
    return "/".join(parts)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _add_folders(folders: set[str], folder: str, source: str) -> None:
    while folder not in folders:
        folders.add(folder)
        folder = _parent(folder)
    if len(folders) > MAX_FOLDERS:
        raise _too_much(source, f"at most {MAX_FOLDERS} folders", "more")


def _hardlink(files: dict[str, str], member: tarfile.TarInfo, source: str) -> str:
    text = files.get(_inner_path(member.linkname, source))
    if text is None:
        raise InputError(
            f"{source}: expected the file that hard link {member.name[:120]!r} shares before it,"
            f" found none named {member.linkname[:120]!r}"
        )
    return text


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo, source: str) -> str:
    if member.size > MAX_FILE_BYTES:
        raise _too_much(
            source, f"files of at most {MAX_FILE_BYTES} bytes", f"{member.name}: {member.size}"
        )
    stream = tar.extractfile(member)
    content = stream.read() if stream is not None else b""
    if len(content) != member.size:
        raise EOFError(f"{member.name} ends after {len(content)} of {member.size} bytes")
    return content.decode("utf-8", "surrogateescape")


def _too_much(source: str, expected: str, found: str) -> InputError:
    return InputError(
        f"{source}: expected {expected}, found {found}",
        hint="unpack what is needed of it and give the folder",
    )


def _not_whole(path: Path, compression: str, members: int, error: Exception) -> InputError:
    kind = "tar" if compression == "plain" else f"{compression} tar"
    if members or isinstance(error, EOFError):
        return InputError(
            f"{path}: expected a whole {kind}, found one cut short or damaged after {members}"
            f" members: {error}",
            hint="copy it again",
        )
    return InputError(
        f"{path}: expected a tar (plain, gzip, bzip2 or xz) of a host's /sys, found another kind"
        f" of file: {error}"
    )
