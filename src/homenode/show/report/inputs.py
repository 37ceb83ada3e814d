"""The runs of a report and what is stored next to them. [I/O]

Folders of the study's scripts and logs of other tools are read as they are, as `homenode import`
reads them. What is broken, half-written or foreign is omitted with its reason; the rest is used.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from homenode.errors import HomenodeError, InputError
from homenode.machine.topology import Host
from homenode.measure.imported.sources import imported
from homenode.measure.results.model import Run
from homenode.measure.results.store import FILE, load_runs
from homenode.measure.results.vantage import Vantage
from homenode.plan.stored import read_plan
from homenode.safe.input_files import read_plain
from homenode.show.report.machine import UNNAMED, Stored
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.plan import Plan
from homenode.vm.sources import load_host

T = TypeVar("T")

PLAN = "plan.json"
HOST = "host.tar.gz"
MAX_PLAN_BYTES = 16 << 20
_RESULTS_SUFFIX = ".jsonl"

MOST_GUESTS = 2
"""Captures of guests that are read for one machine: each becomes a large picture."""


class ReportInputs(Struct, frozen=True):
    """Runs with what lies next to each, topologies by name or fingerprint, and what was left
    out."""

    runs: tuple[Run, ...]
    stored: tuple[Stored, ...]
    hosts: dict[str, Host]
    skipped: tuple[str, ...]
    imported: int = 0  # how many of the runs were read from other tools' files


def gather(arguments: Sequence[str], hosts: Sequence[str | None]) -> ReportInputs:
    """The runs of these arguments. hosts: sources of topologies that the user names; None:
    this machine.

    Raises InputError where not one run is left.
    """
    runs: list[Run] = []
    folders: list[str | None] = []
    skipped: list[str] = []
    others: list[Path] = []
    loose: list[Path] = []
    for argument in arguments:
        found, where, left_out, foreign = _of(argument)
        runs += found
        folders += where
        skipped += left_out
        others += foreign
        loose += _loose(argument, foreign)
    of_others, left_out = imported(others)
    of_others += imported(loose)[0]
    runs += of_others
    folders += [None] * len(of_others)
    skipped += left_out
    if not runs:
        reasons = "; ".join(skipped[:5]) or "nothing was named"
        raise InputError(
            f"report: expected at least one run, found none ({reasons})",
            hint="homenode bench makes runs",
        )
    named = [load_host(one) for one in hosts]
    known = {host_fingerprint(one): one for one in named}
    if len(named) == 1:
        known[UNNAMED] = named[0]
    stored = _neighbours(runs, folders, known, skipped)
    return ReportInputs(tuple(runs), tuple(stored), known, tuple(skipped), len(of_others))


def _of(argument: str) -> tuple[list[Run], list[str | None], list[str], list[Path]]:
    """Runs, where each lies, what was omitted, and what may be of other tools."""
    path = Path(argument)
    try:
        loaded = load_runs(path)
    except InputError as error:
        if path.is_file() and path.suffix != _RESULTS_SUFFIX:
            return [], [], [], [path]
        return [], [], [error.message], []
    others = [Path(one) for one in loaded.foreign]
    if not loaded.runs and not any(gap.subject not in loaded.foreign for gap in loaded.skipped):
        others = [path]  # also files next to its folders
    skipped = [str(gap) for gap in loaded.skipped if gap.subject not in loaded.foreign]
    return list(loaded.runs), list(loaded.folders), skipped, others


def _loose(argument: str, others: Sequence[Path]) -> list[Path]:
    """Files of a folder that lie next to its folders of runs: logs of other tools are among them,
    and what else homenode keeps there is none of its runs."""
    folder = Path(argument)
    if not folder.is_dir() or folder in others:
        return []
    if (folder / FILE).exists():
        return []
    return sorted(one for one in folder.iterdir() if one.is_file() and not one.is_symlink())


def _neighbours(
    runs: Sequence[Run], folders: Sequence[str | None], hosts: dict[str, Host], skipped: list[str]
) -> list[Stored]:
    """Plans and captures, each once for all runs of one machine under one choice."""
    seen: set[object] = set()
    guests: dict[object, int] = {}
    found = []
    for run, folder in zip(runs, folders, strict=True):
        head = run.head
        machine = (head.system, head.host or head.host_kind)
        choice = (*machine, head.switches, head.arrangement, head.memory_mode, head.page_bytes)
        if folder is None:
            found.append(Stored())
            continue
        plan: Plan | None = None
        guest: Host | None = None
        plan_path, host_path = Path(folder) / PLAN, Path(folder) / HOST
        if ("plan", choice) not in seen and plan_path.is_file():
            seen.add(("plan", choice))
            plan = _read(_plan, plan_path, skipped)
        if ("host", choice) not in seen and host_path.is_file():
            seen.add(("host", choice))
            if head.vantage is not Vantage.GUEST and head.host not in hosts:
                host = _read(_host, host_path, skipped)
                if host is not None:
                    hosts[host_fingerprint(host)] = host
            elif head.vantage is Vantage.GUEST and guests.setdefault(machine, 0) < MOST_GUESTS:
                guests[machine] += 1
                guest = _read(_host, host_path, skipped)
        found.append(Stored(plan, guest))
    return found


def _read(read: Callable[[Path], T], path: Path, skipped: list[str]) -> T | None:
    try:
        return read(path)
    except HomenodeError as error:
        skipped.append(f"{path}: {error.message}")
        return None


def _plan(path: Path) -> Plan:
    try:
        text = read_plain(path, MAX_PLAN_BYTES)
    except OSError as error:
        raise InputError(f"expected a plan, found: {error.strerror}") from None
    return read_plan(text, path.name)


def _host(path: Path) -> Host:
    return load_host(str(path))
