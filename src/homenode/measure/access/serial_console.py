"""SerialConsole: a channel to a shell at a guest's serial port, for guests with nothing else. [I/O]

The port is a pty, a Unix socket or a TCP port. A shell may be waiting there, or a login that asks
for no password. It is set to no echo and no prompt, and reads one line after the other; see
access.console_frame.
"""

import math
import os
import secrets
import select
import socket
import termios
import time
import tty
from collections.abc import Callable, Iterable
from contextlib import suppress

from msgspec import Struct

from homenode.errors import InputError, ToolError
from homenode.input_files import open_terminal
from homenode.measure.access.console_frame import (
    SUMMERS,
    Damaged,
    checksum,
    fetched,
    fetching_line,
    mark_line,
    removing_line,
    staging_blocks,
)
from homenode.measure.access.machine import Said
from homenode.process import ToolTimeoutError
from homenode.vm.domain.document import Document, Element

_CONNECT_S = 10.0


class SerialAddress(Struct, frozen=True):
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
        # With "connect", QEMU calls somebody who listens there: not QEMU would answer us.
        if source is None or source.get("mode") == "connect":
            continue
        kind, path = port.get("type"), source.get("path")
        if kind in ("pty", "unix") and path is not None:
            return SerialAddress(kind, path)
        host, service = source.get("host"), source.get("service")
        if kind == "tcp" and host is not None and service is not None:
            return SerialAddress("tcp", f"{host}:{service}")
    raise InputError(
        f"{document.source}: expected a serial port of type pty, unix or tcp, found "
        f"{', '.join(map(_kind_of, ports)) or 'none'}",
        hint="add <serial type='pty'><target port='0'/></serial>, or reach the guest by ssh",
    )


def _kind_of(port: Element) -> str:
    source = port.child("source")
    connects = source is not None and source.get("mode") == "connect"
    return f"{port.get('type')}{' that connects elsewhere' if connects else ''}"


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
            descriptor = open_terminal(address.place)
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


_ANSWER_S = 15.0
_PATIENCE_S = 60.0
"""For a shell that has answered once: it is there, and may be slow (emulated, or a busy host)."""

_CLOSE_S = 5.0
_TRIES = 3
_UNCONFIRMED_BYTES = 8_000
"""So much goes out before the shell must have said that it is there: a terminal loses the rest."""

_MOST_BYTES = 64 << 20
_LEAST_BYTES_PER_S = 500
"""A line of 115,200 baud carries 11,520, and a busy host's emulated one a fraction of it. What
comes slower over more than _PATIENCE_S is no answer: a byte now and then would hold us for ever."""

_ANSWER_LIMIT_S = 1800.0
"""For what a script says, however it comes: 20 MiB at full rate."""

_INTERRUPT = b"\x03"
_SETTLE = (
    "stty -echo -ixon 2>/dev/null; PS1=; PS2=; dmesg -n 1 2>/dev/null; "
    "sh -c 'while IFS= read -r l; do eval \"$l\"; done'"
)


