"""Program text: our own measuring programs in Python, and the one way to start a Python. [I/O]

A Python with PyTorch gets one whole on its standard input. It may be another one than ours, on
another machine, from 3.8 on, without homenode: the text carries the modules that the program
imports, each under its own name.

A Python that reads its program from standard input or from -c looks for modules in the current
folder first: root would run what somebody put there as json.py. PYTHONSAFEPATH keeps it from that,
from 3.11 on; earlier ones look into no folder before the program's first line, which takes it away.
The user's own packages stay where they are: PyTorch may be one of them.
"""

from collections.abc import Mapping, Sequence

from homenode.errors import HostError
from homenode.measure.access.machine import Machine
from homenode.package_files import package_text
from homenode.process import Completed

_PACKAGE = "homenode.measure.programs"
_FOLDER = ("measure", "programs")
_CARRIED = ("torch_place", "torch_timing", "torch_collectives", "watched")

_SAFE = {"PYTHONSAFEPATH": "1"}
_NOT_FROM_HERE = """\
import sys
sys.path[:] = [path for path in sys.path if path not in ("", ".")]
import os
for _part in (os.environ.get("PYTHONPATH") or "/").split(":"):
    if not os.path.isabs(_part) and os.path.abspath(_part) in sys.path:
        sys.path.remove(os.path.abspath(_part))
"""
_HAS_TORCH = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"
_LAUNCHER = """\
import types
def _carry(name, source):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
"""


def run_program(
    machine: Machine,
    argv: Sequence[str],
    timeout_s: float,
    name: str,
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program of measure/programs on a machine. argv: the Python there, "-", its words.

    Raises as machine.run does, and HostError where the installation lacks the program.
    """
    return machine.run(
        argv, timeout_s, program_text(name), environment={**(environment or {}), **_SAFE}
    )


def ask_for_torch(machine: Machine, python: str, timeout_s: float) -> Completed:
    """Ask a Python on a machine for PyTorch: it prints True or False. Raises as machine.run."""
    argv = (python, "-c", _NOT_FROM_HERE + _HAS_TORCH)
    return machine.run(argv, timeout_s, environment=_SAFE)


def program_text(name: str) -> str:
    """The text of a program of measure/programs, for `python3 - ...`.

    Raises HostError where the installation lacks it.
    """
    lines = [_NOT_FROM_HERE, _LAUNCHER]
    for module in _CARRIED:
        lines.append(f"_carry({f'{_PACKAGE}.{module}'!r}, {_source(module)!r})\n")
    main = f'compile({_source(name)!r}, "homenode {name}", "exec")'
    lines.append(f'exec({main}, {{"__name__": "__main__"}})\n')
    return "".join(lines)


def _source(name: str) -> str:
    try:
        return package_text(*_FOLDER, f"{name}.py")
    except OSError as error:
        raise HostError(
            f"{name}: expected it in measure/programs, found: {error.strerror}",
            hint="install homenode again",
        ) from None
