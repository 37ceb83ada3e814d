"""SerialLine: the near end of a guest's serial port: a pty, a Unix socket or a TCP port. [I/O]"""

import os
import select
import socket
import termios
import time
import tty
from dataclasses import dataclass

from homenode.domain.document import Document
from homenode.errors import InputError, ToolError

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class SerialAddress:
    """Where the near end is. kind: "pty", "unix" or "tcp". place: a path, or "host:port"."""

    kind: str
    place: str


def serial_address(document: Document) -> SerialAddress:
    """Where the first serial port or console of a running domain is.

    document: of the running instance, in which libvirt gives the pty. Raises InputError where it
    has none that can be talked over.
    """
    devices = document.root.child("devices")
    ports = [] if devices is None else [*devices.all("serial"), *devices.all("console")]
    for port in ports:
        source = port.child("source")
        if source is None:
            continue
        kind, path = port.get("type"), source.get("path")
        if kind in ("pty", "unix") and path is not None:
            return SerialAddress(kind, path)
        host, service = source.get("host"), source.get("service")
        if kind == "tcp" and host is not None and service is not None:
            return SerialAddress("tcp", f"{host}:{service}")
    raise InputError(
        f"{document.source}: expected a serial port of type pty, unix or tcp, found "
        f"{', '.join(str(port.get('type')) for port in ports) or 'none'}",
        hint="add <serial type='pty'><target port='0'/></serial>, or reach the guest by ssh",
    )


class SerialLine:
    """An open line. Reads and writes raise ToolError once the guest is gone.

    descriptor: non-blocking, and closed with the line.
    """

    __slots__ = ("_descriptor", "_place")

    def __init__(self, descriptor: int, place: str) -> None:
        self._descriptor = descriptor
        self._place = place

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, timeout_s: float) -> bytes:
        """What has come, b"" where nothing did in that time."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, timeout_s))
        if not ready:
            return b""
        try:
            found = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError as error:  # EIO: the other side of the pty is closed
            raise self._gone(error.strerror or str(error)) from None
        if not found:
            raise self._gone("it was closed")
        return found

    def write(self, content: bytes, timeout_s: float) -> None:
        """All of it, however slowly the guest takes it."""
        deadline = time.monotonic() + timeout_s
        while content:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ToolError(f"{self._place}: expected the guest to take what is sent")
            _, ready, _ = select.select([], [self._descriptor], [], left_s)
            if not ready:
                continue
            try:
                content = content[os.write(self._descriptor, content[:4096]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone(error.strerror or str(error)) from None

    def _gone(self, why: str) -> ToolError:
        return ToolError(f"{self._place}: expected the guest's serial port, found: {why}")


def open_line(address: SerialAddress) -> SerialLine:
    """The line of an address. Raises ToolError where it cannot be opened."""
    try:
        if address.kind == "pty":
            flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(address.place, flags)
            tty.setraw(descriptor)
        else:
            descriptor = _connected(address).detach()
            os.set_blocking(descriptor, False)
    except (OSError, termios.error, ValueError) as error:
        raise ToolError(
            f"{address.place}: expected the guest's serial port there, found: {error}",
            hint="on the machine where it runs, as root; no one else may have it open",
        ) from None
    return SerialLine(descriptor, address.place)


def _connected(address: SerialAddress) -> socket.socket:
    if address.kind == "unix":
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        found.settimeout(_CONNECT_S)
        try:
            found.connect(address.place)
        except OSError:
            found.close()
            raise
        return found
    host, _, port = address.place.rpartition(":")
    return socket.create_connection((host, int(port)), _CONNECT_S)
