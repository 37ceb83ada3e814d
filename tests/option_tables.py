"""Tables of options in docs/commands: names, values and defaults come from the options' records.

`python -m tests.option_tables` writes them; `make docs` does so before it makes the pages. What an
option means to a reader stands in the page.
"""

import re
from collections.abc import Iterator

from homenode.cli.command import REQUIRED, Parameter
from homenode.cli.main import PROGRAM
from homenode.opt import Arg, Flag
from tests.command_line import every_command, has_room
from tests.doc_pages import ROOT, Page, read_page

_CELL = re.compile(r"(?<!\\)\|")
_HEADS = ("option", "argument or option")
_NAME = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def pages() -> Iterator[Page]:
    """The pages of commands."""
    shown = (one for one in PROGRAM.commands if not one.hidden and has_room(one))
    yield from (read_page(f"docs/commands/{one.name}.md") for one in shown)


def rewritten(page: Page) -> str:
    """The page as the records have it."""
    (command,) = (one for one in PROGRAM.commands if one.name == page.path.stem)
    known: dict[str, list[Parameter]] = {}
    for _, each in every_command(command):
        for one in each.parameters:
            for name in one.opt.names:
                known.setdefault(name, []).append(one)
    heads: tuple[str, ...] = ()
    lines = []
    for line in page.text.split("\n"):
        cells = [cell.strip() for cell in _CELL.split(line)[1:-1]]
        heads = () if not cells else heads or tuple(cells)
        names = _NAME.findall(cells[0]) if heads[:1] and heads[0] in _HEADS else []
        found = known.get(names[0], []) if len(names) == 1 else []
        if found:
            cells[0] = _first_cell(cells[0], found)
            if len(cells) == 3 and heads[2] == "default":
                cells[2] = _default(cells[2], found)
            line = f"| {' | '.join(cells)} |".replace("|  |", "| |")
        lines.append(line)
    return "\n".join(lines)


def _first_cell(cell: str, found: list[Parameter]) -> str:
    """As the record has it; where commands of one page differ, as one of them has it."""
    cells = tuple(dict.fromkeys(map(_typed, found)))
    alike = [one for one in cells if found[0].opt.metavar and one.split()[-1] in cell.split()]
    return cell if cell in cells else (alike or (cells if len(cells) == 1 else (cell,)))[0]


def _typed(one: Parameter) -> str:
    names = ", ".join(sorted(one.opt.names, key=len))
    if isinstance(one.opt, Flag):
        return ", ".join((f"`{names}`", *(f"`{name}`" for name in one.opt.off)))
    return f"`{names} {one.opt.metavar}`".replace("|", "\\|")


def _default(cell: str, found: list[Parameter]) -> str:
    """The cell where it names a default of a record; else the first's, where that is a value."""
    texts = {re.sub(r"\.0$", "", one.opt.show(one.default)) for one in found if _is_value(one)}
    if not texts or not all(map(_is_value, found)) or any(text in cell for text in texts):
        return cell
    return f"`{min(texts)}`"


def _is_value(one: Parameter) -> bool:
    """Whether its default is one that is typed."""
    has_text = not (isinstance(one.opt, Flag | Arg) or one.many)
    return has_text and one.default not in (REQUIRED, None, "", ())


if __name__ == "__main__":
    for written in pages():
        (ROOT / written.path).write_text(rewritten(written))
