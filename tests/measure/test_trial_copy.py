"""A copy for a trial: disks of its own over the originals, and nothing left of it afterwards."""

import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.errors import HostError, InputError, UsageError
from homenode.machine.tools import qcow2
from homenode.measure.trial import copying
from homenode.measure.trial.copying import PreparedCopy, make_copy, prepare_copy, remove_copy
from homenode.measure.trial.guest import is_there
from homenode.measure.trial.journal import TrialCopy
from homenode.process import run
from homenode.safe.record_directory import allow_user
from homenode.vm.domain.copy import WritableDisk, list_writable_disks, replace_disks
from homenode.vm.domain.read import read_vm
from homenode.vm.hypervisor.virsh import Virsh
from tests.disk_images import image
from tests.processes import write_program
from tests.virsh_stand_in import URI

ACL = "system.posix_acl"

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
FLOPPY = "<disk type='file' device='floppy'><source file='/vm/f.img'/><target dev='fda'/></disk>"
CDROM = (
    "<disk type='file' device='cdrom'><source file='/iso'/><target dev='sda'/><readonly/></disk>"
)
EMPTY = "<disk type='file' device='cdrom'><target dev='sdb'/></disk>"
UNSAID = "<disk type='file'><source file='/vm/u.img'/><target dev='vde'/></disk>"
SHARED = "<disk type='file' device='disk'><source file='/ro'/><target dev='vdd'/><readonly/></disk>"


def test_every_disk_that_is_written_gets_an_overlay() -> None:
    document = domain(RAW, QCOW, BLOCK, FLOPPY, UNSAID, CDROM, EMPTY, SHARED)
    assert list_writable_disks(document, "vm") == (
        WritableDisk("vda", "/vm/a.img", "raw", False),
        WritableDisk("vdb", "/vm/b&c.qcow2", "qcow2", False),
        WritableDisk("vdc", "/dev/vg/vm", "raw", True),
        WritableDisk("fda", "/vm/f.img", "raw", False),
        WritableDisk("vde", "/vm/u.img", "raw", False),
    )
    over = {"vda": "/o/a", "vdb": "/o/b'<", "vdc": "/o/c", "fda": "/o/f", "vde": "/o/u"}
    after = replace_disks(document, over, "vm")
    assert list_writable_disks(after, "vm") == tuple(
        WritableDisk(target, path, "qcow2", False) for target, path in over.items()
    )
    assert b"backingStore" not in after
    assert b"cache='none'" in after
    for kept in (CDROM, EMPTY, SHARED):
        assert kept.encode() in after


