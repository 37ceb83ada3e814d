"""Archive: a tar of a host's files, read into memory and never unpacked. [I/O]

Plain, gzip, bzip2 or xz, recognised by content. Devices, sockets and FIFOs in it are skipped.

A hostile archive may exhaust time and memory. So everything is counted: packed and unpacked bytes,
compressed streams, members, and stored names and texts, a hard link as often as it is resolved. The
tar itself is parsed here: Python's tarfile reads headers of any size, takes 50 us for each member,
and has had endless loops.

Source: POSIX.1-2017, pax; GNU tar, "Basic Tar Format"; RFC 1952; the .xz format, 1.2.1.
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from sys import getsizeof
from typing import BinaryIO, Protocol

from msgspec import Struct

from homenode.errors import InputError, of_os
from homenode.safe.input_files import open_regular
from homenode.units import parse_whole

MAX_MEMBERS = 80_000
MAX_FILE_BYTES = 8 << 20
MAX_TOTAL_BYTES = 64 << 20
MAX_UNPACKED_BYTES = 128 << 20
MAX_STREAMS = 4096
MAX_HEADER_BYTES = 16 << 10
MAX_RECORDS = 400_000
MAX_PATH_CHARS = 4096
MAX_DEPTH = 64
"""Limits on what an archive may hold. The largest known real tree has 64,266 members, of
0.7 MB of text and 5 MB of names, in 58 MB of tar. TOTAL: of texts and names together."""

_BLOCK = 512
_LOW_BYTES = bytes(range(128))
_PIECE = 1 << 16
_OVERHEAD_BYTES = 200  # of a name in a mapping
_DICTIONARY_BYTES = 80 << 20  # of xz -9


class _Decompressor(Protocol):
    """Common protocol of the decompressors of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Compression(Struct, frozen=True):
    """Recognition and reading of a compression format."""

    magic: bytes
    name: str
    begin: Callable[[], _Decompressor]
    most_packed: int  # bytes of the packed file; they take about a second


class _Gzip:
    """zlib's decompressor with the interface of bz2 and lzma: it keeps unused input."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


_COMPRESSIONS = (
    _Compression(b"\x1f\x8b", "gzip", _Gzip, 64 << 20),
    _Compression(b"BZh", "bzip2", bz2.BZ2Decompressor, 4 << 20),
    _Compression(
        b"\xfd7zXZ\x00",
        "xz",
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY_BYTES),
        16 << 20,
    ),
)
_NOT_READ = ((b"PK\x03\x04", "zip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"7z\xbc\xaf", "7z"))


class ArchiveTree(Struct, frozen=True):
    """Contents of a tar. Paths have no leading slash, no "." and no ".."."""

    files: dict[str, str]  # path -> text (see MemorySnapshot for bytes that are no UTF-8)
    links: dict[str, str]  # path -> target
    directories: frozenset[str]  # every directory, also those implied by paths


def read_archive(path: Path) -> ArchiveTree:
    """Return the members of a tar. Of members of one name the last counts, as in tar itself.

    Raises InputError if the file is not a tar, is cut short, names something outside of itself, or
    exceeds a limit above.
    """
    try:
        with open_regular(path) as file:
            return _read(file, str(path))
    except OSError as error:
        raise of_os(error, str(path), "a tar of a host's /sys") from None


def _read(file: BinaryIO, source: str) -> ArchiveTree:
    head = file.read(_BLOCK)
    if not head:
        raise InputError(f"{source}: expected a tar of a host's /sys, found an empty file")
    for magic, name in _NOT_READ:
        if head.startswith(magic):
            raise InputError(
                f"{source}: expected a tar (plain, gzip, bzip2 or xz), found {name}",
                hint="unpack it and name the directory, or pack it with tar -czf",
            )
    compression = next((kind for kind in _COMPRESSIONS if head.startswith(kind.magic)), None)
    tar = _Tar(_UnpackedStream(file, head, compression, source), source)
    try:
        tar.read()
    except (_DamagedError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _make_error(source, compression, tar.members, error) from None
    except OSError as error:
        if error.errno is None:  # bz2's "Invalid data stream"
            raise _make_error(source, compression, tar.members, error) from None
        raise
    if not tar.members:
        raise InputError(f"{source}: expected a tar of a host's /sys, found an empty tar")
    return ArchiveTree(tar.files, tar.links, frozenset(tar.directories))


class _DamagedError(Exception):
    """The archive is malformed."""


class _UnpackedStream:
    """The bytes of a packed file, unpacked on demand."""

    def __init__(
        self, file: BinaryIO, head: bytes, compression: _Compression | None, source: str
    ) -> None:
        self._file, self._compression, self._source = file, compression, source
        self._packed = head
        self._packed_left = (compression.most_packed if compression else MAX_UNPACKED_BYTES) - len(
            head
        )
        self._left = MAX_UNPACKED_BYTES
        self._streams = 0
        self._stream: _Decompressor | None = None
        self._buffer = b""
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes. Raises EOFError if there are fewer."""
        end = self._at + size
        if end > len(self._buffer):
            pieces = [self._buffer[self._at :]]
            missing = end - len(self._buffer)
            while missing > 0:
                piece = self._read_piece()
                if not piece:
                    raise EOFError("it ends in the middle")
                pieces.append(piece)
                missing -= len(piece)
            self._buffer, self._at, end = b"".join(pieces), 0, size
        data = self._buffer[self._at : end]
        self._at = end
        return data

    def drain(self) -> None:
        """Read to the end, which holds the checksum of a compressed stream."""
        while self._read_piece():
            pass

    def _read_piece(self) -> bytes:
        """Return some more bytes; none at the end."""
        piece = self._unpack() if self._compression is not None else self._next_packed()
        self._left -= len(piece)
        if self._left < 0:
            raise _make_size_error(
                self._source, f"at most {MAX_UNPACKED_BYTES} bytes unpacked", "more"
            )
        return piece

    def _unpack(self) -> bytes:
        assert self._compression is not None
        while True:
            if self._stream is None:
                packed_piece = self._next_packed()
                if not packed_piece:
                    return b""
                # Zeros may fill up a tape's block after a stream; another stream may follow.
                self._packed = packed_piece.lstrip(b"\0")
                if not self._packed:
                    continue
                self._streams += 1
                if self._streams > MAX_STREAMS:
                    raise _make_size_error(self._source, f"at most {MAX_STREAMS} streams", "more")
                self._stream = self._compression.begin()
            packed_piece, self._packed = self._packed, b""
            unpacked_piece = self._stream.decompress(packed_piece, _PIECE)
            if self._stream.eof:
                self._packed, self._stream = self._stream.unused_data, None
            elif not unpacked_piece:
                self._packed = self._next_packed()
                if not self._packed:
                    raise EOFError("its compressed data end in the middle")
            if unpacked_piece:
                return unpacked_piece

    def _next_packed(self) -> bytes:
        if self._packed:
            packed_piece, self._packed = self._packed, b""
            return packed_piece
        packed_piece = self._file.read(_PIECE)
        self._packed_left -= len(packed_piece)
        if self._packed_left < 0:
            limit = self._compression.most_packed if self._compression else MAX_UNPACKED_BYTES
            raise _make_size_error(self._source, f"at most {limit} bytes", "more")
        return packed_piece


