"""The runs of a report and the files stored next to them. [I/O]

Logs of other tools are read as by `homenode import`. Broken files are omitted with the reason.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from homenode.errors import HomenodeError, InputError
from homenode.findings import Gap
from homenode.machine.topology import Host
from homenode.measure.imported_files import import_all
from homenode.measure.results.model import Run
from homenode.measure.results.store import FILE, holds_run, load_runs
from homenode.measure.results.vantage import Vantage
from homenode.plan.stored import read_plan
from homenode.safe.input_files import read_plain
from homenode.show.report.machine import UNNAMED, StoredRun
from homenode.text import shorten_list
from homenode.vm.plan import Plan
from homenode.vm.sources import load_host

T = TypeVar("T")

PLAN = "plan.json"
HOST = "host.tar.gz"
MAX_PLAN_BYTES = 16 << 20

MAX_GUESTS = 2
"""Captures of guests that are read for one machine: each becomes a large picture."""


class ReportInputs(Struct, frozen=True):
    """Runs with their neighbouring files, topologies by name or fingerprint, and omitted inputs."""

    runs: tuple[Run, ...]
    stored: tuple[StoredRun, ...]
    hosts: dict[str, Host]
    skipped: tuple[Gap, ...]
    imported: int = 0  # number of runs read from other tools' files


def gather(arguments: Sequence[str], hosts: Sequence[str | None]) -> ReportInputs:
    """Return the runs of arguments. hosts: sources of topologies; None: this machine. Raises
    InputError if no run is left."""
    runs: list[Run] = []
    directories: list[str | None] = []
    gaps: list[Gap] = []
    foreign_paths: list[Path] = []
    loose: list[Path] = []
    for argument in arguments:
        argument_runs, argument_directories, reasons, foreign = _read_argument(argument)
        runs += argument_runs
        directories += argument_directories
        gaps += reasons
        foreign_paths += foreign
        loose += _find_loose_files(argument, foreign)
    of_others, reasons = import_all(foreign_paths)
    of_others += import_all(loose)[0]
    runs += of_others
    directories += [None] * len(of_others)
    gaps += reasons
    if not runs:
        causes = "; ".join(map(str, gaps[:5]))
        message = f"{shorten_list(arguments, 3)}: no run in it ({causes})"
        raise InputError(message, hint="homenode bench, or homenode import LOGS")
    known_hosts = {host.fingerprint: host for host in map(load_host, hosts)}
    if len(hosts) == 1:
        known_hosts[UNNAMED] = next(iter(known_hosts.values()))
    stored_runs = _read_neighbours(runs, directories, known_hosts, gaps)
    return ReportInputs(tuple(runs), tuple(stored_runs), known_hosts, tuple(gaps), len(of_others))


def _read_argument(argument: str) -> tuple[list[Run], list[str | None], list[Gap], list[Path]]:
    """Return runs, their paths, omitted inputs, and possible files of other tools."""
    path = Path(argument)
    try:
        runs = load_runs(path)
    except InputError as error:
        if path.is_file() and not holds_run(path) and path.name != FILE:
            return [], [], [], [path]
        return [], [], [Gap(argument, error.reason)], []
    foreign_paths = [Path(path) for path in runs.foreign]
    if not runs.runs and not any(gap.subject not in runs.foreign for gap in runs.skipped):
        foreign_paths = [path]  # includes files next to its directories
    gaps = [gap for gap in runs.skipped if gap.subject not in runs.foreign]
    return list(runs.runs), list(runs.directories), gaps, foreign_paths


def _find_loose_files(argument: str, paths: Sequence[Path]) -> list[Path]:
    """Return files next to a directory's runs, such as logs of other tools."""
    directory = Path(argument)
    if not directory.is_dir() or directory in paths or (directory / FILE).exists():
        return []
    return sorted(file for file in directory.iterdir() if file.is_file() and not file.is_symlink())


def _read_neighbours(
    runs: Sequence[Run],
    directories: Sequence[str | None],
    hosts: dict[str, Host],
    gaps: list[Gap],
) -> list[StoredRun]:
    """Return plans and captures, each once for all runs of a machine under one choice."""
    seen_keys: set[object] = set()
    guests: dict[object, int] = {}
    neighbours = []
    for run, directory in zip(runs, directories, strict=True):
        head = run.head
        machine = (head.system, head.host or head.host_kind)
        choice = (*machine, head.switches, head.arrangement, head.memory_mode, head.page_bytes)
        if directory is None:
            neighbours.append(StoredRun())
            continue
        plan: Plan | None = None
        guest: Host | None = None
        plan_path, host_path = Path(directory) / PLAN, Path(directory) / HOST
        if ("plan", choice) not in seen_keys and plan_path.is_file():
            seen_keys.add(("plan", choice))
            plan = _read(_plan, plan_path, gaps)
        if ("host", choice) not in seen_keys and host_path.is_file():
            seen_keys.add(("host", choice))
            if head.vantage is not Vantage.GUEST and head.host not in hosts:
                host = _read(_read_host, host_path, gaps)
                if host is not None:
                    hosts[host.fingerprint] = host
            elif head.vantage is Vantage.GUEST and guests.setdefault(machine, 0) < MAX_GUESTS:
                guests[machine] += 1
                guest = _read(_read_host, host_path, gaps)
        neighbours.append(StoredRun(plan, guest))
    return neighbours


def _read(read: Callable[[Path], T], path: Path, gaps: list[Gap]) -> T | None:
    try:
        return read(path)
    except HomenodeError as error:
        gaps.append(Gap(str(path), error.reason))
        return None


def _plan(path: Path) -> Plan:
    try:
        text = read_plain(path, MAX_PLAN_BYTES)
    except OSError as error:
        raise InputError(f"cannot read the plan: {error.strerror}") from None
    return read_plan(text, path.name)


def _read_host(path: Path) -> Host:
    return load_host(str(path))
