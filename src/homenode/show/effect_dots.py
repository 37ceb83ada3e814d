"""EffectDots: the effect of each layout, machine by machine, on one logarithmic axis."""

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from homenode.show.svg_canvas import CHART_WIDTH, TEXT, SvgCanvas, text_width

_LANE, _GROUP, _KEY, _GAP = 16.0, 20.0, 17.0, 6.0
_DOT, _NUMBER = 4.5, 9.5

_MAX_LEFT = 118.0
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class EffectDot(Struct, frozen=True, kw_only=True):
    label: str
    ratio: float  # above 1 is a larger value, better or worse
    low: float | None  # interval, None without one
    high: float | None  # interval, None without one
    series: int  # number of its colour
    text: str  # label beside the dot


class EffectRow(Struct, frozen=True):
    """One machine: its layouts compared with the first."""

    name: str
    dots: tuple[EffectDot, ...]


class EffectGroup(Struct, frozen=True):
    """The rows of one metric."""

    name: str
    better: str  # "more is better" or "less is better"
    rows: tuple[EffectRow, ...]


def draw_effect_dots(title: str, groups: Sequence[EffectGroup], equal: str) -> str:
    """Return the SVG of these groups on one axis; larger values are right of the line. equal: the
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
        y += _GROUP
        lanes = [_assign_lanes(row, x_of) for row in group.rows]
        bottom = y + sum(_LANE * len(of_row) + _GAP / 2 for of_row in lanes)
        for step in _STEPS:
            if low <= math.log(step) <= high:
                kind = "axis" if step == 1.0 else "grid"
                canvas.draw_line((x_of(step), y), (x_of(step), bottom), classes=kind)
        for row, of_row in zip(group.rows, lanes, strict=True):
            _draw(canvas, row.name, of_row, y, start, x_of)
            y += _LANE * len(of_row) + _GAP / 2
        y += _GAP
    for step in _STEPS:
        if low <= math.log(step) <= high:
            step_text = f"{(step - 1) * 100:.0f} %" if step < 1 else f"{step:g} x"
            step_text = equal if step == 1.0 else step_text
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
    return y + _KEY + _GAP


def _assign_lanes(row: EffectRow, x_of: Callable[[float], float]) -> list[list[EffectDot]]:
    """Return a separate lane for each dot whose text would overlap another."""
    lanes: list[list[EffectDot]] = []
    ends: list[float] = []
    for dot in sorted(row.dots, key=lambda dot: dot.ratio):
        start, end = _measure_span(dot, x_of)
        lane = next((n for n, taken in enumerate(ends) if taken < start), len(lanes))
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


def _draw(
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
