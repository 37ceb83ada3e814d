"""homenode restore: the original document of a file or a domain, exactly. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.terminal import note
from homenode.errors import UsageError


def restore(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", "-n", help="A domain: only show what would change."),
    ] = False,
) -> None:
    """Give back the original of a tuned document or domain, byte for byte.

    Refuses, and changes nothing, if the tuned one or its saved original was edited since. What has
    a slash or ends in .xml is a file, and so is what lies beside a saved original.
    """
    if _is_file(what):
        if connect is not None or forget or dry_run:
            raise UsageError(
                f"{what}: a document; --connect, --forget and --dry-run are for a domain"
            )
        from homenode.domain.restore import restore as restore_original

        restore_original(what)
        note(f"restored {what}")
        return
    from homenode.cli.apply import restore_domain
    from homenode.hypervisor.connection import DEFAULT

    restore_domain(what, connect or DEFAULT, forget=forget, dry_run=dry_run)


def _is_file(what: str) -> bool:
    if "/" in what or what.endswith(".xml"):
        return True
    try:
        return Path(f"{what}.orig").exists()
    except OSError:  # longer than the name of a file may be
        return False
