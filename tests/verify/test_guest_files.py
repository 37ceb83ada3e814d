"""The kernel of stand-in guests, fetched as a package by stand-ins for apt's programs."""

import os
import tarfile
from pathlib import Path

import pytest

from homenode.check.verify.boot import guest_files
from homenode.check.verify.boot.guest_files import find_guest_files
from homenode.errors import HostError
from tests.processes import write_program

DEPENDS = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-1-cloud-amd64\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on a machine without a kernel, whose apt has one in a package."""
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot/vmlinuz-6.1.0-1").write_bytes(b"a kernel")
    with tarfile.open(tmp_path / "content.tar", "w") as tar:
        tar.add(tmp_path / "boot/vmlinuz-6.1.0-1", "./boot/vmlinuz-6.1.0-1")
    programs = {
        "apt-cache": f"printf '%s' '{DEPENDS}'",
        "apt-get": f'for package; do :; done; cp {tmp_path}/content.tar "$package"_1_amd64.deb',
        # What others see meanwhile.
        "dpkg-deb": f'find {tmp_path}/homenode/guest/vmlinuz -type f >{tmp_path}/seen; cat "$2"',
    }
    for name, body in programs.items():
        write_program(tmp_path / "bin" / name, f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(guest_files, "_find_kernel", lambda: None)
    monkeypatch.setattr(guest_files, "_read_busybox", lambda: b"")
    return tmp_path / "homenode/guest"


def test_a_kernel_that_is_fetched_comes_into_its_place_whole(cache: Path, tmp_path: Path) -> None:
    found = find_guest_files()
    assert found.kernel == cache / "vmlinuz/boot/vmlinuz-6.1.0-1"
    assert found.kernel.read_bytes() == b"a kernel"
    assert (tmp_path / "seen").read_text() == ""
    assert [path for path in cache.rglob("*") if path.is_file()] == [found.kernel]


def test_a_kernel_is_fetched_once(cache: Path, tmp_path: Path) -> None:
    first = find_guest_files()
    (tmp_path / "bin/apt-get").unlink()
    (tmp_path / "seen").unlink()
    assert find_guest_files() == first
    assert not (tmp_path / "seen").exists()


@pytest.mark.root
@pytest.mark.parametrize("part", ["vmlinuz/boot/vmlinuz-6.1.0-1", "vmlinuz", "."])
def test_a_kernel_that_another_user_can_write_is_not_booted(cache: Path, part: str) -> None:
    find_guest_files()
    os.chown(cache / part, 12345, 12345)
    with pytest.raises(HostError, match="belongs to user 12345") as raised:
        find_guest_files()
    assert "XDG_CACHE_HOME" in str(raised.value.hint)


@pytest.mark.root
def test_no_kernel_is_fetched_where_others_can_write(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(HostError, match="other users can replace files"):
        find_guest_files()
    assert not (tmp_path / "seen").exists()
