"""Without QEMU, libvirt or ssh each command says what is missing and how to install it: code 3."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from homenode.check.verify.boot.guest_files import qemu_program
from homenode.cli.main import main
from tests.verify_documents import SMALL, tuned

Which = Callable[..., str | None]
HIDDEN = {
    "virsh": ("virsh",),
    "qemu-system-x86_64": ("qemu-system-x86_64", "/usr/libexec/qemu-kvm"),
    "ssh": ("ssh",),
}
BOOT = ("verify", "@document", "--host", SMALL, "--boot", "--connect")
CASES = [
    ("virsh", ("verify", "--live", "vm"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--layout", "pin", "--yes"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--layout", "pin", "--dry-run"), "libvirt-clients"),
    ("virsh", ("apply", "vm", "--domain", "@document", "--live-pins", "--yes"), "libvirt-clients"),
    ("virsh", ("restore", "vm", "--yes"), "libvirt-clients"),
    ("virsh", ("restore", "vm", "--dry-run"), "libvirt-clients"),
    ("virsh", (*BOOT, "qemu:///system"), "libvirt-clients"),
    ("qemu-system-x86_64", (*BOOT, "none"), "qemu-system-x86"),
    ("ssh", ("verify", "@document", "--host", SMALL, "--guest", "ssh:vm"), "openssh-client"),
]


@pytest.mark.parametrize(("missing", "words", "package"), CASES)
def test_a_command_names_the_missing_program_and_its_package(
    missing: str,
    words: tuple[str, ...],
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here: Which = shutil.which

    def without(name: str, **more: str) -> str | None:
        return None if name in HIDDEN[missing] else here(name, **more)

    monkeypatch.setattr("shutil.which", without)
    document = tmp_path / "vm.xml"
    document.write_bytes(tuned("pin").document)
    argv = [str(document) if word == "@document" else word for word in words]
    monkeypatch.setattr("sys.argv", ["homenode", *argv])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 3
    assert f"{missing}: command not found\n" in said and f"hint: apt install {package}" in said


def test_qemu_is_found_where_rhel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"/usr/libexec/qemu-kvm": "/usr/libexec/qemu-kvm"}
    monkeypatch.setattr("shutil.which", lambda name, **_: there.get(name))
    assert qemu_program() == "/usr/libexec/qemu-kvm"
    there.clear()
    assert qemu_program() is None
