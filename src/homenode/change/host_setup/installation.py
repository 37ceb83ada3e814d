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
from pathlib import Path

import msgspec
from msgspec import Struct

from homenode.change.host_lock import host_locked
from homenode.change.host_setup.files import SetupFile
from homenode.change.journal import Journal
from homenode.change.record_folder import RecordFolder
from homenode.change.step import ChangeEntry, ChangeHead, ChangeState, Note
from homenode.durable import check_links, part_name, replace_watched_file, sweep_parts
from homenode.errors import UsageError, of_os
from homenode.input_files import read_plain
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.wording import command_line

KIND = "put-file"
FOLDER = "host-setup"
_UNDO = "homenode host-setup undo"
_MOST_BYTES = 1 << 20
_PARTS = "/etc/homenode/parts"
_NO_PARTS = (errno.EXDEV, errno.EROFS, errno.EACCES, errno.EPERM)
"""Why a file cannot be written there first: for one, a mount below /etc."""


class FileChange(Struct, frozen=True):
    """What an installation or its undo does to one path."""

    path: str
    action: str


def setup_journal(state: Path) -> Journal:
    """Of the files that are installed. state: homenode's own folder."""
    head = ChangeHead(run=FOLDER, command="homenode host-setup install", undo=_UNDO)
    return Journal(RecordFolder(state / FOLDER, hint=lambda number: "run as root"), head)


class Installation:
    """The setup files of one host. state: homenode's own folder; root: of the host's files.

    Errors of the file system are HostErrors.
    """

    __slots__ = ("_files", "_journal", "_root", "_state")

    def __init__(self, state: Path, root: Path = Path("/")) -> None:
        self._journal = setup_journal(state)
        self._files = self._journal.files
        self._state, self._root = state, root

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
        with host_locked(self._state, DEFAULT, "homenode host-setup"):
            self._sweep()
            self._journal.settle(lambda entry: FileStep(self._root, self._files))
            changes = self.preview(files)
            ours = self._installed()
            self._refuse_edited(changes, ours)
            by_path = {one.path: one for one in files}
            write = self._journal.write
            for change in changes:
                step = FileStep(self._root, self._files, by_path.get(change.path))
                if change.action == "remove":
                    step.undo(ours[change.path], write)
                elif change.action != "keep":
                    step.do(write)
            self._sweep()
        return changes

    def undo(self) -> tuple[FileChange, ...]:
        """Remove every file that is installed. Raises UsageError where one was edited since."""
        return self.install(()) if self._files.path.exists() else ()

    def _change(self, file: SetupFile, ours: dict[str, ChangeEntry]) -> FileChange:
        step = FileStep(self._root, self._files, file)
        if step.sha256(file.path) is None:
            return FileChange(file.path, "create")
        if file.path not in ours:
            raise UsageError(
                f"{file.path}: expected no such file, found one that homenode did not install",
                hint="look at it, and move it away",
            )
        return FileChange(file.path, "keep" if step.is_done(step.entry()) else "replace")

    def _refuse_edited(self, changes: Sequence[FileChange], ours: dict[str, ChangeEntry]) -> None:
        step = FileStep(self._root, self._files)
        for change in changes:
            now = step.sha256(change.path)
            if change.action not in ("replace", "remove") or now is None:
                continue
            # A step that was cut short left what was there before, or the file.
            if now not in (ours[change.path].before, ours[change.path].after):
                raise UsageError(
                    f"{change.path}: expected what homenode installed, found it edited since",
                    hint="keep your edit elsewhere and remove the file",
                )

    def _installed(self) -> dict[str, ChangeEntry]:
        """Paths of ours, with what was done to each last."""
        return {entry.subject: entry for entry in self._journal.to_undo()}

    def _sweep(self) -> None:
        """Remove what writing left: parts of files, and folders of ours in which nothing is."""
        self._files.sweep()
        entries = self._journal.entries()
        folders = {_at(self._root, entry.part).parent for entry in entries if entry.part}
        with self._files.errors():
            for folder in folders:
                sweep_parts(folder)
            for made in sorted({one for entry in entries for one in entry.made}, reverse=True):
                with contextlib.suppress(OSError):  # gone, or somebody's files are in it
                    _at(self._root, made).rmdir()


class FileStep:
    """A setup file as a step: under its name it is there whole, or not there."""

    def __init__(self, root: Path, files: RecordFolder, file: SetupFile | None = None) -> None:
        """files: whose hints errors have. file: what to put there; none is needed to undo."""
        self._root, self._files, self._file = root, files, file

    def entry(self) -> ChangeEntry:
        """What `do` is about to do."""
        assert self._file is not None, "there is a file to be put there"
        path = self._file.path
        return ChangeEntry(
            what=ChangeState.BEGIN,
            kind=KIND,
            subject=path,
            before=self.sha256(path),
            after=hashlib.sha256(self._file.text.encode()).hexdigest(),
            by_hand=command_line("rm", path),
            facts={"mode": f"{self._file.mode:o}"},
        )

    def do(self, note: Note) -> ChangeEntry:
        entry = self.entry()
        own_folder = entry.subject.rpartition("/")[0]
        with self._files.errors():
            try:
                entry = self._write_by_way_of(_PARTS, entry, note)
            except OSError as error:
                if error.errno not in _NO_PARTS:
                    raise
                entry = self._write_by_way_of(own_folder, entry, note)
        note(entry.now(ChangeState.DONE))
        return entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        with self._files.errors():
            _at(self._root, entry.subject).unlink(missing_ok=True)
        note(entry.now(ChangeState.UNDONE))
        return entry

    def is_done(self, entry: ChangeEntry) -> bool:
        if self.sha256(entry.subject) != entry.after:
            return False
        mode = stat.S_IMODE(_at(self._root, entry.subject).lstat().st_mode)
        return entry.facts.get("mode") in (None, f"{mode:o}")

    def sha256(self, path: str) -> str | None:
        """Of what is there; None where nothing is."""
        try:
            content = read_plain(_at(self._root, path), _MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise of_os(error, path, "a small regular file or none") from None
        return hashlib.sha256(content).hexdigest()

    def _write_by_way_of(self, folder: str, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Raises OSError."""
        assert self._file is not None, "there is a file to be put there"
        path, part = entry.subject, f"{folder}/{part_name()}"
        target = _at(self._root, path)
        check_links(target.parent)
        check_links(_at(self._root, folder))
        made = tuple(sorted({*self._not_there(path), *self._not_there(part)}))
        entry = msgspec.structs.replace(entry, part=part, made=made)
        note(entry)
        target.parent.mkdir(parents=True, exist_ok=True)
        _at(self._root, folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        content, mode = self._file.text.encode(), self._file.mode
        replace_watched_file(target, content, mode, _at(self._root, part))
        return entry

    def _not_there(self, path: str) -> Iterator[str]:
        """Folders above a path that are not there."""
        while (path := path.rpartition("/")[0]) and not _at(self._root, path).exists():
            yield path


def _at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
