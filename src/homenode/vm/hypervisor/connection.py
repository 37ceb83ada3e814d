"""Connection: the libvirt daemon of a URI, and the access to its guests."""

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
    """Return the URI, if it is valid for libvirt and has a driver that homenode supports.

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
    """Return the words of a homenode command, with --connect for a URI other than the default.

    >>> with_connection("qemu:///session", "homenode", "restore", "vm")
    ('homenode', 'restore', 'vm', '--connect', 'qemu:///session')
    """
    return words if uri == DEFAULT else (*words, "--connect", uri)


def check_host(host: str | None, uri: str) -> None:
    """Raise UsageError if no host is given and the daemon is on another machine."""
    if host is None and not is_local(checked_uri(uri)):
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


def machine_of(uri: str) -> str:
    """Return the machine of the daemon as in the URI; "" = this machine.

    A port of localhost may be a tunnel to any machine, so it is included.

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
    """The way to reach a guest."""

    SSH = "ssh"
    AGENT = "agent"


class GuestAccess(Struct, frozen=True):
    transport: Transport = Transport.SSH
    address: str | None = None  # None = as reported by libvirt
    user: str = "root"
    port: int = 22
    key: str | None = None  # a file's path
