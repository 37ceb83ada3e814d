"""homenode watch: one look at this host and its VMs, for a timer. [I/O]"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.change import journal
from homenode.change.record_folder import RecordFolder
from homenode.check.doctor.expectation_file import parse_expectation
from homenode.check.metrics import metrics
from homenode.check.watch.alert import KIND, Changes, ClaimCounts, WatchState, changes
from homenode.check.watch.observation import look
from homenode.cli.arguments.check import WatchArguments
from homenode.cli.terminal import note, print_json, say
from homenode.durable import part_name, replace_watched_file, sweep_parts
from homenode.errors import FINDINGS, HostError, InputError, of_os
from homenode.formats import decode, encode
from homenode.gap import Gap
from homenode.input_files import read_input
from homenode.machine.snapshot.live import LiveSnapshot
from homenode.vm.sources import snapshot_of

if TYPE_CHECKING:
    from homenode.check.doctor.expectation import CertifiedHost
    from homenode.machine.snapshot.protocol import Snapshot

EXPECTATION = Path("/etc/homenode/expect.toml")
_STATE = "watch.json"
_READABLE = 0o644
_OWN = ".homenode"
"""Where the file of metrics is written first: no part of it lies where the node exporter reads."""

_WAIT_S = 60.0


def watch(asked: WatchArguments) -> None:
    """Look once, and say what is new."""
    folder = _state_folder(asked.state, asked.host)
    with _alone(folder) as files:
        before = None if folder is None else _before(folder)
        seen = look(
            _snapshot(asked.host),
            _expectation(asked.expect, asked.host),
            None if asked.host else asked.connect,
            before,
        )
        now, textfile = seen.state, asked.textfile
        if textfile is not None and not textfile.parent.is_dir():
            gap = Gap(str(textfile), "its folder is not there: is the node exporter installed?")
            now, textfile = replace(now, not_read=(*now.not_read, gap)), None
        text = encode(KIND, now)
        if asked.json:
            print_json(text)
        else:
            _say(changes(before, now), now)
        # A kill between these two says an alert again, and loses none.
        try:
            if textfile is not None:
                content = metrics(now, seen.host, seen.cpu_s).encode()
                with _named(textfile, "a file to write metrics to"):
                    _write_outside(textfile, content)
        finally:  # neither file waits for the other
            if isinstance(files, HostError):
                raise files
            if files is not None:
                files.write(_STATE, text.encode())
    if now.alerts:
        raise SystemExit(FINDINGS)


@contextmanager
def _alone(folder: Path | None) -> Iterator[RecordFolder | HostError | None]:
    """The folder of the last look, for one look at a time: of two, the later knows what the earlier
    has said. What a kill left half-written there is gone.
    The error where it cannot be had: the file of metrics does not wait for it."""
    with ExitStack() as inside:
        found: RecordFolder | HostError | None = None
        if folder is not None:
            found = RecordFolder(folder, hint=lambda number: "another folder: --state DIR")
            try:
                inside.enter_context(found.locked("no other homenode watch", wait_s=_WAIT_S))
            except HostError as error:
                found = error
        yield found


def _write_outside(path: Path, content: bytes) -> None:
    """Replace a file of another program's folder by way of one of our own in it. Raises OSError."""
    own = path.parent / _OWN
    own.mkdir(mode=0o700, exist_ok=True)
    sweep_parts(own)
    replace_watched_file(path, content, _READABLE, own / part_name())
    with suppress(OSError):  # somebody's file is in it
        own.rmdir()


@contextmanager
def _named(path: Path, expected: str, hint: str | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise of_os(error, str(path), expected, hint) from None


def _snapshot(host: str | None) -> "Snapshot":
    if host is None:
        return LiveSnapshot()

    return snapshot_of(host)


def _expectation(given: Path | None, host: str | None) -> "CertifiedHost | None":
    path = given
    if path is None and host is None and EXPECTATION.exists():
        path = EXPECTATION
    if path is None:
        return None
    text = read_input(path, "a site.toml", hint="homenode watch certify -o SITE.toml")
    return parse_expectation(text.decode(errors="replace"), str(path))


def _state_folder(given: Path | None, host: str | None) -> Path | None:
    if given is None and host is not None:
        return None
    return given or journal.default_root() / "watch"


def _before(folder: Path) -> WatchState | None:
    """The last look; None where there was none or it cannot be read, which is noted."""
    path = folder / _STATE
    if not path.exists():
        return None
    try:
        found = decode(read_input(path, "the last look"), KIND, WatchState, str(path))
    except InputError as error:
        note(f"{error.message}; every alert counts as new")
        return None
    if any(len(alert.claims) != len(alert.findings) for alert in found.alerts):
        note(f"{path}: expected a claim of each finding; every alert counts as new")
        return None
    return found


def _say(found: Changes, state: WatchState) -> None:
    """What is new, a line each; below systemd with the journal's levels, and nothing else.
    Elsewhere also what was not read, each time: without it "0 alerts" says too much."""
    in_journal = bool(os.environ.get("JOURNAL_STREAM"))
    for alert, first in zip(found.raised, found.news, strict=True):
        level = "<2>" if alert.severity == "critical" else "<4>"
        others = len(alert.findings) - 1
        more = f"; {others} more of the same cause" if others else ""
        concerned = f"; VMs: {', '.join(alert.domains)}" if alert.domains else ""
        say(
            f"{level if in_journal else f'{alert.severity}: '}{first.id}: {first.subject}: "
            f"expected {first.expected}, found {first.observed}{more}{concerned}"
        )
    level = "<5>" if in_journal else ""
    for claim in found.cleared:
        say(f"{level}{claim}: cleared")
    for claim in found.stale:
        say(f"{level}{claim}: stale: {claim.reason}; the alert stands")
    for gap in found.newly_unread if in_journal else state.not_read:
        say(f"{level}not read: {gap}")
    if not in_journal:
        kept = len(state.alerts) - len(found.raised)
        say(f"{len(state.alerts)} alerts" + (f", {kept} of them known before" if kept else ""))
        claims = state.claims
        if claims == ClaimCounts():
            return
        say(f"claims: {claims.proved} proved, {claims.refuted} refuted, {claims.stale} stale")
