"""homenode restore: restore the original of a file or a domain. [I/O]"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from homenode.change import journal
from homenode.change.apply.definition import (
    find_domain_to_restore,
    forget_original,
    preview_restore,
    restore_definition,
)
from homenode.change.apply.live_pins import preview_restore_live_pins, restore_live_pins
from homenode.change.journal import ChangeState, DomainStore, lock_host, lock_of_one_user
from homenode.check.verify.start import end_paused, open_paused_journal
from homenode.cli.arguments.place import RestoreArguments
from homenode.cli.terminal import (
    ask,
    check_can_ask,
    make_console,
    note,
    note_error,
    print_diff,
    say,
)
from homenode.cpuset import CpuSet
from homenode.doc import Doc, Table, Text
from homenode.errors import UsageError, exclusive
from homenode.safe.record_directory import JOURNAL
from homenode.show.explain import count_line_changes
from homenode.text import command_line, format_cpus, plural
from homenode.vm.domain.restore import preview_restore as preview_restore_file
from homenode.vm.domain.restore import restore as restore_original
from homenode.vm.hypervisor.connection import DEFAULT, DomainState
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.sources import SUFFIXES


def restore(arguments: RestoreArguments) -> None:
    """Restore the originals, or list open changes."""
    targets = arguments.targets
    if arguments.list_open:
        if targets or _is_for_a_domain(arguments) or arguments.dry_run:
            raise exclusive("--list", "another argument", "homenode restore --list")
        _list_open()
        return
    if not targets:
        raise UsageError("missing argument NAME", hint="homenode restore --list")
    if any(map(is_file_target, targets)):
        if len(targets) > 1:
            raise UsageError(f"expected one definition, or domains, found {len(targets)} targets")
        if _is_for_a_domain(arguments):
            options = "--connect, --forget or --keep-edits"
            hint = command_line("homenode", "restore", targets[0])
            if arguments.keep_edits:
                output = f"NEW{Path(targets[0]).suffix}"
                words = ("--layout", "default", "-o", output)
                hint = command_line("homenode", "plan", targets[0], *words)
            raise exclusive(targets[0], options, hint)
        _restore_file(targets[0], arguments)
        return
    for option in ("keep_edits", "dry_run", "diff", "explain") if arguments.forget else ():
        if getattr(arguments, option):
            raise exclusive("--forget", f"--{option.replace('_', '-')}")
    if arguments.forget:
        if len(targets) > 1:
            raise UsageError(f"--forget: expected one domain, found {len(targets)}")
        _forget(targets[0], arguments.connect or DEFAULT)
        return
    _restore_domains(arguments)


def _is_for_a_domain(arguments: RestoreArguments) -> bool:
    return arguments.connect is not None or arguments.forget or arguments.keep_edits


def _restore_file(path: str, arguments: RestoreArguments) -> None:
    preview = preview_restore_file(path)
    check_can_ask(asks=not (arguments.yes or arguments.dry_run))
    before = preview.current or b""
    if arguments.dry_run or not arguments.yes:
        line = f"{path}: its original would be restored: {_format_change(before, preview.original)}"
        removals = [f"{script}: would be removed" for script in preview.scripts]
        removals += [f"{script}: would stay, as it was edited" for script in preview.edited_scripts]
        make_console().print(Doc("", tuple(Text(text, hang=2) for text in (line, *removals))))
    if arguments.diff:
        print_diff(before, preview.original, f"{path} (now)", f"{path} (original)")
    if arguments.explain:
        _say_files(preview.saved.original, preview.saved.record)
    if arguments.dry_run:
        say("dry run: nothing was changed")
        return
    if not arguments.yes:
        ask(f"Restore {path}?")
    restore_original(path)
    say(f"{path}: restored, equal to its original")
    for script in preview.scripts:
        say(f"{script}: removed; remove its copy among the host's snippets as well")
    for script in preview.edited_scripts:
        say(f"{script}: stays, as it was edited since homenode wrote it")


def _say_files(original: Path, record: Path) -> None:
    say(f"original  {original}")
    say(f"record    {record}")


def _format_change(before: bytes, after: bytes) -> str:
    added, removed = count_line_changes(before, after)
    return f"{plural(added, 'line')} added, {removed} removed (all: --diff)"


def _list_open() -> None:
    """List applies, retrains, tool set-ups and trials of this user on this host."""
    from homenode.change.journal import journals_of_domains
    from homenode.change.retrain.execution import retrain_journals
    from homenode.check.verify.start import list_paused_journals
    from homenode.measure.tool_setup import setup_journals
    from homenode.measure.trial.journal import TrialJournal, list_trials

    root = journal.default_root()
    journals = (
        *journals_of_domains(root),
        *list_paused_journals(root),
        *retrain_journals(),
        *setup_journals(root),
        *(TrialJournal(root, trial.directory.name).changes for trial in list_trials(root)),
    )
    rows = []
    for change in journal.open_changes(journals):
        if isinstance(change, journal.OpenChange):
            state = "interrupted, or in progress" if change.is_cut_short else "done"
            rows.append((f"{change.subject}: {change.kind}", change.command, state, change.undo))
        else:
            note_error(change)
    table = Table(heads=("change", "by", "state", "undo"), rows=tuple(rows))
    make_console().print(Doc(f"{plural(len(rows), 'change')} can be undone", (table,)))


def _restore_domains(arguments: RestoreArguments) -> None:
    """Restore the definitions and live pins that domains had before `homenode apply`, last domain
    first. Every obstacle is reported before the question and before the first change."""
    connect, dry_run = arguments.connect or DEFAULT, arguments.dry_run
    virsh, root = Virsh(connect), journal.default_root()
    states = [find_domain_to_restore(virsh, name, root) for name in arguments.targets]
    check_can_ask(asks=not (arguments.yes or dry_run))
    with changing_host("restore", arguments.targets, connect, dry_run=dry_run):
        previews = [_list_changes(virsh, state, arguments) for state in states]
        if dry_run or not arguments.yes:
            for line in (line for preview in previews for line in preview):
                make_console().print(Doc("", (Text(line, hang=2),)))
        if dry_run:
            say("dry run: nothing was changed")
            return
        changing = [state for state, lines in zip(states, previews, strict=True) if lines]
        if changing and not arguments.yes:
            ask(f"Restore {', '.join(state.name for state in changing)}?")
        # Also those that have their original already: their record is closed.
        for state in reversed(states):
            _restore_domain(virsh, state, keep_edits=arguments.keep_edits)


def _list_changes(virsh: Virsh, state: DomainState, arguments: RestoreArguments) -> tuple[str, ...]:
    """Return the changes of a restore, a line each; () if none. Raises like a restore."""
    root, name = journal.default_root(), state.name
    if open_paused_journal(root, virsh, state.uuid, name).to_undo():
        return (f"{name}: homenode verify --start left it paused; it would be ended",)
    if pins := preview_restore_live_pins(virsh, state.uuid, root):
        cpus = format_cpus(CpuSet.union(pin.pus for pin in pins))
        return (f"{name}: {plural(len(pins), 'thread')} would move back to {cpus}",)
    preview = preview_restore(virsh, state.uuid, root, keep_edits=arguments.keep_edits)
    if not preview.is_changed:
        return ()
    if arguments.explain:
        store = DomainStore(root, virsh.connect, state.uuid)
        _say_files(store.definition_path(preview.entry.before), store.directory / JOURNAL)
    if arguments.diff:
        now, restored = f"{name} (now)", f"{name} (restored)"
        print_diff(preview.definition, preview.original, now, restored)
    for device in preview.moved:
        note(f"{device}: its address was on a bus of the layout; libvirt assigns another")
    return (
        f"{name}: homenode apply of "
        + preview.applied_at.strftime("%Y-%m-%d %H:%M would be undone")
        + (", later edits kept: " if arguments.keep_edits else ": ")
        + _format_change(preview.definition, preview.original),
    )


def _restore_domain(virsh: Virsh, state: DomainState, *, keep_edits: bool) -> None:
    root, name = journal.default_root(), state.name
    is_ended = _ended_paused(virsh, state.uuid, name)
    threads = restore_live_pins(virsh, state.uuid, root)
    if threads:
        say(f"{name}: {plural(len(threads), 'thread')} moved back; its definition is as it was")
    if is_ended or threads:
        return
    result = restore_definition(virsh, state.uuid, root, keep_edits=keep_edits)
    if not result.changed:
        say(f"{name}: has its original definition already")
    elif not result.exact and not keep_edits:
        say(f"{name}: restored; this libvirt prints it differently from the previous version")
    else:
        outcome = "without the layout" if keep_edits else "equal to its original"
        say(f"{name}: restored, {outcome}; its next start uses it")


def _forget(name: str, connect: str) -> None:
    virsh, root = Virsh(connect), journal.default_root()
    state = find_domain_to_restore(virsh, name, root)
    old = forget_original(virsh, state.uuid, root)
    say(f"{state.name}: the present definition is the original now; the old one: {old}")


def _ended_paused(virsh: Virsh, uuid: str, name: str) -> bool:
    """End a VM that a killed `verify --start` left paused; return whether there was one."""
    root = journal.default_root()
    if not open_paused_journal(root, virsh, uuid, name).to_undo():
        return False
    for entry in end_paused(virsh, root, uuid, name):
        is_kept = entry.what is ChangeState.KEPT
        say(f"{name}: {'another program resumed it: it runs on' if is_kept else 'is shut off'}")
    return True


def is_file_target(name: str) -> bool:
    """Return whether a TARGET is a file rather than a domain's name."""
    if "/" in name or name.endswith(SUFFIXES):
        return True
    try:
        return Path(f"{name}.orig").exists() or ("." in name and Path(name).is_file())
    except OSError:  # longer than the name of a file may be
        return False


@contextmanager
def changing_host(
    command: str, names: Sequence[str], connect: str, *, dry_run: bool = False
) -> Iterator[tuple[int, ...]]:
    """Hold the host's lock from reading its state to the change; a dry run takes no lock. Yield
    its descriptors. A command that waits on a terminal prints the holder."""
    if dry_run:
        yield ()
        return

    def waiting(holder: str) -> None:
        if sys.stderr.isatty():
            note(f"waiting for {holder} to finish changing this host")

    words = command_line("homenode", command, *names)
    with lock_host(journal.default_root(), connect, words, waiting) as locks:
        if (reason := lock_of_one_user(connect)) is not None:
            _note_once(f"change this host as one user, from one place: {reason}")
        yield locks


@cache
def _note_once(text: str) -> None:
    note(text)
