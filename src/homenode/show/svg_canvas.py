"""SvgCanvas: drawings, built as elements, and the colours and styles of maps and charts."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lxml import etree

from homenode.wording import printable

LEAST_TEXT_SIZE = 8.5
"""No text is smaller, in user units; the picture is 1600 wide."""

CHART_WIDTH = 360.0
"""Of a chart, in user units: what a narrow phone shows one to one, and a screen three abreast."""

TEXT = 11.0
"""Size of a chart's texts."""

_SVG = "http://www.w3.org/2000/svg"


class SvgCanvas:
    """An SVG of fixed width. Lengths are user units; y grows downwards; the height is set last."""

    def __init__(self, width: float, root: etree._Element) -> None:
        self.width = width
        self._root = root
        self._page: etree._Element | None = None

    @classmethod
    def chart(cls, title: str, width: float = CHART_WIDTH, look: str = "chart") -> "SvgCanvas":
        """A fragment. title: what a screen reader says of it. look: its class on the page."""
        attributes = {"class": look, "role": "img", "aria-label": printable(title)}
        return cls(width, etree.Element("svg", attributes))

    @classmethod
    def document(cls, width: float, title: str, description: str, css: str) -> "SvgCanvas":
        """A document with a page's ground, its hatches and its style sheet."""
        root = etree.Element(
            f"{{{_SVG}}}svg",
            {"role": "img", "aria-labelledby": "title desc"},
            nsmap={None: _SVG},  # type: ignore[dict-item]  # the stubs forget the default namespace
        )
        for tag, text in (("title", title), ("desc", description)):
            etree.SubElement(root, tag, {"id": tag}).text = printable(text)
        etree.SubElement(root, "style").text = css
        _hatches(etree.SubElement(root, "defs"))
        canvas = cls(width, root)
        canvas._page = canvas.rect(0, 0, width, 0, "page")
        return canvas

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        classes: str,
        *,
        radius: float = 0,
        fill: str | None = None,
        title: str | None = None,
    ) -> etree._Element:
        """A rectangle; `fill` names one of the hatches. `title` is what a pointer over it says."""
        attributes = {
            "x": number(x),
            "y": number(y),
            "width": number(max(width, 0)),
            "height": number(max(height, 0)),
            "class": classes,
        }
        if radius:
            attributes["rx"] = number(radius)
        if fill is not None:
            attributes["style"] = f"fill:url(#{fill})"
        return self._add("rect", attributes, title)

    def resize(self, rect: etree._Element, height: float) -> None:
        """Give a frame its height once its contents are known; it stays below them."""
        rect.set("height", number(height))

    def text(
        self,
        x: float,
        baseline: float,
        text: str,
        size: float = TEXT,
        classes: str = "ink",
        *,
        bold: bool = False,
        anchor: str = "start",
        width: float | None = None,
        turned: bool = False,
    ) -> float:
        """One line of text; returns the width that it may take.

        width: at most this; what does not fit is shortened, and a pointer over it says it all.
        turned: upwards, by a quarter.
        """
        whole = printable(text)
        shown = whole if width is None else shorten(whole, size, width, bold)
        attributes = {
            "x": number(x),
            "y": number(baseline),
            "font-size": number(size),
            "class": classes,
        }
        if bold:
            attributes["font-weight"] = "bold"
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if turned:
            attributes["transform"] = f"rotate(-90 {number(x)} {number(baseline)})"
        element = etree.SubElement(self._root, "text", attributes)
        element.text = shown
        if shown != whole:
            etree.SubElement(element, "title").text = whole
        return text_width(shown, size, bold)

    def line(
        self, *points: tuple[float, float], classes: str = "wire", title: str | None = None
    ) -> None:
        """A line through these points."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", {"d": path, "class": classes}, title)

    def path(self, path: str, classes: str) -> None:
        """A path in SVG's own words; made of numbers only."""
        self._add("path", {"d": path, "class": classes}, None)

    def dot(
        self, x: float, y: float, radius: float, classes: str, title: str | None = None
    ) -> None:
        """A circle."""
        attributes = {"cx": number(x), "cy": number(y), "r": number(radius), "class": classes}
        self._add("circle", attributes, title)

    def svg(self, height: float) -> str:
        """The whole SVG; the same calls give the same bytes."""
        if self._page is not None:
            self.resize(self._page, height)
        self._root.set("viewBox", f"0 0 {number(self.width)} {number(height)}")
        self._root.set("width", number(self.width))
        self._root.set("height", number(height))
        text = etree.tostring(self._root, encoding="unicode")
        return text if self._page is None else text + "\n"

    def _add(self, tag: str, attributes: dict[str, str], title: str | None) -> etree._Element:
        element = etree.SubElement(self._root, tag, attributes)
        if title:
            etree.SubElement(element, "title").text = printable(title)
        return element


