"""Bars: bar charts of results, forest charts of effects with intervals, and their axes; effects of
layouts machine by machine, on one logarithmic axis."""

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from homenode.show.svg_canvas import CHART_WIDTH, TEXT, SvgCanvas, text_width

_SCALES = {
    "bytes_per_s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e4, "us"), (1.0, "ns")),
    "events_per_s": ((1.0, "events/s"),),
    "flop_per_s": ((1e12, "TFLOP/s"), (1.0, "FLOP/s")),
}


class Scale(Struct, frozen=True):
    """An axis from start to end (user units)."""

    low: float  # values at its ends
    high: float  # values at its ends
    start: float
    end: float
    log: bool = False  # both above 0

    def place(self, value: float) -> float:
        """Return the position of a value; values outside are placed at the end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.end - self.start)


def log_steps(low: float, high: float, base: float = 10.0, count: int = 6) -> tuple[float, ...]:
    """Return the powers of the base between two values, ends included, thinned to about `count`.

    >>> log_steps(0.8, 240)
    (1.0, 10.0, 100.0)
    """
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    return tuple(base**power for power in range(first, last + 1, stride))


def pad_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the greatest value above 0, with some space on a logarithmic axis."""
    return min(values) / 1.15, max(values) * 1.15


def choose_scale(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """Return the divisor for all values of a chart, and the resulting unit.

    >>> choose_scale("bytes_per_s", [77e9, 561e9]), choose_scale("ns", [101.0])
    ((1000000000.0, 'GB/s'), (1.0, 'ns'))
    """
    largest = max(values, default=0.0)
    scales = _SCALES.get(unit, ((1.0, unit),))
    if unit == "bytes_per_s" and largest < 1e14:
        scales = scales[1:]  # people compare GB/s, so 812.7 and 1,200 keep one unit
    divisor, name = next((scale for scale in scales if largest >= scale[0]), scales[-1])
    return (1e3, name) if name == "us" else (divisor, name)


def format_short(value: float) -> str:
    """Format a chart's value in a few characters.

    >>> format_short(561.17), format_short(0.5312), format_short(740449.0), format_short(8.0)
    ('561.2', '0.531', '740,449', '8')
    >>> format_short(2.5e6)
    '2.5e+06'
    """
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return (
        f"{value:.3g}"
        if abs(value) < 100 or abs(value) >= 1e6
        else f"{value:.1f}".removesuffix(".0")
    )


def format_range(low: float, high: float) -> str:
    """Format the ends of a range with the decimals of the finer value.

    >>> format_range(24.0, 24.1), format_range(55.0, 56.0), format_range(2.25, 30.0)
    ('24.0\u201324.1', '55\u201356', '2.25\u201330.00')
    """
    texts = [format_short(low), format_short(high)]
    return texts[0] if texts[0] == texts[1] else "\u2013".join(format_equal_digits((low, high)))


def format_equal_digits(values: Sequence[float]) -> list[str]:
    """Format adjacent values with the decimals of the finest value.

    >>> format_equal_digits((410.7, 412.0, 88.25)), format_equal_digits((739.0, 1109.0))
    (['410.7', '412.0', '88.2'], ['739', '1,109'])
    """
    texts = [format_short(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


def format_size(size_bytes: float) -> str:
    """Format a message size or working set for an axis.

    >>> format_size(8), format_size(32768), format_size(2**30), format_size(1.5 * 2**20)
    ('8 B', '32 KiB', '1 GiB', '1.5 MiB')
    """
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"


_ROW, _TALL_ROW, _GROUP, _GAP = 16.0, 31.0, 16.0, 4.0
_MAX_LABEL = 130.0
"""Wider labels are placed above their bars."""

_MIN_PLOT = 90.0
_SPACE = 8.0
_HEIGHT = 11.0


class Bar(Struct, frozen=True):
    label: str
    value: float
    # low, high: range of all samples, or the printed range; None for a single value
    low: float | None
    high: float | None
    series: int  # colour number
    text: str | None = None  # label, if not the value with its unit
    note: str = ""  # dimmed text after the label
    is_range: bool = False  # only the ends are known: the bar spans them


class BarGroup(Struct, frozen=True):
    """Bars under one heading; "" = no heading."""

    name: str
    bars: tuple[Bar, ...]


def build_bar_chart(title: str, unit: str, groups: Sequence[BarGroup], *, log: bool = False) -> str:
    """Return the SVG of these groups, in their order, on one axis from zero. log: a logarithmic
    axis, for values far apart; only the ends of its bars compare."""
    canvas = SvgCanvas.start_chart(title)
    bars = [bar for group in groups for bar in group.bars]
    largest = max(max(bar.value, bar.high or 0.0) for bar in bars)
    least = min(min(bar.value, bar.value if bar.low is None else bar.low) for bar in bars)
    divisor, name = choose_scale(unit, [largest])
    texts = [_format_value(bar, divisor, name) for bar in bars]
    right = max(
        text_width(text, TEXT, bold=True) + (text_width(bar.note, 10) + 6 if bar.note else 0)
        for text, bar in zip(texts, bars, strict=True)
    )
    right = min(right + _SPACE, CHART_WIDTH - _MIN_PLOT)
    label_width = max(text_width(bar.label, TEXT) for bar in bars) + _SPACE
    is_tall = label_width > _MAX_LABEL or CHART_WIDTH - label_width - right < _MIN_PLOT
    label_width = 0.0 if is_tall else label_width
    end = CHART_WIDTH - right
    scale = Scale(least / 2 if log else 0.0, largest, label_width, end, log=log)
    y = 0.0
    position = 0
    for group in groups:
        if group.name:
            canvas.draw_text(0, y + 12, group.name, bold=True, width=CHART_WIDTH)
            y += _GROUP
        for bar in group.bars:
            _draw(canvas, bar, texts[position], y, scale, is_tall=is_tall)
            y += _TALL_ROW if is_tall else _ROW
            position += 1
        y += _GAP
    return canvas.serialize(y)


def _format_value(bar: Bar, divisor: float, unit: str) -> str:
    if bar.text is not None:
        return bar.text
    if bar.is_range and bar.low is not None and bar.high is not None:
        return f"{format_range(bar.low / divisor, bar.high / divisor)} {unit}"
    return f"{format_short(bar.value / divisor)} {unit}"


def _draw(canvas: SvgCanvas, bar: Bar, text: str, y: float, scale: Scale, *, is_tall: bool) -> None:
    top = y + 17 if is_tall else y + 2
    if is_tall:
        canvas.draw_text(0, y + 12, bar.label, width=CHART_WIDTH)
    else:
        canvas.draw_text(0, top + 9.5, bar.label, width=scale.start - _SPACE / 2)
    tooltip = f"{bar.label}: {text}" + (f", {bar.note}" if bar.note else "")
    canvas.draw_rect(scale.start, top, scale.end - scale.start, _HEIGHT, "plot", radius=2)
    low, high = bar.low, bar.high
    has_range = low is not None and high is not None and high > low
    start = scale.place(low) if bar.is_range and has_range and low is not None else scale.start
    reach = scale.place(high) if bar.is_range and has_range and high is not None else None
    end = scale.place(bar.value) if reach is None else reach
    if reach is not None and not scale.log:  # pale from zero to the range: its bar has a length too
        canvas.draw_rect(
            scale.start, top, start - scale.start, _HEIGHT, f"s{bar.series} pale", radius=2
        )
    canvas.draw_rect(
        min(start, end - 1.5) if end - 1.5 >= scale.start else scale.start,
        top,
        max(end - start, 1.5),
        _HEIGHT,
        f"s{bar.series}",
        radius=2,
        title=tooltip,
    )
    if has_range and not bar.is_range and low is not None and high is not None:
        middle = top + _HEIGHT / 2
        ends = scale.place(low), scale.place(high)
        canvas.draw_line((ends[0], middle), (ends[1], middle), classes="whisker box")
    in_use = canvas.draw_text(
        scale.end + _SPACE / 2, top + 9.5, text, bold=True, width=CHART_WIDTH - scale.end
    )
    if bar.note:
        x = scale.end + _SPACE / 2 + in_use + 6
        canvas.draw_text(x, top + 9.5, bar.note, 10, "dim", width=CHART_WIDTH - x)


_EFFECT, _TALL_EFFECT = 36.0, 50.0
"""Tall charts have the effect as text on a separate line."""

_LEFT, _RIGHT = 8.0, CHART_WIDTH - 8.0
_ROUND = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
"""Possible ends of the axis."""


class ForestRow(Struct, frozen=True):
    """A row of a forest chart: one effect."""

    label: str
    gain: float  # ratio; above 1 is better for every metric
    low: float | None  # interval of the gain, None without one
    high: float | None  # interval of the gain, None without one
    tooltip: str  # the effect as text
    outcome: str  # "better", "worse" or "neutral" (no relevant effect, or cannot tell)


def build_forest_chart(title: str, rows: Sequence[ForestRow], end: float | None = None) -> str:
    """Return the SVG of these effects: left of the middle is worse, right of it better. end: the
    axis end, to share it between charts (`choose_axis_end`); None = fit these rows."""
    canvas = SvgCanvas.start_chart(title)
    end = choose_axis_end(rows) if end is None else end
    scale = Scale(1 / end, end, _LEFT, _RIGHT, log=True)
    top = 20.0
    is_tall = any(_measure_text(row) > _RIGHT - _LEFT for row in rows)
    height = _TALL_EFFECT if is_tall else _EFFECT
    bottom = top + height * len(rows)
    canvas.draw_text(_LEFT, 10, "← worse", 10, "dim")
    canvas.draw_text(_RIGHT, 10, "better →", 10, "dim", anchor="end")
    for ratio in (1 / end, 1.0, end):
        x = scale.place(ratio)
        anchor = {1.0: "middle", end: "end"}.get(ratio, "start")
        canvas.draw_text(x, bottom + 13, _format_ratio(ratio), 10, "dim", anchor=anchor)
    for number, row in enumerate(rows):
        _draw_effect(canvas, row, top + number * height, scale, is_tall=is_tall)
    return canvas.serialize(bottom + 18)


def _measure_text(row: ForestRow) -> float:
    return text_width(row.label, 11) + 8 + text_width(row.tooltip, 11, bold=True)


def _draw_effect(
    canvas: SvgCanvas, row: ForestRow, y: float, scale: Scale, *, is_tall: bool
) -> None:
    canvas.draw_text(_LEFT, y + 13, row.label, width=_RIGHT - _LEFT)
    canvas.draw_text(_RIGHT, y + (27 if is_tall else 13), row.tooltip, anchor="end", bold=True)
    middle = y + (38 if is_tall else 24)
    canvas.draw_line((_LEFT, middle), (_RIGHT, middle), classes="grid")
    axis_x = scale.place(1.0)
    canvas.draw_line((axis_x, middle - 7), (axis_x, middle + 7), classes="axis")
    if row.low is not None and row.high is not None:
        low, high = scale.place(row.low), scale.place(row.high)
        canvas.draw_line((low, middle), (high, middle), classes=f"whisker l{row.outcome}")
        for x in (low, high):
            canvas.draw_line((x, middle - 4), (x, middle + 4), classes=f"whisker l{row.outcome}")
    x = scale.place(row.gain)
    canvas.draw_dot(x, middle, 4.5, row.outcome, title=f"{row.label}: {row.tooltip}")
    if row.low is None:
        canvas.draw_dot(x, middle, 2.2, "box")  # hollow: one value, no interval


def choose_axis_end(rows: Sequence[ForestRow]) -> float:
    """Return the greatest ratio of an axis that fits all of these rows."""
    reach = 1.05
    for row in rows:
        for value in (row.gain, row.low, row.high):
            if value is not None and value > 0:
                reach = max(reach, math.exp(abs(math.log(value))))
    return next((end for end in _ROUND if end >= reach), _ROUND[-1])


def _format_ratio(ratio: float) -> str:
    if ratio < 1:
        return f"{(ratio - 1) * 100:.0f} %"
    return "equal" if ratio == 1.0 else f"{ratio:.2g} x"


_LANE, _DOT_GROUP, _KEY, _DOT_GAP = 16.0, 20.0, 17.0, 6.0
_DOT, _NUMBER = 4.5, 9.5

_MAX_LEFT = 118.0
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class EffectDot(Struct, frozen=True, kw_only=True):
    label: str
    ratio: float  # above 1 is a larger value, better or worse
    low: float | None  # interval, None without one
    high: float | None  # interval, None without one
    series: int  # number of its colour
    text: str  # label next to the dot


class EffectRow(Struct, frozen=True):
    """One machine: its layouts compared with the first."""

    name: str
    dots: tuple[EffectDot, ...]


class EffectGroup(Struct, frozen=True):
    """The rows of one metric."""

    name: str
    better: str  # "more is better" or "less is better"
    rows: tuple[EffectRow, ...]


def draw_effect_dots(title: str, groups: Sequence[EffectGroup], label: str) -> str:
    """Return the SVG of these groups on one axis; larger values are right of the line. label: the
    text below the line."""
    canvas = SvgCanvas.start_chart(title)
    rows = [row for group in groups for row in group.rows]
    start, low, high = _choose_axis(rows)

    def x_of(ratio: float) -> float:
        return start + (math.log(ratio) - low) * _compute_scale(rows)

    y = _draw_key(canvas, rows)
    for group in groups:
        canvas.draw_text(0, y + 13, group.name, bold=True, width=CHART_WIDTH - 110)
        canvas.draw_text(CHART_WIDTH, y + 13, group.better, 10, "dim", anchor="end")
        y += _DOT_GROUP
        lanes = [_assign_lanes(row, x_of) for row in group.rows]
        bottom = y + sum(_LANE * len(of_row) + _DOT_GAP / 2 for of_row in lanes)
        for step in _STEPS:
            if low <= math.log(step) <= high:
                kind = "axis" if step == 1.0 else "grid"
                canvas.draw_line((x_of(step), y), (x_of(step), bottom), classes=kind)
        for row, of_row in zip(group.rows, lanes, strict=True):
            _draw_row(canvas, row.name, of_row, y, start, x_of)
            y += _LANE * len(of_row) + _DOT_GAP / 2
        y += _DOT_GAP
    for step in _STEPS:
        if low <= math.log(step) <= high:
            step_text = f"{(step - 1) * 100:.0f} %" if step < 1 else f"{step:g} x"
            step_text = label if step == 1.0 else step_text
            canvas.draw_text(x_of(step), y + 6, step_text, 10, "dim", anchor="middle")
    return canvas.serialize(y + 12)


def has_lines(groups: Sequence[EffectGroup]) -> bool:
    """Return whether any dot's interval is wider than the dot, so that it is visible."""
    rows = [row for group in groups for row in group.rows]
    return any(
        abs(math.log(end / dot.ratio)) * _compute_scale(rows) > _DOT
        for row in rows
        for dot in row.dots
        for end in (dot.low, dot.high)
        if end is not None
    )


def _compute_scale(rows: Sequence[EffectRow]) -> float:
    start, low, high = _choose_axis(rows)
    return (CHART_WIDTH - start) / (high - low)


def _choose_axis(rows: Sequence[EffectRow]) -> tuple[float, float, float]:
    """Return the start of the axis, and the logarithms of its ends."""
    start = min(max(text_width(row.name, TEXT) for row in rows) + 8, _MAX_LEFT)
    ends = [
        math.log(value)
        for row in rows
        for dot in row.dots
        for value in (dot.ratio, dot.low or dot.ratio, dot.high or dot.ratio)
    ]
    return start, min(*ends, -0.2) - 0.1, max(*ends, 0.2) + 0.1


def _draw_key(canvas: SvgCanvas, rows: Sequence[EffectRow]) -> float:
    """Draw the legend of colours; return the start of the rows."""
    labels = {dot.label: dot.series for row in rows for dot in row.dots}
    x = y = 0.0
    for label, series in labels.items():
        width = text_width(label, 10) + 22
        if x and x + width > CHART_WIDTH:
            x, y = 0.0, y + _KEY
        canvas.draw_dot(x + 5, y + 8, 4.5, f"s{series}")
        canvas.draw_text(x + 13, y + 11.5, label, 10)
        x += width
    return y + _KEY + _DOT_GAP


def _assign_lanes(row: EffectRow, x_of: Callable[[float], float]) -> list[list[EffectDot]]:
    """Return a separate lane for each dot whose text would overlap another."""
    lanes: list[list[EffectDot]] = []
    ends: list[float] = []
    for dot in sorted(row.dots, key=lambda dot: dot.ratio):
        start, end = _measure_span(dot, x_of)
        lane = next((n for n, edge in enumerate(ends) if edge < start), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(0.0)
        lanes[lane].append(dot)
        ends[lane] = end
    return lanes


def _measure_span(dot: EffectDot, x_of: Callable[[float], float]) -> tuple[float, float]:
    """Return the span of a dot with its text to the right; at the edge to the left."""
    x, width = x_of(dot.ratio), text_width(dot.text, _NUMBER) + 4
    if x + _DOT + width > CHART_WIDTH:
        return x - _DOT - width, x + _DOT
    return x - _DOT, x + _DOT + width


def _draw_row(
    canvas: SvgCanvas,
    name: str,
    lanes: Sequence[Sequence[EffectDot]],
    y: float,
    edge: float,
    x_of: Callable[[float], float],
) -> None:
    canvas.draw_text(0, y + _LANE * len(lanes) / 2 + 4, name, width=edge - 6)
    for number, dots in enumerate(lanes):
        middle = y + _LANE * (number + 0.5)
        for dot in dots:
            x = x_of(dot.ratio)
            if dot.low is not None and dot.high is not None:
                ends = (x_of(dot.low), middle), (x_of(dot.high), middle)
                canvas.draw_line(*ends, classes=f"whisker l{dot.series}")
            dot_text = f"{name}, {dot.label}: {dot.text}"
            canvas.draw_dot(x, middle, _DOT, f"s{dot.series}", dot_text)
            start = _measure_span(dot, x_of)[0]
            place = x + _DOT + 2 if start == x - _DOT else start
            canvas.draw_text(place, middle + 3.5, dot.text, _NUMBER)
