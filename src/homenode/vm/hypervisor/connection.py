"""Connection: the libvirt daemon of a URI, the access to its guests, their states."""

import re
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError, UsageError
from homenode.units import parse_whole

DEFAULT = "qemu:///system"
"""The system's QEMU driver. LIBVIRT_DEFAULT_URI is ignored: the commands that homenode prints and
records leave --connect out for it, and must mean the same VM in every shell."""

_FORM = re.compile(
    r"(?P<driver>[a-z][a-z0-9]*)(\+(?P<transport>[a-z0-9]+))?://(?P<server>[^/?#\s]*)"
    r"(?P<path>/[^\s?#]*)(\?[^\s#]*)?\Z",
    re.ASCII,
)
_DRIVERS = ("qemu", "test")
_TRANSPORTS = (None, "unix", "ssh", "tcp", "tls", "ext", "libssh", "libssh2")
_QEMU_PATHS = ("/system", "/session", "/embed")
_HERE = ("", "localhost")


def check_uri(uri: str) -> str:
    """Return the URI, if it is valid for libvirt and has a driver that homenode supports.

    >>> check_uri("qemu+ssh://root@gpu7/system")
    'qemu+ssh://root@gpu7/system'

    Raises UsageError. Source: https://libvirt.org/uri.html
    """
    match = _FORM.match(uri)
    is_known = (
        match is not None
        and match["driver"] in _DRIVERS
        and match["transport"] in _TRANSPORTS
        and (match["driver"] != "qemu" or match["path"] in _QEMU_PATHS)
    )
    if not is_known or not uri.isprintable():
        raise UsageError(
            f"connection {uri!r}: expected a libvirt URI of the QEMU driver",
            hint=f"{DEFAULT}, qemu:///session, or qemu+ssh://USER@HOST/system",
        )
    return uri


def add_connection(uri: str, *words: str) -> tuple[str, ...]:
    """Return the words of a homenode command, with --connect for a URI other than the default.

    >>> add_connection("qemu:///session", "homenode", "restore", "vm")
    ('homenode', 'restore', 'vm', '--connect', 'qemu:///session')
    """
    return words if uri == DEFAULT else (*words, "--connect", uri)


def check_host(host: str | None, uri: str) -> None:
    """Raise UsageError if no host is given and the daemon is on another machine."""
    if host is None and not is_local(check_uri(uri)):
        raise UsageError(
            f"--connect {uri} requires --host, since the daemon is on another machine",
            hint="homenode capture --ssh HOST -o host.tar.gz, then --host host.tar.gz",
        )


def is_local(uri: str) -> bool:
    """Return whether the daemon runs on this machine.

    >>> is_local("qemu:///system"), is_local("qemu+ssh://gpu7/system")
    (True, False)
    """
    match = _FORM.match(uri)
    return match is not None and match["server"] in _HERE


def find_machine(uri: str) -> str:
    """Return the machine of the daemon as in the URI; "" = this machine.

    A port of localhost may be a tunnel to any machine, so it is included.

    >>> find_machine("qemu:///session"), find_machine("qemu+ssh://root@gpu7:22/system")
    ('', 'gpu7')
    """
    match = _FORM.match(uri)
    server = uri if match is None else match["server"].rpartition("@")[2].lower()
    name, _, port = server.partition(":")
    if not port.isdecimal():
        return "" if server in _HERE else server
    return server if name in _HERE else name


ANSWER_S, STOP_S = 300.0, 60.0
"""Time limits until a guest answers, and until it is off."""


class Transport(StrEnum):
    """The way to reach a guest."""

    SSH = "ssh"
    AGENT = "agent"


class GuestAccess(Struct, frozen=True):
    transport: Transport = Transport.SSH
    address: str | None = None  # None = as reported by libvirt
    user: str = "root"
    port: int = 22
    key: str | None = None  # a file's path


_PLAIN_NAME = re.compile(r"(?![0-9]+\Z)[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", re.ASCII)
_PIN_ROW = re.compile(r"\s*(?:(?:(?P<number>\d{1,6})|\*):?\s+)?(?P<pus>\d[\d,^-]*)\s*\Z", re.ASCII)
_PIN_HEAD = re.compile(r"CPU Affinity|^\s*-+\s*\Z|No IOThreads found")


