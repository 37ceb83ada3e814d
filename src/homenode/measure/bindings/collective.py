"""Study collective: all-reduce on each node, on each pair of neighbours in a ring, and on all.

A node that is slow alone is slow itself. Of nodes that are fine alone, a pair that is slow has a
slow link; where both pairs of a node are slow, it is that node's side of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.measure.bindings.evidence import gpu_hours
from homenode.measure.step_reading import REPLAYED_LINE
from homenode.tools import nccl_tests


@dataclass(frozen=True, slots=True)
class Collective:
    """Peaks of bus bandwidth, in bytes/s. nodes: alone. pairs: (a, b). all: None where not run.

    gpu_hours: of the job that measured them; None where it does not say.
    """

    nodes: tuple[tuple[str, float], ...]
    pairs: tuple[tuple[str, str, float], ...]
    all: float | None
    replayed: str | None
    gaps: tuple[Gap, ...]
    gpu_hours: float | None = None


def collective_of(texts: Mapping[str, str], gpus: int = 0) -> Collective:
    """The peaks of a job's files: node-A.txt, pair-A+B.txt, all.txt. gpus: that it had."""
    nodes: list[tuple[str, float]] = []
    pairs: list[tuple[str, str, float]] = []
    whole: float | None = None
    gaps: list[Gap] = []
    replayed: str | None = None
    for name, text in sorted(texts.items()):
        kind, _, rest = name.removesuffix(".txt").partition("-")
        if not name.endswith(".txt") or kind not in ("node", "pair", "all"):
            if name.endswith(".err"):
                gaps.append(Gap(f"all-reduce {name.removesuffix('.err')}", text.strip()[:200]))
            continue
        said = REPLAYED_LINE.search(text)
        replayed = said[1].strip() if said else replayed
        try:
            peak = nccl_tests.parse(text).peak_bus_bytes_per_s()
        except (ParseError, ValueError) as error:
            gaps.append(Gap(f"all-reduce {rest or 'all'}", str(error)[:200]))
            continue
        a, is_pair, b = rest.partition("+")
        if kind == "node":
            nodes.append((rest, peak))
        elif kind == "pair" and is_pair:
            pairs.append((a, b, peak))
        else:
            whole = peak
    return Collective(
        tuple(nodes), tuple(pairs), whole, replayed, tuple(gaps), gpu_hours(texts, gpus)
    )
