"""What the program loads before it knows its command: little, so that every command starts soon."""

import subprocess
import sys

import pytest

VALUES = {
    *"""
    bdf cpuset errors units vm.hypervisor.connection objective vm.layout vm.model option
    vm.plan_options measure.results.vantage
""".split()
}
"""Modules outside cli/ of which options have their types and defaults. None of them imports
another package's work: a new option whose type lies in a large module gets a small one."""


def _loaded(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def at_start() -> set[str]:
    """With every command, as the help needs them."""
    return _loaded(
        "from homenode.cli.main import PROGRAM; from homenode.cli.help import format_help; "
        "format_help(PROGRAM, 'homenode', shows_all=True, to_terminal=False); "
        "[one.parameters for each in PROGRAM.commands for one in (each, *each.commands)]"
    )


def test_a_call_loads_its_own_command_alone() -> None:
    loaded = _loaded(
        "from homenode.cli.main import PROGRAM; PROGRAM.subcommands['doctor'].parameters"
    )
    assert "homenode.cli.arguments.check" in loaded
    others = {"homenode.cli.doctor", "homenode.cli.arguments.place", "homenode.vm.layout"}
    assert not others & loaded


def _spaces(module: str) -> set[str]:
    """The packages that a module lies in."""
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def test_the_command_line_loads_only_the_types_of_its_options(at_start: set[str]) -> None:
    own = {name for name in at_start if name.startswith("homenode.")}
    spaces = {f"homenode.{space}" for value in VALUES for space in _spaces(value)}
    more = {
        name
        for name in own - spaces - {f"homenode.{value}" for value in VALUES}
        if not f"{name}.".startswith(("homenode.cli.", "homenode.safe.", "homenode.package_data."))
    }
    assert not more


def test_every_type_of_an_option_that_is_allowed_for_is_one(at_start: set[str]) -> None:
    """So that the list above only shrinks with what it describes."""
    assert {f"homenode.{value}" for value in VALUES} <= at_start


def test_the_command_line_loads_no_library_but_the_one_of_its_records(at_start: set[str]) -> None:
    heavy = {"lxml", "rich", "jinja2", "weasyprint", "tarfile", "ssl", "asyncio"}
    assert not heavy & at_start


def test_commands_do_their_work_in_files_that_are_loaded_when_it_begins(at_start: set[str]) -> None:
    files = ("arguments", "command", "help", "main", "terminal")
    known = {"homenode.cli", *(f"homenode.cli.{name}" for name in files)}
    own = {name for name in at_start if name.startswith("homenode.cli")}
    assert not {name for name in own if ".arguments." not in name} - known


def test_the_package_itself_loads_none_of_its_libraries() -> None:
    assert not {"rich", "lxml", "msgspec"} & _loaded("import homenode")
