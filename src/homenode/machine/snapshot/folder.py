"""Folder snapshot: a folder that holds /sys and /proc. [I/O]

Apart from live.py, as the KubeVirt hook reads one in a container that has no room for what starts
programs.
"""

import os
from collections.abc import Sequence

from homenode.input_files import read_kernel_file
from homenode.machine.snapshot.protocol import follow, join


class FolderSnapshot:
    """A folder that holds /sys and /proc, as a snapshot; nothing outside of it is ever read.

    Links are resolved here and not by the kernel: an absolute link, or one with too many "..",
    leads to the folder's own top. Tool outputs are the files commands/NAME.

    sysfs: where /sys lies below the folder; "" where the folder is a /sys itself (and no /proc
    is there), "/sys" elsewhere.
    """

    __slots__ = ("_name", "_real", "_root", "_sysfs")

    def __init__(self, name: str, root: str, sysfs: str = "/sys") -> None:
        self._name = name
        self._root = root.rstrip("/")
        self._sysfs = sysfs
        self._real: dict[str, str | None] = {"": "/", "/": "/"}

    @property
    def name(self) -> str:
        return self._name

    def read_text(self, path: str) -> str | None:
        real = self.real_path(path)
        if real is None:
            return None
        content = read_kernel_file(self._on_disk(real))
        return None if content is None else content.decode("utf-8", "surrogateescape")

    def list(self, path: str) -> tuple[str, ...] | None:
        real = self.real_path(path)
        if real is None:
            return None
        try:
            return tuple(sorted(os.listdir(self._on_disk(real))))  # noqa: PTH208 - a third of the time
        except OSError:
            return None

    def read_link(self, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        real = self.real_path(folder or "/")
        return None if real is None else self._target(join(real, name))

    def real_path(self, path: str) -> str | None:
        if path not in self._real:
            folder, _, name = path.rpartition("/")
            if folder not in self._real:
                # Kept, because the files of one folder are asked for one after the other.
                self._real[folder] = self._follow("/", folder.split("/"))
            real = self._real[folder]
            if real is None:
                return None
            # The files themselves are not kept: on a live host they come and go.
            return self._follow(real, [name])
        return self._real[path]

    def command_output(self, command: str) -> str | None:
        return self.read_text(f"/commands/{command}")

    def _on_disk(self, real: str) -> str:
        if self._sysfs != "/sys" and (real == "/sys" or real.startswith("/sys/")):
            return self._root + self._sysfs + real.removeprefix("/sys")
        return self._root + real

    def _follow(self, folder: str, names: Sequence[str]) -> str | None:
        return follow(folder, names, self._target, self._is_there)

    def _target(self, path: str) -> str | None:
        return _target(self._on_disk(path))

    def _is_there(self, path: str) -> bool:
        try:
            os.lstat(self._on_disk(path))
        except PermissionError:
            return True  # behind a folder that we may not enter: it may be there
        except (OSError, ValueError):
            return False
        return True


def _target(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115 - called for every part of every path
    except (OSError, ValueError):
        return None
