"""Files of other tools: found below the named paths, and read as runs. [I/O]

The directories are untrusted: links are not followed, sizes and numbers are limited.
"""

import codecs
import os
import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import InputError, not_found, of_os
from homenode.findings import Gap
from homenode.formats import find_kind
from homenode.measure.imported_runs import ImportOptions, SourceDirectory, build_runs
from homenode.measure.results.model import Run
from homenode.measure.results.store import FILE, holds_run, load_runs
from homenode.safe.input_files import read_below

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 5000
MAX_BYTES = 256 << 20
"""Limit of all texts in and below a directory together: they are held at once."""

MAX_DEPTH = 6
MAX_LINE = 16384
"""Longest line of a text that is not JSON, in characters. The longest real ones list CPUs."""

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,16}[mK]")
_TAG = re.compile(
    r"(?:\[[^\]\n]{1,200}?,(\d{1,7})\]<std(?:out|err)>:| {0,4}(\d{1,5}):(?![^ \n])) ?", re.ASCII
)


class SourceDirectories(Struct, frozen=True):
    """Directories with texts, in the order of their paths, and omitted files."""

    directories: tuple[SourceDirectory, ...]
    skipped: tuple[Gap, ...]


def find_sources(paths: Sequence[Path]) -> SourceDirectories:
    """Return the named sources in order: files of one directory, as from a shell's `DIR/*`, are one
    source. Raises like find_directories."""
    by_path: dict[Path, SourceDirectory] = {}
    directories: list[SourceDirectory | Path] = []
    gaps: list[Gap] = []
    for path in paths:
        found_below = find_directories(path)
        gaps += found_below.skipped
        if not path.is_file():
            directories += found_below.directories
            continue
        parent = path.resolve().parent
        for source in found_below.directories:
            if parent not in by_path:
                by_path[parent] = source
                directories.append(parent)
            texts = {**by_path[parent].texts, **source.texts}
            times = {**by_path[parent].times, **source.times}
            by_path[parent] = replace(by_path[parent], texts=texts, times=times)
    merged_sources = [by_path[place] if isinstance(place, Path) else place for place in directories]
    return SourceDirectories(tuple(merged_sources), tuple(gaps))


def find_directories(root: Path) -> SourceDirectories:
    """Return the directories at and below a path; a file is a directory of its own.

    Raises InputError if nothing is there, or more than MAX_FILES or MAX_BYTES, and HostError
    if the directory cannot be read.
    """
    if not root.exists():
        raise not_found(str(root))
    if not root.is_file() and not root.is_dir():
        raise InputError(f"{root}: neither a file nor a directory")
    gaps: list[Gap] = []
    if root.is_file():
        root_path = root.resolve()  # a link that the user names is followed
        texts, times = _read_texts([root_path], gaps, str(root.parent), MAX_BYTES)
        directory = _make_directory(root_path.parent, root_path.parent, texts, times)
        return SourceDirectories((directory,) if texts else (), tuple(gaps))
    directories: list[SourceDirectory] = []
    seen_count, bytes_left = 0, MAX_BYTES

    def skip_unreadable(error: OSError) -> None:
        if error.filename == str(root) and root.is_dir():
            raise of_os(error, str(root), "the directory") from None
        gaps.append(Gap(str(error.filename), error.strerror or str(error)))

    for directory_name, dirs, names in os.walk(root, onerror=skip_unreadable, followlinks=False):
        dirs.sort()
        path = Path(directory_name)
        depth = len(path.relative_to(root).parts)
        dirs[:] = [name for name in dirs if not name.startswith(".") and depth < MAX_DEPTH]
        if FILE in names:
            gaps.append(Gap(directory_name, f"a run of homenode already ({FILE})"))
            continue
        seen_count += len(names)
        if seen_count > MAX_FILES:
            raise InputError(
                f"{root}: expected at most {MAX_FILES} files, found more",
                hint="name the directories of the results themselves",
            )
        texts, times = _read_texts(
            [path / name for name in sorted(names)], gaps, directory_name, bytes_left
        )
        bytes_left -= sum(map(len, texts.values()))
        if bytes_left < 0:
            raise InputError(
                f"{root}: expected at most {MAX_BYTES >> 20} MiB of text, found more",
                hint="name the directories of the results themselves",
            )
        if texts:
            directories.append(_make_directory(root.resolve(), path.resolve(), texts, times))
    return SourceDirectories(tuple(directories), tuple(gaps))


def _make_directory(
    root: Path, path: Path, texts: dict[str, str], times: dict[str, float]
) -> SourceDirectory:
    """A directory's name relative to the named one: results do not contain the user's paths."""
    parts = path.relative_to(root).parts
    return SourceDirectory(
        "/".join(_escape_name(part) for part in (root.name, *parts)),
        _escape_name(path.name),
        _escape_name(path.parent.name),
        texts,
        times,
    )


