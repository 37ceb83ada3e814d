"""KernelImage: the program inside a compressed Linux kernel, for guests in which every step counts.

A kernel that unpacks itself does so in the guest; emulated twice, that is minutes.
Source: Documentation/arch/x86/boot.rst of Linux (setup_sects, payload_offset, payload_length) and
the LZ4 legacy frame and block formats of lz4/doc.
"""

_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_MORE = 15
"""A length of four bits that goes on in bytes of its own."""


def unpacked(kernel: bytes) -> bytes:
    """The ELF inside a bzImage compressed by LZ4, which QEMU starts by its PVH entry; any other
    kernel as it is."""
    if kernel[0x202:0x206] != b"HdrS":
        return kernel
    payload_at = ((kernel[0x1F1] or 4) + 1) * 512 + _number(kernel, 0x248)
    payload = kernel[payload_at : payload_at + _number(kernel, 0x24C)]
    return _frame(payload) if payload.startswith(_LZ4_LEGACY) else kernel


def _frame(payload: bytes) -> bytes:
    """Blocks, each behind its size; the last four bytes are the size of it all."""
    found = bytearray()
    at, end = len(_LZ4_LEGACY), len(payload) - 4
    while at < end:
        size = _number(payload, at)
        found += _block(payload[at + 4 : at + 4 + size])
        at += 4 + size
    assert len(found) == _number(payload, end), "the kernel gives its size behind the last block"
    return bytes(found)


def _block(packed: bytes) -> bytearray:
    """Literals and copies of what came before, in turn; the last ones are literals."""
    found = bytearray()
    at = 0
    while at < len(packed):
        token = packed[at]
        count, at = _length(packed, at + 1, token >> 4)
        found += packed[at : at + count]
        at += count
        if at == len(packed):
            break
        back = packed[at] | packed[at + 1] << 8
        count, at = _length(packed, at + 2, token & _MORE)
        count += 4
        start = len(found) - back
        if back >= count:
            found += found[start : start + count]
        else:  # it overlaps what it makes: a pattern that repeats
            pattern = bytes(found[start:])
            found += (pattern * (count // back + 1))[:count]
    return found


def _length(packed: bytes, at: int, first: int) -> tuple[int, int]:
    """A length, and where the next thing begins."""
    if first == _MORE:
        while packed[at] == 255:
            first += 255
            at += 1
        first += packed[at]
        at += 1
    return first, at


def _number(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 4], "little")
