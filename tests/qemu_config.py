"""QEMU's own configuration space, without a guest: accesses through its test protocol.

Source: QEMU docs, devel/qtest; PCI Local Bus 3.0, 3.2.2.3.2 (configuration mechanism 1).
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from homenode.bdf import Bdf
from homenode.errors import HostError
from tests.simulated_config import Access

QEMU = "qemu-system-x86_64"


class QemuConfig:
    """The configuration space of a q35 machine that runs no instruction."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.accesses: list[Access] = []

    def read(self, bdf: Bdf, offset: int, size: int) -> int:
        self._select(bdf, offset)
        letter = {1: "b", 2: "w", 4: "l"}[size]
        value = int(self._ask(f"in{letter} {0xCFC + offset % 4:#x}").split()[1], 16)
        self.accesses.append(Access("read", bdf, offset, size, value))
        return value

    def write(self, bdf: Bdf, offset: int, size: int, value: int) -> None:
        self._select(bdf, offset)
        letter = {1: "b", 2: "w", 4: "l"}[size]
        self.accesses.append(Access("write", bdf, offset, size, value))
        self._ask(f"out{letter} {0xCFC + offset % 4:#x} {value:#x}")

    def image(self, bdf: Bdf) -> bytes:
        """The first 256 bytes."""
        return b"".join(self.read(bdf, at, 4).to_bytes(4, "little") for at in range(0, 256, 4))

    def _select(self, bdf: Bdf, offset: int) -> None:
        if offset >= 256 or bdf.domain:
            raise HostError(f"{bdf}: offset {offset:#x} is out of this mechanism's reach")
        where = 1 << 31 | bdf.bus << 16 | bdf.device << 11 | bdf.function << 8 | offset & ~3
        self._ask(f"outl 0xcf8 {where:#x}")

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer.startswith("OK"), f"{command}: {answer}"
        return answer


@contextmanager
def qemu_config(devices: Sequence[str]) -> Iterator[QemuConfig]:
    """A q35 machine with these devices."""
    arguments = [word for device in devices for word in ("-device", device)]
    process = subprocess.Popen(
        [
            QEMU,
            *"-machine q35 -accel tcg -S -nodefaults -display none -qtest stdio".split(),
            *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield QemuConfig(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
