"""The rooms of the source: which package may import which."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.command_line import NEEDS_CLUSTER
from tests.doc_pages import read_page
from tests.source_trees import FILES, SOURCE, nodes

ROOMS = tuple(
    "cluster cli api show decide measure check nccl change plan vm machine safe leaves".split()
)
"""Rooms from the top of the house to the ground: the packages of homenode. The interface, api.py,
stands below the command line; the other single modules are the leaves. Imports, those inside
functions too, go to the same room or one below."""


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {_module(path): path for path in FILES}


def _floor(module: str) -> int:
    if module == "__main__":
        return ROOMS.index("cli")
    room = module.partition(".")[0]
    return ROOMS.index(room if room in ROOMS else "leaves")


def _imported(path: Path) -> Iterator[str]:
    """Modules of homenode that a file imports, inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "homenode":
                inside = name.partition(".")[2]
                yield inside if inside in MODULES else inside.rpartition(".")[0]


def test_imports_go_down_or_stay_in_their_room() -> None:
    found = {
        f"{module} -> {other}"
        for module, path in MODULES.items()
        for other in _imported(path)
        if _floor(other) < _floor(module)
    }
    assert found == set(), "an import goes up: see ROOMS"


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {
        module: sorted({other for other in _imported(path) if other != module})
        for module, path in MODULES.items()
    }
    done: set[str] = set()
    for start in sorted(imports):
        stack = [(start, iter(imports[start]))]
        way = [start]
        while stack:
            module, rest = stack[-1]
            following = next((other for other in rest if other not in done), None)
            if following is None:
                done.add(module)
                stack.pop()
                way.pop()
                continue
            assert following not in way, (
                f"{' -> '.join(way[way.index(following) :])} -> {following}"
            )
            way.append(following)
            stack.append((following, iter(imports[following])))


def test_a_package_is_a_room() -> None:
    packages = {module.partition(".")[0] for module in MODULES if "." in module}
    assert packages | {"cluster"} == set(ROOMS) - {"api", "leaves"}  # which may be omitted


@NEEDS_CLUSTER
def test_the_pipelines_of_the_architecture_are_those_of_the_imports() -> None:
    pipelines = read_page("docs/developer/architecture.md").sections().values()
    tables = [re.findall(r"^\| \d \| `([\w.]+)` \|", s, re.MULTILINE) for s in pipelines]
    for steps in filter(None, tables):
        reached, todo = set(), [steps[0].rpartition(".")[0]]
        while todo:
            module = todo.pop()
            if module in MODULES and module not in reached:
                reached.add(module)
                todo += _imported(MODULES[module])
        for module, _, function in (step.rpartition(".") for step in steps):
            assert module in reached, f"{steps[0]} does not reach {module}"
            assert callable(getattr(import_module(f"homenode.{module}"), function))
    assert sum(map(bool, tables)) == 5
