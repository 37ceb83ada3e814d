"""Config space: what of a bridge's PCI configuration space is worth keeping.

Discovery wants the port type. Vendor capabilities may hold anything, so they are blanked.

Source: PCI Local Bus 3.0, 6.7 (capability list); PCIe 6.0, 7.5.3 (PCI Express capability).
"""

HEADER_BYTES = 64
"""What the kernel shows to users who are not root."""

_CONVENTIONAL_BYTES = 256
_CAPABILITIES_POINTER = 0x34
_PCI_EXPRESS = 0x10
_PCI_EXPRESS_BYTES = 0x3C


def keep_port_type(config: bytes) -> bytes | None:
    """Header, capability list and PCI Express capability; all else is zero.

    Shape (64,) or (256,), as it came; extended space is cut off. None where it is shorter.

    >>> config = bytearray(range(256))
    >>> config[0x34], config[0x80:0x82], config[0x40:0x44] = 0x80, (0x09, 0x40), (0x10, 0, 0x42, 0)
    >>> kept = keep_port_type(bytes(config))
    >>> kept[0x40:0x44].hex(), kept[0x80:0x84].hex(), kept[0xF0:].hex()
    ('10004200', '09400000', '00000000000000000000000000000000')
    """
    if len(config) < HEADER_BYTES:
        return None
    if len(config) < _CONVENTIONAL_BYTES:
        return config[:HEADER_BYTES]
    kept = bytearray(_CONVENTIONAL_BYTES)
    kept[:HEADER_BYTES] = config[:HEADER_BYTES]
    at = config[_CAPABILITIES_POINTER] & ~3
    seen: set[int] = set()
    while HEADER_BYTES <= at < _CONVENTIONAL_BYTES and at not in seen:
        seen.add(at)
        length = _PCI_EXPRESS_BYTES if config[at] == _PCI_EXPRESS else 2
        end = min(at + length, _CONVENTIONAL_BYTES)
        kept[at:end] = config[at:end]
        at = config[at + 1] & ~3
    return bytes(kept)
