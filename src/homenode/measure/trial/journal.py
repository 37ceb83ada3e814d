"""Journal: the outcome of each boot of a trial, and the steps that restore its domain. [I/O]

Each trial has a directory: journal.jsonl (a head, then the outcome of each boot), changes.jsonl
(the steps of a boot, see boot_steps), .lock, known_hosts, and the plan and definition of each
layout. Only the owner may read them: definitions can hold passwords.

TrialConfig, the tests of a trial and their order, is stored with it for resuming. Every layout is
booted once a round, in a seeded order.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.change.journal import ChangeEntry, ChangeHead, Journal
from homenode.cpuset import CpuSet
from homenode.errors import HostError, InputError
from homenode.measure.experiment import ExperimentJournal, ScheduledTask, TaskState, schedule
from homenode.measure.model import AppCommand, BenchOptions, SuiteOptions
from homenode.measure.results.model import UNKNOWN_SWITCHES, Condition, Switches
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective
from homenode.safe.record_directory import JOURNAL, LOCK, RecordDirectory
from homenode.text import command_line
from homenode.units import parse_whole
from homenode.vm.domain.copy import WritableDisk
from homenode.vm.hypervisor.connection import ANSWER_S, STOP_S, GuestAccess, domain_argument
from homenode.vm.layout import PRESETS
from homenode.vm.plan import Plan

KIND = "trial"
CHANGES = "changes.jsonl"
COPY, LAYOUT, BOOT = "copy", "layout", "boot"
"""Kinds of steps: the copy made, a layout defined, a guest started."""


class EntryKind(StrEnum):
    """The kind of a line. The last line with a boot's state counts."""

    MEASURING = "measuring"
    MEASURED = "measured"
    INCOMPLETE = "incomplete"
    MISMATCHED = "mismatched"
    REJECTED = "rejected"
    FAILED = "failed"
    AGAIN = "again"
    SET_ASIDE = "set-aside"
    INTERRUPTED = "interrupted"
    ENDED = "ended"
    MORE_BOOTS = "more-boots"


STATES = {
    EntryKind.MEASURED: TaskState.DONE,
    EntryKind.INCOMPLETE: TaskState.INCOMPLETE,
    EntryKind.MISMATCHED: TaskState.MISMATCHED,
    EntryKind.REJECTED: TaskState.REJECTED,
    EntryKind.FAILED: TaskState.FAILED,
    EntryKind.AGAIN: TaskState.WAITING,
}


class TrialCopy(Struct, frozen=True):
    uuid: str
    name: str
    overlays: tuple[str, ...]  # files created for it
    nvram: str | None = None  # a file created for it


class TrialHead(Struct, frozen=True, omit_defaults=True):
    id: str  # its own name
    connect: str
    domain: str  # what it works on, a copy if `copy` is set
    uuid: str  # what it works on, a copy if `copy` is set
    source: str  # the domain that the user named
    layouts: tuple[str, ...]
    boots: int
    seed: int
    results: str  # directory
    bare: bool = False
    copy: TrialCopy | None = None
    source_uuid: str = ""  # the domain that the user named
    objective: Objective = Objective.MEMORY_BANDWIDTH  # what to choose a layout for

    @property
    def argument(self) -> str:
        """The name of the user's domain for command lines."""
        return domain_argument(self.source, self.source_uuid or self.uuid)


class TrialEntry(Struct, frozen=True, omit_defaults=True):
    at: str  # UTC, ISO 8601
    what: str
    number: int | None = None  # number of the boot; None for all boots
    detail: str = ""
    run: str | None = None  # name of the results
    samples: int | None = None  # number of samples measured
    findings: tuple[str, ...] = ()  # why a guest was not measured, or which tests failed
    boots: int | None = None  # number of boots of each layout from now on


