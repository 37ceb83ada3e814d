"""A copy for a trial: disks of its own over the originals, and nothing left of it afterwards."""

import hashlib
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.domain.overlay_disks import WritableDisk, with_overlays, writable_disks
from homenode.domain.read import read_guest
from homenode.errors import HostError, InputError, UsageError
from homenode.hypervisor.virsh import Virsh
from homenode.measure.layouts.copying import Prepared, make_copy, prepare_copy, remove_copy
from homenode.measure.layouts.guest import is_there
from homenode.measure.layouts.journal import Copy
from tests.virsh_stand_in import URI

_DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>256</memory>
  <vcpu>2</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>
{disks}
    <interface type='user'><mac address='52:54:00:11:22:33'/></interface>
  </devices>
</domain>
"""


def domain(
    *disks: str, name: str = "vm", uuid: str = "6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49"
) -> bytes:
    return _DOMAIN.format(name=name, uuid=uuid, disks="\n".join(disks)).encode()


RAW = "<disk type='file' device='disk'><source file='/vm/a.img'/><target dev='vda'/></disk>"
QCOW = (
    "<disk type='file'><driver name='qemu' type='qcow2' cache='none'/>"
    "<source file='/vm/b&amp;c.qcow2'/><backingStore type='file'><format type='raw'/>"
    "<source file='/base'/></backingStore><target dev='vdb' bus='virtio'/></disk>"
)
BLOCK = (
    "<disk type='block' device='disk'><driver name='qemu' type='raw'/>"
    "<source dev='/dev/vg/vm'/><target dev='vdc'/></disk>"
)
CDROM = (
    "<disk type='file' device='cdrom'><source file='/iso'/><target dev='sda'/><readonly/></disk>"
)
EMPTY = "<disk type='file' device='cdrom'><target dev='sdb'/></disk>"
SHARED = "<disk type='file' device='disk'><source file='/ro'/><target dev='vdd'/><readonly/></disk>"


def test_every_disk_that_is_written_gets_an_overlay() -> None:
    document = domain(RAW, QCOW, BLOCK, CDROM, EMPTY, SHARED)
    assert writable_disks(document, "vm") == (
        WritableDisk("vda", "/vm/a.img", "raw", False),
        WritableDisk("vdb", "/vm/b&c.qcow2", "qcow2", False),
        WritableDisk("vdc", "/dev/vg/vm", "raw", True),
    )
    over = {"vda": "/o/a", "vdb": "/o/b'<", "vdc": "/o/c"}
    after = with_overlays(document, over, "vm")
    assert writable_disks(after, "vm") == tuple(
        WritableDisk(target, path, "qcow2", False) for target, path in over.items()
    )
    assert b"backingStore" not in after
    assert b"cache='none'" in after
    for kept in (CDROM, EMPTY, SHARED):
        assert kept.encode() in after


@pytest.mark.parametrize(
    ("disk", "what"),
    [
        (
            "<disk type='network'><source protocol='rbd' name='p/i'/><target dev='vda'/></disk>",
            "disk of network",
        ),
        (
            "<disk type='volume'><source pool='p' volume='v'/><target dev='vda'/></disk>",
            "disk of volume",
        ),
        (
            "<disk type='block' device='lun'><source dev='/dev/sdx'/><target dev='sda'/></disk>",
            "lun of block",
        ),
        (
            "<disk type='file'><source file='/x'><encryption format='luks'/></source>"
            "<target dev='vda'/></disk>",
            "an encrypted one",
        ),
        (
            "<disk type='file'><source file='/x'/><encryption format='qcow'/>"
            "<target dev='vda'/></disk>",
            "an encrypted one",
        ),
    ],
)
def test_a_disk_that_can_have_none_is_refused_by_name(disk: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as raised:
        writable_disks(domain(disk), "vm")
    assert "--in-place" in str(raised.value.hint)


def test_a_folder_of_the_hosts_that_the_guest_writes_is_no_throw_away_disk() -> None:
    share = "<filesystem type='mount'><source dir='/home'/><target dir='home'/>{0}</filesystem>"
    with pytest.raises(InputError, match="the guest may write") as raised:
        writable_disks(domain(RAW, share.format("")), "vm")
    assert "--in-place" in str(raised.value.hint)
    assert len(writable_disks(domain(RAW, share.format("<readonly/>")), "vm")) == 1


def test_a_floppy_gets_an_overlay_too() -> None:
    floppy = (
        "<disk type='file' device='floppy'><source file='/vm/f.img'/><target dev='fda'/></disk>"
    )
    assert [disk.target for disk in writable_disks(domain(floppy), "vm")] == ["fda"]


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_an_overlay_is_written_through_no_link_that_somebody_put_in_its_place(
    tmp_path: Path,
) -> None:
    victim, disk = tmp_path / "victim", tmp_path / "disk.img"
    victim.write_bytes(b"as it was")
    disk.write_bytes(bytes(4096))
    overlay = tmp_path / "trial-1-vda.homenode-trial.qcow2"
    overlay.symlink_to(victim)
    document = domain(
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
    )
    copy = Copy("3f1c6d3e-0000-4000-8000-000000000001", "vm-trial", (str(overlay),), None)
    prepared = Prepared(copy, document, writable_disks(document, "vm"), None)
    with pytest.raises(HostError, match="expected a throw-away disk"):
        make_copy(Virsh(URI), prepared)
    assert victim.read_bytes() == b"as it was"


@pytest.fixture
def original(tmp_path: Path) -> Iterator[tuple[Virsh, str, Path]]:
    """A domain of a real libvirt with one disk: its UUID and the disk's file."""
    if shutil.which("virsh") is None or shutil.which("qemu-img") is None:
        pytest.skip("needs virsh and qemu-img")
    virsh = Virsh(URI)
    try:
        virsh.domain("no-such-domain")
    except InputError:
        pass
    except HostError as error:
        pytest.skip(error.message)
    disk = tmp_path / "disk.img"
    disk.write_bytes(b"the original's\n" * 5000)
    number = str(uuid.uuid4())
    text = (
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
    )
    path = tmp_path / "vm.xml"
    path.write_bytes(domain(text, name=f"homenode-test-{number[:8]}", uuid=number))
    virsh.define(str(path))
    yield virsh, number, disk
    virsh.undefine(number)


