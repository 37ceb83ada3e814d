"""Bounds of processor time, scaled by what a fixed piece of work takes on this machine now."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time

_REFERENCE_S = 0.016
"""Duration of the fixed piece of work, on the machine that the bounds were written for."""


@contextmanager
def cpu_time_below(seconds: float) -> Iterator[None]:
    """Fails where the block takes more processor time than `seconds` of the reference machine."""
    before = _slowness()
    start = process_time()
    yield
    spent = process_time() - start
    limit = seconds * max(1.0, before, _slowness())
    assert spent < limit, f"{spent:.3f} s of CPU, at most {limit:.3f} on this machine"


def _slowness() -> float:
    """How many times longer than on the reference machine the fixed work takes here, now."""
    start = process_time()
    total = 0
    for number in range(200_000):
        total += number & 7
    return (process_time() - start) / _REFERENCE_S
