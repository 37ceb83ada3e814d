"""What a test guest says is taken from files that no other user can write to or replace.

The attacker is user 12345, on this machine, without any group.
"""

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from homenode.check.verify.boot import boot_directory as boot_directories
from homenode.check.verify.boot.boot_directory import (
    GuestOutput,
    allow_qemu,
    boot_directory,
    find_uri,
    parse_user,
)
from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.errors import HostError
from homenode.safe.record_directory import allow_user, create_private_directory, find_other_writer
from homenode.vm.domain.read import build_vm, open_domain
from tests.processes import write_program
from tests.verify_documents import tuned
from tests.verify_guests import guest_files

ATTACKER, QEMU = 12345, 54321


def as_user(user: int, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A shell script of another user."""
    setpriv = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    argv = [*setpriv, "sh", "-c", script, "sh", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files like /tmp: everybody may make files there."""
    with create_private_directory("homenode-test-", Path("/tmp")) as above:
        directory = above / "tmp"
        directory.mkdir()
        above.chmod(0o755)
        directory.chmod(0o1777)
        monkeypatch.setattr(boot_directories, "find_temporary_root", lambda: directory)
        monkeypatch.setattr("homenode.safe.record_directory.find_temporary_root", lambda: directory)
        yield directory


@pytest.fixture
def said(tmp_path: Path) -> Iterator[GuestOutput]:
    directory = tmp_path / "boot"
    directory.mkdir(mode=0o700)
    made = GuestOutput(directory / "report", os.geteuid())
    made.path.write_bytes(b"sound")
    yield made
    made.close()


def test_what_the_guest_said_is_read_and_forgotten(said: GuestOutput) -> None:
    assert said.read_output() == b"sound" and said.decode_output() == "sound"
    assert stat.S_IMODE(said.path.stat().st_mode) == 0o600
    said.clear()
    assert said.read_output() == b""


def _replaced(said: GuestOutput) -> None:
    other = said.path.with_name("other")
    other.write_bytes(b"forged")
    other.replace(said.path)


def _linked(said: GuestOutput) -> None:
    said.path.rename(said.path.with_name("moved"))
    said.path.symlink_to("moved")


def _another_directory(said: GuestOutput) -> None:
    directory = said.path.parent
    directory.rename(directory.with_name("moved"))
    directory.mkdir()
    said.path.write_bytes(b"forged")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_replaced, "another file in its place"),
        (_linked, "a link in its place"),
        (_another_directory, "another file in its place"),
        (lambda said: said.path.unlink(), "No such file"),
        (lambda said: os.link(said.path, said.path.with_name("more")), "2 names"),
        (lambda said: said.path.chmod(0o666), "mode 666"),
        (lambda said: said.path.chmod(0o620), "mode 620"),
        (lambda said: said.path.parent.chmod(0o711), "its directory open to others"),
        (lambda said: said.path.parent.chmod(0o770), "its directory open to others"),
    ],
)
def test_a_report_that_another_user_could_have_written_is_none(
    said: GuestOutput, change: Callable[[GuestOutput], None], found: str
) -> None:
    change(said)
    with pytest.raises(HostError, match="is not trusted") as raised:
        said.read_output()
    assert found in raised.value.message and raised.value.exit_code == 3


@pytest.mark.root
def test_a_report_of_another_user_is_none(said: GuestOutput) -> None:
    os.chown(said.path, ATTACKER, -1)
    with pytest.raises(HostError, match=f"belongs to user {ATTACKER}"):
        said.read_output()


