"""RunningSetup of this machine: its libvirt hook, and what its irqbalance leaves alone. [I/O]

Source: irqbalance(1), IRQBALANCE_BANNED_CPULIST and IRQBALANCE_BANNED_CPUS; proc(5), environ.
"""

import os
from pathlib import Path

from homenode.change.host_setup.check import RunningSetup
from homenode.change.host_setup.files import HOOK
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.input_files import read_start
from homenode.machine.discover.system import IRQBALANCE

_MOST_BYTES = 1 << 20


def read_running(root: Path = Path("/")) -> RunningSetup:
    """What runs now, which what is installed need not be. root: of the host's files."""
    gaps: list[Gap] = []
    path = root / HOOK.lstrip("/")
    hook = _text(path, gaps)
    return RunningSetup(hook, os.access(path, os.X_OK), _irqbalance_bans(root, gaps), tuple(gaps))


def _irqbalance_bans(root: Path, gaps: list[Gap]) -> CpuSet | None:
    for service in IRQBALANCE:
        for process in (_text(root / service.lstrip("/") / "cgroup.procs", gaps) or "").split():
            if not (process.isascii() and process.isdigit()):
                continue
            environment = _text(root / "proc" / process / "environ", gaps)
            return None if environment is None else _bans(environment, gaps)
    return None


def _bans(environment: str, gaps: list[Gap]) -> CpuSet | None:
    fields = dict(field.partition("=")[::2] for field in environment.split("\0"))
    parsers = {
        "IRQBALANCE_BANNED_CPULIST": CpuSet.parse,
        "IRQBALANCE_BANNED_CPUS": CpuSet.parse_mask,
    }
    for variable, parse in parsers.items():
        if variable in fields:
            try:
                return parse(fields[variable].strip(), variable)
            except ParseError as error:
                gaps.append(Gap("irqbalance", error.message))
                return None
    return CpuSet()


def _text(path: Path, gaps: list[Gap]) -> str | None:
    """ "" where there is none; None with a gap where it cannot be read."""
    try:
        return read_start(path, _MOST_BYTES).decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        gaps.append(Gap(str(path), error.strerror or "cannot be read"))
        return None
