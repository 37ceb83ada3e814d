"""Journal: what a trial has done and how each of it is undone; written before it is done.

A head and then lines, each of which says one thing that is about to happen or has happened. What
state the domain is in follows from the lines alone: a trial that was killed is undone by them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from homenode.hypervisor.domain_state import domain_argument

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
class Outcome:
    """What came of a step last. what: MEASURED, INCOMPLETE (a test failed in every round),
    MISMATCHED, REFUSED or FAILED."""

    what: What
    entry: Entry


@dataclass(frozen=True, slots=True)
class State:
    """How a trial stands. outcomes: by the step's number.

    applied: the domain may have a layout's definition. running: the step whose guest may be
    running, and what is known of it; host_boot: of the host that it runs in. copied: the copy may
    be there. ended: nothing is left to undo or to do.
    """

    outcomes: dict[int, Outcome]
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
    outcomes: dict[int, Outcome] = {}
    applied = copied = ended = False
    running = run_id = boot = host_boot = None
    for entry in entries:
        what = entry.what
        if what in _OUTCOMES and entry.number is not None:
            outcomes[entry.number] = Outcome(what, entry)
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
