"""Help, wrong calls and completion, for every command that there is."""

import re
import shlex

import pytest

from homenode.cli.command import find_call, read_option_helps
from homenode.cli.help import format_help_lines, format_option, format_summary
from homenode.cli.main import PROGRAM
from homenode.option import Arg
from tests.command_line import every_command, homenode

EVERY = dict(every_command())


def _help(words: tuple[str, ...], width: int, *, whole: bool = True) -> list[str]:
    return list(format_help_lines(EVERY[words], " ".join(words), width, shows_all=whole))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_help_ends_with_two_examples_that_are_accepted(words: tuple[str, ...]) -> None:
    examples = EVERY[words].examples
    assert len(examples) == 2
    for example in examples:
        called = example[example.index("homenode") :] if "homenode" in example else ""
        if not called or "|" in example or "$" in example:
            continue
        arguments = shlex.split(called.partition(" < ")[0].partition(" && ")[0], comments=True)[1:]
        find_call(PROGRAM, arguments, "homenode").read_options()


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_short_help_fits_a_screen_of_80_columns(words: tuple[str, ...]) -> None:
    lines = _help(words, 79, whole=False)
    assert len(lines) <= 40, "\n".join(lines)


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_short_help_has_whole_clauses(words: tuple[str, ...]) -> None:
    """A sentence that is cut at a comma says something else: "Check whether a VM's CPUs"."""
    shown = " ".join(" ".join(_help(words, 79, whole=False)).split())
    for one in EVERY[words].commands:
        first = re.split(r"[.;] ", format_summary(one))[0].rstrip(".")
        assert one.hidden or first in shown


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_option_has_a_row_with_its_choices_and_whether_it_may_be_repeated(
    words: tuple[str, ...],
) -> None:
    command = EVERY[words]
    for one in command.parameters:
        if command.hidden:
            continue
        text = format_option(one)
        assert one.help.endswith(".") and text.isascii(), one.name
        assert read_option_helps(one.record).keys() <= set(one.record.__struct_fields__), one.record
        assert set(one.choices) <= set(re.split(r"[^\w-]+", text)), one.name
        is_said = re.search(r"repeated|repeat for each", text) is not None
        assert is_said or not one.many or isinstance(one.opt, Arg), one.name


@pytest.mark.parametrize("width", [60, 79])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_breaks_no_word_at_a_narrow_width(words: tuple[str, ...], width: int) -> None:
    lines = _help(words, width)
    joined = " ".join(lines).split()
    for one in EVERY[words].parameters:
        for name in (*one.opt.names, *one.choices):
            assert any(name == word.strip(",.;:/()") for word in joined), name
    begun = next((at for at, line in enumerate(lines) if line.startswith("Examples:")), None)
    for line in lines[:begun]:
        assert len(line) <= max(width, 62), line


def test_without_a_command_this_machine_and_the_first_commands_are_named() -> None:
    done = homenode()
    first, empty, *commands = done.stdout.splitlines()
    assert done.exit_code == 0 and not empty and len(commands) == 6
    assert re.match(r"this machine: \d+ packages?, .* \d+ GPUs?; (\d+ VMs?|VMs unknown)", first)
    assert all(len(line) <= 80 for line in (first, *commands))
    for line in commands[:-1]:
        assert line.split()[1] in PROGRAM.subcommands
    assert str(len([sub for sub in PROGRAM.commands if not sub.hidden])) in commands[-1]
