"""HostMemory: what a guest allocated on each node of its host, by two looks at the host."""

import re

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.results.model import Condition
from homenode.snapshot.protocol import Snapshot

_NODES = "/sys/devices/system/node"
_USED = re.compile(r"MemUsed:[ \t]+(\d{1,15}) kB")


def used_by_node(snapshot: Snapshot) -> dict[int, int]:
    """Bytes of each node that are in use, huge pages that are reserved included; {} where the
    kernel does not show."""
    try:
        nodes = CpuSet.parse(snapshot.read_text(f"{_NODES}/online") or "")
    except ParseError:
        return {}
    found = {}
    for node in nodes:
        used = _USED.search(snapshot.read_text(f"{_NODES}/node{node}/meminfo") or "")
        if used is not None:
            found[int(node)] = 1024 * int(used[1])
    return found


def allocated_between(before: dict[int, int], after: dict[int, int]) -> tuple[Condition, ...]:
    """In words, as a condition of a run; () where nothing is known."""
    grown = {node: after[node] - before[node] for node in after if node in before}
    if not grown:
        return ()
    words = ", ".join(f"node {node} {size / 2**30:+.1f} GiB" for node, size in grown.items())
    return (Condition("memory on the host", words),)
