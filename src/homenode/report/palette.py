"""Palette: the colours of the picture, light and dark, and the style sheet that says them.

Guest cells have the colours of Okabe and Ito (jfly.uni-koeln.de/color, 2008), which people with any
kind of colour blindness tell apart; a label always says the cell too.
"""

from typing import NamedTuple


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
"""By guest cell number; further cells begin again, and their labels tell them apart."""

FONT_FAMILY = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', 'DejaVu Sans', "
    "Arial, sans-serif"
)

# class: (light, dark). Fills first, then strokes, then inks; contrast of inks at least 4.5.
_FILLS = {
    "page": ("#ffffff", "#10151b"),
    "package": ("#f3f5f8", "#171e26"),
    "node": ("#ffffff", "#1d2630"),
    "llc": ("#f0f3f6", "#27323e"),
    "pu": ("#ffffff", "#131a21"),
    "pu-ground": ("#ffffff", "#131a21"),
    "host-thread": ("#333b45", "#dfe6ee"),
    "complex": ("#f8f9fb", "#1a222b"),
    "switch": ("#e9edf2", "#25303c"),
    "card": ("#ffffff", "#131a21"),
    "tag": ("#414b57", "#c5ced8"),
    "bar": ("#e3e8ee", "#303c49"),
    "bar-used": ("#aab5c1", "#66758a"),
}
_STROKES = {
    "package": ("#b4bfca", "#3b4958"),
    "node": ("#76828f", "#72808f"),
    "llc": ("#ccd5dd", "#3b4958"),
    "pu": ("#b3bdc7", "#465463"),
    "core": ("#8a96a3", "#5d6b7a"),
    "complex": ("#a3aeb9", "#53606e"),
    "switch": ("#a3aeb9", "#53606e"),
    "card": ("#7d8894", "#758392"),
    "wire": ("#76828f", "#8a97a5"),
    "hatch": ("#8793a0", "#7b8998"),
    "bar": ("#a3aeb9", "#53606e"),
    "isolated": ("#16202a", "#ecf1f6"),
}
_INKS = {
    "ink": ("#16202a", "#ecf1f6"),
    "dim": ("#4d5965", "#b3bec9"),
    "on-host-thread": ("#ffffff", "#10151b"),
    "on-tag": ("#ffffff", "#10151b"),
}


def style_sheet(scope: str = "") -> str:
    """The picture's CSS: light, and dark where the viewer prefers it.

    scope: a selector that everything is below, for a picture within a page.
    """
    if scope:
        return f"{scope}{{{style_sheet()}}}"
    rules = [f"text{{font-family:{FONT_FAMILY};font-variant-numeric:tabular-nums}}"]
    rules += _theme(0)
    rules.append("@media (prefers-color-scheme:dark){" + "".join(_theme(1)) + "}")
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


def _theme(column: int) -> list[str]:
    return [
        *(f".{name}{{fill:{pair[column]}}}" for name, pair in _FILLS.items()),
        *(f".{name}{{stroke:{pair[column]}}}" for name, pair in _STROKES.items()),
        *(f".{name}{{fill:{pair[column]}}}" for name, pair in _INKS.items()),
    ]
