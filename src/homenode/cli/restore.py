"""homenode restore: the original document of a file or a domain, exactly. [I/O]"""

from typing import Annotated

import typer

from homenode.cli.completion import domain_names
from homenode.cli.options import is_file_target
from homenode.cli.terminal import note, note_error, say
from homenode.errors import UsageError


def restore(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            autocompletion=domain_names,
            help="A document that `homenode plan -o` wrote, or a domain that `homenode apply` "
            "defined.",
        ),
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            "-c",
            metavar="URI",
            help="libvirt of the domain. Default: qemu:///system.",
        ),
    ] = None,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="A domain: keep the present definition as the original."),
    ] = False,
    keep_edits: Annotated[
        bool,
        typer.Option(
            "--keep-edits",
            help="A domain edited since: take out only what the layout set, and show the diff.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="A domain: only show what would change."),
    ] = False,
    list_open: Annotated[
        bool,
        typer.Option("--list", help="List what is open on this host, or can be undone."),
    ] = False,
) -> None:
    """Give back the original of a tuned document or domain, byte for byte.

    Refuses, and changes nothing, if the tuned one or its saved original was edited since. A TARGET
    with a slash or ending in .xml is a file, and so is one that has a saved original.

    Examples:
      homenode restore tuned.xml
      homenode restore --list
    """
    if list_open:
        if targets or connect is not None or forget or keep_edits or dry_run:
            raise UsageError("--list: expected no other argument: it lists all")
        _list_open()
        return
    if not targets:
        raise UsageError(
            "expected a document or a domain, found none", hint="homenode restore --list"
        )
    what = targets[0]
    if any(map(is_file_target, targets)):
        if len(targets) > 1:
            raise UsageError(f"expected one document, or domains, found {len(targets)} targets")
        if connect is not None or forget or keep_edits or dry_run:
            raise UsageError(
                f"{what}: a document; --connect, --forget, --keep-edits and --dry-run are for a "
                "domain"
            )
        from homenode.domain.restore import restore as restore_original

        restore_original(what)
        note(f"restored {what}")
        return
    if forget and keep_edits:
        raise UsageError("give either --forget or --keep-edits, not both")
    from homenode.cli.apply import restore_domain, restore_domains
    from homenode.hypervisor.connection import DEFAULT

    if len(targets) > 1:
        if forget:
            raise UsageError(f"--forget: expected one domain, found {len(targets)}")
        uri = connect or DEFAULT
        restore_domains(targets, uri, keep_edits=keep_edits, dry_run=dry_run)
        return
    restore_domain(what, connect or DEFAULT, forget=forget, keep_edits=keep_edits, dry_run=dry_run)


def _list_open() -> None:
    """Applies, host set-ups, retrains, set-ups of tools and trials of this user on this host."""
    from homenode.apply.store import journals_of_domains
    from homenode.change.journal import default_root
    from homenode.change.open_changes import OpenChange, open_changes
    from homenode.doctor.retrain.journal import retrain_journals
    from homenode.host_setup.installation import setup_journal
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
