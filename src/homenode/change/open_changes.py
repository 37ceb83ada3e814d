"""OpenChange: what is open on a host or can be undone, whoever did it."""

from collections.abc import Iterable, Iterator

import msgspec

from homenode.change.journal import Journal
from homenode.change.step import UNSETTLED
from homenode.errors import HomenodeError


class OpenChange(msgspec.Struct, frozen=True, kw_only=True):
    """A step that did something, or may have. subject: what it changed. is_cut_short: a kill left
    it half done, or it is being done. undo: homenode's command; by_hand: the one without it."""

    command: str
    kind: str
    subject: str
    is_cut_short: bool
    undo: str
    by_hand: str = ""

    def lines(self) -> tuple[str, ...]:
        state = "cut short, or at work now" if self.is_cut_short else "done"
        by_hand = (f"  by hand: {self.by_hand}",) if self.by_hand else ()
        head = f"{self.subject}: {self.kind} ({self.command}): {state}"
        return (head, f"  undo: {self.undo}", *by_hand)


def open_changes(journals: Iterable[Journal]) -> Iterator[OpenChange | HomenodeError]:
    """Of each journal, in the order in which they were begun; the error of one that cannot be
    read."""
    for journal in journals:
        try:
            head, entries = journal.stored_head(), journal.to_undo()
        except HomenodeError as error:
            yield error
            continue
        for entry in entries:
            yield OpenChange(
                command=head.command,
                kind=entry.kind,
                subject=entry.facts.get("name", entry.subject),
                is_cut_short=entry.what in UNSETTLED,
                undo=head.undo,
                by_hand=entry.by_hand,
            )
