"""Placements: VMs that were placed in a pool and that no capture of it knows yet, as lines.

They count as planned VMs of their hosts until they are removed, or until a capture shows them
running.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from homenode import formats
from homenode.pool.model import Pool
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
