"""Connection: which libvirt daemon is meant, as its URI says."""

import re

from homenode.errors import UsageError

DEFAULT = "qemu:///system"
"""The system's own QEMU driver, whatever LIBVIRT_DEFAULT_URI says: a change must be asked for."""

_FORM = re.compile(
    r"(?P<driver>[a-z][a-z0-9]*)(\+(?P<transport>[a-z0-9]+))?://(?P<server>[^/?#\s]*)"
    r"(?P<path>/[^\s?#]*)(\?[^\s#]*)?\Z",
    re.ASCII,
)
_DRIVERS = ("qemu", "test")


def checked_uri(uri: str) -> str:
    """The URI, where it has libvirt's form and names a driver whose domains homenode tunes.

    >>> checked_uri("qemu+ssh://root@gpu7/system")
    'qemu+ssh://root@gpu7/system'

    Raises UsageError. Source: https://libvirt.org/uri.html
    """
    match = _FORM.match(uri)
    if match is None or match["driver"] not in _DRIVERS or not uri.isprintable():
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


def is_local(uri: str) -> bool:
    """True where the daemon runs on this machine.

    >>> is_local("qemu:///system"), is_local("qemu+ssh://gpu7/system")
    (True, False)
    """
    match = _FORM.match(uri)
    return match is not None and match["server"] in ("", "localhost")
