"""What `make docs` and `make deb` build: from locks with hashes, and it runs alone."""

import ast
import os
import re
import shutil
import subprocess
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


@pytest.mark.nightly
def test_manual_pages_are_formatted_without_a_warning(tmp_path: Path) -> None:
    sphinx = ROOT / "build/tools/bin/sphinx-build"
    if not sphinx.exists() or shutil.which("man") is None:
        pytest.skip("no man here, or no build/tools, which make docs and make deb make")
    subprocess.run([sys.executable, "-m", "tests.doc_tree", "build"], cwd=ROOT, check=True)
    argv = [str(sphinx), "-q", "-W", "-t", "manual", "-b", "man", "-c", "packaging/docs"]
    subprocess.run([*argv, "build/docs", str(tmp_path)], cwd=ROOT, check=True)
    pages = sorted(tmp_path.glob("homenode*.1"))
    assert len(pages) == 1 + len(list((ROOT / "docs/reference/commands").glob("*.md")))
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    for page in pages:
        argv = ["man", "--warnings", "-E", "UTF-8", "-Tutf8", "-Z", "-l", str(page)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
        assert not done.stderr, f"{page.name}: {done.stderr}"
