"""The geometry of an SVG, for assertions: no text too small, overlapping, or out of its box.

Nothing here comes from the program: widths are those of the widest common sans-serif font (DejaVu
Sans, in em), or 0.6 em a letter where that is more.
"""

from dataclasses import dataclass

from lxml import etree

MIN_SIZE = 8.0
SVG = "{http://www.w3.org/2000/svg}"

# Advance widths of DejaVu Sans and its bold, thousandths of an em, from the fonts' hmtx tables.
_WIDTHS = {
    " ": (318, 348),
    "-": (361, 415),
    ".": (318, 380),
    ",": (318, 380),
    ":": (337, 400),
    "/": (337, 365),
    "(": (390, 457),
    ")": (390, 457),
    "'": (275, 306),
    "i": (278, 343),
    "j": (278, 343),
    "l": (278, 343),
    "f": (352, 435),
    "t": (392, 478),
    "r": (411, 493),
    "I": (295, 372),
    "J": (295, 372),
    "m": (974, 1042),
    "w": (818, 924),
    "M": (863, 995),
    "W": (989, 1103),
    "N": (748, 837),
    "H": (752, 837),
    "D": (770, 830),
    "G": (775, 821),
    "O": (787, 850),
    "Q": (787, 850),
    "%": (950, 1002),
    "@": (1000, 1000),
    "+": (838, 838),
    "·": (318, 380),
    "…": (1000, 1000),
    "[": (390, 457),
    "]": (390, 457),
    "<": (838, 838),
}


@dataclass(frozen=True)
class Box:
    """A rectangle on the page; `what` says which, for messages."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def overlaps(self, other: "Box") -> bool:
        return (
            self.left < other.right - 0.01
            and other.left < self.right - 0.01
            and self.top < other.bottom - 0.01
            and other.top < self.bottom - 0.01
        )

    def holds(self, other: "Box", slack: float = 0.01) -> bool:
        return (
            self.left <= other.left + slack
            and self.right >= other.right - slack
            and self.top <= other.top + slack
            and self.bottom >= other.bottom - slack
        )


def text_boxes(root: etree._Element) -> list[Box]:
    """Where each text may lie: its letters, without what descends below the baseline."""
    boxes = []
    for text in root.iter(f"{SVG}text"):
        size, bold = float(text.get("font-size", "0")), text.get("font-weight") == "bold"
        said = text.text or ""
        assert size >= MIN_SIZE, f"{said!r}: expected at least {MIN_SIZE} px, found {size}"
        em = sum(_WIDTHS.get(c, (690, 775) if c.isupper() else (640, 720))[bold] for c in said)
        width = size * max(em / 1000, 0.6 * len(said))
        x, y = float(text.get("x", "0")), float(text.get("y", "0"))
        left = {"start": x, "middle": x - width / 2, "end": x - width}[
            text.get("text-anchor", "start")
        ]
        boxes.append(Box(left, y - 0.74 * size, left + width, y + 0.05 * size, said))
    return boxes


def rects(root: etree._Element) -> list[Box]:
    """Every rectangle that is drawn, in drawing order; the page is the first."""
    found = []
    for rect in root.iterchildren(f"{SVG}rect"):
        x, y = float(rect.get("x", "0")), float(rect.get("y", "0"))
        width, height = float(rect.get("width", "0")), float(rect.get("height", "0"))
        found.append(Box(x, y, x + width, y + height, rect.get("class", "")))
    return found


def assert_legible(svg: str) -> None:
    """Fails with the texts or boxes that are too small, overlap, cross a border or leave the page.

    Every two texts must be apart. Every two rectangles must be apart or one in the other. Every
    text must be wholly inside or wholly outside every rectangle.
    """
    root = etree.fromstring(svg.encode(), etree.XMLParser(resolve_entities=False, no_network=True))
    assert root.tag == f"{SVG}svg"
    _, _, width, height = (float(part) for part in root.get("viewBox", "").split())
    assert width == 1600, f"expected a picture 1600 wide, found {width}"
    page = Box(0, 0, width, height, "page")
    texts, boxes = text_boxes(root), rects(root)
    outside = [box.what for box in (*texts, *boxes) if not page.holds(box)]
    assert not outside, f"off the page: {outside[:5]}"
    problems: list[str] = []
    for a, b in _near(texts, texts):
        if a is not b and a.overlaps(b):
            problems.append(f"texts {a.what!r} and {b.what!r} overlap")
    for a, b in _near(boxes, boxes):
        if a is not b and a.overlaps(b) and not a.holds(b) and not b.holds(a):
            problems.append(f"boxes {a} and {b} cross")
    for a, b in _near(texts, boxes):
        if a.overlaps(b) and not b.holds(a) and not a.holds(b):
            problems.append(f"text {a.what!r} crosses {b}")
    assert not problems, f"{len(problems)} problems, such as\n" + "\n".join(problems[:8])


def _near(first: list[Box], second: list[Box]) -> list[tuple[Box, Box]]:
    """Pairs that share a band of 40 px: all that can overlap, and few more."""
    bands: dict[int, list[Box]] = {}
    for box in second:
        for band in range(int(box.top // 40), int(box.bottom // 40) + 1):
            bands.setdefault(band, []).append(box)
    pairs = []
    for box in first:
        for band in range(int(box.top // 40), int(box.bottom // 40) + 1):
            pairs += [
                (box, other)
                for other in bands.get(band, ())
                if other.left < box.right and box.left < other.right
            ]
    return pairs


def contrast(one: str, other: str) -> float:
    """Of two colours such as #ffffff: WCAG's ratio of their light."""
    dark, light = sorted((_light(one), _light(other)))
    return (light + 0.05) / (dark + 0.05)


def _light(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
