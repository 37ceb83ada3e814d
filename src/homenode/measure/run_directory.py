"""RunDirectory: storage of a run during measurement: atomic files, one writer. [I/O]

    results/<system>/<NAME>/
        journal.jsonl          the order, then each check and each step
        host.tar.gz  plan.json  domain.xml
        raw/0007-stream.txt    what a step printed
        results.jsonl          a head alone until the run is finished

A step counts once its line is in the journal; its output is there before that. The journal is
homenode.bench/1. Samples are derived only from it and the outputs.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.errors import InputError, UsageError
from homenode.findings import Finding, Gap
from homenode.measure.environment import Environment
from homenode.measure.experiment import ExperimentJournal
from homenode.measure.gpu_load_sampling import GpuPower
from homenode.measure.model import AppCommand, BenchTest
from homenode.measure.results.model import Run, RunHead
from homenode.measure.results.store import FILE, read_head_line, run_directory, run_text
from homenode.text import command_line

KIND = "bench"


class StepStatus(StrEnum):
    """The way in which a command ended."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    MISSING = "missing"


class RunRecord(Struct, frozen=True, omit_defaults=True):
    """The orders, and the measured machine."""

    head: RunHead  # without what only the measuring gives
    tests: tuple[BenchTest, ...]
    controls: tuple[str, ...]
    repeats: int
    seed: int
    machine: str  # fingerprint of the measured machine, host or guest; a run resumes only there
    boot: str
    app: AppCommand | None = None
    omitted: tuple[Gap, ...] = ()
    marks: tuple[str, ...] = ()  # reasons against any conclusion, known before the first step
    bus_ids: tuple[tuple[Bdf, Bdf], ...] = ()  # (address here, on the host)


class EnvironmentRecord(Struct, frozen=True):
    """The machine before or after some steps."""

    number: int
    is_before: bool
    environment: Environment
    findings: tuple[Finding, ...] = ()  # findings of the preflight, before the steps


class StepRecord(Struct, frozen=True):
    number: int
    round: int
    test: str  # the id of the scheduled test
    attempt: str  # id of the test that printed the output
    result: StepStatus
    seconds: float  # all attempts together
    output: str  # file in raw/ with its output, and the file's sha256
    sha256: str
    returncode: int | None = None
    # why results are missing, or messages of earlier attempts
    messages: tuple[str, ...] = ()
    value: float | None = None  # result that the user's program printed
    started_s: float | None = None  # seconds since 1970 (UTC)
    power: tuple[GpuPower, ...] = ()  # power of each GPU during that attempt


class BenchEntry(Struct, frozen=True, omit_defaults=True):
    """A line of the journal: a check or a step."""

    look: EnvironmentRecord | None = None
    step: StepRecord | None = None


MAX_KEPT = 48 << 20
"""Characters of an output that are kept, its end: a quarter of what a file of the run may have."""


def compute_digest(text: str) -> str:
    """Return the sha256 (hex) of an output, as its file holds it."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def redact_output(text: str) -> str:
    """An output as it may be stored: nccl-tests' JSON holds the whole environment and its secrets.

    >>> redact_output('{"nccl_version": 1, "env": ["TOKEN=x"], "args": ["-n"]}')
    '{"nccl_version":1}'
    >>> redact_output("no JSON")
    'no JSON'
    """
    if '"nccl_version"' not in text:
        return text
    try:
        document = msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    if not isinstance(document, dict):
        return text
    fields = {key: value for key, value in document.items() if key not in ("env", "args")}
    return msgspec.json.encode(fields).decode()


def find_differences(stored_record: RunRecord, now: RunRecord) -> tuple[str, ...]:
    """Why a run cannot be continued with other orders or on another machine; () if it can."""
    pairs: Iterable[tuple[str, Any, Any]] = (
        ("machine", stored_record.machine[:12], now.machine[:12]),
        ("boot", stored_record.boot, now.boot),
        ("seed", stored_record.seed, now.seed),
        ("rounds", stored_record.repeats, now.repeats),
        ("tests", _test_ids(stored_record.tests), _test_ids(now.tests)),
        ("program", stored_record.app, now.app),
        ("CPUs", str(stored_record.head.pus), str(now.head.pus)),
        ("nodes", stored_record.head.nodes, now.head.nodes),
        ("plan", stored_record.head.plan_fingerprint, now.head.plan_fingerprint),
        ("layout", stored_record.head.switches.name, now.head.switches.name),
        ("vantage", stored_record.head.vantage, now.head.vantage),
        ("arrangement", stored_record.head.arrangement, now.head.arrangement),
        ("host", stored_record.head.host, now.head.host),
        ("kind of host", stored_record.head.host_kind, now.head.host_kind),
        ("guest's devices", _format_pairs(stored_record.bus_ids), _format_pairs(now.bus_ids)),
        ("guest", _find_guest_state(stored_record.marks), _find_guest_state(now.marks)),
    )
    changes = [f"{name} {was} before, {is_now} now" for name, was, is_now in pairs if was != is_now]
    if not changes and stored_record.tests != now.tests:
        changes.append(
            "tests with other commands: --quick or --full, another affinity, or a tool that "
            "was installed or removed"
        )
    return tuple(changes)


def _format_pairs(bus_ids: tuple[tuple[Bdf, Bdf], ...]) -> str:
    return ", ".join(f"{guest_bdf} = {host_bdf}" for guest_bdf, host_bdf in bus_ids) or "none"


def _find_guest_state(marks: tuple[str, ...]) -> str:
    """Return marks before the first step: only those of the guest's comparison with its plan."""
    return "; ".join(marks) or "as planned"


