"""Store: runs in directories, results/<system>/<NAME>/results.jsonl; runs sent as a tar. [I/O]

Plain files that a person can read and a shared file system can hold. An unreadable directory is
skipped with its reason; the others are used.
"""

import contextlib
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, structs

from homenode import formats
from homenode.errors import HomenodeError, HostError, InputError, UsageError, not_found
from homenode.findings import Gap
from homenode.machine.snapshot.archive import ArchiveTree, read_archive
from homenode.measure.results.model import Run, RunHead, Sample
from homenode.safe.durable import open_directory, replace_file
from homenode.safe.input_files import read_file, read_start
from homenode.text import command_line, plural

KIND = "results"
MAX_SAMPLES = 2_000_000
"""Limit of samples in a run; homenode writes fewer."""


def read_head_line(head: RunHead) -> str:
    return formats.read_head_line(KIND, head)


def end_line(samples: int) -> str:
    """Return the last line with the number of samples. A run without it was interrupted."""
    return f'{{"end":{samples}}}\n'


def run_text(run: Run) -> str:
    lines = [read_head_line(run.head), *map(formats.line, run.samples), end_line(len(run.samples))]
    return "".join(lines)


def parse_run(text: bytes, source: str) -> Run:
    """Return the run of these lines. Raises InputError that names the line."""
    return _read_finished(text, source) or _run_by_lines(text, source)


def _read_finished(text: bytes, source: str) -> Run | None:
    """Read a valid run in one step; None if it is or may be invalid."""
    first, last = text.find(b"\n") + 1, text.rfind(b"\n", 0, -1) + 1
    if not 0 < first <= last:
        return None
    samples = formats.decode_plain_lines(text[first:last], Sample)
    if samples is None or len(samples) > MAX_SAMPLES or b'"end"' in text[first:last]:
        return None
    is_sound = all(
        -math.inf < s.value < math.inf and s.boot >= 0 and s.number >= 0 for s in samples
    )
    for sample in samples:  # of a million each would have its own texts
        structs.force_setattr(sample, "metric", sys.intern(sample.metric))
        structs.force_setattr(sample, "unit", sys.intern(sample.unit))
    if not is_sound or text[last:] != end_line(len(samples)).encode():
        return None
    return Run(_parse_head(text[: first - 1], source), tuple(samples))


def _run_by_lines(text: bytes, source: str) -> Run:
    lines = text.split(b"\n")
    if lines[-1]:
        raise _cut_short(source, "its last line is half-written")
    lines.pop()
    if not lines:
        raise InputError(f"expected a homenode.{KIND} head, found an empty file", subject=source)
    head = _parse_head(lines[0], source)
    end: int | None = None
    samples: list[Sample] = []
    for number, line in enumerate(lines[1:], start=2):
        if end is not None:
            raise InputError(f"{source}:{number}: expected the end of the file, found another line")
        record = formats.decode_record(line, f"{source}:{number}")
        if "end" in record:
            end = formats.convert(record["end"], KIND, int, f"{source}:{number}")
            continue
        if len(samples) == MAX_SAMPLES:
            raise InputError(f"expected at most {MAX_SAMPLES} samples, found more", subject=source)
        sample = formats.convert(record, KIND, Sample, f"{source}:{number}")
        _check(sample, f"{source}:{number}")
        samples.append(sample)
    if end is None:
        raise _cut_short(source, f"{plural(len(samples), 'sample')} and no end")
    if end != len(samples):
        reason = f"expected {plural(end, 'sample')}, as in its last line, found {len(samples)}"
        raise InputError(reason, subject=source)
    return Run(head, tuple(samples))


def _parse_head(line: bytes, source: str) -> RunHead:
    head = formats.decode_head(line, KIND, RunHead, source)
    if any(not _is_name(text) for text in (head.name, head.system)):
        raise InputError(
            f"{source}:1: expected a printable name and system of 1 to 200 letters, "
            f"found {head.name[:40]!r} and {head.system[:40]!r}"
        )
    return head


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 200 and text.isprintable()


def _check(sample: Sample, place: str) -> None:
    if not math.isfinite(sample.value):
        raise InputError(f"{place}: expected a finite value, found {sample.value}")
    if sample.boot < 0 or sample.number < 0:
        raise InputError(
            f"{place}: expected boot and number of 0 or more, "
            f"found {sample.boot} and {sample.number}"
        )


def _cut_short(source: str, state: str) -> InputError:
    return InputError(
        f"expected a finished run, found {state}",
        subject=source,
        hint="it was cut short, or is still running: finish it, or remove the directory",
    )


