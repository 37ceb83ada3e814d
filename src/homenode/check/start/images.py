"""Images: the head of a disk image, and the chain of those below it. [I/O]

Only the names of other files are read of a head: what is written there is untrusted, and QEMU
judges it. libvirt looks at the chain before QEMU does, and refuses one whose backing file is not
there, or has a format that the image above does not name.

Source: docs/interop/qcow2.txt of QEMU 7.2; virStorageFileGetMetadata, libvirt 9.0.
"""

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

from msgspec import Struct

from homenode.errors import HomenodeError, ToolError
from homenode.host_files import HostFile, host_file
from homenode.json_text import NotJsonError, decode_json

_HEAD_BYTES = 1 << 16
_MAX_NAME = 1023
"""Of a backing file's name: QEMU's own limit."""

MAX_DEPTH = 200
"""libvirt's own limit of a chain."""

_QCOW2 = b"QFI\xfb"
_BACKING_FORMAT, _DATA_FILE = 0xE2792ACA, 0x44415441
_HAS_DATA_FILE, _CORRUPT = 1 << 2, 1 << 1

_DESCRIPTOR = b"# Disk DescriptorFile"
_EXTENT = re.compile(rb'^(?:RW|RDONLY) \d+ [A-Z]+ "([^"\n]{1,1023})"', re.MULTILINE)
"""Of a VMDK in more than one file. Source: vmdk_parse_extents of block/vmdk.c."""

_MAGIC: dict[str, tuple[int, *tuple[bytes, ...]]] = {
    "qcow2": (0, _QCOW2),
    "qcow": (0, b"QFI\xfb\0\0\0\1"),
    "qed": (0, b"QED\0"),
    "bochs": (0, b"Bochs Virtual HD Image"),
    "cloop": (0, b"#!/bin/sh\n#V2.0 Format"),
    "vmdk": (0, b"KDMV", b"COWD", _DESCRIPTOR),
    "vdi": (0x40, b"\x7f\x10\xda\xbe"),
    "vhdx": (0, b"vhdxfile"),
    "luks": (0, b"LUKS\xba\xbe"),
}


class ImageHead(Struct, frozen=True, kw_only=True):
    """What an image says of itself. fault: why it is none of its format, None = QEMU judges it.
    backing, data_files: as they are written; format: of the backing file, None = it is not named.
    is_corrupt: so marked, and opened to read only."""

    fault: str | None = None
    backing: str | None = None
    backing_format: str | None = None
    data_files: tuple[str, ...] = ()
    is_encrypted: bool = False
    is_corrupt: bool = False


def read_head(content: bytes, format: str) -> ImageHead:
    """The head of an image of a format, from its first bytes.

    >>> read_head(b"no image", "qcow2").fault
    'no qcow2: its first bytes are of no such image'
    """
    at, *magics = _MAGIC.get(format, (0, b""))
    if not content[at:].startswith(tuple(magics)):
        return ImageHead(fault=f"no {format}: its first bytes are of no such image")
    if format == "qcow2":
        return _qcow2(content)
    if format == "vmdk" and content.startswith(_DESCRIPTOR):
        names = _EXTENT.findall(content)
        return ImageHead(data_files=tuple(_text(name) or "" for name in names))
    return ImageHead()


def _qcow2(content: bytes) -> ImageHead:
    if len(content) < 72:
        return ImageHead(fault=f"a qcow2 of {len(content)} bytes, shorter than its head")
    version, offset, length = struct.unpack_from(">IQI", content, 4)
    (crypt_method,) = struct.unpack_from(">I", content, 32)
    features, head = 0, 72
    if version != 2 and len(content) >= 104:
        (features,) = struct.unpack_from(">Q", content, 72)
        (head,) = struct.unpack_from(">I", content, 100)
    extensions = _extensions(content[: offset or None], head)
    data = extensions.get(_DATA_FILE)
    if features & _HAS_DATA_FILE and not data:
        return ImageHead(fault="a qcow2 that names no data file in its head, and has one")
    return ImageHead(
        backing=_text(content[offset : offset + min(length, _MAX_NAME)]) if offset else None,
        backing_format=_text(extensions.get(_BACKING_FORMAT)),
        data_files=(_text(data) or "",) if features & _HAS_DATA_FILE else (),
        is_encrypted=crypt_method != 0,
        is_corrupt=bool(features & _CORRUPT),
    )


