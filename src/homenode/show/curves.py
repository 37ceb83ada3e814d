"""Curves over sizes, and heat maps: matrices with the value written in each cell."""

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from homenode.show.bars import (
    Scale,
    choose_scale,
    format_equal_digits,
    format_short,
    format_size,
    log_steps,
    pad_range,
)
from homenode.show.svg_canvas import CHART_WIDTH as WIDTH
from homenode.show.svg_canvas import HEAT, SvgCanvas, text_width

_LEFT, _TOP, _PLOT_HEIGHT = 50.0, 14.0, 190.0
_LEGEND_ROW = 17.0
_MAX_DOTS = 64
"""Limit of points with dots; longer curves have no dots."""


class Curve(Struct, frozen=True):
    """A series; points are (size_bytes, value), by size."""

    label: str
    points: tuple[tuple[float, float], ...]
    series: int  # colour and dash number


class SizeRange(Struct, frozen=True):
    """A range of sizes with a name, such as a cache level."""

    name: str
    low_bytes: float
    high_bytes: float


def build_curve_chart(
    title: str, unit: str, curves: Sequence[Curve], levels: Sequence[SizeRange] = ()
) -> str:
    """Return the SVG of these curves. Values and sizes are above 0."""
    canvas = SvgCanvas.start_chart(title)
    values = [value for curve in curves for _, value in curve.points]
    sizes = [size for curve in curves for size, _ in curve.points]
    divisor, name = choose_scale(unit, values)
    low, high = pad_range(values)
    across = Scale(min(sizes), max(sizes), _LEFT, WIDTH - 6, log=True)
    up = Scale(low, high, _TOP + _PLOT_HEIGHT, _TOP, log=True)
    canvas.draw_rect(_LEFT, _TOP, WIDTH - 6 - _LEFT, _PLOT_HEIGHT, "plot")
    _draw_levels(canvas, levels, across)
    canvas.draw_text(0, 9, name, 10, "dim")
    for step in _value_steps(low / divisor, high / divisor):
        y = up.place(step * divisor)
        canvas.draw_line((_LEFT, y), (WIDTH - 6, y), classes="grid")
        canvas.draw_text(_LEFT - 5, y + 3.5, _format_step(step), 10, "dim", anchor="end")
    sizes = list(log_steps(across.low, across.high, base=2.0, count=8)) or [across.low]
    _draw_marks(canvas, across, [(size, format_size(size)) for size in sizes])
    for curve in curves:
        _draw(canvas, curve, across, up, divisor, name)
    y = _TOP + _PLOT_HEIGHT + 34
    for curve in curves:
        canvas.draw_line(
            (2, y - 4), (30, y - 4), classes=f"curve l{curve.series} dash{curve.series}"
        )
        canvas.draw_text(38, y, curve.label, width=WIDTH - 40)
        y += _LEGEND_ROW
    return canvas.serialize(y - 6)


def _draw(
    canvas: SvgCanvas, curve: Curve, across: Scale, up: Scale, divisor: float, unit: str
) -> None:
    places = [(across.place(size), up.place(value)) for size, value in curve.points]
    if len(places) > 1:
        canvas.draw_line(*places, classes=f"curve l{curve.series} dash{curve.series}")
    if len(places) <= _MAX_DOTS:
        for (x, y), (size, value) in zip(places, curve.points, strict=True):
            tooltip = f"{curve.label}, {format_size(size)}: {format_short(value / divisor)} {unit}"
            canvas.draw_dot(x, y, 2.4, f"s{curve.series}", title=tooltip)


