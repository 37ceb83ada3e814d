"""Store: the saved definitions and the journal of each domain, in atomic files. [I/O]

One directory for each domain and daemon: journal.jsonl, and every definition that homenode replaced
or passed to libvirt as SHA256.xml, which is never deleted. These files contain VNC passwords if the
definition does: only their owner may read them, as in /etc/libvirt.

A step "define" leads from the original (before) to what libvirt was given last (after); its facts
are the domain's `name` and what libvirt had of it then (`found`): before an act what was replaced,
after it what it printed. A step "pin-threads" holds the pins of a run's threads; its facts are
`name`, `run_id` and `run_mark`.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from homenode.change.journal import ChangeEntry, ChangeHead, Journal, state_hint
from homenode.errors import InputError
from homenode.safe.record_directory import JOURNAL, RecordDirectory
from homenode.text import command_line
from homenode.vm.hypervisor.connection import add_connection

DOMAINS = "domains"
"""The directory of what `apply` keeps."""

DEFINE, PIN = "define", "pin-threads"
"""Kinds of steps."""

_SUM = re.compile(r"[0-9a-f]{64}\Z")
_UUID = re.compile(r"[0-9a-f-]{36}\Z")
_DAMAGED = (
    "its definitions are complete: virsh define the correct file, then move the directory away"
)


class DomainStore:
    """The saved definitions and the journal of one domain of one daemon. Writers hold the host's
    lock. Errors of the file system are HostErrors."""

    __slots__ = ("_files", "_uuid", "journal")

    def __init__(self, root: Path, connect: str, uuid: str) -> None:
        if not _UUID.match(uuid):
            raise InputError(f"domain: expected a UUID, found {uuid!r}")
        self._files = _open_records(root / DOMAINS / f"{uuid}@{_name_daemon(connect)}")
        self._uuid = uuid
        undo = command_line(*add_connection(connect, "homenode", "restore", uuid))
        head = ChangeHead(run=uuid, command="homenode apply", undo=undo, connect=connect)
        self.journal = Journal(self._files, head)

    @property
    def directory(self) -> Path:
        return self._files.path

    def definition(self) -> ChangeEntry | None:
        return self._last_entry(DEFINE)

    def pins(self) -> ChangeEntry | None:
        """Return the last entry of the pins of the running domain, or None."""
        return self._last_entry(PIN)

    def written_at(self) -> datetime:
        """When the record was last written, in local time."""
        return datetime.fromtimestamp((self.directory / JOURNAL).stat().st_mtime)

    def sweep(self) -> None:
        """Remove partial files of a killed homenode."""
        self._files.sweep()

    def drop(self) -> None:
        """Remove all files of the domain that exist."""
        if not self.directory.exists():
            return
        with self._files.convert_errors():
            # The journal first: documents that no entry names are not originals.
            (self.directory / JOURNAL).unlink(missing_ok=True)
            shutil.rmtree(self.directory)

    def save(self, document: bytes) -> str:
        """Save a definition and return its sha256, which identifies it."""
        name = compute_sha256(document)
        if self._files.read(f"{name}.xml") != document:
            self._files.make()
            self._files.write(f"{name}.xml", document)
        return name

    def read_document(self, name: str | None) -> bytes:
        """Return a saved document. Raises InputError if it is gone or is not what was saved."""
        name = name or ""
        content = self._files.read(f"{name}.xml") if _SUM.match(name) else None
        if content is None or compute_sha256(content) != name:
            raise InputError(
                f"{self.definition_path(name)}: expected the definition with that sha256, found "
                f"{'none' if content is None else compute_sha256(content)}",
                hint="restore the definition from a backup; nothing was changed",
            )
        return content

    def definition_path(self, name: str | None) -> Path:
        return (self.directory / f"{name}.xml").absolute()

    def _last_entry(self, kind: str) -> ChangeEntry | None:
        try:
            return self.journal.find_last(kind, self._uuid)
        except InputError as error:
            raise InputError(error.message, hint=_DAMAGED) from None


def list_connections(root: Path, uuid: str) -> tuple[str, ...]:
    """Return the connections that have a record of a domain's definition."""
    return tuple(
        journal.stored_head().connect
        for journal in journals_of_domains(root, f"{uuid}@*")
        if journal.find_last(DEFINE, uuid) is not None
    )


def list_saved_originals(root: Path, connect: str, domain: str) -> tuple[Path, ...]:
    """Return the originals of domains of that name or UUID, even if libvirt no longer has them."""
    paths = []
    for journal in journals_of_domains(root, f"*@{_name_daemon(connect)}"):
        uuid = journal.head.run
        try:
            entry = journal.find_last(DEFINE, uuid)
        except InputError:
            continue  # of another domain, or of no domain
        if entry is not None and domain in (entry.facts.get("name"), uuid):
            paths.append(DomainStore(root, connect, uuid).definition_path(entry.before))
    return tuple(paths)


def journals_of_domains(root: Path, pattern: str = "*@*") -> Iterator[Journal]:
    with _open_records(root).convert_errors():
        directories = sorted(path for path in (root / DOMAINS).glob(pattern) if path.is_dir())
    for path in directories:
        run = path.name.partition("@")[0]
        undo = command_line("homenode", "restore", run)
        head = ChangeHead(run=run, command="homenode apply", undo=undo)
        yield Journal(_open_records(path), head)


def compute_sha256(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def _open_records(directory: Path) -> RecordDirectory:
    return RecordDirectory(directory, hint=state_hint)


def _name_daemon(connect: str) -> str:
    return hashlib.sha256(connect.encode()).hexdigest()[:8]
