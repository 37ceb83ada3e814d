"""GuestFiles: a test guest's kernel and initramfs, and parsers of its console and log. [I/O]

The kernel and busybox are local or downloaded. No system image is downloaded: if they are missing
and apt-get exists, two packages are unpacked into a cache; nothing is installed. The initramfs has
busybox, the collector of a capture, and an init that runs the collector, so homenode's own
discovery reads the guest. The same input gives the same bytes.
Source: Documentation/driver-api/early-userspace/buffer-format.rst of the Linux kernel (newc);
kernel 6.1: drivers/pci/setup-bus.c, drivers/pci/setup-res.c, arch/x86/pci/i386.c,
arch/x86/kernel/smpboot.c, arch/x86/mm/numa.c, drivers/acpi/numa/srat.c; the lines of
`dmesg -r`, "<level>[seconds] text".
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.check.verify.boot.forms import PROGRAM
from homenode.errors import HostError
from homenode.findings import Finding, finding
from homenode.machine.snapshot.collector import build_collector_script
from homenode.process import ToolMissingError, ToolTimeoutError, find_program, run
from homenode.safe.durable import create_file, replace_file
from homenode.safe.input_files import MAX_BYTES, read_kernel_file, read_plain, read_start
from homenode.safe.record_directory import create_private_directory, find_other_writer

_DIRECTORY, _FILE, _CHARACTER_DEVICE = 0o040755, 0o100755, 0o020600
_TRAILER = "TRAILER!!!"
_PT_INTERP = 3
_EM_X86_64 = 62

BEGIN = "homenode-stand-in: reading"
"""Line that init writes to the console after the kernel has booted."""

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


class ArchiveMember(Struct, frozen=True):
    path: str
    mode: int
    content: bytes = b""
    device: tuple[int, int] = (0, 0)  # (major, minor) of a device node


def pack_initramfs(
    busybox: bytes, init: str = _INIT, programs: Mapping[str, bytes] = _NOTHING
) -> bytes:
    """The archive, not compressed. Raises HostError if busybox needs a loader that is not there.

    busybox: the program, statically linked for x86-64. init: the first script. programs: further
    programs by name, in /bin.
    """
    if not is_static(busybox):
        raise HostError(
            "busybox: expected a statically linked one for x86-64, found another program",
            hint="apt-get install busybox-static",
        )
    entries = (
        *(ArchiveMember(directory, _DIRECTORY) for directory in ("bin", "dev", "proc", "sys")),
        ArchiveMember("dev/console", _CHARACTER_DEVICE, device=(5, 1)),
        ArchiveMember("bin/busybox", _FILE, busybox),
        ArchiveMember("collector", _FILE, build_collector_script().encode()),
        *(ArchiveMember(f"bin/{name}", _FILE, content) for name, content in programs.items()),
        ArchiveMember("init", _FILE, init.encode()),
    )
    return b"".join(
        _pack_member(number, entry) for number, entry in enumerate(entries, start=1)
    ) + (_pack_member(0, ArchiveMember(_TRAILER, 0)))


def is_static(program: bytes) -> bool:
    """True for an ELF of x86-64 without a program interpreter. Source: elf(5)."""
    machine = int.from_bytes(program[18:20], "little")
    if program[:6] != b"\x7fELF\x02\x01" or len(program) < 64 or machine != _EM_X86_64:
        return False
    offset = int.from_bytes(program[32:40], "little")
    size = int.from_bytes(program[54:56], "little")
    count = int.from_bytes(program[56:58], "little")
    starts = (offset + i * size for i in range(count))
    kinds = (int.from_bytes(program[start : start + 4], "little") for start in starts)
    return _PT_INTERP not in kinds


def _pack_member(number: int, entry: ArchiveMember) -> bytes:
    """A header of 13 numbers of 8 hexadecimal digits, the name, the content; padded to 4 bytes."""
    name = entry.path.encode() + b"\0"
    major, minor = entry.device
    size = len(entry.content)
    numbers = (number, entry.mode, 0, 0, 1, 0, size, 0, 0, major, minor, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % number_in_header for number_in_header in numbers)
    return _pad(header + name) + _pad(entry.content)


def _pad(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)


CONSOLE_HINT = "read its console with --keep DIR"


def refusal_finding(who: str, reason: str, source: str) -> Finding:
    """Return the finding that the test guest cannot be started."""
    return finding(
        "guest-cannot-start",
        "the test guest",
        expected=f"{who} to start it",
        observed=reason.strip()[:400] or "no reason given",
        source=source,
    )


def crash_finding(console: str, source: str) -> Finding:
    """Return the finding that the guest's kernel did not boot."""
    return finding(
        "guest-crashed",
        "the test guest",
        expected="its kernel to come up",
        observed=f"last line of its console: {get_last_line(console)!r}",
        source=source,
    )