def _value_steps(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten; if few, also their multiples by 2 and 5."""
    steps = log_steps(low, high)
    if len(steps) > 2:
        return steps
    tens = log_steps(low / 10, high, count=99)
    multiples = [ten * part for ten in tens for part in (1, 2, 5)]
    visible = tuple(step for step in multiples if low <= step <= high)
    return visible or ((low * high) ** 0.5,)


def _format_step(step: float) -> str:
    return format_short(step) if step < 1e6 else f"{step:.2g}"


def _draw_marks(canvas: SvgCanvas, across: Scale, marks: Sequence[tuple[float, str]]) -> None:
    y = _TOP + _PLOT_HEIGHT
    free_from = -99.0
    for place, text in marks:
        x = across.place(place)
        canvas.draw_line((x, _TOP), (x, y), classes="grid")
        half = text_width(text, 10) / 2
        if x - half >= free_from and x + half <= WIDTH + 2:
            canvas.draw_text(x, y + 14, text, 10, "dim", anchor="middle")
            free_from = x + half + 6


def _draw_levels(canvas: SvgCanvas, levels: Sequence[SizeRange], across: Scale) -> None:
    for number, level in enumerate(levels):
        start, end = across.place(level.low_bytes), across.place(level.high_bytes)
        if end - start < 4:
            continue
        if number % 2:
            canvas.draw_rect(start, _TOP, end - start, _PLOT_HEIGHT, "zone", title=level.name)
        canvas.draw_text(
            (start + end) / 2,
            _TOP - 4,
            level.name,
            10,
            "dim",
            anchor="middle",
            width=end - start - 2,
        )


MAX_CELLS = 32
"""Limit of rows and of columns; larger matrices are drawn as blocks with medians."""

MAX_TITLED = 16
"""Limit of columns up to which each cell shows its value, at least as a tooltip."""

_LEGEND = 34.0
_MIN_RANGE = 0.9
"""The colours span at least a tenth, so that values equal within noise look equal."""


class Matrix(Struct, frozen=True):
    """Values by row and column; None if missing."""

    row_title: str  # title of the axis
    column_title: str  # title of the axis
    rows: tuple[str, ...]  # names
    columns: tuple[str, ...]  # names
    cells: tuple[tuple[float | None, ...], ...]


def heat_map(title: str, unit: str, matrix: Matrix, ends: tuple[float, float] | None = None) -> str:
    """Return the SVG of a matrix, with the ends of the colour scale below it. ends: of the colour
    scale, to share it between matrices; None = the matrix's own."""
    matrix = _reduce_to_blocks(matrix)
    figures = [value for row in matrix.cells for value in row if value is not None]
    low, high = (min(figures), max(figures)) if ends is None else ends
    low = min(low, high * _MIN_RANGE)
    divisor, name = choose_scale(unit, [high])
    canvas = SvgCanvas.start_chart(title)
    row_space = min(max(text_width(row, 10) for row in matrix.rows), 96.0)
    label_edge = 16.0 + row_space + 6
    side = min((WIDTH - label_edge - 2) / len(matrix.columns), 64.0)
    height = min(side, 40.0)
    top = 32.0
    canvas.draw_text(label_edge, 11, matrix.column_title, 10, "dim", width=WIDTH - label_edge)
    middle = top + height * len(matrix.rows) / 2
    canvas.draw_text(10, middle, matrix.row_title, 10, "dim", anchor="middle", turned=True)
    _column_names(canvas, matrix.columns, label_edge, side, top)
    values = [value / divisor for row in matrix.cells for value in row if value is not None]
    texts = iter(format_equal_digits(values))
    for number, (label, row) in enumerate(zip(matrix.rows, matrix.cells, strict=True)):
        y = top + number * height
        if height >= 10 or number % max(1, round(12 / height)) == 0:
            canvas.draw_text(
                label_edge - 5,
                y + height / 2 + 3.5,
                label,
                10,
                "dim",
                anchor="end",
                width=row_space,
            )
        if len(matrix.columns) > MAX_TITLED:
            _draw_runs(canvas, row, (label_edge, y, side, height), (low, high))
            continue
        for column, value in enumerate(row):
            place = (label_edge + column * side, y, side, height)
            tooltip = f"{matrix.row_title} {label}, {matrix.column_title} {matrix.columns[column]}"
            shade = None if value is None else _choose_shade(value, low, high)
            text = "" if shade is None else next(texts)
            title = f"{tooltip}: no result" if shade is None else f"{tooltip}: {text} {name}"
            _draw_cell(canvas, place, shade, text, title)
    y = top + height * len(matrix.rows) + 10
    _draw_legend(canvas, y, label_edge, (low / divisor, high / divisor), name)
    return canvas.serialize(y + _LEGEND)


def _draw_runs(
    canvas: SvgCanvas,
    row: Sequence[float | None],
    place: tuple[float, float, float, float],
    ends: tuple[float, float],
) -> None:
    """Draw a row of cells too small for text: adjacent cells of one colour are one rectangle."""
    edge, y, side, height = place
    shades = [None if value is None else _choose_shade(value, *ends) for value in row]
    start = 0
    for shade, run in groupby(shades):
        count = len(list(run))
        classes = "plot" if shade is None else f"h{shade}"
        canvas.draw_rect(edge + start * side, y, count * side, height, classes)
        start += count


def _draw_cell(
    canvas: SvgCanvas,
    place: tuple[float, float, float, float],
    shade: int | None,
    text: str,
    title: str,
) -> None:
    x, y, side, height = place
    if shade is None:
        canvas.draw_rect(x + 0.5, y + 0.5, side - 1, height - 1, "plot", title=title)
        return
    canvas.draw_rect(x + 0.5, y + 0.5, side - 1, height - 1, f"h{shade}", title=title)
    size = min(11.0, 11.0 * (side - 3) / max(text_width(text, 11.0), 1))
    if size >= 7 and height >= 12:
        middle = (x + side / 2, y + height / 2 + size * 0.36)
        canvas.draw_text(*middle, text, size, f"i{shade}", anchor="middle")


def _choose_shade(value: float, low: float, high: float) -> int:
    if high <= low:
        return HEAT // 2
    return min(max(int((value - low) / (high - low) * HEAT), 0), HEAT - 1)


def _column_names(
    canvas: SvgCanvas, names: Sequence[str], start: float, side: float, top: float
) -> None:
    space = max(side, 30.0)
    widest = max(min(text_width(name, 10), space) for name in names)
    stride = max(1, math.ceil((widest + 3) / side))
    for column in range(0, len(names), stride):
        x = start + (column + 0.5) * side
        if x + widest / 2 <= WIDTH + 6:
            canvas.draw_text(x, top - 5, names[column], 10, "dim", anchor="middle", width=space)


def _draw_legend(
    canvas: SvgCanvas, y: float, x: float, ends: tuple[float, float], unit: str
) -> None:
    width = min((WIDTH - x) / HEAT, 18.0)
    for shade in range(HEAT):
        canvas.draw_rect(x + shade * width, y, width, 8, f"h{shade}")
    end = x + width * HEAT
    canvas.draw_text(x, y + 20, format_short(ends[0]), 10, "dim")
    canvas.draw_text(end, y + 20, f"{format_short(ends[1])} {unit}", 10, "dim", anchor="end")


def _reduce_to_blocks(matrix: Matrix) -> Matrix:
    """Return the matrix itself, or medians of blocks if it has too many cells to draw."""
    rows, columns = len(matrix.rows), len(matrix.columns)
    down, across = -(-rows // MAX_CELLS), -(-columns // MAX_CELLS)
    if down == across == 1:
        return matrix
    cells = tuple(
        tuple(
            _compute_median(
                [
                    matrix.cells[r][c]
                    for r in range(row, min(row + down, rows))
                    for c in range(column, min(column + across, columns))
                ]
            )
            for column in range(0, columns, across)
        )
        for row in range(0, rows, down)
    )
    return Matrix(
        f"{matrix.row_title} (median of {down} each)",
        f"{matrix.column_title} (median of {across} each)",
        matrix.rows[::down],
        matrix.columns[::across],
        cells,
    )


def _compute_median(values: Sequence[float | None]) -> float | None:
    figures = [value for value in values if value is not None]
    return statistics.median(figures) if figures else None
