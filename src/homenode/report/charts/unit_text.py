"""UnitText: figures in charts: a scale for all of them, so that each is short."""

from collections.abc import Iterable

_SCALES = {
    "bytes_per_s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e4, "us"), (1.0, "ns")),
    "events_per_s": ((1.0, "events/s"),),
    "flop_per_s": ((1e12, "TFLOP/s"), (1.0, "FLOP/s")),
}


def chart_scale(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """What all figures of a chart are divided by, and the unit that they then have.

    >>> chart_scale("bytes_per_s", [77e9, 561e9]), chart_scale("ns", [101.0])
    ((1000000000.0, 'GB/s'), (1.0, 'ns'))
    """
    most = max(values, default=0.0)
    scales = _SCALES.get(unit, ((1.0, unit),))
    if unit == "bytes_per_s" and most < 1e14:
        scales = scales[1:]  # people compare GB/s; 812.7 and 1,200 GB/s stand beside each other
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
