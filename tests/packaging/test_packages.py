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
    report = project["optional-dependencies"]["report"]
    needed = {re.split("[>=]", one)[0] for one in [*project["dependencies"], *report]}
    assert needed <= packed.keys()
    assert not {"pytest", "mypy", "hatchling"} & packed.keys()


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


def _alone(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A program of a package, with nothing of this checkout in its surroundings."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.lab
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_the_debian_package_starts_from_the_folder_that_it_is_unpacked_to(tmp_path: Path) -> None:
    subprocess.run(["make", "deb"], cwd=ROOT, check=True, capture_output=True)
    (package,) = (ROOT / "dist").glob("homenode_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, tmp_path], check=True)
    assert (tmp_path / "usr/share/man/man1/homenode-plan.1.gz").exists()
    assert "homenode" in (tmp_path / "usr/share/bash-completion/completions/homenode").read_text()
    start = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'usr/lib/homenode')!r});"
        "sys.argv[:] = ['homenode', '--version']; from homenode.cli.main import main; main()"
    )
    done = _alone(tmp_path, os.path.realpath(sys.executable), "-I", "-c", start)
    assert done.stdout.startswith("homenode "), done.stderr
