"""The header of an image says its size and what lies under it; any bytes are one or an error."""

import contextlib
import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import ParseError
from homenode.tools import qcow2
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
    beside = image(tmp_path / "c.qcow2", "-o", f"data_file={tmp_path}/c.raw")
    assert qcow2.parse(beside.read_bytes(), "c").has_data_file


@given(st.binary(max_size=400), st.integers(0, 399), st.binary(min_size=1, max_size=9))
def test_any_bytes_are_a_header_or_an_error(tail: bytes, at: int, change: bytes) -> None:
    start = bytearray(qcow2.MAGIC + struct.pack(">IQIIQI", 3, 200, 5, 16, 1 << 20, 0) + tail)
    start[at : at + len(change)] = change
    for content in (bytes(start), qcow2.MAGIC + tail, tail):
        with contextlib.suppress(ParseError):
            header = qcow2.parse(content, "image")
            assert 0 <= header.size_bytes <= 1 << 62
