"""Help: the output of `--help`, completion candidates, and the completion scripts. [I/O]

A command's help is the docstring of its record: its purpose, the fields after "Options:", and
commands to copy after "Examples:".

A completion script sets _HOMENODE_COMPLETE to complete_SHELL, COMP_WORDS to the words of the line,
one per line, and COMP_CWORD to the number of the current word. The function of an option's values
gets the typed prefix; only candidates with this prefix are kept.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from homenode.cli.command import EXAMPLES, HELP_ALL, REQUIRED, Command, Parameter
from homenode.cli.terminal import print_own, say
from homenode.errors import unknown
from homenode.option import Arg, Flag
from homenode.units import parse_whole

_MAX_WIDTH = 100
_COLUMN = 28
"""Column of descriptions; on a narrow terminal they are printed below the option."""

_NARROW = 72


def format_help(
    command: Command, path: str, *, shows_all: bool = False, to_terminal: bool = False
) -> str:
    width = max(40, min(_MAX_WIDTH, shutil.get_terminal_size().columns - 1))
    return "\n".join(
        format_help_lines(
            command, path, width, _format_bold if to_terminal else str, shows_all=shows_all
        )
    )


def _format_bold(text: str) -> str:
    return f"\033[1m{text}\033[0m"


def print_help(command: Command, path: str, *, shows_all: bool) -> None:
    print_own(format_help(command, path, shows_all=shows_all, to_terminal=sys.stdout.isatty()))


def format_help_lines(
    command: Command,
    path: str,
    width: int,
    style: Callable[[str], str] = str,
    *,
    shows_all: bool = False,
) -> Iterator[str]:
    """Yield the help of a command: usage, purpose, arguments and options, subcommands, examples."""
    parameters = command.parameters
    first, *further_lines = _wrap(_format_usage(command, path, parameters), width - len("Usage: "))
    yield f"{style('Usage:')} {first}"
    yield from (f"{'':{len('Usage: ')}}{line}" for line in further_lines)
    text, _, examples = command.help.partition(EXAMPLES)
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    for paragraph in paragraphs if shows_all else paragraphs[:2]:
        yield ""
        yield from _wrap(" ".join(paragraph.split()), width)
    sections = _collect_sections(command, parameters, shows_all=shows_all)
    for number, (title, rows) in enumerate(sections.items()):
        if number == 0 or command.record:
            yield ""
        yield style(f"{title}:")
        column = _COLUMN
        if not any(name.startswith("-") for name, _ in rows):
            column = 4 + max(len(name) for name, _ in rows)
        for name, right in rows:
            shown_text = right if shows_all else _shorten(right, width - column)
            yield from _format_row(name, shown_text, width, column)
    if not command.record:
        yield f"Help of a command: {path} COMMAND --help"
    if not shows_all and any(parameter.opt.names for parameter in parameters):
        yield f"All options, with choices and defaults: {path} {HELP_ALL}"
    if examples.strip():
        yield ""
        yield style(EXAMPLES)
        yield from (f"  {line}" for line in textwrap.dedent(examples.strip("\n")).splitlines())


def _shorten(text: str, room: int) -> str:
    """Return the first clause of a description, with further clauses that fit in the same line."""
    first, *clauses = re.split(r"(?<=[.;]) ", text)
    for clause in clauses:
        if len(first) + len(clause) + 2 > room:
            break
        first += f" {clause}"
    return first.rstrip(".;") + "." if first else ""


def _format_usage(command: Command, path: str, parameters: tuple[Parameter, ...]) -> str:
    """Return the command with its arguments and its required options."""
    words, required_words = [path], []
    for parameter in parameters:
        if isinstance(parameter.opt, Arg):
            words.append(parameter.opt.metavar)
        elif parameter.default is REQUIRED:
            required_words.append(f"{max(parameter.opt.names, key=len)} {parameter.opt.metavar}")
    if not command.record:
        words.append("COMMAND")
    return " ".join([*words, *required_words, "[OPTIONS]"])


def _collect_sections(
    command: Command, parameters: tuple[Parameter, ...], *, shows_all: bool
) -> dict[str, list[tuple[str, str]]]:
    """Rows of names and descriptions below their titles, in the order of the declarations."""
    arguments: dict[str, list[tuple[str, str]]] = {}
    options: dict[str, list[tuple[str, str]]] = {"Options": []}
    for parameter in parameters:
        if isinstance(parameter.opt, Arg):
            row = (parameter.opt.metavar, parameter.help)
            arguments.setdefault("Arguments", []).append(row)
        elif shows_all or not parameter.opt.rare:
            row = (_format_names(parameter), format_option(parameter))
            options.setdefault(parameter.opt.panel if shows_all else "Options", []).append(row)
    subcommands: dict[str, list[tuple[str, str]]] = {}
    for sub in command.commands:
        if not sub.hidden:
            subcommands.setdefault(sub.panel, []).append((sub.name, format_summary(sub)))
    if not options["Options"]:
        del options["Options"]
    return arguments | options | subcommands


def format_summary(command: Command) -> str:
    """Return the first sentence of a command's help."""
    return " ".join(command.help.strip().partition("\n\n")[0].split())


