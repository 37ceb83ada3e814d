"""Journal: the steps of one owner in one record directory, as lines; do, resume, undo. [I/O]

    journal.jsonl   a head, then a line before each act and one after it
    SHA256.xml      documents that the lines name

Root's records are in /var/lib/homenode, another user's below XDG_STATE_HOME. Decision 0018
describes the state after a kill. There are two host locks: a file next to the records, which names
the holder, and on this machine libvirt's own directory, which its users can lock.

Each domain of a daemon has a store: its journal, and every definition that homenode replaced or
passed to libvirt, which is never deleted. These files contain VNC passwords if the definition does:
only their owner may read them, as in /etc/libvirt. A step "define" leads from the original (before)
to what libvirt was given last (after); its facts are the domain's `name` and what libvirt had of it
then (`found`): before an act what was replaced, after it what it printed. A step "pin-threads"
holds the pins of a run's threads; its facts are `name`, `run_id` and `run_mark`.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from homenode import formats
from homenode.errors import HomenodeError, HostError, InputError, of_os
from homenode.safe.durable import open_to_lock
from homenode.safe.input_files import read_kernel_file
from homenode.safe.record_directory import JOURNAL, BusyError, RecordDirectory, take_lock
from homenode.text import command_line
from homenode.vm.hypervisor.connection import add_connection, domain_argument, find_machine


class ChangeState(StrEnum):
    """The state of a step. BEGIN and UNDOING are on disk before the act."""

    BEGIN = "begin"
    DONE = "done"
    UNDOING = "undoing"
    UNDONE = "undone"
    REJECTED = "rejected"  # rejected by the host: its state is unchanged
    KEPT = "kept"  # edited since by the user, so not restored


UNSETTLED = frozenset({ChangeState.BEGIN, ChangeState.UNDOING})
"""The act may have happened or not: the host says which."""

TO_UNDO = UNSETTLED | {ChangeState.DONE}


class ChangeHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first line of a journal."""

    run: str  # its name, unique among those of its owner
    command: str  # what homenode was asked to do
    undo: str  # the command that undoes it
    connect: str = ""  # the libvirt daemon that is changed; "" = the host itself


class ChangeEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a journal. The last line of a step suffices for another process to undo it."""

    what: ChangeState
    kind: str  # which step
    subject: str  # the changed object: a domain's UUID, a path, a port
    # of the changed object: the sha256 of a kept document, or a value; None = none existed
    before: str | None = None
    after: str | None = None
    made: tuple[str, ...] = ()  # directories and files that a killed act leaves
    by_hand: str = ""  # the command that undoes it without homenode, for who reads the journal
    facts: dict[str, str] = {}  # what else its kind needs

    @property
    def step(self) -> tuple[str, str]:
        return self.kind, self.subject

    def with_state(self, state: ChangeState) -> "ChangeEntry":
        """Return the step with a new state."""
        return msgspec.structs.replace(self, what=state)


Note = Callable[[ChangeEntry], None]
"""Has a line on the disk when it returns."""


class ChangeStep(Protocol):
    """A change of one subject. All methods raise HomenodeError."""

    def do(self, note: Note) -> ChangeEntry:
        """Make the change; `note` is called with the entry before the change, and with its outcome
        if that is known. Returns the last of these."""

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Undo the change of an entry; as `do`."""

    def is_done(self, entry: ChangeEntry) -> bool:
        """Whether the host is in the state after the entry; reads the host, never a journal."""


def find_last_lines(entries: Iterable[ChangeEntry]) -> dict[tuple[str, str], ChangeEntry]:
    """Return the last line of each step, in the order of their start.

    >>> lines = [ChangeEntry(what=ChangeState.BEGIN, kind="file", subject="/a")]
    >>> find_last_lines([*lines, lines[0].with_state(ChangeState.DONE)])["file", "/a"].what
    <ChangeState.DONE: 'done'>
    """
    last_entries: dict[tuple[str, str], ChangeEntry] = {}
    for entry in entries:
        before = last_entries.get(entry.step)
        if before is not None and before.what not in TO_UNDO:
            del last_entries[
                entry.step
            ]  # a step that begins again is ordered after the steps begun since
        last_entries[entry.step] = entry
    return last_entries


