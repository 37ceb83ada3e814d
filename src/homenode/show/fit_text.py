"""FitText: who could take a VM or a pod."""

from collections.abc import Sequence

from homenode.cluster.pods.fit import Fit, given_text
from homenode.cluster.pods.pool_fit import PoolFit, names
from homenode.cpuset import CpuSet
from homenode.doc import Cell, Doc, Span, Table, Text
from homenode.plan.planner import RankedHost
from homenode.wording import nodes_text, pus_text


def rank_text(ranking: Sequence[RankedHost]) -> Doc:
    """The hosts that could take a VM, the best first: where it would lie, or why it cannot."""
    lines = tuple(
        Text((f"{number}. ", Span(one.host.name, "bold"), f": {_outcome(one)}"), indent=2)
        for number, one in enumerate(ranking, start=1)
    )
    return Doc("Hosts, the best first", lines)


def _outcome(ranked: RankedHost) -> str:
    if ranked.placement is None:
        return "no placement" if ranked.refusal is None else ranked.refusal.message
    return f"{nodes_text(ranked.placement.nodes)}; {ranked.placement.fallback}"


def fit_text(found: Fit) -> Doc:
    """What each Topology Manager policy answers to a pod; the node's own is marked."""
    rows = []
    for answer in found.answers:
        is_own = answer.policy == found.policy
        name = Cell((f"{answer.policy} (set)",), "bold") if is_own else answer.policy
        text = given_text(answer.admission, found.node, lambda cpus: pus_text(CpuSet(cpus)))
        rows.append((name, Cell((text,), "bad") if answer.admission.refusal is not None else text))
    heads = ("topologyManagerPolicy", "answer")
    return Doc("", (Table(heads=heads, rows=tuple(rows), folds=heads[-1:]),))


def pool_fit_text(found: PoolFit) -> Doc:
    """A row for each answer, with the nodes that give it."""
    rows = tuple(
        (group.answer, f"{len(group.nodes)} of {len(found.fits)}", names(group.nodes))
        for group in found.groups
    )
    heads = ("answer", "nodes", "which")
    return Doc("", (Table(heads=heads, rows=rows, folds=heads[-1:]),))
