"""Rollback: whatever a trial did is undone, from its journal alone. [I/O]

Called at the end, after an interrupt, and by the next homenode after a crash: each step may have
happened, half happened or not. An impatient second Ctrl-C must not leave a VM half restored.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from homenode.apply.definition import (
    apply_definition,
    drop_records,
    restore_definition,
    saved_original,
)
from homenode.change.host_lock import host_locked
from homenode.domain.xml_equivalence import same_definition
from homenode.errors import HostError
from homenode.hypervisor.virsh import Virsh
from homenode.measure.access.machine import Machine
from homenode.measure.layouts.copying import remove_copy
from homenode.measure.layouts.guest import (
    is_same_host_boot,
    is_there,
    retry_while_unavailable,
    stop,
)
from homenode.measure.layouts.journal import Head, JournalFile, State, What
from homenode.wording import command_line

T = TypeVar("T")

_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_interrupts(notify: Callable[[str], None]) -> Iterator[None]:
    """The first of them inside is answered with words; the next one raises KeyboardInterrupt.

    What nohup ignores stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    stated = False

    def answer(number: int, frame: object) -> None:
        nonlocal stated
        if stated:
            raise KeyboardInterrupt
        stated = True
        notify("the VM is being restored; once more leaves it as it is, for homenode trial undo")

    before = {
        one: signal.signal(one, answer)
        for one in _HELD
        if signal.getsignal(one) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


ORIGINAL = "original.xml"
"""Next to the journal: the user's domain as libvirt printed it when the trial was begun."""


def rollback(
    virsh: Virsh,
    head: Head,
    journal: JournalFile,
    root: Path,
    stop_s: float,
    *,
    machine: Machine | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Have the guest off, the original definition back and the copy gone.

    root: of apply's records. machine: the guest, where it is reached still. Raises HostError where
    libvirt does not answer, InputError or UsageError where somebody else changed or started the
    domain meanwhile: the journal then says what is left.
    """
    state = journal.known().state

    def retry(work: Callable[[], T]) -> T:
        return retry_while_unavailable(work, head.id, notify)

    # A copy that is not there has nothing to be stopped or restored.
    there = head.copy is None or retry(lambda: is_there(virsh, head.uuid))
    if state.running is not None:
        noted(journal, notify, What.STOPPING, state.running)
        how = retry(lambda: _stop(virsh, head, state, machine, stop_s)) if there else "was off"
        noted(journal, notify, What.STOPPED, state.running, how)
        notify(f"{head.domain}: {how}")
    if state.applied:
        noted(journal, notify, What.RESTORING)
        if head.copy is not None:
            detail = "of the copy, which goes"
        else:
            detail = retry(lambda: _give_back(virsh, head, journal, root, notify))
            notify(f"{head.domain}: original definition restored, {detail}")
        noted(journal, notify, What.RESTORED, None, detail)
    if state.copied and head.copy is not None:
        copy = head.copy
        noted(journal, notify, What.REMOVING)
        retry(lambda: remove_copy(virsh, copy))
        drop_records(head.connect, copy.uuid, root)
        noted(journal, notify, What.REMOVED)
        notify(f"{head.domain}: the copy and its throw-away disks are gone")


def noted(
    journal: JournalFile,
    notify: Callable[[str], None],
    what: What,
    number: int | None = None,
    detail: str = "",
) -> None:
    """A line, where it can be written: a full disk must not keep anything from being undone. What
    is not written down as undone is looked at once more, which does no harm."""
    try:
        journal.add(what, number, detail)
    except HostError as error:
        notify(f"not written down that it was {what}: {error.message}")


def trial_host_locked(
    root: Path, head: Head, notify: Callable[[str], None]
) -> AbstractContextManager[tuple[int, ...]]:
    """The lock of the trial's host, for a change of it: not from boot to boot, so that others may
    change it meanwhile."""
    return host_locked(
        root,
        head.connect,
        command_line("homenode", "trial", head.source),
        lambda holder: notify(f"waiting until this host is no longer changed by {holder}"),
    )


def _give_back(
    virsh: Virsh, head: Head, journal: JournalFile, root: Path, notify: Callable[[str], None]
) -> str:
    """The definition from before the trial, whatever had been applied before that; says how."""
    before = journal.kept(ORIGINAL)
    first = saved_original(virsh, head.uuid, root)
    is_first = first is not None and same_definition(first, before)
    if first is None or (not is_first and same_definition(virsh.definition(head.uuid), before)):
        return "nothing had been changed"
    with trial_host_locked(root, head, notify):
        done = restore_definition(virsh, head.uuid, root)
        if not is_first:  # the user had applied a layout: that is what the trial found
            apply_definition(virsh, head.uuid, before, done.definition, root)
    if not is_first:
        return "as it was applied before the trial"
    return "byte for byte" if done.exact else "printed otherwise by this libvirt"


def _stop(virsh: Virsh, head: Head, state: State, machine: Machine | None, stop_s: float) -> str:
    if not is_same_host_boot(virsh, state.host_boot):
        return "was off: the host was started again since"
    return stop(virsh, head.uuid, machine, stop_s, state.run_id)
