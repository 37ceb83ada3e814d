"""Boot steps: the changes that a trial's boot makes, as steps that a later homenode can undo. [I/O]

Steps make the copy, define a layout and start a guest. They are undone in reverse order, from the
journal alone: at the end, after an interrupt, or by the next homenode after a crash. A second
Ctrl-C must not leave a VM half restored.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, structs

from homenode.change.apply.definition import (
    apply_definition,
    read_saved_original,
    restore_definition,
)
from homenode.change.journal import (
    ChangeEntry,
    ChangeState,
    ChangeStep,
    DomainStore,
    Note,
    lock_host,
)
from homenode.errors import HostError
from homenode.measure.access.machine import Machine
from homenode.measure.trial.copying import PreparedCopy, make_copy, remove_copy
from homenode.measure.trial.guest import (
    get_host_boot,
    is_same_host_boot,
    is_there,
    retry_while_unavailable,
    stop,
)
from homenode.measure.trial.journal import BOOT, COPY, LAYOUT, TrialHead, TrialJournal
from homenode.text import command_line
from homenode.units import parse_whole
from homenode.vm.domain.merge import is_same_definition
from homenode.vm.hypervisor.connection import add_connection
from homenode.vm.hypervisor.virsh import Virsh

T = TypeVar("T")

ORIGINAL = "original.xml"
"""Next to the journal: the user's domain as libvirt printed it when the trial was begun."""

_ALREADY = ("already running", "already active")
"""Words in libvirt's errors for starting a domain that is already running."""

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def hold_interrupts(notify: Callable[[str], None]) -> Iterator[None]:
    """Report the first interrupt within the block; the next one raises KeyboardInterrupt. A signal
    that nohup ignores stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread handles signals
        return
    is_repeated = False

    def answer(number: int, frame: object) -> None:
        nonlocal is_repeated
        if is_repeated:
            raise KeyboardInterrupt
        is_repeated = True
        notify("the VM is being restored; once more leaves it as it is, for homenode trial undo")

    before = {
        signum: signal.signal(signum, answer)
        for signum in _HELD
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class TrialDomain(Struct, frozen=True):
    virsh: Virsh
    head: TrialHead
    journal: TrialJournal
    root: Path  # directory of apply's records
    stop_s: float  # time limit for its guest to shut down
    # gets a line for each event worth reporting
    notify: Callable[[str], None] = lambda line: None

    def retry(self, work: Callable[[], T]) -> T:
        """Return the result of the work; libvirt may be unavailable for a while."""
        return retry_while_unavailable(work, self.head.argument, self.notify)

    def host_locked(self) -> AbstractContextManager[tuple[int, ...]]:
        """Hold the host's lock for one change: between boots other programs may change the host."""
        return lock_host(
            self.root,
            self.head.connect,
            command_line("homenode", "trial", self.head.source),
            lambda holder: self.notify(f"waiting for {holder} to finish changing this host"),
        )

    @property
    def is_there(self) -> bool:
        """Return False for a copy that is gone: nothing is left to stop or restore."""
        return self.head.copy is None or self.retry(lambda: is_there(self.virsh, self.head.uuid))

    def make_undo_step(self, entry: ChangeEntry, machine: Machine | None = None) -> ChangeStep:
        """Return the step that undoes an entry. machine: the guest, if it is reachable."""
        if entry.kind == COPY:
            return CopyStep(self)
        return LayoutStep(self) if entry.kind == LAYOUT else BootStep(self, machine=machine)

    def undo(self, *kinds: str, machine: Machine | None = None) -> None:
        """Undo the steps of these kinds, the latest first; () = all.

        A full disk must not prevent an undo: a step that is not recorded as undone is checked
        again, which is harmless. Raises HostError if libvirt does not answer, InputError or
        UsageError if someone else changed or started the domain meanwhile: the journal then lists
        the remaining steps.
        """
        for entry in reversed(self.journal.changes.to_undo()):
            if not kinds or entry.kind in kinds:
                self.make_undo_step(entry, machine).undo(entry, self._note)

    def _note(self, entry: ChangeEntry) -> None:
        try:
            self.journal.changes.write(entry)
        except HostError as error:
            self.notify(
                f"the journal could not record that {entry.kind} is {entry.what}: {error.message}"
            )


class CopyStep(Struct, frozen=True):
    """The copy of a domain, with its throw-away disks. See ChangeStep."""

    on: TrialDomain
    prepared: PreparedCopy | None = None

    def do(self, note: Note) -> ChangeEntry:
        assert self.prepared is not None, "prepare comes first"
        copy = self.prepared.copy
        commands = [command_line("virsh", "-c", self.on.head.connect, "undefine", copy.uuid)]
        commands += [command_line("rm", *copy.overlays)] if copy.overlays else []
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=COPY,
            subject=copy.uuid,
            made=copy.overlays,
            by_hand="; ".join(commands),
            facts={"name": copy.name},
        )
        with self.on.host_locked() as locks:
            note(entry)
            make_copy(self.on.virsh, self.prepared, locks)
            note(entry.with_state(ChangeState.DONE))
        return entry.with_state(ChangeState.DONE)

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        head = self.on.head
        copy = head.copy
        if copy is not None:
            note(entry.with_state(ChangeState.UNDOING))
            self.on.retry(lambda: remove_copy(self.on.virsh, copy))
            DomainStore(self.on.root, head.connect, copy.uuid).drop()
            self.on.notify(f"{head.domain}: the copy and its throw-away disks are gone")
        note(entry.with_state(ChangeState.UNDONE))
        return entry.with_state(ChangeState.UNDONE)

    def is_done(self, entry: ChangeEntry) -> bool:
        return is_there(self.on.virsh, entry.subject)


