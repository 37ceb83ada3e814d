"""Sources: runs from what the user names: a folder, a results.jsonl, files of other tools. [I/O]"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from homenode.errors import InputError
from homenode.measure.imported.files import find_sources
from homenode.measure.imported.runs import ImportOptions, imported_runs
from homenode.measure.results.model import Run
from homenode.measure.results.store import FILE, load_runs

_PAGES = (".html", ".pdf")
"""Of reports: no one takes them for results."""


class RunsOfArgument(Struct, frozen=True):
    """The runs of one argument, and what was omitted, as "path: reason"."""

    argument: str
    runs: tuple[Run, ...]
    skipped: tuple[str, ...]


def load_sources(arguments: Sequence[str]) -> tuple[RunsOfArgument, ...]:
    """The runs of each argument. Raises InputError for one that names nothing."""
    return tuple(_load(argument) for argument in arguments)


def _load(argument: str) -> RunsOfArgument:
    path = Path(argument)
    if path.is_file() and path.name != FILE:
        runs, left_out = import_all([path])
        return RunsOfArgument(argument, _some(argument, runs, left_out), tuple(left_out))
    loaded = load_runs(path)
    runs, left_out = import_all(list(map(Path, loaded.foreign)))
    left_out += [str(gap) for gap in loaded.skipped if gap.subject not in loaded.foreign]
    return RunsOfArgument(
        argument, _some(argument, (*loaded.runs, *runs), left_out), tuple(left_out)
    )


def _some(argument: str, runs: Sequence[Run], skipped: Sequence[str]) -> tuple[Run, ...]:
    if not runs:
        raise InputError(
            f"{argument}: no run in it ({'; '.join(skipped[:5])})",
            hint="homenode bench and homenode import make runs",
        )
    return tuple(runs)


def import_all(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs of other tools' files, and what is none."""
    if not paths:
        return [], []
    sources = find_sources(paths)
    all_imported = imported_runs(sources.folders, ImportOptions())
    runs = [entry.run for entry in all_imported if entry.run.samples]
    read = {run.head.source for run in runs}
    skipped = [str(gap) for gap in sources.skipped]
    skipped += [
        f"{folder.path}: not a run of homenode's, nor the output of a tool that is read"
        for folder in sources.folders
        if folder.path not in read and not all(name.endswith(_PAGES) for name in folder.texts)
    ]
    names = {entry.run.head.source: entry.gaps for entry in all_imported if entry.run.samples}
    skipped += [
        f"{folder.path}/{gap.subject}: {gap.reason}"
        for folder in sources.folders
        for gap in names.get(folder.path, ())
        if gap.subject in folder.texts
    ]
    empty = [path for path in paths if not path.exists() or not any(_below(path))]
    skipped += [f"{path}: not a run of homenode's: no file in it" for path in empty]
    return runs, skipped


def _below(path: Path) -> Iterator[Path]:
    return iter((path,)) if path.is_file() else path.rglob("*")
