"""LiveSnapshot: the running machine, read as it is asked for. [I/O]"""

from collections.abc import Sequence

from homenode.errors import ToolError
from homenode.machine.snapshot.contents import COMMAND_OF_NAME, IDENTITY_COMMANDS, Command
from homenode.machine.snapshot.folder import FolderSnapshot
from homenode.process import Completed, ToolMissingError, run

_MAX_DOMAINS = 4096
"""Of one host whose XML is read; no host runs so many."""


class LiveSnapshot:
    """The machine that we run on. Tools run when their output is first asked for, and once.

    root: where the host's /sys and /proc lie: "/", or "/host" in a container that mounts them.
    """

    __slots__ = ("_failures", "_files", "_outputs")

    def __init__(self, root: str = "/") -> None:
        self._files = FolderSnapshot("this machine", root)
        self._outputs: dict[str, str | None] = {}
        self._failures: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self._files.name

    @property
    def failures(self) -> dict[str, str]:
        """What each tool said that was asked, is installed, and failed."""
        return dict(self._failures)

    def read_text(self, path: str) -> str | None:
        return self._files.read_text(path)

    def list(self, path: str) -> tuple[str, ...] | None:
        return self._files.list(path)

    def read_link(self, path: str) -> str | None:
        return self._files.read_link(path)

    def real_path(self, path: str) -> str | None:
        return self._files.real_path(path)

    def command_output(self, command: str) -> str | None:
        """Output of a tool; None where it is not installed or fails (see `failures`).

        Raises KeyError for a command that is not in machine/snapshot/contents.py.
        """
        if command not in self._outputs:
            self._outputs[command] = self._run(OF_NAME[command])
        return self._outputs[command]

    def _run(self, command: Command) -> str | None:
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

    def _wrapped(self, command: Command, words: Sequence[str]) -> str:
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


def _first(command: Command) -> Completed:
    """The first spelling whose program is installed. Raises ToolError."""
    missing: ToolMissingError | None = None
    for argv in command.spellings:
        try:
            return run(argv, command.timeout_s)
        except ToolMissingError as error:
            missing = missing or error
    assert missing is not None  # a command has at least one spelling
    raise missing
