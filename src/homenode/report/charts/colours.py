"""Colours: of layouts, of heat and of outcomes, and the style sheet that says them.

Series have the colours of Okabe and Ito, heat the perceptual scale cividis (Nunez, Anderton and
Renslow, 2018): people with any kind of colour blindness tell both apart. No colour is alone: a
label, a dash or a number says the same.
"""

from typing import NamedTuple

from homenode.report.palette import FONT_FAMILY


class Shade(NamedTuple):
    """A colour on a light and on a dark page."""

    light: str
    dark: str


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
"""By series number, beside the colour."""

PRESET_SERIES = {
    "default": 0, "pin": 1, "pin-numa": 2, "pin-numa-smt": 3, "pin-numa-pci": 4,
    "pin-numa-pci-smt": 5, "pin-bound": 6,
}  # fmt: skip

HEAT = (
    "#00204d", "#213d6b", "#4a546c", "#666970", "#7f7c75", "#9b9176", "#bca96f", "#dfc85a",
    "#ffea46",
)  # fmt: skip
"""From low to high. The ink on the first five is white, on the rest black."""

_HEAT_INK_FROM = 4

_FILLS = {
    "plot": Shade("#f6f8fa", "#1a222b"),
    "box": Shade("#ffffff", "#131a21"),
    "box2": Shade("#eef2f6", "#222d38"),
    "better": Shade("#0072b2", "#4aa8e0"),
    "worse": Shade("#c24f00", "#ea7b30"),
    "neutral": Shade("#76828f", "#8a97a5"),
    "zone": Shade("#e4eaf0", "#28333f"),
}
_STROKES = {
    "grid": Shade("#dfe5eb", "#303b47"),
    "axis": Shade("#76828f", "#8a97a5"),
    "box": Shade("#8a96a3", "#66758a"),
    "box2": Shade("#b4bfca", "#465463"),
    "lbetter": Shade("#0072b2", "#4aa8e0"),
    "lworse": Shade("#c24f00", "#ea7b30"),
    "lneutral": Shade("#76828f", "#8a97a5"),
}
_INKS = {"ink": Shade("#16202a", "#ecf1f6"), "dim": Shade("#4d5965", "#b3bec9")}


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
        *_theme(0),
    ]
    for number, colour in enumerate(HEAT):
        ink = "#ffffff" if number < _HEAT_INK_FROM else "#000000"
        rules.append(f".chart .h{number}{{fill:{colour}}}.chart .i{number}{{fill:{ink}}}")
    if dark:
        rules.append("@media (prefers-color-scheme:dark){" + "".join(_theme(1)) + "}")
    return "".join(rules)


def _theme(column: int) -> list[str]:
    fills = {**_FILLS, **_INKS, **{f"s{n}": shade for n, shade in enumerate(SERIES)}}
    strokes = {**_STROKES, **{f"l{n}": shade for n, shade in enumerate(SERIES)}}
    return [
        *(f".chart .{name}{{fill:{shade[column]}}}" for name, shade in fills.items()),
        *(f".chart .{name}{{stroke:{shade[column]}}}" for name, shade in strokes.items()),
    ]
