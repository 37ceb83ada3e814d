"""Record: what a run's folder says of how it was measured, so that it can be continued.

The journal of a run's folder, homenode.bench/2: a head with what was ordered, then a line for each
look at the machine (before and after) and each step (one command, with the file of its output).
Samples are derived from these and the outputs; nothing is known that is not in them.
"""

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from homenode.bdf import Bdf
from homenode.findings import Finding
from homenode.gap import Gap
from homenode.measure.environment import Environment
from homenode.measure.model import BenchTest
from homenode.measure.orders import AppOrder
from homenode.measure.results.model import RunHead

KIND = "bench"


class StepStatus(StrEnum):
    """How a command ended."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    MISSING = "missing"


class RunRecord(Struct, frozen=True):
    """What was ordered, and of which machine. head: without what only the measuring gives.

    machine: fingerprint of what is measured, a guest for one; a run goes on there alone. marks: why
    nothing must be concluded, known before the first step. bus_ids: (address here, on the host).
    """

    head: RunHead
    tests: tuple[BenchTest, ...]
    controls: tuple[str, ...]
    repeats: int
    seed: int
    machine: str
    boot: str
    app: AppOrder | None = None
    left_out: tuple[Gap, ...] = ()
    marks: tuple[str, ...] = ()
    bus_ids: tuple[tuple[Bdf, Bdf], ...] = ()


class LookRecord(Struct, frozen=True):
    """The machine before or after some steps. findings: of the preflight, before them."""

    number: int
    is_before: bool
    environment: Environment
    findings: tuple[Finding, ...] = ()


class StepRecord(Struct, frozen=True):
    """One step that ended. test: the id of what was scheduled; attempt: of what gave the output.

    output: file in raw/ with what it printed; sha256 of that. said: why there are no figures, or
    what the attempts before this one said. started_s: seconds since 1970 (UTC). seconds: all
    attempts together. figure: of the user's own program, as its metric was found in the output.
    """

    number: int
    round: int
    test: str
    attempt: str
    result: StepStatus
    seconds: float
    output: str
    sha256: str
    returncode: int | None = None
    said: tuple[str, ...] = ()
    figure: float | None = None
    started_s: float | None = None


class BenchEntry(Struct, frozen=True):
    """One line of the journal: a look or a step."""

    look: LookRecord | None = None
    step: StepRecord | None = None


MAX_KEPT = 48 << 20
"""Characters of an output that are kept, its end: a quarter of what a file of the run may have."""


def digest(text: str) -> str:
    """sha256 (hex) of an output, as its file holds it."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def kept_output(text: str) -> str:
    """An output as it may be stored: nccl-tests' JSON holds the whole environment and its secrets.

    >>> kept_output('{"nccl_version": 1, "env": ["TOKEN=x"], "args": ["-n"]}')
    '{"nccl_version":1}'
    >>> kept_output("no JSON")
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
    kept = {key: value for key, value in document.items() if key not in ("env", "args")}
    return msgspec.json.encode(kept).decode()


def differences(stored: RunRecord, now: RunRecord) -> tuple[str, ...]:
    """Why a run cannot be continued under other orders, or elsewhere; () where it can."""
    pairs: Iterable[tuple[str, Any, Any]] = (
        ("machine", stored.machine[:12], now.machine[:12]),
        ("boot", stored.boot, now.boot),
        ("seed", stored.seed, now.seed),
        ("rounds", stored.repeats, now.repeats),
        ("tests", _named(stored.tests), _named(now.tests)),
        ("program", stored.app, now.app),
        ("PUs", str(stored.head.pus), str(now.head.pus)),
        ("nodes", stored.head.nodes, now.head.nodes),
        ("plan", stored.head.plan_fingerprint, now.head.plan_fingerprint),
        ("layout", stored.head.switches.name, now.head.switches.name),
        ("vantage", stored.head.vantage, now.head.vantage),
        ("arrangement", stored.head.arrangement, now.head.arrangement),
        ("host", stored.head.host, now.head.host),
        ("kind of host", stored.head.host_kind, now.head.host_kind),
        ("guest's devices", _pairs(stored.bus_ids), _pairs(now.bus_ids)),
        ("guest", _owned(stored.marks), _owned(now.marks)),
    )
    found = [f"{name} {was} before, {is_now} now" for name, was, is_now in pairs if was != is_now]
    if not found and stored.tests != now.tests:
        found.append(
            "tests with other commands: --quick or --full, another affinity, or a tool that "
            "was installed or removed"
        )
    return tuple(found)


def _pairs(bus_ids: tuple[tuple[Bdf, Bdf], ...]) -> str:
    return ", ".join(f"{here} = {there}" for here, there in bus_ids) or "none"


def _owned(marks: tuple[str, ...]) -> str:
    """Before the first step, marks come from holding the guest against its plan alone."""
    return "; ".join(marks) or "as planned"


def _named(tests: tuple[BenchTest, ...]) -> str:
    return ", ".join(sorted(test.id for test in tests))
