"""Help, wrong calls and completion, for every command that there is."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from homenode.cli import completion
from homenode.cli.help import CommandWithActions, examples_of, help_lines, wrong_call
from homenode.cli.main import app, main

WRONG_CALL: type[BaseException] = typer.BadParameter.__mro__[2]


def _every(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not command.hidden:
        yield words, command
    for name, one in getattr(command, "commands", {}).items():
        yield from _every(one, (*words, name))


PROGRAM: Any = typer.main.get_command(app)
EVERY = dict(_every(PROGRAM, ("homenode",)))


def _help(words: tuple[str, ...], width: int) -> list[str]:
    ctx: Any = None
    for at in range(1, len(words) + 1):
        command = EVERY[words[:at]]
        ctx = command.context_class(command, info_name=words[at - 1], parent=ctx)
    return list(help_lines(EVERY[words], ctx, width))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_help_ends_with_two_examples_that_are_accepted(words: tuple[str, ...]) -> None:
    if isinstance(EVERY[words], CommandWithActions):
        return  # the command itself is the first of its own group
    examples = examples_of(EVERY[words])
    assert len(examples) == 2
    for example in examples:
        called = example[example.index("homenode") :] if "homenode" in example else ""
        if not called or "|" in example or "$" in example:
            continue
        arguments = shlex.split(called.partition(" < ")[0].partition(" && ")[0], comments=True)[1:]
        ctx = PROGRAM.make_context("homenode", arguments, resilient_parsing=False)
        _parse(ctx)


def _parse(ctx: Any) -> None:
    """Go down to the command that is meant; typer raises for what it does not take."""
    while getattr(ctx.command, "commands", None):
        rest = [*ctx._protected_args, *ctx.args]
        name, command, rest = ctx.command.resolve_command(ctx, rest)
        ctx = command.make_context(name, rest, parent=ctx)


@pytest.mark.parametrize("width", [60, 79])
@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_breaks_no_word_at_a_narrow_width(words: tuple[str, ...], width: int) -> None:
    lines = _help(words, width)
    joined = " ".join(lines).split()
    for option in EVERY[words].params:
        for name in (*option.opts, *map(str, getattr(option.type_descriptor, "choices", ()) or ())):
            if not getattr(option, "hidden", False) and option.param_type_name == "option":
                assert any(name == word.strip(",./") for word in joined), name
    assert "<bool>" not in " ".join(lines)
    begun = next((at for at, line in enumerate(lines) if line.startswith("Examples:")), None)
    for line in lines[:begun]:
        assert len(line) <= max(width, 62), line


def test_commands_stand_in_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "\n".join(_help(("homenode",), 79))
    order = [shown.index(f"{title}:") for title in ("Place", "Check", "Measure", "Conclude")]
    assert order == sorted(order)
    assert shown.index("  doctor") < shown.index("Measure:") < shown.index("  trial")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("plna",), "did you mean plan?"),
        (("plan", "x.xml", "--memry", "1GiB"), "did you mean --memory?"),
        (("plan", "x.xml", "--policy", "core-first"), "did you mean cores-first?"),
        (("kubevirt", "chek"), "did you mean check?"),
        (("show", "--host", "hgx-h10"), "did you mean hgx-h100?"),
        (("show", "hgx-h100"), "--host SOURCE"),
        (("explain", "pcie-link-narow"), "did you mean pcie-link-narrow?"),
        (("bench", "x", "--layout", "pin-nume"), "did you mean pin-numa?"),
        (("bench", "x", "--tests", "strem"), "did you mean stream?"),
        (("slurm",), "homenode slurm audit"),
    ],
)
def test_a_wrong_word_is_answered_with_the_one_that_was_meant(
    words: tuple[str, ...],
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["homenode", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert meant in capsys.readouterr().err


def test_what_a_name_holds_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WRONG_CALL) as error:
        CliRunner().invoke(
            app, ["show", "a\x1b[31m"], standalone_mode=False, catch_exceptions=False
        )
    assert "homenode show" in wrong_call(error.value)


def test_a_subcommand_is_not_mistaken_for_the_argument_of_its_command() -> None:
    shown = "\n".join(_help(("homenode", "doctor", "retrain"), 79))
    assert shown.startswith("Usage: homenode doctor retrain BDF...")
    assert "--print-unit" in shown and "--under-load" not in shown


def test_completion_knows_layouts_hosts_tests_and_findings() -> None:
    assert "pin-numa-pci" in dict(one for one in completion.layouts("") if isinstance(one, tuple))
    assert "default,pin" in completion.layout_lists("default,p")
    assert "default,default" not in completion.layout_lists("default,")
    assert "stream,nccl" in completion.test_lists("stream,n")
    assert "hgx-h100" in completion.host_sources("hgx")
    assert "pcie-link-slow" in completion.finding_ids("")


def test_completion_without_a_daemon_names_no_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert completion.domain_names("") == []
