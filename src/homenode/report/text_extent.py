"""TextExtent: how wide a text is, without a font at hand.

The estimate is for the widest of the common sans-serif fonts (DejaVu Sans), so that a text that
fits here fits with whatever font the viewer has. Widths in em, from the font's hmtx table.
"""

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
