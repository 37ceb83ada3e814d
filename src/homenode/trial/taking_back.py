"""TakingBack: whatever a trial did is undone, from its journal alone. [I/O]

Called at the end, after an interrupt, and by the next homenode after a crash: each step may have
happened, half happened or not.
"""

from collections.abc import Callable
from pathlib import Path

from homenode.apply.definition import has_original, restore_definition
from homenode.errors import HostError
from homenode.hypervisor.virsh import Virsh
from homenode.machine.protocol import Machine
from homenode.trial.copying import remove_copy
from homenode.trial.guest import is_there, patiently, stop
from homenode.trial.journal import Head, State, What
from homenode.trial.journal_file import JournalFile


def take_back(
    virsh: Virsh,
    head: Head,
    journal: JournalFile,
    root: Path,
    stop_s: float,
    *,
    machine: Machine | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Have the guest off, the original definition back and the copy gone.

    root: of apply's records. machine: the guest, where it is reached still. Raises HostError where
    libvirt does not answer, InputError or UsageError where somebody else changed or started the
    domain meanwhile: the journal then says what is left.
    """
    state = journal.known().state
    # A copy that is not there has nothing to be stopped or restored.
    there = head.copy is None or patiently(lambda: is_there(virsh, head.uuid))
    if state.running is not None:
        noted(journal, tell, What.STOPPING, state.running)
        how = patiently(lambda: _stop(virsh, head, state, machine, stop_s)) if there else "was off"
        noted(journal, tell, What.STOPPED, state.running, how)
        tell(f"{head.domain}: {how}")
    if state.applied:
        noted(journal, tell, What.RESTORING)
        if there and patiently(lambda: has_original(virsh, head.uuid, root)):
            done = patiently(lambda: restore_definition(virsh, head.uuid, root))
            detail = "byte for byte" if done.exact else "printed otherwise by this libvirt"
        else:
            detail = "nothing had been changed"
        noted(journal, tell, What.RESTORED, None, detail)
        tell(f"{head.domain}: original definition restored, {detail}")
    if state.copied and head.copy is not None:
        copy = head.copy
        noted(journal, tell, What.REMOVING)
        patiently(lambda: remove_copy(virsh, copy))
        noted(journal, tell, What.REMOVED)
        tell(f"{head.domain}: the copy and its throw-away disks are gone")


def noted(
    journal: JournalFile,
    tell: Callable[[str], None],
    what: What,
    number: int | None = None,
    detail: str = "",
) -> None:
    """A line, where it can be written: a full disk must not keep anything from being undone. What
    is not written down as undone is looked at once more, which does no harm."""
    try:
        journal.add(what, number, detail)
    except HostError as error:
        tell(f"not written down that it was {what}: {error.message}")


def _stop(virsh: Virsh, head: Head, state: State, machine: Machine | None, stop_s: float) -> str:
    return stop(virsh, head.uuid, machine, stop_s, state.run_id)