class TrialState(Struct, frozen=True):
    outcomes: dict[int, TrialEntry]  # the outcome of each boot, by its number
    # steps to undo, in the order in which they began
    changes: tuple[ChangeEntry, ...]
    ended: bool  # nothing is left to do or to undo
    boots: int | None = None  # boots of each layout, if more were added; else None

    @property
    def to_undo(self) -> bool:
        return bool(self.changes)

    def change(self, kind: str) -> ChangeEntry | None:
        """Return the step of this kind that is still to be undone."""
        return next((entry for entry in self.changes if entry.kind == kind), None)

    @property
    def running(self) -> int | None:
        """The number of the boot whose guest may be running."""
        entry = self.change(BOOT)
        return None if entry is None else parse_whole(entry.facts.get("number"))

    @property
    def measured_boots(self) -> frozenset[int]:
        return self._that_came_to(EntryKind.MEASURED)

    @property
    def with_figures(self) -> frozenset[int]:
        """Boots that left results, complete or not."""
        return self._that_came_to(EntryKind.MEASURED, EntryKind.INCOMPLETE)

    def _that_came_to(self, *kinds: EntryKind) -> frozenset[int]:
        return frozenset(number for number, entry in self.outcomes.items() if entry.what in kinds)


def summarize_entries(
    entries: Iterable[TrialEntry], changes: Iterable[ChangeEntry] = ()
) -> TrialState:
    """Return the state after these lines. changes: the steps to undo.

    >>> whats = ((EntryKind.FAILED, 0), (EntryKind.AGAIN, 0), (EntryKind.MEASURED, 1))
    >>> lines = [TrialEntry("", what, number) for what, number in whats]
    >>> summarize_entries(lines).outcomes.keys()
    dict_keys([1])
    """
    outcomes: dict[int, TrialEntry] = {}
    boots: int | None = None
    ended = False
    for entry in entries:
        boots = entry.boots or boots
        if entry.number is not None and entry.what in STATES:
            outcomes[entry.number] = entry
            if entry.what == EntryKind.AGAIN:
                del outcomes[entry.number]
        ended = entry.what == EntryKind.ENDED
    return TrialState(outcomes, tuple(changes), ended, boots)


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\Z", re.ASCII)


class StoredTrial(Struct, frozen=True):
    directory: Path
    head: TrialHead | None
    entries: tuple[TrialEntry, ...]
    changes: tuple[ChangeEntry, ...] = ()
    reason: str | None = None  # why it cannot be read; then it has no head

    @property
    def state(self) -> TrialState:
        return summarize_entries(self.entries, self.changes)


class TrialJournal(ExperimentJournal[TrialHead, TrialEntry]):
    """A trial's directory. Errors of the file system are HostErrors."""

    __slots__ = ("changes",)

    def __init__(self, root: Path, id: str) -> None:
        if not _ID.match(id):
            raise InputError(f"trial {id!r}: expected letters, digits, dots and dashes")
        path = root / "trials" / id
        super().__init__(path, KIND, TrialHead, TrialEntry)
        head = ChangeHead(
            run=id, command="homenode trial", undo=command_line("homenode", "trial", "undo", id)
        )
        files = RecordDirectory(path, journal=CHANGES)
        self.changes = Journal(files, head)

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Lock the trial; yield a descriptor for programs that must hold the lock until they end.
        Raises HostError if another homenode, or a program that it started, holds the lock."""
        with _own_directory(self, "this trial") as lock:
            yield lock

    def note(
        self, kind: EntryKind, number: int | None = None, detail: str = "", **fields: Any
    ) -> None:
        """Write a line to disk and sync it. fields: further fields of TrialEntry."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.add(TrialEntry(at=at, what=kind, number=number, detail=detail, **fields))

    def load(self) -> StoredTrial:
        try:
            head, entries = self.contents()
            changes = self.changes.to_undo()
        except (InputError, HostError) as error:
            return StoredTrial(self.path, None, (), reason=error.message)
        return StoredTrial(self.path, head, entries, changes)

    def read_kept(self, name: str) -> bytes:
        """Read a file of the trial."""
        content = self.read(name)
        if content is None:
            raise HostError(f"{self.path / name}: no such file")
        return content


@contextmanager
def domain_locked(root: Path, uuid: str) -> Iterator[None]:
    """Lock the domain before its state is read: else two trials of it could start and boot it in
    turns. Raises HostError if it is locked, InputError for an invalid UUID."""
    if not _ID.match(uuid):
        raise InputError(f"domain: expected a UUID, found {uuid!r}")
    with _own_directory(
        RecordDirectory(root / "trials"), "a trial of this domain", f".{uuid}.lock"
    ):
        yield


