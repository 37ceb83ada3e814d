"""Bars: one figure of several alternatives, each with its label, its value and its range."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.report.charts.drawing import TEXT, WIDTH, Drawing
from homenode.report.charts.scale import Scale
from homenode.report.charts.unit_text import chart_scale, short_figure
from homenode.report.text_extent import text_width

_ROW = 33.0
_VALUE_GAP = 8.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One alternative's figure. low, high: of everything that was measured; None where one figure.

    series: number of its colour.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    series: int


def bar_chart(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """The SVG of these bars, in their order, from zero."""
    drawing = Drawing(title)
    most = max(max(bar.value, bar.high or 0.0) for bar in bars)
    divisor, name = chart_scale(unit, [most])
    values = [f"{short_figure(bar.value / divisor)} {name}" for bar in bars]
    room = max(text_width(value, TEXT, bold=True) for value in values) + _VALUE_GAP
    scale = Scale(0.0, most, 0.0, WIDTH - room)
    y = 0.0
    for bar, value in zip(bars, values, strict=True):
        drawing.text(0, y + 12, bar.label, room=WIDTH)
        end = scale.at(bar.value)
        said = f"{bar.label}: {value}"
        if bar.low is not None and bar.high is not None:
            said += f", {short_figure(bar.low / divisor)} to {short_figure(bar.high / divisor)}"
        drawing.rect((0, y + 17, WIDTH - room, 11), "plot", radius=2)
        drawing.rect((0, y + 17, max(end, 1.5), 11), f"s{bar.series}", radius=2, title=said)
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            low, high = scale.at(bar.low), scale.at(bar.high)
            drawing.line((low, y + 22.5), (high, y + 22.5), classes="whisker box")
        drawing.text(WIDTH, y + 27, value, anchor="end", size=TEXT, bold=True)
        y += _ROW
    return drawing.svg(y)
