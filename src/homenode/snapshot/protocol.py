"""Snapshot: the one way in which discovery reads a host, live or stored."""

from typing import Protocol


class Snapshot(Protocol):
    """Files, folders, links and tool outputs of one host.

    A live machine, a capture archive, a bare tree of /sys, and a rendered host.toml all are one.
    Paths are absolute, of the host ("/sys/devices/system/cpu/online"), without "." or "..".
    Symbolic links in the middle of a path are followed, as the kernel would.
    """

    @property
    def name(self) -> str:
        """What to call it in messages: a file name, or "this machine"."""

    def read_text(self, path: str) -> str | None:
        """The text of a file; None where it is absent or unreadable (the kernel may refuse)."""

    def list(self, path: str) -> tuple[str, ...] | None:
        """Names in a folder, sorted; None where there is no such folder."""

    def read_link(self, path: str) -> str | None:
        """Where a symbolic link points, as stored; None where the path is no link."""

    def real_path(self, path: str) -> str | None:
        """The path with every link resolved; None where nothing is there.

        /sys/bus/pci/devices/0000:19:00.0 becomes /sys/devices/pci0000:15/.../0000:19:00.0: this is
        where the PCI tree is given.
        """

    def command_output(self, command: str) -> str | None:
        """Output of a tool by its name in snapshot/contents.py; None where it was not run."""
