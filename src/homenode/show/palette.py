"""Palette: the colours of pictures and charts, light and dark, and the style sheets that say them.

Guest cells and series have the colours of Okabe and Ito (jfly.uni-koeln.de/color, 2008), heat the
perceptual scale cividis (Nunez, Anderton and Renslow, 2018): people with any kind of colour
blindness distinguish both. No colour is alone: a label, a dash or a number says the same.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Shade(NamedTuple):
    """A colour on a light and on a dark page."""

    light: str
    dark: str


class CellColour(NamedTuple):
    """A guest cell's fill and the ink that is legible on it (contrast of at least 4.5)."""

    fill: str
    ink: str


CELL_COLOURS = (
    CellColour("#0072b2", "#ffffff"),  # blue
    CellColour("#e69f00", "#1a1a1a"),  # orange
    CellColour("#009e73", "#000000"),  # bluish green
    CellColour("#cc79a7", "#000000"),  # reddish purple
    CellColour("#56b4e9", "#1a1a1a"),  # sky blue
    CellColour("#d55e00", "#000000"),  # vermilion
    CellColour("#f0e442", "#1a1a1a"),  # yellow
    CellColour("#5b5b6b", "#ffffff"),  # slate
)
"""By guest cell number; further cells begin again, and their labels distinguish them."""

FONT_FAMILY = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'DejaVu Sans', "
    "Arial, sans-serif"
)

# class: (light, dark). Fills first, then strokes, then inks; contrast of inks at least 4.5.
_FILLS = {
    "page": Shade("#ffffff", "#10151b"),
    "package": Shade("#f3f5f8", "#171e26"),
    "node": Shade("#ffffff", "#1d2630"),
    "llc": Shade("#f0f3f6", "#27323e"),
    "pu": Shade("#ffffff", "#131a21"),
    "pu-ground": Shade("#ffffff", "#131a21"),
    "host-thread": Shade("#333b45", "#dfe6ee"),
    "complex": Shade("#f8f9fb", "#1a222b"),
    "switch": Shade("#e9edf2", "#25303c"),
    "card": Shade("#ffffff", "#131a21"),
    "tag": Shade("#414b57", "#c5ced8"),
    "bar": Shade("#e3e8ee", "#303c49"),
    "bar-used": Shade("#aab5c1", "#66758a"),
}
_STROKES = {
    "package": Shade("#b4bfca", "#3b4958"),
    "node": Shade("#76828f", "#72808f"),
    "llc": Shade("#ccd5dd", "#3b4958"),
    "pu": Shade("#b3bdc7", "#465463"),
    "core": Shade("#8a96a3", "#5d6b7a"),
    "complex": Shade("#a3aeb9", "#53606e"),
    "switch": Shade("#a3aeb9", "#53606e"),
    "card": Shade("#7d8894", "#758392"),
    "wire": Shade("#76828f", "#8a97a5"),
    "hatch": Shade("#8793a0", "#7b8998"),
    "bar": Shade("#a3aeb9", "#53606e"),
    "isolated": Shade("#16202a", "#ecf1f6"),
}
_INKS = {
    "ink": Shade("#16202a", "#ecf1f6"),
    "dim": Shade("#4d5965", "#b3bec9"),
    "on-host-thread": Shade("#ffffff", "#10151b"),
    "on-tag": Shade("#ffffff", "#10151b"),
}

SERIES = (
    Shade("#5b5b6b", "#a9b1bd"),  # slate
    Shade("#0072b2", "#4aa8e0"),  # blue
    Shade("#b87f00", "#e69f00"),  # orange
    Shade("#c24f00", "#ea7b30"),  # vermilion
    Shade("#00805d", "#22b58c"),  # bluish green
    Shade("#b3568f", "#d78ab5"),  # reddish purple
    Shade("#1c85bd", "#7cc5ef"),  # sky blue
    Shade("#7d7500", "#d8cc3a"),  # yellow
)
DASHES = ("", "6 3", "2 2", "8 3 2 3", "10 3", "4 4", "1 3", "6 2 2 2")
"""By series number, next to the colour."""

PRESET_SERIES = {
    "default": 0,
    "pin": 1,
    "pin-numa": 2,
    "pin-numa-smt": 3,
    "pin-numa-pci": 4,
    "pin-numa-pci-smt": 5,
    "pin-bound": 6,
}

HEAT = (
    "#00204d",
    "#213d6b",
    "#4a546c",
    "#666970",
    "#7f7c75",
    "#9b9176",
    "#bca96f",
    "#dfc85a",
    "#ffea46",
)
"""From low to high. The ink on the first five is white, on the rest black."""

_HEAT_INK_FROM = 4