def _read_texts(
    paths: list[Path], gaps: list[Gap], directory: str, bytes_left: int
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the texts by name, and when each was written; it ends with the first that makes them
    more than bytes_left characters."""
    texts = {}
    times = {}
    for path in paths:
        if path.name.startswith("."):
            continue
        try:
            data = read_below(path.parent, path.name, MAX_FILE_BYTES)
            text = _decode(data)
            written_s = path.lstat().st_mtime
        except OSError as error:
            gaps.append(Gap(f"{directory}/{path.name}", error.strerror or str(error)))
            continue
        if "\0" in text:
            is_archive = data.startswith(_ARCHIVES)
            reason = "an archive: extract it, and name its directory" if is_archive else "binary"
            gaps.append(Gap(f"{directory}/{path.name}", reason))
            continue
        is_json = text.lstrip().startswith("{")
        if not is_json and max(map(len, text.split("\n"))) > MAX_LINE:
            gaps.append(
                Gap(f"{directory}/{path.name}", f"a line of more than {MAX_LINE} characters")
            )
            continue
        texts[_escape_name(path.name)] = text
        times[_escape_name(path.name)] = written_s
        bytes_left -= len(text)
        if bytes_left < 0:
            break
    return texts, times


def _decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark, as redirected by a Windows shell."""
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if is_wide else "utf-8-sig", "replace").replace("\r\n", "\n")
    return _strip_tags(_COLOUR.sub("", text))


def _strip_tags(text: str) -> str:
    """Remove the rank of `mpirun --tag-output` or `srun --label` in each line; sort by it."""
    if not _TAG.match(text):
        return text
    ranks: dict[int, list[str]] = {}
    for line in text.split("\n"):
        tag = _TAG.match(line)
        if tag is None:
            if line.strip():
                return text
            continue
        ranks.setdefault(int(tag[1] or tag[2]), []).append(line[tag.end() :])
    return "\n".join(line for _, lines in sorted(ranks.items()) for line in lines) + "\n"


def _escape_name(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


_PAGES = (".html", ".pdf")
"""Suffixes of reports, which are not results."""

_CSV = "machine,system,layout,"
_ARCHIVES = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip, zip, bzip2, xz and zstd."""


class ArgumentRuns(Struct, frozen=True):
    """The runs of one argument, and the omitted paths."""

    argument: str
    runs: tuple[Run, ...]
    skipped: tuple[Gap, ...]


def load_sources(arguments: Sequence[str]) -> tuple[ArgumentRuns, ...]:
    """Return the runs of each argument. Raises InputError for one that names nothing."""
    return tuple(_load(argument) for argument in arguments)


def _load(argument: str) -> ArgumentRuns:
    path = Path(argument)
    if path.is_file() and path.name != FILE and not holds_run(path):
        runs, gaps = import_all([path])
        return ArgumentRuns(argument, _require_runs(argument, runs, gaps), tuple(gaps))
    loaded = load_runs(path)
    runs, gaps = import_all(list(map(Path, loaded.foreign)))
    gaps += [gap for gap in loaded.skipped if gap.subject not in loaded.foreign]
    return ArgumentRuns(argument, _require_runs(argument, (*loaded.runs, *runs), gaps), tuple(gaps))


def _require_runs(argument: str, runs: Sequence[Run], gaps: Sequence[Gap]) -> tuple[Run, ...]:
    if not runs:
        raise InputError(
            f"{argument}: no run in it ({'; '.join(map(str, gaps[:5]))})",
            hint="homenode bench, or homenode import LOGS",
        )
    return tuple(runs)


def import_all(paths: Sequence[Path]) -> tuple[list[Run], list[Gap]]:
    """Return the runs of other tools' files, and the other files."""
    if not paths:
        return [], []
    sources = find_sources(paths)
    all_imported = build_runs(sources.directories, ImportOptions())
    runs = [entry.run for entry in all_imported if entry.run.samples]
    read = {run.head.source for run in runs}
    gaps = list(sources.skipped)
    is_named = any(path.is_file() for path in paths)
    gaps += [
        _explain_unread(directory)
        for directory in sources.directories
        if directory.path not in read
        and (is_named or not all(name.endswith(_PAGES) for name in directory.texts))
    ]
    names = {entry.run.head.source: entry.gaps for entry in all_imported if entry.run.samples}
    gaps += [
        Gap(f"{directory.path}/{gap.subject}", gap.reason)
        for directory in sources.directories
        for gap in names.get(directory.path, ())
        if gap.subject in directory.texts
    ]
    empty = [path for path in paths if not path.is_file() and not any(path.rglob("*"))]
    gaps += [Gap(str(path), "not a run of homenode's: no file in it") for path in empty]
    return runs, gaps


def _explain_unread(directory: SourceDirectory) -> Gap:
    """Return the reason why a directory, or the only file named in it, is no run."""
    path = directory.path
    if len(directory.texts) == 1:
        (name, text), *_ = directory.texts.items()
        path = f"{path}/{name}"
        kind = find_kind(text.encode())
        if kind is not None or name.endswith(_PAGES) or text.startswith(_CSV):
            found = "a report" if kind is None else f"a homenode.{kind}"
            return Gap(path, f"{found}, not a run: name the directory of the runs")
    return Gap(path, "neither a run of homenode nor the output of a supported tool")