def _extensions(content: bytes, at: int) -> dict[int, bytes]:
    found = {}
    while 72 <= at <= len(content) - 8:
        kind, size = struct.unpack_from(">II", content, at)
        if kind == 0:
            break
        found[kind] = content[at + 8 : at + 8 + size]
        at += 8 + (size + 7 & ~7)
    return found


def _text(content: bytes | None) -> str | None:
    return content.decode("utf-8", "replace") if content else None


class Chain(Struct, frozen=True, kw_only=True):
    """What came of a chain. fault: why it cannot be opened. unknown: what of it was not looked at.
    files: of those below the image, in order. is_encrypted, is_corrupt: the image itself."""

    fault: str | None = None
    unknown: str | None = None
    files: tuple[str, ...] = ()
    data_files: tuple[str, ...] = ()
    is_encrypted: bool = False
    is_corrupt: bool = False


Judge = Callable[[HostFile, str, ImageHead], str | None]
"""Why QEMU does not open an image of a format; None where it does, or is not asked. Raises
ToolError where it does not answer."""


def chain_of(
    path: str, format: str, judge: Judge = lambda file, kind, head: None, *, is_followed: bool
) -> Chain:
    """The image and what lies below it. Never raises for what is in a file."""
    files: list[str] = []
    data: list[str] = []
    encrypted = corrupt = False
    unknown = None
    here, kind = path, format
    is_named, over = True, path
    for _ in range(MAX_DEPTH):
        where = "" if here == path else f"below {path}: "
        if kind == "raw":
            break
        try:
            with host_file(here, where or "the image") as file:
                head = read_head(file.start(_HEAD_BYTES), kind)
                fault = head.fault or judge(file, kind, head)
        except ToolError as error:
            unknown, fault = unknown or error.message, None
        except HomenodeError as error:
            if here == path and not os.access(here, os.R_OK) and os.geteuid() != 0:
                return Chain(unknown=f"{here}: this user may not read it")
            return Chain(fault=error.message, files=tuple(files))
        encrypted = encrypted or head.is_encrypted
        corrupt = corrupt or (head.is_corrupt and here == path)
        if fault is not None:
            return Chain(fault=f"{where}{here}: {fault}", files=tuple(files))
        if not is_named and (head.backing or head.data_files):  # else libvirt looks itself
            return Chain(fault=f"{over}: it does not name the format of its backing file {here}")
        for name in head.data_files:
            named = _beside(here, name)
            if not Path(named).exists():
                return Chain(fault=f"{here}: its data file {named} is not there")
            data.append(named)
        if head.backing is None or not is_followed:
            break
        below = _beside(here, head.backing)
        if not below.startswith("/"):
            return Chain(unknown=f"{here} is over {below[:200]}, no path", files=tuple(files))
        if below in files or below == path:
            return Chain(fault=f"{here} is over {below}, which is over itself")
        if Path(below).is_dir() or not Path(below).exists():
            return Chain(fault=f"{here}: its backing file {below} is not there, or a folder")
        files.append(below)
        is_named, over = head.backing_format is not None, here
        here, kind = below, head.backing_format or _looks_like(below)
    else:
        return Chain(fault=f"{path}: a chain of more than {MAX_DEPTH} images")
    return Chain(
        unknown=unknown,
        files=tuple(files),
        data_files=tuple(data),
        is_encrypted=encrypted,
        is_corrupt=corrupt,
    )


def _beside(path: str, name: str) -> str:
    """The path that an image names, from the folder of that image; a protocol stays as it is."""
    if name.startswith("json:"):
        try:
            said = decode_json(name.removeprefix("json:"), dict[str, object])
        except NotJsonError:
            return name
        while isinstance(said.get("file"), dict):
            said = cast(dict[str, object], said["file"])
        name = str(said.get("filename") or said.get("file.filename") or name)
    name = name.removeprefix("file:")
    if name.startswith("/") or ":" in name.partition("/")[0]:
        return name
    return str(Path(path).resolve().parent / name)


def _looks_like(path: str) -> str:
    try:
        with host_file(path, "the backing file") as file:
            content = file.start(_HEAD_BYTES)
    except HomenodeError:
        return "raw"
    found = (name for name, (at, *own) in _MAGIC.items() if content[at:].startswith(tuple(own)))
    return next(found, "raw")
