"""homenode capture: a snapshot of a host, to keep or to send. [I/O]"""

from homenode.cli.arguments.place import CaptureArguments
from homenode.cli.terminal import note, working
from homenode.machine.snapshot.capture import capture_host
from homenode.units import format_bytes


def capture(asked: CaptureArguments) -> None:
    """Write the snapshot, and say what is in it."""
    with working(f"reading {asked.ssh or 'this machine'}"):
        captured = capture_host(
            asked.output, asked.ssh, redacted=not asked.no_redact, overwrite=asked.force
        )
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
