"""Boot: a test guest is booted and read with homenode's own discovery. [I/O]"""

import os
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from homenode.discover import discover
from homenode.domain.document import Document
from homenode.durable import replace_file
from homenode.errors import HostError
from homenode.findings import Finding
from homenode.process import ToolMissingError, ToolTimeoutError, run
from homenode.snapshot.collector import parse_collected
from homenode.targets.qemu_command import options_of
from homenode.topology import Host
from homenode.verify.boot import libvirt as libvirt_boot
from homenode.verify.boot.accelerator import kvm_works, qemu_program
from homenode.verify.boot.command import stand_in_of_command
from homenode.verify.boot.cpu_choice import choose_cpu
from homenode.verify.boot.guest_files import find_guest_files, find_ovmf
from homenode.verify.boot.initramfs import LOG, initramfs
from homenode.verify.boot.kernel_log import kernel_findings
from homenode.verify.boot.outcome import came_up, crash, partial, refusal, silence
from homenode.verify.boot.stand_in import StandIn, stand_in_of
from homenode.verify.boot.stand_in_argv import PROGRAM, boot_words, stand_in_argv
from homenode.verify.boot.stand_in_xml import BootFiles, stand_in_xml
from homenode.verify.domain_facts import DomainFacts
from homenode.verify.guest.path import path_of_address, paths_of_guest

COMMAND = (
    "console=ttyS0 quiet panic=-1 mitigations=off nowatchdog no_timer_check pcie_ports=compat "
    "cryptomgr.notests apparmor=0 audit=0 rodata=off nokaslr efi=noruntime"
)
"""The guest kernel's command line: silent but for errors, and without what tells nothing of the
topology: services of PCIe ports, self-tests, protections. A third of the time under TCG."""

_BASE_S = 60
_PER_VCPU_S = 5
_GZIP = b"\x1f\x8b\x08"
_LARGEST_REPORT = 64 << 20
_INSTALL = (
    "install it: apt-get install qemu-system-x86 (Debian, Ubuntu), dnf install qemu-kvm (Fedora, "
    "RHEL); libvirt-daemon-system or libvirt-daemon-kvm to boot through libvirt"
)


@dataclass(frozen=True, slots=True)
class BootOptions:
    """connect: libvirt's URI; None = the system's where it answers; "none" = QEMU directly.

    keep: folder for the guest's files and texts afterwards. timeout_s: None = by vCPU count.
    libvirt_timeout_s: what an emulated guest of libvirt gets of it before QEMU is asked directly;
    None = half.
    """

    connect: str | None = None
    kernel: Path | None = None
    timeout_s: float | None = None
    keep: Path | None = None
    libvirt_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Booted:
    """What came of a boot. guest: None where it did not come up; then `findings` say why.

    how: through what and with which accelerator, for people.
    """

    stand_in: StandIn
    guest: Host | None
    how: str
    seconds: float
    findings: tuple[Finding, ...]