class _Tar:
    """The members read from a tar so far. left: bytes that may still be stored."""

    def __init__(self, stream: _UnpackedStream, source: str) -> None:
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.directories: set[str] = {""}
        self.members = 0
        self._records = 0
        self._unpacked, self._source = stream, source
        self._left = MAX_TOTAL_BYTES

    def read(self) -> None:
        """Read all. Raises _DamagedError, EOFError, InputError for what is beyond a limit."""
        name = link = ""
        size: int | None = None
        while (block := self._unpacked.take(_BLOCK)) != bytes(_BLOCK):
            header = _Header(block)
            self.members += 1
            if self.members > MAX_MEMBERS:
                raise self._too_much(f"at most {MAX_MEMBERS} members", "more")
            if header.kind in b"LKxXg":
                extension = self._read_extension(header)
                if header.kind == b"L":
                    name = _decode_text(extension.partition(b"\0")[0])
                elif header.kind == b"K":
                    link = _decode_text(extension.partition(b"\0")[0])
                else:
                    records = _parse_pax_records(extension)
                    self._records += len(records)
                    if self._records > MAX_RECORDS:
                        raise self._too_much(f"at most {MAX_RECORDS} pax records", "more")
                    if any(key.startswith("GNU.sparse") for key in records):
                        raise self._sparse_error()
                    if header.kind != b"g":
                        name, link = records.get("path", name), records.get("linkpath", link)
                        size = _parse_size(records["size"]) if "size" in records else size
                continue
            self._add(
                header,
                self._inner_path(name or header.name),
                link or header.link,
                header.size if size is None else size,
            )
            name, link, size = "", "", None
        self._unpacked.drain()

    def _add(self, header: "_Header", name: str, link: str, size: int) -> None:
        if header.kind == b"S":
            raise self._sparse_error()
        is_directory = header.kind == b"5" or (header.kind == b"\0" and header.name.endswith("/"))
        text = None
        if not is_directory and header.kind not in b"12346":
            text = self._read_content(name, size)
        elif header.kind == b"1":
            text = self._hard_link(name, link)
        if not name:
            return
        self._keep(name, text or "")
        self._add_directories(name if is_directory else name.rpartition("/")[0])
        self.files.pop(name, None)
        self.links.pop(name, None)
        if text is not None:
            self.files[name] = text
        elif header.kind == b"2":
            if len(link) > MAX_PATH_CHARS:
                raise self._too_much(f"links of at most {MAX_PATH_CHARS} characters", "more")
            self._keep(link)
            self.links[name] = link

    def _read_extension(self, header: "_Header") -> bytes:
        if header.size > MAX_HEADER_BYTES:
            raise self._too_much(f"headers of at most {MAX_HEADER_BYTES} bytes", str(header.size))
        return self._take_padded(header.size)

    def _read_content(self, name: str, size: int) -> str:
        if size > MAX_FILE_BYTES:
            raise self._too_much(f"files of at most {MAX_FILE_BYTES} bytes", f"{name}: {size}")
        return _decode_text(self._take_padded(size))

    def _take_padded(self, size: int) -> bytes:
        return self._unpacked.take(-(-size // _BLOCK) * _BLOCK)[:size]

    def _hard_link(self, name: str, link: str) -> str:
        text = self.files.get(self._inner_path(link))
        if text is None:
            raise InputError(
                f"{self._source}: hard link {name[:120]!r}: expected file {link[:120]!r} before it"
            )
        return text

    def _keep(self, *texts: str) -> None:
        """Count stored or shared content: it is read as often as it is named."""
        self._left -= _OVERHEAD_BYTES + sum(map(getsizeof, texts))
        if self._left < 0:
            raise self._too_much(f"at most {MAX_TOTAL_BYTES} bytes of names and texts", "more")

    def _add_directories(self, directory: str) -> None:
        while directory not in self.directories:
            self._keep(directory)
            self.directories.add(directory)
            directory = directory.rpartition("/")[0]

    def _inner_path(self, name: str) -> str:
        """Return a member's name as a clean path inside the archive; "" for the top itself."""
        if len(name) > MAX_PATH_CHARS:
            raise self._too_much(f"names of at most {MAX_PATH_CHARS} characters", f"{name[:60]}...")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise InputError(
                f"{self._source}: expected names inside the archive, found {name[:120]!r}"
            )
        if len(parts) > MAX_DEPTH:
            raise self._too_much(f"paths of at most {MAX_DEPTH} parts", f"{name[:60]}...")
        return "/".join(parts)

    def _too_much(self, expected: str, excess: str) -> InputError:
        return _make_size_error(self._source, expected, excess)

    def _sparse_error(self) -> InputError:
        return InputError(
            f"{self._source}: expected whole files, found a sparse one",
            hint="pack it without --sparse",
        )


class _Header:
    """The block before a member. Raises _DamagedError."""

    __slots__ = ("kind", "link", "name", "size")

    def __init__(self, block: bytes) -> None:
        summed_block = block[:148] + b" " * 8 + block[156:]
        stored = _number(block[148:156])
        # The low half of adler32 is the sum of all bytes and 1, modulo 65521; sum() takes 15 times
        # as long. Some old tars count bytes above 127 as negative.
        low = zlib.adler32(summed_block) & 0xFFFF
        negative = 256 * len(summed_block.translate(None, _LOW_BYTES)) if low != stored + 1 else 0
        if low not in ((stored + 1) % 65521, (stored + 1 + negative) % 65521):
            raise _DamagedError("a header with another checksum")
        self.kind = block[156:157]
        self.size = _number(block[124:136])
        name = block[:100].partition(b"\0")[0]
        prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
        self.name = _decode_text(prefix + b"/" + name if prefix else name)
        self.link = _decode_text(block[157:257].partition(b"\0")[0])


def _number(field: bytes) -> int:
    """Return the octal digits, or after a byte of 128 a binary number. Raises _DamagedError."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ").partition(b"\0")[0]
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise _DamagedError(f"{digits!r} instead of an octal number")
    return int(digits, 8)


def _parse_size(digits: str) -> int:
    size = parse_whole(digits)
    if size is None:
        raise _DamagedError(f"a size of {digits[:40]!r}")
    return size


def _parse_pax_records(content: bytes) -> dict[str, str]:
    """Return the records of a pax header: "LENGTH KEY=VALUE\\n" each. Raises _DamagedError."""
    records: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at]:  # GNU tar fills up with zeros
        length, space, _ = content[at : at + 8].partition(b" ")
        size = parse_whole(length.decode("latin-1")) if space else None
        end = 0 if size is None else at + size
        key, equals, value = content[at + len(length) + 1 : end - 1].partition(b"=")
        if end > len(content) or not equals or content[end - 1 : end] != b"\n":
            raise _DamagedError("a pax header of another form")
        records[_decode_text(key)] = _decode_text(value)
        at = end
    return records


def _decode_text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _make_size_error(source: str, expected: str, excess: str) -> InputError:
    return InputError(
        f"{source}: expected {expected}, found {excess}",
        hint="unpack the needed part and pass the directory",
    )


def _make_error(
    source: str, compression: _Compression | None, members: int, error: Exception
) -> InputError:
    kind = "tar" if compression is None else f"{compression.name} tar"
    if members or isinstance(error, EOFError):
        return InputError(
            f"{source}: expected a whole {kind}, found a truncated or damaged file after {members}"
            f" members: {error}",
            hint="copy it again",
        )
    return InputError(
        f"{source}: expected a tar (plain, gzip, bzip2 or xz) of a host's /sys, found another kind"
        f" of file: {error}"
    )