@pytest.mark.root
def test_a_directory_that_qemu_may_enter_is_closed_to_everybody_else(place: Path) -> None:
    with boot_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        allow_qemu(directory, QEMU)
        said = GuestOutput(directory / "report", QEMU)
        boot_directories.copy_for_qemu(directory / "kernel", b"kernel", QEMU)
        try:
            assert as_user(QEMU, 'echo x >>"$1/report"', str(directory)).returncode
            os.chown(said.path, QEMU, -1)  # as libvirt does
            written = as_user(QEMU, 'cat "$1/kernel" && echo booted >>"$1/report"', str(directory))
            assert (written.stdout, written.returncode) == ("kernel", 0), written.stderr
            for nothing in ('ls "$1"', 'echo x >"$1/n"', 'mv "$1/report" "$1/r"', 'rm "$1/kernel"'):
                assert as_user(QEMU, nothing, str(directory)).returncode, nothing
            for attack in (
                'cat "$1/report"',
                'echo forged >"$1/report"',
                'ln "$1/report" "$1/../report"',
                'mv "$1" "$1.moved"',
                'rm -rf "$1"',
                'cat "$1/kernel"',
            ):
                assert as_user(ATTACKER, attack, str(directory)).returncode, attack
            assert said.decode_output() == "booted\n"
        finally:
            said.close()
    assert not list(place.glob("homenode-boot-*"))


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        lambda directory: directory.chmod(0o777),
        lambda directory: os.chown(directory, ATTACKER, -1),
        lambda directory: os.chown(directory.parent, ATTACKER, -1),
        lambda directory: directory.parent.chmod(0o777),
    ],
)
def test_no_boot_where_others_replace_us(place: Path, change: Callable[[Path], None]) -> None:
    change(place)
    makers = (boot_directory, partial(create_private_directory, "x", place))
    for make in makers:
        with pytest.raises(HostError, match="other users can replace files") as raised, make():
            pytest.fail("it was made")
        assert "TMPDIR" in str(raised.value.hint)


@pytest.mark.root
def test_another_users_link_on_the_way_is_named(tmp_path: Path) -> None:
    way = tmp_path / "way"
    way.symlink_to("/tmp")
    assert find_other_writer((way,), sticky=True) is None
    os.lchown(way, ATTACKER, ATTACKER)
    assert find_other_writer((way,), sticky=True) == f"{way} belongs to user {ATTACKER}"


@pytest.mark.root
def test_others_rights_by_an_inherited_list_end_where_one_user_is_let_in(tmp_path: Path) -> None:
    """New files and directories inherit the default access control list of the one above."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    allow_user(descriptor, ATTACKER, 7)
    inherited = os.getxattr(descriptor, "system.posix_acl_access")
    os.setxattr(descriptor, "system.posix_acl_default", inherited)
    os.close(descriptor)
    directory = tmp_path / "boot"
    directory.mkdir(mode=0o700)
    allow_qemu(directory, QEMU)
    assert as_user(ATTACKER, 'echo x >"$1/y"', str(directory)).returncode


def test_the_user_of_libvirts_qemu_is_in_its_capabilities() -> None:
    model = "<secmodel><model>{}</model><doi>0</doi>{}</secmodel>"
    label = "<baselabel type='kvm'>{0}</baselabel><baselabel type='qemu'>{0}</baselabel>"
    document = "<capabilities><host>{}</host></capabilities>"
    selinux = model.format("selinux", label.format("system_u:system_r:svirt_t:s0"))
    dac = model.format("dac", label.format("+64055:+107"))
    assert parse_user(document.format(selinux + dac)) == 64055
    assert parse_user(document.format(selinux)) is None
    assert parse_user(document.format(model.format("dac", label.format("qemu")))) is None


_VIRSH = """#!/bin/sh
case "$*" in
  *domcapabilities*) exit 1 ;;
  *capabilities*) echo '<capabilities><host><secmodel><model>dac</model>'
    echo "<baselabel type='kvm'>+54321:+1</baselabel></secmodel></host></capabilities>" ;;
esac
"""
_REFUSES = """#!/bin/sh
case "$*" in
  *'-machine help'*) printf 'Supported machines are:\\nq35 PC\\n'; exit 0 ;;