def boot_stand_in(
    document: Document, facts: DomainFacts, options: BootOptions, host: Host | None = None
) -> Booted:
    """Boot the test guest of a document and read it. host: that of its devices, None = not known.

    A document that libvirt or QEMU refuses, or whose guest crashes, is an answer: it is in
    `findings`. Raises HostError, ToolMissingError or ToolTimeoutError where this machine cannot
    boot guests, each with what to install or to try.
    """
    if options.keep is not None:
        _make(options.keep)  # before minutes are spent
    uri = None if options.connect == "none" else libvirt_boot.answering(options.connect)
    program = qemu_program()
    if program is None:
        raise ToolMissingError(
            f"{PROGRAM}: expected it to be installed, found none on PATH", hint=_INSTALL
        )
    files = find_guest_files(options.kernel)
    image = initramfs(files.busybox)
    kvm = kvm_works(files.kernel, image) and (uri is None or libvirt_boot.offers_kvm(uri))
    machine = _machine(program, facts.guest.machine)
    cpu, ovmf = choose_cpu(document, kvm=kvm), find_ovmf()
    has_ovmf = ovmf is not None
    named = uri is not None and options.connect is not None
    stand_in = stand_in_of(
        document, facts, cpu, machine, host=host, has_ovmf=has_ovmf, through_libvirt=named
    )
    checked_at = uri
    if stand_in.needs_qemu:
        uri = None
    limit_s = options.timeout_s or _BASE_S + _PER_VCPU_S * stand_in.vcpus
    name = f"homenode-verify-{os.getpid()}-{secrets.token_hex(3)}"
    findings: tuple[Finding, ...] = ()
    started = time.monotonic()
    # Not the user's own folder: QEMU runs as another user under libvirt and must get in.
    with tempfile.TemporaryDirectory(prefix="homenode-boot-") as text:
        folder = Path(text)
        folder.chmod(0o711)
        paths = _lay_out(folder, files.kernel, image, ovmf if stand_in.uefi else None)
        refused: tuple[Finding, ...] = ()
        excuse: tuple[Finding, ...] = ()
        if checked_at is not None:
            findings = libvirt_boot.acceptance(checked_at, document, name, folder)
        if uri is not None:
            xml = stand_in_xml(stand_in, name, paths, COMMAND, kvm=kvm)
            # libvirt cannot be asked for one thread for all vCPUs: with dozens of them on a busy
            # machine its guests sometimes come to nothing, where QEMU directly takes seconds.
            patience_s = limit_s if kvm else options.libvirt_timeout_s or limit_s / 2
            try:
                refused = libvirt_boot.boot(uri, xml, name, folder, patience_s, facts.source)
                excuse = libvirt_boot.daemons_own_trouble(refused, uri)
            except ToolTimeoutError as error:
                if kvm:
                    raise
                excuse = (libvirt_boot.could_not_start(error.message, uri),)
            if excuse:  # it says nothing of the document; QEMU does
                refused, uri = (), None
        if uri is None:
            argv = (program, *stand_in_argv(stand_in, name, paths, COMMAND, kvm=kvm)[1:])
            (folder / "argv").write_text("\n".join(argv) + "\n")
            refused = _run_qemu(argv, limit_s, folder, facts.source)
            findings += () if refused else excuse
        try:
            guest, said = (
                (None, ()) if refused else _read(folder, facts.guest.name, facts.source, stand_in)
            )
        finally:
            if options.keep is not None:
                _keep(folder, options.keep)
    seconds = time.monotonic() - started
    through = "QEMU directly" if uri is None else f"libvirt at {uri}"
    how = f"through {through}, {'KVM' if kvm else 'TCG'}, {files.stated}"
    return Booted(stand_in, guest, how, seconds, (*findings, *refused, *said))


def boot_command(words: Sequence[str], source: str, options: BootOptions) -> Booted:
    """Boot a rendered QEMU command line with stand-ins for its devices, and read the guest.

    words: program first, an x86_64 one. Emulated, by QEMU itself. Raises as boot_stand_in, and
    ParseError for a command line that cannot be read.
    """
    if options.keep is not None:
        _make(options.keep)
    program = qemu_program()
    if program is None:
        raise ToolMissingError(
            f"{PROGRAM}: expected it to be installed, found none on PATH", hint=_INSTALL
        )
    if not words or not words[0].endswith(PROGRAM):
        raise HostError(
            f"{source}: expected a command line of {PROGRAM} to boot, found "
            f"{words[0] if words else 'none'}"
        )
    files = find_guest_files(options.kernel)
    types = [v for name, v in options_of(words[1:], source) if name == "machine" and v is not None]
    wanted = types[-1].partition(",")[0] if types else None
    stand_in, rendered = stand_in_of_command(words, source, _machine(program, wanted))
    limit_s = options.timeout_s or _BASE_S + _PER_VCPU_S * stand_in.vcpus
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homenode-boot-") as text:
        folder = Path(text)
        paths = _lay_out(folder, files.kernel, initramfs(files.busybox))
        argv = (program, *rendered, *boot_words(paths, COMMAND))
        (folder / "argv").write_text("\n".join(argv) + "\n")
        refused = _run_qemu(argv, limit_s, folder, source)
        try:
            guest, said = (None, ()) if refused else _read(folder, source, source, stand_in)
        finally:
            if options.keep is not None:
                _keep(folder, options.keep)
    how = f"by QEMU, TCG, {files.stated}"
    return Booted(stand_in, guest, how, time.monotonic() - started, (*refused, *said))


