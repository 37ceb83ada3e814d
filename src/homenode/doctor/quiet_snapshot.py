"""QuietSnapshot: a snapshot whose tools are never run.

For hooks and early boot: virsh would wait there for the libvirtd that waits for us, and nvidia-smi
would load a driver.
"""

from homenode.snapshot.protocol import Snapshot


class QuietSnapshot:
    """The files of another snapshot."""

    __slots__ = ("_files",)

    def __init__(self, files: Snapshot) -> None:
        self._files = files

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
        return None
