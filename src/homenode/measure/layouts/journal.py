"""Journal: what a trial has done and how each of it is undone; written before it is done. [I/O]

A head and then lines, each of which says one thing that is about to happen or has happened. What
state the domain is in follows from the lines alone: a trial that was killed is undone by them.
One folder for each trial: journal.jsonl, .lock, known_hosts, and the plan and document of each
layout. Only their owner may read them: documents hold passwords.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from homenode import formats
from homenode.errors import HostError, InputError
from homenode.hypervisor.domain_state import domain_argument
from homenode.record_folder import JOURNAL, LOCK, RecordFolder

KIND = "trial"


class What(StrEnum):
    """Each "-ing" is on disk before it is done, each other one after."""

    COPYING = "copying"
    COPIED = "copied"
    APPLYING = "applying"
    APPLIED = "applied"
    STARTING = "starting"
    STARTED = "started"
    ANSWERED = "answered"
    MEASURING = "measuring"
    MEASURED = "measured"
    INCOMPLETE = "incomplete"
    MISMATCHED = "mismatched"
    REFUSED = "refused"
    FAILED = "failed"
    SET_ASIDE = "set-aside"
    STOPPING = "stopping"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    RESTORING = "restoring"
    RESTORED = "restored"
    REMOVING = "removing"
    REMOVED = "removed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy that a trial works on. overlays, nvram: files that were made for it."""

    uuid: str
    name: str
    overlays: tuple[str, ...]
    nvram: str | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What a trial is. id: its own name. domain, uuid: what it works on, a copy where `copy` says
    so. source, source_uuid: the domain that the user named. results: folder."""

    id: str
    connect: str
    domain: str
    uuid: str
    source: str
    layouts: tuple[str, ...]
    boots: int
    seed: int
    results: str
    bare: bool = False
    copy: Copy | None = None
    source_uuid: str = ""

    @property
    def argument(self) -> str:
        """What names the user's domain on any command line."""
        return domain_argument(self.source, self.source_uuid or self.uuid)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. at: UTC, ISO 8601. number: of the step, None where it is about all of them.

    undo: what undoes it, for people. run: name of the results. boot: the guest's own identity
    of it. run_id: libvirt's number of the running instance. host_boot: the host's own identity of
    the boot in which that number was given. samples: how many were measured.
    findings: why a guest was not measured, or which tests failed.
    """

    at: str
    what: What
    number: int | None = None
    detail: str = ""
    undo: str | None = None
    run: str | None = None
    boot: str | None = None
    run_id: int | None = None
    host_boot: str | None = None
    samples: int | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """How a trial stands. outcomes: the last entry that says what came of a step, by its number:
    MEASURED, INCOMPLETE (a test failed in every round), MISMATCHED, REFUSED or FAILED.

    applied: the domain may have a layout's definition. running: the step whose guest may be
    running, and what is known of it; host_boot: of the host that it runs in. copied: the copy may
    be there. ended: nothing is left to undo or to do.
    """

    outcomes: dict[int, Entry]
    applied: bool
    running: int | None
    run_id: int | None
    boot: str | None
    host_boot: str | None
    copied: bool
    ended: bool

    @property
    def to_undo(self) -> bool:
        return self.applied or self.running is not None or self.copied

    @property
    def measured(self) -> frozenset[int]:
        return self._that_came_to(What.MEASURED)

    @property
    def with_figures(self) -> frozenset[int]:
        """Steps that left a run, whole or not."""
        return self._that_came_to(What.MEASURED, What.INCOMPLETE)

    def _that_came_to(self, *kinds: What) -> frozenset[int]:
        return frozenset(number for number, one in self.outcomes.items() if one.what in kinds)


_OUTCOMES = (What.MEASURED, What.INCOMPLETE, What.MISMATCHED, What.REFUSED, What.FAILED)


def state_of(entries: Iterable[Entry]) -> State:
    """The state that these lines lead to.

    >>> now = state_of([Entry("", What.APPLYING, 0), Entry("", What.APPLIED, 0)])
    >>> now.applied, now.running, now.to_undo
    (True, None, True)
    """
    outcomes: dict[int, Entry] = {}
    applied = copied = ended = False
    running = run_id = boot = host_boot = None
    for entry in entries:
        what = entry.what
        if what in _OUTCOMES and entry.number is not None:
            outcomes[entry.number] = entry
        if what is What.STARTING:
            running, run_id, boot, host_boot = entry.number, None, None, entry.host_boot
        elif what is What.STARTED:
            run_id = entry.run_id
        elif what is What.ANSWERED:
            boot = entry.boot
        elif what is What.STOPPED:
            running = run_id = boot = host_boot = None
        elif what in (What.APPLYING, What.APPLIED, What.RESTORING):
            applied = True
        elif what is What.RESTORED:
            applied = False
        elif what in (What.COPYING, What.COPIED, What.REMOVING):
            copied = True
        elif what is What.REMOVED:
            copied = False
        ended = what is What.ENDED
    return State(outcomes, applied, running, run_id, boot, host_boot, copied, ended)


def left_of(numbers: Sequence[int], state: State) -> tuple[int, ...]:
    """Steps that are still to be done: what failed or was refused is tried again."""
    return tuple(number for number in numbers if number not in state.measured)


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Known:
    """A trial that is on disk. reason: why it cannot be read; then there is no head."""

    folder: Path
    head: Head | None
    entries: tuple[Entry, ...]
    reason: str | None = None

    @property
    def state(self) -> State:
        return state_of(self.entries)


class JournalFile:
    """One trial's folder. Errors of the file system are HostErrors."""

    __slots__ = ("_files", "folder")

    def __init__(self, root: Path, id: str) -> None:
        if not _ID.match(id):
            raise InputError(f"trial {id!r}: expected letters, digits, dots and dashes")
        self.folder = root / "trials" / id
        self._files = RecordFolder(self.folder)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Only one homenode at work on a trial: a descriptor for programs that must keep the lock
        to their end. Raises HostError where another is, or what one left behind."""
        with _owned(self._files, "this trial") as lock:
            yield lock

    @property
    def is_locked(self) -> bool:
        """Whether a homenode is at work on it now."""
        return self._files.is_locked

    def refuse_begun(self) -> None:
        """Raises HostError where such a trial is there: nothing of it may be written over."""
        if self._files.has_journal:
            raise HostError(
                f"{self._files.journal_path}: expected no trial of this name, found one",
                hint="give another --name, or homenode trial resume it",
            )

    def begin(self, head: Head) -> None:
        """Write the head. Raises HostError where such a trial is there."""
        self.refuse_begun()
        self._files.begin(formats.head_line(KIND, head))

    def add(self, what: What, number: int | None = None, detail: str = "", **more: Any) -> Entry:
        """Write a line; it is on disk when this returns."""
        entry = Entry(_now(), what, number, detail, **more)
        self._files.append(formats.line(entry))
        return entry

    def known(self) -> Known:
        """What is on disk."""
        return _known(self.folder)

    def keep(self, name: str, content: bytes) -> Path:
        """Keep a file next to the journal, whole or not at all."""
        self._files.make()
        return self._files.write(name, content)

    def kept(self, name: str) -> bytes:
        """A file that was kept."""
        content = self._files.read(name)
        if content is None:
            raise HostError(f"{self.folder / name}: expected a file of the trial, found none")
        return content


@contextmanager
def domain_locked(root: Path, uuid: str) -> Iterator[None]:
    """Only one homenode with a trial of this domain, from its look at it on: two that both saw no
    other would boot it in turns. Raises HostError where another is, or InputError for no UUID."""
    if not _ID.match(uuid):
        raise InputError(f"domain: expected a UUID, found {uuid!r}")
    with _owned(RecordFolder(root / "trials"), "a trial of this domain", f".{uuid}.lock"):
        yield


def known_trials(root: Path, domain: str | None = None) -> tuple[Known, ...]:
    """Trials on disk, the oldest first. domain: only those of this domain, or of this id."""
    try:
        folders = [folder for folder in (root / "trials").iterdir() if (folder / JOURNAL).exists()]
    except OSError:
        return ()
    found = [_known(folder) for folder in folders]
    found = [
        one
        for one in found
        if domain is None
        or one.folder.name == domain
        or (one.head is not None and domain in names_of(one.head))
    ]
    return tuple(sorted(found, key=lambda one: (one.folder / JOURNAL).stat().st_mtime))


def names_of(head: Head) -> tuple[str, ...]:
    """What a trial's domain may be called, and the copy of it."""
    return head.source, head.source_uuid, head.domain, head.uuid


def _known(folder: Path) -> Known:
    files = RecordFolder(folder)
    try:
        content = files.journal()
        head, entries = formats.decode_journal(content, KIND, Head, Entry, str(files.journal_path))
    except (InputError, HostError) as error:
        return Known(folder, None, (), error.message)
    return Known(folder, head, entries)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def _owned(files: RecordFolder, what: str, lock: str = LOCK) -> Iterator[int]:
    expected = f"no other homenode at work on {what}, found one"
    hint = "homenode trial status shows how far it is"
    with files.locked(expected, hint, lock=lock) as descriptor:
        yield descriptor
