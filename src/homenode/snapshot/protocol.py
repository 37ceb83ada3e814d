"""Snapshot: the one way in which discovery reads a host, live or stored; where its links lead."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class Snapshot(Protocol):
    """Files, folders, links and tool outputs of one host.

    A live machine, a capture archive, a bare tree of /sys, and a rendered host.toml all are one.
    Paths are absolute, of the host ("/sys/devices/system/cpu/online"), without "." or "..".
    Symbolic links in the middle of a path are followed, as the kernel would.
    """

    @property
    def name(self) -> str:
        """What to call it in messages: a file name, or "this machine"."""

    def read_text(self, path: str) -> str | None:
        """The text of a file; None where it is absent or unreadable (the kernel may refuse)."""

    def list(self, path: str) -> tuple[str, ...] | None:
        """Names in a folder, sorted; None where there is no such folder."""

    def read_link(self, path: str) -> str | None:
        """Where a symbolic link points, as stored; None where the path is no link."""

    def real_path(self, path: str) -> str | None:
        """The path with every link resolved; None where nothing is there.

        /sys/bus/pci/devices/0000:19:00.0 becomes /sys/devices/pci0000:15/.../0000:19:00.0: this is
        where the PCI tree is given.
        """

    def command_output(self, command: str) -> str | None:
        """Output of a tool by its name in snapshot/contents.py; None where it was not run."""


class QuietSnapshot:
    """The files of another snapshot. commands: those that may run all the same, by their names."""

    __slots__ = ("_commands", "_files")

    def __init__(self, files: Snapshot, commands: Collection[str] = ()) -> None:
        self._files = files
        self._commands = frozenset(commands)

    @property
    def name(self) -> str:
        return self._files.name

    def read_text(self, path: str) -> str | None:
        return self._files.read_text(path)

    def list(self, path: str) -> tuple[str, ...] | None:
        return self._files.list(path)

    def read_link(self, path: str) -> str | None:
        return self._files.read_link(path)

    def real_path(self, path: str) -> str | None:
        return self._files.real_path(path)

    def command_output(self, command: str) -> str | None:
        return self._files.command_output(command) if command in self._commands else None


MAX_LINKS = 40
"""Links followed in one path before it counts as a loop. Source: MAXSYMLINKS of the kernel."""


def follow(
    folder: str,
    names: Sequence[str],
    target_of: Callable[[str], str | None],
    is_there: Callable[[str], bool],
) -> str | None:
    """The real path of names below a real folder; None where nothing is there, or a loop.

    target_of: a link's target, None where the path is no link. Too many ".." end at the top. Links
    are counted over the whole path, as the kernel does: links that each name the next one twice
    would otherwise cost 2^n steps.
    """
    real = folder
    pending = list(reversed(names))
    links_left = MAX_LINKS
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
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
        if target.startswith("/"):
            real = "/"
        pending += reversed(target.split("/"))
    return real


def join(folder: str, name: str) -> str:
    """A name below a folder, the top included."""
    return f"{folder}{name}" if folder == "/" else f"{folder}/{name}"
