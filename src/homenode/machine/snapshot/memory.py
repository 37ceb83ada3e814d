"""MemorySnapshot: a host as mappings of files, links and tool outputs.

Archives are read into one, and tests build them by hand.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from homenode.machine.snapshot.protocol import follow, join

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
        self._names_of_directory = _names_of_directory(self._files, self._links, directories)
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


def _names_of_directory(
    files: Mapping[str, str], links: Mapping[str, str], directories: tuple[str, ...]
) -> dict[str, set[str]]:
    """Every directory that the paths imply, with the names in it."""
    names: dict[str, set[str]] = {"/": set()}
    for directory in directories:
        names.setdefault(directory, set())
    for paths in (files, links, directories):
        for path in paths:
            below = path
            while below not in ("", "/"):
                directory, _, name = below.rpartition("/")
                directory = directory or "/"
                siblings = names.get(directory)
                if siblings is not None:
                    siblings.add(name)
                    break
                names[directory] = {name}
                below = directory
    return names