class SerialConsole:
    """See machine.channel.Channel. open_line: gives the line; it is opened again when it breaks.

    The guest's kernel says no more than emergencies on its console from then on.
    """

    __slots__ = (
        "_base64_there",
        "_buffer",
        "_deadline",
        "_folder",
        "_gzip_there",
        "_line",
        "_name",
        "_open_line",
        "_summer",
        "_user",
    )

    def __init__(self, name: str, open_line: Callable[[], SerialLine], user: str = "root") -> None:
        self._name = f"{name} at its serial console"
        self._open_line = open_line
        self._user = user
        self._line: SerialLine | None = None
        self._buffer = bytearray()
        self._deadline = math.inf
        self._folder = ""
        self._base64_there = self._gzip_there = False
        self._summer = ""

    @property
    def name(self) -> str:
        return self._name

    @property
    def most_input_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        if self._line is not None and self._folder:
            mark = f"homenode-{secrets.token_hex(6)}"
            self._deadline = time.monotonic() + 2 * _CLOSE_S
            with suppress(ToolError):  # the guest is gone, and its folder with it
                self._send([f"{removing_line(self._folder)}; {mark_line(mark, 'gone')}"])
                # QEMU drops what it was not yet read of when the line is closed.
                self._await(f"{mark}+gone", _CLOSE_S)
        self._drop()

    def _drop(self) -> None:
        """Let the line go; the next script opens it again."""
        if self._line is not None:
            self._line.close()
        self._line, self._folder = None, ""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> Said:
        content = (input or "").encode()
        sent_s = _TRIES * 1.4 * (len(script) + len(content)) / _LEAST_BYTES_PER_S
        # Login and setup, what is sent, the program, and what it says.
        whole_s = 4 * _PATIENCE_S + sent_s + timeout_s + _PATIENCE_S + _ANSWER_LIMIT_S
        self._deadline = time.monotonic() + whole_s
        try:
            self._settle()
            return self._execute(script, timeout_s, content)
        except ToolError:
            self._drop()
            raise

    def _execute(self, script: str, timeout_s: float, content: bytes) -> Said:
        mark = f"homenode-{secrets.token_hex(6)}"
        at = f"{self._folder}/{mark}"
        self._stage(script.encode(), f"{at}.s", mark)
        self._stage(content, f"{at}.i", mark)
        self._send([f"sh {at}.s <{at}.i >{at}.o 2>{at}.e; {mark_line(mark, 'ran')}"])
        try:
            self._await(f"{mark}+ran", timeout_s + _PATIENCE_S)
        except ToolTimeoutError:
            self._write(_INTERRUPT)
            raise ToolTimeoutError(f"{self._name}: no end after {timeout_s:g} s") from None
        texts = [self._fetch(f"{at}.{which}", mark) for which in ("o", "e")]
        self._send([f"rm -f {at}.s {at}.i {at}.o {at}.e"])
        return Said(*(text.decode("utf-8", "replace") for text in texts))

    def _settle(self) -> None:
        """A shell that listens, and a folder of ours there."""
        if self._line is not None:
            return
        self._line = self._open_line()
        self._buffer.clear()
        mark = f"homenode-{secrets.token_hex(6)}"
        for interrupt in (b"", _INTERRUPT):
            self._write(interrupt + b"\n")
            self._log_in()
            self._send([_SETTLE, mark_line(mark, "here")])
            try:
                self._await(f"{mark}+here", _ANSWER_S)
                break
            except ToolTimeoutError:
                continue
        else:
            raise ToolError(
                f"{self._name}: expected a shell that answers, found none; it said "
                f"{self._tail()!r}",
                hint="let a shell or a login without a password run there: console=ttyS0 and a "
                "getty, or reach the guest by ssh",
            )
        self._send(
            [
                f"umask 077; for d in /dev/shm /tmp /run; do mkdir -p $d/{mark} 2>/dev/null "
                f"&& D=$d/{mark} && break; done; command -v base64 >/dev/null && B=yes || B=no; "
                "[ $B = yes ] && command -v gzip >/dev/null && B=gzip; "
                f"for s in {' '.join(SUMMERS)}; do command -v $s >/dev/null && break; s=; done; "
                f'printf \'%s+folder %s %s %s\\n\' {mark} "$B" "$s" "$D"'
            ]
        )
        self._await(f"{mark}+folder ", _PATIENCE_S)
        there, _, rest = self._await("\n", _PATIENCE_S).strip().partition(" ")
        self._summer, _, folder = rest.partition(" ")
        if not self._summer:
            raise ToolError(
                f"{self._name}: expected one of {', '.join(SUMMERS)} there, found none: no one "
                "could say what arrives"
            )
        if not folder.endswith(mark):
            raise ToolError(
                f"{self._name}: expected a folder that can be written, found none of /run, /tmp "
                "and /dev/shm"
            )
        self._base64_there, self._gzip_there = there != "no", there == "gzip"
        self._folder = folder

    def _log_in(self) -> None:
        """Past a login prompt, where one stands there."""
        time.sleep(0.3)
        assert self._line is not None
        self._buffer += self._line.read(0.7)
        if self._tail().lower().endswith("login:"):
            self._write(f"{self._user}\n".encode())
            deadline = time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline:
                self._buffer += self._line.read(1.0)
                if self._tail().lower().endswith("password:"):
                    self._write(_INTERRUPT)
                    raise ToolError(
                        f"{self._name}: expected a login of {self._user} without a password, found "
                        "one that asks",
                        hint="let a shell run there, or reach the guest by ssh",
                    )
                if self._tail().endswith(("#", "$")):
                    return

    def _stage(self, content: bytes, path: str, mark: str) -> None:
        for _ in range(_TRIES):
            blocks = staging_blocks(
                content, path, base64_there=self._base64_there, gzip_there=self._gzip_there
            )
            self._send_blocks(blocks, mark)
            self._send([f"printf '%s+sum %s\\n' {mark} \"$({self._summer} <{path})\""])
            self._await(f"{mark}+sum ", _PATIENCE_S)
            if self._await("\n", _PATIENCE_S).split()[:1] == [checksum(content, self._summer)]:
                return
        raise ToolError(
            f"{self._name}: {path}: expected {len(content)} bytes to arrive, found other ones",
            hint="is its disk full?",
        )

    def _fetch(self, path: str, mark: str) -> bytes:
        why = ""
        for _ in range(_TRIES):
            self._send([fetching_line(path, mark, self._summer, base64_there=self._base64_there)])
            self._await(f"{mark}+begin", _PATIENCE_S)
            frame = self._await(f"{mark}+end ", None)
            stated = self._await("\n", _PATIENCE_S)
            found = fetched(frame, stated, self._summer, base64_there=self._base64_there)
            if not isinstance(found, Damaged):
                return found
            why = found.why
        raise ToolError(f"{self._name}: expected what was sent to arrive, found {why}")

    def _send(self, lines: Iterable[str]) -> None:
        self._write("".join(f"{line}\n" for line in lines).encode())

    def _send_blocks(self, blocks: Iterable[tuple[str, ...]], confirm: str) -> None:
        """Blocks of lines; after so many bytes the shell must say that it took them."""
        unconfirmed = number = 0
        for block in blocks:
            self._send(block)
            unconfirmed += sum(len(line) + 1 for line in block)
            if unconfirmed > _UNCONFIRMED_BYTES:
                number += 1
                self._send([mark_line(confirm, f"took {number}")])
                self._await(f"{confirm}+took {number}", _PATIENCE_S)
                unconfirmed = 0

    def _write(self, content: bytes) -> None:
        assert self._line is not None
        left_s = self._deadline - time.monotonic()
        self._line.write(content, max(0.0, min(_PATIENCE_S, left_s)))

    def _await(self, wanted: str, timeout_s: float | None) -> str:
        """What came before a text, which is taken too. timeout_s: None = as long as more comes, at
        the rate of a serial line.

        Raises ToolTimeoutError where it does not come, ToolError where too much else does.
        """
        assert self._line is not None
        mark = wanted.encode()
        searched = 0
        patience_s = _PATIENCE_S if timeout_s is None else timeout_s
        deadline = min(time.monotonic() + patience_s, self._deadline)
        while (at := self._buffer.find(mark, max(0, searched - len(mark)))) < 0:
            searched = len(self._buffer)
            if searched > _MOST_BYTES:
                raise ToolError(f"{self._name}: expected an answer, found {searched} other bytes")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise ToolTimeoutError(f"{self._name}: expected an answer, found none")
            came = self._line.read(left_s)
            self._buffer += came
            if timeout_s is None:
                deadline = min(deadline + len(came) / _LEAST_BYTES_PER_S, self._deadline)
        before = self._buffer[:at].decode("ascii", "replace")
        del self._buffer[: at + len(mark)]
        return before

    def _tail(self) -> str:
        lines = bytes(self._buffer[-400:]).decode("ascii", "replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else ""
