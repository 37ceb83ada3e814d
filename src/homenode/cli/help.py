"""Help: what `--help` prints, what a shell may fill in, and the scripts that ask for it. [I/O]

A command's help is the docstring of its record: what it does, then behind "Options:" what each
field does, then behind "Examples:" commands that one can copy.

A completion script sets _HOMENODE_COMPLETE to complete_SHELL, COMP_WORDS to the words of the line,
one a line, and COMP_CWORD to the number of the one that is typed. What knows the values of an
option takes what was typed so far; those candidates that begin like it are kept.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from homenode.cli.command import EXAMPLES, HELP_ALL, REQUIRED, Command, Parameter
from homenode.cli.terminal import note, print_own, say, write_bytes, write_text
from homenode.errors import UsageError
from homenode.option import Arg, Flag
from homenode.package_data import package_text
from homenode.safe.input_files import read_input

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
    sections = _sections(command, parameters, whole=whole)
    for number, (title, rows) in enumerate(sections.items()):
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
        yield f"Help of a command: {path} COMMAND --help"
    if not whole and any(one.opt.names for one in parameters):
        yield f"All options, with choices and defaults: {path} {HELP_ALL}"
    if examples.strip():
        yield ""
        yield style(EXAMPLES)
        yield from (f"  {line}" for line in textwrap.dedent(examples.strip("\n")).splitlines())


def _in_short(text: str, room: int) -> str:
    """The first clause of a description, with those behind it that fit in the same line."""
    first, *more = re.split(r"(?<=[.;]) ", text)
    for clause in more:
        if len(first) + len(clause) + 2 > room:
            break
        first += f" {clause}"
    return first.rstrip(".;") + "." if first else ""


def _usage(command: Command, path: str, parameters: tuple[Parameter, ...]) -> str:
    """The command with its arguments, and the options that it cannot do without."""
    words, required = [path], []
    for one in parameters:
        if isinstance(one.opt, Arg):
            words.append(one.opt.metavar)
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
            row = (one.opt.metavar, one.help)
            arguments.setdefault("Arguments", []).append(row)
        elif whole or not one.opt.rare:
            row = (_names(one), option_text(one))
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


def option_text(one: Parameter) -> str:
    """What an option does, and its default."""
    text, default = one.help, ""
    if isinstance(one.opt, Flag):
        default = one.opt.off[0] if one.opt.off else ""
    elif one.default not in (REQUIRED, None, "", ()):
        default = one.opt.show(one.default)
    return f"{text} Default: {default}." if default and "Default:" not in text else text


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


Candidates = list[tuple[str, str] | str]

_PLACES = {
    "bash": (".bash_completions/homenode.sh", ".bashrc", "source ~/.bash_completions/homenode.sh"),
    "zsh": (".zfunc/_homenode", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/homenode.fish", None, ""),
}
"""Each shell, and below the home folder: where the script goes; file and line that read it."""

_VIRSH_S = 3.0
"""A daemon that does not answer must not keep a shell waiting."""


def shell_of(name: str | None) -> str:
    """The shell that is named, else the user's. Raises UsageError."""
    shell = name or Path(os.environ.get("SHELL", "")).name
    if shell not in _PLACES:
        raise UsageError(
            f"completion: expected one of {', '.join(_PLACES)}, found {shell or 'none'}",
            hint="homenode --show-completion bash",
        )
    return shell


def script(shell: str) -> str:
    """What the shell reads."""
    return package_text("cli", f"completion.{shell}").rstrip()


def install(shell: str) -> None:
    """Write the script where the user's shell reads it."""
    place, start, line = _PLACES[shell]
    path = Path.home() / place
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, package_text("cli", f"completion.{shell}"))
    if start is not None:
        read_at_start = Path.home() / start
        said = b""
        if read_at_start.exists():
            said = read_input(read_at_start, "what the shell reads at its start")
        if line.encode() not in said:
            write_bytes(read_at_start, said.rstrip() + b"\n"[: len(said)] + line.encode() + b"\n")
    note(f"wrote {path}; it counts from the next start of {shell} on")


