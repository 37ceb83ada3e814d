"""Accelerator: whether KVM really works here: a small guest is booted with it. [I/O]

/dev/kvm says little: on some clouds it is there and every guest ends at once or hangs.
"""

import os
import tempfile
from pathlib import Path

from homenode.durable import replace_file
from homenode.process import ToolTimeoutError, find_program, run
from homenode.verify.boot.guest_files import cache_folder
from homenode.verify.boot.initramfs import BEGIN
from homenode.verify.boot.stand_in_argv import PROGRAM

_OF_RHEL = "/usr/libexec/qemu-kvm"
_PROBE_S = 15
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def qemu_program() -> str | None:
    """QEMU by its own name, else where RHEL and its kin have it; None where it is not there."""
    return next((name for name in (PROGRAM, _OF_RHEL) if find_program(name)), None)


def kvm_works(kernel: Path, initramfs: bytes) -> bool:
    """True where a guest comes up under KVM. The answer is kept until the machine boots again."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    note = cache_folder() / "kvm-probe"
    try:
        boot = _BOOT_ID.read_text().strip()
        known = note.read_text().split()
    except OSError:
        boot, known = "", []
    if boot and known[:1] == [boot] and len(known) == 2:
        return known[1] == "works"
    works = _boots(kernel, initramfs)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        boot = boot or _BOOT_ID.read_text().strip()
        replace_file(note, f"{boot} {'works' if works else 'fails'}\n".encode(), synced=False)
    except OSError:
        pass  # the next run asks again
    return works


def _boots(kernel: Path, initramfs: bytes) -> bool:
    with tempfile.TemporaryDirectory(prefix="homenode-kvm-") as folder:
        image, console = Path(folder) / "initramfs", Path(folder) / "console"
        image.write_bytes(initramfs)
        argv = (
            *(
                qemu_program() or PROGRAM,
                "-machine",
                "q35",
                "-accel",
                "kvm",
                "-cpu",
                "host",
                "-m",
                "256M",
            ),
            *("-kernel", str(kernel.absolute()), "-initrd", str(image)),
            *("-append", "console=ttyS0 quiet panic=-1", "-serial", f"file:{console}"),
            *("-serial", "null", "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-monitor", "none"),
        )
        try:
            run(argv, _PROBE_S, folder=Path(folder))
        except ToolTimeoutError:
            return False
        return console.is_file() and BEGIN in console.read_text(errors="replace")
