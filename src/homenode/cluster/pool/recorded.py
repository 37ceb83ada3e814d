"""Recorded placements: VMs that were placed in a pool's folder, as lines of a journal. [I/O]

They count as planned VMs of their hosts until they are removed, or until a capture shows them
running.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode import formats
from homenode.change.record_folder import RecordFolder
from homenode.cluster.pool.model import Pool
from homenode.machine.topology import RunningDomain

PLACEMENTS = "placements.jsonl"


class PlacementsHead(Struct, omit_defaults=True, frozen=True):
    """The first line."""

    about: str = "VMs that homenode has placed with --record"


class PlacementLine(Struct, omit_defaults=True, frozen=True, kw_only=True):
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
    """The VMs that were placed and not removed later, by host and name."""
    left: dict[tuple[str, str], RunningDomain] = {}
    for line in lines:
        if line.vm is None:
            left.pop((line.host, line.name), None)
        else:
            left[line.host, line.name] = line.vm
    return left


def with_placements(pool: Pool, lines: Sequence[PlacementLine]) -> Pool:
    """The pool with these VMs added, except those that already run on their host."""
    by_host: dict[str, list[RunningDomain]] = {}
    for (host, _), vm in placed_now(lines).items():
        by_host.setdefault(host, []).append(vm)
    if not by_host:
        return pool
    hosts = tuple(
        replace(host, domains=_with(host.domains, by_host[host.name]))
        if host.name in by_host
        else host
        for host in pool.hosts
    )
    return replace(pool, hosts=hosts)


def _with(
    domains: tuple[RunningDomain, ...], placed: Sequence[RunningDomain]
) -> tuple[RunningDomain, ...]:
    """The domains of a host, and the placed VMs that do not run there yet. A VM that is defined but
    shut off counts as it was placed."""
    there = {vm.name for vm in domains if vm.running or vm.planned}
    more = tuple(vm for vm in placed if vm.name not in there)
    names = {vm.name for vm in more}
    return (*(vm for vm in domains if vm.name not in names), *more)


_BUSY = "no other homenode that records placements in this pool"
_BUSY_HINT = "run it again when the other has ended; pool pack may take its --time-limit"


_WAIT_S = 60.0


class PlacementRecord:
    """The record of a folder while it is locked: no other command records there meanwhile."""

    def __init__(self, record: RecordFolder) -> None:
        self._record = record
        has = record.has_journal
        lines = read_placements(record.journal(), str(record.journal_path)) if has else ()
        self._placed = placed_now(lines)

    def add(self, host: str, vm: RunningDomain) -> None:
        """Count the VM on this host from now on, and no longer where it was placed before."""
        if not self._record.has_journal:
            self._record.begin(formats.head_line("pool-placements", PlacementsHead()))
        self._record.append(formats.line(PlacementLine(host=host, name=vm.name, vm=vm)))
        self._placed[host, vm.name] = vm
        self._remove(vm.name, kept=host)

    def remove(self, vm: str) -> tuple[str, ...]:
        """Stop counting the VM. Returns the hosts on which it counted."""
        return self._remove(vm, kept=None)

    def _remove(self, vm: str, kept: str | None) -> tuple[str, ...]:
        hosts = tuple(host for host, name in self._placed if name == vm and host != kept)
        for host in hosts:
            self._record.append(formats.line(PlacementLine(host=host, name=vm)))
            del self._placed[host, vm]
        return hosts


@contextmanager
def placement_record(
    folder: Path, on_wait: Callable[[], None] = lambda: None
) -> Iterator[PlacementRecord]:
    """The folder's record, for one process at a time: a pool that is read inside has all VMs that
    other processes recorded. Raises HostError; InputError for a damaged record."""
    record = RecordFolder(folder, private=True, journal=PLACEMENTS)
    with record.locked(_BUSY, _BUSY_HINT, wait_s=_WAIT_S, on_wait=on_wait):
        yield PlacementRecord(record)
