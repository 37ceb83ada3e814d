"""Snapshot: the interface through which discovery reads a host, live or stored; its links."""

from collections.abc import Callable, Mapping, Sequence
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
        """The text of a file; None if it is absent or unreadable (the kernel may refuse)."""

    def list(self, path: str) -> tuple[str, ...] | None:
        """Names in a directory, sorted; None if there is no such directory."""

    def read_link(self, path: str) -> str | None:
        """Return a symbolic link's target, as stored; None if the path is not a link."""

    def real_path(self, path: str) -> str | None:
        """The path with every link resolved; None if nothing is there.

        /sys/bus/pci/devices/0000:19:00.0 becomes /sys/devices/pci0000:15/.../0000:19:00.0: this is
        where the PCI tree is given.
        """

    def command_output(self, command: str) -> str | None:
        """Output of a tool by its name in contents.py; None if it was not run."""


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
        return self._text(self._files.read_text(path))

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
        return self._text(self._files.command_output(command))

    def failure(self, command: str) -> str:
        """Return the reason why a tool has no output: the tool's message if it ran just now."""
        failures: Mapping[str, str] = getattr(self._files, "failures", {})
        return failures.get(command, f"{self.name} has no output of {command.partition('-')[0]}")

    def _text(self, text: str | None) -> str | None:
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
                f"{self.name}: expected a host of at most {MAX_FILES} files, of "
                f"{MAX_CHARS >> 20} MiB in them and {MAX_COMMAS} parts of lists, found more"
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
    """The real path of names below a real directory; None if nothing is there, or a loop.

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
    """A name below a directory, the top included."""
    return f"{directory}{name}" if directory == "/" else f"{directory}/{name}"