def answer(asked: str, program: Command) -> None:
    """Print a script, or the candidates for the word that is typed."""
    task, _, shell = asked.partition("_")
    if task == "source" and shell in _PLACES:
        say(script(shell))
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    number = os.environ.get("COMP_CWORD", "0")
    at = int(number) if number.isdecimal() else 0
    typed = words[at] if at < len(words) else ""
    for one in candidates(program, words[1:at], typed):
        name, about = (one, "") if isinstance(one, str) else one
        if shell == "fish":
            say(f"{name}\t{about}" if about else name)
        elif shell == "zsh":
            say(name.replace(":", "\\:") + (f":{about}" if about else ""))
        else:
            say(name)


def candidates(program: Command, before: Sequence[str], typed: str) -> Candidates:
    """What the typed word may become, after the words before it."""
    command, words = program, list(before)
    while words and words[0] in command.subcommands:
        command = command.subcommands[words.pop(0)].whole()
    if words and not command.record:
        return []
    parameters = command.parameters
    waiting = [one for one in parameters if words and words[-1] in one.opt.names]
    if waiting and not isinstance(waiting[0].opt, Flag):
        return _of(waiting[0], typed)
    if typed.startswith("-"):
        names = [name for one in parameters for name in one.opt.names if name.startswith("--")]
        return [name for name in (*names, "--help") if name.startswith(typed)]
    below = [one.name for one in command.commands if not (one.hidden or words)]
    arguments = [one for one in parameters if isinstance(one.opt, Arg) and one.opt.complete]
    found: Candidates = [name for name in below if name.startswith(typed)]
    return found + [one for argument in arguments[:1] for one in _of(argument, typed)]


def _of(one: Parameter, typed: str) -> Candidates:
    """Values of an option or argument."""
    known: Candidates = list(one.choices)
    if one.opt.complete:
        known = _KNOWN[one.opt.complete](typed)
    return [two for two in known if (two if isinstance(two, str) else two[0]).startswith(typed)]


def layouts(incomplete: str) -> Candidates:
    """Layouts with what each does, and auto."""
    from homenode.vm.layout import AUTO_SUMMARY, SUMMARIES

    return [("auto", AUTO_SUMMARY), *SUMMARIES.items()]


def layout_lists(incomplete: str) -> Candidates:
    """The last of several layouts with commas between them."""
    from homenode.vm.layout import PRESETS

    return _after_comma(incomplete, PRESETS)


def test_lists(incomplete: str) -> Candidates:
    """The last of several groups of tests with commas between them."""
    from homenode.measure.model import Group

    return _after_comma(incomplete, (str(one) for one in Group if one is not Group.APP))


def host_sources(incomplete: str) -> Candidates:
    """Names of shipped hosts, and files."""
    from homenode.machine.description.parse import shipped_hosts

    return [*shipped_hosts(), *_files(incomplete)]


def domain_names(incomplete: str) -> Candidates:
    """Domains of the system's libvirt; none where it does not answer."""
    from homenode.errors import ToolError
    from homenode.process import run

    argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "list", "--all", "--name")
    try:
        listed = run(argv, _VIRSH_S).stdout_or_raise()
    except ToolError:
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def finding_ids(incomplete: str) -> Candidates:
    """Findings that have a page."""
    from homenode.findings import catalogue

    return sorted(catalogue())


def _after_comma(incomplete: str, known: Iterable[str]) -> Candidates:
    before, comma, _ = incomplete.rpartition(",")
    given = before.split(",")
    return [f"{before}{comma}{one}" for one in known if one not in given]


def _files(incomplete: str) -> Iterator[str]:
    """Paths that begin like this, as a shell names them."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        for path in sorted(Path(folder or slash or ".").iterdir()):
            if path.name.startswith(name) and (name or not path.name.startswith(".")):
                yield f"{folder}{slash}{path.name}" + ("/" if path.is_dir() else "")
    except OSError:
        return


_KNOWN = {
    "layouts": layouts,
    "layout_lists": layout_lists,
    "test_lists": test_lists,
    "host_sources": host_sources,
    "domain_names": domain_names,
    "finding_ids": finding_ids,
}
"""By the name that an option gives as `complete`."""