def silence_error(console: str, limit_s: float, source: str) -> ToolTimeoutError:
    """Return the error of a guest that did not power off in time."""
    return ToolTimeoutError(
        f"{source}: expected the test guest to power off within {limit_s:g} s, found it running; "
        f"last line of its console: {get_last_line(console)!r}",
        hint=f"raise --timeout, or {CONSOLE_HINT}",
    )


def make_report_error(size: int, source: str) -> HostError:
    """The error for a guest that started and sent part of its report. size: bytes received."""
    return HostError(
        f"{source}: the test guest's report ends after {size} bytes",
        hint=CONSOLE_HINT,
    )


def has_booted(console: str) -> bool:
    """Return whether the guest's init has run."""
    return BEGIN in console


def get_last_line(console: str) -> str:
    """Return the last line of a guest's console, with printable characters only."""
    last = next((line for line in reversed(console.splitlines()) if line.strip()), "")
    return "".join(letter for letter in last.strip() if letter.isprintable())[:200]


_LINE = re.compile(r"<(\d{1,3})>\[ *\d{1,9}\.\d{6}\] (.{0,2000})")
_UNPLACED = re.compile(
    r"pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): (BAR \d{1,2}|bridge window)[^\[]{0,8}"
    r"\[mem size 0x([0-9a-f]{1,16})[^\]]{0,40}\]: (?:can't assign; no space|failed to assign)"
    r"|pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): BAR (\d{1,2}): "
    r"(?:no space for|failed to assign) \[mem size 0x([0-9a-f]{1,16})"
)
_PORT = re.compile(
    r"pci ([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): PCI bridge to "
    r"\[bus ([0-9a-f]{2})(?:-([0-9a-f]{2}))?\]"
)
_DEVICE = re.compile(
    r"pci ([0-9a-f]{4}):([0-9a-f]{2}):[0-9a-f]{2}\.[0-7]: \[[0-9a-f:]{9}\] type 00"
)
_WARNING = 4
_TOPICS = {
    "topology": re.compile(r"topology|sibling|\bllc\b|smpboot|\bapic\b|sched: CPU", re.IGNORECASE),
    "NUMA nodes": re.compile(r"\bnuma\b|\bsrat\b|\bslit\b|\bnode \d", re.IGNORECASE),
    "PCI": re.compile(r"\bpci|\bBAR\b|bridge|\bacpi PNP0A0", re.IGNORECASE),
}
_ALWAYS = re.compile(
    r"not CPU addressable|on the same node! \[node|arch topology borken|unassigned, try booting"
    r"|can not insert \[bus|bridge configuration invalid|SRAT: .{0,60}(?:not used|overlap)"
    r"|NUMA: (?:Warning|Invalid)"
)
"""Kernel messages that are errors at any log level."""

_HARMLESS = re.compile(
    r"\[io |extended config space|ECAM|_OSC|pnp 00:|MMCONFIG|acpiphp|deprecated|microcode"
    r"|fail to add MMCONFIG|Unsafe|RTC|TSC|hpet|clocksource|calibration"
    r"|pci_bus 0000:00: Unknown NUMA node"
)
"""Lines about the emulated machine: with cells, the root bus has no node."""
_SHOWN = 3


def check_kernel(log: str, bdf_of: dict[Bdf, str], source: str) -> Iterator[Finding]:
    """Yield a finding for each device without space for a BAR, and one for each topic of other
    warnings. bdf_of: the guest's function -> its name on the host."""
    unplaced: dict[str, int] = {}
    other: dict[str, list[str]] = {}
    empty = _find_empty_ports(log)
    for level, text in _split_log(log):
        match = _UNPLACED.match(text)
        if match is not None:
            address = match[1] or match[4]
            if address in empty:  # firmware drops their windows first, where I/O ports run out
                continue
            size = int(match[3] or match[6], 16)
            name = bdf_of.get(Bdf.parse(address), f"{address} in the guest")
            unplaced[name] = max(size, unplaced.get(name, 0))
            continue
        topic = next((name for name, words in _TOPICS.items() if words.search(text)), None)
        is_wrong = bool(_ALWAYS.search(text)) or level <= _WARNING
        if is_wrong and topic is not None and not _HARMLESS.search(text):
            other.setdefault(topic, []).append(text.strip())
    passed_names = [name for name in unplaced if name in bdf_of.values()]
    for name in passed_names or unplaced:  # a bridge has no space if the device below it has no BAR
        yield finding(
            "guest-bar-unplaced",
            f"device {name}",
            expected="space for its BARs in the guest's address space",
            observed=f"the guest's kernel has no space for a BAR of {unplaced[name]:#x} bytes",
            source=source,
        )
    for topic, texts in other.items():
        rest_text = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        yield finding(
            "guest-kernel-warning",
            f"{topic}, in the guest's kernel log",
            expected="no warning",
            observed="; ".join(texts[:_SHOWN]) + rest_text,
            source=source,
        )


