"""A host's files in a directory, and the running machine, read on demand. [I/O]"""

from collections.abc import Sequence

from homenode.errors import ToolError
from homenode.machine.snapshot.contents import COMMAND_OF_NAME, IDENTITY_COMMANDS, ToolCommand
from homenode.machine.snapshot.store import DirectorySnapshot
from homenode.process import ProgramResult, ToolMissingError, run

_MAX_DOMAINS = 4096
"""Limit of domains of a host whose XML is read; no host runs as many."""


class QuietSnapshot(DirectorySnapshot):
    """The files of the local machine; no tool runs. root: directory of the host's /sys and /proc:
    "/", or "/host" in a container that mounts them."""

    __slots__ = ()

    def __init__(self, root: str = "/") -> None:
        super().__init__("this machine", root)

    def command_output(self, command: str) -> str | None:
        return None


class LiveSnapshot(QuietSnapshot):
    """The local machine. A tool runs once, when its output is first requested."""

    __slots__ = ("_failures", "_outputs")

    def __init__(self, root: str = "/") -> None:
        super().__init__(root)
        self._outputs: dict[str, str | None] = {}
        self._failures: dict[str, str] = {}

    @property
    def failures(self) -> dict[str, str]:
        """Output of each failed tool; for virsh also that it is missing."""
        return dict(self._failures)

    def command_output(self, command: str) -> str | None:
        """Return the output of a tool; None if it is not installed or fails (see `failures`).
        Raises KeyError for a command that is not in machine/snapshot/contents.py."""
        if command not in self._outputs:
            self._outputs[command] = self._run(OF_NAME[command])
        return self._outputs[command]

    def _run(self, command: ToolCommand) -> str | None:
        try:
            if not command.list_argv:
                return _run_first_installed(command).stdout_or_raise()
            run((command.spellings[0][0], "--version"), command.timeout_s)  # it is there
            output = run(command.list_argv, command.timeout_s).stdout_or_raise()
            return self._run_each(command, output.split()[:_MAX_DOMAINS])
        except ToolMissingError:
            if command.list_argv:  # other VMs may run all the same
                self._failures[command.name] = f"{command.list_argv[0]}: command not found"
            return None
        except ToolError as error:
            self._failures[command.name] = error.message
            return None

    def _run_each(self, command: ToolCommand, words: Sequence[str]) -> str:
        """Return the outputs for each word, in <wrapped> tags."""
        outputs: list[str] = []
        for word in words:
            result = run((*command.spellings[0], word), command.timeout_s)
            failure = result.failure()
            if failure is None:
                outputs.append(result.stdout)
            elif _GONE not in failure:  # a domain may end between the list and its turn
                raise ToolError(failure)
        return f"<{command.wrapped}>\n{''.join(outputs)}</{command.wrapped}>\n"


_GONE = "failed to get domain"
"""Message of virsh for a UUID that no domain has."""

OF_NAME = {**COMMAND_OF_NAME, **{command.name: command for command in IDENTITY_COMMANDS}}


def _run_first_installed(command: ToolCommand) -> ProgramResult:
    """Return the first spelling whose program is installed. Raises ToolError."""
    missing: ToolMissingError | None = None
    for argv in command.spellings:
        try:
            return run(argv, command.timeout_s)
        except ToolMissingError as error:
            missing = missing or error
    assert missing is not None  # a command has at least one spelling
    raise missing
