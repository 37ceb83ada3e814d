"""Files that only a string names: each is there, each is named, and each program of them runs.

Neither mypy nor an import sees them, so a file that went with its feature, or whose feature went
without it, is found here.
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import homenode
from homenode.measure.tool_setup import read_program
from tests.processes import run_text
from tests.source_trees import FILES, nodes, tree

PACKAGE = Path(homenode.__file__).parent
PROGRAMS = sorted(
    path.stem for path in (PACKAGE / "measure/programs").glob("*.py") if path.stem != "__init__"
)
SCRIPTS = sorted(PACKAGE.rglob("*.sh"))
ALONE = sorted(PACKAGE.rglob("files/*.py"))
"""Programs that another machine gets as a file."""

CALLED_WITH = {"gpus_shown": ("cuda",), "watched": ("true",)}
"""Words that programs without options are called with."""

PACKAGED = re.compile(r"[\w.-]+\.(?:txt|toml|sh|j2|css|js|lock|xml)")
PLAIN = ("/usr/bin/python3", "-I", "-S")


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    for node in nodes(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name:
            yield node


def constants(path: Path) -> dict[str, object]:
    """Values of the module's names that are literals."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in tree(path).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts, strict=True)
            else:
                pairs.append((target, node.value))
    values = {}
    for name, value in pairs:
        with suppress(ValueError):
            values[getattr(name, "id", "")] = ast.literal_eval(value)
    return values


def words_of(call: ast.Call, path: Path) -> list[str | None]:
    """The parts of a packaged file's path, None for what is known at run time alone."""
    words: list[str | None] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            directory = constants(path).get(getattr(argument.value, "id", ""))
            words += directory if isinstance(directory, tuple) else [None]
        else:
            is_text = isinstance(argument, ast.Constant)
            words.append(str(argument.value) if is_text else None)  # type: ignore[attr-defined]
    return words


def strings(path: Path) -> set[str]:
    return {
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


READERS = [path for path in FILES if "package_text(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_packaged_file_that_a_module_names_is_there(path: Path) -> None:
    directories = []
    for call in calls(path, "read_package_text"):
        words = words_of(call, path)
        certain = [word for word in words if word is not None]
        if certain == words:
            assert PACKAGE.joinpath(*certain).is_file(), certain
            directories.append(PACKAGE.joinpath(*certain[:-1]))
        elif words[0] is not None:
            directories.append(PACKAGE.joinpath(*certain))
    for name in filter(PACKAGED.fullmatch, strings(path)):
        assert any((directory / name).is_file() for directory in directories), name


def test_every_packaged_file_is_named_by_a_module() -> None:
    directories = {
        "/".join(filter(None, words_of(call, path)))
        for path in FILES
        for call in calls(path, "list_package_names")
    }
    said = {text for path in FILES for text in strings(path)}
    said |= {word for text in said for word in text.split()}
    unnamed = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and path.name != "py.typed"
        and str(path.parent.relative_to(PACKAGE)) not in directories
        and path.name not in said
        and not {path.stem, path.suffix[1:]} & said
    ]
    assert unnamed == []


def test_every_program_that_is_sent_is_there_and_every_one_there_is_sent() -> None:
    outside = [path for path in FILES if path.parent.name != "programs"]
    said = {text for path in outside for text in strings(path)}
    assert [name for name in PROGRAMS if name not in said] == []
    for path in outside:
        for node in nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "program":
                value = constants(path).get(getattr(node.value, "id", ""))
                if isinstance(node.value, ast.Constant):
                    value = node.value.value
                assert value is None or value in PROGRAMS, (path, value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_that_is_sent_runs_in_a_plain_python(name: str) -> None:
    words = CALLED_WITH.get(name, ("--help",))
    run_alone("-", *words, text=read_program(name))


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_every_program_that_another_machine_gets_runs_in_a_plain_python(path: Path) -> None:
    run_alone(str(path), "--help")


def run_alone(*words: str, text: str = "") -> None:
    python = PLAIN if Path(PLAIN[0]).exists() else (sys.executable, *PLAIN[1:])
    done = run_text([*python, *words], input=text, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_one_that_bash_can_read(path: Path) -> None:
    done = run_text(["bash", "-n", path], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
