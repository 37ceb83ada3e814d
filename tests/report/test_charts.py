"""Charts: figures of any size stay inside, texts are escaped, colours are distinguished."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.show.bars import (
    Bar,
    BarGroup,
    ForestRow,
    build_bar_chart,
    build_forest_chart,
    choose_scale,
    format_range,
    format_short,
    log_steps,
)
from homenode.show.curves import MAX_CELLS, Curve, Matrix, SizeRange, build_curve_chart, heat_map
from homenode.show.svg_canvas import (
    HEAT,
    PRESET_SERIES,
    SERIES,
    number_series,
    read_css,
    text_width,
)
from homenode.vm.layout import PRESETS
from tests.svg_geometry import contrast

FIGURES = st.floats(1e-12, 1e30, allow_nan=False, allow_infinity=False)
NAMES = st.text(max_size=60)
UNITS = st.sampled_from(("bytes_per_s", "ns", "events_per_s", "ratio", "</text>"))


def _inside(svg: str) -> ElementTree.Element:
    """The chart, once nothing in it sticks out by more than a letter."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for element in root.iter():
        if element.tag == "rect":
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            assert -1 <= x <= x + float(element.get("width", 0)) <= width + 1
            assert -1 <= y <= y + float(element.get("height", 0)) <= height + 1
        if element.tag == "circle":
            assert -5 <= float(element.get("cx", 0)) <= width + 5
            assert -5 <= float(element.get("cy", 0)) <= height + 5
        if element.tag == "text" and "transform" not in element.attrib:
            in_use = text_width(element.text or "", float(element.get("font-size", 0)))
            part = {"middle": 0.5, "end": 1.0}.get(element.get("text-anchor", ""), 0.0)
            left = float(element.get("x", 0)) - part * in_use
            assert left >= -10, element.text
            assert left + in_use <= width + 10, element.text
            assert 0 <= float(element.get("y", 0)) <= height + 2
    return root


