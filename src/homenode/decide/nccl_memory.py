"""Memory: STREAM of a machine's nodes, as the user or a publication gives it."""

from collections.abc import Iterable

from homenode.decide.evidence.model import Publication
from homenode.errors import UsageError
from homenode.nccl.explanation import Memory

MOST_GB_PER_S = 1e5
_CELLS = "pin-numa"
"""Guests whose cells have memory of their own: what STREAM shows there is the nodes' own."""


def memory_of_words(words: str, nodes: int) -> Memory:
    """ "140" of each node, or "140,150" in their order; GB/s. Raises UsageError.

    >>> memory_of_words("140", 2).bytes_per_s
    (140000000000.0, 140000000000.0)
    """
    try:
        rates = [float(word) for word in words.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate <= MOST_GB_PER_S for rate in rates):
        raise UsageError(
            f"--stream {words[:60]}: expected GB/s of a node, or of each separated by commas"
        )
    if len(rates) == 1:
        rates *= nodes
    if len(rates) != nodes:
        raise UsageError(f"--stream: expected one figure or {nodes}, found {len(rates)}")
    return Memory(tuple(rate * 1e9 for rate in rates), "--stream")


def published_memory(publications: Iterable[Publication], host: str, nodes: int) -> Memory | None:
    """A published figure of a guest with cells on this host, in equal parts. None for one node.

    Flat guests have none: published rings moved more there than STREAM did.
    """
    if nodes < 2:
        return None
    for publication in publications:
        systems = {one.name for one in publication.systems if one.host == host}
        for run in publication.runs:
            if run.head.system not in systems or run.head.switches.name != _CELLS:
                continue
            for sample in run.samples:
                if sample.metric == "memory-bandwidth":
                    source = f"{publication.title}: {run.head.system}, {_CELLS}, in equal parts"
                    return Memory((sample.value / nodes,) * nodes, source)
    return None