esac
echo 'no guest today' >&2; exit 1
"""


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("qemu:///system", "Operation not supported: access cannot be limited to its QEMU"),
        ("qemu+ssh://gpu7/system", "on another machine than libvirt"),
    ],
)
def test_where_libvirts_qemu_cannot_be_let_in_alone_qemu_is_started_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, why: str
) -> None:
    """As on a file system without access control lists."""
    guest_files(fake_qemu=True)
    for name, text in (("qemu-system-x86_64", _REFUSES), ("virsh", _VIRSH)):
        write_program(tmp_path / name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("homenode.check.verify.boot.boot_directory.allow_user", unsupported)
    monkeypatch.setattr("homenode.check.verify.boot.stand_in_boot.can_use_kvm", lambda *_: False)
    document = open_domain(tuned("default").document, "vm.xml")
    booted = boot_stand_in(document, build_vm(document), BootOptions(connect=uri))
    found = {finding.id: finding.observed for finding in booted.findings}
    assert why in found["libvirt-could-not-start"]
    assert found["guest-cannot-start"] == "no guest today" and booted.how.startswith(
        "QEMU without libvirt"
    )


_LOOP = """
import contextlib, os, sys, time
above, stop = sys.argv[1], sys.argv[2]
forged = open(sys.argv[3], "rb").read()
os.chdir(above)
won = set()
while not os.path.exists(stop):
    for name in os.listdir(above):
        if not name.startswith("homenode-") or name.endswith("-mine"):
            continue
        for part in ("report", "console", "initramfs", "kernel", "domain.xml", "argv", "overlay"):
            path = os.path.join(name, part)
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_WRONLY)
                os.write(descriptor, forged)
                won.add(f"wrote {part}")
            with contextlib.suppress(OSError):
                os.open(path, os.O_RDONLY)
                won.add(f"read {part}")
            with contextlib.suppress(OSError):
                os.link(path, f"{part}-mine")
                won.add(f"linked {part}")
            with contextlib.suppress(OSError):
                os.symlink("/etc/passwd", path)
                won.add(f"made {part}")
        with contextlib.suppress(OSError):
            os.rename(name, f"{name}-mine")
            won.add("renamed the directory")
            os.mkdir(name)
print(" ".join(sorted(won)) or "nothing")
"""


@contextmanager
def attacked(place: Path) -> Iterator[list[str]]:
    """An attacker who tries everything with every directory of homenode's as fast as it can. The
    list says afterwards what came of it."""
    loop, stop, forged = (place.parent / name for name in ("loop.py", "stop", "forged"))
    loop.write_text(_LOOP)
    forged.write_bytes(b"forged\n" * 100)
    setpriv = ("setpriv", f"--reuid={ATTACKER}", f"--regid={ATTACKER}", "--clear-groups")
    won: list[str] = []
    with subprocess.Popen(
        [*setpriv, "/usr/bin/python3", loop, str(place), stop, forged],
        stdout=subprocess.PIPE,
        text=True,
    ) as attacker:
        try:
            yield won
        finally:
            stop.touch()
            said, _ = attacker.communicate(timeout=60)
    won += said.split("\n")[:1]


@pytest.mark.root
def test_an_attacker_at_every_moment_of_making_a_directory_gets_nothing(place: Path) -> None:
    with attacked(place) as won:
        for _ in range(200):
            with boot_directory() as directory:
                allow_qemu(directory, QEMU)
                boot_directories.copy_for_qemu(directory / "kernel", b"kernel", QEMU)
                said = GuestOutput(directory / "report", QEMU)
                try:
                    time.sleep(0.001)
                    assert said.read_output() == b""
                    assert (directory / "kernel").read_bytes() == b"kernel"
                finally:
                    said.close()
    assert won == ["nothing"]


def verified(directory: Path, connect: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    """The boot of a sound document, with that directory for temporary files."""
    document = directory / "vm.xml"
    document.write_bytes(tuned("pin-numa-pci").document)
    command = "from homenode.cli.main import main; main()"
    words = ("verify", str(document), "--host", "small-2n8c-2gpu", "--boot", "--connect", connect)
    argv, environment = [sys.executable, "-c", command, *words], os.environ | {"TMPDIR": temporary}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.nightly
@pytest.mark.root
@pytest.mark.qemu
@pytest.mark.libvirt
def test_other_users_change_no_verdict_of_a_boot(place: Path, tmp_path: Path) -> None:
    """The document is sound, and stays so, whatever another user tries meanwhile: libvirt's QEMU,
    which is another user too, is let in."""
    guest_files()
    uri = find_uri(os.environ.get("HOMENODE_LIBVIRT_URI"))
    if uri is None:
        pytest.skip("no libvirtd answers at qemu:///system")
    with attacked(place) as won:
        done = verified(tmp_path, uri, place)
    assert won == ["nothing"]
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.root
def test_a_boot_in_a_directory_of_another_user_is_not_known(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = verified(tmp_path, "none", shared)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "other users can replace files" in done.stderr and "TMPDIR=" in done.stderr
