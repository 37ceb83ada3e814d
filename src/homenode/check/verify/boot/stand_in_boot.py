"""Boot: a test guest is booted and read with homenode's own discovery. [I/O]"""

import contextlib
import errno
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.check.verify.boot import boot_directory as libvirt_boot
from homenode.check.verify.boot.boot_directory import (
    GuestOutput,
    allow_qemu,
    boot_directory,
    copy_for_qemu,
    make_domain_name,
)
from homenode.check.verify.boot.forms import (
    PROGRAM,
    BootFiles,
    boot_words,
    stand_in_argv,
    stand_in_of_command,
    stand_in_xml,
)
from homenode.check.verify.boot.guest_files import (
    CONSOLE_HINT,
    LOG,
    MAX_BOOT_FILE_BYTES,
    can_use_kvm,
    check_kernel,
    crash_finding,
    find_guest_files,
    find_ovmf,
    find_qemu,
    has_booted,
    make_report_error,
    pack_initramfs,
    refusal_finding,
    silence_error,
)
from homenode.check.verify.boot.stand_in import MinimalGuest, build_test_guest, choose_cpu
from homenode.errors import HostError
from homenode.findings import Finding
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.collector import parse_collected
from homenode.machine.topology import Host
from homenode.process import ToolMissingError, ToolTimeoutError, run
from homenode.safe.durable import create_file, replace_file
from homenode.safe.input_files import read_plain
from homenode.vm.domain.document import Document
from homenode.vm.guest_observation import find_guest_path, map_guest_paths
from homenode.vm.hypervisor.connection import is_local
from homenode.vm.model import Vm
from homenode.vm.targets.qemu_command import parse_options

COMMAND = (
    "console=ttyS0 quiet panic=-1 mitigations=off nowatchdog no_timer_check pcie_ports=compat "
    "cryptomgr.notests apparmor=0 audit=0 rodata=off nokaslr efi=noruntime"
)
"""The guest kernel's command line: silent but for errors, and without what shows nothing of the
topology: services of PCIe ports, self-tests, protections. A third of the time under TCG."""

_LOGICAL_VCPUS = 8
"""Maximum of possible CPUs for which the kernel addresses APICs by logical destination."""

_BASE_S = 60
_PER_VCPU_S = 5
_GZIP = b"\x1f\x8b\x08"
_MAX_REPORT = 64 << 20
_NOT_KEPT = ("kernel", "ovmf", "ovmf-variables", "domain", ".lock")


class BootOptions(Struct, frozen=True):
    """Options for booting a test guest, and for keeping its files."""

    # libvirt's URI; None = qemu:///system if it is reachable; "none" = QEMU directly
    connect: str | None = None
    kernel: Path | None = None
    timeout_s: float | None = None  # None = by vCPU count
    keep: Path | None = None  # directory for the guest's files and texts afterwards
    # share for an emulated guest of libvirt, before QEMU is run directly; None = half
    libvirt_timeout_s: float | None = None


class BootOutcome(Struct, frozen=True):
    stand_in: MinimalGuest
    guest: Host | None  # None if it did not boot; `findings` have the reason
    how: str  # how the guest was booted (libvirt or QEMU, KVM or TCG), as text
    seconds: float
    findings: tuple[Finding, ...]


