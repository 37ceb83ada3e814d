"""Forest: effects with their intervals on one logarithmic axis of ratios, 1 in the middle of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.report.charts.scale import Scale
from homenode.report.svg_canvas import CHART_WIDTH as WIDTH
from homenode.report.svg_canvas import SvgCanvas
from homenode.report.text_extent import text_width

_ROW, _TALL_ROW = 36.0, 50.0
"""Tall ones have the effect in words on a line of its own."""

_LEFT, _RIGHT = 8.0, WIDTH - 8.0
_ROUND = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
"""Ends that the axis may have."""


@dataclass(frozen=True, slots=True)
class ForestRow:
    """One effect. gain: a ratio above 1 is better, whatever the metric's direction.

    low, high: of the interval of the gain, None where there is none. said: the effect in words.
    outcome: "better", "worse" or "neutral" (none that matters, or cannot tell).
    """

    label: str
    gain: float
    low: float | None
    high: float | None
    said: str
    outcome: str


def forest_chart(title: str, rows: Sequence[ForestRow], end: float | None = None) -> str:
    """The SVG of these effects: left of the middle is worse, right of it better.

    end: of the axis, so that several charts have the same (`axis_end`); None = what these need.
    """
    canvas = SvgCanvas.chart(title)
    end = axis_end(rows) if end is None else end
    scale = Scale(1 / end, end, _LEFT, _RIGHT, log=True)
    top = 20.0
    is_tall = any(_in_use(row) > _RIGHT - _LEFT for row in rows)
    height = _TALL_ROW if is_tall else _ROW
    bottom = top + height * len(rows)
    canvas.text(_LEFT, 10, "← worse", 10, "dim")
    canvas.text(_RIGHT, 10, "better →", 10, "dim", anchor="end")
    for ratio in (1 / end, 1.0, end):
        x = scale.at(ratio)
        anchor = {1.0: "middle", end: "end"}.get(ratio, "start")
        canvas.text(x, bottom + 13, _ratio_text(ratio), 10, "dim", anchor=anchor)
    for number, row in enumerate(rows):
        _draw(canvas, row, top + number * height, scale, is_tall=is_tall)
    return canvas.svg(bottom + 18)


def _in_use(row: ForestRow) -> float:
    return text_width(row.label, 11) + 8 + text_width(row.said, 11, bold=True)


def _draw(canvas: SvgCanvas, row: ForestRow, y: float, scale: Scale, *, is_tall: bool) -> None:
    canvas.text(_LEFT, y + 13, row.label, width=_RIGHT - _LEFT)
    canvas.text(_RIGHT, y + (27 if is_tall else 13), row.said, anchor="end", bold=True)
    middle = y + (38 if is_tall else 24)
    canvas.line((_LEFT, middle), (_RIGHT, middle), classes="grid")
    equal = scale.at(1.0)
    canvas.line((equal, middle - 7), (equal, middle + 7), classes="axis")
    if row.low is not None and row.high is not None:
        low, high = scale.at(row.low), scale.at(row.high)
        canvas.line((low, middle), (high, middle), classes=f"whisker l{row.outcome}")
        for x in (low, high):
            canvas.line((x, middle - 4), (x, middle + 4), classes=f"whisker l{row.outcome}")
    x = scale.at(row.gain)
    canvas.dot(x, middle, 4.5, row.outcome, title=f"{row.label}: {row.said}")
    if row.low is None:
        canvas.dot(x, middle, 2.2, "box")  # hollow: one figure, no interval


def axis_end(rows: Sequence[ForestRow]) -> float:
    """The greatest ratio of an axis that holds all of these."""
    reach = 1.05
    for row in rows:
        for value in (row.gain, row.low, row.high):
            if value is not None and value > 0:
                reach = max(reach, math.exp(abs(math.log(value))))
    return next((end for end in _ROUND if end >= reach), _ROUND[-1])


def _ratio_text(ratio: float) -> str:
    return "equal" if ratio == 1.0 else f"{ratio:.2g} x"
