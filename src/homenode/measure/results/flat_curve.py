"""Flat curve: a sweep over message sizes that meets a hard ceiling.

A healthy curve climbs for tens of megabytes, while set-up costs are spread over more bytes. One
that is flat from kilobytes on has met a limit that size does not change: a link trained at a low
speed, or one root complex that all GPUs share. Source: the study's 8 RTX 5090 behind Gen 2 links,
0.53 GB/s from 64 KiB to 1 GiB.
"""

from collections.abc import Sequence

from homenode.units import MIB

FLAT_FROM_BYTES = MIB
"""A plateau that begins at or below this size begins too early."""

FLAT_WITHIN = 0.10
"""Of the peak: what still counts as flat."""

FLAT_SPAN = 64
"""Largest to first size of a plateau: six doublings or more."""


def flat_from(points: Sequence[tuple[int, float]], peak: float) -> int | None:
    """The first size of a plateau that begins too early; None where none does.

    points: (size, rate), ascending. Every figure from there to the largest size is near the peak.
    """
    start = len(points)
    while start > 0 and points[start - 1][1] >= peak * (1 - FLAT_WITHIN):
        start -= 1
    if start == len(points):
        return None
    first, last = points[start][0], points[-1][0]
    return first if first <= FLAT_FROM_BYTES and last >= first * FLAT_SPAN else None
