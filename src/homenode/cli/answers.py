"""Answers: what commands print with --json that no other document of homenode holds.

See docs/formats/answers.md.
"""

from msgspec import Struct

from homenode.change.apply.obstacles import Obstacle
from homenode.cpuset import CpuSet
from homenode.gap import Gap


class MovedThread(Struct, frozen=True, kw_only=True):
    """A thread of a running domain. kind: "vcpu", "emulator" or "iothread"."""

    kind: str
    number: int
    before: CpuSet
    after: CpuSet


class AppliedDomain(Struct, frozen=True, kw_only=True):
    """A domain, or a file, whose uuid is None. plan: as plan --json prints it; None: given."""

    name: str
    uuid: str | None
    changed: bool
    original: str | None
    plan: dict[str, object] | None
    obstacles: tuple[Obstacle, ...] = ()
    edited: bool = False
    threads: tuple[MovedThread, ...] = ()


class ApplyAnswer(Struct, frozen=True, kw_only=True):
    """Of apply and replan. dry_run: `changed` is what would be."""

    dry_run: bool
    domains: tuple[AppliedDomain, ...]


class ImportedRun(Struct, frozen=True, kw_only=True):
    """samples: how many. gaps: what the files left open."""

    system: str
    name: str
    layout: str
    vantage: str
    samples: int
    metrics: tuple[str, ...]
    files: tuple[str, ...]
    gaps: tuple[Gap, ...]


class ImportedRuns(Struct, frozen=True, kw_only=True):
    """Of import. written: False of a dry run."""

    folder: str
    written: bool
    runs: tuple[ImportedRun, ...]
    left_out: tuple[Gap, ...]


class TrialBoot(Struct, frozen=True, kw_only=True):
    """came_to: see the journal's `what`; None: to be done."""

    number: int
    layout: str
    came_to: str | None
    detail: str
    run: str | None
    samples: int | None
    findings: tuple[str, ...]


class TrialStanding(Struct, frozen=True, kw_only=True):
    """A trial. reason: why its folder cannot be read; then the rest is not known."""

    folder: str
    reason: str | None = None
    id: str | None = None
    domain: str | None = None
    connect: str | None = None
    running: bool = False
    ended: bool = False
    to_undo: tuple[str, ...] = ()
    boots: tuple[TrialBoot, ...] = ()


class TrialStatus(Struct, frozen=True, kw_only=True):
    """Of trial status."""

    trials: tuple[TrialStanding, ...]


class ProofCheck(Struct, frozen=True, kw_only=True):
    """Of verify --proof. reason: why it is false, or is none; None where it is true."""

    plan: str
    proved: bool
    conclusions: tuple[str, ...]
    reason: str | None