def _find_empty_ports(log: str) -> set[str]:
    """Return the addresses of bridges with no device on any of their buses."""
    used = {(domain, int(bus, 16)) for domain, bus in _DEVICE.findall(log)}
    is_used: dict[str, bool] = {}
    for address, first, last in _PORT.findall(log):
        buses = range(int(first, 16), int(last or first, 16) + 1)
        has_device = any((address[:4], bus) in used for bus in buses)
        is_used[address] = has_device or is_used.get(address, False)
    return {address for address, has_device in is_used.items() if not has_device}


def _split_log(log: str) -> Iterator[tuple[int, str]]:
    """Yield (level, text); the facility, in the bits above 2, is dropped."""
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is not None:
            yield int(match[1]) & 7, match[2]


_KERNEL_PACKAGES = ("linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64")
"""Packages that depend on the package of a kernel, smaller kernels first."""

_OVMF = (
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    ("/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"),
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
)
"""Code and variables where Debian, Ubuntu and Fedora have them, without secure boot."""

_FETCH = 'cd "$1" && exec apt-get -q -o Acquire::Retries=3 download "$2"'
_UNPACK = 'dpkg-deb --fsys-tarfile "$1" | tar -xf - -C "$2" --wildcards "$3"'
_FETCH_S = 300
MAX_BOOT_FILE_BYTES = 256 << 20
_HINT = (
    "apt-get install linux-image-cloud-amd64 busybox-static (Debian), linux-image-virtual "
    "busybox-static (Ubuntu), kernel-core busybox (Fedora), after apt-get update; or --kernel FILE"
)


class GuestFiles(Struct, frozen=True):
    kernel: Path
    busybox: bytes
    kernel_name: str  # where the kernel comes from, for people


def find_guest_files(kernel: Path | None = None) -> GuestFiles:
    """Return the named kernel, else one of this machine, else a cached or downloaded one; and
    busybox. Raises HostError with the missing programs and the command that installs them."""
    image = _path_if_readable(kernel) if kernel is not None else _find_kernel()
    if kernel is not None and image is None:
        raise HostError(f"{kernel}: the kernel cannot be read", hint=_HINT)
    if image is not None and kernel is not None and not _is_kernel(image):
        raise HostError(f"{kernel}: not a Linux kernel", hint=_HINT)
    image = image or _fetch("vmlinuz", _KERNEL_PACKAGES, "./boot/vmlinuz-*", "boot/vmlinuz-*")
    if image is None:
        raise HostError(
            "kernel for the test guest: no /boot/vmlinuz-*, and apt-get cannot fetch it",
            hint=_HINT,
        )
    return GuestFiles(image, _read_busybox(), image.name.replace("vmlinuz-", "Linux "))


def find_ovmf() -> tuple[Path, Path] | None:
    """Return the image of OVMF and of its variables; None if it is not installed."""
    pairs = ((Path(code), Path(variables)) for code, variables in _OVMF)
    return next((pair for pair in pairs if all(path.is_file() for path in pair)), None)


