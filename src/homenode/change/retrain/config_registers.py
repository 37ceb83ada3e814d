"""ConfigRegisters: the link registers of a PCI function's configuration space, by sysfs. [I/O]

Source: PCI Local Bus 3.0, 6.7 (capability list); PCIe 6.0, 7.5.3.6 to 7.5.3.8 and 7.5.3.18 to
7.5.3.20 (Link Capabilities, Control, Status, and the same 2); Documentation/PCI/sysfs-pci.rst: the
kernel splits accesses at their natural size.
"""

import os
from typing import Protocol

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import HostError
from homenode.safe.input_files import open_registers

TARGET_SPEED_MASK = 0x000F
"""Bits of Link Control 2: the maximum speed to train to."""

RETRAIN_LINK = 0x0020
"""Bit of Link Control, in root and downstream ports only: reserved in endpoints. Reads as 0."""

LINK_DISABLE = 0x0010
TRAINING = 0x0800
"""Bit of Link Status: a training is under way."""

DATA_LINK_ACTIVE = 0x2000
DATA_LINK_REPORTED = 1 << 20
"""Bit of Link Capabilities: the port reports in Link Status whether the link carries data."""

SPEED_OF_CODE = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}

_STATUS, _HAS_LIST, _LIST_AT = 0x06, 0x10, 0x34
_EXPRESS = 0x10
_MAX_CAPABILITIES = 48


class ConfigSpace(Protocol):
    """Access to configuration space. Numbers are little-endian on the bus, native here. Both
    methods raise HostError if the function cannot be accessed."""

    def read(self, bdf: Bdf, offset: int, size: int) -> int:
        """Return the register of 1, 2 or 4 bytes at an offset."""

    def write(self, bdf: Bdf, offset: int, size: int, value: int) -> None:
        """Write exactly that register, in one access."""


class LinkRegisters(Struct, frozen=True):
    at: int  # where its PCI Express capability begins
    capabilities: int
    control: int
    status: int
    control_2: int
    # codes in the list of Link Capabilities 2; without it all up to Link Capabilities' maximum
    speeds: tuple[int, ...]

    @property
    def max_code(self) -> int:
        return max(self.speeds)

    @property
    def current_code(self) -> int:
        return self.status & 0xF

    @property
    def current_width(self) -> int:
        return self.status >> 4 & 0x3F

    @property
    def target_code(self) -> int:
        return self.control_2 & TARGET_SPEED_MASK

    @property
    def is_training(self) -> bool:
        return bool(self.status & TRAINING)

    @property
    def is_up(self) -> bool:
        """Whether the link carries data, according to the port."""
        return not self.capabilities & DATA_LINK_REPORTED or bool(self.status & DATA_LINK_ACTIVE)


def control_at(express: int) -> int:
    """Offset of Link Control, 16 bits. Link Status behind it has bits that writing 1 clears."""
    return express + 0x10


def status_at(express: int) -> int:
    return express + 0x12


def control_2_at(express: int) -> int:
    return express + 0x30


def find_express(space: ConfigSpace, bdf: Bdf) -> int:
    """Return the offset of the PCI Express capability. Raises HostError if it is missing."""
    if space.read(bdf, 0, 4) in (0xFFFFFFFF, 0):
        raise HostError(
            f"{bdf}: expected configuration space, found no answer",
            hint="the function is gone or sleeps (D3cold)",
        )
    if space.read(bdf, _STATUS, 2) & _HAS_LIST:
        at = space.read(bdf, _LIST_AT, 1) & 0xFC
        for _ in range(_MAX_CAPABILITIES):
            if at < 0x40:
                break
            if space.read(bdf, at, 1) == _EXPRESS:
                return at
            at = space.read(bdf, at + 1, 1) & 0xFC
    raise HostError(f"{bdf}: no PCI Express capability")


def read_registers(space: ConfigSpace, bdf: Bdf, *, is_port: bool = True) -> LinkRegisters:
    """Read the link registers; Link Control 2 is 0 for an endpoint of capability version 1. Raises
    HostError for a function without them, or a port without Link Control 2."""
    at = find_express(space, bdf)
    version = space.read(bdf, at + 2, 2) & 0xF
    if version < 2 and is_port:
        raise HostError(
            f"{bdf}: expected a PCI Express capability of version 2, found version {version}",
            hint="there is no Link Control 2: the target speed cannot be set",
        )
    capabilities = space.read(bdf, at + 0x0C, 4)
    max_code = capabilities & 0xF
    vector = space.read(bdf, at + 0x2C, 4) >> 1 & 0x7F if version > 1 else 0
    speeds = tuple(code for code in SPEED_OF_CODE if vector >> (code - 1) & 1)
    return LinkRegisters(
        at,
        capabilities,
        space.read(bdf, control_at(at), 2),
        space.read(bdf, status_at(at), 2),
        space.read(bdf, control_2_at(at), 2) if version > 1 else 0,
        speeds or tuple(code for code in SPEED_OF_CODE if code <= max_code) or (1,),
    )


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
            raise self._make_error(bdf, "read", offset, error.strerror or str(error)) from None
        if len(data) < size:
            raise self._make_error(bdf, "read", offset, f"{len(data)} bytes: are you root?")
        return int.from_bytes(data, "little")

    def write(self, bdf: Bdf, offset: int, size: int, value: int) -> None:
        try:
            descriptor = open_registers(f"{self._root}/{bdf}/config", to_write=True)
            try:
                byte_count = os.pwrite(descriptor, value.to_bytes(size, "little"), offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._make_error(bdf, "write", offset, error.strerror or str(error)) from None
        if byte_count != size:
            raise self._make_error(bdf, "write", offset, f"{byte_count} bytes written")

    def _make_error(self, bdf: Bdf, verb: str, offset: int, reason: str) -> HostError:
        return HostError(
            f"{self._root}/{bdf}/config: expected to {verb} the register at {offset:#x}, "
            f"found: {reason}",
            hint="run as root; kernels in lockdown reject writes",
        )
