"""Bit sets: small sets of positions, as the bits of a number."""

from functools import lru_cache


@lru_cache(maxsize=1 << 14)
def members(mask: int) -> tuple[int, ...]:
    """The positions of the set bits, ascending. Cached, as a search needs the same sets often.

    >>> members(0b1010)
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