def boot_stand_in(
    document: Document, facts: Vm, options: BootOptions, host: Host | None = None
) -> BootOutcome:
    """Boot the test guest of a document and read it. host: that of its devices, None = not known.

    A definition that libvirt or QEMU rejects, or whose guest crashes, is a result in `findings`.
    Raises HostError, ToolMissingError or ToolTimeoutError if this machine cannot boot guests, each
    with a hint.
    """
    # Long because libvirt's attempt, QEMU's after it, and their end share one directory.
    _check_can_keep(options.keep)
    uri = None if options.connect == "none" else libvirt_boot.find_uri(options.connect)
    program = _find_qemu()
    files = find_guest_files(options.kernel)
    image = pack_initramfs(files.busybox)
    kvm = can_use_kvm(files.kernel, image) and (uri is None or libvirt_boot.offers_kvm(uri))
    ovmf = find_ovmf()
    stand_in = build_test_guest(
        document,
        facts,
        choose_cpu(document, facts, kvm=kvm),
        _choose_machine(program, facts.machine),
        host=host,
        has_ovmf=ovmf is not None,
        through_libvirt=uri is not None and options.connect is not None,
        kvm=kvm,
    )
    limit_s = options.timeout_s or _BASE_S + _PER_VCPU_S * stand_in.vm.vcpus
    findings: tuple[Finding, ...] = ()
    daemon = None if stand_in.needs_qemu else uri
    start_s = time.monotonic()
    with boot_directory(uri) as directory, contextlib.ExitStack() as ends:
        refusals: tuple[Finding, ...] = ()
        name = make_domain_name(directory)
        user = os.geteuid()
        if daemon is not None:
            try:
                user = _allow_qemu(directory, daemon)
            except OSError as error:
                reason = f"{directory}: {error.strerror}: access cannot be limited to its QEMU"
                findings += (libvirt_boot.could_not_start(reason, daemon),)
                daemon = None
        guests = []
        for part_guest, part, source in _split_guest(stand_in, facts.source):
            part_directory = directory / part
            boot_files = _lay_out(
                part_directory, files.kernel, image, ovmf if part_guest.uefi else None, user
            )
            command = build_kernel_command(part_guest.vm.vcpus, kvm=kvm)
            argv = (program, *stand_in_argv(part_guest, name, boot_files, command, kvm=kvm)[1:])
            guests.append(_open_guest(part_guest, source, part_directory, argv, user, ends))
        if daemon is not None:
            xml = directory / "domain.xml"
            text = stand_in_xml(stand_in, name, boot_files, command, kvm=kvm)
            create_file(xml, text.encode())
            # libvirt has no option for one thread for all vCPUs: with dozens of vCPUs on a busy
            # machine its guests sometimes do not boot, while QEMU directly takes seconds.
            patience_s = limit_s if kvm else options.libvirt_timeout_s or limit_s / 2
            excuse: tuple[Finding, ...] = ()
            try:
                console = guests[0].console
                refusals = libvirt_boot.boot(daemon, xml, name, console, patience_s, facts.source)
                excuse = libvirt_boot.find_daemon_trouble(refusals, daemon)
            except ToolTimeoutError as error:
                if kvm:
                    raise
                excuse = (libvirt_boot.could_not_start(error.message, daemon),)
            if excuse:  # it is not about the definition; QEMU does
                refusals, daemon = (), None
                findings += excuse
        if daemon is None:
            refusals = _run_qemu(guests, limit_s)
        guest_host, log_findings = _read_all(guests, refusals, facts.name, options.keep)
    how = "QEMU without libvirt" if daemon is None else f"libvirt at {daemon}"
    how = f"{how}, {'KVM' if kvm else 'TCG'}, {files.kernel_name}"
    if len(guests) > 1:
        all_vcpus, few = (guest.stand_in.vm.vcpus for guest in guests)
        how += (
            f"; two guests at once: {all_vcpus} vCPUs, their cells and caches; the PCIe tree, BARs "
            f"and firmware with {few}"
        )
    return BootOutcome(
        stand_in, guest_host, how, time.monotonic() - start_s, (*findings, *refusals, *log_findings)
    )


def boot_command(words: Sequence[str], source: str, options: BootOptions) -> BootOutcome:
    """Boot a rendered QEMU command line with substitutes for its devices, and read the guest.
    words: program first, for x86_64. QEMU runs it emulated. Raises like boot_stand_in, and
    ParseError for a command line that cannot be read."""
    _check_can_keep(options.keep)
    program = _find_qemu()
    if not words or not words[0].endswith(PROGRAM):
        raise HostError(
            f"{source}: expected a command line of {PROGRAM} to boot, found "
            f"{words[0] if words else 'none'}"
        )
    files = find_guest_files(options.kernel)
    types = [
        v for name, v in parse_options(words[1:], source) if name == "machine" and v is not None
    ]
    machine = types[-1].partition(",")[0] if types else None
    stand_in, rendered = stand_in_of_command(words, source, _choose_machine(program, machine))
    limit_s = options.timeout_s or _BASE_S + _PER_VCPU_S * stand_in.vm.vcpus
    start_s = time.monotonic()
    with boot_directory() as directory, contextlib.ExitStack() as ends:
        user = os.geteuid()
        boot_files = _lay_out(directory, files.kernel, pack_initramfs(files.busybox), None, user)
        command = build_kernel_command(stand_in.vm.vcpus, kvm=False)
        argv = (program, *rendered, *boot_words(boot_files, command))
        guest = _open_guest(stand_in, source, directory, argv, user, ends)
        refusals = _run_qemu([guest], limit_s)
        host, log_findings = _read_all([guest], refusals, source, options.keep)
    how = f"QEMU without libvirt, TCG, {files.kernel_name}"
    return BootOutcome(stand_in, host, how, time.monotonic() - start_s, (*refusals, *log_findings))


class _Guest(Struct, frozen=True):
    stand_in: MinimalGuest
    source: str  # what findings of it name
    directory: Path
    argv: tuple[str, ...]
    console: GuestOutput  # of its kernel and init
    report: GuestOutput  # of the collector, compressed


