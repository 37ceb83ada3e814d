"""QuietSnapshot: a snapshot whose tools are not run.

For hooks and early boot: virsh would wait there for the libvirtd that waits for us, and nvidia-smi
would load a driver. For timers: lspci and nvidia-smi would wake devices that sleep.
"""

from collections.abc import Collection

from homenode.snapshot.protocol import Snapshot


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
