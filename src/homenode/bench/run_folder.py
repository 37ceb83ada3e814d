"""RunFolder: where a run is kept while it is measured: whole files only, one writer. [I/O]

    results/<system>/<NAME>/
        order.json  host.tar.gz  plan.json  domain.xml
        raw/look-000.json  raw/0007-stream.txt  raw/0007.json
        results.jsonl          a head alone until the run is finished

Files are written whole (see durable): a run that is killed at any
moment leaves whole files. A step counts once its record is there; its output is there before that.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from homenode.bench.record import (
    LookRecord,
    Part,
    RunRecord,
    StepRecord,
    decode,
    digest,
    encode,
)
from homenode.durable import open_folder, open_lock, replace_file
from homenode.errors import HostError, InputError
from homenode.results.lines import head_line, run_text
from homenode.results.model import Run, RunHead
from homenode.results.store import FILE, run_folder

ORDER = "order.json"
HOST = "host.tar.gz"
PLAN = "plan.json"
DOMAIN = "domain.xml"
RAW = "raw"
_LOCK, _TOOL_LOCK = ".lock", ".tool-lock"
TOOL_WAIT_S = 900.0
"""How long a test of a run that was killed may go on before we give up waiting for it."""

_MAX_BYTES = 256 << 20
_STEP = re.compile(r"(\d{4,8})\.json")
_LOOK = re.compile(r"look-(\d{3,8})\.json")


class RunFolder:
    """One run's files. Made by `open_run`, which holds its locks.

    folder: descriptor of the run's folder, and so of the one that is written to, though somebody
    put a link in its place meanwhile.
    """

    __slots__ = ("_folder", "path", "tool_lock")

    def __init__(self, path: Path, tool_lock: int, folder: int) -> None:
        self.path = path
        self.tool_lock = tool_lock
        self._folder = folder

    def order(self) -> RunRecord | None:
        """What was ordered; None where nothing was yet. Raises InputError."""
        path = self.path / ORDER
        if not path.exists():
            return None
        return decode(_read(path), Part.ORDER, RunRecord, str(path))

    def steps(self) -> tuple[tuple[StepRecord, str], ...]:
        """Steps that ended, in order, each with its output. Raises InputError.

        A record whose output is not what it was, or which is a copy of another one, is refused:
        somebody changed the folder.
        """
        found = []
        for name in self._raw(_STEP):
            path = self.path / RAW / name
            record = decode(_read(path), Part.STEP, StepRecord, str(path))
            if record.number != int(path.stem):
                raise InputError(
                    f"{path}: expected the record of step {int(path.stem)}, found that of step "
                    f"{record.number}",
                    hint="remove a copied file; or start a new run under another name",
                )
            if "/" in record.output or record.output in ("", ".", ".."):
                raise InputError(f"{path}: expected a file's name as output, found another path")
            output = _read(path.with_name(record.output)).decode("utf-8", "surrogateescape")
            if digest(output) != record.sha256:
                raise InputError(
                    f"{path.with_name(record.output)}: expected the output as it was written, "
                    "found it changed",
                    hint="start a new run under another name",
                )
            found.append((record, output))
        return tuple(found)

    def looks(self) -> tuple[LookRecord, ...]:
        paths = [self.path / RAW / name for name in self._raw(_LOOK)]
        return tuple(decode(_read(path), Part.LOOK, LookRecord, str(path)) for path in paths)

    def write_order(self, record: RunRecord) -> None:
        self.write(ORDER, encode(Part.ORDER, record))

    def write_step(self, record: StepRecord, output: str) -> None:
        self.write(f"{RAW}/{record.output}", output)
        self.write(f"{RAW}/{record.number:04}.json", encode(Part.STEP, record))

    def write_look(self, record: LookRecord) -> None:
        self.write(f"{RAW}/look-{record.number:03}.json", encode(Part.LOOK, record))

    def write_head(self, head: RunHead) -> None:
        """A run without an end: whoever reads it sees that it is not finished."""
        self.write(FILE, head_line(head))

    def write_run(self, run: Run) -> None:
        self.write(FILE, run_text(run))

    def write(self, name: str, text: str | bytes, mode: int | None = None) -> None:
        """A file, whole or not at all, on the disk when this returns. Raises HostError."""
        path = self.path / name
        content = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        try:
            folder = open_folder(Path(f"/proc/self/fd/{self._folder}"), *Path(name).parts[:-1])
            try:
                replace_file(path, content, mode, folder=folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _no_room(path, error) from None

    def _raw(self, pattern: re.Pattern[str]) -> tuple[str, ...]:
        try:
            names = [one.name for one in (self.path / RAW).iterdir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise InputError(
                f"{self.path / RAW}: expected a folder, found: {error.strerror}"
            ) from None
        numbers = {int(found[1]): name for name in names if (found := pattern.fullmatch(name))}
        return tuple(numbers[number] for number in sorted(numbers))


@contextlib.contextmanager
def open_run(
    root: Path, system: str, name: str, *, resume: bool, tell: Callable[[str], None]
) -> Iterator[RunFolder]:
    """The folder of a run, for one writer at a time.

    resume: it must hold a run; else it must not. Waits for a test that a killed run left running:
    its figures are lost, and those of the next one would be too. Raises HostError.
    """
    path = run_folder(root, system, name)
    has_order = (path / ORDER).exists()
    if resume and not has_order:
        raise HostError(
            f"{path}: expected a run to go on with, found none", hint="leave --resume out"
        )
    if not resume and (has_order or (path / FILE).exists()):
        raise HostError(
            f"{path}: expected no run of this name, found one",
            hint="--resume goes on with it; or choose another name, or remove the folder",
        )
    try:
        folder = open_folder(root, system, name)
    except OSError as error:
        raise HostError(f"{path}: expected to write there, found: {error.strerror}") from None
    locks: list[int] = []
    try:
        for lock in (_LOCK, _TOOL_LOCK):
            locks.append(open_lock(path / lock, 0o644, folder=folder))
    except OSError as error:
        for number in (folder, *locks):
            os.close(number)
        raise HostError(f"{path}: expected to write there, found: {error.strerror}") from None
    try:
        if not _locked(locks[0]):
            raise HostError(
                f"{path}: expected nobody to measure there, found another homenode bench"
            )
        _wait_for_tool(locks[1], path, tell)
        yield RunFolder(path, locks[1], folder)
    finally:
        for number in (*locks, folder):
            os.close(number)


def _wait_for_tool(lock: int, path: Path, tell: Callable[[str], None]) -> None:
    deadline = time.monotonic() + TOOL_WAIT_S
    told = False
    while not _locked(lock):
        if not told:
            tell("waiting for a test that was running when the run was cut short")
            told = True
        if time.monotonic() > deadline:
            raise HostError(
                f"{path}: expected no test to run any more, found one after {TOOL_WAIT_S:g} s",
                hint=f"fuser {path / _TOOL_LOCK} names it",
            )
        time.sleep(0.05)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing keeps two writers apart there
        return True
    return True


def _no_room(path: Path, error: OSError) -> HostError:
    return HostError(
        f"{path}: expected to write there, found: {error.strerror}",
        hint="make room, then go on with --resume",
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path}: expected a file of the run, found: {error.strerror}",
            hint="start a new run under another name",
        ) from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path}: expected at most {_MAX_BYTES >> 20} MiB, found more")
    return content