FILE = "results.jsonl"
MAX_BYTES = 512 << 20
MAX_HEAD_BYTES = 1 << 20
MAX_DEPTH = 4
"""Depth of directories below the named directory in which runs are searched."""

MAX_DIRECTORIES = 20_000


class StoredRuns(Struct, frozen=True):
    """Runs in the order of their paths, and the omitted paths."""

    runs: tuple[Run, ...]
    skipped: tuple[Gap, ...]
    directories: tuple[str, ...] = ()  # directories of the runs, in order
    # directories among those omitted that hold no run of homenode's, whole or broken
    foreign: tuple[str, ...] = ()


def run_directory(root: Path, system: str, name: str) -> Path:
    """A run's directory below a results directory. Raises InputError for names outside it."""
    for part in (system, name):
        if not part or part[0] == "." or "/" in part or not part.isprintable():
            raise InputError(
                f"run name: expected one directory's name, without a dot in front, found {part!r}"
            )
    return root / system / name


def write_run(root: Path, run: Run) -> Path:
    """Write a run completely or not at all, and return its file. Raises HostError if that fails,
    UsageError if the run exists already."""
    directory = run_directory(root, run.head.system, run.head.name)
    path = directory / FILE
    if path.exists():
        raise UsageError(
            f"{path}: a run of this name exists",
            hint="choose another name, or remove the directory",
        )
    try:
        opened = open_directory(root, run.head.system, run.head.name)
        try:
            replace_file(path, run_text(run).encode(), None, directory=opened, synced=False)
        finally:
            os.close(opened)
    except OSError as error:
        raise HostError(f"{path}: cannot write: {error.strerror}") from None
    return path


def run_named(results: Path, name: str) -> Path | None:
    """Return the directory of a run of any system."""
    try:
        return next((path for path in sorted(results.glob(f"*/{name}")) if path.is_dir()), None)
    except OSError as error:
        raise HostError(f"{results}: cannot read: {error.strerror}") from None


def read_finished(directory: Path) -> Run | None:
    """Return a run that is finished and has samples; None for any other."""
    try:
        run = read_run(directory)
    except InputError:
        return None
    return run if run.samples else None


def read_run(path: Path) -> Run:
    """Return the run in a directory or a results.jsonl. Raises InputError."""
    file = path / FILE if path.is_dir() else path
    return parse_run(read_file(file, f"a run's {FILE}", max_bytes=MAX_BYTES), str(file))


def holds_run(file: Path) -> bool:
    """Return whether a file of any name begins as a run's file does."""
    try:
        return formats.find_kind(read_start(file, MAX_HEAD_BYTES).partition(b"\n")[0]) == KIND
    except OSError:
        return False


def load_runs(path: Path) -> StoredRuns:
    """Return every run at or below a path, a few directories deep.

    A directory without subdirectories without a run's file is foreign, and skipped.
    Raises InputError if nothing is there.
    """
    if path.is_file():
        return StoredRuns((read_run(path),), (), (str(path.parent),))
    if not path.is_dir():
        raise not_found(
            str(path), "directory", command_line("homenode", "bench", "--results", path)
        )
    runs: list[Run] = []
    gaps: list[Gap] = []
    directories: list[str] = []
    foreign: list[str] = []
    for directory in _find_leaves(path, gaps):
        files = [directory] if (directory / FILE).exists() else _find_renamed(directory)
        if not files:
            foreign.append(str(directory))
            gaps.append(Gap(str(directory), f"{FILE} is missing: not a run of homenode"))
        for file in files:
            try:
                runs.append(read_run(file))
                directories.append(str(directory))
            except HomenodeError as error:
                gaps.append(Gap(str(file), error.reason))
    return StoredRuns(tuple(runs), tuple(gaps), tuple(directories), tuple(foreign))


def _find_renamed(directory: Path) -> list[Path]:
    """Return the runs of a directory under other names, as a colleague sends them."""
    try:
        return [file for file in sorted(directory.glob("*.jsonl")) if holds_run(file)]
    except OSError:
        return []


def _find_leaves(root: Path, gaps: list[Gap]) -> Iterator[Path]:
    """Yield the directories without subdirectories: they may hold a run. Links are not followed."""
    queue: list[tuple[Path, int]] = [(root, 0)]
    seen_count = 0
    while queue:
        directory, depth = queue.pop(0)
        seen_count += 1
        if seen_count > MAX_DIRECTORIES:
            gaps.append(Gap(str(root), f"more than {MAX_DIRECTORIES} directories: the rest"))
            return
        if (directory / FILE).exists():
            yield directory
            continue
        try:
            children = sorted(
                child for child in directory.iterdir() if child.is_dir() and not child.is_symlink()
            )
        except OSError as error:
            gaps.append(Gap(str(directory), f"cannot be listed: {error.strerror}"))
            continue
        children = [child for child in children if not child.name.startswith(".")]
        if not children:
            yield directory
        elif depth == MAX_DEPTH:
            gaps.append(Gap(str(directory), f"more than {MAX_DEPTH} directories deep"))
        else:
            queue += [(child, depth + 1) for child in children]


