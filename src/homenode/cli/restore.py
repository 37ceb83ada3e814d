"""homenode restore: the original document of a file or a domain, exactly. [I/O]"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.place import RestoreArguments
from homenode.cli.terminal import note, note_error, print_diff, say
from homenode.errors import UsageError
from homenode.vm.domain.restore import restore as restore_original
from homenode.vm.hypervisor.connection import DEFAULT

if TYPE_CHECKING:
    from homenode.vm.hypervisor.virsh import Virsh


def restore(asked: RestoreArguments) -> None:
    """Give the originals back, or list what is open."""
    targets = asked.targets
    of_one = asked.forget, asked.keep_edits
    for_a_domain = asked.connect is not None or asked.dry_run or any(of_one)
    if asked.list_open:
        if targets or for_a_domain:
            raise UsageError("--list: expected no other argument: it lists all")
        _list_open()
        return
    if not targets:
        raise UsageError(
            "expected a document or a domain, found none", hint="homenode restore --list"
        )
    what, uri = targets[0], asked.connect or DEFAULT
    if any(map(is_file_target, targets)):
        if len(targets) > 1:
            raise UsageError(f"expected one document, or domains, found {len(targets)} targets")
        if for_a_domain:
            raise UsageError(
                f"{what}: a document; --connect, --forget, --keep-edits and --dry-run are for a "
                "domain"
            )
        restore_original(what)
        note(f"restored {what}")
        return
    if all(of_one):
        raise UsageError("expected --forget or --keep-edits, found both")
    if len(targets) > 1:
        if asked.forget:
            raise UsageError(f"--forget: expected one domain, found {len(targets)}")
        restore_domains(targets, uri, keep_edits=asked.keep_edits, dry_run=asked.dry_run)
        return
    restore_domain(
        what,
        uri,
        forget=asked.forget,
        keep_edits=asked.keep_edits,
        dry_run=asked.dry_run,
    )


def _list_open() -> None:
    """Applies, retrains, set-ups of tools and trials of this user on this host."""
    from homenode.change.apply.store import journals_of_domains
    from homenode.change.journal import OpenChange, default_root, open_changes
    from homenode.change.paused_start import paused_journals
    from homenode.change.retrain.execution import retrain_journals
    from homenode.measure.layouts.journal import JournalFile, known_trials
    from homenode.measure.tool_setup import setup_journals

    root = default_root()
    journals = (
        *journals_of_domains(root),
        *paused_journals(root),
        *retrain_journals(),
        *setup_journals(root),
        *(JournalFile(root, known.folder.name).changes for known in known_trials(root)),
    )
    found = list(open_changes(journals))
    for one in found:
        if isinstance(one, OpenChange):
            for line in one.lines():
                say(line)
        else:
            note_error(one)
    if not found:
        note("nothing is open, and nothing can be undone")


def restore_domains(
    names: Sequence[str], connect: str, *, keep_edits: bool = False, dry_run: bool = False
) -> None:
    """Restore several, the last first. What stands against any of them is said before the first is
    changed."""
    from homenode.change.apply.definition import domain_to_restore, preview_restore
    from homenode.change.journal import default_root
    from homenode.vm.hypervisor.virsh import Virsh

    virsh, root = Virsh(connect), default_root()
    with changing_host("restore", names, connect, dry_run=dry_run):
        for name in names:
            uuid = domain_to_restore(virsh, name, root).uuid
            preview_restore(virsh, uuid, root, keep_edits=keep_edits)
        for name in reversed(names):
            restore_domain(name, connect, keep_edits=keep_edits, dry_run=dry_run)


def restore_domain(
    name: str,
    connect: str = DEFAULT,
    *,
    forget: bool = False,
    keep_edits: bool = False,
    dry_run: bool = False,
) -> None:
    """Give a domain the definition and the live pins back that it had before `homenode apply`.

    forget: keep the present definition instead, as the original from now on. keep_edits: take out
    only what the layout set, and show what that changes.
    """
    from homenode.change.apply.definition import (
        domain_to_restore,
        forget_original,
        has_original,
        preview_restore,
        restore_definition,
    )
    from homenode.change.apply.live_pins import preview_restore_live_pins, restore_live_pins
    from homenode.change.journal import default_root
    from homenode.vm.hypervisor.virsh import Virsh

    virsh = Virsh(connect)
    root = default_root()
    state = domain_to_restore(virsh, name, root)
    name, uuid = state.name, state.uuid
    if not dry_run and _ended_paused(virsh, uuid, name) and not has_original(virsh, uuid, root):
        return
    if forget:
        note(
            f"{name}: the present definition is the original now; the old one: "
            f"{forget_original(virsh, uuid, root)}"
        )
        return
    if dry_run:
        moves = preview_restore_live_pins(virsh, uuid, root)
        for pin in moves:
            thread = pin.kind if pin.kind == "emulator" else f"{pin.kind} {pin.number}"
            note(f"would move {thread} back to PUs {pin.pus}")
        if moves and not has_original(virsh, uuid, root):
            return
        would = preview_restore(virsh, uuid, root, keep_edits=keep_edits)
        print_diff(would.definition, would.original, f"{name} (now)", f"{name} (original)")
        _note_moved(would.moved)
        note(f"{name}: {'would be restored' if would.changed else 'has its original'}")
        return
    with changing_host("restore", (name,), connect):
        back = restore_live_pins(virsh, uuid, root)
        if back:
            note(f"{name}: {len(back)} threads are where they were")
        if back and not has_original(virsh, uuid, root):
            return
        done = restore_definition(virsh, uuid, root, keep_edits=keep_edits)
    if keep_edits:
        print_diff(done.before, done.given, f"{name} (before)", f"{name} (restored)")
        _note_moved(done.moved)
    if not done.changed:
        note(f"{name}: has its original definition already")
    elif done.exact or keep_edits:
        note(f"{name}: restored; what was there before: {done.replaced}")
    else:
        note(f"{name}: restored, but this libvirt prints it otherwise than the one before")


def _ended_paused(virsh: "Virsh", uuid: str, name: str) -> bool:
    """Whether a VM was there that a killed `verify --start` left paused; it is ended."""
    from homenode.change.journal import default_root
    from homenode.change.paused_start import end_paused, paused_journal
    from homenode.change.step import ChangeState

    root = default_root()
    if not paused_journal(root, virsh, uuid, name).to_undo():
        return False
    with changing_host("restore", (name,), virsh.connect):
        for one in end_paused(virsh, root, uuid, name):
            kept = one.what is ChangeState.KEPT
            note(f"{name}: {'somebody let it run: it is left alone' if kept else 'is shut off'}")
    return True


def _note_moved(moved: tuple[str, ...]) -> None:
    for device in moved:
        note(f"{device}: its address was on a bus of the layout; libvirt gives it another")


def is_file_target(name: str) -> bool:
    """Whether a TARGET is a file rather than a domain's name."""
    if "/" in name or name.endswith(".xml"):
        return True
    try:
        return Path(f"{name}.orig").exists()
    except OSError:  # longer than the name of a file may be
        return False


@contextmanager
def changing_host(
    command: str, names: Sequence[str], connect: str, *, dry_run: bool = False
) -> Iterator[None]:
    """Hold the host's lock, from the look at its state to the change: a dry run holds none.

    On a terminal, who waits for it sees who holds it.
    """
    if dry_run:
        yield
        return
    from homenode.change.host_lock import host_locked, lock_of_one_user
    from homenode.change.journal import default_root
    from homenode.wording import command_line

    def waiting(holder: str) -> None:
        if sys.stderr.isatty():
            note(f"waiting until this host is no longer changed by {holder}")

    words = command_line("homenode", command, *names)
    with host_locked(default_root(), connect, words, waiting):
        if (reason := lock_of_one_user(connect)) is not None:
            _note_once(f"change this host as one user, from one place: {reason}")
        yield


@cache
def _note_once(text: str) -> None:
    note(text)
