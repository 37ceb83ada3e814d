"""qcow2: a disk image's size and backing files, from its header.

`qemu-img info` opens what an image names: a backing file or a data file may be one on the network,
or a whole tree of drivers as JSON. Here the header alone is read.

Seen with images of QEMU 7.2, versions 2 and 3. Source: docs/interop/qcow2.txt of QEMU; all numbers
are big-endian.
"""

import struct

from msgspec import Struct

from homenode.errors import ParseError

MAGIC = b"QFI\xfb"
MAX_BYTES = 2 << 20
"""Size of the first cluster at most: it holds the header and the backing file's name."""

_START = struct.Struct(">4sIQIIQI")
_FEATURES_AT, _FEATURES = 72, struct.Struct(">QQQII")
_EXTENSION = struct.Struct(">II")
_BACKING_FORMAT = 0xE2792ACA
_DATA_FILE_FEATURE = 1 << 2
_MAX_NAME = 1023
_MAX_BYTES_OF_FIELD = 1 << 62


class Qcow2Header(Struct, frozen=True):
    size_bytes: int  # virtual size of the disk
    backing: str | None  # the name of the backing file, as written; None = none
    backing_format: str | None  # None if it is not stated
    is_encrypted: bool
    has_data_file: bool


def parse(content: bytes, source: str) -> Qcow2Header:
    """Return the header. content: the image's first MAX_BYTES, or all of it. Raises ParseError."""
    if content[:4] != MAGIC or len(content) < _FEATURES_AT:
        raise ParseError(source, "a qcow2 image", content[:4].decode("latin-1"))
    _, version, offset, length, _, size, encryption = _START.unpack_from(content)
    features, header_bytes = 0, _FEATURES_AT
    if version == 3 and len(content) >= _FEATURES_AT + _FEATURES.size:
        features, _, _, _, header_bytes = _FEATURES.unpack_from(content, _FEATURES_AT)
    elif version != 2:
        raise ParseError(source, "a qcow2 image of version 2 or 3", str(version))
    if size > _MAX_BYTES_OF_FIELD:
        raise ParseError(source, f"a disk of at most {_MAX_BYTES_OF_FIELD} bytes", str(size))
    backing = None
    if offset:
        name = content[offset : offset + length]
        if not 0 < length <= _MAX_NAME or len(name) < length:
            raise ParseError(source, "the name of its backing file", f"{length} bytes at {offset}")
        backing = name.decode("utf-8", "surrogateescape")
    return Qcow2Header(
        size_bytes=size,
        backing=backing,
        backing_format=_read_backing_format(content, header_bytes, offset or len(content), source),
        is_encrypted=encryption != 0,
        has_data_file=bool(features & _DATA_FILE_FEATURE),
    )


def _read_backing_format(content: bytes, at: int, end: int, source: str) -> str | None:
    """Return the text of that extension. Extensions follow the header, each padded to 8 bytes, up
    to one of kind 0 or to the name of the backing file. Of two formats QEMU takes the last."""
    backing_format = None
    while at + _EXTENSION.size <= end:
        kind, length = _EXTENSION.unpack_from(content, at)
        at += _EXTENSION.size
        if kind == 0:
            break
        if length > end - at or (kind == _BACKING_FORMAT and backing_format is not None):
            raise ParseError(source, "one format of its backing file", f"another at byte {at}")
        if kind == _BACKING_FORMAT:
            backing_format = content[at : at + length].decode("ascii", "replace")
        at += (length + 7) // 8 * 8
    return backing_format
