"""Capture: a host's snapshot as one archive, this machine's or another's over ssh. [I/O]"""

import gzip
import io
import re
import tarfile

from msgspec import Struct

from homenode import __version__
from homenode.errors import HostError, UsageError
from homenode.machine.snapshot.collector import build_collector_script, parse_collected
from homenode.machine.snapshot.gather import (
    MANIFEST,
    Manifest,
    encode_manifest,
    gather,
)
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.snapshot.redact import Identities, read_identities, redact
from homenode.process import CLOSED, run
from homenode.safe.durable import PRIVATE
from homenode.text import command_line

TOP = "snapshot"
"""The directory at the top of an archive, so that unpacking one leaves no mess."""

SSH_TIMEOUT_S = 600.0
"""Time limit of a capture over ssh, including the typing of a password."""

# Also user@host, ssh://user@host:22, fe80::1%eth0. ssh_config may hand the name to a shell.
_HOST = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9_.:@%/\[\]+-]{0,255}", re.ASCII)


class CaptureArchive(Struct, frozen=True):
    content: bytes
    manifest: Manifest

    @property
    def mode(self) -> int:
        """Permissions of its file: an unredacted archive is only for its owner."""
        return 0o644 if self.manifest.redacted else PRIVATE


def capture_host(ssh: str | None = None, *, redacted: bool = True) -> CaptureArchive:
    """Capture this machine, or the host `ssh`. Raises UsageError for an invalid host name,
    HostError if the host cannot be reached."""
    if ssh is None:
        return capture(LiveSnapshot(), redacted=redacted)
    also = Identities(hosts=(_host_part(ssh),), users=_user_part(ssh))
    return capture(collect_over_ssh(ssh), redacted=redacted, also=also)


def capture(
    snapshot: Snapshot, *, redacted: bool = True, also: Identities | None = None
) -> CaptureArchive:
    """Archive the contents table's part of a snapshot. Equal hosts produce equal bytes. also: names
    to redact in addition to those in the snapshot."""
    gathered = gather(snapshot)
    notes = tuple((path, "not of its form") for path in gathered.unlike)
    if isinstance(snapshot, LiveSnapshot):
        notes += tuple(sorted(snapshot.failures.items()))
    stored = gathered.snapshot
    not_everywhere: tuple[str, ...] = ()
    if redacted:
        result = redact(stored, read_identities(snapshot, also), notes)
        stored, notes, not_everywhere = result.snapshot, result.omitted, result.not_everywhere
    manifest = Manifest(
        homenode=__version__,
        redacted=redacted,
        files=len(stored.files),
        links=len(stored.links),
        commands=tuple(sorted(stored.commands)),
        absent=(*gathered.absent, *gathered.commands_absent),
        omitted=notes,
        not_everywhere=not_everywhere,
    )
    return CaptureArchive(_pack(stored, manifest), manifest)


def collect_over_ssh(
    host: str, timeout_s: float = SSH_TIMEOUT_S, *, batch: bool = False
) -> MemorySnapshot:
    """Return the collector's output on a host, unredacted. Nothing is written on the host.

    ssh prompts for passwords and unknown keys on the terminal as usual; with `batch`, for many
    hosts at once, it fails instead. Raises UsageError for a name that is not a host's, HostError if
    ssh or the shell there fails, ParseError if the output is not a collector's.
    """
    if not _HOST.fullmatch(host):
        raise UsageError(f"{host[:80]!r} is not a host name", hint="HOST or USER@HOST, as for ssh")
    asking = ("-o", "BatchMode=yes") if batch else ()
    result = run(
        ["ssh", *CLOSED, *asking, "-o", "ConnectTimeout=20", "--", host, "sh"],
        timeout_s,
        build_collector_script(),
        on_terminal=not batch,
    )
    failure = result.failure()
    if failure is not None:
        raise HostError(f"{host}: {failure}", hint=command_line("ssh", host, "true"))
    return parse_collected(result.stdout, host)


def _host_part(ssh: str) -> str:
    """Return gpu7 of root@gpu7, ssh://root@gpu7:22 or gpu7."""
    host = ssh.removeprefix("ssh://").rpartition("@")[2].partition("/")[0]
    return re.sub(r":\d+$", "", host) if ssh.startswith("ssh://") else host


def _user_part(ssh: str) -> tuple[str, ...]:
    user, at, _ = ssh.removeprefix("ssh://").rpartition("@")
    return (user,) if at else ()


def _pack(snapshot: MemorySnapshot, manifest: Manifest) -> bytes:
    """Return a tar.gz with sorted names and neither times nor owners."""
    files = {path.lstrip("/"): text for path, text in snapshot.files.items()}
    files |= {f"commands/{name}": text for name, text in snapshot.commands.items()}
    files[MANIFEST] = encode_manifest(manifest)
    links = {path.lstrip("/"): target for path, target in snapshot.links.items()}
    # Other directories are implied by their files.
    directories = {path.lstrip("/") for path in snapshot.directories if not snapshot.list(path)}
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(files.keys() | links.keys() | directories):
            member = tarfile.TarInfo(f"{TOP}/{path}")
            if path in files:
                content = files[path].encode("utf-8", "surrogateescape")
                member.mode = 0o644
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
                continue
            member.mode = 0o755
            member.type = tarfile.SYMTYPE if path in links else tarfile.DIRTYPE
            member.linkname = links.get(path, "")
            tar.addfile(member)
    return buffer.getvalue()
