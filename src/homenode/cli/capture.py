"""homenode capture: a snapshot of a host, to keep or to send. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.terminal import note, working
from homenode.units import format_bytes


def capture(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The archive to write (tar.gz)."),
    ],
    ssh: Annotated[
        str | None,
        typer.Option(
            "--ssh", metavar="HOST", help="Capture this host over ssh; nothing is installed there."
        ),
    ] = None,
    no_redact: Annotated[
        bool,
        typer.Option("--no-redact", help="Keep serials, UUIDs, MACs, host and user names."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Overwrite an existing FILE.")
    ] = False,
) -> None:
    """Write a snapshot of this machine (or of HOST), redacted, as one archive.

    The archive holds what discovery reads: /sys topology, the PCI tree, settings, and the output of
    lspci, nvidia-smi, rocm-smi, amd-smi and virsh where they are installed. Give it to --host, or
    send it with a bug report.

    Examples:
      homenode capture -o host.tar.gz
      homenode capture --ssh root@gpu7 -o gpu7.tar.gz
    """
    from homenode.snapshot.capture import capture_host

    with working(f"reading {ssh or 'this machine'}"):
        captured = capture_host(output, ssh, redacted=not no_redact, overwrite=force)
    manifest = captured.manifest
    note(
        f"wrote {captured.path} ({format_bytes(captured.size_bytes)}): {manifest.files} files, "
        f"{manifest.links} links, tools: {', '.join(manifest.commands) or 'none'}"
    )
    for path, reason in manifest.left_out:
        note(f"  left out {path}: {reason}")
    note(
        "redacted: serials, UUIDs, MACs, addresses, host, user and domain names"
        if manifest.redacted
        else "NOT redacted: do not publish it"
    )
    for what in manifest.not_everywhere:
        note(
            f"the {what} is a short or common word and may remain in some files: check the archive "
            "before you publish it"
        )
