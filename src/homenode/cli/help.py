"""Help: what `--help` prints, and what a wrong call is answered. [I/O]

A command's docstring is its help. Lines after "Examples:" in it are commands that one can copy.
"""

import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from homenode.errors import UsageError

EXAMPLES = "Examples:"
_PLAIN: type[BaseException] = typer.BadParameter.__mro__[1]
"""The error of a call with too many arguments, wherever this typer has its click from."""

_WIDEST = 100
_COLUMN = 28
"""Where descriptions begin; on a narrow terminal they stand below what they describe."""

_NARROW = 72


class HelpCommand(TyperCommand):
    """A command whose help breaks no word and ends with examples."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help_of(self, ctx))


class HelpGroup(TyperGroup):
    """A group of commands, likewise."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not (args[0].startswith("-") or ctx.resilient_parsing):
            from homenode.wording import did_you_mean

            shown = [name for name, one in self.commands.items() if not one.hidden]
            group = path_of(ctx).partition(" ")[2]
            raise UsageError(
                f"{group}: expected".removeprefix(": ") + f" a command, found {args[0]!r}",
                hint=f"{did_you_mean(args[0], shown)}{path_of(ctx)} --help",
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_help_of(self, ctx))


class CommandWithActions(HelpGroup):
    """A command that has subcommands as well: `doctor VM.xml` and `doctor retrain BDF`.

    Its first registered command is the command itself; what names no other one is a call of it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = next(iter(self.commands))
        if not args or args[0] == own or args[0] not in self.commands:
            args = [own, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself has no name in the calls that its errors and help show."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == next(iter(self.commands)) else name), command, rest

    def actions(self) -> dict[str, Any]:
        """Its subcommands that help names."""
        return {name: one for name, one in list(self.commands.items())[1:] if not one.hidden}


def path_of(ctx: Any) -> str:
    """The words that call the command of a context: "homenode doctor retrain"."""
    return " ".join(ctx.command_path.split())


def examples_of(command: Any) -> tuple[str, ...]:
    """The commands that the help of a command ends with."""
    _, _, after = (command.help or "").partition(EXAMPLES)
    joined = after.replace("\\\n", " ")
    return tuple(" ".join(line.split()) for line in joined.splitlines() if line.strip())


def _help_of(command: Any, ctx: Any) -> str:
    width, style = _terminal()
    return "\n".join(help_lines(command, ctx, width, style))


def _terminal() -> tuple[int, Callable[[str], str]]:
    """Columns to fill, and how headings stand out."""
    import shutil

    width = max(40, min(_WIDEST, shutil.get_terminal_size().columns - 1))
    if sys.stdout.isatty():
        return width, lambda text: f"\033[1m{text}\033[0m"
    return width, str


def help_lines(
    command: Any, ctx: Any, width: int, style: Callable[[str], str] = str
) -> Iterator[str]:
    """The help of a command: usage, what it does, arguments and options, subcommands, examples."""
    first, *more = _wrapped(_usage(command, ctx), width - len("Usage: "))
    yield f"{style('Usage:')} {first}"
    yield from (f"{'':{len('Usage: ')}}{line}" for line in more)
    text, _, examples = (command.help or "").partition(EXAMPLES)
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        yield ""
        yield from _wrapped(" ".join(paragraph.split()), width)
    for title, rows in _sections(command, ctx).items():
        yield ""
        yield style(f"{title}:")
        column = (
            _COLUMN
            if any(left.startswith("-") for left, _ in rows)
            else 4 + max(len(left) for left, _ in rows)
        )
        for left, right in rows:
            yield from _row(left, right, width, column)
    if examples.strip():
        yield ""
        yield style(EXAMPLES)
        yield from (f"  {line}" for line in textwrap.dedent(examples.strip("\n")).splitlines())
    if command.epilog:
        yield ""
        yield from _wrapped(" ".join(command.epilog.split()), width)


def _usage(command: Any, ctx: Any) -> str:
    """The command with its arguments, and the options that it cannot do without."""
    words = [path_of(ctx)]
    required = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words.append(_argument(parameter))
        elif parameter.required and not parameter.hidden:
            required.append(
                f"{max(parameter.opts, key=len)} {parameter.metavar or _kind(parameter)}"
            )
    if isinstance(command, TyperGroup):
        words.append("COMMAND")
    return " ".join([*words, *required, "[OPTIONS]"])


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Rows of names and descriptions below their titles, in the order of the declarations."""
    sections: dict[str, list[tuple[str, str]]] = {}
    options: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            row = (_argument(parameter), parameter.help or "")
            sections.setdefault("Arguments", []).append(row)
        else:
            title = getattr(parameter, "rich_help_panel", None) or "Options"
            options.setdefault(title, []).append((_names(parameter), _description(parameter)))
    subcommands: dict[str, list[tuple[str, str]]] = {}
    for name, one in _subcommands(command, ctx).items():
        title = getattr(one, "rich_help_panel", None) or "Commands"
        subcommands.setdefault(title, []).append((name, _summary(one)))
    if isinstance(command, TyperGroup):
        return sections | subcommands | options
    return sections | options | subcommands


