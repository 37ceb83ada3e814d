"""Tools installed: available programs of a machine, and the only way to start a Python on it. [I/O]

A Python with PyTorch gets homenode's measuring programs on its standard input. It may be another
Python, 3.8 or newer, on a machine without homenode: the text contains the modules that the program
imports, each under its own name. A Python that reads its program from standard input or from -c
searches the current directory for modules first, so root would run another user's json.py.
PYTHONSAFEPATH prevents that from 3.11 on; for earlier versions the program's first line removes
that directory. The user's own packages are not changed: PyTorch may be one of them.
"""

import hashlib
import sys
from collections.abc import Collection, Mapping, Sequence

from homenode.errors import HostError, ParseError, ToolError
from homenode.machine.tools.proc_stat import PATH as PROC_STAT
from homenode.machine.tools.proc_stat import PuTimes, parse
from homenode.machine.topology import Host
from homenode.measure.access.machine import LocalMachine, Machine
from homenode.measure.gpu_tests import is_nvidia
from homenode.measure.model import PROBE, PYTHON, TORCH, SuiteOptions
from homenode.measure.suite import BY_BUS, ShownGpus, parse_shown, select_gpus
from homenode.package_data import read_package_text
from homenode.process import ProgramResult, ToolMissingError, ToolTimeoutError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ASK_S = 60.0

PROGRAMS = (PROBE, *"numactl taskset nvbandwidth all_reduce_perf rocm-bandwidth-test".split())
"""Programs that the suite runs if they are installed."""


def boot_identity(machine: Machine) -> str:
    """Return an identity of this boot that reveals nothing else of the machine. Raises ToolError if
    it is not available."""
    result = machine.run(["cat", _BOOT_ID], _ASK_S)
    if result.failure() is not None or not result.stdout.strip():
        raise ToolError(
            f"{machine.name}: cannot read the boot's identity from {_BOOT_ID}",
            hint="--boot ID names this boot",
        )
    return hashlib.sha256(result.stdout.strip().encode()).hexdigest()[:16]


def read_pu_times(machine: Machine) -> tuple[PuTimes, ...]:
    """Ticks of each CPU since boot; () if the machine does not count. Raises ToolError."""
    try:
        return parse(machine.run(["cat", PROC_STAT], _ASK_S).stdout)
    except (ParseError, ToolMissingError):
        return ()


def find_installed_programs(
    machine: Machine, options: SuiteOptions, *, gpus: bool
) -> frozenset[str]:
    """Programs of the suite that can be run there, "python" and, if it has PyTorch, "torch".

    gpus: whether GPUs are measured; else PyTorch is not searched, which takes seconds.
    Raises ToolError if the machine cannot be reached.
    """
    programs = machine.find_installed(PROGRAMS)
    if not gpus:
        return programs
    try:
        result = ask_for_torch(machine, options.python, _ASK_S)
    except (ToolMissingError, ToolTimeoutError):
        return programs
    if result.returncode != 0:
        return programs
    return programs | ({PYTHON, TORCH} if result.stdout.strip() == "True" else {PYTHON})


def find_shown_gpus(
    machine: Machine, options: SuiteOptions, host: Host, programs: Collection[str]
) -> ShownGpus | None:
    """Return the GPUs that the machine's driver exposes; None if the driver cannot be queried.
    Raises ToolError if the machine cannot be reached."""
    gpus = select_gpus(host, [])
    # On this machine homenode's interpreter runs it: a node's python3 may be absent, or too old.
    python = sys.executable if isinstance(machine, LocalMachine) else options.python
    if not gpus or (python == options.python and PYTHON not in programs):
        return None
    driver = "cuda" if is_nvidia(gpus) else "hip"
    try:
        argv = (python, "-", driver)
        result = run_program(machine, argv, _ASK_S, "gpus_shown", dict([BY_BUS]))
        return parse_shown(result.stdout)
    except (ParseError, ToolMissingError, ToolTimeoutError):
        return None


_PACKAGE = "homenode.measure.programs"
_DIRECTORY = ("measure", "programs")
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
_HAS_TORCH = (
    "import importlib.util; "
    "print(sys.version_info >= (3, 8) and importlib.util.find_spec('torch') is not None)"
)
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
) -> ProgramResult:
    """Run a program of measure/programs on a machine. argv: the Python there, "-", its words.
    Raises like machine.run, and HostError if the installation lacks the program."""
    return machine.run(
        argv, timeout_s, read_program(name), environment={**(environment or {}), **_SAFE}
    )


def ask_for_torch(machine: Machine, python: str, timeout_s: float) -> ProgramResult:
    """Ask a Python on a machine for PyTorch: it prints True or False. Raises like machine.run."""
    argv = (python, "-c", _NOT_FROM_HERE + _HAS_TORCH)
    return machine.run(argv, timeout_s, environment=_SAFE)


def read_program(name: str) -> str:
    """Return the text of a program of measure/programs, for `python3 - ...`. Raises HostError if
    the installation lacks it."""
    lines, source = [_NOT_FROM_HERE, _LAUNCHER], _format_source(name)
    if _PACKAGE in source:
        for module in _CARRIED:
            lines.append(f"_carry({f'{_PACKAGE}.{module}'!r}, {_format_source(module)!r})\n")
    main = f'compile({source!r}, "homenode {name}", "exec")'
    lines.append(f'exec({main}, {{"__name__": "__main__"}})\n')
    return "".join(lines)


def _format_source(name: str) -> str:
    try:
        return read_package_text(*_DIRECTORY, f"{name}.py")
    except OSError as error:
        raise HostError(
            f"{name}: expected it in measure/programs, found: {error.strerror}",
            hint="install homenode again",
        ) from None
