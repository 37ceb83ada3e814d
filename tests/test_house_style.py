"""The rules of the house that a program can check."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import FILES, SOURCE, nodes, tree

EFFECTS = {
    *"""
    os subprocess pathlib socket time random logging shutil tempfile tarfile signal datetime glob io
""".split()
}


def _imports(path: Path) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.module.partition(".")[0], node.lineno))
    return found


def test_only_files_marked_io_touch_the_outside() -> None:
    broken = []
    for path in FILES:
        first_line = (ast.get_docstring(tree(path)) or "").partition("\n")[0]
        assert first_line, f"{path}: no module docstring"
        if not first_line.endswith("[I/O]"):
            imports = [(name, line) for name, line in _imports(path) if name in EFFECTS]
            broken += [f"{path}:{line}: imports {name}" for name, line in imports]
    assert not broken, "\n".join(broken)


def test_only_process_starts_processes() -> None:
    starters = [
        f"{path}:{line}"
        for path in FILES
        if path.name != "process.py"
        for name, line in _imports(path)
        if name == "subprocess"
    ]
    assert not starters


HOOKS = (Path("cluster/kubevirt/commands.py"), Path("cluster/kubevirt/files/on_define_domain.py"))
"""KubeVirt's hook, whose exit code is part of its answer."""


def test_only_the_command_line_exits() -> None:
    exits = [
        f"{path}:{node.lineno}"
        for path in FILES
        if "cli" not in path.parts and path.relative_to(SOURCE) not in HOOKS
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "exit"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    ]
    assert not exits


def test_no_file_has_more_than_550_lines() -> None:
    assert not [path for path in FILES if len(path.read_text().splitlines()) > 550]


def test_a_function_over_60_lines_says_why() -> None:
    unexplained = []
    for path in FILES:
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                body = lines[node.lineno : node.end_lineno]
                if not any(line.strip().startswith("# Long because ") for line in body):
                    unexplained.append(f"{path}:{node.lineno} {node.name}")
    assert not unexplained


def test_the_formatter_lays_out_every_line() -> None:
    marked = [str(path) for path in FILES if "# fmt:" in path.read_text()]
    assert not marked


def test_no_room_without_a_noun() -> None:
    banned = {"utils", "common", "manager", "helper", "helpers", "core", "base", "misc"}
    assert not [path for path in SOURCE.rglob("*") if path.stem in banned]


POSITIONAL = 7
"""So many arguments by position in a call that makes a record are a riddle."""


def test_records_are_made_with_keywords() -> None:
    classes = {
        node.name for path in FILES for node in nodes(path) if isinstance(node, ast.ClassDef)
    }
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and len(node.args) >= POSITIONAL
        and (getattr(node.func, "id", None) or getattr(node.func, "attr", None)) in classes
    ]
    assert not found


def test_a_public_class_name_has_one_meaning() -> None:
    names = [
        node.name
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name, count in Counter(names).items() if count > 1} == set()


def test_tests_that_are_called_slow_are_there() -> None:
    here = Path(__file__).parents[1]
    for name in (here / "tests/slow.txt").read_text().split():
        path, _, test = name.partition("::")
        text = (here / path).read_text() if (here / path).exists() else ""
        assert f"def {test.rpartition('::')[2]}(" in text, (
            f"tests/slow.txt: {name} is gone: python -m tests.slow_tests writes the list"
        )


POINTING = frozenset(
    """
    one found said known own left wanted most rest there where what why here asked stated kept given
    its of every more whole near alike each others same then only made told held
""".split()
)
PREPOSITIONS = frozenset("at by in on to from with under over after before without".split())
VERBS = frozenset("need feed seed speed embed read exceed proceed".split())


def _stored_names(path: Path) -> Iterator[str]:
    """Local names that are assigned, and arguments; not those of dunder methods."""
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            arguments = node.args
            yield from (
                each.arg
                for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            )


def test_names_say_what_they_hold() -> None:
    names = [name for path in FILES for name in _stored_names(path) if name not in ("self", "cls")]
    pointing = [name for name in names if name.strip("_") in POINTING]
    assert len(pointing) <= 0.005 * len(names), Counter(pointing)


def test_functions_and_classes_are_not_named_by_a_bare_participle() -> None:
    bare = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                word = node.name.strip("_")
                is_single = not re.search(r"_|[a-z][A-Z]", word)
                is_participle = word.endswith("ed") and word.lower() not in VERBS
                if is_single and (word in POINTING | PREPOSITIONS or is_participle):
                    bare.append(f"{path}:{node.lineno}: {node.name}")
    assert not bare, "\n".join(bare)
