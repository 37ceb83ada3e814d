"""TerminalText: documents on terminals, also on narrow or ASCII-only terminals."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec.structs import replace
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text as Line
from rich.tree import Tree as RichTree

from homenode.doc import (
    LOOKS,
    Cell,
    Commands,
    Doc,
    Gallery,
    Items,
    Part,
    Section,
    Table,
    Text,
    Tree,
    Words,
    format_plain,
    spans,
)
from homenode.text import escape_lines, printable

_LONG, _SHORT = 24, 14  # least characters of a shortened name
_LONG_SET = 20  # characters up to which a CPU set is printed in full
_MIN_FOLDED = 24  # least width of a wrapped column of long text
_PLAIN = str.maketrans(
    {"\u2026": "...", "\u2013": "-", "\u00d7": "x", "\u00b7": "-", "\u00b1": "+-"}
)


class PrintableConsole(Console):
    """A console that removes terminal escapes: names, documents and output of guests and tools may
    hold escapes and text direction controls."""

    def print(self, *objects: Any, **options: Any) -> None:
        printed = (build_renderable(part) if isinstance(part, Doc) else part for part in objects)
        super().print(*printed, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(escape_lines(segment.text), segment.style)


def build_renderable(doc: Doc) -> RenderableType:
    """Return a document for a terminal: without pictures."""
    title = (Line(printable(doc.title), style="bold"),) if doc.title else ()
    return AsciiFallback(Group(*_space_parts((*title, *_render_parts(doc.parts)))))


def _space_parts(parts: Iterable[RenderableType | None]) -> list[RenderableType]:
    """Return the parts with an empty line for None, except at the ends or twice in a row."""
    spaced_parts: list[RenderableType] = []
    is_due = False
    for part in parts:
        if part is None:
            is_due = True
            continue
        if is_due and spaced_parts:
            spaced_parts.append(Line(""))
        is_due = False
        spaced_parts.append(part)
    return spaced_parts


def _render_parts(parts: Sequence[Part]) -> Iterator[RenderableType | None]:
    """Yield the parts of a document; None = an empty line."""
    for part in parts:
        match part:
            case Text(words=""):
                yield None
            case Text():
                text: RenderableType = _render_line(part.words, part.look)
                if part.hang:
                    text = HangingLine(_render_line(part.words, part.look), part.hang, part.command)
                # Wrapped lines stay below their first word, not below its indent.
                yield Padding(text, (0, 0, 0, part.indent), expand=False) if part.indent else text
            case Items():
                yield from (
                    Padding(_render_line(words), (0, 0, 0, 2), expand=False) for words in part.items
                )
            case Tree():
                yield _grow_tree(part, RichTree(_render_line(part.words)))
            case Commands():
                yield from map(ShellCommand, part.lines)
            case Table() if part.rows:
                yield from (None, FittedTable(part), None)
            case Section():
                yield None
                if part.title:
                    yield _render_line(part.title, part.look or "head")
                yield from _render_parts(part.parts)
            case Table() | Gallery():
                pass


def _render_line(words: Words, look: str = "") -> Line:
    line = Line(style=_choose_style(look))
    for span in spans(words):
        line.append(printable(span.text), _choose_style(span.look))
    return line


def _grow_tree(tree: Tree, rich_tree: RichTree) -> RichTree:
    for branch in tree.branches:
        _grow_tree(branch, rich_tree.add(_render_line(branch.words)))
    return rich_tree


def _choose_style(look: str) -> str:
    return " ".join(LOOKS[name] for name in look.split() if name in LOOKS)


def _render_cell(cell: str | Cell) -> Line:
    if isinstance(cell, str):
        return _render_line(cell)
    return _render_line(cell.lines[0] if len(cell.lines) == 1 else format_plain(cell), cell.look)


def _spread_cells(row: Sequence[str | Cell]) -> Iterator[str | Cell]:
    """Yield a cell for each column; a cell over several columns is followed by empty cells."""
    for cell in row:
        yield cell
        yield from [""] * (cell.across - 1 if isinstance(cell, Cell) else 0)


class AsciiFallback:
    """Renders its content; if the output's encoding is not Unicode, missing characters become
    question marks instead of an error."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            if options.ascii_only and not segment.text.isascii():
                text = segment.text.translate(_PLAIN).encode("ascii", "replace").decode()
                yield Segment(text, segment.style, segment.control)
            else:
                yield segment


