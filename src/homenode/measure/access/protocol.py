"""Machine: what the suite needs of whatever it measures."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from homenode.process import Completed
from homenode.snapshot.protocol import Snapshot


class Machine(Protocol):
    """This machine, or one that is reached: a guest over ssh, its agent or its console.

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
    ) -> Completed:
        """Runs a program there to its end, as process.run does here.

        argv is passed on word by word: no shell sees it unquoted. Raises ToolMissingError where
        the program is not installed there, ToolTimeoutError where it is stopped, and ToolError
        where the machine cannot be reached.
        """

    def installed(self, names: Collection[str]) -> frozenset[str]:
        """Which of these programs `run` would find there. Raises ToolError when unreachable."""

    def snapshot(self) -> Snapshot:
        """One look at it, as discovery reads it. Raises ToolError when unreachable."""
