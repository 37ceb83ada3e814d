"""Record: what homenode did to a domain's definition, written before it does it."""

from dataclasses import dataclass
from enum import StrEnum

from homenode.hypervisor.domain_state import LivePin

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

    run_id: libvirt's number of that run. run_mark: see run_mark.py; None for a domain elsewhere.
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
