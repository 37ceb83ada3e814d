"""EarlierRecords: what homenode.apply/1 and /2 kept of a domain, as the steps of today. [I/O]

Version 2 has a line for each record in journal.jsonl, version 1 record.json and live.json.
"""

from typing import Literal

import msgspec

from homenode import formats
from homenode.change.record_folder import RecordFolder
from homenode.change.step import ChangeEntry, ChangeState
from homenode.vm.hypervisor.domain_state import LivePin, pins_text

KIND = "apply"
DEFINE, PIN = "define", "pin-threads"
"""Kinds of steps."""

OLD_RECORD, OLD_LIVE = "record.json", "live.json"
_STATES = {
    "applying": ChangeState.BEGIN,
    "applied": ChangeState.DONE,
    "restoring": ChangeState.UNDOING,
    "restored": ChangeState.UNDONE,
}


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """A definition. original, tuned, applied: sha256 of saved documents."""

    connect: str
    name: str
    uuid: str
    step: Literal["applying", "applied", "restoring", "restored"]
    original: str
    tuned: str
    applied: str | None = None

    def entry(self) -> ChangeEntry:
        found = {} if self.applied is None else {"found": self.applied}
        return ChangeEntry(
            what=_STATES[self.step],
            kind=DEFINE,
            subject=self.uuid,
            before=self.original,
            after=self.tuned,
            facts={"connect": self.connect, "name": self.name, **found},
        )


class _LiveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Pins of a running domain. before, after: of the threads changed."""

    name: str
    uuid: str
    run_id: int
    before: tuple[LivePin, ...]
    after: tuple[LivePin, ...]
    run_mark: str | None = None

    def entry(self) -> ChangeEntry:
        mark = {} if self.run_mark is None else {"run_mark": self.run_mark}
        return ChangeEntry(
            what=ChangeState.DONE,
            kind=PIN,
            subject=self.uuid,
            before=pins_text(self.before),
            after=pins_text(self.after),
            facts={"name": self.name, "run_id": str(self.run_id), **mark},
        )


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    connect: str
    uuid: str


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    record: _Record | None = None
    live: _LiveRecord | None = None
    live_ended: bool = False


def earlier_entries(files: RecordFolder) -> tuple[ChangeEntry, ...]:
    """The steps that an earlier homenode left in a domain's folder. Raises InputError."""
    found: list[ChangeEntry] = []
    pinned: ChangeEntry | None = None
    for line in _lines(files):
        if line.record is not None:
            found.append(line.record.entry())
        if line.live is not None:
            pinned = line.live.entry()
            found.append(pinned)
        if line.live_ended and pinned is not None:
            found.append(pinned.now(ChangeState.UNDONE))
    return tuple(found)


def _lines(files: RecordFolder) -> tuple[_Line, ...]:
    if files.has_journal:
        source = str(files.journal_path)
        return formats.decode_journal(files.journal(), KIND, _Head, _Line, source)[1]
    found = []
    if (old := files.read(OLD_RECORD)) is not None:
        record = formats.decode(old, KIND, _Record, str(files.path / OLD_RECORD))
        found.append(_Line(record=record))
    if (old := files.read(OLD_LIVE)) is not None:
        live = formats.decode(old, KIND, _LiveRecord, str(files.path / OLD_LIVE))
        found.append(_Line(live=live))
    return tuple(found)
