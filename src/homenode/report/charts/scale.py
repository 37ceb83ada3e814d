"""Scale: from figures to places on an axis, and to the few letters that are written at it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SCALES = {
    "bytes_per_s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e4, "us"), (1.0, "ns")),
    "events_per_s": ((1.0, "events/s"),),
    "flop_per_s": ((1e12, "TFLOP/s"), (1.0, "FLOP/s")),
}


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


def bounds(values: Sequence[float], space: float = 1.15) -> tuple[float, float]:
    """The least and the greatest of figures above 0, with some space on a logarithmic axis."""
    return min(values) / space, max(values) * space


def chart_scale(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """What all figures of a chart are divided by, and the unit that they then have.

    >>> chart_scale("bytes_per_s", [77e9, 561e9]), chart_scale("ns", [101.0])
    ((1000000000.0, 'GB/s'), (1.0, 'ns'))
    """
    most = max(values, default=0.0)
    scales = _SCALES.get(unit, ((1.0, unit),))
    if unit == "bytes_per_s" and most < 1e14:
        scales = scales[1:]  # people compare GB/s; 812.7 and 1,200 GB/s stand next to each other
    divisor, name = next((one for one in scales if most >= one[0]), scales[-1])
    return (1e3, name) if name == "us" else (divisor, name)


def short_figure(value: float) -> str:
    """A figure of a chart in a few letters.

    >>> short_figure(561.17), short_figure(0.5312), short_figure(740449.0), short_figure(8.0)
    ('561.2', '0.531', '740,449', '8')
    >>> short_figure(2.5e6)
    '2.5e+06'
    """
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return (
        f"{value:.3g}"
        if abs(value) < 100 or abs(value) >= 1e6
        else f"{value:.1f}".removesuffix(".0")
    )


def range_figures(low: float, high: float) -> str:
    """Two figures of a range, with as many decimals as the finer one has.

    >>> range_figures(24.0, 24.1), range_figures(55.0, 56.0), range_figures(2.25, 30.0)
    ('24.0\u201324.1', '55\u201356', '2.25\u201330.00')
    """
    texts = [short_figure(low), short_figure(high)]
    return texts[0] if texts[0] == texts[1] else "\u2013".join(alike_figures((low, high)))


def alike_figures(values: Sequence[float]) -> list[str]:
    """Figures that stand next to each other, with as many decimals as the finest one has.

    >>> alike_figures((410.7, 412.0, 88.25)), alike_figures((739.0, 1109.0))
    (['410.7', '412.0', '88.2'], ['739', '1,109'])
    """
    texts = [short_figure(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


def size_text(size_bytes: float) -> str:
    """A message or working set on an axis.

    >>> size_text(8), size_text(32768), size_text(2**30), size_text(1.5 * 2**20)
    ('8 B', '32 KiB', '1 GiB', '1.5 MiB')
    """
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
