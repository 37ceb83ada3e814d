"""CpuSet: an immutable set of CPU indices with the kernel's two spellings, list and mask.

Each numbering of the host has a separate type of index.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NewType

from homenode.errors import ParseError

PuIndex = NewType("PuIndex", int)
"""The kernel's number of a logical CPU (hwloc's PU): N of /sys/devices/system/cpu/cpuN."""

MAX_PU_INDEX = 65_535
"""Larger indices are rejected, so that a hostile list such as 0-4000000000 costs nothing."""

MAX_CHARS = 1 << 16
MAX_PARTS = 4096
MAX_STRIDES = 64
"""Limits of a list or a mask: 8,192 CPUs have at most as many runs, and no tool prints strides.
The limits also bound the cost of a list of megabytes."""

_REMEMBERED_CHARS = 4096
_MASK_GROUP = re.compile(r"(?:0x)?0*([0-9a-fA-F]{0,8})", re.ASCII)


class CpuSet:
    """A set of CPUs. Immutable, hashable, ordered by content; backed by one integer.

    >>> CpuSet.parse("0-3,8")
    CpuSet('0-3,8')
    >>> CpuSet.parse("0-3") & CpuSet([2, 3, 4])
    CpuSet('2-3')
    >>> len(CpuSet.parse("0-31")), 5 in CpuSet.parse("0-3"), str(CpuSet())
    (32, False, '')
    """

    __slots__ = ("bits",)
    bits: int
    """Bit N is set where CPU N is in the set."""

    def __init__(self, pus: Iterable[int] = ()) -> None:
        bits = 0
        for pu in pus:
            if not 0 <= pu <= MAX_PU_INDEX:
                raise ParseError("CPU list", f"CPUs from 0 to {MAX_PU_INDEX}", str(pu))
            bits |= 1 << pu
        object.__setattr__(self, "bits", bits)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a CpuSet does not change")

    @classmethod
    def from_bits(cls, bits: int) -> "CpuSet":
        """Return the set of CPUs N whose bit N is set."""
        new = cls.__new__(cls)
        object.__setattr__(new, "bits", bits)
        return new

    @classmethod
    def union(cls, sets: "Iterable[CpuSet | None]") -> "CpuSet":
        """Return all CPUs of these sets; None counts as empty.

        >>> CpuSet.union([CpuSet.parse("0-1"), None, CpuSet.parse("4")])
        CpuSet('0-1,4')
        """
        bits = 0
        for pus in sets:
            bits |= 0 if pus is None else pus.bits
        return cls.from_bits(bits)

    @classmethod
    def parse(cls, text: str, source: str = "CPU list") -> "CpuSet":
        """Return the set of a list such as "0-3,8,10-14:2"; an empty text is the empty set.

        Also libvirt's exclusions: "0-7,^3". Raises ParseError that names the faulty part.
        Source: Documentation/core-api/cpumask.rst (lists, strides); libvirt's cpuset attribute.
        """
        stripped_text = text.strip()
        parser = _bits_remembered if len(stripped_text) <= _REMEMBERED_CHARS else _parse_bits
        try:
            return cls.from_bits(parser(stripped_text))
        except _ListError as error:
            raise ParseError(source, error.expected, error.found) from None

    @classmethod
    def parse_mask(cls, text: str, source: str = "CPU mask") -> "CpuSet":
        """Return the set of a mask such as "ff,00000003" or hwloc's "0x000000ff,0x0".

        Groups of 32 bits, the highest first. Raises ParseError.
        Source: Documentation/core-api/cpumask.rst; hwloc bitmap string format.
        """
        if len(text) > MAX_CHARS:
            raise ParseError(source, f"a mask of at most {MAX_CHARS} characters", text)
        bits = 0
        for part in text.strip().split(","):
            match = _MASK_GROUP.fullmatch(part.strip())
            if match is None:
                raise ParseError(source, "groups of at most 8 hexadecimal digits", part)
            # hwloc leaves groups of zeros empty: "0x1,,0x0"
            bits = bits << 32 | int(match[1] or "0", 16)
            if bits.bit_length() > MAX_PU_INDEX + 1:
                raise ParseError(source, f"CPUs up to {MAX_PU_INDEX}", f"{text[:40]}")
        return cls.from_bits(bits)

    def first(self) -> PuIndex | None:
        """Return the lowest CPU, or None in the empty set."""
        return PuIndex((self.bits & -self.bits).bit_length() - 1) if self.bits else None

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the runs of consecutive CPUs as (first, last), ascending."""
        bits, base = self.bits, 0
        while bits:
            zeros = (bits & -bits).bit_length() - 1
            bits >>= zeros
            base += zeros
            ones = (~bits & (bits + 1)).bit_length() - 1
            yield base, base + ones - 1
            bits >>= ones
            base += ones

    def __str__(self) -> str:
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges())

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"

    def __iter__(self) -> Iterator[PuIndex]:
        for first, last in self.ranges():
            for pu in range(first, last + 1):
                yield PuIndex(pu)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __contains__(self, pu: int) -> bool:
        return pu >= 0 and self.bits >> pu & 1 == 1

    def __and__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_bits(self.bits & other.bits)

    def __or__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_bits(self.bits | other.bits)

    def __sub__(self, other: "CpuSet") -> "CpuSet":
        return CpuSet.from_bits(self.bits & ~other.bits)

    def __le__(self, other: "CpuSet") -> bool:
        """Return whether every CPU is also in `other`."""
        return self.bits & ~other.bits == 0

    def isdisjoint(self, other: "CpuSet") -> bool:
        return self.bits & other.bits == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuSet) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash(self.bits)