def find_cache_directory() -> Path:
    """Return the directory for files that can be downloaded again."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "homenode"


def _path_if_readable(path: Path) -> Path | None:
    try:
        return path if read_start(path, 1) else None
    except OSError:
        return None


def _is_kernel(path: Path) -> bool:
    """True for a bzImage or an ELF. Source: Documentation/arch/x86/boot.rst, offset 0x202."""
    head = read_start(path, 0x206)
    return head[0x202:0x206] == b"HdrS" or head[:4] == b"\x7fELF"


def _find_kernel() -> Path | None:
    """Return the running kernel, else the last installed one."""
    candidates = [Path(f"/boot/vmlinuz-{os.uname().release}")]
    for directory, pattern in (("/boot", "vmlinuz-*"), ("/lib/modules", "*/vmlinuz")):
        images = [path for path in Path(directory).glob(pattern) if path.is_file()]
        candidates += sorted(images, key=lambda path: path.stat().st_mtime, reverse=True)
    if os.uname().machine != "x86_64":
        return None
    return next((path for path in candidates if _path_if_readable(path) is not None), None)


def _read_busybox() -> bytes:
    places = [Path(place) for place in (find_program("busybox"), "/bin/busybox") if place]
    for path in places:
        program = _read_program(path)
        if program is not None:
            return program
    busybox = _fetch("busybox", ("busybox-static",), "./*bin/busybox", "**/busybox")
    program = None if busybox is None else _read_program(busybox)
    if program is None:
        raise HostError(
            "busybox (static): not installed, and apt-get cannot fetch it",
            hint="apt-get install busybox-static",
        )
    return program


def _read_program(path: Path) -> bytes | None:
    try:
        content = read_plain(path, MAX_BOOT_FILE_BYTES)
    except OSError:
        return None
    return content if is_static(content) else None


def _fetch(kind: str, packages: tuple[str, ...], member: str, pattern: str) -> Path | None:
    """Return a file of the first available package, from the cache or downloaded into it."""
    directory = find_cache_directory() / "guest" / kind
    for path in sorted(directory.glob(pattern)):
        if path.is_file():
            return _check_unchanged(path)
    if any(find_program(tool) is None for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar")):
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{directory}: cannot write: {error.strerror}") from None
    for package in packages:
        for real in _list_dependencies(package) if kind == "vmlinuz" else (package,):
            # Download next to it, then rename: another homenode may read it meanwhile.
            with create_private_directory(".fetched-", directory.parent) as fetch_directory:
                run(("sh", "-c", _FETCH, "sh", str(fetch_directory), real), _FETCH_S)
                for archive in sorted(fetch_directory.glob(f"{real}_*.deb")):
                    run(
                        ("sh", "-c", _UNPACK, "sh", str(archive), str(fetch_directory), member),
                        _FETCH_S,
                    )
                for path in sorted(fetch_directory.glob(pattern)):
                    if path.is_file():
                        target = directory / path.relative_to(fetch_directory)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        return path.replace(target)
    return None


def _check_unchanged(path: Path) -> Path:
    """Return a file of the cache. Raises HostError if another user can change it."""
    reason = find_other_writer((path,), user=os.geteuid(), sticky=True)
    if reason is None:
        return path
    raise HostError(
        f"{path}: expected a file of the cache that no other user can change, found: {reason}",
        hint="XDG_CACHE_HOME=DIR names another cache; or install it: apt-get install "
        "linux-image-cloud-amd64 busybox-static",
    )


def _list_dependencies(package: str) -> tuple[str, ...]:
    """Return the packages of kernels that a package without files of its own depends on."""
    try:
        result = run(("apt-cache", "depends", package), 60)
    except ToolMissingError:
        return ()
    words = (line.split() for line in result.stdout.splitlines())
    return tuple(
        word[1]
        for word in words
        if len(word) == 2 and word[0] == "Depends:" and word[1].startswith("linux-image-")
    )


_OF_RHEL = "/usr/libexec/qemu-kvm"
_PROBE_S = 15
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAX_NOTE_BYTES = 4096


def find_qemu() -> str | None:
    """Return QEMU by its own name, else RHEL's path; None if it is not there."""
    return next((name for name in (PROGRAM, _OF_RHEL) if find_program(name)), None)


def can_use_kvm(kernel: Path, initramfs: bytes) -> bool:
    """True if a guest comes up under KVM. The answer is kept until the machine boots again."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    note = find_cache_directory() / "kvm-probe"
    boot = (read_kernel_file(_BOOT_ID) or b"").decode().strip()
    try:
        note_words = read_start(note, _MAX_NOTE_BYTES).decode("utf-8", "replace").split()
    except OSError:
        note_words = []
    if boot and note_words[:1] == [boot] and len(note_words) == 2:
        return note_words[1] == "works"
    works = _can_boot(kernel, initramfs)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, f"{boot} {'works' if works else 'fails'}\n".encode(), synced=False)
    except OSError:
        pass  # the next run tries again
    return works


def _can_boot(kernel: Path, initramfs: bytes) -> bool:
    with create_private_directory("homenode-kvm-") as directory:
        image, console = directory / "initramfs", directory / "console"
        create_file(image, initramfs)
        argv = (
            find_qemu() or PROGRAM,
            *("-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "256M"),
            *("-kernel", str(kernel.absolute()), "-initrd", str(image)),
            *("-append", "console=ttyS0 quiet panic=-1", "-serial", f"file:{console}"),
            *("-serial", "null", "-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-monitor", "none"),
        )
        try:
            run(argv, _PROBE_S, directory=directory)
        except ToolTimeoutError:
            return False
        return console.is_file() and BEGIN.encode() in read_start(console, MAX_BYTES)