def number(value: float) -> str:
    """A length with at most two decimals and no trailing zeros.

    >>> number(12.0), number(3.14159), number(-0.001)
    ('12', '3.14', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _hatches(definitions: etree._Element) -> None:
    """Patterns of lines: `taken` for other VMs' PUs, `barred` for PUs that may not be used."""
    for name, paths in (("taken", ("M0 6L6 0",)), ("barred", ("M0 6L6 0", "M0 0L6 6"))):
        pattern = etree.SubElement(
            definitions,
            "pattern",
            {"id": name, "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"},
        )
        etree.SubElement(pattern, "rect", {"width": "6", "height": "6", "class": "pu-ground"})
        for path in paths:
            etree.SubElement(pattern, "path", {"d": path, "class": "hatch", "fill": "none"})


_NARROW = frozenset("fijlrtIJ.,:;'|!()[]/\\- ·`")
_WIDE = frozenset("mwMWNOQHDG%@&+<=>~×→…")
_NARROW_EM, _ORDINARY_EM, _UPPER_EM, _WIDE_EM = 0.42, 0.64, 0.74, 1.0
_LEAST_EM = 0.6  # a letter on average: also fonts that are as wide as a typewriter's
_BOLD = 1.12


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of one line in the unit of `size`; an upper bound, not a measurement.

    >>> text_width("8", 10), text_width("", 10), text_width("WW", 10, bold=True)
    (6.4, 0.0, 22.4)
    """
    em = 0.0
    for letter in text:
        if letter in _NARROW:
            em += _NARROW_EM
        elif letter in _WIDE or not letter.isascii():
            em += _WIDE_EM
        elif letter.isupper():
            em += _UPPER_EM
        else:
            em += _ORDINARY_EM
    return round(max(em, len(text) * _LEAST_EM) * size * (_BOLD if bold else 1.0), 3)


def shorten(text: str, size: float, width: float, bold: bool = False) -> str:
    """The text, or as much of it as fits with an ellipsis at its end."""
    if text_width(text, size, bold) <= width:
        return text
    kept = text
    while kept and text_width(kept + "…", size, bold) > width:
        kept = kept[:-1]
    return kept.rstrip() + "…"


def wrap(text: str, size: float, width: float, bold: bool = False) -> tuple[str, ...]:
    """Lines of at most `width`, broken at spaces and after commas; never shortens.

    A word that is wider than a line is broken where it must be.
    """
    lines: list[str] = []
    line = ""
    for word in _words(text):
        if text_width((line + word).rstrip(), size, bold) <= width:
            line += word
            continue
        if line.strip():
            lines.append(line.rstrip())
        line = word
        while len(line.rstrip()) > 1 and text_width(line.rstrip(), size, bold) > width:
            cut = len(line) - 1
            while cut > 1 and text_width(line[:cut], size, bold) > width:
                cut -= 1
            lines.append(line[:cut])
            line = line[cut:]
    if line.strip():
        lines.append(line.rstrip())
    return tuple(lines)


def _words(text: str) -> list[str]:
    words: list[str] = []
    start = 0
    for position, letter in enumerate(text):
        if letter in " ,":
            words.append(text[start : position + 1])
            start = position + 1
    return [*words, text[start:]]


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
        ".chart .pale{fill-opacity:.3}",
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