def _test_ids(tests: tuple[BenchTest, ...]) -> str:
    return ", ".join(sorted(test.id for test in tests))


HOST = "host.tar.gz"
PLAN = "plan.json"
DOMAIN = "domain.xml"
RAW = "raw"

_TOOL_LOCK = ".tool-lock"
TOOL_WAIT_S = 900.0
"""Time limit for waiting for a test that a killed run left running."""


class RunDirectory(ExperimentJournal[RunRecord, BenchEntry]):
    """A run's files. Made by `open_run`, which holds its locks."""

    __slots__ = ("tool_lock",)

    def __init__(self, path: Path, root: Path | None = None) -> None:
        super().__init__(
            path,
            KIND,
            RunRecord,
            BenchEntry,
            private=False,
            below=root,
            hint=lambda number: "free some space, then continue with --resume",
        )
        self.tool_lock = -1

    @property
    def is_begun(self) -> bool:
        return self.has_journal

    def order(self) -> RunRecord | None:
        """Return the orders; None without steps. Raises InputError."""
        records = self.read_records()
        return None if records is None else records[0]

    def read_steps(self) -> tuple[tuple[StepRecord, str], ...]:
        """Return the steps that ended, in order, each with its output. Raises InputError. A record
        whose output has changed is rejected."""
        _, entries = self.read_records() or (None, ())
        records: dict[int, StepRecord] = {}
        for entry in entries:
            if entry.step is not None:
                if entry.step.number in records:
                    raise InputError(
                        f"{self.journal_path}: expected step {entry.step.number} once, found it "
                        "twice",
                        hint="start a new run under another name",
                    )
                records[entry.step.number] = entry.step
        return tuple((records[at], self._read_output(records[at])) for at in sorted(records))

    def looks(self) -> tuple[EnvironmentRecord, ...]:
        _, entries = self.read_records() or (None, ())
        return tuple(entry.look for entry in entries if entry.look is not None)

    def write_step(self, record: StepRecord, output: str) -> None:
        self.write(f"{RAW}/{record.output}", output.encode("utf-8", "surrogateescape"))
        self.add(BenchEntry(step=record))

    def write_head(self, head: RunHead) -> None:
        """Write only the head of a run; readers treat a run without an end line as unfinished."""
        self.write(FILE, read_head_line(head).encode())

    def write_run(self, run: Run) -> None:
        self.write(FILE, run_text(run).encode())

    def read_records(self) -> tuple[RunRecord, tuple[BenchEntry, ...]] | None:
        """Return the ordered work, with each observation and step; None before the order."""
        return self.contents() if self.has_journal else None

    def _read_output(self, record: StepRecord) -> str:
        if "/" in record.output or record.output in ("", ".", ".."):
            raise InputError(
                f"{self.journal_path}: expected a file's name as output of step {record.number}, "
                "found another path"
            )
        path = self.path / RAW / record.output
        content = self.read(f"{RAW}/{record.output}")
        if content is None:
            raise InputError(
                f"{path}: no such file",
                hint="start a new run under another name",
            )
        output = content.decode("utf-8", "surrogateescape")
        if compute_digest(output) != record.sha256:
            raise InputError(
                f"{path}: the output was changed after the run wrote it",
                hint="start a new run under another name",
            )
        return output


def list_run_gaps(path: Path) -> tuple[Gap, ...]:
    """Return tests that a run omitted or that failed, from its journal. Raises InputError."""
    records = RunDirectory(path).read_records()
    if records is None:
        return ()
    record, entries = records
    steps = (entry.step for entry in entries if entry.step is not None)
    failures = (Gap(step.test, reason) for step in steps for reason in step.messages)
    return tuple(dict.fromkeys((*record.omitted, *failures)))


@contextlib.contextmanager
def open_run(
    root: Path, system: str, name: str, *, resume: bool, notify: Callable[[str], None]
) -> Iterator[RunDirectory]:
    """The directory of a run, for one writer at a time.

    resume: it must hold a run; else it must not. Wait for a test that a killed run left running,
    because it would disturb the next test. Raises UsageError, HostError.
    """
    path = run_directory(root, system, name)
    directory = RunDirectory(path, root)
    if resume and not directory.is_begun:
        raise UsageError(f"{path}: no run to continue", hint="omit --resume")
    if not resume and (directory.is_begun or (path / FILE).exists()):
        raise UsageError(
            f"{path}: a run of this name exists",
            hint="--resume continues it; or choose another name, or remove the directory",
        )
    with (
        directory.hold_lock("in use by another homenode bench"),
        directory.hold_lock(
            f"a test of the interrupted run still runs after {TOOL_WAIT_S:g} s",
            f"{command_line('fuser', path / _TOOL_LOCK)} names it",
            lock=_TOOL_LOCK,
            wait_s=TOOL_WAIT_S,
            on_wait=lambda: notify(
                "waiting for a test that was running when the run was cut short"
            ),
        ) as tool_lock,
    ):
        directory.tool_lock = tool_lock
        yield directory
