"""Recorded: the VMs that were placed in a pool's folder, written before anything goes on. [I/O]"""

from pathlib import Path

from homenode.formats import head_line, line
from homenode.pool.journal import (
    PLACEMENTS,
    PlacementLine,
    PlacementsHead,
    placed_now,
    read_placements,
)
from homenode.record_folder import RecordFolder
from homenode.topology import RunningDomain

_BUSY = "no other homenode that records placements in this pool"


def record_vm(folder: Path, host: str, vm: RunningDomain) -> None:
    """The VM counts on the host from now on. Raises HostError."""
    record = _folder(folder)
    with record.locked(_BUSY, wait_s=10.0):
        if not record.has_journal:
            record.begin(head_line("pool-placements", PlacementsHead()))
        record.append(line(PlacementLine(host, vm.name, vm)))


def remove_vm(folder: Path, vm: str) -> tuple[str, ...]:
    """The VM counts no longer; on which hosts it did. Raises HostError, InputError."""
    record = _folder(folder)
    if not record.has_journal:
        return ()
    with record.locked(_BUSY, wait_s=10.0):
        lines = read_placements(record.journal(), str(record.journal_path))
        hosts = tuple(host for host, name in placed_now(lines) if name == vm)
        for host in hosts:
            record.append(line(PlacementLine(host, vm)))
    return hosts


def _folder(folder: Path) -> RecordFolder:
    return RecordFolder(folder, private=True, journal=PLACEMENTS)
