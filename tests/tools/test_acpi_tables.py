"""SRAT and SLIT are read as firmware writes them, and refused where they are none."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import ParseError
from homenode.machine.snapshot.gather import keep_entries
from homenode.machine.tools.acpi_tables import ProximityDomain, parse_slit, parse_srat
from homenode.units import GIB


def table(signature: bytes, body: bytes) -> bytes:
    """With a header that says whose it is."""
    size = 36 + len(body)
    return signature + struct.pack("<IBB", size, 3, 0x5A) + b"BOCHS BXPC    1   MAKE1   " + body


def srat(*entries: bytes) -> bytes:
    return table(b"SRAT", bytes(12) + b"".join(entries))


def slit(*rows: tuple[int, ...]) -> bytes:
    return table(b"SLIT", struct.pack("<Q", len(rows)) + b"".join(map(bytes, rows)))


def cpu(domain: int, apic: int, *, enabled: int = 1) -> bytes:
    high = (domain >> 8).to_bytes(3, "little")
    return struct.pack("<BBBBIB", 0, 16, domain & 255, apic, enabled, 0) + high + bytes(4)


def x2apic(domain: int, apic: int) -> bytes:
    return struct.pack("<BBHIIIII", 2, 24, 0, domain, apic, 1, 0, 0)


def arm_cpu(domain: int, uid: int) -> bytes:
    return struct.pack("<BBIIII", 3, 18, domain, uid, 1, 0)


def memory(domain: int, base: int, size: int, *, flags: int = 1) -> bytes:
    return struct.pack("<BBIHQQIIQ", 1, 40, domain, 0, base, size, 0, flags, 0)


TWO = srat(cpu(0, 0), cpu(0, 1), cpu(1, 2), x2apic(1, 300), memory(0, 0, GIB), memory(1, GIB, GIB))


def test_cpus_and_memory_are_summed_by_domain() -> None:
    assert parse_srat(TWO, "SRAT") == (ProximityDomain(0, 2, GIB), ProximityDomain(1, 2, GIB))
    other = srat(arm_cpu(3, 0), cpu(300, 1), cpu(5, 2, enabled=0), memory(6, 0, GIB, flags=2))
    assert [one.number for one in parse_srat(other, "SRAT")] == [3, 300]
    generic_initiator = bytes([5, 32, 0, 1, 7, 0, 0, 0]) + bytes(24)
    assert parse_srat(srat(generic_initiator), "SRAT") == ()


def test_distances_are_rows_of_domains() -> None:
    assert parse_slit(slit((10, 21), (22, 10)), "SLIT") == ((10, 21), (22, 10))


@pytest.mark.parametrize(
    "broken",
    [TWO[:-1], TWO + bytes(2), b"SLIT" + TWO[4:], srat(bytes([1, 4, 0, 0])), srat(bytes([9, 0]))],
)
def test_what_is_no_srat_is_refused(broken: bytes) -> None:
    with pytest.raises(ParseError):
        parse_srat(broken, "SRAT")


@pytest.mark.parametrize("broken", [slit((10, 20)), slit((10,))[:40], TWO])
def test_what_is_no_slit_is_refused(broken: bytes) -> None:
    with pytest.raises(ParseError):
        parse_slit(broken, "SLIT")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for parse, signature in ((parse_srat, b"SRAT"), (parse_slit, b"SLIT")):
        try:
            parse(table(signature, body), "table")
        except ParseError:
            continue


def test_a_capture_keeps_entries_and_no_names() -> None:
    kept = keep_entries(TWO, "SRAT")
    assert kept is not None and b"BOCHS" not in kept and b"MAKE" not in kept
    assert parse_srat(kept, "SRAT") == parse_srat(TWO, "SRAT")
    for broken in (TWO[:40], TWO + bytes(1), bytes(36), b""):
        assert keep_entries(broken, "SRAT") is None
    assert keep_entries(TWO, "SLIT") is None
