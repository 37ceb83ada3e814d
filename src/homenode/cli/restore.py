"""homenode restore: the original document of a file or a domain, exactly. [I/O]"""

from typing import Annotated

import typer

from homenode.cli.completion import domain_names
from homenode.cli.options import is_file_target
from homenode.cli.terminal import note
from homenode.errors import UsageError


def restore(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            autocompletion=domain_names,
            help="A document that `homenode plan -o` wrote, or a domain that `homenode apply` "
            "defined.",
        ),
    ],
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
) -> None:
    """Give back the original of a tuned document or domain, byte for byte.

    Refuses, and changes nothing, if the tuned one or its saved original was edited since. A TARGET
    with a slash or ending in .xml is a file, and so is one that has a saved original.

    Examples:
      homenode restore tuned.xml
      homenode restore gpu-vm --dry-run
    """
    if is_file_target(what):
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
    from homenode.cli.apply import restore_domain
    from homenode.hypervisor.connection import DEFAULT

    restore_domain(what, connect or DEFAULT, forget=forget, keep_edits=keep_edits, dry_run=dry_run)
