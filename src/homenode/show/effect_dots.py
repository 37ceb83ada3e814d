"""EffectDots: what each layout changes, machine by machine, on one logarithmic axis."""

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from homenode.decide.words import multiple_text
from homenode.show.svg_canvas import CHART_WIDTH, TEXT, SvgCanvas, text_width

_ROW, _GROUP, _KEY, _GAP = 19.0, 20.0, 17.0, 6.0
_RIGHT = 68.0
"""Of the plot: the figure that is furthest from 1, with a dot in the colour of its layout."""

_MOST_LEFT = 118.0
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class EffectDot(Struct, frozen=True, kw_only=True):
    """One layout. ratio: above 1 is more, whatever is better; low, high: its interval, None where
    there is none. series: number of its colour."""

    label: str
    ratio: float
    low: float | None
    high: float | None
    series: int


class EffectRow(Struct, frozen=True):
    """One machine, and its layouts against its first."""

    name: str
    dots: tuple[EffectDot, ...]


class EffectGroup(Struct, frozen=True):
    """One metric. better: "more is better" or "less is better"."""

    name: str
    better: str
    rows: tuple[EffectRow, ...]


def effect_dots(title: str, groups: Sequence[EffectGroup], equal: str) -> str:
    """The SVG of these groups, one below the other on one axis; right of the line is more.

    equal: what stands below the line.
    """
    canvas = SvgCanvas.chart(title)
    rows = [row for group in groups for row in group.rows]
    left = min(max(text_width(row.name, TEXT) for row in rows) + 8, _MOST_LEFT)
    ends = [
        math.log(value)
        for row in rows
        for dot in row.dots
        for value in (dot.ratio, dot.low or dot.ratio, dot.high or dot.ratio)
    ]
    low, high = min(*ends, -0.2) - 0.1, max(*ends, 0.2) + 0.1
    right = CHART_WIDTH - _RIGHT

    def at(ratio: float) -> float:
        return left + (math.log(ratio) - low) / (high - low) * (right - left)

    top = _key(canvas, rows)
    y = top
    for group in groups:
        canvas.text(0, y + 13, group.name, bold=True, width=CHART_WIDTH - 110)
        canvas.text(CHART_WIDTH, y + 13, group.better, 10, "dim", anchor="end")
        y += _GROUP
        bottom = y + _ROW * len(group.rows)
        for step in _STEPS:
            if low <= math.log(step) <= high:
                kind = "axis" if step == 1.0 else "grid"
                canvas.line((at(step), y), (at(step), bottom), classes=kind)
        for row in group.rows:
            _draw(canvas, row, y, left, at)
            y += _ROW
        y += _GAP
    for step in _STEPS:
        if low <= math.log(step) <= high:
            said = equal if step == 1.0 else f"{step:g} x"
            canvas.text(at(step), y + 6, said, 10, "dim", anchor="middle")
    return canvas.svg(y + 12)


def _key(canvas: SvgCanvas, rows: Sequence[EffectRow]) -> float:
    """Which colour is which layout; returns where the rows begin."""
    labels = {dot.label: dot.series for row in rows for dot in row.dots}
    x = y = 0.0
    for label, series in labels.items():
        width = text_width(label, 10) + 22
        if x and x + width > CHART_WIDTH:
            x, y = 0.0, y + _KEY
        canvas.dot(x + 5, y + 8, 4.5, f"s{series}")
        canvas.text(x + 13, y + 11.5, label, 10)
        x += width
    return y + _KEY + _GAP


def _draw(
    canvas: SvgCanvas, row: EffectRow, y: float, left: float, at: Callable[[float], float]
) -> None:
    middle = y + _ROW / 2
    canvas.text(0, middle + 4, row.name, width=left - 6)
    for dot in row.dots:
        if dot.low is not None and dot.high is not None:
            ends = (at(dot.low), middle), (at(dot.high), middle)
            canvas.line(*ends, classes=f"whisker l{dot.series}")
        canvas.dot(
            at(dot.ratio),
            middle,
            4.5,
            f"s{dot.series}",
            f"{row.name}, {dot.label}: {dot.ratio:.3g} x",
        )
    furthest = max(row.dots, key=lambda dot: abs(math.log(dot.ratio)))
    said = multiple_text(furthest.ratio)
    canvas.text(CHART_WIDTH, middle + 4, said, 10, anchor="end", bold=True)
    canvas.dot(CHART_WIDTH - 56, middle, 3, f"s{furthest.series}")
