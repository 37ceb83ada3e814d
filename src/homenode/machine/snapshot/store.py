"""Store: opens a host's files in a directory or a tar, from a capture or a tree of /sys. [I/O]

A source may hold several machines; "ARCHIVE#desktop" is the machine in the directory "desktop".
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from homenode.errors import InputError, not_found, of_os
from homenode.machine.snapshot.archive import ArchiveTree, read_archive
from homenode.machine.snapshot.gather import MANIFEST, check_manifest
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot, follow, join
from homenode.safe.input_files import read_kernel_file
from homenode.text import command_line

_MARKS = ("devices", "bus", "class", "kernel")
"""A directory named sys that holds one of these counts as a /sys."""

_MAX_ROOT_DEPTH = 3
"""Directories above a machine's sys/ in which it is looked for: archive/machine/fsroot/sys."""

_MAX_DIRECTORIES_SEARCHED = 2000
"""Limit at each depth, so that a home directory named by mistake does not take minutes."""


def open_snapshot(path: Path) -> Snapshot:
    """Return the host in a directory or a tar (plain, gzip, bzip2, xz).

    The top may be sys/ itself (or its content), or have sys/ below it by a few directories.
    Archives are read whole into memory, directories when asked.

    Raises InputError if there are no such files, if there are several machines and none is named,
    or if an archive is damaged or hostile.
    """
    source, machine = _split(path)
    if source.is_dir():
        return _open_directory(source, machine)
    if not source.exists():
        raise not_found(str(source), hint=command_line("homenode", "capture", "-o", source))
    tree = read_archive(source)
    prefix, below_sys = _choose(_find_archived_roots(tree), source, machine)
    manifest = tree.files.get(f"{prefix}/{MANIFEST}".lstrip("/"))
    if manifest is not None:
        check_manifest(manifest, str(source))
    return _build_snapshot(_name(source, machine), tree, prefix, below_sys)


def _split(path: Path) -> tuple[Path, str | None]:
    if path.exists() or "#" not in str(path):
        return path, None
    source, _, machine = str(path).rpartition("#")
    return Path(source), machine.strip("/")


def _name(source: Path, machine: str | None) -> str:
    return source.name if machine is None else f"{source.name}#{machine}"


def _open_directory(source: Path, machine: str | None) -> Snapshot:
    top = os.path.realpath(source)  # the directory that was named may itself be a link
    prefix, below_sys = _choose(_find_roots(top), source, machine)
    root = f"{top}/{prefix}" if prefix else top
    manifest = read_kernel_file(f"{root}/{MANIFEST}")
    if manifest is not None:
        check_manifest(manifest.decode("utf-8", "replace"), str(source))
    return DirectorySnapshot(_name(source, machine), root, "" if below_sys else "/sys")


def _find_archived_roots(tree: ArchiveTree) -> list[tuple[str, bool]]:
    """Yield each machine in an archive: its directory, and whether that is the inside of a /sys."""
    directories = tree.directories
    roots = {
        (directory.removesuffix("sys").rstrip("/"), False)
        for directory in directories
        if (directory == "sys" or directory.endswith("/sys"))
        and directory.count("/") <= _MAX_ROOT_DEPTH
        and _is_sys(mark for mark in _MARKS if f"{directory}/{mark}" in directories)
    }
    if not roots and "devices/system" in directories:
        roots = {("", True)}
    return sorted(_select_outermost(roots))


def _find_roots(top: str) -> list[tuple[str, bool]]:
    """Return each machine in a directory like `_find_archived_roots`. Links are not followed.
    Raises HostError if the directory itself, or the sys in it, cannot be read."""
    for directory in (top, f"{top}/sys"):
        try:
            os.scandir(directory).close()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise of_os(error, directory, "the directory") from None
    if Path(top).name == "sys" and _is_sys(_list_subdirectories(top)):
        return [("", True)]
    if not _is_sys(_list_subdirectories(f"{top}/sys")) and Path(top, "devices/system").is_dir():
        return [("", True)]
    roots: set[tuple[str, bool]] = set()
    level = [""]
    for _ in range(_MAX_ROOT_DEPTH + 1):
        deeper: list[str] = []
        for directory in level[:_MAX_DIRECTORIES_SEARCHED]:
            names = _list_subdirectories(f"{top}/{directory}")
            if "sys" in names and _is_sys(_list_subdirectories(f"{top}/{directory}/sys")):
                roots.add((directory, False))
            else:
                deeper += [f"{directory}/{name}".lstrip("/") for name in names]
        level = deeper
    return sorted(roots)


def _is_sys(names: Iterable[str]) -> bool:
    return any(name in _MARKS for name in names)


def _list_subdirectories(directory: str) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _select_outermost(roots: set[tuple[str, bool]]) -> set[tuple[str, bool]]:
    """Return roots that are not inside another root: /sys/fs/.../sys of a container is not a second
    machine."""
    prefixes = {prefix for prefix, _ in roots}
    return {root for root in roots if prefixes.isdisjoint(_list_directories_above(root[0]))}


