"""ConfigFile: configuration space through sysfs, one register an access. [I/O]

Source: Documentation/PCI/sysfs-pci.rst; the kernel splits accesses at their natural size.
"""

import os

from homenode.bdf import Bdf
from homenode.errors import HostError
from homenode.input_files import open_registers


class SysfsConfigSpace:
    """The configuration space of this machine. Needs root beyond the first 64 bytes."""

    def __init__(self, root: str = "/sys/bus/pci/devices") -> None:
        self._root = root

    def read(self, bdf: Bdf, offset: int, size: int) -> int:
        try:
            descriptor = open_registers(f"{self._root}/{bdf}/config")
            try:
                data = os.pread(descriptor, size, offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error(bdf, "read", offset, error.strerror or str(error)) from None
        if len(data) < size:
            raise self._error(bdf, "read", offset, f"{len(data)} bytes: are you root?")
        return int.from_bytes(data, "little")

    def write(self, bdf: Bdf, offset: int, size: int, value: int) -> None:
        try:
            descriptor = open_registers(f"{self._root}/{bdf}/config", to_write=True)
            try:
                written = os.pwrite(descriptor, value.to_bytes(size, "little"), offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error(bdf, "write", offset, error.strerror or str(error)) from None
        if written != size:
            raise self._error(bdf, "write", offset, f"{written} bytes written")

    def _error(self, bdf: Bdf, verb: str, offset: int, found: str) -> HostError:
        return HostError(
            f"{self._root}/{bdf}/config: expected to {verb} the register at {offset:#x}, "
            f"found: {found}",
            hint="run as root; kernels in lockdown refuse writes",
        )
