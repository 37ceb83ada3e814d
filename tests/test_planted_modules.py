"""Nothing in the current directory is run: root works in directories that others write to."""

import ast
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from homenode.errors import ToolError, UsageError
from homenode.measure.access.machine import LocalMachine, Machine, ScriptOutput
from homenode.measure.access.remote import RemoteMachine
from homenode.measure.gpu_load_sampling import load_program
from homenode.measure.gpu_tests import COLLECTIVES, COPIES
from homenode.measure.tool_setup import ask_for_torch, run_program
from tests.processes import run_text
from tests.source_trees import FILES, SOURCE, nodes

HOMENODE = Path(sys.executable).with_name("homenode")
PROGRAMS = sorted(path.stem for path in (SOURCE / "measure" / "programs").glob("*.py"))
"""Whatever a Python is asked to run, here or in a guest."""

LIBRARIES = {"torch", "numpy", "sitecustomize", "usercustomize"}
NAMES = sorted(sys.stdlib_module_names - {"__future__"} | LIBRARIES)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a module for every name that anybody imports, and libraries' names. A
    module that is run leaves a file."""
    directory = tmp_path / "planted"
    directory.mkdir()
    marks = tmp_path / "marks"
    marks.mkdir()
    for name in NAMES:
        text = f"open({str(marks / name)!r}, 'w').close()\nraise ImportError('planted')\n"
        (directory / f"{name}.py").write_text(text)
    monkeypatch.chdir(directory)
    for variable in ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH"):
        monkeypatch.setenv(variable, f":.:{os.environ.get(variable, '')}")
    return marks


class _Shell:
    """A channel to a shell of this machine, which stands where we stand."""

    name = "a shell"
    most_input_bytes = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        done = run_text(
            ["sh", "-c", script], input=input or "", env=dict(self._environment), timeout=timeout_s
        )
        return ScriptOutput(done.stdout, done.stderr)

    def close(self) -> None:
        pass


def _guest() -> Machine:
    return RemoteMachine(_Shell({"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}))


MACHINES: tuple[Callable[[], Machine], ...] = (LocalMachine, _guest)


@pytest.mark.parametrize("machine", MACHINES, ids=["here", "in a guest"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_of_ours_imports_from_the_current_directory(
    planted: Path, program: str, machine: Callable[[], Machine]
) -> None:
    words = {
        COPIES: ("host-copies",),
        COLLECTIVES: ("--gpus", "1"),
        "gpus_shown": ("cuda",),
        "watched": ("true",),
    }.get(program, ())
    run_program(machine(), (sys.executable, "-", *words), 60.0, program)
    assert not list(planted.iterdir())


@pytest.mark.parametrize("machine", MACHINES, ids=["here", "in a guest"])
def test_pytorch_is_not_looked_for_in_the_current_directory(
    planted: Path, machine: Callable[[], Machine]
) -> None:
    said = ask_for_torch(machine(), sys.executable, 60.0)
    assert said.stdout.strip() in ("True", "False"), said
    code = "import importlib.util as u; print(u.find_spec('torch'))"
    found = run_text([sys.executable, "-I", "-c", code], check=True)
    assert (said.stdout.strip() == "True") == (found.stdout.strip() != "None")
    assert not list(planted.iterdir())


def test_the_load_of_the_doctor_imports_nothing_from_the_current_directory(planted: Path) -> None:
    try:
        load_program(None).run(60.0)
    except (UsageError, ToolError) as error:
        assert str(error)
    assert not list(planted.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--under-load"),
        ("bench", "--name", "x", "--quick", "--tests", "torch-copies", "--results", "results"),
        (
            *"bench y --quick --tests app --repeat 1 --results results --app".split(),
            *("echo images/s: 3", "--metric", r"images/s: (\d+)"),
        ),
        ("show",),
        ("bench", "setup"),
    ],
    ids=" ".join,
)
def test_no_command_imports_from_the_current_directory(planted: Path, words: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_text([str(HOMENODE), *words], env=environment, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(planted.iterdir()), done.stderr


def test_the_users_own_packages_are_found_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch that was installed with pip install --user."""
    argv = ["python3", "-c", "import site; print(site.getusersitepackages())"]
    environment = {"PYTHONUSERBASE": str(tmp_path), "PATH": os.environ["PATH"]}
    base = run_text(argv, env=environment, check=True).stdout.strip()
    home = tmp_path / "home"
    site = home / ".local" / Path(base).relative_to(tmp_path)
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("")
    monkeypatch.setenv("HOME", str(home))
    assert ask_for_torch(LocalMachine(), "/usr/bin/python3", 60.0).stdout.strip() == "True"


def test_a_python_named_by_a_relative_path_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to("/usr/bin/python3")
    monkeypatch.chdir(tmp_path)
    assert ask_for_torch(LocalMachine(), "venv/python", 60.0).returncode == 0


def test_a_python_is_started_in_one_way_only() -> None:
    """A program for a Python is given to run_program; -c stands where the directory is omitted."""
    broken = []
    for path in FILES:
        inside = str(path.relative_to(SOURCE))
        for node in nodes(path):
            if not isinstance(node, ast.Tuple | ast.List):
                continue
            words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
            starts = "-c" in words and "-I" not in words and _names_a_python(node)
            if starts and inside != "measure/tool_setup.py":
                broken.append(f"{inside}:{node.lineno}")
        if "program_text(" in path.read_text() and inside != "measure/tool_setup.py":
            broken.append(f"{inside}: program_text")
    assert not broken


def _names_a_python(argv: ast.Tuple | ast.List) -> bool:
    text = ast.unparse(argv.elts[0]).lower() if argv.elts else ""
    return "python" in text or "sys.executable" in text
