"""Study folder: one study's scripts, journal and raw files, on a file system all nodes share. [I/O]

    study.jsonl   the journal: a head, then a line for each thing that happened
    jobs/         the scripts
    log/          what the jobs printed
    raw/EXPERIMENT/task-N/JOB.RESTART/   what a job wrote down; `done` is its last file
    results/      runs, as homenode bench and homenode import write them

A line is written before what it says counts, so that a study goes on after any interruption.
"""

import errno
import fcntl
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from homenode.durable import open_folder, open_lock, replace_file
from homenode.errors import HostError, InputError
from homenode.slurm.study.experiments import MAX_JOBS, NAME, Experiment
from homenode.slurm.study.progress import Study
from homenode.slurm.study.scripts import MEASURE, script_name, script_of

JOURNAL = "study.jsonl"
FORMAT = "homenode-slurm-study/1"
MAX_BYTES = 256 << 20
HELD_S = 15.0
"""The sbatch of a homenode that was killed holds the study; so long it is waited for: Slurm's own
MessageTimeout is 10 s, after which sbatch asks no longer."""

_ATTEMPT = re.compile(r"(\d{1,12})\.(\d{1,6})", re.ASCII)


class StudyFolder:
    """The folder of one study, held by this process until it is closed."""

    def __init__(self, path: Path, held_s: float = HELD_S) -> None:
        self.path = path.resolve()
        self._held_s = held_s
        self._file: int | None = None
        self._done: set[tuple[str, int]] = set()

    @property
    def exists(self) -> bool:
        """False also where a study was begun and nothing of it was written down."""
        try:
            return (self.path / JOURNAL).stat().st_size > 0
        except OSError:
            return False

    @property
    def held(self) -> tuple[int, ...]:
        """What a program inherits that must end before another homenode goes on with the study."""
        return () if self._file is None else (self._file,)

    def create(self, study: Study) -> Study:
        """Lay out the folder with its first lines. Raises HostError where it cannot.

        The journal's first line comes last: without it the folder is begun anew.
        """
        if "%" in str(self.path) or not str(self.path).isprintable():
            raise HostError(f"{self.path}: expected a path without % that can be printed")
        try:
            for name in ("jobs", "log", "raw", "results"):
                os.close(open_folder(self.path, name))
            for name in ("raw", "results"):
                if any((self.path / name).iterdir()):
                    raise HostError(
                        f"{self.path / name}: expected an empty folder, found files that no study "
                        "here tells of: they would be taken for this one's",
                        hint="choose another folder with -o",
                    )
            measure = resources.files("homenode.slurm.study").joinpath("measure.sh").read_text()
            self._open()
            replace_file(self.path / MEASURE, measure.encode(), 0o644, synced=False)
        except OSError as error:
            raise HostError(
                f"{self.path}: expected to write there, found: {error.strerror}"
            ) from None
        if self.exists:
            raise HostError(f"{self.path}: expected no study yet, found one that has just begun")
        self.write_scripts(study, study.everything())
        self._append({"format": FORMAT, "study": msgspec.to_builtins(study)})
        return study

    def load(self) -> Study:
        """The study as its journal tells it; the folder is ours from now on.

        Raises InputError for a journal that is none, HostError where another process holds it.
        """
        self._open()
        study = read_journal(self.path)
        absent = (one for one in study.everything() if not (self.path / script_name(one)).exists())
        self.write_scripts(study, tuple(absent))
        return study

    def write_scripts(self, study: Study, experiments: tuple[Experiment, ...]) -> None:
        """Write the scripts of these experiments. Raises HostError."""
        for one in experiments:
            path = self.path / script_name(one)
            try:
                script = script_of(one, study.wishes, study.id)
                replace_file(path, script.encode(), 0o755, synced=False)
            except OSError as error:
                raise HostError(f"{path}: cannot be written: {error.strerror}") from None

    def planned(self, study: Study, experiments: tuple[Experiment, ...]) -> Study:
        self.write_scripts(study, experiments)
        self._append({"experiments": msgspec.to_builtins(experiments)})
        return replace(study, experiments=experiments)

    def submitted(self, study: Study, experiment: str, job: str) -> Study:
        self._append({"submitted": experiment, "job": job})
        return replace(study, jobs=(*study.jobs, (experiment, job)))

    def refused(self, study: Study, experiment: str, reason: str) -> Study:
        self._append({"refused": experiment, "reason": reason})
        return replace(study, refused=(*study.refused, (experiment, reason)))

    def again(self, study: Study, experiment: str) -> Study:
        """Take an experiment for not submitted."""
        self._append({"again": experiment})
        return _again(study, experiment)

    def done_and_exits(
        self, study: Study
    ) -> tuple[frozenset[tuple[str, int]], Mapping[tuple[str, int], str]]:
        """Tasks whose files are complete, and exit statuses of the others' latest attempts."""
        exits: dict[tuple[str, int], str] = {}
        for one in study.everything():
            for task in range(one.jobs):
                if (one.id, task) in self._done:
                    continue  # what is done stays done: a large study is not walked each time
                tries = attempts(self.path, one.id, task)
                if any((attempt / "done").exists() for attempt in tries):
                    self._done.add((one.id, task))
                elif tries and (said := _exit_status(tries[-1])) is not None:
                    exits[one.id, task] = said
        return frozenset(self._done), exits

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        path = self.path / JOURNAL
        if self._file is not None:
            return
        try:
            self._file = open_lock(path, 0o644)
        except OSError as error:
            raise HostError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self._lock()
        except BlockingIOError:
            self.close()
            raise HostError(
                f"{self.path}: expected nobody else at this study, found another homenode",
                hint="wait for it, or end it: the jobs go on without it",
            ) from None
        except OSError:
            # A file system without locks: two studies at once would submit twice, no more.
            return

    def _lock(self) -> None:
        """Raises BlockingIOError where somebody holds it, OSError where there are no locks."""
        assert self._file is not None
        end = time.monotonic() + self._held_s
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)

    def _append(self, record: dict[str, Any]) -> None:
        """Raises HostError: nothing that was not written down counts."""
        assert self._file is not None
        line = msgspec.json.encode(record) + b"\n"
        try:
            # A line that was cut short by a crash must not swallow this one.
            end = os.lseek(self._file, 0, os.SEEK_END)
            torn = end > 0 and os.pread(self._file, 1, end - 1) != b"\n"
            line = b"\n" + line if torn else line
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise HostError(
                f"{self.path / JOURNAL}: expected to write there, found: {error.strerror}",
                hint="the jobs go on without homenode; make room and start the command again",
            ) from None