class _ListError(Exception):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found = expected, found


def _parse_bits(text: str) -> int:
    """Return the CPUs of a stripped list, as bits. Raises _ListError."""
    if len(text) > MAX_CHARS:
        raise _ListError(f"a list of at most {MAX_CHARS} characters", text)
    parts = text.split(",") if text else []
    if len(parts) > MAX_PARTS or text.count(":") > MAX_STRIDES:
        raise _ListError(f"at most {MAX_PARTS} parts and {MAX_STRIDES} strides", text)
    bits = 0
    for part in parts:
        item = part.strip()
        exclude = item.startswith("^")
        span, _, stride_text = item.removeprefix("^").partition(":")
        first_text, dash, last_text = span.partition("-")
        if not (_is_decimal(first_text) and (_is_decimal(last_text) if dash else True)):
            raise _ListError("a list such as 0-3,8", part)
        # "used/group" strides (0-31:2/4) are legal in the kernel but nothing prints them.
        if stride_text and not _is_decimal(stride_text):
            raise _ListError("a whole number as stride", part)
        first = int(first_text)
        last = int(last_text) if dash else first
        stride = int(stride_text) if stride_text else 1
        if last > MAX_PU_INDEX or last < first or stride < 1:
            raise _ListError(f"an ascending range up to {MAX_PU_INDEX}", part)
        mask = (1 << (last - first + 1)) - 1
        if stride > 1:
            mask &= _repeat_bit(stride, (last - first) // stride + 1)
        bits = bits & ~(mask << first) if exclude else bits | mask << first
    return bits


_bits_remembered = lru_cache(maxsize=2048)(_parse_bits)
"""A host has few distinct lists in thousands of files."""


def _repeat_bit(stride: int, count: int) -> int:
    """Return the bit 0 and each stride-th one after it, `count` of them or more."""
    bits = filled_count = 1
    while filled_count < count:
        bits |= bits << filled_count * stride
        filled_count *= 2
    return bits


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


NodeIndex = NewType("NodeIndex", int)
"""The kernel's number of a host NUMA node: N of /sys/devices/system/node/nodeN. May be sparse."""

PackageIndex = NewType("PackageIndex", int)
"""physical_package_id. May be sparse."""

CoreIndex = NewType("CoreIndex", int)
"""Position in Host.cores: ascending lowest CPU. Unique on the host, unlike the core's OS index."""

LlcIndex = NewType("LlcIndex", int)
"""Position in Host.llcs: ascending lowest CPU."""


@lru_cache(maxsize=1 << 14)
def list_members(mask: int) -> tuple[int, ...]:
    """The positions of the set bits, ascending. Cached, as a search needs the same sets often.

    >>> list_members(0b1010)
    (1, 3)
    """
    if mask.bit_count() * 8 > mask.bit_length():
        return tuple([position for position, bit in enumerate(bin(mask)[:1:-1]) if bit == "1"])
    positions = []
    while mask:
        bit = mask & -mask
        positions.append(bit.bit_length() - 1)
        mask ^= bit
    return tuple(positions)