def list_trials(root: Path, domain: str | None = None) -> tuple[StoredTrial, ...]:
    """Trials on disk, the oldest first. domain: only trials of this domain, or with this id."""
    try:
        directories = [
            directory for directory in (root / "trials").iterdir() if (directory / JOURNAL).exists()
        ]
    except OSError:
        return ()
    trials = [TrialJournal(root, directory.name).load() for directory in directories]
    trials = [
        trial
        for trial in trials
        if domain is None
        or trial.directory.name == domain
        or (trial.head is not None and domain in list_names(trial.head))
    ]
    return tuple(sorted(trials, key=lambda trial: (trial.directory / JOURNAL).stat().st_mtime))


def list_names(head: TrialHead) -> tuple[str, ...]:
    """Return the names and UUIDs of a trial's domain, and of its copy."""
    return head.source, head.source_uuid, head.domain, head.uuid


@contextmanager
def _own_directory(files: RecordDirectory, subject: str, lock: str = LOCK) -> Iterator[int]:
    message = f"another homenode is running {subject}"
    hint = "homenode trial status shows how far it is"
    with files.hold_lock(message, hint, lock=lock) as descriptor:
        yield descriptor


BARE = "bare"
"""Instead of a layout: the host itself, on the plan's CPUs and nodes, without a guest."""

MAX_BOOTS = 100


def schedule_trial(layouts: Sequence[str], boots: int, seed: int) -> tuple[ScheduledTask, ...]:
    """Schedule every layout, and BARE if requested, once a round; each round has its own order.

    >>> [s.variant for s in schedule_trial(["pin", "default"], 2, seed=1)].count("pin")
    2

    Raises UsageError for a layout twice, none, or boots out of range.
    """
    plan = schedule(layouts, (), boots, seed, called="--layouts", option="--boots", limit=MAX_BOOTS)
    return plan.tasks


class MeasureOptions(Struct, frozen=True):
    """The tests of each boot and their limits."""

    suite: SuiteOptions
    repeats: int = 3
    seed: int = 1  # seed of the test order
    app: AppCommand | None = None
    answer_s: float = ANSWER_S  # time limit for a guest to answer
    stop_s: float = STOP_S  # time limit for a guest to shut down


class TrialConfig(Struct, frozen=True):
    """A trial's settings, without its definitions and plans."""

    measuring: MeasureOptions
    reaching: GuestAccess
    host_kind: str | None
    versions: tuple[Condition, ...]
    emulated: bool
    # options of `homenode apply` that the layouts were planned with
    apply_words: tuple[str, ...] = ()
    disks: tuple[WritableDisk, ...] = ()  # disks of the copy, see PreparedCopy
    nvram: tuple[str, str] | None = None  # NVRAM of the copy, see PreparedCopy
    report: str | None = None  # the report file that the user requested


def run_name(trial: str, step: ScheduledTask) -> str:
    """Return the name of a boot's results directory.

    >>> run_name("vm7", ScheduledTask(4, 1, "pin"))
    'vm7-pin-2'
    """
    return f"{trial}-{step.variant}-{step.round + 1}"


def boot_orders(
    config: TrialConfig,
    trial: str,
    step: ScheduledTask,
    plan: Plan,
    boot: str,
    document: bytes | None = None,
) -> BenchOptions:
    """Return the orders for one boot of a layout; its guest is verified against the plan first.
    document: None = no guest: the host itself on the CPUs and nodes of a plan that pins."""
    measuring = config.measuring
    orders = BenchOptions(
        name=run_name(trial, step),
        suite=measuring.suite,
        repeats=measuring.repeats,
        seed=measuring.seed + step.number,
        boot=boot,
        app=measuring.app,
        host=plan.host_fingerprint,
        host_kind=config.host_kind,
        experiment=trial,
        block=step.round,
    )
    if document is None:
        pus = CpuSet.union(plan.vcpu_pins)
        nodes = tuple(int(node) for node in plan.nodes) or None
        return replace(orders, vantage=Vantage.HOST, pus=pus, nodes=nodes)
    preset = PRESETS.get(step.variant)
    return replace(
        orders,
        switches=UNKNOWN_SWITCHES if preset is None else Switches.from_layout(preset),
        plan=plan,
        domain_xml=document,
        versions=config.versions,
        emulated=config.emulated,
    )
