"""Fields: numbers, sizes, sets and addresses as libvirt spells them in a domain document."""

import re
from collections.abc import Iterable

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.units import KIB, to_bytes
from homenode.vm.domain.document import Element
from homenode.vm.model import GuestAddress

_DECIMAL = re.compile(r"\s*\+?(\d{1,19})\s*\Z", re.ASCII)
_ANY_BASE = re.compile(r"\s*(0[xX][0-9a-fA-F]{1,8}|0[0-7]{1,10}|0|[1-9]\d{0,9})\s*\Z", re.ASCII)


def name_place(element: Element) -> str:
    """Return SOURCE:LINE: <TAG>, for messages."""
    return f"{element.source}:{element.line}: <{element.tag}>"


def parse_decimal(element: Element, text: str, meaning: str) -> int:
    """Parse a whole number in decimal digits. Raises ParseError."""
    match = _DECIMAL.match(text)
    if match is None:
        raise ParseError(element.source, f"{meaning}, a whole number", text, line=element.line)
    return int(match[1])


def parse_any_base(element: Element, text: str, meaning: str) -> int:
    """Parse a number in C syntax: 0x1f, 037 or 31, as libvirt reads addresses and busNr. Raises
    ParseError. Source: virStrToLong_uip with base 0 in virPCIDeviceAddressParseXML."""
    match = _ANY_BASE.match(text)
    if match is None:
        raise ParseError(element.source, f"{meaning}, such as 0x1f or 31", text, line=element.line)
    digits = match[1]
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    return int(digits, 8 if digits.startswith("0") else 10)


def size_bytes(element: Element, text: str, unit: str | None) -> int:
    """Return the bytes of a size with libvirt's unit attribute; by default KiB. Rounded up to whole
    KiB, in which libvirt keeps every size of a domain. Raises ParseError or InputError."""
    number = parse_decimal(element, text, f"the size in <{element.tag}>")
    try:
        return -(-to_bytes(number, "KiB" if unit is None else unit) // KIB) * KIB
    except InputError as error:
        raise InputError(f"{name_place(element)}: {error.message}") from None


def read_size(element: Element) -> int:
    """Return the bytes of a size element. Raises like size_bytes."""
    return size_bytes(element, element.text, element.get("unit"))


def number(element: Element, attribute: str, meaning: str | None = None) -> int:
    """Return the whole number in a required attribute. Raises ParseError."""
    return parse_decimal(element, require_attribute(element, attribute), meaning or attribute)


def pu_set(element: Element, attribute: str) -> CpuSet | None:
    """Return the set in an attribute, None if it is missing. Raises ParseError."""
    text = element.get(attribute)
    if text is None:
        return None
    return CpuSet.parse(text, f"{name_place(element)} {attribute}")


def require_attribute(element: Element, attribute: str) -> str:
    """Return the value of a required attribute. Raises ParseError."""
    value = element.get(attribute)
    if value is None:
        raise ParseError(
            element.source,
            f"<{element.tag}> with {attribute}=",
            f"<{element.tag}> without it",
            line=element.line,
        )
    return value


def _read_parts(address: Element) -> tuple[int, int, int, int]:
    """Return (domain, bus, device, function); a missing attribute is 0."""
    numbers = []
    for name, limit in (("domain", 1 << 32), ("bus", 256), ("slot", 32), ("function", 8)):
        text = address.get(name) or "0"
        number = parse_any_base(address, text, f"a PCI {name}")
        if number >= limit:
            raise ParseError(
                address.source, f"a PCI {name} below {limit:#x}", text, line=address.line
            )
        numbers.append(number)
    return numbers[0], numbers[1], numbers[2], numbers[3]


def host_address(address: Element) -> Bdf:
    """Return the host function in a <source>'s <address>. Raises ParseError."""
    return Bdf(*_read_parts(address))


def guest_address(owner: Element) -> GuestAddress | None:
    """Return a device's guest address; None if libvirt chooses it. An address of zeros means
    "choose one" too. Source: virDeviceInfoPCIAddressIsWanted."""
    address = owner.child("address")
    if address is None or address.get("type") != "pci":
        return None
    parts = _read_parts(address)
    return GuestAddress(*parts) if any(parts[:3]) else None


def address_attributes(address: PciAddress) -> dict[str, str | None]:
    """Return the attributes of an address as libvirt prints them."""
    return {
        "domain": f"0x{address.domain:04x}",
        "bus": f"0x{address.bus:02x}",
        "slot": f"0x{address.device:02x}",
        "function": f"0x{address.function:x}",
    }


def format_set(numbers: Iterable[int]) -> str:
    """Format a set as the study does: pairs are listed, three or more consecutive are a range.

    >>> format_set([28, 29]), format_set(range(28)), format_set([0, 1, 4, 5, 6])
    ('28,29', '0-27', '0,1,4-6')
    """
    parts = (
        f"{first}-{last}" if last - first > 1 else ",".join(map(str, range(first, last + 1)))
        for first, last in CpuSet(numbers).ranges()
    )
    return ",".join(parts)


def format_size(size: int, units: tuple[str, ...]) -> tuple[str, str]:
    """Return (number, unit) in the first unit that represents the size exactly, else in KiB.

    >>> format_size(768 << 30, ("MiB",)), format_size(1536, ("GiB", "MiB"))
    (('786432', 'MiB'), ('2', 'KiB'))

    Sizes are rounded up to whole KiB, as libvirt does.
    """
    for unit in units:
        if size % to_bytes(1, unit) == 0:
            return str(size // to_bytes(1, unit)), unit
    return str(-(-size // KIB)), "KiB"