@pytest.mark.libvirt
def test_a_copy_is_made_next_to_the_vm_and_removed_with_all_its_files(
    original: tuple[Virsh, str, Path],
) -> None:
    virsh, number, disk = original
    before, content = virsh.definition(number), hashlib.sha256(disk.read_bytes()).hexdigest()
    state = virsh.domain(number)
    prepared = prepare_copy(virsh, state, before, "trial-1")
    assert not list(disk.parent.glob("*.qcow2")), "nothing is made yet"
    make_copy(virsh, prepared)
    (overlay,) = map(Path, prepared.copy.overlays)
    stated = subprocess.run(
        ["qemu-img", "info", "--output=json", str(overlay)], capture_output=True, check=True
    )
    assert json.loads(stated.stdout)["full-backing-filename"] == str(disk)
    copy = read_guest(virsh.definition(prepared.copy.uuid), "copy")
    assert copy.name == f"{state.name}-trial"
    assert copy.uuid == prepared.copy.uuid != number
    assert b"52:54:00:11:22:33" not in virsh.definition(prepared.copy.uuid)
    with pytest.raises(UsageError, match="expected no domain") as raised:
        prepare_copy(virsh, state, before, "trial-2")
    assert "trial undo" in str(raised.value.hint)
    remove_copy(virsh, prepared.copy)
    assert not overlay.exists()
    assert not is_there(virsh, prepared.copy.uuid)
    assert virsh.definition(number) == before
    assert hashlib.sha256(disk.read_bytes()).hexdigest() == content
    remove_copy(virsh, prepared.copy)  # once more does no harm


@pytest.mark.libvirt
def test_another_domain_of_the_copys_name_is_named(
    original: tuple[Virsh, str, Path], tmp_path: Path
) -> None:
    virsh, number, _ = original
    state = virsh.domain(number)
    path = tmp_path / "other.xml"
    other = str(uuid.uuid4())
    path.write_bytes(domain(name=f"{state.name}-trial", uuid=other))
    virsh.define(str(path))
    try:
        with pytest.raises(UsageError, match="found another domain of it"):
            prepare_copy(virsh, state, virsh.definition(number), "trial-1")
    finally:
        virsh.undefine(other)


@pytest.mark.libvirt
def test_an_overlay_that_cannot_be_made_is_named_and_leaves_nothing(
    original: tuple[Virsh, str, Path],
) -> None:
    virsh, number, disk = original
    state = virsh.domain(number)
    prepared = prepare_copy(virsh, state, virsh.definition(number), "trial-1")
    (overlay,) = map(Path, prepared.copy.overlays)
    overlay.mkdir()
    with pytest.raises(HostError, match="expected a throw-away disk"):
        make_copy(virsh, prepared)
    overlay.rmdir()
    remove_copy(virsh, prepared.copy)
    assert not is_there(virsh, prepared.copy.uuid)
    assert sorted(path.name for path in disk.parent.glob("*.qcow2")) == []


def test_only_a_trials_own_disks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from homenode.measure.layouts import copying
    from homenode.measure.layouts.journal import Copy

    precious = tmp_path / "precious.qcow2"
    precious.touch()
    monkeypatch.setattr(copying, "is_there", lambda virsh, uuid: False)
    with pytest.raises(InputError, match="expected a throw-away disk of a trial"):
        remove_copy(Virsh(URI), Copy("u", "n", (str(precious),)))
    assert precious.exists()
