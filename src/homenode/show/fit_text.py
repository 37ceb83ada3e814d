"""FitText: who could take a VM or a pod."""

from collections.abc import Sequence

from homenode.doc import Doc, Span, Text
from homenode.plan.planner import RankedHost
from homenode.text import nodes_text


def rank_text(name: str, ranking: Sequence[RankedHost]) -> Doc:
    """Which host takes a VM of this name best; then all, the best first: where it would lie, or why
    it cannot."""
    best, count = ranking[0], len(ranking)
    title = f"{name} fits best on {best.host.name}, of {count} hosts"
    if best.placement is None:
        title = f"{name} fits on none of {count} hosts"
    lines = tuple(
        Text((f"{number}. ", Span(fit.host.name, "bold"), f": {_outcome(fit)}"), indent=2)
        for number, fit in enumerate(ranking, start=1)
    )
    return Doc(title, lines)


def _outcome(ranked: RankedHost) -> str:
    if ranked.placement is None:
        return "no placement" if ranked.refusal is None else ranked.refusal.message
    return f"{nodes_text(ranked.placement.nodes)}; {ranked.placement.fallback}"
