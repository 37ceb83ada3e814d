"""XAPI's planner of nodes, restated from its rules for comparison with ours.

Rules, not code, of xapi-project/xen-api, ocaml/xenopsd/lib/topology.ml and softaffinity.ml: all
sets of nodes (of up to 16) by their worst and then their mean distance; the first that together
has memory, CPUs and (best effort) cores; of those with the same mean distance the one whose nodes
have been used least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_NODES_FOR_SETS = 16
_SAME_MEAN = 1e-3
_UNREACHABLE = 255


@dataclass(frozen=True)
class XapiNode:
    """What is free on a node."""

    cores: int
    pus: int
    memory_bytes: int
    used: int = 0  # how many VMs were placed there before


def xapi_nodes(
    distances: Sequence[Sequence[int]],
    nodes: Sequence[XapiNode],
    *,
    vcpus: int,
    memory_bytes: int,
    best_effort: bool = True,
) -> tuple[int, ...] | None:
    """The nodes of one VM; None where XAPI would let it float over the whole host.

    best_effort: as many cores as vCPUs; else only memory and CPUs count (prio_mem_only).
    """
    valid = [node for node in range(len(nodes)) if distances[node][node] < _UNREACHABLE]
    most = len(valid) if len(valid) <= MOST_NODES_FOR_SETS else 1
    candidates = []
    for count in range(1, most + 1):
        for chosen in combinations(valid, count):
            rows = [distances[a][b] for a in chosen for b in chosen]
            if max(rows) < _UNREACHABLE:
                candidates.append((max(rows), sum(rows) / len(rows), chosen))
    candidates.sort(key=lambda candidate: candidate[:2])
    fitting = [
        (mean, chosen)
        for _, mean, chosen in candidates
        if sum(nodes[node].memory_bytes for node in chosen) >= memory_bytes
        and sum(nodes[node].pus for node in chosen) >= vcpus
        and (not best_effort or sum(nodes[node].cores for node in chosen) >= vcpus)
    ]
    if not fitting:
        return None
    same = [chosen for mean, chosen in fitting if abs(mean - fitting[0][0]) < _SAME_MEAN]
    return min(same, key=lambda chosen: (sum(nodes[n].used for n in chosen), chosen[::-1]))