def _list_directories_above(directory: str) -> Iterator[str]:
    while directory:
        directory = directory.rpartition("/")[0]
        yield directory


def _choose(roots: list[tuple[str, bool]], source: Path, machine: str | None) -> tuple[str, bool]:
    if machine is not None:
        roots_named = [root for root in roots if machine in (root[0], root[0].rpartition("/")[2])]
        if len(roots_named) == 1:
            return roots_named[0]
        raise InputError(
            f"{source}: expected one machine named {machine!r}, found {_format_roots(roots)}"
        )
    if not roots:
        raise InputError(
            f"{source}: expected a capture or a tree of /sys, found no sys/devices in it",
            hint="homenode capture -o host.tar.gz writes one; a directory of captures is a pool: "
            "--pool DIR",
        )
    if len(roots) > 1:
        example = roots[0][0].rpartition("/")[2] or roots[0][0]
        raise InputError(
            f"{source}: expected one machine, found {_format_roots(roots)}",
            hint=f'name one: "{source}#{example}"',
        )
    return roots[0]


def _format_roots(roots: list[tuple[str, bool]]) -> str:
    if not roots:
        return "none"
    names = [prefix or "(top)" for prefix, _ in roots]
    text = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"{len(names)}: {text}"


def _build_snapshot(name: str, tree: ArchiveTree, prefix: str, below_sys: bool) -> MemorySnapshot:
    """Return the snapshot of one machine in an archive; prefix as in `_find_archived_roots`."""
    start = f"{prefix}/" if prefix else ""
    to = "/sys/" if below_sys else "/"
    cut = len(start)

    def move_paths(paths: Iterable[str]) -> dict[str, str]:
        return {path: to + path[cut:] for path in paths if path.startswith(start)}

    commands = f"{start}commands/"
    return MemorySnapshot(
        name,
        {inner: tree.files[path] for path, inner in move_paths(tree.files).items()},
        {inner: tree.links[path] for path, inner in move_paths(tree.links).items()},
        {
            path.removeprefix(commands): text
            for path, text in tree.files.items()
            if path.startswith(commands)
        },
        tuple(inner for path, inner in move_paths(tree.directories).items() if path != prefix),
    )


class DirectorySnapshot:
    """A directory with /sys and /proc as a snapshot; files outside of it are never read.

    Links are resolved here and not by the kernel: an absolute link, or one with too many "..",
    leads to the directory's own top. Tool outputs are the files commands/NAME.

    sysfs: path of /sys below the directory; "" if the directory is a /sys itself (and no
    /proc is there), "/sys" elsewhere.
    """

    __slots__ = ("_name", "_real", "_root", "_sysfs")

    def __init__(self, name: str, root: str, sysfs: str = "/sys") -> None:
        self._name = name
        self._root = root.rstrip("/")
        self._sysfs = sysfs
        self._real: dict[str, str | None] = {"": "/"}  # of directories

    @property
    def name(self) -> str:
        return self._name

    def read_text(self, path: str) -> str | None:
        real = self.real_path(path)
        if real is None:
            return None
        content = read_kernel_file(self._find_file(real))
        return None if content is None else content.decode("utf-8", "surrogateescape")

    def list(self, path: str) -> tuple[str, ...] | None:
        real = self.real_path(path)
        if real is None:
            return None
        try:
            return tuple(sorted(os.listdir(self._find_file(real))))  # noqa: PTH208 - a third of the time
        except OSError:
            return None

    def read_link(self, path: str) -> str | None:
        directory, _, name = path.rpartition("/")
        real = self.real_path(directory or "/")
        return None if real is None else self._find_target(join(real, name))

    def real_path(self, path: str) -> str | None:
        directory, _, name = path.rpartition("/")
        if directory not in self._real:  # files are not kept: on a live host they come and go
            self._real[directory] = self._follow("/", directory.split("/"))
        real = self._real[directory]
        return None if real is None else self._follow(real, [name])

    def command_output(self, command: str) -> str | None:
        return self.read_text(f"/commands/{command}")

    def _find_file(self, real: str) -> str:
        if self._sysfs != "/sys" and (real == "/sys" or real.startswith("/sys/")):
            return self._root + self._sysfs + real.removeprefix("/sys")
        return self._root + real

    def _follow(self, directory: str, names: Sequence[str]) -> str | None:
        return follow(directory, names, self._find_target, self._is_there)

    def _find_target(self, path: str) -> str | None:
        try:
            return os.readlink(self._find_file(path))  # noqa: PTH115 - for every part of every path
        except (OSError, ValueError):
            return None

    def _is_there(self, path: str) -> bool:
        try:
            os.lstat(self._find_file(path))
        except PermissionError:
            return True  # below a directory that this user may not enter: it may exist
        except (OSError, ValueError):
            return False
        return True
