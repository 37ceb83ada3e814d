"""LinkRate: speed and width of a PCIe link as bytes per second, and back.

Source: PCIe 6.0, 4.2 (8b/10b and 128b/130b encoding; 236 of 256 bytes of a flit are payload).
"""

from msgspec import Struct

SPEEDS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)
"""GT/s of generations 1 to 6."""

WIDTHS = (1, 2, 4, 8, 16)

_BITS_PER_TRANSFER = {2.5: 8 / 10, 5.0: 8 / 10, 64.0: 236 / 256}
_REACHED = 0.6
"""Copies of large pinned buffers reach at least this share of a link's rate, and never more than
the rate. Measured: 26 of 31.5, 57 of 63, 12.6 of 15.8 and 5.3 of 8 GB/s."""


class LinkRate(Struct, frozen=True):
    """Speed in GT/s a lane, and lanes.

    >>> str(LinkRate(5.0, 16)), round(LinkRate(32.0, 16).bytes_per_s / 1e9, 1)
    ('5 GT/s x16', 63.0)
    >>> LinkRate(5.0, 16).bytes_per_s / 1e9, LinkRate(8.0, 8).generation
    (8.0, 3)
    """

    gt_per_s: float
    width: int

    @property
    def bytes_per_s(self) -> float:
        """In one direction, after encoding, before packet headers."""
        bits = _BITS_PER_TRANSFER.get(self.gt_per_s, 128 / 130)
        return self.gt_per_s * 1e9 * bits * self.width / 8

    @property
    def generation(self) -> int:
        """1 for 2.5 GT/s; speeds between two generations count as the lower."""
        return max(1, sum(speed <= self.gt_per_s for speed in SPEEDS))

    def __str__(self) -> str:
        return f"{self.gt_per_s:g} GT/s x{self.width}"

    @property
    def as_generation(self) -> str:
        """
        >>> LinkRate(5.0, 16).as_generation
        'Gen2 x16'
        """
        return f"Gen{self.generation} x{self.width}"

    def with_rate(self) -> str:
        """
        >>> LinkRate(5.0, 16).with_rate()
        '5 GT/s x16 (8.0 GB/s)'
        """
        return f"{self} ({gigabytes(self.bytes_per_s)})"


def least(a: LinkRate, b: LinkRate) -> LinkRate:
    """What both can: the lower speed and the lower width."""
    return LinkRate(min(a.gt_per_s, b.gt_per_s), min(a.width, b.width))


def gigabytes(bytes_per_s: float) -> str:
    """
    >>> gigabytes(63.01e9)
    '63.0 GB/s'
    """
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def rates_that_fit(bytes_per_s: float, most: LinkRate) -> tuple[LinkRate, ...]:
    """Links up to `most` over which a copy of that rate may have gone, the lowest speed first.

    >>> [str(rate) for rate in rates_that_fit(5.3e9, LinkRate(16.0, 16))]
    ['5 GT/s x16', '8 GT/s x8', '16 GT/s x4']
    """
    return tuple(
        rate
        for speed in SPEEDS
        for width in reversed(WIDTHS)
        if speed <= most.gt_per_s and width <= most.width
        if (rate := LinkRate(speed, width)).bytes_per_s * _REACHED <= bytes_per_s
        and bytes_per_s <= rate.bytes_per_s
    )
