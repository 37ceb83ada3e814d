"""Curves: figures over sizes, both axes logarithmic, with levels marked and series labelled."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.report.charts.scale import (
    Scale,
    bounds,
    chart_scale,
    log_steps,
    short_figure,
    size_text,
)
from homenode.report.svg_canvas import CHART_WIDTH as WIDTH
from homenode.report.svg_canvas import SvgCanvas
from homenode.report.text_extent import text_width

_LEFT, _TOP, _PLOT_HEIGHT = 50.0, 14.0, 190.0
_LEGEND_ROW = 17.0
_MOST_DOTS = 64
"""Of a series; longer curves have no dots."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One series: points are (size_bytes, value), by size. series: number of colour and dash."""

    label: str
    points: tuple[tuple[float, float], ...]
    series: int


@dataclass(frozen=True, slots=True)
class Level:
    """A range of sizes with a name, such as a cache level."""

    name: str
    low_bytes: float
    high_bytes: float


def curve_chart(
    title: str, unit: str, curves: Sequence[Curve], levels: Sequence[Level] = ()
) -> str:
    """The SVG of these curves. Figures and sizes are above 0."""
    canvas = SvgCanvas.chart(title)
    values = [value for curve in curves for _, value in curve.points]
    sizes = [size for curve in curves for size, _ in curve.points]
    divisor, name = chart_scale(unit, values)
    low, high = bounds(values)
    across = Scale(min(sizes), max(sizes), _LEFT, WIDTH - 6, log=True)
    up = Scale(low, high, _TOP + _PLOT_HEIGHT, _TOP, log=True)
    canvas.rect(_LEFT, _TOP, WIDTH - 6 - _LEFT, _PLOT_HEIGHT, "plot")
    _levels(canvas, levels, across)
    canvas.text(0, 9, name, 10, "dim")
    for step in _value_steps(low / divisor, high / divisor):
        y = up.at(step * divisor)
        canvas.line((_LEFT, y), (WIDTH - 6, y), classes="grid")
        canvas.text(_LEFT - 5, y + 3.5, _step_text(step), 10, "dim", anchor="end")
    _sizes(canvas, across)
    for curve in curves:
        _draw(canvas, curve, across, up, divisor, name)
    y = _TOP + _PLOT_HEIGHT + 34
    for curve in curves:
        canvas.line((2, y - 4), (30, y - 4), classes=f"curve l{curve.series} dash{curve.series}")
        canvas.text(38, y, curve.label, width=WIDTH - 40)
        y += _LEGEND_ROW
    return canvas.svg(y - 6)


def _draw(
    canvas: SvgCanvas, curve: Curve, across: Scale, up: Scale, divisor: float, unit: str
) -> None:
    places = [(across.at(size), up.at(value)) for size, value in curve.points]
    if len(places) > 1:
        canvas.line(*places, classes=f"curve l{curve.series} dash{curve.series}")
    if len(places) <= _MOST_DOTS:
        for (x, y), (size, value) in zip(places, curve.points, strict=True):
            said = f"{curve.label}, {size_text(size)}: {short_figure(value / divisor)} {unit}"
            canvas.dot(x, y, 2.4, f"s{curve.series}", title=said)


def _value_steps(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten; where there are few of them, also 2 and 5 times."""
    steps = log_steps(low, high)
    if len(steps) > 2:
        return steps
    tens = log_steps(low / 10, high, most=99)
    found = [ten * part for ten in tens for part in (1, 2, 5)]
    kept = tuple(step for step in found if low <= step <= high)
    return kept or ((low * high) ** 0.5,)


def _step_text(step: float) -> str:
    return short_figure(step) if step < 1e6 else f"{step:.2g}"


def _sizes(canvas: SvgCanvas, across: Scale) -> None:
    y = _TOP + _PLOT_HEIGHT
    free_from = -99.0
    for size in log_steps(across.low, across.high, base=2.0, most=8) or (across.low,):
        x = across.at(size)
        canvas.line((x, _TOP), (x, y), classes="grid")
        text = size_text(size)
        half = text_width(text, 10) / 2
        if x - half >= free_from and x + half <= WIDTH + 2:
            canvas.text(x, y + 14, text, 10, "dim", anchor="middle")
            free_from = x + half + 6


def _levels(canvas: SvgCanvas, levels: Sequence[Level], across: Scale) -> None:
    for number, level in enumerate(levels):
        start, end = across.at(level.low_bytes), across.at(level.high_bytes)
        if end - start < 4:
            continue
        if number % 2:
            canvas.rect(start, _TOP, end - start, _PLOT_HEIGHT, "zone", title=level.name)
        canvas.text(
            (start + end) / 2,
            _TOP - 4,
            level.name,
            10,
            "dim",
            anchor="middle",
            width=end - start - 2,
        )
