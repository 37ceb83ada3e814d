"""Store: the saved definitions and the journal of each domain, each file whole or not there. [I/O]

One folder for each domain and daemon: journal.jsonl, .lock, and every document that homenode
replaced or gave to libvirt as SHA256.xml, which are never deleted. They hold what the definition
holds, VNC passwords included: only their owner may read them, as in /etc/libvirt. Folders of
homenode.apply/1 hold record.json and live.json instead: they are read, and the next change writes
what they say into a journal.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from homenode import formats
from homenode.errors import InputError
from homenode.hypervisor.domain_state import LivePin
from homenode.record_folder import JOURNAL, RecordFolder

_FULL = (
    "free some space; nothing is lost: homenode restore --dry-run shows which definition the "
    "domain has"
)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_SUM = re.compile(r"[0-9a-f]{64}\Z")
_UUID = re.compile(r"[0-9a-f-]{36}\Z")
_OLD_RECORD, _OLD_LIVE = "record.json", "live.json"
"""Of homenode.apply/1."""


KIND = "apply"


class Step(StrEnum):
    """How far it is. Each "-ing" is written before libvirt is asked, each "-ed" after."""

    APPLYING = "applying"
    APPLIED = "applied"
    RESTORING = "restoring"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Record:
    """One domain of one libvirt daemon. original, tuned, applied: sha256 of saved documents.

    original: as libvirt printed it before the first change. tuned: what libvirt was given last.
    applied: what libvirt printed after it; while a step is not done, what it printed before it.
    None in records of earlier versions, until it was read back.
    """

    connect: str
    name: str
    uuid: str
    step: Step
    original: str
    tuned: str
    applied: str | None


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """Pins of a running domain. before, after: of the threads changed.

    run_id: libvirt's number of that run. run_mark: see live_pins; None for a domain elsewhere.
    """

    connect: str
    name: str
    uuid: str
    run_id: int
    before: tuple[LivePin, ...]
    after: tuple[LivePin, ...]
    run_mark: str | None = None

    def is_of(self, run_id: int | None, mark: str | None) -> bool:
        """Whether that run is the one whose pins these are."""
        return self.run_id == run_id and (None in (self.run_mark, mark) or self.run_mark == mark)


@dataclass(frozen=True, slots=True)
class ApplyHead:
    """Of which domain and daemon a journal is."""

    connect: str
    uuid: str


@dataclass(frozen=True, slots=True)
class ApplyEntry:
    """One line of the journal: the definition's record, or that of the running domain's pins.

    live_ended: the pins are as they were, or their run is over.
    """

    record: Record | None = None
    live: LiveRecord | None = None
    live_ended: bool = False


def default_root() -> Path:
    """/var/lib/homenode for root; for another user a folder below XDG_STATE_HOME."""
    if os.geteuid() == 0:
        return Path("/var/lib/homenode")
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return folder / "homenode"


class DomainStore:
    """What is saved of one domain of one daemon. Errors of the file system are HostErrors.

    Every change needs the lock: see `locked`.
    """

    __slots__ = ("_files", "_head")

    def __init__(self, root: Path, connect: str, uuid: str) -> None:
        if not _UUID.match(uuid):
            raise InputError(f"domain: expected a UUID, found {uuid!r}")
        self._files = _files(root / "domains" / f"{uuid}@{_daemon(connect)}")
        self._head = ApplyHead(connect, uuid)

    @property
    def folder(self) -> Path:
        """Where the files lie, for messages."""
        return self._files.path

    @contextmanager
    def locked(self) -> Iterator[int]:
        """The lock on the domain, as a descriptor for programs that must keep it to their end.

        Raises HostError where another homenode, or a virsh that one left behind, holds it.
        """
        expected = "no other homenode at work on this domain, found one"
        hint = "wait for it to end, then look with --dry-run"
        with self._files.locked(expected, hint) as lock:
            yield lock

    def record(self) -> Record | None:
        """What was done last to the definition; None where nothing was."""
        return _record(_entries(self._files))

    def live_record(self) -> LiveRecord | None:
        """What was done last to the running domain; None where nothing was."""
        live = None
        for entry in _entries(self._files):
            live = None if entry.live_ended else entry.live or live
        return live

    def write_record(self, record: Record) -> None:
        self._append(ApplyEntry(record=record))

    def write_live_record(self, record: LiveRecord) -> None:
        self._append(ApplyEntry(live=record))

    def drop_live_record(self) -> None:
        self._append(ApplyEntry(live_ended=True))

    def drop(self) -> None:
        """Remove all of it, as far as it is there. Raises HostError where another is at work."""
        if not self.folder.exists():
            return
        with self.locked(), self._files.errors():
            # The journal first: documents that nothing names any more are no one's original.
            for name in (JOURNAL, _OLD_RECORD):
                (self.folder / name).unlink(missing_ok=True)
            shutil.rmtree(self.folder)

    def save(self, document: bytes) -> str:
        """Saves a document; gives its sha256, by which it is found again."""
        name = sha256(document)
        if self._files.read(f"{name}.xml") != document:
            self._files.write(f"{name}.xml", document)
        return name

    def document(self, name: str) -> bytes:
        """A saved document. Raises InputError where it is gone or is not what was saved."""
        content = self._files.read(f"{name}.xml") if _SUM.match(name) else None
        if content is None or sha256(content) != name:
            raise InputError(
                f"{self.document_path(name)}: expected the document with that sha256, found "
                f"{'none' if content is None else sha256(content)}",
                hint="take the definition from a backup; nothing was changed",
            )
        return content

    def document_path(self, name: str) -> Path:
        """Where a saved document lies."""
        return (self.folder / f"{name}.xml").absolute()

    def _append(self, entry: ApplyEntry) -> None:
        if self._files.has_journal:
            self._files.append(formats.line(entry))
            return
        lines = [formats.line(one) for one in (*_entries(self._files), entry)]
        self._files.begin(formats.head_line(KIND, self._head) + "".join(lines))


def other_daemons(root: Path, connect: str, uuid: str) -> tuple[str, ...]:
    """Connections under which a record of the same domain lies, this one left out."""
    here = DomainStore(root, connect, uuid).folder
    found = []
    for folder in _folders(root, f"{uuid}@*"):
        record = None if folder == here else _record(_entries(_files(folder)))
        if record is not None:
            found.append(record.connect)
    return tuple(found)


def saved_originals(root: Path, connect: str, domain: str) -> tuple[Path, ...]:
    """Originals of domains of that name or UUID, whether libvirt knows them still or not."""
    found = []
    for folder in _folders(root, f"*@{_daemon(connect)}"):
        try:
            record = _record(_entries(_files(folder)))
        except InputError:
            continue  # of another domain, or there is nothing that it could say
        if record is not None and domain in (record.name, record.uuid):
            found.append(DomainStore(root, connect, record.uuid).document_path(record.original))
    return tuple(found)


def sha256(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def _files(folder: Path) -> RecordFolder:
    return RecordFolder(folder, hint=state_hint)


def _folders(root: Path, pattern: str) -> tuple[Path, ...]:
    with _files(root).errors():
        return tuple(sorted(path for path in (root / "domains").glob(pattern) if path.is_dir()))


def _entries(files: RecordFolder) -> tuple[ApplyEntry, ...]:
    """What the journal says, or the files that version 1 kept instead. Raises InputError."""
    try:
        if files.has_journal:
            source = str(files.journal_path)
            return formats.decode_journal(files.journal(), KIND, ApplyHead, ApplyEntry, source)[1]
        found = []
        if (old := files.read(_OLD_RECORD)) is not None:
            source = str(files.path / _OLD_RECORD)
            found.append(ApplyEntry(record=formats.decode(old, KIND, Record, source)))
        if (old := files.read(_OLD_LIVE)) is not None:
            source = str(files.path / _OLD_LIVE)
            found.append(ApplyEntry(live=formats.decode(old, KIND, LiveRecord, source)))
        return tuple(found)
    except InputError as error:
        raise InputError(
            error.message,
            hint="the documents next to it are whole: virsh define the right one, then move the "
            "folder away",
        ) from None


def _record(entries: tuple[ApplyEntry, ...]) -> Record | None:
    return next((one.record for one in reversed(entries) if one.record is not None), None)


def _daemon(connect: str) -> str:
    return hashlib.sha256(connect.encode()).hexdigest()[:8]


def state_hint(number: int | None) -> str | None:
    """What to do where a record cannot be written, by its errno."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _FULL
    if number not in _NOT_WRITABLE:
        return None
    if os.geteuid() == 0:
        return f"make {default_root()} a folder on a file system that can be written and stays"
    return "as root, or with XDG_STATE_HOME naming a folder that this user may write to"
