"""Store: the saved definitions and records of domains, each file whole or not there. [I/O]

One folder for each domain and daemon: record.json, live.json, lock, and every document that
homenode replaced or gave to libvirt as SHA256.xml, which are never deleted. They hold what the
definition holds, VNC passwords included: only their owner may read them, as in /etc/libvirt.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from homenode.apply.record import (
    LiveRecord,
    Record,
    decode_live_record,
    decode_record,
    encode_record,
)
from homenode.durable import open_lock, replace_file, sync_folder
from homenode.errors import HostError, InputError

_FULL = (
    "free some space; nothing is lost: homenode restore --dry-run tells which definition the "
    "domain has"
)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_SUM = re.compile(r"[0-9a-f]{64}\Z")
_UUID = re.compile(r"[0-9a-f-]{36}\Z")


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

    __slots__ = ("_folder",)

    def __init__(self, root: Path, connect: str, uuid: str) -> None:
        if not _UUID.match(uuid):
            raise InputError(f"domain: expected a UUID, found {uuid!r}")
        self._folder = root / "domains" / f"{uuid}@{_daemon(connect)}"

    @property
    def folder(self) -> Path:
        """Where the files lie, for messages."""
        return self._folder

    @contextmanager
    def locked(self) -> Iterator[int]:
        """The lock on the domain, as a descriptor for programs that must keep it to their end.

        Raises HostError where another homenode, or a virsh that one left behind, holds it.
        """
        with _told(self._folder):
            if not self._folder.exists():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(self._folder.parent)
            lock = open_lock(self._folder / "lock")
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HostError(
                    f"{self._folder}: expected no other homenode at work on this domain, found one",
                    hint="wait for it to end, then look with --dry-run",
                ) from None
            yield lock
        finally:
            os.close(lock)

    def record(self) -> Record | None:
        """What was done last to the definition; None where nothing was."""
        content = self._read("record.json")
        return None if content is None else decode_record(content, str(self._path("record.json")))

    def live_record(self) -> LiveRecord | None:
        """What was done last to the running domain; None where nothing was."""
        content = self._read("live.json")
        return (
            None if content is None else decode_live_record(content, str(self._path("live.json")))
        )

    def write_record(self, record: Record) -> None:
        self._write("record.json", encode_record(record))

    def write_live_record(self, record: LiveRecord) -> None:
        self._write("live.json", encode_record(record))

    def drop_live_record(self) -> None:
        with _told(self._folder):
            self._path("live.json").unlink(missing_ok=True)
            sync_folder(self._folder)

    def drop(self) -> None:
        """Remove all of it, as far as it is there. Raises HostError where another is at work."""
        if not self._folder.exists():
            return
        with self.locked(), _told(self._folder):
            # The record first: documents that nothing names any more are nobody's original.
            self._path("record.json").unlink(missing_ok=True)
            shutil.rmtree(self._folder)

    def save(self, document: bytes) -> str:
        """Saves a document; gives its sha256, by which it is found again."""
        name = sha256(document)
        if self._read(f"{name}.xml") != document:
            self._write(f"{name}.xml", document)
        return name

    def document(self, name: str) -> bytes:
        """A saved document. Raises InputError where it is gone or is not what was saved."""
        content = self._read(f"{name}.xml") if _SUM.match(name) else None
        if content is None or sha256(content) != name:
            raise InputError(
                f"{self.document_path(name)}: expected the document with that sha256, found "
                f"{'none' if content is None else sha256(content)}",
                hint="take the definition from a backup; nothing was changed",
            )
        return content

    def document_path(self, name: str) -> Path:
        """Where a saved document lies."""
        return self._path(f"{name}.xml").absolute()

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _read(self, name: str) -> bytes | None:
        with _told(self._folder):
            try:
                return self._path(name).read_bytes()
            except FileNotFoundError:
                return None

    def _write(self, name: str, content: bytes) -> None:
        with _told(self._folder):
            replace_file(self._path(name), content)


def other_daemons(root: Path, connect: str, uuid: str) -> tuple[str, ...]:
    """Connections under which a record of the same domain lies, this one left out."""
    here = DomainStore(root, connect, uuid).folder
    found = []
    with _told(root):
        for record in sorted((root / "domains").glob(f"{uuid}@*/record.json")):
            if record.parent != here:
                found.append(decode_record(record.read_bytes(), str(record)).connect)
    return tuple(found)


def saved_originals(root: Path, connect: str, domain: str) -> tuple[Path, ...]:
    """Originals of domains of that name or UUID, whether libvirt knows them still or not."""
    found = []
    with _told(root):
        for path in sorted((root / "domains").glob(f"*@{_daemon(connect)}/record.json")):
            try:
                record = decode_record(path.read_bytes(), str(path))
            except InputError:
                continue  # of another domain, or there is nothing that it could say
            if domain in (record.name, record.uuid):
                found.append(DomainStore(root, connect, record.uuid).document_path(record.original))
    return tuple(found)


def sha256(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def _daemon(connect: str) -> str:
    return hashlib.sha256(connect.encode()).hexdigest()[:8]


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostError(
            f"{error.filename or folder}: expected to keep records there, found: {error.strerror}",
            hint=_hint(error.errno),
        ) from None


def _hint(number: int | None) -> str | None:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _FULL
    if number not in _NOT_WRITABLE:
        return None
    if os.geteuid() == 0:
        return f"make {default_root()} a folder on a file system that can be written and stays"
    return "as root, or with XDG_STATE_HOME naming a folder that this user may write to"
