"""SvgCanvas: drawings built from SVG elements; colours are in style sheets in templates/."""

from functools import cache

from lxml import etree

from homenode.package_data import read_package_text
from homenode.text import printable

MIN_TEXT_SIZE = 8.5
"""No text is smaller, in user units; the picture is 1600 wide."""

CHART_WIDTH = 360.0
"""Width in user units: a narrow phone shows one chart unscaled, a screen three abreast."""

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
    def start_chart(cls, title: str) -> "SvgCanvas":
        """Make a fragment. title: text for screen readers."""
        attributes = {"class": "chart", "role": "img", "aria-label": printable(title)}
        return cls(CHART_WIDTH, etree.Element("svg", attributes))

    @classmethod
    def start_document(cls, width: float, title: str, description: str, css: str) -> "SvgCanvas":
        """Make a document with a page's background, hatches and style sheet."""
        root = etree.Element(
            f"{{{_SVG}}}svg",
            {"role": "img", "aria-labelledby": "title desc"},
            nsmap={None: _SVG},  # type: ignore[dict-item]  # the stubs forget the default namespace
        )
        for tag, text in (("title", title), ("desc", description)):
            etree.SubElement(root, tag, {"id": tag}).text = printable(text)
        etree.SubElement(root, "style").text = css
        _define_hatches(etree.SubElement(root, "defs"))
        canvas = cls(width, root)
        canvas._page = canvas.draw_rect(0, 0, width, 0, "page")
        return canvas

    def draw_rect(
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
        """Draw a rectangle; `fill` names a hatch. `title` is its tooltip."""
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
        """Set a frame's height once its contents are known; the frame stays behind them."""
        rect.set("height", number(height))

    def draw_text(
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
        """Draw a line of text; return an upper bound of its width. width: limit; longer text is
        shortened, with the full text as tooltip. turned: rotated by 90 degrees, upwards."""
        full_text = printable(text)
        shown_text = full_text if width is None else shorten(full_text, size, width, bold)
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
        element.text = shown_text
        if shown_text != full_text:
            etree.SubElement(element, "title").text = full_text
        return text_width(shown_text, size, bold)

    def draw_line(
        self, *points: tuple[float, float], classes: str = "wire", title: str | None = None
    ) -> None:
        """Draw a line through these points."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", {"d": path, "class": classes}, title)

    def draw_dot(
        self, x: float, y: float, radius: float, classes: str, title: str | None = None
    ) -> None:
        """Draw a circle."""
        attributes = {"cx": number(x), "cy": number(y), "r": number(radius), "class": classes}
        self._add("circle", attributes, title)

    def serialize(self, height: float) -> str:
        """Return the whole SVG; the same calls give the same bytes."""
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
    """Format a length with at most two decimals, without trailing zeros.

    >>> number(12.0), number(3.14159), number(-0.001)
    ('12', '3.14', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _define_hatches(definitions: etree._Element) -> None:
    """Define hatch patterns: `taken` for other VMs' CPUs, `barred` for CPUs not allowed."""
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
_MIN_EM = 0.6  # average width of a letter, also in monospace fonts
_BOLD = 1.12


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return an upper bound of a line's width in the unit of `size`.

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
    return round(max(em, len(text) * _MIN_EM) * size * (_BOLD if bold else 1.0), 3)


def shorten(text: str, size: float, width: float, bold: bool = False) -> str:
    """Return the text, shortened with an ellipsis if it does not fit."""
    if text_width(text, size, bold) <= width:
        return text
    short_text = text
    while short_text and text_width(short_text + "…", size, bold) > width:
        short_text = short_text[:-1]
    return short_text.rstrip() + "…"


def wrap(text: str, size: float, width: float, bold: bool = False) -> tuple[str, ...]:
    """Break text into lines of at most `width`, at spaces and after commas, without shortening. A
    word that is wider than a line is broken at the line's end."""
    lines: list[str] = []
    line = ""
    for word in _split_words(text):
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


def _split_words(text: str) -> list[str]:
    words: list[str] = []
    start = 0
    for position, letter in enumerate(text):
        if letter in " ,":
            words.append(text[start : position + 1])
            start = position + 1
    return [*words, text[start:]]


CELL_COLOURS = 8
"""Number of colours for guest cells; further cells repeat them, told apart by labels."""

SERIES = 8
"""Colours of series, and the dashes next to them."""

HEAT = 9
"""Colours from low to high."""

PRESET_SERIES = {
    "default": 0,
    "pin": 1,
    "pin-numa": 2,
    "pin-numa-smt": 3,
    "pin-numa-pci": 4,
    "pin-numa-pci-smt": 5,
    "pin-bound": 6,
}


def number_series(label: str, position: int) -> int:
    """Return the colour number of an alternative: fixed for presets, else by position."""
    return PRESET_SERIES.get(label, (position + 1) % SERIES)


def read_css(*names: str, scope: str = "") -> str:
    """Return style sheets of templates/ joined in one line. scope: a selector to prefix, for a
    picture within a page."""
    lines = (line for name in names for line in _read_sheet(name).splitlines())
    rules = "".join(line.strip() for line in lines if not line.startswith("/*"))
    return f"{scope}{{{rules}}}" if scope else rules


@cache
def _read_sheet(name: str) -> str:
    return read_package_text("show", "templates", f"{name}.css")


PICTURE = "picture"
CHART = "chart", "chart-dark"
"""The sheets of a host's picture and of charts."""