def _open_guest(
    stand_in: MinimalGuest,
    source: str,
    directory: Path,
    argv: tuple[str, ...],
    user: int,
    ends: contextlib.ExitStack,
) -> _Guest:
    """Return a guest whose output files are closed with `ends`. user: QEMU's."""
    console, report = (GuestOutput(directory / name, user) for name in ("console", "report"))
    for text in (console, report):
        ends.callback(text.close)
    return _Guest(stand_in, source, directory, argv, console, report)


def _allow_qemu(directory: Path, uri: str) -> int:
    """Give the user of a libvirt's QEMU access to the directory, and return it. Raises OSError."""
    if not is_local(uri):
        raise OSError(errno.EREMOTE, "on another machine than libvirt")
    user = libvirt_boot.find_qemu_user(uri)
    if user in (None, os.geteuid()):
        return os.geteuid()
    allow_qemu(directory, user)
    return user


def _split_guest(stand_in: MinimalGuest, source: str) -> Iterator[tuple[MinimalGuest, str, str]]:
    """Yield (guest, its directory, its name in findings) of each guest to boot."""
    if len(stand_in.guests) == 1:
        yield stand_in, "", source
        return
    vcpus, tree = stand_in.guests
    yield vcpus, "vcpus", f"{source}, in the test guest of its vCPUs"
    yield tree, "pcie", f"{source}, in the test guest of its PCIe tree"


def _find_qemu() -> str:
    program = find_qemu()
    if program is None:
        raise ToolMissingError(PROGRAM)
    return program


def build_kernel_command(vcpus: int, *, kvm: bool) -> str:
    """Return the kernel command line of a test guest with this number of vCPUs.

    QEMU's own APICs pass a message to a logical destination on until the first APIC id that is
    missing, and a kernel whose CPUs behind it never answer hangs: with offline vCPUs, with 3 cores
    a socket. With more CPUs possible than there are, the kernel uses physical destinations.
    Source: QEMU 7.2, apic_get_delivery_bitmask(); Linux 6.1, physflat_probe().
    """
    return COMMAND if kvm or vcpus > _LOGICAL_VCPUS else f"{COMMAND} possible_cpus=9"


def _lay_out(
    directory: Path, kernel: Path, image: bytes, ovmf: tuple[Path, Path] | None, user: int
) -> BootFiles:
    """Return the copies, since libvirt takes over what it is given. user: QEMU's."""
    directory.mkdir(mode=0o700, exist_ok=True)
    copies = {"kernel": read_plain(kernel, MAX_BOOT_FILE_BYTES), "initramfs": image}
    for path, name in zip(ovmf or (), ("ovmf", "ovmf-variables"), strict=False):
        copies[name] = read_plain(path, MAX_BOOT_FILE_BYTES)
    for name, content in copies.items():
        copy_for_qemu(directory / name, content, user)
    names = ("kernel", "initramfs", "console", "report", "ovmf", "ovmf-variables")
    return BootFiles(*(str(directory / name) for name in names))


def _choose_machine(program: str, machine: str | None) -> str:
    """Return the definition's machine type if this QEMU has it, else the newest of its kind."""
    kind = "q35" if machine is not None and "q35" in machine else "pc"
    lines = run((program, "-machine", "help"), 60).stdout.splitlines()
    machines = {line.split()[0] for line in lines[1:] if line.split()}
    return machine if machine in machines and machine is not None else kind


def _run_qemu(guests: Sequence[_Guest], limit_s: float) -> tuple[Finding, ...]:
    """Run all guests at once, each to its end, and return findings on those that do not start.
    Raises ToolTimeoutError if a guest never ends while the others boot."""
    stop = threading.Event()
    findings: list[Finding] = []
    late: list[_Guest] = []
    with ThreadPoolExecutor(len(guests)) as pool:
        try:
            runs = []
            for guest in guests:
                words = "".join(f"{word}\n" for word in guest.argv)
                create_file(guest.directory / "argv", words.encode())
                for text in (guest.console, guest.report):
                    text.clear()
                # QEMU searches firmware in its working directory before its own directory.
                runs.append(
                    pool.submit(
                        run,
                        guest.argv,
                        limit_s,
                        directory=guest.directory,
                        ends_with_us=True,
                        stop=stop,
                    )
                )
            for guest, pending in zip(guests, runs, strict=True):
                try:
                    result = pending.result()
                except ToolTimeoutError:
                    late.append(guest)
                    continue
                if result.returncode and not has_booted(guest.console.decode_output()):
                    lines = result.stderr.splitlines()
                    message = next((line for line in lines if "warning:" not in line), "")
                    findings.append(
                        refusal_finding("QEMU", message or result.failure() or "", guest.source)
                    )
        finally:
            stop.set()
    if late and not findings:
        ended = [guest for guest in guests if guest not in late]
        texts = [(late_guest.console.decode_output(), late_guest.source) for late_guest in ended]
        findings += [
            crash_finding(console, source) for console, source in texts if not has_booted(console)
        ]
    if late and not findings:
        silent = next((late_guest for late_guest in late if _report(late_guest) is None), late[0])
        raise silence_error(silent.console.decode_output(), limit_s, silent.source)
    return tuple(findings)


