"""Apply and restore on a disk that is full or cannot be written: no definition is lost."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.change.apply.definition import (
    apply_definition,
    preview_definition,
    restore_definition,
)
from homenode.errors import HostError, InputError
from homenode.vm.hypervisor.virsh import Virsh
from tests.apply_documents import NAME, ORIGINAL, tuned
from tests.virsh_stand_in import URI, StandIn

pytestmark = pytest.mark.root

PAGE = 4096
PAGES = 32


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB, nothing of it used."""
    if shutil.which("mount") is None:
        pytest.skip("needs mount")
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={PAGES * PAGE}", "homenode-test", str(directory)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root that may mount")
    yield directory
    subprocess.run(["umount", directory], check=True)


def apply(root: Path) -> None:
    virsh = Virsh(URI)
    apply_definition(
        virsh, NAME, tuned(), virsh.read_definition(virsh.find_domain(NAME).uuid), root
    )


def fill(disk: Path, left: int) -> None:
    """Leaves so many pages free."""
    (disk / "ballast").write_bytes(bytes((PAGES - left) * PAGE))


@pytest.mark.parametrize("left", range(9))
def test_a_disk_that_is_full_at_any_write_of_apply_loses_nothing(
    disk: Path, daemon: StandIn, left: int
) -> None:
    fill(disk, left)
    try:
        apply(disk / "state")
        is_done = True
    except HostError as error:
        is_done = False
        assert "No space left" in error.message and "free some space" in (error.hint or "")
    owned = daemon.definition()
    assert owned == ORIGINAL or b"<vcpupin" in owned
    assert not is_done or b"<vcpupin" in owned
    assert is_done == (left >= 5), owned  # three documents, the journal, who holds the lock
    (disk / "ballast").unlink()
    try:
        restore_definition(Virsh(URI), NAME, disk / "state")
    except InputError as error:
        assert "only what this user's `homenode apply`" in (error.hint or "")
    assert daemon.definition() == ORIGINAL
    apply(disk / "state")
    restore_definition(Virsh(URI), NAME, disk / "state")
    assert daemon.definition() == ORIGINAL


@pytest.mark.parametrize("left", range(4))
def test_a_disk_that_is_full_at_any_write_of_restore_loses_nothing(
    disk: Path, daemon: StandIn, left: int
) -> None:
    apply(disk / "state")
    used = sum(-(-p.stat().st_size // PAGE) for p in (disk / "state").rglob("*") if p.is_file())
    fill(disk, left + used)
    owned = daemon.definition()
    try:
        restore_definition(Virsh(URI), NAME, disk / "state")
        assert daemon.definition() == ORIGINAL
    except HostError as error:
        assert "No space left" in error.message
        assert daemon.definition() in (owned, ORIGINAL)
    (disk / "ballast").unlink()
    restore_definition(Virsh(URI), NAME, disk / "state")
    assert daemon.definition() == ORIGINAL


def test_a_directory_that_cannot_be_written_is_refused_before_anything_happens(
    disk: Path, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(HostError, match="Read-only file system") as refused:
        apply(disk / "state")
    assert "make /var/lib/homenode a directory" in (refused.value.hint or "")  # for root
    assert daemon.definition() == ORIGINAL
    assert not [word for word in daemon.commands() if word.startswith("define")]
    would = preview_definition(Virsh(URI), NAME, tuned(), Virsh(URI).read_definition(NAME), disk)
    assert would.changed and not would.obstacles
