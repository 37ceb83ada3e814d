"""SvgCanvas: shapes and text of an SVG document, built as elements, so that all text is escaped."""

from lxml import etree

from homenode.report.text_extent import shorten, text_width
from homenode.wording import printable

LEAST_TEXT_SIZE = 8.5
"""No text is smaller, in user units; the picture is 1600 wide."""

_SVG = "http://www.w3.org/2000/svg"


class SvgCanvas:
    """An SVG of fixed width. Lengths are user units; y grows downwards; the height is set last."""

    def __init__(self, width: float, title: str, description: str, css: str) -> None:
        self.width = width
        self._root = etree.Element(
            f"{{{_SVG}}}svg",
            {"role": "img", "aria-labelledby": "title desc"},
            nsmap={None: _SVG},  # type: ignore[dict-item]  # the stubs forget the default namespace
        )
        for tag, text in (("title", title), ("desc", description)):
            etree.SubElement(self._root, tag, {"id": tag}).text = printable(text)
        etree.SubElement(self._root, "style").text = css
        definitions = etree.SubElement(self._root, "defs")
        _hatches(definitions)
        self._page = self.rect(0, 0, width, 0, "page")

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
            "width": number(width),
            "height": number(height),
            "class": classes,
        }
        if radius:
            attributes["rx"] = number(radius)
        if fill is not None:
            attributes["style"] = f"fill:url(#{fill})"
        element = etree.SubElement(self._root, "rect", attributes)
        if title:
            etree.SubElement(element, "title").text = printable(title)
        return element

    def resize(self, rect: etree._Element, height: float) -> None:
        """Give a frame its height once its contents are known; it stays below them."""
        rect.set("height", number(height))

    def text(
        self,
        x: float,
        baseline: float,
        text: str,
        size: float,
        classes: str = "ink",
        *,
        bold: bool = False,
        anchor: str = "start",
        width: float | None = None,
    ) -> float:
        """One line of text; returns the width that it may take.

        width: at most this; what does not fit is shortened, and a pointer over it says it all.
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
        element = etree.SubElement(self._root, "text", attributes)
        element.text = shown
        if shown != whole:
            etree.SubElement(element, "title").text = whole
        return text_width(shown, size, bold)

    def wire(self, *points: tuple[float, float]) -> None:
        """A line through these points."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        etree.SubElement(self._root, "path", {"d": path, "class": "wire"})

    def document(self, height: float) -> str:
        """The whole document; the same calls give the same bytes."""
        self.resize(self._page, height)
        self._root.set("viewBox", f"0 0 {number(self.width)} {number(height)}")
        self._root.set("width", number(self.width))
        self._root.set("height", number(height))
        return etree.tostring(self._root, encoding="unicode") + "\n"


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
