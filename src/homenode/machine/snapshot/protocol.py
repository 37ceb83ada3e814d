"""Snapshot: the interface through which discovery reads a host, live or stored; its links.

MemorySnapshot: archives are read into one, and tests build them by hand.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeVar

from homenode.errors import InputError

T = TypeVar("T")


class Snapshot(Protocol):
    """Files, directories, links and tool outputs of one host.

    A live machine, a capture archive, a tree of /sys, and a rendered host.toml implement it.
    Paths are absolute, of the host ("/sys/devices/system/cpu/online"), without "." or "..".
    Symbolic links in the middle of a path are followed, as the kernel would.
    """

    @property
    def name(self) -> str:
        """The name in messages: a file name, or "this machine"."""

    def read_text(self, path: str) -> str | None:
        """Return the text of a file; None if it is absent or unreadable."""

    def list(self, path: str) -> tuple[str, ...] | None:
        """Return names in a directory, sorted; None if there is no such directory."""

    def read_link(self, path: str) -> str | None:
        """Return a symbolic link's target, as stored; None if the path is not a link."""

    def real_path(self, path: str) -> str | None:
        """Return the path with every link resolved; None if nothing is there.

        /sys/bus/pci/devices/0000:19:00.0 becomes /sys/devices/pci0000:15/.../0000:19:00.0: this is
        where the PCI tree is given.
        """

    def command_output(self, command: str) -> str | None:
        """Return the output of a tool by its name in contents.py; None if it was not run."""


class BoundedSnapshot:
    """The same host with limits on size, because a stored snapshot may be hostile. Raises
    InputError if more is read than on the largest machines."""

    __slots__ = ("_asked", "_chars", "_commas", "_files", "_found", "_known")

    def __init__(self, files: Snapshot) -> None:
        self._files = files
        self._asked = self._found = self._chars = self._commas = 0
        self._known: set[str] = set()

    @property
    def name(self) -> str:
        return self._files.name

    def read_text(self, path: str) -> str | None:
        return self._limit_text(self._files.read_text(path))

    def list(self, path: str) -> tuple[str, ...] | None:
        names = self._count_answer(self._files.list(path))
        if names is not None and len(names) > MAX_NAMES:
            raise InputError(
                f"{self.name}: {path}: expected at most {MAX_NAMES} names, found {len(names)}"
            )
        return names

    def read_link(self, path: str) -> str | None:
        return self._count_answer(self._files.read_link(path))

    def real_path(self, path: str) -> str | None:
        return self._count_answer(self._files.real_path(path))

    def command_output(self, command: str) -> str | None:
        return self._limit_text(self._files.command_output(command))

    def explain_failure(self, command: str) -> str:
        """Return the reason why a tool has no output: the tool's message if it ran just now."""
        failures: Mapping[str, str] = getattr(self._files, "failures", {})
        return failures.get(command, f"{self.name} has no output of {command.partition('-')[0]}")

    def _limit_text(self, text: str | None) -> str | None:
        if text is not None:
            self._chars += len(text)
            if "," in text and text not in self._known:
                self._known.add(text)
                self._commas += text.count(",")
        return self._count_answer(text)

    def _count_answer(self, answer: T) -> T:
        """Count an answer; absent files take no space and little time."""
        self._found += answer is not None
        self._asked += 1
        if (
            self._found > MAX_FILES
            or self._asked > MAX_ASKED
            or self._chars > MAX_CHARS
            or self._commas > MAX_COMMAS
        ):
            raise InputError(
                f"{self.name}: expected at most {MAX_FILES} files, {MAX_CHARS >> 20} MiB of "
                f"content and {MAX_COMMAS} parts of lists, found more"
            )
        return answer


MAX_FILES = 200_000
MAX_ASKED = 1_000_000
MAX_CHARS = 16 << 20
MAX_COMMAS = 100_000
MAX_NAMES = 10_000
"""Limits for one host; ASKED counts absent files too, NAMES is for one directory. Linux has at most
8,192 CPUs. A machine of 384 takes 6,000 files of 0.3 MB; its lists, the dearest to read, have 600
parts.
"""

MAX_LINKS = 40
"""Links followed in one path before it counts as a loop. Source: MAXSYMLINKS of the kernel."""

_MAX_NAMES = 256
"""Looked up in one path with its links, of 16 letters on the average; sysfs needs 40."""


def follow(
    directory: str,
    names: Sequence[str],
    target_of: Callable[[str], str | None],
    is_there: Callable[[str], bool],
) -> str | None:
    """Return the real path of names below a real directory; None if nothing is there, or a loop.

    target_of: a link's target, None if the path is not a link. Too many ".." end at the top. Links
    are counted over the whole path, as the kernel does: links that each name the next one twice
    would otherwise cost 2^n steps.
    """
    real = directory
    pending = list(reversed(names))
    links_left = MAX_LINKS
    names_left = _MAX_NAMES
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        names_left -= 1
        if names_left < 0:
            return None
        if name == "..":
            real = real.rpartition("/")[0] or "/"
            continue
        path = join(real, name)
        target = target_of(path)
        if target is None:
            if not is_there(path):
                return None
            real = path
            continue
        if links_left == 0:
            return None
        links_left -= 1
        names_left -= len(target) >> 4
        if target.startswith("/"):
            real = "/"
        pending += [part for part in reversed(target.split("/")) if part not in ("", ".")]
    return real