def _read_all(
    guests: Sequence[_Guest], refusals: Sequence[Finding], name: str, keep: Path | None
) -> tuple[Host | None, tuple[Finding, ...]]:
    """Return the guests' reports as one: PCI functions of the last guest, everything else of the
    first. None if one of them did not come up."""
    try:
        if refusals:
            return None, ()
        read: list[tuple[Host | None, tuple[Finding, ...]]] = []
        partly: list[HostError] = []
        for guest in guests:
            try:
                read.append(_read(guest, name))
            except HostError as error:
                partly.append(error)
    finally:
        if keep is not None:
            _copy_files(guests, keep)
    log_findings = tuple(finding for _, findings in read for finding in findings)
    hosts = [host for host, _ in read if host is not None]
    if partly and len(hosts) == len(read):  # else another guest crashed, which is the answer
        raise partly[0]
    if len(hosts) < len(guests):
        return None, log_findings
    first, last = hosts[0], hosts[-1]
    nodes = [[node.index for node in part.nodes] for part in (first, last)]
    if nodes[0] != nodes[1]:
        raise HostError(
            f"{guests[0].source}: expected the nodes {nodes[0]} in the guest of the PCIe tree too, "
            f"found {nodes[1]}",
            hint=CONSOLE_HINT,
        )
    tree = (last.root_complexes, last.pci_devices, last.links)
    gaps = tuple(dict.fromkeys((*first.gaps, *last.gaps)))
    joined = replace(first, root_complexes=tree[0], pci_devices=tree[1], links=tree[2], gaps=gaps)
    return joined, log_findings


def _report(guest: _Guest) -> str | None:
    """The complete report, else None. Raises HostError if another user than QEMU's wrote it."""
    # OVMF clears the screen of every serial port first.
    archive = guest.report.read_output()
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(archive[max(0, archive.find(_GZIP)) :], _MAX_REPORT)
    except zlib.error:
        return None
    return text.decode("utf-8", "replace") if unpacker.eof else None


def _read(guest: _Guest, name: str) -> tuple[Host | None, tuple[Finding, ...]]:
    text = _report(guest)
    if text is None:
        console = guest.console.decode_output()
        if not has_booted(console):
            return None, (crash_finding(console, guest.source),)
        raise make_report_error(len(guest.report.read_output()), guest.source)
    report, _, log = text.partition(f"\n{LOG}\n")
    create_file(guest.directory / "kernel-log", log.encode())
    host = discover(parse_collected(report, f"stand-in of {name}"))
    stand_in, paths = guest.stand_in, map_guest_paths(host)
    names = {
        paths[path]: str(bdf)
        for address, bdf in stand_in.devices
        if bdf is not None
        and (path := find_guest_path(address, stand_in.vm.controllers)) is not None
        and path in paths
    }
    return host, tuple(check_kernel(log, names, guest.source))


def _check_can_keep(keep: Path | None) -> None:
    """Check, before a boot that takes minutes, that --keep can be written."""
    if keep is None:
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if not os.access(keep, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise HostError(f"{keep}: cannot write: {error.strerror}") from None


def _copy_files(guests: Sequence[_Guest], keep: Path) -> None:
    """Copy the files of interest; the kernel is the distribution's own."""
    try:
        for guest in guests:
            into = keep if len(guests) == 1 else keep / guest.directory.name
            into.mkdir(exist_ok=True)
            content_of = {
                text.path.name: text.read_unchecked() for text in (guest.console, guest.report)
            }
            for path in sorted(guest.directory.iterdir()):
                if not path.is_file() or path.name in _NOT_KEPT:
                    continue
                with contextlib.suppress(PermissionError):  # libvirt gave it to root
                    content_of[path.name] = content_of.get(path.name) or read_plain(
                        path, MAX_BOOT_FILE_BYTES
                    )
            for name, content in content_of.items():
                replace_file(into / name, content, None, synced=False)
    except OSError as error:
        raise HostError(f"{keep}: cannot write: {error.strerror}") from None
