"""Help: what `--help` and `--help-all` print of a command. [I/O]

A command's help is the docstring of its record. Lines after "Examples:" in it are commands that
one can copy.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

from homenode.cli.command import HELP_ALL, REQUIRED, Command, Parameter
from homenode.cli.terminal import print_own
from homenode.opt import Arg, Flag

EXAMPLES = "Examples:"
_WIDEST = 100
_COLUMN = 28
"""Where descriptions begin; on a narrow terminal they stand below what they describe."""

_NARROW = 72


def help_text(
    command: Command, path: str, *, whole: bool = False, to_terminal: bool = False
) -> str:
    """The help for the terminal that there is."""
    width = max(40, min(_WIDEST, shutil.get_terminal_size().columns - 1))
    return "\n".join(help_lines(command, path, width, _bold if to_terminal else str, whole=whole))


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m"


def print_help(command: Command, path: str, *, whole: bool) -> None:
    """To standard output."""
    print_own(help_text(command, path, whole=whole, to_terminal=sys.stdout.isatty()))


def examples_of(command: Command) -> tuple[str, ...]:
    """The commands that the help of a command ends with."""
    _, _, after = command.help.partition(EXAMPLES)
    joined = after.replace("\\\n", " ")
    return tuple(" ".join(line.split()) for line in joined.splitlines() if line.strip())


def help_lines(
    command: Command,
    path: str,
    width: int,
    style: Callable[[str], str] = str,
    *,
    whole: bool = False,
) -> Iterator[str]:
    """The help of a command: usage, what it does, arguments and options, subcommands, examples."""
    parameters = command.parameters
    first, *more = _wrapped(_usage(command, path, parameters), width - len("Usage: "))
    yield f"{style('Usage:')} {first}"
    yield from (f"{'':{len('Usage: ')}}{line}" for line in more)
    text, _, examples = command.help.partition(EXAMPLES)
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    for paragraph in paragraphs if whole else paragraphs[:2]:
        yield ""
        yield from _wrapped(" ".join(paragraph.split()), width)
    for number, (title, rows) in enumerate(_sections(command, parameters, whole=whole).items()):
        if number == 0 or command.record:
            yield ""
        yield style(f"{title}:")
        column = _COLUMN
        if not any(left.startswith("-") for left, _ in rows):
            column = 4 + max(len(left) for left, _ in rows)
        for left, right in rows:
            shown = right if whole else _in_short(right, width - column)
            yield from _row(left, shown, width, column)
    if not command.record:
        yield f"More of each: {path} COMMAND --help"
    if not whole and any(one.opt.names for one in parameters):
        yield f"All of them, with choices and defaults: {path} {HELP_ALL}"
    if examples.strip():
        yield ""
        yield style(EXAMPLES)
        yield from (f"  {line}" for line in textwrap.dedent(examples.strip("\n")).splitlines())


def _in_short(text: str, room: int) -> str:
    """The first sentences of a description that fit in a line, or the first one to its last comma
    there."""
    first, *more = text.split(". ")
    for sentence in more:
        if len(first) + len(sentence) + 3 > room:
            break
        first += f". {sentence}"
    if len(first) >= room and (cut := first.rfind(", ", 0, room - 1)) > room // 3:
        first = first[:cut]
    return first.rstrip(".") + "."


def _usage(command: Command, path: str, parameters: tuple[Parameter, ...]) -> str:
    """The command with its arguments, and the options that it cannot do without."""
    words, required = [path], []
    for one in parameters:
        if isinstance(one.opt, Arg):
            words += [] if one.opt.hidden else [one.opt.metavar]
        elif one.default is REQUIRED:
            required.append(f"{max(one.opt.names, key=len)} {one.opt.metavar}")
    if not command.record:
        words.append("COMMAND")
    return " ".join([*words, *required, "[OPTIONS]"])


def _sections(
    command: Command, parameters: tuple[Parameter, ...], *, whole: bool
) -> dict[str, list[tuple[str, str]]]:
    """Rows of names and descriptions below their titles, in the order of the declarations."""
    arguments: dict[str, list[tuple[str, str]]] = {}
    options: dict[str, list[tuple[str, str]]] = {"Options": []}
    for one in parameters:
        if isinstance(one.opt, Arg):
            if not one.opt.hidden:
                row = (one.opt.metavar, one.opt.help)
                arguments.setdefault("Arguments", []).append(row)
        elif whole or not one.opt.rare:
            row = (_names(one), _description(one))
            options.setdefault(one.opt.panel if whole else "Options", []).append(row)
    subcommands: dict[str, list[tuple[str, str]]] = {}
    for sub in command.commands:
        if not sub.hidden:
            subcommands.setdefault(sub.panel, []).append((sub.name, summary(sub)))
    if not options["Options"]:
        del options["Options"]
    return arguments | options | subcommands


def summary(command: Command) -> str:
    """The first sentence of a command's help."""
    return " ".join(command.help.strip().partition("\n\n")[0].split())


def _names(one: Parameter) -> str:
    """An option as it is typed: "-o, --output FILE"."""
    names = ", ".join(sorted(one.opt.names, key=len))
    if isinstance(one.opt, Flag):
        return names + (f" / {', '.join(one.opt.off)}" if one.opt.off else "")
    return f"{names} {one.opt.metavar}"


def _description(one: Parameter) -> str:
    """What an option means, its choices and its default; each once."""
    parts = [one.opt.help] if one.opt.help else []
    if one.choices:
        parts.append(f"One of {', '.join(one.choices)}.")
    if one.many and "epeat" not in one.opt.help:
        parts.append("Repeatable.")
    if isinstance(one.opt, Flag):
        if one.opt.off:
            name = one.opt.names[0] if one.default else one.opt.off[0]
            parts.append(f"Default: {name}.")
    elif "efault" not in one.opt.help and one.default not in (REQUIRED, None, "", ()):
        text = one.opt.show(one.default)
        parts += [f"Default: {text}."] if text else []
    return " ".join(parts)


def _row(left: str, right: str, width: int, column: int) -> Iterator[str]:
    """A name with its description to the right, or below where there is no space for both."""
    below = width < _NARROW and column == _COLUMN
    indent = 6 if below else column
    lines = list(_wrapped(right, width - indent))
    start = f"  {left}"
    if lines and not below and len(start) + 2 <= indent:
        yield f"{start:<{indent}}{lines.pop(0)}"
    else:
        yield start
    yield from (f"{'':{indent}}{line}" if line else "" for line in lines)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Lines of whole words."""
    yield from textwrap.wrap(
        text, max(24, width), break_long_words=False, break_on_hyphens=False
    ) or [""]
