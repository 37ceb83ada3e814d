"""The user documentation against the program: fields, options, names, links, shown output."""

import ast
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from enum import StrEnum
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

from homenode import formats
from homenode.cli.command import Command, Parameter
from homenode.cli.main import PROGRAM
from homenode.errors import HomenodeError
from homenode.machine.topology import HostSummary
from homenode.measure.importers import NAMES
from homenode.objective import Objective
from homenode.option import Arg
from homenode.plan.placement import order
from homenode.vm.domain import codec
from homenode.vm.layout import PRESETS
from homenode.vm.plan_options import PlanOptions, Policy
from tests.command_line import NEEDS_CLUSTER, every_command, has_room, homenode
from tests.doc_pages import (
    DIRECTORY_SHOWN,
    ROOT,
    Page,
    all_pages,
    first_column,
    missing_output,
    split_row,
)
from tests.doc_pages import read_page as page
from tests.doc_tree import made_pages
from tests.finding_ids import ids_given
from tests.stored_records import FORMATS, below, field_types, stored_names

PAGES = all_pages()
"""Read once; a test names the page it is about."""
_SHOWING = ("docs/reference/commands/", "docs/howto/", "README.md")
SHOWING = [p for p in PAGES if p.path.as_posix().startswith(_SHOWING)]
COMMANDS: dict[str, Command] = {
    one.name: one.load_room() for one in PROGRAM.commands if not one.hidden and has_room(one)
}
PARAMETERS: dict[str, list[Parameter]] = {
    # A page documents a group of commands with all that each of them takes.
    name: [one for _, each in every_command(command) for one in each.parameters]
    for name, command in COMMANDS.items()
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_page_lists_every_field_of_every_record_in_order(kind: str) -> None:
    sections = page(f"docs/reference/formats/{kind}.md").sections()
    for record, path in below(FORMATS[kind]).items():
        fields = tuple(stored_names(record).values())
        if fields:
            heading = path or "Fields"
            assert heading in sections, f"{kind}.md: no section {heading!r} for {record.__name__}"
            assert first_column(sections[heading]) == fields, f"{kind}.md, section {heading}"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_page_names_every_value_of_every_enumeration(kind: str) -> None:
    words = page(f"docs/reference/formats/{kind}.md").words_in_code()
    for record in below(FORMATS[kind]):
        if issubclass(record, StrEnum):
            missing = [str(value) for value in record if str(value) not in words]
            assert not missing, f"{kind}.md does not name {record.__name__} {missing}"


def test_the_summary_of_a_host_is_documented_field_by_field() -> None:
    section = page("docs/reference/formats/host.md").sections()["summary"]
    assert first_column(section) == tuple(field_types(HostSummary))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_page_tells_its_version(kind: str) -> None:
    text = page(f"docs/reference/formats/{kind}.md").text
    version = formats.VERSIONS[kind]
    assert f'"homenode.{kind}/{version}"' in text
    assert f"Version: {version}." in text


def test_the_plan_page_names_every_term_of_the_cost() -> None:
    names = {
        name
        for policy in Policy
        for part in order(policy, shows_pcie=True, even_splits=True, counts_sockets=True)
        for name in part
    }
    assert names <= page("docs/reference/formats/plan.md").words_in_code()


def test_the_plan_page_names_every_constraint() -> None:
    ids = {"memory", "pages", "cores", "pus"}  # chosen by a condition at the call
    for source in sorted((ROOT / "src/homenode/plan").rglob("*.py")):
        ids |= set(ids_given(source, {"Rejection"}))
    assert len(ids) > 10
    missing = sorted(ids - page("docs/reference/formats/plan.md").words_in_code())
    assert not missing


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_page_names_every_option_and_every_choice(name: str) -> None:
    document = page(f"docs/reference/commands/{name}.md")
    listed = {word for section in document.sections().values() for word in first_column(section)}
    options = {part for code in listed for part in re.split(r"[\s,]+", code)}
    words = document.words_in_code()
    for one in PARAMETERS[name]:
        if isinstance(one.opt, Arg):
            assert one.opt.metavar in listed
            continue
        missing = {*one.opt.names, *getattr(one.opt, "off", ())} - options
        assert not missing, f"{name}.md: no row for {missing}"
        assert set(one.choices) <= words, f"{name}.md does not name {one.choices}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_page_begins_with_a_synopsis(name: str) -> None:
    """Manual pages have it; test_fences.py holds it to the options of the command."""
    first = next(page(f"docs/reference/commands/{name}.md").blocks())
    assert first.language == "text"
    assert first.text.startswith(f"homenode {name} ")


def test_the_pages_name_no_option_that_does_not_exist() -> None:
    known = {
        name
        for parameters in PARAMETERS.values()
        for one in parameters
        for name in (*one.opt.names, *getattr(one.opt, "off", ()))
    }
    known |= {"--help", "--help-all", "--version", "--show-completion"}
    for shown in SHOWING:
        stated = {w for w in shown.options_in_code() if re.fullmatch(r"--[a-z][a-z-]+", w)}
        assert not stated - known, f"{shown.path} names {stated - known}"


def test_every_preset_policy_and_objective_is_documented() -> None:
    words = page("docs/reference/commands/plan.md").words_in_code()
    layouts = page("docs/concepts/layouts.md").words_in_code()
    assert {*PRESETS, *map(str, Objective)} <= layouts
    in_help = set((PlanOptions.__doc__ or "").replace(",", " ").replace(";", " ").split())
    assert PRESETS.keys() <= in_help, "name the layout in the help of PlanOptions.layout"
    assert {*map(str, Policy), *map(str, Objective)} <= words


def test_the_page_of_import_has_each_tool_of_an_importer() -> None:
    text = (ROOT / "docs/reference/commands/import.md").read_text()
    named = [import_module(f"homenode.measure.importers.{name}").OUTPUT.name for name in NAMES]
    assert [name for name in named if f"| {name}" not in text] == [], "add its row"


def test_every_exit_code_is_documented_on_each_command_that_gives_it() -> None:
    codes = {"0", *(str(error.exit_code) for error in _and_below(HomenodeError))}
    stated = {
        name: page(f"docs/reference/commands/{name}.md").sections()["Exit codes"]
        for name in COMMANDS
    }
    assert codes <= set().union(*map(first_column, stated.values()))
    for name, section in stated.items():
        least = {"0", "2"} if name == "list" else {"0", "2", "3"}
        assert least <= set(first_column(section)), f"{name}.md"


def _and_below(of: type[HomenodeError]) -> Iterator[type[HomenodeError]]:
    yield of
    for one in of.__subclasses__():
        yield from _and_below(one)


@NEEDS_CLUSTER
def test_the_architecture_names_every_package_and_every_file_outside_of_one() -> None:
    source = ROOT / "src/homenode"
    spaces = {f"{one.parent.relative_to(source)}/" for one in source.rglob("*/*.py")}
    files = {one.stem for one in source.glob("*.py")} - {"__init__"}
    table = [
        row
        for row in page("docs/developer/architecture.md").text.splitlines()
        if row.startswith("|")
    ]
    named = {word for row in table for word in re.sub("[`,]", " ", row.split("|")[1]).split()}
    assert not (spaces | files) - named
    assert not {n for n in named if n.endswith("/")} - spaces - {"machine/hosts/", "native/"}


def test_every_link_between_pages_leads_somewhere() -> None:
    for from_page in PAGES:
        for target in from_page.links():
            name, _, anchor = target.partition("#")
            path = from_page.path.parent / name if name else from_page.path
            is_made = os.path.normpath(path) in made_pages()
            assert is_made or (ROOT / path).exists(), f"{from_page.path}: no {target}"
            if anchor:
                assert anchor in page(path).anchors(), f"{from_page.path}: no {target}"


def test_every_table_has_a_head_and_rows_of_its_width() -> None:
    """An empty line or one without bars in a table ends it: viewers show the rows below as text."""
    for shown in PAGES:
        for table in re.findall(r"^\|.*\n(?:\|.*\n)*", f"{shown.prose()}\n", re.MULTILINE):
            rows = [split_row(line) for line in table.splitlines()]
            assert len(rows) > 2, f"{shown.path}: a table without rows: {table}"
            assert all(re.fullmatch(r" ?:?-+:? ?", cell) for cell in rows[1]), (
                f"{shown.path}: {table}"
            )
            widths = {len(row) for row in rows}
            assert len(widths) == 1, f"{shown.path}: rows of {widths} cells: {table}"


def test_every_page_has_a_place_in_the_contents_of_the_site() -> None:
    """`make docs` refuses a page that is in no table of contents."""
    tree = ast.parse((ROOT / "packaging" / "docs" / "conf.py").read_text())
    (contents,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS"
    ]
    entries = ["index", *(entry for _, group in contents for entry in group)]
    pages = {str(page.path.with_suffix("")).removeprefix("docs/") for page in PAGES}
    pages -= {"README", "CONTRIBUTING", "SECURITY"}
    assert pages == {name for name in pages if any(fnmatch(name, entry) for entry in entries)}


def test_the_supported_versions_are_those_that_the_program_checks() -> None:
    document = page("docs/reference/requirements.md")
    rows = [line.replace("`", "") for line in document.text.splitlines()]
    for need in codec.SINCE:
        qemu = "any" if need.qemu is None else _version(need.qemu)
        start = f"| {need.element} | {_version(need.libvirt)} | {qemu} |"
        assert any(row.startswith(start) for row in rows), f"expected a row {start}"


def _version(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def test_the_supported_python_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    versions = [c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith(prefix)]
    text = page("docs/reference/requirements.md").text
    assert versions
    assert not [version for version in versions if version not in text]


@pytest.mark.parametrize("shown", SHOWING, ids=lambda shown: str(shown.path))
def test_a_page_shows_what_its_commands_print(
    shown: Page,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(ROOT / "demo/gpu-vm.xml", tmp_path)
    shutil.copytree(ROOT / "demo", tmp_path / "demo")
    for name, content in shown.files():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    code = 0
    for command in shown.commands():
        where = f"{shown.path}:{command.line}"
        if not command.checked:
            continue
        if command.arguments == ("echo", "$?"):
            assert command.shown == (str(code),), f"{where}: the exit code is {code}"
        if command.arguments[0] != "homenode":
            continue
        done = homenode(*command.arguments[1:], whole=True)
        code, out = done.exit_code, done.stdout
        if command.redirected is not None:
            (tmp_path / command.redirected).write_text(out, encoding="utf-8")
        if any(line.strip() for line in command.shown):
            notes = [
                line for line in done.stderr.splitlines() if not line.startswith("not checked: ")
            ]
            printed = "\n".join((out, *notes)).replace(str(tmp_path), DIRECTORY_SHOWN)
            lacking = missing_output(command.shown, printed)
            assert lacking is None, f"{where} shows {lacking!r} but the command prints:\n{printed}"
