"""Accelerator: whether KVM really works here: a small guest is booted with it. [I/O]

/dev/kvm says little: on some clouds it is there and every guest ends at once or hangs.
"""

import os
from pathlib import Path

from homenode.check.verify.boot.forms import PROGRAM
from homenode.check.verify.boot.guest_files import cache_folder
from homenode.check.verify.boot.initramfs import BEGIN
from homenode.durable import create_file, replace_file
from homenode.input_files import MAX_BYTES, read_kernel_file, read_start
from homenode.process import ToolTimeoutError, find_program, run
from homenode.trusted_path import private_folder

_OF_RHEL = "/usr/libexec/qemu-kvm"
_PROBE_S = 15
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MOST_NOTE_BYTES = 4096


def qemu_program() -> str | None:
    """QEMU by its own name, else where RHEL and its kin have it; None where it is not there."""
    return next((name for name in (PROGRAM, _OF_RHEL) if find_program(name)), None)


def kvm_works(kernel: Path, initramfs: bytes) -> bool:
    """True where a guest comes up under KVM. The answer is kept until the machine boots again."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    note = cache_folder() / "kvm-probe"
    boot = (read_kernel_file(_BOOT_ID) or b"").decode().strip()
    try:
        known = read_start(note, _MOST_NOTE_BYTES).decode("utf-8", "replace").split()
    except OSError:
        known = []
    if boot and known[:1] == [boot] and len(known) == 2:
        return known[1] == "works"
    works = _boots(kernel, initramfs)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, f"{boot} {'works' if works else 'fails'}\n".encode(), synced=False)
    except OSError:
        pass  # the next run asks again
    return works


def _boots(kernel: Path, initramfs: bytes) -> bool:
    with private_folder("homenode-kvm-") as folder:
        image, console = folder / "initramfs", folder / "console"
        create_file(image, initramfs, synced=False)
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
            run(argv, _PROBE_S, folder=folder)
        except ToolTimeoutError:
            return False
        return console.is_file() and BEGIN.encode() in read_start(console, MAX_BYTES)