def _format_names(parameter: Parameter) -> str:
    """Return an option as typed: "-o, --output FILE"."""
    names = ", ".join(sorted(parameter.opt.names, key=len))
    if isinstance(parameter.opt, Flag):
        return names + (f" / {', '.join(parameter.opt.off)}" if parameter.opt.off else "")
    return f"{names} {parameter.opt.metavar}"


def format_option(parameter: Parameter) -> str:
    """Return the description of an option with its default."""
    text, default = parameter.help, ""
    if isinstance(parameter.opt, Flag):
        default = parameter.opt.off[0] if parameter.opt.off else ""
    elif parameter.default not in (REQUIRED, None, "", ()):
        default = parameter.opt.show(parameter.default)
    return f"{text} Default: {default}." if default and "Default:" not in text else text


def _format_row(name: str, text: str, width: int, column: int) -> Iterator[str]:
    """Format a name with its description to the right, or below if it does not fit."""
    is_below = width < _NARROW and column == _COLUMN
    indent = 6 if is_below else column
    lines = list(_wrap(text, width - indent))
    start = f"  {name}"
    if lines and not is_below and len(start) + 2 <= indent:
        yield f"{start:<{indent}}{lines.pop(0)}"
    else:
        yield start
    yield from (f"{'':{indent}}{line}" if line else "" for line in lines)


def _wrap(text: str, width: int) -> Iterator[str]:
    """Yield the lines of whole words."""
    yield from textwrap.wrap(
        text, max(24, width), break_long_words=False, break_on_hyphens=False
    ) or [""]


Candidates = list[tuple[str, str] | str]

_SHELLS = ("bash", "zsh", "fish")

_VIRSH_S = 3.0
"""A daemon that does not answer must not keep a shell waiting."""


def find_shell(name: str | None) -> str:
    """Return the named shell, else the user's. Raises UsageError."""
    shell = name or Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise unknown("shell", shell, _SHELLS, "homenode --show-completion bash|zsh|fish")
    return shell


def read_script(shell: str) -> str:
    from homenode.package_data import read_package_text

    return read_package_text("cli", f"completion.{shell}").rstrip()


def answer_completion(request: str, program: Command) -> None:
    """Print the completion candidates for the current word, in the shell's format."""
    shell = request.removeprefix("complete_")
    words = os.environ.get("COMP_WORDS", "").split("\n")
    at = parse_whole(os.environ.get("COMP_CWORD")) or 0
    typed_text = words[at] if at < len(words) else ""
    for name, about in _add_texts(find_candidates(program, words[1:at], typed_text)):
        if shell == "fish":
            say(f"{name}\t{about}" if about else name)
        elif shell == "zsh":
            say(name.replace(":", "\\:") + (f":{about}" if about else ""))
        else:
            say(name)


def find_candidates(program: Command, before: Sequence[str], typed: str) -> Candidates:
    """Return the completion candidates of a word after the words before it."""
    command, words = program, list(before)
    while words and words[0] in command.subcommands:
        command = command.subcommands[words.pop(0)].load_room()
    if words and not command.record:
        return []
    parameters = command.parameters
    takes_value = {
        name: option
        for option in parameters
        if not isinstance(option.opt, Flag)
        for name in option.opt.names
    }
    if typed == "=":
        words, typed = [*words, "="], ""
    if words[-1:] == ["="]:  # bash makes three words of --layout=pin
        words.pop()
    if words and words[-1] in takes_value:
        return _find_values(takes_value[words[-1]], typed)
    option_name, equals, value = typed.partition("=")
    if equals and option_name in takes_value:
        return [
            (f"{option_name}={text}", about)
            for text, about in _add_texts(_find_values(takes_value[option_name], value))
        ]
    if typed.startswith("-"):
        names = [name for option in parameters for name in option.opt.names if len(name) > 2]
        return [name for name in (*names, "--help") if name.startswith(typed)]
    command_names = [sub.name for sub in command.commands if not (sub.hidden or words)]
    subcommands: Candidates = [name for name in command_names if name.startswith(typed)]
    arguments = [
        argument
        for argument in parameters
        if isinstance(argument.opt, Arg) and argument.opt.complete
    ]
    return subcommands + [value for first in arguments[:1] for value in _find_values(first, typed)]


