"""SetupCheck: whether a running host has the pages and the isolation that plans need. [I/O]

Source: irqbalance(1), IRQBALANCE_BANNED_CPULIST and IRQBALANCE_BANNED_CPUS; proc(5), environ.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from homenode.catalogue import finding
from homenode.change.host_setup.files import HOOK, HostNeeds, Isolation, SetupFile
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding
from homenode.gap import Gap
from homenode.input_files import read_start
from homenode.machine.discover.system import IRQBALANCE
from homenode.machine.topology import Host
from homenode.units import format_bytes
from homenode.wording import printable

_SOURCE = "homenode host-setup"


class RunningSetup(Struct, frozen=True):
    """What of a setup only the host itself shows.

    hook: text of the installed libvirt hook; "" = none is there. hook_runs: it may be executed.
    irqbalance_bans: the PUs that the running irqbalance is given to leave alone; None = none runs.
    gaps: what could not be read; its field says nothing then, and nothing follows from it.
    """

    hook: str | None
    hook_runs: bool
    irqbalance_bans: CpuSet | None
    gaps: tuple[Gap, ...] = ()


def unmet(
    needs: HostNeeds,
    host: Host,
    isolation: Isolation,
    hook: SetupFile | None = None,
    running: RunningSetup | None = None,
) -> Iterator[Finding]:
    """What the running host lacks. hook: of libvirt, where one is needed. running: None = another
    host than this machine."""
    pools = {
        (int(node.index), pool.page_bytes): pool.total_pages
        for node in host.nodes
        for pool in node.page_pools
    }
    for one in needs.pages:
        found = pools.get((one.node, one.page_bytes), 0)
        if found < one.pages:
            yield finding(
                "setup-pages-short",
                f"node {one.node}",
                expected=f"{one.pages} pages of {format_bytes(one.page_bytes)}",
                observed=str(found),
                values={"domains": printable(", ".join(needs.domains))},
                source=_SOURCE,
            )
    if isolation is Isolation.BOOT:
        yield from _kernel(needs, host)
    if running is None or isolation is Isolation.NONE:
        return
    # Given none, it leaves alone what the kernel isolates. Source: irqbalance(1) of 1.1 and later.
    bans = running.irqbalance_bans or _isolated(host) | _without_tick(host)
    if running.irqbalance_bans is not None and needs.vm_pus - bans:
        yield _not_isolated(
            "irqbalance",
            f"no interrupts on PUs {needs.vm_pus}",
            f"it may move them to PUs {needs.vm_pus - bans}",
            "irqbalance",
        )
    if hook is not None and (lack := _lack(hook, running)) is not None:
        yield _not_isolated(
            hook.path,
            "the hook for these VMs",
            lack,
            "hook",
            hook.activate,
        )


def _isolated(host: Host) -> CpuSet:
    return CpuSet(int(pu.index) for pu in host.pus if pu.isolated)


def _without_tick(host: Host) -> CpuSet:
    return CpuSet(int(pu.index) for pu in host.pus if pu.nohz_full)


def _kernel(needs: HostNeeds, host: Host) -> Iterator[Finding]:
    for parameter, there, case in (
        ("isolcpus", _isolated(host), "isolcpus"),
        ("nohz_full", _without_tick(host), "nohz_full"),
    ):
        missing = needs.vm_pus - there
        if missing:
            yield _not_isolated(
                f"PUs {missing}",
                f"in the kernel's {parameter}",
                f"{parameter} is {there}" if there else f"no {parameter}",
                case,
            )


def _lack(hook: SetupFile, running: RunningSetup) -> str | None:
    if running.hook is None:  # could not be read
        return None
    if running.hook != hook.text:
        return "one of other plans, or edited since" if running.hook else "none"
    return None if running.hook_runs else "no permission to execute it"


def _not_isolated(
    subject: str, expected: str, observed: str, case: str, activate: str = ""
) -> Finding:
    return finding(
        "setup-not-isolated",
        subject,
        expected=expected,
        observed=observed,
        case=case,
        values={"command": activate},
        source=_SOURCE,
    )


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
