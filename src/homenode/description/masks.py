"""Masks: sets of PUs or nodes as the kernel prints them in the files next to its lists."""

from homenode.cpuset import CpuSet


def mask(pus: CpuSet, width_bits: int) -> str:
    """Hexadecimal groups of 32 bits, the highest first, as wide as the kernel's set.

    >>> mask(CpuSet([0, 33]), 40), mask(CpuSet([0, 1, 2, 3]), 8)
    ('02,00000001', '0f')

    Source: lib/vsprintf.c of the Linux kernel, %*pb.
    """
    groups = max(1, -(-width_bits // 32))
    words = [f"{pus.bits >> 32 * i & 0xFFFFFFFF:08x}" for i in reversed(range(groups))]
    top_bits = width_bits - 32 * (groups - 1)
    words[0] = words[0][8 - -(-top_bits // 4) :]
    return ",".join(words)
