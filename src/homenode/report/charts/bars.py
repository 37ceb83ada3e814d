"""Bars: figures of several alternatives, in groups that share one axis."""

from collections.abc import Sequence
from dataclasses import dataclass

from homenode.report.charts.scale import Scale, chart_scale, range_figures, short_figure
from homenode.report.svg_canvas import CHART_WIDTH, TEXT, SvgCanvas
from homenode.report.text_extent import text_width

_ROW, _TALL_ROW, _GROUP, _GAP = 16.0, 31.0, 16.0, 4.0
_MOST_LABEL = 130.0
"""Wider labels stand above their bars."""

_LEAST_PLOT = 90.0
_SPACE = 8.0
_HEIGHT = 11.0


@dataclass(frozen=True, slots=True)
class Bar:
    """One alternative's figure.

    low, high: of everything that was measured, or of what was printed; None where one figure.
    series: number of its colour. text: what is written, where that is not the value with its unit.
    note: written after it, dim. is_range: only the ends are known: the bar runs between them.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    series: int
    text: str | None = None
    note: str = ""
    is_range: bool = False


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars under one heading; "" has none."""

    name: str
    bars: tuple[Bar, ...]


def bar_chart(title: str, unit: str, groups: Sequence[BarGroup], *, log: bool = False) -> str:
    """The SVG of these groups, in their order, on one axis from zero.

    log: a logarithmic axis, for figures far apart; its bars are compared by their ends only.
    """
    canvas = SvgCanvas.chart(title)
    bars = [bar for group in groups for bar in group.bars]
    most = max(max(bar.value, bar.high or 0.0) for bar in bars)
    least = min(min(bar.value, bar.value if bar.low is None else bar.low) for bar in bars)
    divisor, name = chart_scale(unit, [most])
    texts = [_text(bar, divisor, name) for bar in bars]
    right = max(
        text_width(text, TEXT, bold=True) + (text_width(bar.note, 10) + 6 if bar.note else 0)
        for text, bar in zip(texts, bars, strict=True)
    )
    right = min(right + _SPACE, CHART_WIDTH - _LEAST_PLOT)
    left = max(text_width(bar.label, TEXT) for bar in bars) + _SPACE
    is_tall = left > _MOST_LABEL or CHART_WIDTH - left - right < _LEAST_PLOT
    left = 0.0 if is_tall else left
    end = CHART_WIDTH - right
    scale = Scale(least / 2, most, left, end, log=True) if log else Scale(0.0, most, left, end)
    y = 0.0
    position = 0
    for group in groups:
        if group.name:
            canvas.text(0, y + 12, group.name, bold=True, width=CHART_WIDTH)
            y += _GROUP
        for bar in group.bars:
            _draw(canvas, bar, texts[position], y, scale, is_tall=is_tall)
            y += _TALL_ROW if is_tall else _ROW
            position += 1
        y += _GAP
    return canvas.svg(y)


def _text(bar: Bar, divisor: float, unit: str) -> str:
    if bar.text is not None:
        return bar.text
    if bar.is_range and bar.low is not None and bar.high is not None:
        return f"{range_figures(bar.low / divisor, bar.high / divisor)} {unit}"
    return f"{short_figure(bar.value / divisor)} {unit}"


def _draw(canvas: SvgCanvas, bar: Bar, text: str, y: float, scale: Scale, *, is_tall: bool) -> None:
    top = y + 17 if is_tall else y + 2
    if is_tall:
        canvas.text(0, y + 12, bar.label, width=CHART_WIDTH)
    else:
        canvas.text(0, top + 9.5, bar.label, width=scale.start - _SPACE / 2)
    said = f"{bar.label}: {text}" + (f", {bar.note}" if bar.note else "")
    canvas.rect(scale.start, top, scale.end - scale.start, _HEIGHT, "plot", radius=2)
    low, high = bar.low, bar.high
    has_range = low is not None and high is not None and high > low
    start = scale.at(low) if bar.is_range and has_range and low is not None else scale.start
    reach = scale.at(high) if bar.is_range and has_range and high is not None else None
    end = scale.at(bar.value) if reach is None else reach
    canvas.rect(
        min(start, end - 1.5) if end - 1.5 >= scale.start else scale.start,
        top,
        max(end - start, 1.5),
        _HEIGHT,
        f"s{bar.series}",
        radius=2,
        title=said,
    )
    if has_range and not bar.is_range and low is not None and high is not None:
        middle = top + _HEIGHT / 2
        canvas.line((scale.at(low), middle), (scale.at(high), middle), classes="whisker box")
    in_use = canvas.text(
        scale.end + _SPACE / 2, top + 9.5, text, bold=True, width=CHART_WIDTH - scale.end
    )
    if bar.note:
        x = scale.end + _SPACE / 2 + in_use + 6
        canvas.text(x, top + 9.5, bar.note, 10, "dim", width=CHART_WIDTH - x)