class HangingLine:
    """A label with its value; wrapped lines begin below the value. command: as in `Text`."""

    def __init__(self, line: Line, column: int, command: str = "") -> None:
        self._label, self._value = line.divide([column])
        self._command = printable(command)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        column = len(self._label)
        for number, line in enumerate(self._wrap_lines(console, options.max_width - column)):
            yield Line.assemble(self._label if not number else " " * column, line)

    def _wrap_lines(self, console: Console, width: int) -> Iterator[Line]:
        before, command, after = self._value.plain.partition(self._command or "\n")
        if not command or self._value.cell_len <= width:
            yield from self._value.wrap(console, width)
            return
        yield from Line(before).wrap(console, width) if before else ()
        yield from (Line(line.rstrip("\n")) for line in ShellCommand(command).wrap_lines(width))
        yield from Line(after.strip()).wrap(console, width) if after else ()


class FittedTable:
    """A table within a width: shortened names and CPU sets, wrapped texts, then fewer columns."""

    def __init__(self, table: Table) -> None:
        self._table = replace(table, rows=tuple(tuple(_spread_cells(row)) for row in table.rows))
        self._heads = tuple(map(format_plain, table.heads))
        self._rows = tuple(tuple(map(_render_cell, row)) for row in self._table.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, space = self._table, options.max_width
        if table.cpu_sets and self._least_width(console, self._heads, stacked=False) > space:
            yield FittedTable(_shorten_sets(table))
            return
        if self._least_width(console, self._heads) <= space:
            yield self._fit_heads(console, self._heads, space)
            return
        unfolded_heads = [head for head in self._heads if head not in table.folds]
        if table.folds == self._heads[-1:] and self._least_width(console, unfolded_heads) <= space:
            yield self._fit_heads(console, unfolded_heads, space)
            for row in self._rows:
                yield Line.assemble(row[0], ": ", row[-1])
            return
        yield from self._shorten_names(console, space, _LONG)._narrow(console, space)

    def _narrow(self, console: Console, space: int) -> RenderResult:
        """Yield the table without its least columns, then without columns from the right except the
        last, and the omitted heads; as paragraphs if no two columns fit."""
        heads, omitted_heads = list(self._heads), []
        for head in dict.fromkeys((*self._table.least, *reversed(self._heads[1:-1]))):
            if self._least_width(console, heads) <= space:
                break
            heads.remove(head)
            omitted_heads.append(head)
        table = self._shorten_names(console, space, _SHORT, heads)
        if table._least_width(console, heads) <= space:
            yield table._fit_heads(console, heads, space)
            names = ", ".join(head for head in self._heads if head in omitted_heads)
            if names:
                yield Line(f"not shown, the terminal is too narrow: {names}", style="dim")
            return
        for row in self._rows:
            named_cells = zip(self._heads[1:], row[1:], strict=True)
            texts = (Line.assemble(f"{name} ", text) for name, text in named_cells if text)
            yield Line.assemble(row[0], ": ", Line(", ").join(texts))

    def _shorten_names(
        self, console: Console, space: int, shortest: int, heads: Sequence[str] = ()
    ) -> "FittedTable":
        """Return the table with names of at least this many characters, if it shortens names."""
        excess = self._least_width(console, heads or self._heads) - space
        if excess <= 0 or not self._table.shortened:
            return self
        names = [format_plain(row[0]) for row in self._table.rows]
        width = max(shortest, max(map(len, names)) - excess)
        rows = zip(names, self._table.rows, strict=True)
        short = tuple((_remove_middle(name, width), *row[1:]) for name, row in rows)
        return FittedTable(replace(self._table, rows=short))

    def _fit_heads(self, console: Console, heads: Sequence[str], space: int) -> RichTable:
        """Put each head on one line if it fits, else break it into words."""
        return self._drawn_table(
            heads, stacked=self._least_width(console, heads, stacked=False) > space
        )

    def _least_width(self, console: Console, heads: Sequence[str], *, stacked: bool = True) -> int:
        """Return the least width of these columns; those that fold need few characters."""
        wide = console.options.update(width=10_000)
        unfolded_heads = [head for head in heads if head not in self._table.folds]
        rich_table = self._drawn_table(unfolded_heads, stacked=stacked)
        folds = (head for head in heads if head in self._table.folds)
        folded_width = sum(min(self._longest_cell(head), _MIN_FOLDED) for head in folds)
        return Measurement.get(console, wide, rich_table).maximum + folded_width

    def _longest_cell(self, head: str) -> int:
        at = self._heads.index(head)
        return 1 + max(len(head), *(len(row[at]) for row in self._rows))

    def _drawn_table(self, heads: Sequence[str], *, stacked: bool) -> RichTable:
        rich_table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        columns = [at for at, head in enumerate(self._heads) if head in heads]
        for head in (self._heads[at] for at in columns):
            folds = head in self._table.folds
            name = head.replace(" ", "\n") if stacked and not folds else head
            justify: Literal["right", "left"] = "right" if head in self._table.numeric else "left"
            rich_table.add_column(Line(name), no_wrap=not folds, overflow="fold", justify=justify)
        for row in self._rows:
            rich_table.add_row(*(row[at] for at in columns))
        return rich_table


def _shorten_sets(table: Table) -> Table:
    """Return the table with long CPU sets reduced to their first three and last two parts."""

    def short(cell: str | Cell) -> str | Cell:
        parts = format_plain(cell).split(",")
        if len(format_plain(cell)) <= _LONG_SET or len(parts) <= 5:
            return cell
        return f"{','.join(parts[:3])}, ... ,{','.join(parts[-2:])}"

    rows = tuple(
        tuple(
            short(cell) if head in table.cpu_sets else cell
            for head, cell in zip(table.heads, row, strict=True)
        )
        for row in table.rows
    )
    return replace(table, rows=rows, cpu_sets=())


def _remove_middle(text: str, width: int) -> str:
    """Shorten a name to its beginning and end, which distinguish it.

    >>> _remove_middle("gpu-7.rack-17.example.org", 14)
    'gpu-7.…ple.org'
    """
    if len(text) <= width:
        return text
    return f"{text[: width // 2 - 1]}…{text[len(text) - (width - width // 2) :]}"


class ShellCommand:
    """A command for copying: long commands use the shell's line continuation.

    >>> print("".join(ShellCommand("virsh define --validate 'a b.xml'").wrap_lines(24)))
    virsh define \\
    --validate 'a b.xml'
    """

    def __init__(self, command: str) -> None:
        self._command = printable(command)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.wrap_lines(options.max_width):
            yield Line(line.rstrip("\n"), no_wrap=True, overflow="ignore")

    def wrap_lines(self, width: int) -> Iterator[str]:
        """Yield its lines within this width. A longer word in quotes is closed and opened again."""
        remainder, width = self._command, max(20, width)
        while len(remainder) > width:
            end = self._end(remainder, width)
            if end is None and '"' in remainder[:2]:
                break
            if end is None:
                yield f"{remainder[: width - 2]}'\\\n"
                remainder = f"'{remainder[width - 2 :]}"
                continue
            yield remainder[:end] + "\\\n"
            remainder = remainder[end:]
        yield remainder

    @staticmethod
    def _end(text: str, width: int) -> int | None:
        """Return the end of a line: after a space if possible, else within a word; None if it would
        be within quotes, in which a shell does not continue lines."""
        quotes = [""]  # the open quote before each letter
        for letter in text[: width - 1]:
            is_quote = letter in ("'", '"') and quotes[-1] in ("", letter)
            quotes.append(quotes[-1] if not is_quote else "" if quotes[-1] else letter)
        ends = [end for end in range(2, width) if not quotes[end]]
        spaces = [end for end in ends if text[end - 1] == " "]
        return max(spaces or ends, default=None)
