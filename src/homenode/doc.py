"""Doc: the content of a command's output or a page, as values: text, tables, pictures, in sections.

Packages make documents; `report.terminal_text` and `report.html` show them. Texts may contain
untrusted names: the renderers escape them and remove control characters. A document has no width,
colour or markup.
"""

from msgspec import Struct


class Span(Struct, frozen=True):
    """A run of letters."""

    text: str
    look: str = ""  # names from LOOKS, or classes of the style sheet, with spaces between them
    link: str = ""  # the id of a section


Words = str | Span | tuple[str | Span, ...]
"""A line: a text, or runs in several styles."""

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
"""Styles of a terminal; the style sheet of pages has a class for each."""


class Text(Struct, frozen=True):
    words: Words
    look: str = ""
    indent: int = 0  # columns, of its wrapped lines as well
    hang: int = 0  # where wrapped lines begin, below the value of a label
    command: str = ""  # a command in its words; a shell continues it if it is longer than a line


class Items(Struct, frozen=True):
    """Short texts as lines; on a page a list."""

    items: tuple[Words, ...]
    look: str = "plain"


class Tree(Struct, frozen=True):
    """A line with its branches."""

    words: Words
    branches: "tuple[Tree, ...]" = ()


class Commands(Struct, frozen=True):
    """Commands for copying; long ones are continued with backslashes."""

    lines: tuple[str, ...]


class Cell(Struct, frozen=True):
    """A cell of a table with more than a text."""

    lines: tuple[Words, ...]
    look: str = ""
    order: float | str | None = None  # what a column is sorted by, None comes last
    across: int = 1  # how many columns it takes


class Table(Struct, frozen=True, kw_only=True):
    """A table; each row has a cell for each head. The first cell of a row names it."""

    heads: tuple[str | Cell, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    numeric: tuple[str, ...] = ()  # heads of the columns of numbers
    # heads of columns that a narrow terminal may fold; if only the last is, its texts may be below
    # the table
    folds: tuple[str, ...] = ()
    least: tuple[str, ...] = ()  # heads of columns that may be omitted
    cpu_sets: tuple[str, ...] = ()  # heads of columns whose CPU sets it may shorten first
    shortened: bool = False  # and letters in the middle of the names of rows
    name: str = ""  # for screen readers
    caption: str = ""  # above the table of a page
    look: str = ""  # classes of the style sheet
    is_sortable: bool = False


class Picture(Struct, frozen=True):
    title: Words
    svg: str  # built as elements, escaped already
    note: tuple[Words, ...] = ()  # what to check, a line each
    look: str = ""


class Gallery(Struct, frozen=True):
    """Pictures side by side; terminals omit them."""

    pictures: tuple[Picture, ...]
    look: str = ""


class Section(Struct, frozen=True):
    """Parts under a heading, which may be ""."""

    title: Words
    parts: "tuple[Part, ...]"
    id: str = ""  # for links
    name: str = ""  # in the list of contents
    about: str = ""  # the first sentence
    look: str = ""
    is_open: bool | None = None  # whether a page shows it unfolded; None = it never folds


Part = Text | Items | Tree | Commands | Table | Gallery | Section


class Doc(Struct, frozen=True):
    """A whole document."""

    title: str
    parts: tuple[Part, ...]
    about: str = ""  # below the title of a page
    footer: str = ""  # at its end, when and by what
    hatches: str = ""  # patterns that its drawings share, as an SVG's definitions


def spans(words: Words) -> tuple[Span, ...]:
    """Return the runs of a line.

    >>> spans(("node 0", Span(": near", "dim")))
    (Span(text='node 0', look='', link=''), Span(text=': near', look='dim', link=''))
    """
    runs = words if isinstance(words, tuple) else (words,)
    return tuple(Span(run) if isinstance(run, str) else run for run in runs)


def format_plain(words: "Words | Cell") -> str:
    """Return the letters of a line or a cell.

    >>> format_plain(("node 0", Span(": near", "dim"))), format_plain(Cell(("a", "b")))
    ('node 0: near', 'a; b')
    """
    if isinstance(words, Cell):
        return "; ".join(map(format_plain, words.lines))
    return "".join(span.text for span in spans(words))
