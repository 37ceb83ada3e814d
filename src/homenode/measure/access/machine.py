"""Machine: what the suite needs of whatever it measures, and channels to machines that are reached.

A channel is a way to a shell on another machine, by which RemoteMachine reaches it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from homenode.machine.snapshot.protocol import Snapshot
from homenode.process import ProgramResult


class Machine(Protocol):
    """This machine, or one that is reached: a guest over ssh or its agent.

    The suite runs where homenode runs and sends single commands; a guest needs no Python for them.
    """

    @property
    def name(self) -> str:
        """What to call it in messages: "this machine", or how it is reached."""

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        """Runs a program there to its end, as process.run does here.

        argv is passed on word by word: no shell sees it unquoted. Raises ToolMissingError where
        the program is not installed there, ToolTimeoutError where it is stopped, and ToolError
        where the machine cannot be reached.
        """

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        """Which of these programs `run` would find there. Raises ToolError when unreachable."""

    def snapshot(self) -> Snapshot:
        """One look at it, as discovery reads it. Raises ToolError when unreachable."""


class ScriptOutput(Struct, frozen=True):
    """What a script said. Texts are decoded as UTF-8, what is none replaced."""

    stdout: str
    stderr: str


class Channel(Protocol):
    """ssh or the guest agent."""

    @property
    def name(self) -> str:
        """What to call the machine in messages: "guest vm7 over ssh"."""

    @property
    def most_input_bytes(self) -> int | None:
        """How much standard input one script may have; None = as much as it likes."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        """Run a script of a POSIX shell to its end.

        Raises ToolTimeoutError where it does not end in time, and ToolError where the machine
        cannot be reached or the way to it breaks.
        """

    def close(self) -> None:
        """Leave nothing behind there; the next script opens it again."""
