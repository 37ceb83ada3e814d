"""Doc: what a command or a page says, as values: text, tables, pictures, in sections.

Packages make documents; `report.terminal_text` and `report.html` show them. Texts are as they come,
names from outside included: the renderers escape them, and take out what steers a terminal. A
document knows no width, colour or markup.
"""

from msgspec import Struct


class Span(Struct, frozen=True):
    """A run of letters. look: names from LOOKS, or classes of the style sheet, with spaces between
    them. link: the id of a section."""

    text: str
    look: str = ""
    link: str = ""


Words = str | Span | tuple[str | Span, ...]
"""A line: a text, or runs of which some look different."""

LOOKS = {
    "bold": "bold",
    "dim": "dim",
    "head": "bold underline",
    "good": "green",
    "warn": "yellow",
    "bad": "red",
    "critical": "bold red",
    "hint": "cyan",
    "open": "magenta",
    "heat0": "red",
    "heat1": "dark_orange",
    "heat2": "yellow",
    "heat3": "green_yellow",
    "heat4": "green",
}
"""What a terminal knows, and its styles; the style sheet of pages has a class for each."""


class Text(Struct, frozen=True):
    """A paragraph. indent: columns, of its wrapped lines as well. hang: where wrapped lines begin,
    below the value of a label."""

    words: Words
    look: str = ""
    indent: int = 0
    hang: int = 0


class Items(Struct, frozen=True):
    """Short texts, one below the other; on a page a list."""

    items: tuple[Words, ...]
    look: str = "plain"


class Tree(Struct, frozen=True):
    """A line with what is below it."""

    words: Words
    branches: "tuple[Tree, ...]" = ()


class Commands(Struct, frozen=True):
    """Commands for copying: a shell continues those that are longer than a line."""

    lines: tuple[str, ...]


class Cell(Struct, frozen=True):
    """A cell of a table with more to it than a text.

    order: what a column is sorted by, None comes last. across: how many columns it takes.
    """

    lines: tuple[Words, ...]
    look: str = ""
    order: float | str | None = None
    across: int = 1


class Table(Struct, frozen=True, kw_only=True):
    """A table; each row has a cell for each head. The first cell of a row names it.

    numeric: heads of the columns of figures. folds: heads of columns that a narrow terminal may
    fold; where only the last is, its texts may stand below the table. least: heads of columns that
    it may leave out; shortened: and letters in the middle of the names of rows. name: for those who
    hear a page; caption: above the table of a page. look: classes of the style sheet.
    """

    heads: tuple[str | Cell, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    numeric: tuple[str, ...] = ()
    folds: tuple[str, ...] = ()
    least: tuple[str, ...] = ()
    shortened: bool = False
    name: str = ""
    caption: str = ""
    look: str = ""
    is_sortable: bool = False


class Picture(Struct, frozen=True):
    """A drawing. svg: built as elements, escaped already. note: what to look for, a line each."""

    title: Words
    svg: str
    note: tuple[Words, ...] = ()
    look: str = ""


class Gallery(Struct, frozen=True):
    """Pictures side by side; a terminal has none of them."""

    pictures: tuple[Picture, ...]
    look: str = ""


class Section(Struct, frozen=True):
    """Parts under a heading, which may be "". id: for links; name: in the list of contents.

    about: what is to be said first. is_open: of what a page folds, None where it folds nothing.
    """

    title: Words
    parts: "tuple[Part, ...]"
    id: str = ""
    name: str = ""
    about: str = ""
    look: str = ""
    is_open: bool | None = None


Part = Text | Items | Tree | Commands | Table | Gallery | Section


class Doc(Struct, frozen=True):
    """A whole document. about: below the title of a page; made: at its end, when and by what.
    hatches: patterns that its drawings share, as an SVG's definitions."""

    title: str
    parts: tuple[Part, ...]
    about: str = ""
    made: str = ""
    hatches: str = ""


def spans(words: Words) -> tuple[Span, ...]:
    """The runs of a line.

    >>> spans(("node 0", Span(": near", "dim")))
    (Span(text='node 0', look='', link=''), Span(text=': near', look='dim', link=''))
    """
    runs = words if isinstance(words, tuple) else (words,)
    return tuple(Span(one) if isinstance(one, str) else one for one in runs)


def plain(of: "Words | Cell") -> str:
    """The letters of a line or a cell.

    >>> plain(("node 0", Span(": near", "dim"))), plain(Cell(("a", "b")))
    ('node 0: near', 'a; b')
    """
    if isinstance(of, Cell):
        return "; ".join(map(plain, of.lines))
    return "".join(one.text for one in spans(of))
