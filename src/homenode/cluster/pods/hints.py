"""Hints: the NUMA nodes that each manager can serve a request from, and what they come to.

A hint is a mask of nodes and whether it is preferred: as few nodes as the request needs. The
Topology Manager looks at every combination of one hint of each resource. There are too many to go
through, but what they come to is a set of masks, which is small.

Source: pkg/kubelet/cm/topologymanager (policy.go, numa_info.go) of Kubernetes 1.36.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import Struct

SINGLE = "single-numa-node"


class Hint(Struct, frozen=True):
    """mask: None = any node does."""

    mask: int | None
    preferred: bool


ANY = Hint(None, True)
Hints = Mapping[str, Sequence[Hint] | None]
"""By resource; None: it has no node; empty: no set of nodes has it."""


class MergedHints(Struct, frozen=True):
    """What all hints come to. mask None: no node is preferred to another."""

    mask: int | None
    preferred: bool


def bits(mask: int) -> tuple[int, ...]:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def masks(nodes: Sequence[int]) -> Iterator[int]:
    """Every set of nodes, the smaller ones first."""
    for size in range(1, len(nodes) + 1):
        for chosen in combinations(nodes, size):
            yield sum(1 << node for node in chosen)


def mean_distance(distances: Mapping[int, Mapping[int, int]], mask: int) -> float:
    """Over all ordered pairs of nodes, a node and itself among them."""
    chosen = bits(mask)
    return sum(float(distances[a][b]) for a in chosen for b in chosen) / len(chosen) ** 2


def merge(
    providers: Sequence[Hints], every_node: int, policy: str, mean: Callable[[int], float] | None
) -> MergedHints:
    """The best hint, as the policy sees it. mean: distance of a mask, for prefer-closest."""
    lists = list(_lists(providers))
    if policy == SINGLE:
        lists = [[h for h in hints if h.preferred and _is_single(h)] for hints in lists]
        mean = None
    best = _best(lists, every_node, mean)
    if policy == SINGLE and best.mask == every_node:
        return MergedHints(None, best.preferred)
    return best


def _is_single(hint: Hint) -> bool:
    return hint.mask is None or hint.mask.bit_count() == 1


def _lists(providers: Sequence[Hints]) -> Iterator[Sequence[Hint]]:
    for hints in providers:
        if not hints:
            yield (ANY,)
        for listed in hints.values():
            if listed is None:
                yield (ANY,)
            else:
                yield listed or (Hint(None, False),)


def _best(
    lists: Sequence[Sequence[Hint]], every_node: int, mean: Callable[[int], float] | None
) -> MergedHints:
    def order(mask: int) -> tuple[int, float, int]:
        return (mask.bit_count(), 0.0 if mean is None else mean(mask), mask)

    if not all(lists):
        return MergedHints(every_node, False)
    preferred = _agreed(lists, every_node)
    if preferred:
        return MergedHints(min(preferred, key=order), True)
    reached = {every_node}
    for hints in lists:
        offered = {every_node if hint.mask is None else hint.mask for hint in hints}
        reached = {mask & other for mask in reached for other in offered}
    reached.discard(0)
    if not reached:
        return MergedHints(every_node, False)
    wanted = max((_fewest(hints) for hints in lists), default=0)

    def unpreferred(mask: int) -> tuple[int, int, float, int]:
        """As many nodes as the neediest resource needs; else fewer, but many; else few."""
        count = mask.bit_count()
        side = 0 if count == wanted else 1 if count < wanted else 2
        return (side, -count if side == 1 else count, *order(mask)[1:])

    return MergedHints(min(reached, key=unpreferred), False)


def _agreed(lists: Sequence[Sequence[Hint]], every_node: int) -> set[int]:
    """Masks that every resource prefers."""
    found: set[int] | None = None
    for hints in lists:
        given = {hint.mask for hint in hints if hint.preferred}
        if None in given:
            continue
        named = {mask for mask in given if mask is not None}
        found = named if found is None else found & named
    return {every_node} if found is None else {mask & every_node for mask in found}


def _fewest(hints: Sequence[Hint]) -> int:
    """Nodes of the narrowest hint; 0 where any node does."""
    return min((hint.mask.bit_count() for hint in hints if hint.mask is not None), default=0)
