"""Forest: effects with their intervals on one logarithmic axis of ratios, 1 in the middle of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from homenode.report.charts.drawing import WIDTH, Drawing
from homenode.report.charts.scale import Scale
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


def forest_chart(title: str, rows: Sequence[ForestRow]) -> str:
    """The SVG of these effects: left of the middle line is worse, right of it better."""
    drawing = Drawing(title)
    end = _end(rows)
    scale = Scale(1 / end, end, _LEFT, _RIGHT, log=True)
    top = 20.0
    is_tall = any(_taken(row) > _RIGHT - _LEFT for row in rows)
    height = _TALL_ROW if is_tall else _ROW
    bottom = top + height * len(rows)
    drawing.text(_LEFT, 10, "← worse", "dim", size=10)
    drawing.text(_RIGHT, 10, "better →", "dim", size=10, anchor="end")
    for ratio in (1 / end, 1.0, end):
        x = scale.at(ratio)
        drawing.line((x, top), (x, bottom), classes="axis" if ratio == 1.0 else "grid")
        anchor = {1.0: "middle", end: "end"}.get(ratio, "start")
        drawing.text(x, bottom + 13, _ratio_text(ratio), "dim", size=10, anchor=anchor)
    for number, row in enumerate(rows):
        _draw(drawing, row, top + number * height, scale, is_tall=is_tall)
    return drawing.svg(bottom + 18)


def _taken(row: ForestRow) -> float:
    return text_width(row.label, 11) + 8 + text_width(row.said, 11, bold=True)


def _draw(drawing: Drawing, row: ForestRow, y: float, scale: Scale, *, is_tall: bool) -> None:
    drawing.text(_LEFT, y + 13, row.label, room=_RIGHT - _LEFT)
    drawing.text(_RIGHT, y + (27 if is_tall else 13), row.said, anchor="end", bold=True)
    middle = y + (38 if is_tall else 24)
    if row.low is not None and row.high is not None:
        low, high = scale.at(row.low), scale.at(row.high)
        drawing.line((low, middle), (high, middle), classes=f"whisker l{row.outcome}")
        for x in (low, high):
            drawing.line((x, middle - 4), (x, middle + 4), classes=f"whisker l{row.outcome}")
    x = scale.at(row.gain)
    drawing.dot(x, middle, 4.5, row.outcome, title=f"{row.label}: {row.said}")
    if row.low is None:
        drawing.dot(x, middle, 2.2, "box")  # hollow: one figure, no interval


def _end(rows: Sequence[ForestRow]) -> float:
    reach = 1.05
    for row in rows:
        for value in (row.gain, row.low, row.high):
            if value is not None and value > 0:
                reach = max(reach, math.exp(abs(math.log(value))))
    return next((end for end in _ROUND if end >= reach), _ROUND[-1])


def _ratio_text(ratio: float) -> str:
    return "equal" if ratio == 1.0 else f"x{ratio:.3g}"
