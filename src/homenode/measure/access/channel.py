"""Channel: a way to a shell on another machine, by which RemoteMachine reaches it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Said:
    """What a script said. Texts are decoded as UTF-8, what is none replaced."""

    stdout: str
    stderr: str


class Channel(Protocol):
    """ssh, the guest agent or a serial console."""

    @property
    def name(self) -> str:
        """What to call the machine in messages: "guest vm7 over ssh"."""

    @property
    def most_input_bytes(self) -> int | None:
        """How much standard input one script may have; None = as much as it likes."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> Said:
        """Run a script of a POSIX shell to its end.

        Raises ToolTimeoutError where it does not end in time, and ToolError where the machine
        cannot be reached or the way to it breaks.
        """

    def close(self) -> None:
        """Leave nothing behind there; the next script opens it again."""