class LayoutStep(Struct, frozen=True):
    """A layout's definition in place of the domain's; apply's record keeps the original."""

    on: TrialDomain
    document: bytes = b""
    check: Callable[[], None] = lambda: None  # raises if the layout no longer fits the host

    def do(self, note: Note) -> ChangeEntry:
        virsh, uuid = self.on.virsh, self.on.head.uuid
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=LAYOUT,
            subject=uuid,
            by_hand=command_line(*add_connection(virsh.connect, "homenode", "restore", uuid)),
            facts={"name": self.on.head.domain},
        )
        note(entry)
        self.check()
        apply_definition(virsh, uuid, self.document, virsh.read_definition(uuid), self.on.root)
        note(entry.with_state(ChangeState.DONE))
        return entry.with_state(ChangeState.DONE)

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        note(entry.with_state(ChangeState.UNDOING))
        if self.on.head.copy is None:
            how = self.on.retry(self._give_back)
            self.on.notify(f"{self.on.head.domain}: original definition restored, {how}")
        note(entry.with_state(ChangeState.UNDONE))
        return entry.with_state(ChangeState.UNDONE)

    def is_done(self, entry: ChangeEntry) -> bool:
        now = self.on.virsh.read_definition(entry.subject)
        return not is_same_definition(now, self.on.journal.read_kept(ORIGINAL))

    def _give_back(self) -> str:
        """Restore the definition from before the trial; return how."""
        virsh, uuid, root = self.on.virsh, self.on.head.uuid, self.on.root
        before = self.on.journal.read_kept(ORIGINAL)
        first = read_saved_original(virsh, uuid, root)
        is_first = first is not None and is_same_definition(first, before)
        if first is None or (
            not is_first and is_same_definition(virsh.read_definition(uuid), before)
        ):
            return "no change had been made"
        with self.on.host_locked():
            result = restore_definition(virsh, uuid, root)
            if not is_first:  # the user had applied a layout before the trial
                apply_definition(virsh, uuid, before, result.definition, root)
        if not is_first:
            return "to the layout that was applied before the trial"
        return "byte for byte" if result.exact else "printed otherwise by this libvirt"


class BootStep(Struct, frozen=True):
    """A running guest. See ChangeStep. Its facts: the domain's `name`, the `number` of the boot in
    the trial, libvirt's `run_id` of the instance, and the boot ids of guest (`boot`) and host."""

    on: TrialDomain
    number: int = 0
    locks: tuple[int, ...] = ()  # descriptors that the daemon's program inherits
    machine: Machine | None = None  # the guest, if it is still reachable

    def do(self, note: Note) -> ChangeEntry:
        virsh, uuid = self.on.virsh, self.on.head.uuid
        facts = {"name": self.on.head.domain, "number": str(self.number)}
        boot_id = get_host_boot(virsh)
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=BOOT,
            subject=uuid,
            by_hand=command_line("virsh", "-c", virsh.connect, "destroy", uuid),
            facts=facts if boot_id is None else facts | {"host_boot": boot_id},
        )
        note(entry)
        try:
            virsh.start(uuid, self.locks)
        except HostError as error:
            if any(phrase in error.message for phrase in _ALREADY):
                # Someone else started this instance.
                note(
                    _add_fact(entry, "how", "another program had started it", ChangeState.REJECTED)
                )
            raise
        done = _add_fact(entry, "run_id", str(virsh.find_domain(uuid).run_id), ChangeState.DONE)
        note(done)
        return done

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        note(entry.with_state(ChangeState.UNDOING))
        how = self.on.retry(lambda: self._stop(entry)) if self.on.is_there else "was off"
        self.on.notify(f"{self.on.head.domain}: {how}")
        undone = _add_fact(entry, "how", how, ChangeState.UNDONE)
        note(undone)
        return undone

    def is_done(self, entry: ChangeEntry) -> bool:
        """Return whether the instance of the entry runs, in the same boot of the host."""
        now = self.on.virsh.find_domain(entry.subject)
        is_same = _run_id(entry) in (None, now.run_id)
        return (
            now.is_active
            and is_same
            and is_same_host_boot(self.on.virsh, entry.facts.get("host_boot"))
        )

    def _stop(self, entry: ChangeEntry) -> str:
        virsh = self.on.virsh
        if not is_same_host_boot(virsh, entry.facts.get("host_boot")):
            return "was off: the host was started again since"
        return stop(virsh, entry.subject, self.machine, self.on.stop_s, _run_id(entry))


def add_boot_id(entry: ChangeEntry, boot: str) -> ChangeEntry:
    """Return the step for a guest that has answered. boot: the guest's boot id."""
    return _add_fact(entry, "boot", boot, ChangeState.DONE)


def _add_fact(entry: ChangeEntry, name: str, fact: str, state: ChangeState) -> ChangeEntry:
    return structs.replace(entry, facts=entry.facts | {name: fact}, what=state)


def _run_id(entry: ChangeEntry) -> int | None:
    return parse_whole(entry.facts.get("run_id"))
