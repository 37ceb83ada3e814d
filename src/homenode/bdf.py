"""Bdf: the address of a PCI function on the host, domain:bus:device.function."""

import re
from functools import total_ordering
from typing import Self

from homenode.errors import ParseError

_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<bus>[0-9a-fA-F]{2}):"
    r"(?P<device>[0-9a-fA-F]{2})\.(?P<function>[0-7])\Z",
    re.ASCII,
)


@total_ordering
class PciAddress:
    """domain:bus:device.function, immutable. Subclasses distinguish host and guest addresses, which
    are never equal and cannot be ordered against each other."""

    __slots__ = ("_hash", "_key")
    _key: tuple[int, int, int, int]
    _hash: int

    def __init__(self, domain: int, bus: int, device: int, function: int) -> None:
        in_range = 0 <= domain < 1 << 32 and 0 <= bus < 256 and 0 <= device < 32
        if not (in_range and 0 <= function < 8):
            raise ParseError(
                "PCI address",
                "domain below 2^32, bus below 256, device below 32, function below 8",
                f"{domain:#x}:{bus:#x}:{device:#x}.{function:#x}",
            )
        key = (domain, bus, device, function)
        object.__setattr__(self, "_key", key)
        # Addresses are keys of most tables of the planner: the hash is computed once.
        object.__setattr__(self, "_hash", hash(key))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a PCI address does not change")

    @classmethod
    def parse(cls, text: str, source: str = "PCI address") -> Self:
        """Return the address of a text such as 0000:3b:00.0 or 3b:00.0 (domain 0). Domains have 4
        digits, or up to 8 (VMD and Hyper-V). Raises ParseError."""
        match = _ADDRESS.match(text.strip())
        if match is None or int(match["device"], 16) > 31:
            raise ParseError(source, "domain:bus:device.function such as 0000:3b:00.0", text)
        return cls(
            int(match["domain"] or "0", 16),
            int(match["bus"], 16),
            int(match["device"], 16),
            int(match["function"], 16),
        )

    @property
    def domain(self) -> int:
        return self._key[0]

    @property
    def bus(self) -> int:
        return self._key[1]

    @property
    def device(self) -> int:
        return self._key[2]

    @property
    def function(self) -> int:
        return self._key[3]

    def __str__(self) -> str:
        domain, bus, device, function = self._key
        return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key == other._key

    def __lt__(self, other: Self) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key < other._key

    def __hash__(self) -> int:
        return self._hash


class Bdf(PciAddress):
    """One PCI function of the host. Ordered as the host enumerates.

    >>> Bdf.parse("3b:00.0")
    Bdf('0000:3b:00.0')
    >>> str(Bdf.parse("0000:3B:00.0")), Bdf.parse("10000:00:1f.7").domain
    ('0000:3b:00.0', 65536)
    """

    __slots__ = ()
