"""Tools installed: what a machine can run, and the little that a run asks of it itself."""

import hashlib
from collections.abc import Collection

from homenode.errors import ParseError, ToolError
from homenode.machine.tools.proc_stat import PATH as PROC_STAT
from homenode.machine.tools.proc_stat import PuTimes, parse
from homenode.machine.topology import Host
from homenode.measure.access.machine import Machine
from homenode.measure.gpu.machine import is_nvidia
from homenode.measure.gpu.suite import BY_BUS, ShownGpus, measured_gpus, parse_shown
from homenode.measure.model import PROBE, PYTHON, TORCH, SuiteOptions
from homenode.measure.program_text import ask_for_torch, run_program
from homenode.process import ToolMissingError, ToolTimeoutError

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_ASK_S = 60.0

PROGRAMS = (
    PROBE,
    "numactl",
    "taskset",
    "nvbandwidth",
    "all_reduce_perf",
    "rocm-bandwidth-test",
    "TransferBench",
)
"""What the suite may run."""


def boot_identity(machine: Machine) -> str:
    """Gives this boot from every other one, and nothing else of the machine.

    Raises ToolError where the machine does not say.
    """
    said = machine.run(["cat", _BOOT_ID], _ASK_S)
    if said.failure() is not None or not said.stdout.strip():
        raise ToolError(
            f"{machine.name}: expected a boot's identity in {_BOOT_ID}, found none",
            hint="--boot ID names this boot",
        )
    return hashlib.sha256(said.stdout.strip().encode()).hexdigest()[:16]


def pu_times(machine: Machine) -> tuple[PuTimes, ...]:
    """Ticks of each PU since boot; () where the machine does not count. Raises ToolError."""
    try:
        return parse(machine.run(["cat", PROC_STAT], _ASK_S).stdout)
    except (ParseError, ToolMissingError):
        return ()


def installed_on(machine: Machine, options: SuiteOptions, *, gpus: bool) -> frozenset[str]:
    """Programs of the suite that can be run there, "python" and, if it has PyTorch, "torch".

    gpus: whether there are any to measure; else PyTorch is not asked for, which takes seconds.
    Raises ToolError where the machine cannot be reached.
    """
    found = machine.installed(PROGRAMS)
    if not gpus:
        return found
    try:
        said = ask_for_torch(machine, options.python, _ASK_S)
    except (ToolMissingError, ToolTimeoutError):
        return found
    if said.returncode != 0:
        return found
    return found | ({PYTHON, TORCH} if said.stdout.strip() == "True" else {PYTHON})


def gpus_shown_by(
    machine: Machine, options: SuiteOptions, host: Host, installed: Collection[str]
) -> ShownGpus | None:
    """The GPUs that the machine's driver gives to us; None where it could not be asked.

    Raises ToolError where the machine cannot be reached.
    """
    gpus = measured_gpus(host, [])
    if not gpus or PYTHON not in installed:
        return None
    driver = "cuda" if is_nvidia(gpus) else "hip"
    try:
        argv = (options.python, "-", driver)
        said = run_program(machine, argv, _ASK_S, "gpus_shown", dict([BY_BUS]))
        return parse_shown(said.stdout)
    except (ParseError, ToolMissingError, ToolTimeoutError):
        return None
