"""A document's path is a regular file or a block device of this host, or it is not opened."""

import os
import socket
from pathlib import Path

import pytest

from homenode.errors import HomenodeError, InputError
from homenode.safe.input_files import open_host_file


def test_a_plain_file_is_opened_for_reading(tmp_path: Path) -> None:
    (tmp_path / "vm.img").write_bytes(b"content")
    (tmp_path / "link").symlink_to("vm.img")
    for name in ("vm.img", "link"):
        with open_host_file(str(tmp_path / name), "disk vda") as file:
            assert (file.is_block, file.size_bytes, file.start(3)) == (False, 7, b"con")
            descriptor = file.descriptor
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize(
    "path",
    [
        "nbd:127.0.0.1:1",
        "json:{}",
        "vm.img",
        "",
        "-x",
        "/nothing/here",
        "/etc",
        "/dev/null",
        "/proc/self/fd/0",
        "/proc/kmsg",
        "/sys/kernel/uevent_seqnum",
        "/a\0b",
        "{}/pipe",
        "{}/socket",
        "{}/loop",
    ],
)
def test_anything_else_is_refused_without_being_opened(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would be waited for, and reading some files of the kernel has effects."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with (
            pytest.raises(InputError, match="disk vda"),
            open_host_file(path.format(tmp_path), "disk vda"),
        ):
            pytest.fail("it was opened")


@pytest.mark.root
def test_a_block_device_is_one() -> None:
    found = next((one for one in Path("/sys/class/block").glob("*")), None)
    if found is None:
        pytest.skip("no block device here")
    try:
        with open_host_file(f"/dev/{found.name}", "disk vda") as file:
            assert file.is_block
    except HomenodeError as error:
        pytest.skip(f"none that can be opened: {error}")
