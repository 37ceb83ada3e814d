"""What `make docs` and `make deb` build: from locks with hashes, and it runs alone."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "src/homenode/measure/programs").glob("*.py"))


def _pins(path: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / path).read_text(), re.M))


@pytest.mark.parametrize(
    "lock", ["packaging/runtime.lock", "packaging/setup.lock", "packaging/tools.lock"]
)
def test_every_pin_of_a_lock_has_a_hash(lock: str) -> None:
    blocks = re.split(r"^(?=[A-Za-z0-9._-]+==)", (ROOT / lock).read_text(), flags=re.M)[1:]
    assert blocks
    for block in blocks:
        assert "--hash=sha256:" in block, block


def test_packages_hold_the_versions_that_were_tested_and_no_tool_of_development() -> None:
    tested, packed = _pins("requirements.lock"), _pins("packaging/runtime.lock")
    for pins in (packed, _pins("packaging/setup.lock")):
        assert {name: tested.get(name) for name in pins} == pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[>=]", name)[0] for name in project["dependencies"]}
    assert required <= packed.keys()
    assert not {"pytest", "mypy", "hatchling", "weasyprint"} & packed.keys()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_programs_for_guests_are_python_of_3_9(program: Path) -> None:
    tree = ast.parse(program.read_text(), feature_version=(3, 9))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        assert "strict" not in {word.arg for word in call.keywords}, "zip(strict=) is of 3.10"
    modules = {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    } | {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert "tomllib" not in modules
    assert modules <= sys.stdlib_module_names | {"homenode", "torch", "__future__"}