_CHART_FILLS = {
    "plot": Shade("#f6f8fa", "#1a222b"),
    "box": Shade("#ffffff", "#131a21"),
    "box2": Shade("#eef2f6", "#222d38"),
    "better": Shade("#0072b2", "#4aa8e0"),
    "worse": Shade("#c24f00", "#ea7b30"),
    "neutral": Shade("#76828f", "#8a97a5"),
    "zone": Shade("#e4eaf0", "#28333f"),
}
_CHART_STROKES = {
    "grid": Shade("#dfe5eb", "#303b47"),
    "axis": Shade("#76828f", "#8a97a5"),
    "box": Shade("#8a96a3", "#66758a"),
    "box2": Shade("#b4bfca", "#465463"),
    "lbetter": Shade("#0072b2", "#4aa8e0"),
    "lworse": Shade("#c24f00", "#ea7b30"),
    "lneutral": Shade("#76828f", "#8a97a5"),
}
_CHART_INKS = {"ink": Shade("#16202a", "#ecf1f6"), "dim": Shade("#4d5965", "#b3bec9")}


def style_sheet(scope: str = "") -> str:
    """The picture's CSS: light, and dark where the viewer prefers it.

    scope: a selector that everything is below, for a picture within a page.
    """
    if scope:
        return f"{scope}{{{style_sheet()}}}"
    rules = [f"text{{font-family:{FONT_FAMILY};font-variant-numeric:tabular-nums}}"]
    rules += _theme(0, _FILLS, _STROKES, _INKS)
    dark = "".join(_theme(1, _FILLS, _STROKES, _INKS))
    rules.append(f"@media (prefers-color-scheme:dark){{{dark}}}")
    # After both themes: what is of a cell has the cell's colour in either.
    rules += [
        ".wire{fill:none;stroke-width:2}",
        ".isolated{stroke-width:1.6;stroke-dasharray:3 2}",
        ".core{fill:none;stroke-width:1}",
        ".outline{fill:none;stroke-width:2.5}",
    ]
    for number, colour in enumerate(CELL_COLOURS):
        rules += [
            f".cell{number}{{fill:{colour.fill}}}",
            f".tint{number}{{fill:{colour.fill};fill-opacity:.22}}",
            f".on-cell{number}{{fill:{colour.ink}}}",
        ]
    return "".join(rules)


def key_style() -> str:
    """Names in the colours of guest cells, for the text of a page."""
    return "".join(
        f".key{number}{{background:{colour.fill};color:{colour.ink}}}"
        for number, colour in enumerate(CELL_COLOURS)
    )


def series_number(label: str, position: int) -> int:
    """The colour of an alternative: a preset has its own, others theirs by position."""
    return PRESET_SERIES.get(label, (position + 1) % len(SERIES))


def chart_style(*, dark: bool = True) -> str:
    """The charts' CSS. dark: also the colours for a dark page, where the viewer prefers it."""
    rules = [
        f".chart text{{font-family:{FONT_FAMILY};font-variant-numeric:tabular-nums}}",
        ".chart path{fill:none;stroke-width:1}",
        ".chart .curve{stroke-width:2;stroke-linejoin:round}",
        ".chart .whisker{stroke-width:2}",
        ".chart .far{stroke-dasharray:5 4}",
        ".chart .thick{stroke-width:2.5}",
        *(f".chart .dash{n}{{stroke-dasharray:{dash}}}" for n, dash in enumerate(DASHES) if dash),
        *_chart_theme(0),
    ]
    for number, colour in enumerate(HEAT):
        ink = "#ffffff" if number < _HEAT_INK_FROM else "#000000"
        rules.append(f".chart .h{number}{{fill:{colour}}}.chart .i{number}{{fill:{ink}}}")
    if dark:
        rules.append("@media (prefers-color-scheme:dark){" + "".join(_chart_theme(1)) + "}")
    return "".join(rules)


def _chart_theme(column: int) -> Iterator[str]:
    fills = _CHART_FILLS | {f"s{n}": shade for n, shade in enumerate(SERIES)}
    strokes = _CHART_STROKES | {f"l{n}": shade for n, shade in enumerate(SERIES)}
    return (f".chart {rule}" for rule in _theme(column, fills, strokes, _CHART_INKS))


def _theme(
    column: int,
    fills: Mapping[str, Shade],
    strokes: Mapping[str, Shade],
    inks: Mapping[str, Shade],
) -> Iterator[str]:
    for name, shade in (*fills.items(), *inks.items()):
        yield f".{name}{{fill:{shade[column]}}}"
    for name, shade in strokes.items():
        yield f".{name}{{stroke:{shade[column]}}}"
