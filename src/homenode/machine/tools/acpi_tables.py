"""AcpiTables: SRAT and SLIT, by which firmware tells a kernel its nodes and their distances.

Files of Linux: /sys/firmware/acpi/tables/SRAT and SLIT, which root can read. Seen: QEMU 7.2.
Source: ACPI 6.5, 5.2.16 (SRAT) and 5.2.17 (SLIT).
"""

import struct
from collections.abc import Iterator

from msgspec import Struct

from homenode.errors import ParseError

_HEADER_BYTES = 36
_SRAT_HEADER_BYTES = 48
_SLIT_HEADER_BYTES = 44
_MOST_DOMAINS = 4096


class ProximityDomain(Struct, frozen=True):
    """A node, as firmware numbers it."""

    number: int
    cpus: int  # of entries that are enabled
    memory_bytes: int  # of entries that are enabled


def parse_srat(table: bytes, source: str) -> tuple[ProximityDomain, ...]:
    """The domains that have CPUs or memory, by number. Raises ParseError."""
    if table[:4] != b"SRAT":
        raise ParseError(source, "the signature SRAT", repr(table[:4]))
    cpus: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for kind, entry in _entries(table, source):
        if kind == 0 and entry[4] & 1:
            domain = entry[2] | int.from_bytes(entry[9:12], "little") << 8
        elif kind == 2 and entry[12] & 1:
            (domain,) = struct.unpack_from("<I", entry, 4)
        elif kind == 3 and entry[10] & 1:
            (domain,) = struct.unpack_from("<I", entry, 2)
        elif kind == 1 and entry[28] & 1:
            domain, _, _, size = struct.unpack_from("<IHQQ", entry, 2)
            sizes[domain] = sizes.get(domain, 0) + size
            continue
        else:
            continue
        cpus[domain] = cpus.get(domain, 0) + 1
    numbers = sorted({*cpus, *(domain for domain, size in sizes.items() if size)})
    return tuple(
        ProximityDomain(number, cpus.get(number, 0), sizes.get(number, 0)) for number in numbers
    )


_LENGTHS = {0: 16, 1: 40, 2: 24, 3: 18}
"""Of entries that are read: CPUs by APIC id, memory, CPUs by x2APIC id, CPUs of Arm."""


def _entries(table: bytes, source: str) -> Iterator[tuple[int, bytes]]:
    at = _SRAT_HEADER_BYTES
    while at + 2 <= len(table):
        kind, length = table[at], table[at + 1]
        entry = table[at : at + length]
        if length < max(2, _LENGTHS.get(kind, 2)) or len(entry) < length:
            raise ParseError(source, "whole entries", f"one of {len(entry)} bytes at byte {at}")
        yield kind, entry
        at += length


def parse_slit(table: bytes, source: str) -> tuple[tuple[int, ...], ...]:
    """Distances [from][to], by the domains' numbers. Raises ParseError."""
    if table[:4] != b"SLIT" or len(table) < _SLIT_HEADER_BYTES:
        raise ParseError(source, "a SLIT", repr(table[:4]))
    (count,) = struct.unpack_from("<Q", table, _HEADER_BYTES)
    rows = table[_SLIT_HEADER_BYTES:]
    if count > _MOST_DOMAINS or len(rows) != count * count:
        raise ParseError(source, f"distances of {count} domains", f"{len(rows)} bytes")
    return tuple(tuple(rows[i * count : (i + 1) * count]) for i in range(count))
