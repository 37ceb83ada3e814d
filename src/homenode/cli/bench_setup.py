"""homenode bench setup: build pinned GPU tools; a dry run unless --apply is given. [I/O]"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.measure import BenchSetupArguments
from homenode.cli.terminal import console, note
from homenode.errors import HostError, ToolError, UsageError

if TYPE_CHECKING:
    from homenode.measure.access.machine import Machine
    from homenode.measure.setup.plan import SetupPlan, SetupStep, Vendor


def set_up(asked: BenchSetupArguments) -> None:
    """Print the commands, run them with --apply, or undo what they installed.

    Raises UsageError, HostError where no GPU or no tool can be built, ToolError for a step that
    failed.
    """
    chosen = Path.home() / ".local" if asked.prefix is None else asked.prefix.absolute()
    if asked.apply and asked.remove:
        raise UsageError("--apply and --remove: expected one of them")
    if asked.remove:
        _remove(chosen)
        return
    from homenode.change.journal import default_root
    from homenode.measure.access.local import LocalMachine
    from homenode.measure.setup.run import carry_out

    machine = LocalMachine()
    plan = _plan(machine, str(chosen))
    for name in plan.there:
        note(f"{name} is installed already")
    for lack in plan.lacks:
        note(lack)
    if not plan.steps:
        if plan.lacks:
            raise HostError("bench setup: nothing can be built", hint="install what is named above")
        return
    if not asked.apply:
        console().print(_script(plan), markup=False, highlight=False, soft_wrap=True)
        note("nothing was run; --apply runs these commands")
        return
    for path in carry_out(plan, machine, default_root(), lambda step: note(_line(step))):
        note(f"installed {path}")
    if str(chosen / "bin") not in os.environ.get("PATH", "").split(":"):
        note(f"put it on PATH: export PATH={shlex.quote(str(chosen / 'bin'))}:$PATH")


def _remove(prefix: Path) -> None:
    from homenode.measure.setup.run import take_back

    for path in take_back(prefix):
        note(f"removed {path}")


def _plan(machine: "Machine", prefix: str) -> "SetupPlan":
    from homenode.measure.setup.plan import NEEDED, SOURCES, setup_plan

    vendor, architectures = _gpus(machine)
    names = NEEDED | {source.program for source in SOURCES}
    installed = machine.installed(names)
    return setup_plan(vendor, architectures, installed, prefix, SOURCES, _cuda_home())


def _cuda_home() -> str | None:
    """Of the nvcc on PATH, whose makefiles would look in /usr/local/cuda; None without one."""
    from homenode.process import find_program

    found = find_program("nvcc")
    if found is None:
        return None
    home = Path(found).resolve().parent.parent
    return str(home) if (home / "bin" / "nvcc").exists() else None


def _gpus(machine: "Machine") -> "tuple[Vendor, tuple[str, ...]]":
    """Whose GPUs, and what to build for. Raises HostError where no driver gives it."""
    from homenode.machine.tools import gpu_architectures as tool
    from homenode.measure.setup.plan import Vendor

    reasons = []
    for vendor, command, parse in (
        (Vendor.NVIDIA, tool.NVIDIA_COMMAND, tool.parse_nvidia),
        (Vendor.AMD, tool.AMD_COMMAND, tool.parse_amd),
    ):
        try:
            return vendor, parse(machine.run(command, 60).stdout_or_raise())
        except ToolError as error:
            reasons.append(error.message)
    raise HostError(
        "bench setup: expected a GPU whose driver gives its architecture, found none",
        hint="; ".join(reasons),
    )


def _script(plan: "SetupPlan") -> str:
    """The commands as a person can run them one by one."""
    lines = []
    tool = ""
    for step in plan.steps:
        if step.tool != tool:
            lines += [f"# {step.tool}"]
            tool = step.tool
        lines.append(_line(step))
    return "\n".join(lines)


def _line(step: "SetupStep") -> str:
    command = shlex.join(step.argv)
    return command if step.input is None else f"echo {shlex.quote(step.input.strip())} | {command}"
