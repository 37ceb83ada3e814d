"""Paused: the real VM, started with its real devices and without its guest, and ended. [I/O]"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from homenode.change.journal import default_root
from homenode.change.paused_start import PausedStart, paused_journal, while_paused
from homenode.check.start.monitor import COMMANDS, read_view, view_findings, view_lines
from homenode.check.verify.live.capture import observe_running_domain
from homenode.check.verify.live.checks import verify_live
from homenode.errors import UsageError
from homenode.findings import Findings, finding, in_order, sourced
from homenode.machine.topology import Host
from homenode.vm.domain.controllers import argument_properties, qemu_arguments
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
    for file in made_files(document):
        path = Path(file.path)
        if file.is_emptied and path.is_file() and path.stat().st_size:
            raise UsageError(
                f"{state.name}: --start: expected no file that a start empties, found {path}",
                hint=f"move it away, or let {file.owner} append to it",
            )
    return PausedLook(virsh=virsh, state=state, document=document)


class MadeFile(NamedTuple):
    """A file or socket that a start makes where it is missing."""

    owner: str  # the element or option that names it
    path: str
    is_emptied: bool  # if it has content already


_CHARACTER_DEVICES = ("serial", "parallel", "console", "channel", "smartcard", "redirdev")
_FILE_OPTIONS = ("-pidfile", "-D")
_PATH_OPTIONS = frozenset(
    "-object -chardev -serial -parallel -monitor -qmp -qmp-pretty -debugcon -gdb -vnc".split()
)


def made_files(document: Document) -> Iterator[MadeFile]:
    """Yield the files and sockets that a start makes, or empties where they have content."""
    root = document.root
    nvram = root.at("os/nvram")
    if nvram is not None:
        path = nvram.value("source/@file") if nvram.get("type") == "file" else nvram.text.strip()
        yield from _made("<nvram>", path, "on")
    for name in _CHARACTER_DEVICES:
        for device in root.all(f"devices/{name}"):
            if device.get("type") == "file":
                yield from _made(
                    f"<{name}>", device.value("source/@path"), device.value("source/@append")
                )
            yield from _made(f"<{name}>", device.value("log/@file"), device.value("log/@append"))
    for graphics in root.all("devices/graphics"):
        for element in (graphics, *graphics.all("listen")):
            yield from _made("<graphics>", element.get("socket"), None)
    for audio in root.all("devices/audio"):
        yield from _made("<audio>", audio.get("path"), None)
    words = [one.get("value") or "" for one in qemu_arguments(document) if one.name.endswith("arg")]
    for option, value in pairwise(words):
        if option in _FILE_OPTIONS:
            yield from _made(option, value, None)
        elif option in _PATH_OPTIONS:
            said = argument_properties(value)
            short = said.get("", "").partition(":")[2]  # as in -serial file:/var/log/vm.log
            path = said.get("path") or said.get("mem-path") or short
            yield from _made(option, path, said.get("append"))


def _made(owner: str, path: str | None, append: str | None) -> Iterator[MadeFile]:
    if path is not None and path.startswith("/"):
        yield MadeFile(owner, path, is_emptied=append not in ("on", "yes"))


def _makes(document: Document, name: str) -> list[str]:
    """Their paths, and those of what no path names."""
    root = document.root
    shared = (one.get("name") for one in root.all("devices/shmem") if one.child("server") is None)
    is_chosen = root.value("os/@firmware") == "efi" and root.at("os/nvram") is None
    store = [f"/var/lib/libvirt/qemu/nvram/{name}_VARS.fd"] if is_chosen else []
    store += [f"/dev/shm/{one}" for one in shared]  # noqa: S108
    return [file.path for file in made_files(document)] + store


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