def _lay_out(
    folder: Path, kernel: Path, image: bytes, ovmf: tuple[Path, Path] | None = None
) -> BootFiles:
    """Copies, since libvirt takes over what it is given."""
    if ovmf is not None:
        for path, name in zip(ovmf, ("ovmf", "ovmf-variables"), strict=True):
            shutil.copyfile(path, folder / name)
    shutil.copyfile(kernel, folder / "kernel")
    (folder / "initramfs").write_bytes(image)
    for name in ("console", "report"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    for name in ("kernel", "initramfs"):
        (folder / name).chmod(0o644)
    names = ("kernel", "initramfs", "console", "report", "ovmf", "ovmf-variables")
    return BootFiles(*(str(folder / name) for name in names))


def _machine(program: str, wanted: str | None) -> str:
    """The document's machine where this QEMU has it, else the newest of its kind."""
    kind = "q35" if wanted is not None and "q35" in wanted else "pc"
    listed = run((program, "-machine", "help"), 60).stdout.splitlines()
    known = {line.split()[0] for line in listed[1:] if line.split()}
    return wanted if wanted in known and wanted is not None else kind


def _run_qemu(
    argv: tuple[str, ...], limit_s: float, folder: Path, source: str
) -> tuple[Finding, ...]:
    try:
        # QEMU takes firmware from the folder that it stands in, before its own.
        done = run(argv, limit_s, folder=folder)
    except ToolTimeoutError:
        raise silence(folder, limit_s, source) from None
    if done.returncode and not came_up(folder):
        said = next((line for line in done.stderr.splitlines() if "warning:" not in line), "")
        return (refusal("QEMU", said or done.failure() or "", source),)
    return ()


def _read(
    folder: Path, name: str, source: str, stand_in: StandIn
) -> tuple[Host | None, tuple[Finding, ...]]:
    # OVMF clears the screen of every serial port first.
    packed = (folder / "report").read_bytes()
    packed = packed[max(0, packed.find(_GZIP)) :]
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(packed, _LARGEST_REPORT)
    except zlib.error:
        text = b""
    if not unpacker.eof:
        if not came_up(folder):
            return None, (crash(folder, source),)
        raise partial(folder, source)
    report, _, log = text.decode("utf-8", "replace").partition(f"\n{LOG}\n")
    (folder / "kernel-log").write_text(log)
    guest = discover(parse_collected(report, f"stand-in of {name}"))
    paths = paths_of_guest(guest)
    names = {
        paths[path]: str(bdf)
        for address, bdf in stand_in.devices
        if bdf is not None
        and (path := path_of_address(address, stand_in.controllers)) is not None
        and path in paths
    }
    return guest, tuple(kernel_findings(log, names, source))


def _make(keep: Path) -> None:
    try:
        keep.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=keep):
            pass
    except OSError as error:
        raise HostError(f"{keep}: expected to write there, found: {error.strerror}") from None


def _keep(folder: Path, keep: Path) -> None:
    """Copies what a person may want to see; the kernel is the distribution's own."""
    try:
        for path in sorted(folder.iterdir()):
            if path.name not in ("kernel", "ovmf", "ovmf-variables"):
                replace_file(keep / path.name, path.read_bytes(), None, synced=False)
    except OSError as error:
        raise HostError(f"{keep}: expected to write there, found: {error.strerror}") from None
