"""Scale: from figures to places on an axis, with the round figures that are written beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from start to end (user units). low, high: figures at its ends. log: both above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a figure; what lies outside is put at the end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.end - self.start)


def log_steps(low: float, high: float, base: float = 10.0, most: int = 6) -> tuple[float, ...]:
    """Powers of the base between two figures, ends included, thinned to at most about `most`.

    >>> log_steps(0.8, 240)
    (1.0, 10.0, 100.0)
    """
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    return tuple(base**power for power in range(first, last + 1, stride))


def bounds(values: Sequence[float], room: float = 1.15) -> tuple[float, float]:
    """The least and the greatest of figures above 0, with some room on a logarithmic axis."""
    return min(values) / room, max(values) * room
