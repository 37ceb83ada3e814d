"""Recorded placements: VMs that were placed in a pool's folder, as lines of a journal. [I/O]

They count as planned VMs of their hosts until they are removed, or until a capture shows them
running.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from homenode import formats
from homenode.pool.model import Pool
from homenode.record_folder import RecordFolder
from homenode.topology import RunningDomain

PLACEMENTS = "placements.jsonl"


@dataclass(frozen=True, slots=True)
class PlacementsHead:
    """The first line."""

    about: str = "VMs that homenode pool place --record has placed"


@dataclass(frozen=True, slots=True)
class PlacementLine:
    """A VM that was placed on a host, or (vm None) one that was removed."""

    host: str
    name: str
    vm: RunningDomain | None = None


def read_placements(content: bytes, source: str) -> tuple[PlacementLine, ...]:
    """The lines. Raises InputError that names the line."""
    return formats.decode_journal(
        content, "pool-placements", PlacementsHead, PlacementLine, source
    )[1]


def placed_now(lines: Sequence[PlacementLine]) -> dict[tuple[str, str], RunningDomain]:
    """The VMs that were placed and not removed since, by host and name."""
    left: dict[tuple[str, str], RunningDomain] = {}
    for line in lines:
        if line.vm is None:
            left.pop((line.host, line.name), None)
        else:
            left[line.host, line.name] = line.vm
    return left


def with_placements(pool: Pool, lines: Sequence[PlacementLine]) -> Pool:
    """The pool with these VMs, those left out that a host runs already."""
    left = placed_now(lines)
    by_host: dict[str, list[RunningDomain]] = {}
    for (host, _), vm in left.items():
        by_host.setdefault(host, []).append(vm)
    if not by_host:
        return pool
    hosts = tuple(
        replace(
            host,
            domains=(
                *host.domains,
                *(
                    vm
                    for vm in by_host.get(host.name, ())
                    if vm.name not in {known.name for known in host.domains}
                ),
            ),
        )
        if host.name in by_host
        else host
        for host in pool.hosts
    )
    return replace(pool, hosts=hosts)


_BUSY = "no other homenode that records placements in this pool"


def record_vm(folder: Path, host: str, vm: RunningDomain) -> None:
    """The VM counts on the host from now on. Raises HostError."""
    record = _folder(folder)
    with record.locked(_BUSY, wait_s=10.0):
        if not record.has_journal:
            record.begin(formats.head_line("pool-placements", PlacementsHead()))
        record.append(formats.line(PlacementLine(host, vm.name, vm)))


def remove_vm(folder: Path, vm: str) -> tuple[str, ...]:
    """The VM counts no longer; on which hosts it did. Raises HostError, InputError."""
    record = _folder(folder)
    if not record.has_journal:
        return ()
    with record.locked(_BUSY, wait_s=10.0):
        lines = read_placements(record.journal(), str(record.journal_path))
        hosts = tuple(host for host, name in placed_now(lines) if name == vm)
        for host in hosts:
            record.append(formats.line(PlacementLine(host, vm)))
    return hosts


def _folder(folder: Path) -> RecordFolder:
    return RecordFolder(folder, private=True, journal=PLACEMENTS)
