"""Sources: runs from what the user names: a folder, a results.jsonl, published figures. [I/O]

`published:SYSTEM` is every configuration that a document printed of a system,
`published:SYSTEM/NAME` one of them, by the document's own word or by our layout's name.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct

from homenode.decide.evidence.documents import publications
from homenode.decide.evidence.model import Evidence
from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Run
from homenode.measure.results.store import load_runs
from homenode.vm.sources import shipped_host

PUBLISHED = "published:"


class Named(Struct, frozen=True):
    """The runs of one argument, and what was left out, as "path: reason"."""

    argument: str
    runs: tuple[Run, ...]
    skipped: tuple[str, ...]


def load_sources(arguments: Sequence[str]) -> tuple[Named, ...]:
    """The runs of each argument. Raises InputError for one that names nothing."""
    return tuple(_load(argument) for argument in arguments)


def load_evidence(folders: Sequence[str]) -> Evidence:
    """The shipped publications with the results in these folders. Raises InputError."""
    named = load_sources(folders)
    return Evidence(publications(), tuple(run for one in named for run in one.runs))


def published_hosts(systems: Collection[str] | None = None) -> dict[str, Host]:
    """The shipped descriptions of published machines, by their names. systems: of these alone."""
    return {
        system.host: shipped_host(system.host)
        for publication in publications()
        for system in publication.systems
        if system.host is not None and (systems is None or system.name in systems)
    }


def _load(argument: str) -> Named:
    if argument.startswith(PUBLISHED):
        return Named(argument, _published(argument.removeprefix(PUBLISHED)), ())
    loaded = load_runs(Path(argument))
    skipped = tuple(f"{one.path}: {one.reason}" for one in loaded.skipped)
    if not loaded.runs:
        raise InputError(
            f"{argument}: expected at least one run, found none ({'; '.join(skipped[:5])})",
            hint="homenode bench and homenode import make runs",
        )
    return Named(argument, loaded.runs, skipped)


def _published(name: str) -> tuple[Run, ...]:
    system, _, choice = name.partition("/")
    runs = [run for document in publications() for run in document.runs]
    systems = dict.fromkeys(run.head.system for run in runs)
    found = [run for run in runs if run.head.system.casefold() == system.casefold()]
    if not found:
        raise InputError(
            f"{PUBLISHED}{system}: expected one of {', '.join(systems)}, found {system!r}"
        )
    if choice:
        chosen = [run for run in found if choice in _names(run)]
    else:
        chosen = [run for run in found if _is_of_a_choice(run)]
    if not chosen:
        known = ", ".join(run.head.name for run in found)
        raise InputError(f"{PUBLISHED}{name}: expected one of {known}, found {choice!r}")
    return tuple(chosen)


def _is_of_a_choice(run: Run) -> bool:
    """False for figures that are printed for every layout alike: they compare with nothing."""
    return run.head.switches != UNKNOWN_SWITCHES or run.head.arrangement is not None


def _names(run: Run) -> tuple[str, str]:
    return run.head.name, run.head.switches.name
