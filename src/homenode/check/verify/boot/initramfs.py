"""Initramfs: the test guest's files: busybox, the collector of a capture, and an init that runs it.

The guest is so read by homenode's own discovery. The same input gives the same bytes.
Source: Documentation/driver-api/early-userspace/buffer-format.rst of the Linux kernel (newc).
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

from homenode.errors import HostError
from homenode.machine.snapshot.collector import collector_script

_FOLDER, _FILE, _CHARACTER_DEVICE = 0o040755, 0o100755, 0o020600
_TRAILER = "TRAILER!!!"
_PT_INTERP = 3
_EM_X86_64 = 62

BEGIN = "homenode-stand-in: reading"
"""What init writes to the console when the kernel is up."""

LOG = "homenode-stand-in: kernel log"
"""The line in its report from which the kernel's log follows."""

_INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
echo '{BEGIN}' >/dev/console
stty -F /dev/ttyS1 raw
{{ sh /collector </dev/null; echo; echo '{LOG}'; dmesg -r; }} | gzip -1 >/dev/ttyS1
[ -e /sys/firmware/acpi ] || reboot -f
poweroff -f
"""


_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Entry(Struct, frozen=True):
    """One member of an archive. device: (major, minor) of a device node."""

    path: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)


def initramfs(busybox: bytes, init: str = _INIT, programs: Mapping[str, bytes] = _NOTHING) -> bytes:
    """The archive, not compressed. Raises HostError where busybox needs a loader that is not there.

    busybox: the program, statically linked for x86-64. init: what it runs first. programs: more of
    them, by name, in /bin.
    """
    if not is_static(busybox):
        raise HostError(
            "busybox: expected a statically linked one for x86-64, found another program",
            hint="apt-get install busybox-static",
        )
    entries = (
        *(Entry(folder, _FOLDER) for folder in ("bin", "dev", "proc", "sys")),
        Entry("dev/console", _CHARACTER_DEVICE, device=(5, 1)),
        Entry("bin/busybox", _FILE, busybox),
        Entry("collector", _FILE, collector_script().encode()),
        *(Entry(f"bin/{name}", _FILE, content) for name, content in programs.items()),
        Entry("init", _FILE, init.encode()),
    )
    return b"".join(_member(number, entry) for number, entry in enumerate(entries, start=1)) + (
        _member(0, Entry(_TRAILER, 0))
    )


def is_static(program: bytes) -> bool:
    """True for an ELF of x86-64 without a program interpreter. Source: elf(5)."""
    machine = int.from_bytes(program[18:20], "little")
    if program[:6] != b"\x7fELF\x02\x01" or len(program) < 64 or machine != _EM_X86_64:
        return False
    offset = int.from_bytes(program[32:40], "little")
    size = int.from_bytes(program[54:56], "little")
    count = int.from_bytes(program[56:58], "little")
    kinds = (
        int.from_bytes(program[offset + i * size : offset + i * size + 4], "little")
        for i in range(count)
    )
    return _PT_INTERP not in kinds


def _member(number: int, entry: Entry) -> bytes:
    """A header of 13 numbers of 8 hexadecimal digits, the name, the content; padded to 4 bytes."""
    name = entry.path.encode() + b"\0"
    major, minor = entry.device
    numbers = (
        number,
        entry.mode,
        0,
        0,
        1,
        0,
        len(entry.content),
        0,
        0,
        major,
        minor,
        len(name),
        0,
    )
    header = b"070701" + b"".join(b"%08X" % each for each in numbers)
    return _padded(header + name) + _padded(entry.content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)