MAX_RECEIVED_BYTES = 64 << 20
"""Size limit of a run with its raw outputs; the suite's are a few MiB."""

_MAX_FILES = 20_000
_SOURCE = "what the guest sent"


def receive_run(stream: BinaryIO, root: Path, name: str) -> Path:
    """Keep the run of this name from a tar of SYSTEM/NAME/…; returns its directory.

    Raises InputError if it is not a tar or holds anything but that run, HostError if a run of
    this name is there already or nothing can be written.
    """
    tree = _read(stream)
    system, files = _select_run(tree, name)
    target = run_directory(root, system, name)
    run = parse_run(files[FILE], _SOURCE)
    if (run.head.system, run.head.name) != (system, name):
        raise InputError(
            f"{_SOURCE}: expected the run {system}/{name} in it, found "
            f"{run.head.system}/{run.head.name}"
        )
    try:
        _lay_out(root, system, name, files)
    except OSError as error:
        problem = "a run of this name exists" if target.exists() else error.strerror
        raise HostError(f"{target}: cannot write: {problem}") from None
    return target


def _read(stream: BinaryIO) -> ArchiveTree:
    with tempfile.TemporaryFile() as file:
        bytes_left = MAX_RECEIVED_BYTES
        while chunk := stream.read(1 << 20):
            bytes_left -= len(chunk)
            if bytes_left < 0:
                raise InputError(
                    f"{_SOURCE}: expected at most {MAX_RECEIVED_BYTES} bytes, found more"
                )
            file.write(chunk)
        file.flush()
        if bytes_left == MAX_RECEIVED_BYTES:
            raise InputError(f"{_SOURCE}: expected a tar of the run, found no data")
        # Without a name, no other user puts another file in its place.
        return read_archive(Path(f"/proc/self/fd/{file.fileno()}"))


def _select_run(tree: ArchiveTree, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a run's system, and its files by their path in its directory. Raises InputError."""
    if tree.links:
        raise InputError(f"{_SOURCE}: expected files, found the link {min(tree.links)!r}")
    systems = {path.split("/")[0] for path in tree.files}
    if len(systems) != 1 or len(tree.files) > _MAX_FILES:
        raise InputError(
            f"{_SOURCE}: expected one run of at most {_MAX_FILES} files, found {len(tree.files)} "
            f"files of {len(systems)} systems"
        )
    files = {}
    for path, text in tree.files.items():
        _, _, inner_path = path.partition("/")
        directory, _, entry = inner_path.partition("/")
        if directory != name or not entry or entry.count("/") > 1 or not entry.isprintable():
            raise InputError(f"{_SOURCE}: expected files of the run {name}, found {path[:200]!r}")
        files[entry] = text.encode("utf-8", "surrogateescape")
    if FILE not in files:
        raise InputError(f"{_SOURCE}: no {FILE} in the run {name}")
    return min(systems), files


def _lay_out(root: Path, system: str, name: str, files: dict[str, bytes]) -> None:
    """Raise OSError if something is in the run's place."""
    aside = f".received-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as ends, contextlib.ExitStack() as undo:
        top = _open_directory(root, ends=ends)
        os.mkdir(aside, dir_fd=top)
        undo.callback(_discard, aside, top)
        top_path = Path(f"/proc/self/fd/{top}")
        for path, content in files.items():
            with contextlib.ExitStack() as stack:
                directory = _open_directory(top_path, aside, *Path(path).parts[:-1], ends=stack)
                replace_file(Path(path), content, 0o644, directory=directory, synced=False)
        place = _open_directory(top_path, system, ends=ends)
        # Over a directory that holds anything, or a link, this fails.
        os.rename(aside, name, src_dir_fd=top, dst_dir_fd=place)
        undo.pop_all()


def _open_directory(root: Path, *parts: str, ends: contextlib.ExitStack) -> int:
    """Return the descriptor of a directory, closed with `ends`."""
    directory = open_directory(root, *parts)
    ends.callback(os.close, directory)
    return directory


def _discard(name: str, top: int) -> None:
    with contextlib.suppress(OSError):  # the error that led here is raised
        shutil.rmtree(name, dir_fd=top)
