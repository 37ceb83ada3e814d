"""Received: a run that a guest sent as a tar, treated as untrusted. [I/O]

The tar is read within limits, unpacked in a new directory, and moved into its place if no run
exists there.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from homenode.errors import HostError, InputError
from homenode.machine.snapshot.archive import ArchiveTree, read_archive
from homenode.measure.results.store import FILE, parse_run, run_directory
from homenode.safe.durable import open_directory, replace_file

MAX_BYTES = 64 << 20
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
        bytes_left = MAX_BYTES
        while chunk := stream.read(1 << 20):
            bytes_left -= len(chunk)
            if bytes_left < 0:
                raise InputError(f"{_SOURCE}: expected at most {MAX_BYTES} bytes, found more")
            file.write(chunk)
        file.flush()
        if bytes_left == MAX_BYTES:
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
