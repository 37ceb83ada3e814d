"""The header of an image says its size and what lies under it; any bytes are one or an error."""

import contextlib
import json
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import ParseError
from homenode.machine.tools import qcow2
from tests.disk_images import image


def test_the_size_and_the_files_under_an_image_are_read_from_its_header(tmp_path: Path) -> None:
    plain = image(tmp_path / "a.qcow2")
    assert qcow2.parse(plain.read_bytes(), "a") == qcow2.Qcow2Header(
        1 << 20, None, None, False, False
    )
    over = image(tmp_path / "b.qcow2", "-b", "json:{}", "-F", "raw", "-o", "compat=0.10")
    assert qcow2.parse(over.read_bytes(), "b") == qcow2.Qcow2Header(
        1 << 20, "json:{}", "raw", False, False
    )
    other_file = image(tmp_path / "c.qcow2", "-o", f"data_file={tmp_path}/c.raw")
    assert qcow2.parse(other_file.read_bytes(), "c").has_data_file


FORMAT, OTHER = 0xE2792ACA, 0x6803F857
HEADERS: list[list[tuple[int, bytes]]] = [
    [],
    [(FORMAT, b"raw")],
    [(OTHER, b"a" * 48), (FORMAT, b"qcow2")],
    [(OTHER, b"abc"), (FORMAT, b"raw"), (0, b""), (FORMAT, b"qcow2")],
    [(FORMAT, b"raw"), (FORMAT, b"qcow2")],
    [(FORMAT, b"qcow2"), (FORMAT, b"raw")],
]


def with_extensions(
    path: Path, extensions: Sequence[tuple[int, bytes]], after: bytes = b""
) -> bytes:
    """An image over /base; after: follows the name of that file."""
    content = bytearray(image(path, "-b", "/base", "-F", "raw").read_bytes())
    (at,) = struct.unpack_from(">I", content, 100)
    told = b"".join(
        struct.pack(">II", kind, len(one)) + one + bytes(-len(one) % 8) for kind, one in extensions
    )
    content[at:4096] = (told + b"/base\0\0\0" + after).ljust(4096 - at, b"\0")
    struct.pack_into(">QI", content, 8, at + len(told), len("/base"))
    path.write_bytes(content)
    return bytes(content)


@pytest.mark.parametrize("extensions", HEADERS)
def test_the_format_of_the_file_under_an_image_is_the_one_that_qemu_takes(
    tmp_path: Path, extensions: list[tuple[int, bytes]]
) -> None:
    """Else a file looks raw to us, and QEMU opens what it names as its own backing file."""
    path = tmp_path / "a.qcow2"
    fake = struct.pack(">II", FORMAT, 3) + b"raw"
    for after in (b"", fake):
        content = with_extensions(path, extensions, after)
        argv = ("qemu-img", "info", "--output=json", str(path))
        found = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
        try:
            header = qcow2.parse(content, "a")
        except ParseError:
            assert len([kind for kind, _ in extensions if kind == FORMAT]) > 1
            continue
        assert header.backing == found["backing-filename"] == "/base"
        assert header.backing_format == found.get("backing-filename-format")


@given(st.binary(max_size=400), st.integers(0, 399), st.binary(min_size=1, max_size=9))
def test_any_bytes_are_a_header_or_an_error(tail: bytes, at: int, change: bytes) -> None:
    start = bytearray(qcow2.MAGIC + struct.pack(">IQIIQI", 3, 200, 5, 16, 1 << 20, 0) + tail)
    start[at : at + len(change)] = change
    for content in (bytes(start), qcow2.MAGIC + tail, tail):
        with contextlib.suppress(ParseError):
            header = qcow2.parse(content, "image")
            assert 0 <= header.size_bytes <= 1 << 62
