"""Machine: the suite's interface to the measured machine; LocalMachine; channels to others. [I/O]

A channel is a way to a shell on another machine, by which RemoteMachine reaches it.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from msgspec import Struct

from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import Snapshot
from homenode.process import ProgramResult, find_program, run


class Machine(Protocol):
    """This machine, or a remote one: a guest over ssh or its agent. The suite runs where homenode
    runs and sends single commands; a guest needs no Python for them."""

    @property
    def name(self) -> str:
        """Name in messages: "this machine", or the address."""

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        """Run a program on the machine to its end, as process.run does locally.

        argv is passed on word by word: no shell sees it unquoted. Raises ToolMissingError if
        the program is not installed there, ToolTimeoutError if it is stopped, and ToolError
        if the machine cannot be reached.
        """

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        """Return the programs that `run` would find. Raises ToolError when unreachable."""

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the machine for discovery. Raises ToolError when unreachable."""


class ScriptOutput(Struct, frozen=True):
    """Output of a script. Texts are decoded as UTF-8 with replacement of invalid bytes."""

    stdout: str
    stderr: str


class Channel(Protocol):
    """ssh or the guest agent."""

    @property
    def name(self) -> str:
        """The machine's name in messages: "guest vm7 over ssh"."""

    @property
    def most_input_bytes(self) -> int | None:
        """Maximum standard input of one script; None = no limit."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        """Run a script of a POSIX shell to its end. Raises ToolTimeoutError if it does not end in
        time, and ToolError if the machine cannot be reached or the connection breaks."""

    def close(self) -> None:
        """Close the connection; the next script opens it again."""


_OWN = frozenset({"homenode-probe"})
"""Programs of homenode, installed next to its Python and often not on the PATH."""


class LocalMachine:
    """The Machine that homenode runs on. kept_open: file descriptors that every program inherits,
    see process.run."""

    __slots__ = ("_kept_open",)

    def __init__(self, kept_open: Sequence[int] = ()) -> None:
        self._kept_open = tuple(kept_open)

    def with_descriptor(self, descriptor: int) -> Self:
        """Return the same machine, whose programs also inherit this descriptor."""
        return type(self)((*self._kept_open, descriptor))

    @property
    def name(self) -> str:
        return "this machine"

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> ProgramResult:
        return run(
            (_find_program(argv[0]) or argv[0], *argv[1:]),
            timeout_s,
            input,
            environment=environment,
            kept_open=self._kept_open,
        )

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(name for name in names if _find_program(name) is not None)

    def snapshot(self) -> Snapshot:
        return LiveSnapshot()


def _find_program(name: str) -> str | None:
    """Return the path of a program: on PATH, else next to homenode's Python."""
    path = find_program(name)
    if path is None and name in _OWN:
        path = find_program(str(Path(sys.executable).parent / name))
    return path
