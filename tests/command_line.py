"""The program, called in this process: what it prints, and how it ends."""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from homenode.cli import terminal
from homenode.cli.arguments.place import ApplyArguments, RestoreArguments
from homenode.cli.command import Command
from homenode.cli.main import PROGRAM, run, run_and_report
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.privileges import hold_to_its_row


@dataclass(frozen=True)
class Result:
    """What a command gave."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None  # what the command raised, but for the exit that it asked for

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class _Stream(io.TextIOWrapper):
    """Standard output that is no terminal, with a buffer for bytes."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode("utf-8", "replace")


@contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def homenode(
    *words: str | Path,
    input: str | bytes = "",
    env: Mapping[str, str] | None = None,
    whole: bool = False,
) -> Result:
    """Call it. input: what it reads from standard input. whole: errors are said, as in a terminal,
    rather than given as the exception."""
    out, err = _Stream(), _Stream()
    streams = sys.stdout, sys.stderr, sys.stdin
    content = input if isinstance(input, bytes) else input.encode()
    terminal.make_console.cache_clear()
    terminal.get_error_console.cache_clear()
    code, raised = 0, None
    given = [str(word) for word in words]
    with hold_to_its_row(given), _environment(env or {}):
        sys.stdout, sys.stderr = out, err
        sys.stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        try:
            if whole:
                code = run_and_report(given)
            else:
                run(given)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception as error:  # noqa: BLE001 - a test says which one it expects
            code, raised = getattr(error, "exit_code", 1), error
        finally:
            sys.stdout, sys.stderr, sys.stdin = streams
            terminal.make_console.cache_clear()
            terminal.get_error_console.cache_clear()
    return Result(code, out.text(), err.text(), raised)


def has_cluster() -> bool:
    """Whether the room that may be omitted of an installation is there."""
    return find_spec("homenode.cluster") is not None


NEEDS_CLUSTER = pytest.mark.skipif(not has_cluster(), reason="homenode.cluster is not there")


def has_room(command: Command) -> bool:
    """Whether the room that the command is in is there."""
    return not command.room or has_cluster()


def every_command(
    command: Command = PROGRAM, words: tuple[str, ...] = ("homenode",)
) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Commands that the help shows, with the words that call them."""
    if not command.hidden and has_room(command):
        command = command.load_room()
        yield words, command
        for one in command.commands:
            yield from every_command(one, (*words, one.name))


def apply(
    names: Sequence[str], layout: str = "auto", options: PlanOptions | None = None, **given: Any
) -> None:
    """homenode apply, its errors as they are raised. options: more than the layout."""
    from homenode.cli.apply import apply as work

    work(ApplyArguments(names=tuple(names), options=options or PlanOptions(layout), **given))


def be_host(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Let homenode take a described host for the machine that it runs on."""
    monkeypatch.setattr("homenode.vm.host_sources._read_this_machine", lambda: load_host(source))


def restore(targets: Sequence[str], **given: Any) -> None:
    """homenode restore, likewise."""
    from homenode.cli.restore import restore as work

    work(RestoreArguments(targets=tuple(targets), yes=True, **given))
