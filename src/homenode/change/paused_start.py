"""PausedStart: start a domain without letting its guest run, and end it. [I/O]

The journal is written before libvirt is called: after a kill, `homenode restore --list` shows the
VM and `homenode restore` ends it, unless its guest was resumed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, structs

from homenode.change.journal import ChangeEntry, ChangeHead, ChangeState, Journal, Note, state_hint
from homenode.safe.durable import remove_file
from homenode.safe.record_directory import RecordDirectory
from homenode.text import command_line
from homenode.vm.hypervisor.connection import add_connection
from homenode.vm.hypervisor.virsh import RejectedError, Virsh

T = TypeVar("T")

START = "start-paused"
_DIRECTORY = "paused"
_PAUSED = "paused"


class PausedStart(Struct, frozen=True, kw_only=True):
    """See ChangeStep. Facts of its entry: the domain's `name`, libvirt's `run_id`, and for each new
    file in `made` its modification time."""

    virsh: Virsh
    uuid: str
    name: str
    makes: Sequence[str] = ()  # files that a start makes: NVRAM from its template, logs
    locks: Sequence[int] = ()  # that the daemon's program keeps

    def do(self, note: Note) -> ChangeEntry:
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=START,
            subject=self.uuid,
            made=tuple(path for path in self.makes if not Path(path).exists()),
            by_hand=command_line("virsh", "-c", self.virsh.connect, "destroy", self.uuid),
            facts={"name": self.name},
        )
        note(entry)
        try:
            self.virsh.start_paused(self.uuid, self.locks)
        except RejectedError:
            note(_add_change_times(entry))
            raise
        run_id = self.virsh.find_domain(self.uuid).run_id
        done_entry = _add_change_times(entry.with_state(ChangeState.DONE), run_id=str(run_id))
        note(done_entry)
        return done_entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        state = self.virsh.find_domain(entry.subject)
        run_id = entry.facts.get("run_id")
        is_same = run_id is None or run_id == str(state.run_id)
        if state.is_active and not (is_same and state.state == _PAUSED):
            kept_entry = entry.with_state(ChangeState.KEPT)
            note(kept_entry)
            return kept_entry
        note(entry.with_state(ChangeState.UNDOING))
        if state.is_active:
            self.virsh.destroy(entry.subject)
        for path in entry.made:
            # A guest that ran since wrote the file. After a kill, one that is off now may have run.
            changed = _read_change_time(path)
            if entry.facts.get(path, changed if state.is_active else None) == changed:
                remove_file(Path(path))
        undone = entry.with_state(ChangeState.UNDONE)
        note(undone)
        return undone

    def is_done(self, entry: ChangeEntry) -> bool:
        """Return whether the instance exists and is paused."""
        state = self.virsh.find_domain(entry.subject)
        run_id = entry.facts.get("run_id")
        is_same = run_id is None or run_id == str(state.run_id)
        return state.is_active and is_same and state.state == _PAUSED


def _add_change_times(entry: ChangeEntry, **facts: str) -> ChangeEntry:
    times = {path: _read_change_time(path) for path in entry.made}
    return structs.replace(entry, facts=entry.facts | facts | times)


def _read_change_time(path: str) -> str:
    """Return a file's time of change in ns; "" if the file is missing."""
    return str(Path(path).stat().st_mtime_ns) if Path(path).exists() else ""


def open_paused_journal(root: Path, virsh: Virsh, uuid: str, name: str) -> Journal:
    """Return the journal of a domain's paused starts. root: homenode's own directory."""
    words = command_line("homenode", "verify", name, "--start")
    undo = command_line(*add_connection(virsh.connect, "homenode", "restore", name))
    head = ChangeHead(run=uuid, command=words, undo=undo, connect=virsh.connect)
    return Journal(RecordDirectory(root / _DIRECTORY / uuid, hint=state_hint), head)


def list_paused_journals(root: Path) -> Iterator[Journal]:
    directory = root / _DIRECTORY
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        head = ChangeHead(run=path.name, command="homenode verify --start", undo="")
        yield Journal(RecordDirectory(path, hint=state_hint), head)


def end_paused(virsh: Virsh, root: Path, uuid: str, name: str) -> tuple[ChangeEntry, ...]:
    """End the VMs of killed starts, and return the outcome of each."""
    step = PausedStart(virsh=virsh, uuid=uuid, name=name)
    return open_paused_journal(root, virsh, uuid, name).undo(lambda entry: step)


def run_while_paused(step: PausedStart, journal: Journal, look: Callable[[], T]) -> T:
    """Run `look` while the VM is paused, then end the VM in any case."""
    try:
        step.do(journal.write)
        return look()
    finally:
        journal.undo(lambda entry: step)