@given(
    UNITS,
    st.lists(st.tuples(NAMES, FIGURES, st.none() | FIGURES), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_bars_of_any_figures_stay_inside(
    unit: str, given: list[tuple[str, float, float | None]], log: bool, is_range: bool
) -> None:
    bars = [
        Bar(
            name,
            value,
            None if high is None else min(value, high),
            None if high is None else max(value, high),
            1,
            note=name[:9],
            is_range=is_range,
        )
        for name, value, high in given
    ]
    groups = [BarGroup("", tuple(bars[:1])), BarGroup("others", tuple(bars[1:]))]
    root = _inside(build_bar_chart("bars", unit, groups, log=log))
    drawn = [one for one in root.findall("rect") if "pale" not in one.get("class", "")]
    assert len(drawn) == 2 * len(bars)


@given(
    UNITS,
    st.lists(
        st.dictionaries(st.integers(1, 1 << 50), FIGURES, min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    ),
)
def test_curves_of_any_figures_stay_inside(unit: str, given: list[dict[int, float]]) -> None:
    curves = [
        Curve("pin", tuple(sorted((float(size), value) for size, value in points.items())), n)
        for n, points in enumerate(given)
    ]
    root = _inside(build_curve_chart("curves", unit, curves, (SizeRange("L1", 1.0, 32768.0),)))
    assert len(root.findall("circle")) == sum(len(curve.points) for curve in curves)


@given(UNITS, st.integers(1, 70), st.integers(1, 70), st.data())
def test_matrices_of_any_size_and_figures_stay_inside(
    unit: str, rows: int, columns: int, data: st.DataObject
) -> None:
    value = data.draw(FIGURES)
    cells = tuple(tuple(value * (1 + r + c) for c in range(columns)) for r in range(rows))
    names = tuple(f"0000:{n:02x}:00.0" for n in range(max(rows, columns)))
    matrix = Matrix("node", "GPU", names[:rows], names[:columns], cells)
    root = _inside(heat_map("matrix", unit, matrix))
    drawn = len(root.findall("rect")) - HEAT
    assert 1 <= drawn <= MAX_CELLS * MAX_CELLS


@given(
    st.lists(
        st.tuples(NAMES, st.floats(1e-6, 1e6), st.floats(1, 1e3), NAMES), min_size=1, max_size=5
    )
)
def test_effects_of_any_size_stay_inside(given: list[tuple[str, float, float, str]]) -> None:
    rows = [
        ForestRow(label, gain, gain / reach, gain * reach, said[:24], "better")
        for label, gain, reach, said in given
    ]
    _inside(build_forest_chart("effects", rows))


def test_names_are_text_and_never_elements() -> None:
    nasty = "<script>alert(1)</script>\"'&\x00\x1b]"
    svg = build_bar_chart(nasty, "ns", [BarGroup(nasty, (Bar(nasty, 1.0, None, None, 0),))])
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} <= {"svg", "text", "rect", "path", "title"}
    assert "&lt;script&gt;" in svg


def test_groups_share_one_axis() -> None:
    small = BarGroup("small", (Bar("a", 1.0, None, None, 0),))
    large = BarGroup("large", (Bar("a", 4.0, None, None, 1),))
    root = ElementTree.fromstring(build_bar_chart("x", "ns", [small, large]))
    widths = {rect.get("class"): float(rect.get("width", 0)) for rect in root.findall("rect")}
    assert widths["s1"] == pytest.approx(4 * widths["s0"], rel=0.01)
    assert widths["s1"] == widths["plot"]


def test_a_range_is_drawn_from_end_to_end_and_written_as_one() -> None:
    bar = Bar("H200", 48.4e9, 41.5e9, 55.3e9, 1, is_range=True)
    svg = build_bar_chart("copies", "bytes_per_s", [BarGroup("", (bar,))])
    root = ElementTree.fromstring(svg)
    assert "41.5\u201355.3 GB/s" in svg
    assert "48.4" not in svg
    plot, pale, drawn = root.findall("rect")
    assert float(drawn.get("x", 0)) > float(plot.get("x", 0)) == float(pale.get("x", 0))
    assert format_range(24.0, 24.1) == "24.0\u201324.1"


def test_no_label_of_an_effect_crosses_the_line_of_equality() -> None:
    rows = [ForestRow("a label that is as wide as the chart is", 2.0, 1.5, 3.0, "2 x", "better")]
    root = ElementTree.fromstring(build_forest_chart("effects", rows))
    (axis,) = [p for p in root.findall("path") if p.get("class") == "axis"]
    top = float((axis.get("d") or "").split("L")[0].split()[1])
    label = next(t for t in root.findall("text") if (t.text or "").startswith("a label"))
    assert float(label.get("y", 0)) < top


def test_the_same_range_of_colours_stands_for_the_same_figures() -> None:
    matrix = Matrix("node", "GPU", ("0",), ("0", "1"), ((50.0, 100.0),))
    alone, shared = heat_map("a", "ns", matrix), heat_map("a", "ns", matrix, (50.0, 1000.0))
    assert alone.count('class="h8"') == 2  # the cell and the legend
    assert shared.count('class="h8"') == 1


def test_figures_that_differ_by_noise_have_no_loud_colours() -> None:
    matrix = Matrix("node", "GPU", ("0",), ("0", "1"), ((100.0, 100.4),))
    svg = heat_map("a", "ns", matrix)
    assert svg.count('class="h0"') == 1, "in the legend alone"


def test_large_matrices_are_drawn_by_blocks_and_say_so() -> None:
    names = tuple(map(str, range(100)))
    cells = tuple(
        tuple(30.0 if r // 50 == c // 50 else 90.0 for c in range(100)) for r in range(100)
    )
    svg = heat_map("cores", "ns", Matrix("CPU", "CPU", names, names, cells))
    assert "median of 4 each" in svg
    # Rows are 50 of one and 50 of the other: the block in the middle has both.
    assert 2 * 25 <= svg.count("<rect") - HEAT <= 3 * 25


def _fills(sheet: str) -> dict[str, str]:
    """The colours that a sheet fills with, by class."""
    return dict(re.findall(r"\.chart \.(\w+)\{fill:(#[0-9a-f]{6})\}", read_css(sheet)))


@pytest.mark.parametrize(("sheet", "ground"), [("chart", "#ffffff"), ("chart-dark", "#10151b")])
def test_series_and_outcomes_stand_out_from_their_ground(sheet: str, ground: str) -> None:
    fills = _fills(sheet)
    for name in (*(f"s{number}" for number in range(SERIES)), "better", "worse", "neutral"):
        assert contrast(fills[name], ground) >= 3, name


def test_ink_on_heat_is_legible() -> None:
    fills = _fills("chart")
    for number in range(HEAT):
        assert contrast(fills[f"h{number}"], fills[f"i{number}"]) >= 4.4, number


def test_presets_have_colours_of_their_own() -> None:
    assert PRESET_SERIES.keys() == PRESETS.keys(), "add the layout to show/svg_canvas.py"
    assert len({number_series(name, 0) for name in PRESETS}) == len(PRESETS)


@given(FIGURES)
def test_steps_are_few(high: float) -> None:
    assert len(log_steps(high, high * 1e9)) <= 7
    assert math.isfinite(choose_scale("bytes_per_s", [high])[0])
    assert format_short(high)
