"""Sizes, rates and durations: parsed with units, printed for people. GiB is 2^30, GB/s is 10^9."""

import re

from homenode.errors import InputError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

# Source: libvirt domain XML, "unit" of <memory>: b/bytes, KB = 1000, k/KiB = 1024, up to EiB.
_BYTES_OF_UNIT = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtpe", start=1)
    for suffix, base in (("b", 1000), ("", 1024), ("ib", 1024))
}
_MAX_BYTES = (1 << 63) - 1
"""The largest size of libvirt and of JSON's readers."""

_SIZE = re.compile(r"\s*(\d{1,30})(?:\.(\d{1,6}))?\s*+([A-Za-z]*)\s*\Z", re.ASCII)


def to_bytes(number: int, unit: str) -> int:
    """Return the bytes of a number with one of libvirt's units (the case does not matter).

    >>> to_bytes(2, "MiB"), to_bytes(2, "MB"), to_bytes(3, "k")
    (2097152, 2000000, 3072)

    Raises InputError for an unknown unit, and above 2^63 - 1 bytes.
    """
    unit_bytes = _BYTES_OF_UNIT.get(unit.strip().lower())
    if unit_bytes is None:
        raise InputError(f"unknown unit {unit!r}", hint="b, KB, KiB, MB, MiB, GB, GiB, TB or TiB")
    return _check_size(number * unit_bytes)


def _check_size(size_bytes: int) -> int:
    if size_bytes > _MAX_BYTES:
        raise InputError(f"expected at most {_MAX_BYTES} bytes, found {size_bytes}")
    return size_bytes


_SECONDS_OF_UNIT = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,7}(?:\.\d{1,3})?) ?(s|min|m|h|d)", re.ASCII)


def parse_whole(text: str | None, digits: int = 20) -> int | None:
    """Return the number of a text of at most `digits` ASCII digits; None of any other text.

    int() takes "1_0" and other scripts' digits too, and raises ValueError beyond 4,300 of them.

    >>> parse_whole("0012"), parse_whole("-1"), parse_whole("1_0"), parse_whole("123", digits=2)
    (12, None, None, None)
    """
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= digits):
        return None
    return int(text)


def parse_duration(text: str, name: str) -> float:
    """Return the seconds of "90s", "30m" or "1h30m". Raises InputError. name: of the option.

    >>> parse_duration("1h30m", "--within"), parse_duration("90 s", "--within")
    (5400.0, 90.0)
    """
    parts = _DURATION.findall(text)
    seconds = sum(float(number) * _SECONDS_OF_UNIT[unit] for number, unit in parts)
    if _DURATION.sub("", text).strip() or not seconds > 0:
        raise InputError(f"{name}: expected a time such as 90s, 30m or 1h30m, found {text[:40]!r}")
    return seconds


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "64GiB", "1.5T" or "1024".

    >>> parse_bytes("1.5GiB"), parse_bytes("4096")
    (1610612736, 4096)

    Raises InputError if the text is not a size or not a whole number of bytes.
    """
    match = _SIZE.match(text)
    if match is None:
        raise InputError(f"size {text!r}: expected a number and a unit, such as 64GiB")
    integer, fraction, unit = match.groups()
    unit_bytes = to_bytes(1, unit or "b")
    byte_count = int(integer + (fraction or "")) * unit_bytes
    divisor = int("1" + "0" * len(fraction or ""))
    if byte_count % divisor:
        raise InputError(f"size {text!r}: not a whole number of bytes")
    return _check_size(byte_count // divisor)


def format_bytes(count: int) -> str:
    """Return a short exact-looking text: the largest binary unit, at most two decimals.

    >>> format_bytes(1572864 * MIB), format_bytes(1536), format_bytes(0)
    ('1.5 TiB', '1.5 KiB', '0 B')
    """
    for unit_bytes, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit_bytes:
            return f"{count / unit_bytes:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{count} B"


def format_limit(count: int) -> str:
    """Bytes that a limit must allow, in whole GiB, rounded up: never less than is needed.

    >>> format_limit(1025 * GIB), format_limit(GIB + 1)
    ('1025 GiB', '2 GiB')
    """
    return f"{-(-count // GIB)} GiB"
