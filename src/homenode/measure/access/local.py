"""LocalMachine: the one that homenode runs on. [I/O]"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import Snapshot
from homenode.process import ProgramResult, find_program, run

_OWN = frozenset({"homenode-probe"})
"""Programs of ours, installed next to the Python that runs us and often on no one's PATH."""


class LocalMachine:
    """Programs start here; the snapshot is this machine's. See access.machine.Machine.

    kept_open: file descriptors that every program inherits, see process.run.
    """

    __slots__ = ("_kept_open",)

    def __init__(self, kept_open: Sequence[int] = ()) -> None:
        self._kept_open = tuple(kept_open)

    def with_descriptor(self, descriptor: int) -> Self:
        """The same machine, of which every program inherits this descriptor too."""
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
            (_program(argv[0]) or argv[0], *argv[1:]),
            timeout_s,
            input,
            environment=environment,
            kept_open=self._kept_open,
        )

    def find_installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(name for name in names if _program(name) is not None)

    def snapshot(self) -> Snapshot:
        return LiveSnapshot()


def _program(name: str) -> str | None:
    """Where a program lies: on PATH, else next to our own Python."""
    path = find_program(name)
    if path is None and name in _OWN:
        path = find_program(str(Path(sys.executable).parent / name))
    return path
