"""TerminalText: renderables for terminals that are narrow, or have no more than ASCII."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from homenode.wording import printable, printable_lines

_LONG, _SHORT = 24, 14  # letters that a shortened name keeps at least
_LEAST_WRAPPED = 24  # columns of a terminal that a wrapped column needs
_PLAIN = str.maketrans(
    {"\u2026": "...", "\u2013": "-", "\u00d7": "x", "\u00b7": "-", "\u00b1": "+-"}
)


class PrintableConsole(Console):
    """A console on which nothing that it is given to print steers the terminal: names, documents
    and what guests and tools say hold escapes, and letters that turn the direction of writing."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


class AsciiWhereNeeded:
    """Renders as what it holds; where the output's encoding is not Unicode, letters that it lacks
    become question marks instead of an error in the middle of the page."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            if options.ascii_only and not segment.text.isascii():
                plain = segment.text.translate(_PLAIN).encode("ascii", "replace").decode()
                yield Segment(plain, segment.style, segment.control)
            else:
                yield segment


class TableOrList:
    """A table where its columns fit, else each row as lines of "column: text".

    wraps_last: the last column may be wrapped, or stand below the table as "first: last". least:
    columns that are left out where the table fits without them; rows of a list are then paragraphs.
    shortened: before that, texts of the first column may lose letters in their middle.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        wraps_last: bool = False,
        least: Sequence[str] = (),
        shortened: bool = False,
    ) -> None:
        self._columns = tuple(columns)
        self._rows = tuple(tuple(printable(text) for text in row) for row in rows)
        self._wraps_last = wraps_last
        self._least = frozenset(least)
        self._shortened = shortened

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        space, every = options.max_width, len(self._columns)
        fixed = every - self._wraps_last
        needed = self._width(fixed, console, options)
        if needed + (_LEAST_WRAPPED if self._wraps_last else 0) <= space:
            yield self._table(every)
        elif needed <= space:
            yield self._table(fixed)
            for row in self._rows:
                yield Text(f"{row[0]}: {row[-1]}")
        elif self._least:
            yield from self._narrower(console, options)
        else:
            for row in self._rows:
                for number, (column, text) in enumerate(zip(self._columns, row, strict=True)):
                    yield Text.assemble(("- " if number == 0 else "  ") + f"{column}: ", text)

    def _narrower(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """With shorter names, without the least of the columns, both, or as paragraphs."""
        fewer = self._without_least()
        for table, shortest in ((self, _LONG), (fewer, None), (fewer, _SHORT)):
            excess = table._width(len(table._columns), console, options) - options.max_width
            if excess > 0 and shortest is not None and self._shortened:
                table = table._with_names_of(max(shortest, table._longest_name - excess))
                excess = table._width(len(table._columns), console, options) - options.max_width
            if excess <= 0:
                yield table._table(len(table._columns))
                if table._columns != self._columns:
                    left_out = " and ".join(name for name in self._columns if name in self._least)
                    about = f"No columns for {left_out}: the terminal is too narrow."
                    yield Text(about, style="dim")
                return
        for row in self._rows:
            named = zip(self._columns[1:], row[1:], strict=True)
            yield Text(f"{row[0]}: " + ", ".join(f"{name} {text}" for name, text in named))

    def _width(self, columns: int, console: Console, options: ConsoleOptions) -> int:
        table = self._table(columns)
        return Measurement.get(console, options.update(width=10_000), table).maximum

    def _without_least(self) -> "TableOrList":
        kept = [number for number, name in enumerate(self._columns) if name not in self._least]
        rows = [[row[number] for number in kept] for row in self._rows]
        return TableOrList([self._columns[number] for number in kept], rows)

    @property
    def _longest_name(self) -> int:
        return max((len(row[0]) for row in self._rows), default=0)

    def _with_names_of(self, most: int) -> "TableOrList":
        rows = [[_without_middle(row[0], most), *row[1:]] for row in self._rows]
        return TableOrList(self._columns, rows)

    def _table(self, columns: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for number, column in enumerate(self._columns[:columns]):
            wraps = self._wraps_last and number == len(self._columns) - 1
            # Heads of two words stand on two lines.
            head = column if wraps or not self._wraps_last else column.replace(" ", "\n")
            table.add_column(Text(head), no_wrap=not wraps)
        for row in self._rows:
            table.add_row(*(Text(text) for text in row[:columns]))
        return table


def _without_middle(text: str, most: int) -> str:
    """A name of at most so many letters: its beginning and end distinguish it.

    >>> _without_middle("gpu-7.rack-17.example.org", 14)
    'gpu-7.…ple.org'
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2 - 1]}…{text[len(text) - (most - most // 2) :]}"


class ShellCommand:
    """A command for copying: what is longer than a line is continued as a shell continues it.

    >>> print("".join(ShellCommand("virsh define --validate 'a b.xml'").lines(24)))
    virsh define \\
    --validate 'a b.xml'
    """

    def __init__(self, command: str) -> None:
        self._command = printable(command)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            yield Text(line.rstrip("\n"), no_wrap=True, overflow="ignore")

    def lines(self, width: int) -> Iterator[str]:
        """Its lines, each of at most so many columns where no quoted word is longer."""
        rest, width = self._command, max(20, width)
        while len(rest) > width:
            end = self._end(rest, width)
            if end is None:
                break
            yield rest[:end] + "\\\n"
            rest = rest[end:]
        yield rest

    @staticmethod
    def _end(text: str, width: int) -> int | None:
        """Where a line ends: after a space where there is one, else in the middle of a word, and
        nowhere between quotes, where a shell continues no line."""
        open_quote = [False]
        for letter in text[: width - 1]:
            open_quote.append(open_quote[-1] ^ (letter == "'"))
        ends = [end for end in range(2, width) if not open_quote[end]]
        spaces = [end for end in ends if text[end - 1] == " "]
        return max(spaces or ends, default=None)