def _exit_status(attempt: Path) -> str | None:
    """What a script that ended left; None where it did not."""
    path = attempt / "exit"
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(10).decode("utf-8", "replace").strip()
    except OSError:
        return None


def read_journal(path: Path) -> Study:
    """The study of a folder, without holding it. Raises InputError."""
    file = path / JOURNAL
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: expected a study's journal, found: {error.strerror}") from None
    study: Study | None = None
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # cut short by a crash: what it said did not count yet
        where = f"{file}:{number}"
        study = _head(record, where) if study is None else _applied(study, record, where)
    if study is None:
        raise InputError(f"{file}: expected {FORMAT}, found an empty journal")
    return study


def _head(record: Any, where: str) -> Study:
    found = record.get("format") if isinstance(record, dict) else None
    if found != FORMAT:
        raise InputError(f"{where}: expected {FORMAT}, found {str(found)[:60]!r}")
    study: Study = _convert(record.get("study"), Study, where)
    _check(study.everything(), where)
    return study


def _applied(study: Study, record: Any, where: str) -> Study:
    match record:
        case {"experiments": list(raw)}:
            planned = _convert(raw, tuple[Experiment, ...], where)
            _check(planned, where)
            return replace(study, experiments=planned)
        case {"submitted": str(experiment), "job": str(job)} if job.isdigit():
            return replace(study, jobs=(*study.jobs, (experiment, job)))
        case {"refused": str(experiment), "reason": str(reason)}:
            return replace(study, refused=(*study.refused, (experiment, reason)))
        case {"again": str(experiment)}:
            return _again(study, experiment)
    raise InputError(f"{where}: expected a line of {FORMAT}, found {shlex.quote(str(record)[:80])}")


def _check(experiments: tuple[Experiment, ...], where: str) -> None:
    """Raises InputError for names that would leave the folder, and for jobs without end."""
    for one in experiments:
        if not (
            NAME.fullmatch(one.id)
            and one.nodes
            and all(NAME.fullmatch(node) for node in one.nodes)
            and 0 < one.jobs <= MAX_JOBS
        ):
            raise InputError(f"{where}: expected an experiment, found {one.id[:60]!r}")


def _again(study: Study, experiment: str) -> Study:
    return replace(
        study,
        repeated=(*study.repeated, experiment),
        jobs=tuple(one for one in study.jobs if one[0] != experiment),
        refused=tuple(one for one in study.refused if one[0] != experiment),
    )


def _convert(value: Any, of: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, of)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: expected a line of {FORMAT}, found: {error}") from None


def attempts(folder: Path, experiment: str, task: int) -> tuple[Path, ...]:
    """Folders of a task's attempts, the oldest first."""
    root = folder / "raw" / experiment / f"task-{task}"
    try:
        found = [(name, path) for path in root.iterdir() if (name := _ATTEMPT.fullmatch(path.name))]
        folders = [(int(name[1]), int(name[2]), path) for name, path in found if path.is_dir()]
    except OSError:
        return ()
    return tuple(path for *_, path in sorted(folders))
