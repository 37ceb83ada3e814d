"""Installation: setup files put in place, with a journal that takes them away again. [I/O]

libvirt runs every executable file of its hooks' folder, whatever its name: a file that is being
written lies in a folder of homenode's own. Where /etc is no one file system, it lies next to the
file's place, and cannot be run. The journal names it before it is there, and the folders that are
made for it: the next command, whichever it is, removes what a kill left of them.
"""

import contextlib
import errno
import hashlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from homenode import formats
from homenode.durable import PARTS, check_links, part_name, remove_file, replace_watched_file
from homenode.errors import UsageError, of_os
from homenode.host_setup.files import SetupFile
from homenode.input_files import read_plain
from homenode.record_folder import RecordFolder

KIND = "host-setup"
FOLDER = "host-setup"
_MOST_BYTES = 1 << 20
_PARTS = "/etc/homenode/parts"
_NO_PARTS = (errno.EXDEV, errno.EROFS, errno.EACCES, errno.EPERM)
"""Why a file cannot be written there first: for one, a mount below /etc."""


@dataclass(frozen=True, slots=True)
class SetupHead:
    """Which folder the paths are below; "/" but for tests and images."""

    root: str


@dataclass(frozen=True, slots=True)
class SetupEntry:
    """A file is about to be put in place (sha256), or has been removed (None).

    part: where it is written first. made: folders that are not there yet, and will be.
    """

    path: str
    sha256: str | None
    part: str | None = None
    made: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileChange:
    """What an installation or its undo does to one path."""

    path: str
    action: str


class Installation:
    """The setup files of one host. state: homenode's own folder; root: of the host's files.

    Errors of the file system are HostErrors.
    """

    __slots__ = ("_files", "_root")

    def __init__(self, state: Path, root: Path = Path("/")) -> None:
        self._files = RecordFolder(state / FOLDER, hint=lambda number: "run as root")
        self._root = root

    def preview(self, files: Sequence[SetupFile]) -> tuple[FileChange, ...]:
        """What install would do. Raises UsageError for a file that is somebody else's."""
        ours = self._installed()
        found = [self._change(one, ours) for one in files]
        left = ours.keys() - {one.path for one in files}
        return (*found, *(FileChange(path, "remove") for path in sorted(left)))

    def install(self, files: Sequence[SetupFile]) -> tuple[FileChange, ...]:
        """Put the files in place, and remove those of an earlier installation that are not needed.

        Raises UsageError, before anything is written, for a file that is somebody else's or was
        edited since.
        """
        with self._files.locked("no other homenode at work on this host's setup, found one", ""):
            self._sweep()
            changes = self.preview(files)
            self._refuse_edited(changes)
            if not self._files.has_journal:
                self._files.begin(formats.head_line(KIND, SetupHead(str(self._root))))
            by_path = {one.path: one for one in files}
            for change in changes:
                if change.action == "remove":
                    self._remove(change.path)
                elif change.action != "keep":
                    self._write(by_path[change.path])
            self._sweep()
        return changes

    def undo(self) -> tuple[FileChange, ...]:
        """Remove every file that is installed. Raises UsageError where one was edited since."""
        if not self._files.has_journal:
            return ()
        return self.install(())

    def _change(self, file: SetupFile, ours: dict[str, set[str]]) -> FileChange:
        now = self._sha256(file.path)
        wanted = _sum(file.text)
        if now is None:
            return FileChange(file.path, "create")
        if now == wanted and file.path in ours and self._mode(file.path) == file.mode:
            return FileChange(file.path, "keep")
        if file.path not in ours:
            raise UsageError(
                f"{file.path}: expected no such file, found one that homenode did not install",
                hint="look at it, and move it away",
            )
        return FileChange(file.path, "replace")

    def _refuse_edited(self, changes: Sequence[FileChange]) -> None:
        ours = self._installed()
        for change in changes:
            now = self._sha256(change.path)
            if (
                change.action in ("replace", "remove")
                and now is not None
                and now not in ours[change.path]
            ):
                raise UsageError(
                    f"{change.path}: expected what homenode installed, found it edited since",
                    hint="keep your edit elsewhere and remove the file",
                )

    def _installed(self) -> dict[str, set[str]]:
        """Paths of ours with their sums, as the journal has them. A file may have an older one,
        where a write was cut short between the journal and the file."""
        found: dict[str, set[str]] = {}
        for entry in self._entries():
            if entry.sha256 is None:
                found.pop(entry.path, None)
            else:
                found.setdefault(entry.path, set()).add(entry.sha256)
        return found

    def _entries(self) -> tuple[SetupEntry, ...]:
        if not self._files.has_journal:
            return ()
        source = str(self._files.journal_path)
        return formats.decode_journal(self._files.journal(), KIND, SetupHead, SetupEntry, source)[1]

    def _sweep(self) -> None:
        """Remove what writing left: parts of files, and folders of ours in which nothing is."""
        entries = self._entries()
        # An earlier homenode wrote parts next to the files, and named none.
        folders = {self._at(path).parent for e in entries for path in (e.path, e.part or e.path)}
        with self._files.errors():
            for part in [part for folder in folders for part in folder.glob(PARTS)]:
                remove_file(part)
            for folder in sorted({one for entry in entries for one in entry.made}, reverse=True):
                with contextlib.suppress(OSError):  # gone, or somebody's files are in it
                    self._at(folder).rmdir()

    def _write(self, file: SetupFile) -> None:
        own_folder = file.path.rpartition("/")[0]
        try:
            self._write_by_way_of(_PARTS, file)
        except OSError as error:
            if error.errno not in _NO_PARTS:
                with self._files.errors():
                    raise
            with self._files.errors():
                self._write_by_way_of(own_folder, file)

    def _write_by_way_of(self, folder: str, file: SetupFile) -> None:
        """Raises OSError."""
        part, target = f"{folder}/{part_name()}", self._at(file.path)
        check_links(target.parent)
        check_links(self._at(folder))
        made = tuple(sorted({*self._not_there(file.path), *self._not_there(part)}))
        self._files.append(formats.line(SetupEntry(file.path, _sum(file.text), part, made)))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._at(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_watched_file(target, file.text.encode(), file.mode, self._at(part))

    def _not_there(self, path: str) -> Iterator[str]:
        """Folders above a path that are not there."""
        while (path := path.rpartition("/")[0]) and not self._at(path).exists():
            yield path

    def _remove(self, path: str) -> None:
        with self._files.errors():
            self._at(path).unlink(missing_ok=True)
        self._files.append(formats.line(SetupEntry(path, None)))

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _mode(self, path: str) -> int:
        return stat.S_IMODE(self._at(path).lstat().st_mode)

    def _sha256(self, path: str) -> str | None:
        try:
            content = read_plain(self._at(path), _MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise of_os(error, path, "a small plain file or none") from None
        return hashlib.sha256(content).hexdigest()


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