class DomainState(Struct, frozen=True):
    name: str
    uuid: str
    run_id: int | None  # libvirt's number of the running instance, None if it is shut off
    state: str  # as virsh prints it ("running", "paused", "shut off")
    persistent: bool  # it has a definition
    managed_save: bool  # its memory is saved on disk and the next start resumes it

    @property
    def is_active(self) -> bool:
        return self.run_id is not None

    @property
    def argument(self) -> str:
        """The domain's name for command lines; its UUID if a shell, virsh or `homenode restore` (a
        document's name) would read the name as something else."""
        return domain_argument(self.name, self.uuid)


def domain_argument(name: str, uuid: str) -> str:
    """Return the name of a domain for command lines; see DomainState.argument.

    >>> domain_argument("vm7", "u"), domain_argument("-vm", "u"), domain_argument("7", "u")
    ('vm7', 'u', 'u')
    """
    is_plain = _PLAIN_NAME.match(name) and not name.endswith(".xml")
    return name if is_plain else uuid


class LivePin(Struct, frozen=True):
    """The CPUs of one thread of a running domain."""

    kind: str  # "vcpu", "emulator" or "iothread"
    number: int  # number of the vCPU or IOThread; 0 for the emulator
    pus: CpuSet


def format_pins(pins: Iterable[LivePin]) -> str:
    """Format pins as one line.

    >>> format_pins([LivePin("vcpu", 0, CpuSet((0, 1))), LivePin("emulator", 0, CpuSet((2,)))])
    'vcpu 0 0-1; emulator 0 2'
    """
    return "; ".join(f"{pin.kind} {pin.number} {pin.pus}" for pin in pins)


def parse_pin_lines(text: str) -> tuple[LivePin, ...]:
    """Parse the pins of such a line. Raises ParseError.

    >>> parse_pin_lines("vcpu 0 0-1; emulator 0 2")[0]
    LivePin(kind='vcpu', number=0, pus=CpuSet('0-1'))
    """
    pins = []
    for part in filter(None, text.split("; ")):
        words = part.split(" ")
        number = parse_whole(words[1]) if len(words) == 3 else None
        if number is None:
            raise ParseError("pins", "KIND NUMBER CPUS; ...", text)
        pins.append(LivePin(words[0], number, CpuSet.parse(words[2], "pins")))
    return tuple(pins)


def parse_dominfo(text: str) -> DomainState:
    """Parse the output of `virsh dominfo`. Raises ParseError if a label is missing. Source: libvirt
    4 to 11 with LC_ALL=C, one "Label: value" a line."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        label, colon, text_of_label = line.partition(":")
        if colon and label not in values:
            values[label] = text_of_label.strip()

    def value(label: str) -> str:
        if label not in values:
            raise ParseError("virsh dominfo", f"a line {label!r}", text)
        return values[label]

    id_text = value("Id")
    run_id = parse_whole(id_text)
    if id_text != "-" and run_id is None:
        raise ParseError("virsh dominfo", "Id: a number or -", id_text)
    return DomainState(
        name=value("Name"),
        uuid=value("UUID"),
        run_id=run_id,
        state=value("State"),
        persistent=value("Persistent") == "yes",
        # The test driver and old session daemons omit it.
        managed_save=values.get("Managed save") == "yes",
    )


def parse_pins(text: str, kind: str) -> tuple[LivePin, ...]:
    """Parse the table of `virsh vcpupin`, `emulatorpin` or `iothreadinfo`.

    Each row is a number and a list of CPUs: " 0      0-3,8", with a colon in old versions. The
    emulator's row has a star in place of the number, or with --quiet nothing. Raises ParseError.
    """
    pins = []
    for line in text.splitlines():
        row = _PIN_ROW.match(line)
        if row is not None and (row["number"] is None) == (kind == "emulator"):
            pus = CpuSet.parse(row["pus"], f"virsh {kind} pins")
            pins.append(LivePin(kind, int(row["number"] or 0), pus))
        elif line.strip() and not _PIN_HEAD.search(line):
            raise ParseError(f"virsh {kind} pins", "a number and CPUs", line)
    return tuple(pins)
