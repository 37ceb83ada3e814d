"""Words: figures and differences as people read them."""

_SCALES = {
    "bytes_per_s": (1e9, "GB/s"),
    "events_per_s": (1.0, "events/s"),
    "flop_per_s": (1e12, "TFLOP/s"),
    "units_per_s": (1.0, "units/s"),
    "bytes": (1 << 20, "MiB"),
}


def figure_text(value: float, unit: str) -> str:
    """A figure with the unit that people use for it, four digits at most where there are decimals.

    >>> figure_text(561.17e9, "bytes_per_s"), figure_text(101.0, "ns"), figure_text(21.1e6, "ns")
    ('561.2 GB/s', '101 ns', '21.1 ms')
    >>> figure_text(740449, "events_per_s"), figure_text(0.425, "ratio")
    ('740,449 events/s', '0.425 of the reference')
    >>> figure_text(102.0, "units_per_s"), figure_text(32 << 20, "bytes")
    ('102 units/s', '32 MiB')
    """
    if unit == "ns":
        for scale, name in ((1e9, "s"), (1e6, "ms"), (1e4, "us")):
            if abs(value) >= scale:
                return f"{_digits(value / (1e3 if name == 'us' else scale))} {name}"
        return f"{_digits(value)} ns"
    if unit == "ratio":
        return f"{_digits(value)} of the reference"
    scale, name = _SCALES.get(unit, (1.0, unit))
    return f"{_digits(value / scale)} {name}"


def percent_text(ratio: float) -> str:
    """A ratio as a change, in factors where it is large.

    >>> percent_text(1.026), percent_text(0.43), percent_text(4.646), percent_text(1.0)
    ('+2.6 %', '-57 %', '4.65 times', '0 %')
    """
    if ratio >= 2:
        return f"{ratio:.3g} times"
    change = (ratio - 1) * 100
    text = f"{change:+.1f}" if abs(change) < 10 else f"{change:+.0f}"
    return "0 %" if text in ("+0.0", "-0.0") else f"{text.removesuffix('.0')} %"


def range_text(low: float, high: float) -> str:
    """Two ratios as a range of changes, the unit once where both have the same.

    >>> range_text(0.83, 0.88), range_text(1.5, 7.37), range_text(7.14, 7.37)
    ('-17 to -12 %', '+50 % to 7.37 times', '7.14 to 7.37 times')
    """
    first, last = percent_text(low), percent_text(high)
    unit = last.rpartition(" ")[2]
    return f"{first.removesuffix(f' {unit}')} to {last}"


def _digits(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
