"""A host's files in a folder, and the running machine, read as they are asked for. [I/O]"""

import os
from collections.abc import Sequence

from homenode.errors import ToolError
from homenode.input_files import read_kernel_file
from homenode.machine.snapshot.contents import COMMAND_OF_NAME, IDENTITY_COMMANDS, ToolCommand
from homenode.machine.snapshot.protocol import FilesOf, follow, join
from homenode.process import Completed, ToolMissingError, run


class FolderSnapshot:
    """A folder that holds /sys and /proc, as a snapshot; nothing outside of it is ever read.

    Links are resolved here and not by the kernel: an absolute link, or one with too many "..",
    leads to the folder's own top. Tool outputs are the files commands/NAME.

    sysfs: where /sys lies below the folder; "" where the folder is a /sys itself (and no /proc
    is there), "/sys" elsewhere.
    """

    __slots__ = ("_name", "_real", "_root", "_sysfs")

    def __init__(self, name: str, root: str, sysfs: str = "/sys") -> None:
        self._name = name
        self._root = root.rstrip("/")
        self._sysfs = sysfs
        self._real: dict[str, str | None] = {"": "/", "/": "/"}

    @property
    def name(self) -> str:
        return self._name

    def read_text(self, path: str) -> str | None:
        real = self.real_path(path)
        if real is None:
            return None
        content = read_kernel_file(self._on_disk(real))
        return None if content is None else content.decode("utf-8", "surrogateescape")

    def list(self, path: str) -> tuple[str, ...] | None:
        real = self.real_path(path)
        if real is None:
            return None
        try:
            return tuple(sorted(os.listdir(self._on_disk(real))))  # noqa: PTH208 - a third of the time
        except OSError:
            return None

    def read_link(self, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        real = self.real_path(folder or "/")
        return None if real is None else self._target(join(real, name))

    def real_path(self, path: str) -> str | None:
        if path not in self._real:
            folder, _, name = path.rpartition("/")
            if folder not in self._real:
                # Kept, because the files of one folder are asked for one after the other.
                self._real[folder] = self._follow("/", folder.split("/"))
            real = self._real[folder]
            if real is None:
                return None
            # The files themselves are not kept: on a live host they come and go.
            return self._follow(real, [name])
        return self._real[path]

    def command_output(self, command: str) -> str | None:
        return self.read_text(f"/commands/{command}")

    def _on_disk(self, real: str) -> str:
        if self._sysfs != "/sys" and (real == "/sys" or real.startswith("/sys/")):
            return self._root + self._sysfs + real.removeprefix("/sys")
        return self._root + real

    def _follow(self, folder: str, names: Sequence[str]) -> str | None:
        return follow(folder, names, self._target, self._is_there)

    def _target(self, path: str) -> str | None:
        return _target(self._on_disk(path))

    def _is_there(self, path: str) -> bool:
        try:
            os.lstat(self._on_disk(path))
        except PermissionError:
            return True  # behind a folder that we may not enter: it may be there
        except (OSError, ValueError):
            return False
        return True


def _target(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - called for every part of every path
    except (OSError, ValueError):
        return None


_MAX_DOMAINS = 4096
"""Of one host whose XML is read; no host runs so many."""


class LiveSnapshot(FilesOf):
    """The machine that we run on. Tools run when their output is first asked for, and once.

    root: where the host's /sys and /proc lie: "/", or "/host" in a container that mounts them.
    """

    __slots__ = ("_failures", "_outputs")

    def __init__(self, root: str = "/") -> None:
        super().__init__(FolderSnapshot("this machine", root))
        self._outputs: dict[str, str | None] = {}
        self._failures: dict[str, str] = {}

    @property
    def failures(self) -> dict[str, str]:
        """What each tool said that was asked, is installed, and failed."""
        return dict(self._failures)

    def command_output(self, command: str) -> str | None:
        """Output of a tool; None where it is not installed or fails (see `failures`).

        Raises KeyError for a command that is not in machine/snapshot/contents.py.
        """
        if command not in self._outputs:
            self._outputs[command] = self._run(OF_NAME[command])
        return self._outputs[command]

    def _run(self, command: ToolCommand) -> str | None:
        try:
            if not command.each:
                return _first(command).stdout_or_raise()
            listed = run(command.each, command.timeout_s).stdout_or_raise()
            return self._wrapped(command, listed.split()[:_MAX_DOMAINS])
        except ToolMissingError:
            return None
        except ToolError as error:
            self._failures[command.name] = error.message
            return None

    def _wrapped(self, command: ToolCommand, words: Sequence[str]) -> str:
        """The outputs for each word, in <wrapped> tags."""
        outputs: list[str] = []
        for word in words:
            completed = run((*command.spellings[0], word), command.timeout_s)
            failure = completed.failure()
            if failure is None:
                outputs.append(completed.stdout)
            else:  # a domain may end between the list and its turn
                self._failures[f"{command.name} {word}"] = failure
        return f"<{command.wrapped}>\n{''.join(outputs)}</{command.wrapped}>\n"


OF_NAME = {**COMMAND_OF_NAME, **{command.name: command for command in IDENTITY_COMMANDS}}


def _first(command: ToolCommand) -> Completed:
    """The first spelling whose program is installed. Raises ToolError."""
    missing: ToolMissingError | None = None
    for argv in command.spellings:
        try:
            return run(argv, command.timeout_s)
        except ToolMissingError as error:
            missing = missing or error
    assert missing is not None  # a command has at least one spelling
    raise missing
