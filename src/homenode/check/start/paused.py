"""Paused: the real VM, started with its real devices and without its guest, and ended. [I/O]"""

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from homenode.catalogue import finding
from homenode.change.journal import default_root
from homenode.change.paused_start import PausedStart, paused_journal, while_paused
from homenode.check.start.monitor import COMMANDS, read_view, view_findings, view_lines
from homenode.check.start.needs import Need, needs_of
from homenode.check.verify.live.capture import observe_running_domain
from homenode.check.verify.live.checks import verify_live
from homenode.errors import UsageError
from homenode.findings import Findings, in_order, sourced
from homenode.machine.topology import Host
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import open_domain
from homenode.vm.hypervisor.connection import is_local
from homenode.vm.hypervisor.domain_state import DomainState
from homenode.vm.hypervisor.virsh import RefusedError, Virsh
from homenode.vm.plan_model import Plan
from homenode.wording import command_line


class PausedLook(Struct, frozen=True, kw_only=True):
    """What is to be started. document: the definition that the start will use."""

    virsh: Virsh
    state: DomainState
    document: Document


def startable(connect: str, name: str) -> PausedLook:
    """The domain to start. Raises UsageError where it runs, has a saved memory, or is on another
    machine."""
    if not is_local(connect):
        raise UsageError(f"--start with --connect {connect}: expected a daemon on this machine")
    virsh = Virsh(connect)
    state = virsh.domain(name)
    journal = paused_journal(default_root(), virsh, state.uuid, state.name)
    if state.is_active:
        left = bool(journal.to_undo())
        raise UsageError(
            f"{state.name}: --start: expected a domain that is shut off, found it {state.state}"
            + (", as a killed --start left it" if left else ""),
            hint=journal.stored_head().undo
            if left
            else command_line("homenode", "verify", "--live", state.name),
        )
    if state.managed_save:
        raise UsageError(
            f"{state.name}: --start: expected no managed save image, which a start would use up",
            hint=command_line("virsh", "-c", connect, "managedsave-remove", state.uuid),
        )
    document = open_domain(virsh.definition(state.uuid), f"domain {state.name}")
    for need in _files(document):
        path = Path(need.value)
        if need.detail != "on" and path.is_file() and path.stat().st_size:
            raise UsageError(
                f"{state.name}: --start: expected no file that a start empties, found {path}",
                hint=f"move it away, or let {need.subject} append to it",
            )
    return PausedLook(virsh=virsh, state=state, document=document)


def _files(document: Document) -> list[Need]:
    """Those that the start makes where they are not there."""
    return [one for one in needs_of(document) if one.kind in ("PARENT", "MADE")]


def _makes(document: Document, name: str) -> list[str]:
    """Their paths, and those of what no path names."""
    root = document.root
    shared = (one.get("name") for one in root.all("devices/shmem") if one.child("server") is None)
    is_chosen = root.value("os/@firmware") == "efi" and root.at("os/nvram") is None
    store = [f"/var/lib/libvirt/qemu/nvram/{name}_VARS.fd"] if is_chosen else []
    store += [f"/dev/shm/{one}" for one in shared]  # noqa: S108
    return [need.value for need in _files(document)] + store


def verify_paused(
    on: PausedLook, plan: Plan | None, host: Host | None, locks: Sequence[int] = ()
) -> Findings:
    """Start the VM paused, compare what its host and QEMU say with what is expected, and end it.

    plan: for this host; None = the VM's own document. Nothing of it is left, also where the start
    fails. Raises HostError where the end fails; the journal then says so.
    """
    name, uuid = on.state.name, on.state.uuid
    makes = _makes(on.document, name)
    step = PausedStart(virsh=on.virsh, uuid=uuid, name=name, makes=makes, locks=locks)
    journal = paused_journal(default_root(), on.virsh, uuid, name)
    try:
        return while_paused(step, journal, lambda: _look(on, plan, host))
    except RefusedError as error:
        failed = finding("start-failed", name, "a start", error.message, on.virsh.connect)
        return Findings(checked=(f"{name}: started paused",), findings=(failed,))


def _look(on: PausedLook, plan: Plan | None, host: Host | None) -> Findings:
    uuid = on.state.uuid
    expected, running = observe_running_domain(uuid, on.virsh.connect, plan)
    answers = {
        command: on.virsh.monitor(uuid, f'{{"execute": "{command}"}}') for command in COMMANDS
    }
    view = read_view(answers, on.virsh.monitor(uuid, "info qtree", is_text=True))
    live = verify_live(expected, running)
    found = [*live.findings, *view_findings(expected, view, host)]
    named = sourced(found, f"QEMU of {on.state.name}, paused")
    return Findings(checked=(*live.checked, *view_lines(view)), findings=in_order(named))
