"""GuestFiles: a test guest's kernel and busybox, local or downloaded, and whether KVM works. [I/O]

No system image is downloaded. If they are missing and apt-get exists, the two packages are
downloaded and unpacked into a cache; nothing is installed.
"""

import os
from pathlib import Path

from msgspec import Struct

from homenode.check.verify.boot.forms import PROGRAM
from homenode.check.verify.boot.initramfs import BEGIN, is_static
from homenode.errors import HostError
from homenode.process import ToolMissingError, ToolTimeoutError, find_program, run
from homenode.safe.durable import create_file, replace_file
from homenode.safe.input_files import MAX_BYTES, read_kernel_file, read_plain, read_start
from homenode.safe.trusted_path import create_private_directory, find_other_writer

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
