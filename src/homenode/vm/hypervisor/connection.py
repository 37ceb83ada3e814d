"""Connection: which libvirt daemon is meant, as its URI says, and how a guest there is reached."""

import re
from enum import StrEnum

from msgspec import Struct

from homenode.errors import UsageError

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


def checked_uri(uri: str) -> str:
    """The URI, where it has libvirt's form and names a driver whose domains homenode tunes.

    >>> checked_uri("qemu+ssh://root@gpu7/system")
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


def with_connection(uri: str, *words: str) -> tuple[str, ...]:
    """The words of a homenode command, with --connect where it does not go to the default.

    >>> with_connection("qemu:///session", "homenode", "restore", "vm")
    ('homenode', 'restore', 'vm', '--connect', 'qemu:///session')
    """
    return words if uri == DEFAULT else (*words, "--connect", uri)


def check_host(host: str | None, uri: str) -> None:
    """Raises UsageError if no host is given and the daemon is on another machine."""
    if host is None and not is_local(checked_uri(uri)):
        raise UsageError(
            f"--connect {uri} requires --host, since the daemon is on another machine",
            hint="homenode capture --ssh HOST -o host.tar.gz, then --host host.tar.gz",
        )


def is_local(uri: str) -> bool:
    """True if the daemon runs on this machine.

    >>> is_local("qemu:///system"), is_local("qemu+ssh://gpu7/system")
    (True, False)
    """
    match = _FORM.match(uri)
    return match is not None and match["server"] in _HERE


def machine_of(uri: str) -> str:
    """The machine on which the daemon runs, as the URI names it; "" is this one.

    A port of localhost may be a tunnel to any machine, and is named.

    >>> machine_of("qemu:///session"), machine_of("qemu+ssh://root@gpu7:22/system")
    ('', 'gpu7')
    """
    match = _FORM.match(uri)
    server = uri if match is None else match["server"].rpartition("@")[2].lower()
    name, _, port = server.partition(":")
    if not port.isdecimal():
        return "" if server in _HERE else server
    return server if name in _HERE else name


ANSWER_S, STOP_S = 300.0, 60.0
"""How long a guest may take until it answers, and until it is off."""


class Transport(StrEnum):
    """How a guest is reached."""

    SSH = "ssh"
    AGENT = "agent"


class GuestAccess(Struct, frozen=True):
    """How to reach the guest."""

    transport: Transport = Transport.SSH
    address: str | None = None  # None = as libvirt finds it
    user: str = "root"
    port: int = 22
    key: str | None = None  # a file's path
