"""Drawing: an SVG fragment built as elements, so that every text in it is escaped.

A drawing has classes and no colours: the page's style sheet has them, for light and dark. Where no
page surrounds it (a PDF's renderer does not look outside), the style sheet is put inside.
"""

from lxml import etree

from homenode.report.svg_canvas import number
from homenode.report.text_extent import shorten
from homenode.wording import printable

WIDTH = 360.0
"""Of a chart, in user units: what a narrow phone shows one to one, and a screen three abreast."""

TEXT = 11.0
"""Size of a chart's texts."""


class Drawing:
    """A picture of fixed width. Lengths are user units; y grows downwards; the height is set last.

    title: what a screen reader says of it.
    """

    def __init__(self, title: str, width: float = WIDTH, classes: str = "chart") -> None:
        self.width = width
        self._root = etree.Element(
            "svg", {"class": classes, "role": "img", "aria-label": printable(title)}
        )

    def rect(
        self,
        place: tuple[float, float, float, float],
        classes: str,
        *,
        radius: float = 0,
        title: str | None = None,
    ) -> None:
        """A rectangle at (x, y, width, height). title: what a pointer over it says."""
        x, y, width, height = place
        attributes = {
            "x": number(x), "y": number(y), "width": number(max(width, 0)),
            "height": number(max(height, 0)), "class": classes,
        }  # fmt: skip
        if radius:
            attributes["rx"] = number(radius)
        self._titled(etree.SubElement(self._root, "rect", attributes), title)

    def line(self, *points: tuple[float, float], classes: str, title: str | None = None) -> None:
        """A line through these points."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._titled(etree.SubElement(self._root, "path", {"d": path, "class": classes}), title)

    def curve(self, path: str, classes: str) -> None:
        """A path in SVG's own words; made of numbers only."""
        etree.SubElement(self._root, "path", {"d": path, "class": classes})

    def dot(
        self, x: float, y: float, radius: float, classes: str, title: str | None = None
    ) -> None:
        """A circle."""
        attributes = {"cx": number(x), "cy": number(y), "r": number(radius), "class": classes}
        self._titled(etree.SubElement(self._root, "circle", attributes), title)

    def text(
        self,
        x: float,
        baseline: float,
        text: str,
        classes: str = "ink",
        *,
        size: float = TEXT,
        anchor: str = "start",
        room: float | None = None,
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        """One line of text. room: what is wider is shortened, and a pointer over it says it all.

        turned: upwards, by a quarter.
        """
        whole = printable(text)
        shown = whole if room is None else shorten(whole, size, room, bold)
        attributes = {
            "x": number(x), "y": number(baseline), "font-size": number(size), "class": classes,
        }  # fmt: skip
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if bold:
            attributes["font-weight"] = "bold"
        if turned:
            attributes["transform"] = f"rotate(-90 {number(x)} {number(baseline)})"
        element = etree.SubElement(self._root, "text", attributes)
        element.text = shown
        self._titled(element, whole if shown != whole else None)

    def svg(self, height: float) -> str:
        """The fragment; the same calls give the same bytes."""
        self._root.set("viewBox", f"0 0 {number(self.width)} {number(height)}")
        self._root.set("width", number(self.width))
        self._root.set("height", number(height))
        return etree.tostring(self._root, encoding="unicode")

    def _titled(self, element: etree._Element, title: str | None) -> None:
        if title:
            etree.SubElement(element, "title").text = printable(title)
