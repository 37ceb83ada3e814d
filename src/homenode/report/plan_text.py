"""PlanText: an explanation on a terminal, narrow or wide, and a plan that could not be."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from homenode.plan.model import Unplannable
from homenode.plan.words.explain import rejection_lines
from homenode.plan.words.explanation import Explanation, Section
from homenode.report.terminal_text import AsciiWhereNeeded, ShellCommand, TableOrList
from homenode.wording import printable

_STYLES = {"warning:": "yellow", "critical:": "red", "hint:": "cyan", "fix:": "cyan"}


def plan_text(explanation: Explanation) -> RenderableType:
    """The explanation; tables become lists where the terminal is too narrow for them."""
    parts: list[RenderableType] = [
        Text(printable(explanation.title), style="bold"),
        Text(printable(explanation.summary)),
    ]
    for section in explanation.sections:
        parts += [Text(""), Text(printable(section.heading), style="bold underline")]
        parts += _section(section)
    return AsciiWhereNeeded(Group(*parts))


def rejections_text(error: Unplannable) -> RenderableType:
    """Why no placement fits: each rejection, and what would make it fit."""
    parts: list[RenderableType] = [Text(printable(error.message), style="bold")]
    parts += [_line(line) for line in rejection_lines(error.rejections, error.hint)]
    if error.hint:
        parts.append(_line(f"hint: {error.hint}"))
    return AsciiWhereNeeded(Group(*parts))


def _section(section: Section) -> list[RenderableType]:
    parts = [_line(line) for line in section.lines]
    if section.table is not None and section.table.rows:
        parts.append(TableOrList(section.table.columns, section.table.rows))
    parts += [ShellCommand(command) for command in section.commands]
    return parts


def _line(line: str) -> RenderableType:
    stripped = line.lstrip(" ")
    text = Text(printable(stripped))
    first = stripped.partition(" ")[0]
    if first in _STYLES:
        text.stylize(_STYLES[first], 0, len(first))
    # Wrapped lines stay below their first word, not below its indent.
    indent = len(line) - len(stripped)
    return Padding(text, (0, 0, 0, indent), expand=False) if indent else text
