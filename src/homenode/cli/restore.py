"""homenode restore: the original document of a file or a domain, exactly. [I/O]"""

from homenode.cli.apply import is_file_target, restore_domain, restore_domains
from homenode.cli.arguments.place import RestoreArguments
from homenode.cli.terminal import note, note_error, say
from homenode.errors import UsageError
from homenode.vm.domain.restore import restore as restore_original
from homenode.vm.hypervisor.connection import DEFAULT


def restore(asked: RestoreArguments) -> None:
    """Give the originals back, or list what is open."""
    targets = asked.targets
    for_a_domain = asked.connect is not None or asked.forget or asked.keep_edits or asked.dry_run
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
    if asked.forget and asked.keep_edits:
        raise UsageError("give either --forget or --keep-edits, not both")
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
    """Applies, host set-ups, retrains, set-ups of tools and trials of this user on this host."""
    from homenode.change.apply.store import journals_of_domains
    from homenode.change.host_setup.installation import setup_journal
    from homenode.change.journal import default_root
    from homenode.change.open_changes import OpenChange, open_changes
    from homenode.change.retrain.journal import retrain_journals
    from homenode.measure.layouts.journal import JournalFile, known_trials
    from homenode.measure.setup.run import setup_journals

    root = default_root()
    journals = (
        *journals_of_domains(root),
        setup_journal(root),
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