def _subcommands(command: Any, ctx: Any) -> dict[str, Any]:
    if isinstance(command, TyperGroup):
        shown = {name: command.commands[name] for name in command.list_commands(ctx)}
        return {name: one for name, one in shown.items() if not one.hidden}
    group = None if ctx.parent is None else ctx.parent.command
    if isinstance(group, CommandWithActions) and command is next(iter(group.commands.values())):
        return group.actions()
    return {}


def _summary(command: Any) -> str:
    """The first sentence of a command's help."""
    if isinstance(command, CommandWithActions):
        command = next(iter(command.commands.values()))
    first = (command.help or "").strip().partition("\n\n")[0]
    return " ".join(first.split())


def _names(option: Any) -> str:
    """An option as it is typed: "-o, --output FILE"."""
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        names += " / " + ", ".join(option.secondary_opts)
    if option.is_flag or getattr(option, "count", False):
        return names
    return f"{names} {option.metavar or _kind(option)}"


def _choices(option: Any) -> tuple[str, ...]:
    descriptor = getattr(option, "type_descriptor", None)
    return tuple(map(str, getattr(descriptor, "choices", None) or ()))


def _kind(option: Any) -> str:
    if _choices(option):
        return "NAME"
    annotation = str(getattr(getattr(option, "type_descriptor", None), "annotation", ""))
    return "N" if "int" in annotation or "float" in annotation else "TEXT"


def _description(option: Any) -> str:
    """What an option means, its choices and its default; each once."""
    text = " ".join((option.help or "").split()) if "\n" not in (option.help or "") else option.help
    parts = [text] if text else []
    if choices := _choices(option):
        parts.append(f"One of {', '.join(choices)}.")
    if option.multiple and "epeat" not in text:
        parts.append("Repeatable.")
    default = None if callable(option.default) else option.default
    if option.is_flag:
        is_said = not option.secondary_opts
        default = (option.opts if default else option.secondary_opts or option.opts)[0]
    else:
        is_said = "efault" in text or default in (None, "", (), [])
    if not is_said:
        parts.append(f"Default: {default}.")
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
    """Lines of whole words; a newline in the text stays one, and so do two columns."""
    for line in text.splitlines() or [""]:
        first, gap, rest = line.partition("  ")
        lead = len(line) - len(rest.lstrip()) if gap and first else 0
        yield from textwrap.wrap(
            line[lead:],
            max(24, width),
            initial_indent=line[:lead],
            subsequent_indent=" " * lead,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]


def wrong_call(error: Any) -> str:
    """What to say of a call that the library for arguments refuses, with the next thing to try."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.message)
    ctx = getattr(error, "ctx", None)
    from homenode.wording import did_you_mean

    where = "homenode" if ctx is None else path_of(ctx)
    option = getattr(error, "option_name", None)
    guess = ""
    if isinstance(option, str):
        error.possibilities = None
        guess = did_you_mean(option, () if ctx is None else _options(ctx.command))
    elif type(error) is _PLAIN and ctx is not None and "--host" in _options(ctx.command):
        guess = "name a host with --host SOURCE. "
    choices = _choices(getattr(error, "param", None))
    if choices:
        given = error.message.split("'")[1::2][:1]
        guess = did_you_mean("".join(given), choices)
        names = ", ".join(choices)
        found = repr(given[0]) if given else "none"
        return (
            f"{where}: {error.param.opts[0]}: expected one of {names}, found {found}\n"
            f"  hint: {guess}{where} --help"
        )
    message = " ".join(error.format_message().rstrip(".").split())
    if message[:2].istitle():
        message = message[0].lower() + message[1:]
    return f"{where}: {message}\n  hint: {guess}{where} --help"


def _options(command: Any) -> list[str]:
    shown = [one for one in command.params if isinstance(one, TyperOption) and not one.hidden]
    return [name for one in shown for name in (*one.opts, *one.secondary_opts)]