@pytest.mark.parametrize(
    ("disk", "what"),
    [
        ("type='network'><source protocol='rbd' name='p/i'/>", "disk of network"),
        ("type='volume'><source pool='p' volume='v'/>", "disk of volume"),
        ("type='block' device='lun'><source dev='/dev/sdx'/>", "lun of block"),
        ("type='file'><source file='/x'><encryption format='luks'/></source>", "encrypted one"),
        ("type='file'><source file='/x'/><encryption format='qcow'/>", "an encrypted one"),
    ],
)
def test_a_disk_that_can_have_none_is_refused_by_name(disk: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as raised:
        list_writable_disks(domain(f"<disk {disk}<target dev='vda'/></disk>"), "vm")
    assert "--in-place" in str(raised.value.hint)


HOSTILE = (
    "nbd:127.0.0.1:19999",
    "nbd+unix:///x?socket=/run/x",
    "json:{&quot;driver&quot;:&quot;nbd&quot;}",
    "ssh://root@127.0.0.1/etc/shadow",
    "fat:rw:/root",
    "rbd:pool/image",
    "file.driver=file,file.filename=/etc/shadow",
    "-o backing_file=/etc/shadow",
    "vm.img",
    "../vm.img",
    "",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_disk_with_a_name_that_is_no_path_is_refused(name: str) -> None:
    disk = f"<disk type='file'><source file='{name}'/><target dev='vda'/></disk>"
    with pytest.raises(InputError, match="not an absolute path"):
        list_writable_disks(domain(disk), "vm")


@pytest.mark.parametrize(
    ("disk", "what"),
    [
        ("<driver type='vmdk'/><source file='/x'/>", "format vmdk"),
        ("<driver type='fat'/><source file='/x'/>", "format fat"),
        ("<source file='/x'><slices><slice type='storage'/></slices></source>", "a part of a file"),
        ("<source file='/x'/><target dev='../../etc/vda'/>", "<target dev="),
    ],
)
def test_a_disk_that_is_more_than_a_file_is_refused(disk: str, what: str) -> None:
    target = "" if "<target" in disk else "<target dev='vda'/>"
    with pytest.raises(InputError, match=what):
        list_writable_disks(domain(f"<disk type='file'>{disk}{target}</disk>"), "vm")


def test_a_directory_of_the_hosts_that_the_guest_writes_is_no_throw_away_disk() -> None:
    share = "<filesystem type='mount'><source dir='/home'/><target dir='home'/>{0}</filesystem>"
    with pytest.raises(InputError, match="the guest may write") as raised:
        list_writable_disks(domain(RAW, share.format("")), "vm")
    assert "--in-place" in str(raised.value.hint)
    assert len(list_writable_disks(domain(RAW, share.format("<readonly/>")), "vm")) == 1


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_an_overlay_is_written_through_no_link(tmp_path: Path) -> None:
    victim, disk = tmp_path / "victim", tmp_path / "disk.img"
    victim.write_bytes(b"as it was")
    disk.write_bytes(bytes(4096))
    overlay, prepared = prepared_for(disk)
    overlay.symlink_to(victim)
    with pytest.raises(HostError, match="cannot create the overlay"):
        make_copy(Virsh(URI), prepared)
    assert victim.read_bytes() == b"as it was"


def prepared_for(disk: Path, format: str = "raw") -> tuple[Path, PreparedCopy]:
    """The overlay of a disk, and a copy with it that is still to be made."""
    overlay = disk.with_name("trial-1-vda.homenode-trial.qcow2")
    document = domain(
        f"<disk type='file' device='disk'><driver name='qemu' type='{format}'/>"
        f"<source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
    )
    copy = TrialCopy("3f1c6d3e-0000-4000-8000-000000000001", "vm-trial", (str(overlay),), None)
    return overlay, PreparedCopy(copy, document, list_writable_disks(document, "vm"), None)


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is defined in libvirt, in place of a libvirt."""
    documents: list[str] = []
    monkeypatch.setattr(Virsh, "define", lambda self, path, kept_open: documents.append(path))
    return documents


@pytest.mark.parametrize(
    ("under", "format"),
    [
        ("nbd:127.0.0.1:19999", "raw"),
        ("json:{}", "raw"),
        ("ssh://127.0.0.1/x", "raw"),
        ("fat:/root", "raw"),
        ("/proc/kcore", "raw"),
        ("/dev/zero", "raw"),
        ("/etc", "raw"),
        ("pipe", "raw"),
        ("gone.img", "raw"),
        ("vm.vmdk", "vmdk"),
        ("vm.qcow2", "qcow2"),
    ],
)
def test_what_lies_under_an_image_is_looked_at_and_never_opened_as_anything_else(
    tmp_path: Path, under: str, format: str, defined: list[str]
) -> None:
    """The last one lies under itself."""
    os.mkfifo(tmp_path / "pipe")
    disk = image(tmp_path / "vm.qcow2", "-b", under, "-F", format)
    overlay, prepared = prepared_for(disk, "qcow2")
    with pytest.raises(InputError, match="disk vda"):
        make_copy(Virsh(URI), prepared)
    assert not overlay.exists() and not defined


def test_an_image_without_a_format_is_not_guessed(tmp_path: Path, defined: list[str]) -> None:
    """QEMU takes this text for an image of VMware's, whose content is another file."""
    (tmp_path / "under").write_text(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        'createType="monolithicFlat"\nRW 2048 FLAT "/etc/shadow" 0\n'
    )
    disk = image(tmp_path / "vm.qcow2", "-b", "under", "-F", "raw")
    content = bytearray(disk.read_bytes())
    content[content.index(b"raw") - 8] ^= 1  # the extension is another one
    disk.write_bytes(content)
    _, prepared = prepared_for(disk, "qcow2")
    with pytest.raises(InputError, match="without a format: QEMU would guess it"):
        make_copy(Virsh(URI), prepared)
    image(tmp_path / "under")
    make_copy(Virsh(URI), prepared)
    assert len(defined) == 1


def test_images_with_their_data_elsewhere_are_refused(tmp_path: Path, defined: list[str]) -> None:
    disk = image(tmp_path / "vm.qcow2", "-o", f"data_file={tmp_path}/data.raw")
    _, prepared = prepared_for(disk, "qcow2")
    with pytest.raises(InputError, match="its data in another file"):
        make_copy(Virsh(URI), prepared)


def test_an_image_over_others_gets_its_size(tmp_path: Path, defined: list[str]) -> None:
    base = tmp_path / "base.img"
    base.write_bytes(bytes(4096))
    image(tmp_path / "golden.qcow2", "-b", str(base), "-F", "raw")
    disk = image(tmp_path / "vm.qcow2", "-b", "golden.qcow2", "-F", "qcow2")
    overlay, prepared = prepared_for(disk, "qcow2")
    make_copy(Virsh(URI), prepared)
    header = qcow2.parse(overlay.read_bytes(), "overlay")
    assert header == qcow2.Qcow2Header(1 << 20, str(disk), "qcow2", False, False)
    assert len(defined) == 1


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
@pytest.mark.parametrize("name", ["vm,file.driver=nbd.img", "vm:x.img", "vm {json:}.img"])
def test_a_path_of_any_letters_is_a_path(tmp_path: Path, name: str, defined: list[str]) -> None:
    disk = tmp_path / name
    disk.write_bytes(b"the original's\n" * 100)
    overlay, prepared = prepared_for(disk)
    make_copy(Virsh(URI), prepared)
    header = qcow2.parse(overlay.read_bytes(), "overlay")
    assert header == qcow2.Qcow2Header(1536, str(disk), "raw", False, False)


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_qemu_img_opens_nothing_of_the_vms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defined: list[str]
) -> None:
    disk = image(tmp_path / "vm.qcow2")
    real = shutil.which("qemu-img")
    text = f'mv {disk} {disk}.away; {real} "$@"; r=$?; mv {disk}.away {disk}; exit $r'
    write_program(tmp_path / "bin/qemu-img", f"#!/bin/sh\n{text}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    overlay, prepared = prepared_for(disk, "qcow2")
    make_copy(Virsh(URI), prepared)
    assert overlay.exists() and disk.exists()


@pytest.mark.root
@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
@pytest.mark.parametrize(
    ("mode", "owner", "expected"),
    [
        (0o600, (0, 0), 0o600),
        (0o600, (12345, 54321), 0o600),
        (0o640, (12345, 54321), 0o640),
        (0o664, (0, 54321), 0o664),
        (0o4755, (12345, 0), 0o644),
    ],
)
def test_a_throw_away_disk_is_for_those_who_may_use_the_original(
    tmp_path: Path, mode: int, owner: tuple[int, int], expected: int, defined: list[str]
) -> None:
    disk = tmp_path / "vm.img"
    disk.write_bytes(bytes(4096))
    os.chown(disk, *owner)
    disk.chmod(mode)
    overlay, prepared = prepared_for(disk)
    before = os.umask(0)
    try:
        make_copy(Virsh(URI), prepared)
    finally:
        os.umask(before)
    made = overlay.stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (*owner, expected)


@pytest.mark.root
@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")
def test_an_overlay_has_the_originals_list_alone(tmp_path: Path, defined: list[str]) -> None:
    """New files inherit the directory's list, which lets user 12345 in; the original's does not."""
    disk = tmp_path / "vm.img"
    disk.write_bytes(bytes(4096))
    directory = os.open(tmp_path, os.O_RDONLY)
    allow_user(directory, 12345, 7)
    os.setxattr(directory, f"{ACL}_default", os.getxattr(directory, f"{ACL}_access"))
    os.close(directory)
    disk.chmod(0o660)
    overlay, prepared = prepared_for(disk)
    make_copy(Virsh(URI), prepared)
    assert f"{ACL}_access" not in os.listxattr(overlay)
    overlay.unlink()
    descriptor = os.open(disk, os.O_RDWR)
    allow_user(descriptor, 54321, 6)
    os.close(descriptor)
    make_copy(Virsh(URI), prepared)
    lists = [os.getxattr(path, f"{ACL}_access") for path in (disk, overlay)]
    assert lists[0] == lists[1]


@pytest.mark.root
def test_no_disk_is_found_through_another_users_link(tmp_path: Path, defined: list[str]) -> None:
    (tmp_path / "secret").write_bytes(bytes(4096))
    disk = tmp_path / "vm.img"
    disk.symlink_to("secret")
    overlay, prepared = prepared_for(disk)
    if shutil.which("qemu-img") is not None:
        make_copy(Virsh(URI), prepared)  # a link of root's own
        overlay.unlink()
    os.lchown(disk, 12345, 12345)
    with pytest.raises(InputError, match="link of user 12345"):
        make_copy(Virsh(URI), prepared)
    assert not overlay.exists()


def test_the_copys_nvram_is_as_private(tmp_path: Path, defined: list[str]) -> None:
    before, after = tmp_path / "vm_VARS.fd", tmp_path / "vm-trial_VARS.fd"
    prepared = replace(
        prepared_for(tmp_path / "no.img")[1],
        disks=(),
        copy=TrialCopy("3f1c6d3e-0000-4000-8000-000000000001", "vm-trial", (), str(after)),
        nvram=(str(before), str(after)),
    )
    make_copy(Virsh(URI), prepared)  # it has none yet
    assert not after.exists()
    before.write_bytes(b"variables")
    before.chmod(0o600)
    make_copy(Virsh(URI), prepared)
    assert after.read_bytes() == b"variables"
    assert stat.S_IMODE(after.stat().st_mode) == 0o600
    after.write_bytes(b"another VM's")
    with pytest.raises(HostError, match="cannot copy"):
        make_copy(Virsh(URI), prepared)
    assert after.read_bytes() == b"another VM's"
    after.unlink()
    before.unlink()
    os.mkfifo(before)
    with pytest.raises(InputError, match="<nvram>"):
        make_copy(Virsh(URI), prepared)
    for name in ("nbd:127.0.0.1:1", "vars.fd"):
        with pytest.raises(InputError, match="<nvram>"):
            make_copy(Virsh(URI), replace(prepared, nvram=(name, str(after))))


@pytest.fixture
def original(tmp_path: Path) -> Iterator[tuple[Virsh, str, Path]]:
    """A domain of a real libvirt with one disk: its UUID and the disk's file."""
    if shutil.which("virsh") is None or shutil.which("qemu-img") is None:
        pytest.skip("needs virsh and qemu-img")
    virsh = Virsh(URI)
    try:
        virsh.find_domain("no-such-domain")
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
def test_a_copy_is_made_and_removed_with_its_files(original: tuple[Virsh, str, Path]) -> None:
    virsh, number, disk = original
    before, content = virsh.read_definition(number), hashlib.sha256(disk.read_bytes()).hexdigest()
    state = virsh.find_domain(number)
    prepared = prepare_copy(virsh, state, before, "trial-1")
    assert not list(disk.parent.glob("*.qcow2")), "nothing is made yet"
    make_copy(virsh, prepared)
    (overlay,) = map(Path, prepared.copy.overlays)
    stated = run(("qemu-img", "info", "--output=json", str(overlay)), 60).stdout_or_raise()
    assert json.loads(stated)["full-backing-filename"] == str(disk)
    copy = read_vm(virsh.read_definition(prepared.copy.uuid), "copy")
    assert copy.name == f"{state.name}-trial"
    assert copy.uuid == prepared.copy.uuid != number
    assert b"52:54:00:11:22:33" in virsh.read_definition(prepared.copy.uuid)
    with pytest.raises(UsageError, match=r"domain \S+ exists") as raised:
        prepare_copy(virsh, state, before, "trial-2")
    assert "trial undo" in str(raised.value.hint)
    remove_copy(virsh, prepared.copy)
    assert not overlay.exists()
    assert not is_there(virsh, prepared.copy.uuid)
    assert virsh.read_definition(number) == before
    assert hashlib.sha256(disk.read_bytes()).hexdigest() == content
    remove_copy(virsh, prepared.copy)  # once more does no harm


@pytest.mark.libvirt
def test_another_domain_of_the_name(original: tuple[Virsh, str, Path], tmp_path: Path) -> None:
    virsh, number, _ = original
    state = virsh.find_domain(number)
    path = tmp_path / "other.xml"
    other = str(uuid.uuid4())
    path.write_bytes(domain(name=f"{state.name}-trial", uuid=other))
    virsh.define(str(path))
    try:
        with pytest.raises(UsageError, match="another domain is named"):
            prepare_copy(virsh, state, virsh.read_definition(number), "trial-1")
    finally:
        virsh.undefine(other)


@pytest.mark.libvirt
def test_an_overlay_that_fails_leaves_nothing(original: tuple[Virsh, str, Path]) -> None:
    virsh, number, disk = original
    state = virsh.find_domain(number)
    prepared = prepare_copy(virsh, state, virsh.read_definition(number), "trial-1")
    (overlay,) = map(Path, prepared.copy.overlays)
    overlay.mkdir()
    with pytest.raises(HostError, match="cannot create the overlay"):
        make_copy(virsh, prepared)
    overlay.rmdir()
    remove_copy(virsh, prepared.copy)
    assert not is_there(virsh, prepared.copy.uuid)
    assert sorted(path.name for path in disk.parent.glob("*.qcow2")) == []


def test_only_own_disks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    precious = tmp_path / "precious.qcow2"
    precious.touch()
    monkeypatch.setattr(copying, "is_there", lambda virsh, uuid: False)
    with pytest.raises(InputError, match="not the name of an overlay"):
        remove_copy(Virsh(URI), TrialCopy("u", "n", (str(precious),)))
    assert precious.exists()