def to_undo(entries: Iterable[ChangeEntry]) -> tuple[ChangeEntry, ...]:
    """Return the steps that did something, or may have, in the order in which they were begun."""
    return tuple(entry for entry in find_last_lines(entries).values() if entry.what in TO_UNDO)


KIND = "change"

_FULL = "free some space; no data is lost: homenode restore --list shows the changes to undo"
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


def default_root() -> Path:
    """/var/lib/homenode for root; for another user a directory below XDG_STATE_HOME."""
    if os.geteuid() == 0:
        return Path("/var/lib/homenode")
    state = os.environ.get("XDG_STATE_HOME", "")
    directory = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return directory / "homenode"


def state_hint(number: int | None) -> str | None:
    """Return the hint for a record that cannot be written, by its errno."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _FULL
    if number not in _NOT_WRITABLE:
        return None
    if os.geteuid() == 0:
        return f"make {default_root()} a directory on a file system that can be written and stays"
    return "as root, or with XDG_STATE_HOME naming a directory that this user may write to"


class Journal:
    """A directory's steps. Errors of the file system are HostErrors. Writers hold the host's lock.
    head: of a journal that does not exist yet."""

    __slots__ = ("files", "head")

    def __init__(self, files: RecordDirectory, head: ChangeHead) -> None:
        self.files = files
        self.head = head

    def stored_head(self) -> ChangeHead:
        """Return the journal's head, or the head that it would get."""
        first = self._first_line()
        if formats.find_kind(first) != KIND:
            return self.head
        return formats.decode_head(first, KIND, ChangeHead, str(self.files.journal_path))

    def read_entries(self) -> tuple[ChangeEntry, ...]:
        """Return all lines. Raises InputError."""
        if not self._first_line():
            return ()
        source, content = str(self.files.journal_path), self.files.read_journal()
        return formats.decode_journal(content, KIND, ChangeHead, ChangeEntry, source)[1]

    def find_last(self, kind: str, subject: str) -> ChangeEntry | None:
        """Return the last line of a step; None if nothing was ever done."""
        return find_last_lines(self.read_entries()).get((kind, subject))

    def to_undo(self) -> tuple[ChangeEntry, ...]:
        """The steps that changed or may have changed the host, in the order of their start."""
        return to_undo(self.read_entries())

    def write(self, *entries: ChangeEntry) -> None:
        """Write lines and sync them to disk."""
        text = "".join(map(formats.line, entries))
        if formats.find_kind(self._first_line()) == KIND:
            self.files.append(text)
            return
        self.read_entries()  # rejects an invalid journal
        self.files.make()
        head = formats.read_head_line(KIND, self.head)
        self.files.write(self.files.journal_path.name, f"{head}{text}".encode())

    def settle(self, make_step: Callable[[ChangeEntry], ChangeStep]) -> tuple[ChangeEntry, ...]:
        """Determine from the host which interrupted steps happened, and record these; the others
        remain to be done or undone."""
        unsettled_entries = []
        for entry in self.to_undo():
            if entry.what is ChangeState.BEGIN and make_step(entry).is_done(entry):
                self.write(entry.with_state(ChangeState.DONE))
            elif entry.what in UNSETTLED:
                unsettled_entries.append(entry)
        return tuple(unsettled_entries)

    def undo(self, step_of: Callable[[ChangeEntry], ChangeStep]) -> tuple[ChangeEntry, ...]:
        """Undo the steps in reverse order, and return the outcome of each."""
        return tuple(step_of(entry).undo(entry, self.write) for entry in reversed(self.to_undo()))

    def _first_line(self) -> bytes:
        return self.files.read_journal().partition(b"\n")[0]


class OpenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step that changed or may have changed the host."""

    command: str
    kind: str
    subject: str  # the changed object
    is_cut_short: bool  # a kill left it half done, or it is being done
    undo: str  # homenode's command


def open_changes(journals: Iterable[Journal]) -> Iterator[OpenChange | HomenodeError]:
    """Yield the open steps of each journal, oldest first, or the error of an unreadable journal."""
    for journal in journals:
        try:
            head, entries = journal.stored_head(), journal.to_undo()
        except HomenodeError as error:
            yield error
            continue
        for entry in entries:
            name, undo = entry.facts.get("name", entry.subject), head.undo
            if head.run == entry.subject:  # a domain's UUID
                undo = undo.replace(head.run, domain_argument(name, head.run))
            yield OpenChange(
                command=head.command,
                kind=entry.kind,
                subject=name,
                is_cut_short=entry.what in UNSETTLED,
                undo=undo,
            )


WAIT_S = 300.0
"""A start that takes huge pages for a terabyte holds it for minutes."""

SHARED = Path("/run/libvirt")
"""libvirtd and virtqemud make it at every start; all users may read it, and so lock it."""

_LOCKS = "/proc/locks"
_SOMEBODY = "another homenode"

_descriptors_of: dict[tuple[int, str], tuple[int, ...]] = {}
"""By process and name: who holds it need not be given it again."""


@contextmanager
def lock_host(
    root: Path,
    connect: str,
    command: str,
    on_wait: Callable[[str], None] = lambda holder: None,
    *,
    wait_s: float | None = None,
) -> Iterator[tuple[int, ...]]:
    """Lock a connection's host, from reading its state to the end of a change: two plans of the
    same state take the same cores. Yields descriptors with which a virsh keeps the lock to its end.

    Nested calls in one process share it. root: of the records. command: shown to those that wait.
    on_wait: called once, with the holder. wait_s: None = WAIT_S. Raises HostError on time-out.
    """
    machine = find_machine(connect)
    key = os.getpid(), _name(machine)
    if key in _descriptors_of:
        yield _descriptors_of[key]
        return
    longest_s = WAIT_S if wait_s is None else wait_s
    with ExitStack() as stack:
        descriptors = [stack.enter_context(_lock_record(root, key[1], command, on_wait, longest_s))]
        if lock_of_one_user(connect) is None:
            descriptors.append(stack.enter_context(_lock_directory(on_wait, longest_s)))
        _descriptors_of[key] = tuple(descriptors)
        stack.callback(_descriptors_of.pop, key)
        yield _descriptors_of[key]


def lock_of_one_user(connect: str) -> str | None:
    """Return why other users' commands do not wait for this one; None if they do."""
    machine = find_machine(connect)
    if machine:
        return f"the lock of {machine} keeps apart only this user's homenodes on this machine"
    if not os.access(SHARED, os.R_OK | os.X_OK):
        return f"{SHARED} is not there or cannot be read: only this user's homenodes wait"
    return None


@contextmanager
def _lock_record(
    root: Path, name: str, command: str, on_wait: Callable[[str], None], longest_s: float
) -> Iterator[int]:
    files = RecordDirectory(root / "domains", hint=state_hint)

    def read_holder() -> str:
        return (files.read(name) or _SOMEBODY.encode()).decode("utf-8", "replace")[:400]

    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(
                files.hold_lock(
                    "in use by another homenode",
                    lock=name,
                    wait_s=longest_s,
                    on_wait=lambda: on_wait(read_holder()),
                    holder=f"process {os.getpid()} ({command})",
                )
            )
        except BusyError:
            raise _make_busy_error(root, read_holder(), longest_s) from None
        yield descriptor


@contextmanager
def _lock_directory(on_wait: Callable[[str], None], longest_s: float) -> Iterator[int]:
    try:
        descriptor = open_to_lock(SHARED)
    except OSError as error:
        raise of_os(error, str(SHARED), "the directory") from None
    try:
        if not take_lock(descriptor, longest_s, lambda: on_wait(_find_holder())):
            raise _make_busy_error(SHARED, _find_holder(), longest_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _find_holder() -> str:
    """Return the process that has locked the shared directory, and its user."""
    inode = str(SHARED.stat().st_ino)
    for line in (read_kernel_file(_LOCKS) or b"").decode().splitlines():
        fields = line.split()  # 1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
            with suppress(OSError):  # it has ended, or another namespace has its number
                return f"process {fields[4]} of user {Path('/proc', fields[4]).stat().st_uid}"
    return _SOMEBODY


def _make_busy_error(path: Path, holder: str, longest_s: float) -> HostError:
    return HostError(
        f"{path}: this host is being changed by {holder} or its virsh, for {longest_s:g} s",
        hint="wait until it ends, or answer its prompt; then run this command again",
    )


def _name(machine: str) -> str:
    if not machine:
        return ".host.lock"
    return f".host-{hashlib.sha256(machine.encode()).hexdigest()[:8]}.lock"


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