def _find_values(parameter: Parameter, typed_text: str) -> Candidates:
    """Return the values of an option or argument."""
    values: Candidates = list(parameter.choices)
    if parameter.opt.complete:
        values = _COMPLETIONS[parameter.opt.complete](typed_text)
    return [
        value
        for value in values
        if (value if isinstance(value, str) else value[0]).startswith(typed_text)
    ]


def _add_texts(candidates: Candidates) -> Iterator[tuple[str, str]]:
    for candidate in candidates:
        yield (candidate, "") if isinstance(candidate, str) else candidate


def complete_layouts(incomplete: str) -> Candidates:
    """Return the layouts with their descriptions, and auto."""
    from homenode.vm.layout import AUTO_SUMMARY, SUMMARIES

    return [("auto", AUTO_SUMMARY), *SUMMARIES.items()]


def complete_layout_lists(incomplete: str) -> Candidates:
    """Complete the last of several comma-separated layouts."""
    from homenode.vm.layout import PRESETS

    return _complete_list(incomplete, PRESETS)


def complete_test_lists(incomplete: str) -> Candidates:
    """Complete the last of several comma-separated groups of tests."""
    from homenode.measure.model import SuiteGroup

    return _complete_list(
        incomplete, (str(group) for group in SuiteGroup if group is not SuiteGroup.APP)
    )


def complete_host_sources(incomplete: str) -> Candidates:
    """Return the names of shipped hosts, and files."""
    from homenode.machine.description.parse import list_shipped_hosts

    return [*list_shipped_hosts(), *_list_files(incomplete)]


def complete_domain_names(incomplete: str) -> Candidates:
    """Return the domains of the system's libvirt; none if it does not answer."""
    from homenode.errors import ToolError
    from homenode.process import run

    argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "list", "--all", "--name")
    try:
        output = run(argv, _VIRSH_S).stdout_or_raise()
    except ToolError:
        return []
    return [line.strip() for line in output.splitlines() if line.strip()]


def complete_vms(incomplete: str) -> Candidates:
    """Return the domains, and files that may hold a definition."""
    return [*complete_domain_names(incomplete), *_list_files(incomplete)]


def complete_targets(incomplete: str) -> Candidates:
    """Return the names that --target takes."""
    from homenode.vm.plan import LIBVIRT
    from homenode.vm.targets.hypervisors import NAMES

    return [LIBVIRT, *NAMES]


def complete_finding_ids(incomplete: str) -> Candidates:
    """Return the groups of findings, and findings."""
    from homenode.findings import GROUPS, catalogue

    return [*GROUPS, *sorted(catalogue())]


def _complete_list(incomplete: str, names: Iterable[str]) -> Candidates:
    before, comma, _ = incomplete.rpartition(",")
    typed_names = before.split(",")
    return [f"{before}{comma}{name}" for name in names if name not in typed_names]


def _list_files(incomplete: str) -> Iterator[str]:
    """Yield paths with this prefix, in the shell's form."""
    directory, slash, name = incomplete.rpartition("/")
    try:
        for path in sorted(Path(directory or slash or ".").iterdir()):
            if path.name.startswith(name) and (name or not path.name.startswith(".")):
                yield f"{directory}{slash}{path.name}" + ("/" if path.is_dir() else "")
    except OSError:
        return


_COMPLETIONS = {
    "layouts": complete_layouts,
    "layout_lists": complete_layout_lists,
    "test_lists": complete_test_lists,
    "host_sources": complete_host_sources,
    "domain_names": complete_domain_names,
    "vms": complete_vms,
    "finding_ids": complete_finding_ids,
    "targets": complete_targets,
}
"""Completions by the name in an option's `complete`."""
