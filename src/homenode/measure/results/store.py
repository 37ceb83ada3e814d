"""Store: runs in folders, results/<system>/<NAME>/results.jsonl. [I/O]

Plain files that a person can read and a shared file system can hold. A folder that cannot be read
is skipped with its reason; the rest is used.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from homenode.durable import open_folder, replace_file
from homenode.errors import HomenodeError, HostError, InputError
from homenode.input_files import read_file
from homenode.measure.results.lines import parse_run, run_text
from homenode.measure.results.model import Run

FILE = "results.jsonl"
MAX_BYTES = 512 << 20
MAX_DEPTH = 4
"""Folders below the one that was named in which runs are looked for."""

MAX_FOLDERS = 20_000


class Skipped(Struct, frozen=True):
    """A folder that was left out, and why."""

    path: str
    reason: str


class Loaded(Struct, frozen=True):
    """Runs in the order of their paths, and what was left out.

    folders: of the runs, in order. foreign: folders among those left out that hold no run of
    homenode's, whole or broken.
    """

    runs: tuple[Run, ...]
    skipped: tuple[Skipped, ...]
    folders: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def run_folder(root: Path, system: str, name: str) -> Path:
    """Where a run belongs below a results folder. Raises InputError for names that leave it."""
    for part in (system, name):
        if not part or part[0] == "." or "/" in part or not part.isprintable():
            raise InputError(
                f"run name: expected one folder's name, without a dot in front, found {part!r}"
            )
    return root / system / name


def write_run(root: Path, run: Run) -> Path:
    """Write a run whole or not at all, and return its file.

    Raises HostError where that fails, and where there is such a run already.
    """
    folder = run_folder(root, run.head.system, run.head.name)
    path = folder / FILE
    if path.exists():
        raise HostError(
            f"{path}: expected no run of this name, found one",
            hint="choose another name, or remove the folder",
        )
    try:
        opened = open_folder(root, run.head.system, run.head.name)
        try:
            replace_file(path, run_text(run).encode(), None, folder=opened, synced=False)
        finally:
            os.close(opened)
    except OSError as error:
        raise HostError(f"{path}: expected to write there, found: {error.strerror}") from None
    return path


def read_run(path: Path) -> Run:
    """The run in a folder or a results.jsonl. Raises InputError."""
    file = path / FILE if path.is_dir() else path
    return parse_run(read_file(file, f"a run's {FILE}", most=MAX_BYTES), str(file))


def load_runs(path: Path) -> Loaded:
    """Every run at or below a path, a few folders deep.

    A folder without subfolders in which no results.jsonl lies is foreign, and skipped as such.
    Raises InputError where nothing is there.
    """
    if path.is_file():
        return Loaded((read_run(path),), (), (str(path.parent),))
    if not path.is_dir():
        raise InputError(
            f"{path}: expected a results folder, found nothing",
            hint="homenode bench and homenode import make one",
        )
    runs: list[Run] = []
    skipped: list[Skipped] = []
    folders: list[str] = []
    foreign: list[str] = []
    for folder in _leaves(path, skipped):
        if not (folder / FILE).exists():
            foreign.append(str(folder))
            skipped.append(Skipped(str(folder), f"no {FILE}: not a run of homenode's"))
            continue
        try:
            runs.append(read_run(folder))
            folders.append(str(folder))
        except HomenodeError as error:
            skipped.append(Skipped(str(folder), error.message))
    return Loaded(tuple(runs), tuple(skipped), tuple(folders), tuple(foreign))


def _leaves(root: Path, skipped: list[Skipped]) -> Iterator[Path]:
    """Folders that hold a run, or could: those without folders below. Links are not followed."""
    queue: list[tuple[Path, int]] = [(root, 0)]
    seen = 0
    while queue:
        folder, depth = queue.pop(0)
        seen += 1
        if seen > MAX_FOLDERS:
            skipped.append(Skipped(str(root), f"more than {MAX_FOLDERS} folders: the rest"))
            return
        if (folder / FILE).exists():
            yield folder
            continue
        try:
            below = sorted(one for one in folder.iterdir() if one.is_dir() and not one.is_symlink())
        except OSError as error:
            skipped.append(Skipped(str(folder), f"cannot be listed: {error.strerror}"))
            continue
        below = [one for one in below if not one.name.startswith(".")]
        if not below:
            yield folder
        elif depth == MAX_DEPTH:
            skipped.append(Skipped(str(folder), f"more than {MAX_DEPTH} folders deep"))
        else:
            queue += [(one, depth + 1) for one in below]
