"""PoolFit: which nodes of a cluster admit a pod, and what the others answer."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from homenode.cluster.pods.fit import NOT_STARTED, UNANSWERED, Fit, fit_findings, requests_text
from homenode.errors import InputError
from homenode.findings import Finding, Findings, Severity, in_order
from homenode.wording import plural

MOST_NAMES = 8


class NodeGroup(Struct, frozen=True, kw_only=True):
    """Nodes with one answer. answer: for people. findings: the same for each of them."""

    answer: str
    nodes: tuple[str, ...]
    findings: tuple[Finding, ...]
    is_admitted: bool

    @property
    def is_aligned(self) -> bool:
        return self.is_admitted and not any(one.id == "pod-not-aligned" for one in self.findings)


class PoolFit(Struct, frozen=True):
    """fits: by node name, in the pool's order. groups: those that admit the pod first, larger
    groups before smaller ones."""

    fits: tuple[tuple[str, Fit], ...]
    groups: tuple[NodeGroup, ...]


def pool_fit(fits: tuple[tuple[str, Fit], ...]) -> PoolFit:
    """The answers of all nodes, grouped. Raises InputError where there is none."""
    if not fits:
        raise InputError("expected a node that can be judged, found none in the pool")
    grouped: dict[tuple[str, tuple[Finding, ...], bool], list[str]] = {}
    for name, found in fits:
        findings = fit_findings(found, "").findings
        key = _answer(found, findings), findings, _is_admitted(found)
        grouped.setdefault(key, []).append(name)
    groups = [
        NodeGroup(answer=answer, nodes=tuple(nodes), findings=findings, is_admitted=is_admitted)
        for (answer, findings, is_admitted), nodes in grouped.items()
    ]
    groups.sort(key=lambda one: (not one.is_aligned, not one.is_admitted, -len(one.nodes)))
    return PoolFit(fits, tuple(groups))


def _is_admitted(found: Fit) -> bool:
    return found.own.refusal is None and not found.lacking


def _answer(found: Fit, findings: tuple[Finding, ...]) -> str:
    if found.lacking:
        return f"pending: {'; '.join(found.lacking)}"
    if found.own.refusal is not None:
        reason = found.own.refusal.reason
        return reason if reason in (NOT_STARTED, UNANSWERED) else f"refused: {reason}"
    apart = next((one.observed for one in findings if one.id == "pod-not-aligned"), None)
    return "admitted" if apart is None else f"admitted: {apart}"


def pool_fit_findings(found: PoolFit) -> Findings:
    """The `findings` of a pool. What is wrong on some nodes names them.

    Where others admit the pod, a refusal is a warning: the scheduler does not see NUMA nodes and
    may choose the node that refuses. Nodes with too little free it does leave out.
    """
    every = len(found.fits)
    pod = found.fits[0][1].pod
    good = [name for group in found.groups if group.is_admitted for name in group.nodes]
    checked = (
        f"pod {pod.name}: {requests_text(pod)}",
        *(
            f"{group.answer}: {len(group.nodes)} of {plural(every, 'node')}: {names(group.nodes)}"
            for group in found.groups
        ),
    )
    nodes_of: dict[Finding, list[str]] = {}
    for group in found.groups:
        for one in group.findings:
            nodes_of.setdefault(one, []).extend(group.nodes)
    return Findings(checked=checked, findings=in_order(_findings(nodes_of, every, good)))


def _findings(nodes_of: dict[Finding, list[str]], every: int, good: list[str]) -> Iterator[Finding]:
    for one, nodes in nodes_of.items():
        subject, severity, fix = one.subject, one.severity, one.fix
        if len(nodes) < every:
            subject += f", {len(nodes)} of {plural(every, 'node')}: {names(nodes)}"
        if good and one.id == "pod-pending":
            severity = Severity.INFO
        if good and one.id == "pod-refused":
            severity = Severity.WARNING
            instead = (
                "the scheduler may choose these nodes: keep the pod off them with nodeAffinity "
                f"for {names(good)}"
            )
            fix = instead if fix is None else f"{instead}; {fix}"
        yield replace(one, subject=subject, severity=severity, fix=fix)


def names(nodes: tuple[str, ...] | list[str]) -> str:
    """The first few names.

    >>> names(["a", "b"])
    'a, b'
    """
    more = len(nodes) - MOST_NAMES
    return ", ".join(nodes[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