def join(directory: str, name: str) -> str:
    """Return a name below a directory, the top included."""
    return f"{directory}{name}" if directory == "/" else f"{directory}/{name}"


_NOTHING: Mapping[str, str] = MappingProxyType({})


class MemorySnapshot:
    """A snapshot kept in memory. Directories are implied by the paths of files and links.

    files:    path -> text. Bytes that are no UTF-8 appear as surrogates (PEP 383), so
              text.encode("utf-8", "surrogateescape") is what the file contained.
    links:    path -> target, relative to the link's directory or absolute within the host.
    commands: name of a tool in machine/snapshot/contents.py -> its output.
    directories:  directories that would not be there otherwise, because they are empty.

    >>> host = MemorySnapshot(
    ...     "two nodes",
    ...     {"/sys/devices/system/node/node0/distance": "10 21", "/sys/devices/a/numa_node": "0"},
    ...     {"/sys/bus/pci/devices/a": "../../../devices/a"},
    ... )
    >>> host.list("/sys/devices/system/node"), host.list("/sys/nothing")
    (('node0',), None)
    >>> host.read_text("/sys/bus/pci/devices/a/numa_node")
    '0'
    >>> host.real_path("/sys/bus/pci/devices/a")
    '/sys/devices/a'
    """

    __slots__ = (
        "_commands",
        "_files",
        "_links",
        "_listed",
        "_name",
        "_names_of_directory",
        "_real",
    )

    def __init__(
        self,
        name: str,
        files: Mapping[str, str],
        links: Mapping[str, str] = _NOTHING,
        commands: Mapping[str, str] = _NOTHING,
        directories: tuple[str, ...] = (),
    ) -> None:
        self._name = name
        self._files = dict(files)
        self._links = dict(links)
        self._commands = dict(commands)
        self._names_of_directory = _group_names(self._files, self._links, directories)
        self._listed: dict[str, tuple[str, ...]] = {}
        self._real: dict[str, str | None] = {"": "/", "/": "/"}

    @property
    def name(self) -> str:
        return self._name

    @property
    def files(self) -> Mapping[str, str]:
        """Every file by its real path."""
        return MappingProxyType(self._files)

    @property
    def links(self) -> Mapping[str, str]:
        """Every link by the real path of its directory, with the target as stored."""
        return MappingProxyType(self._links)

    @property
    def commands(self) -> Mapping[str, str]:
        """Every tool output by the tool's name."""
        return MappingProxyType(self._commands)

    @property
    def directories(self) -> tuple[str, ...]:
        """Every directory but the top, sorted."""
        return tuple(
            sorted(directory for directory in self._names_of_directory if directory != "/")
        )

    def read_text(self, path: str) -> str | None:
        text = self._files.get(path)
        if text is not None:
            return text
        real = self.real_path(path)
        return None if real is None else self._files.get(real)

    def list(self, path: str) -> tuple[str, ...] | None:
        real = path if path in self._names_of_directory else self.real_path(path)
        if real is None or real not in self._names_of_directory:
            return None
        if real not in self._listed:
            self._listed[real] = tuple(sorted(self._names_of_directory[real]))
        return self._listed[real]

    def read_link(self, path: str) -> str | None:
        target = self._links.get(path)
        if target is not None:
            return target
        directory, _, name = path.rpartition("/")
        real = self.real_path(directory or "/")
        return None if real is None else self._links.get(join(real, name))

    def real_path(self, path: str) -> str | None:
        if path not in self._real:
            directory, _, name = path.rpartition("/")
            if directory not in self._real:
                # Kept, because the files of one directory are asked for one after the other.
                self._real[directory] = self._follow("/", directory.split("/"))
            real = self._real[directory]
            plain = None if real is None else join(real, name)
            if plain is None or plain in self._links or name in ("", ".", ".."):
                self._real[path] = None if real is None else self._follow(real, [name])
            else:
                self._real[path] = plain if self._is_there(plain) else None
        return self._real[path]

    def command_output(self, command: str) -> str | None:
        return self._commands.get(command)

    def _follow(self, directory: str, names: Sequence[str]) -> str | None:
        return follow(directory, names, self._links.get, self._is_there)

    def _is_there(self, path: str) -> bool:
        return path in self._names_of_directory or path in self._files


def _group_names(
    files: Mapping[str, str], links: Mapping[str, str], directories: tuple[str, ...]
) -> dict[str, set[str]]:
    """Return every directory that the paths imply, with the names in it."""
    names: dict[str, set[str]] = {"/": set()}
    for directory in directories:
        names.setdefault(directory, set())
    for paths in (files, links, directories):
        for path in paths:
            child = path
            while child not in ("", "/"):
                directory, _, name = child.rpartition("/")
                directory = directory or "/"
                siblings = names.get(directory)
                if siblings is not None:
                    siblings.add(name)
                    break
                names[directory] = {name}
                child = directory
    return names
