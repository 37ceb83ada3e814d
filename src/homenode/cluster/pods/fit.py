"""Fit: whether a pod is admitted to a node, why not, and the smallest change that is admitted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from homenode.catalogue import finding
from homenode.cluster.pods.admission import (
    SMT_ALIGNMENT,
    TOPOLOGY_AFFINITY,
    Admission,
    AdmissionRefusal,
    Held,
    admit,
)
from homenode.cluster.pods.hints import Hints, bits
from homenode.cluster.pods.node import KubeletPolicies, Node
from homenode.cluster.pods.pod import MEMORY, Container, Pod
from homenode.findings import Finding, Findings, in_order
from homenode.gap import Gap
from homenode.units import format_bytes
from homenode.wording import plural

POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
_TOPOLOGY = "Kubernetes, Topology Manager"
_CPU = "Kubernetes, CPU Manager"
MOST_NODES = 10
"""Sets of nodes are gone through one by one, here as in the kubelet."""
LEAST_OPTION = 8
"""Of max-allowable-numa-nodes; also its default."""
_MOST_MOVED = 48
"""Running pods of which one is tried; half as many in pairs."""
NOT_STARTED = "the kubelet does not start"
UNANSWERED = "not known"


class KubeletAnswer(Struct, frozen=True):
    """What one Topology Manager policy answers."""

    policy: str
    admission: Admission


class PodChange(Struct, frozen=True, kw_only=True):
    """What would be admitted. text: for people."""

    text: str
    pod: Pod
    node: Node


class Fit(Struct, frozen=True, kw_only=True):
    """policy: the one that the kubelet has. answers: of every policy, in the order of POLICIES.
    change: the smallest change of the pod, setting: of the kubelet, that is admitted; None where
    there is none, or none is needed."""

    pod: Pod
    node: Node
    policy: str
    answers: tuple[KubeletAnswer, ...]
    lacking: tuple[str, ...]
    change: PodChange | None
    setting: PodChange | None
    gaps: tuple[Gap, ...] = ()
    moves: tuple[str, ...] = ()
    """UIDs of the fewest running pods with whose place it is admitted."""

    @property
    def own(self) -> Admission:
        return next(a.admission for a in self.answers if a.policy == self.policy)


def fit(pod: Pod, node: Node, gaps: tuple[Gap, ...] = ()) -> Fit:
    """What the kubelet of a node answers to a pod."""
    policy = node.policies.topology_policy
    answers = tuple(
        KubeletAnswer(name, answer(pod, _with(node, topology_policy=name))) for name in POLICIES
    )
    lacking = tuple(_lacking(pod, node))
    own = next(a.admission for a in answers if a.policy == policy)
    change = setting = None
    is_answered = own.refusal is None or own.refusal.reason not in (NOT_STARTED, UNANSWERED)
    if is_answered and (own.refusal is not None or lacking):
        change = _smallest_change(pod, node)
    elif is_answered and any(_apart(own)):
        change = _smallest_change(pod, node, aligned=True)
    if is_answered and own.refusal is not None and not lacking:
        setting = _smallest_setting(pod, node)
    return Fit(
        pod=pod,
        node=node,
        policy=policy,
        answers=answers,
        lacking=lacking,
        change=change,
        setting=setting,
        gaps=gaps,
    )


def with_moves(
    found: Fit, running: Sequence[str], node_without: Callable[[frozenset[str]], Node]
) -> Fit:
    """With one or two running pods to move, where it was refused. running: UIDs, the cheapest
    first. node_without: the node as it is when pods are gone."""
    if found.own.refusal is None and not found.lacking:
        return found
    tried = (c for n in (1, 2) for c in combinations(running[: _MOST_MOVED // n], n))
    moves = next((c for c in tried if _is_admitted(found.pod, node_without(frozenset(c)))), ())
    return replace(found, moves=moves)


def answer(pod: Pod, node: Node, held: Held | None = None) -> Admission:
    """What the kubelet answers, where that can be said. held: as for `admit`."""
    nodes, searched = len(node.numa_nodes), _searched_nodes(node)
    if any(one.id == "numa-nodes-many" for one in kubelet_findings(node.policies, nodes)):
        return Admission(
            refusal=AdmissionRefusal(
                reason=NOT_STARTED, detail=f"{nodes} NUMA nodes", container=None, hints=()
            ),
            given=(),
            node=node,
        )
    if searched > MOST_NODES:
        return Admission(
            refusal=AdmissionRefusal(
                reason=UNANSWERED, detail=f"2^{searched} sets of nodes", container=None, hints=()
            ),
            given=(),
            node=node,
        )
    return admit(pod, node, held)


def _searched_nodes(node: Node) -> int:
    """The most nodes whose every set a manager goes through: those with memory that it aligns,
    those with CPUs, those with devices of one resource."""
    policies = node.policies
    counts = [0]
    if policies.memory_policy == "Static":
        counts.append(len(node.numa_nodes))
    if policies.topology_policy != "none":
        if policies.cpu_policy == "static":
            counts.append(len(node.cpus.nodes))
        counts += [len({n for on in of.values() for n in on}) for of in node.devices.values()]
    return max(counts)


def _with(node: Node, **changes: object) -> Node:
    policies: KubeletPolicies = replace(node.policies, **changes)
    return replace(node, policies=policies)


def _lacking(pod: Pod, node: Node) -> Iterator[str]:
    """What the scheduler finds missing, whatever the NUMA nodes: the pod stays Pending."""
    free = len(node.available_cpus)
    if node.policies.cpu_policy == "static" and pod.cpu_milli > 1000 * free:
        yield f"cpu: {pod.cpu_milli / 1000:g} requested, {free} free"
    for name, count in pod.devices.items():
        if name in node.devices and count > len(node.available_devices(name)):
            yield f"{name}: {count} requested, {len(node.available_devices(name))} free"
    for name, size in pod.memory_bytes.items():
        tables = [of.tables[name].free for of in node.memory.values() if name in of.tables]
        known = bool(sum(of.tables["memory"].allocatable for of in node.memory.values()))
        if known and size > sum(tables):
            yield f"{name}: {format_bytes(size)} requested, {format_bytes(sum(tables))} free"


def _is_admitted(pod: Pod, node: Node, *, aligned: bool = False) -> bool:
    given = admit(pod, node)
    fits = given.refusal is None and not any(_lacking(pod, node))
    return fits and not (aligned and any(_apart(given)))


def _smallest_change(pod: Pod, node: Node, *, aligned: bool = False) -> PodChange | None:
    """The change of one request of one container that loses the least of it. aligned: CPUs come
    from the nodes of the devices, then."""
    best: tuple[float, PodChange] | None = None
    for i, container in enumerate(pod.containers):
        for loss, text, changed in _changes(container, node):
            if best is not None and loss >= best[0]:
                break
            containers = (*pod.containers[:i], changed, *pod.containers[i + 1 :])
            other = replace(pod, containers=containers)
            if _is_admitted(other, node, aligned=aligned):
                best = (loss, PodChange(text=f"{container.name}: {text}", pod=other, node=node))
                break
    return None if best is None else best[1]


def _changes(container: Container, node: Node) -> Iterator[tuple[float, str, Container]]:
    """Changes of one request, the smallest share of it first, more or less alike: CPUs for whole
    cores, or for as many nodes as the devices need, are more."""
    found: list[tuple[float, str, Container]] = []
    cpus = container.cpu_milli // 1000
    if cpus and not container.cpu_milli % 1000:
        fewer_cpus = range(min(cpus - 1, len(node.cpus.places)), 0, -1)
        for count in (*_more_cpus(cpus, node), *fewer_cpus):
            changed = replace(container, cpu_milli=1000 * count)
            found.append((abs(count - cpus) / cpus, f"cpu {cpus} to {count}", changed))
    for name, count in container.devices.items():
        there = len(node.available_devices(name)) if name in node.devices else 0
        for fewer in range(min(count - 1, there), -1, -1):
            devices = {**container.devices, name: fewer}
            if not fewer:
                del devices[name]
            changed = replace(container, devices=devices)
            found.append(((count - fewer) / count, f"{name} {count} to {fewer}", changed))
    for name, size in container.memory_bytes.items():
        for fewer in _sizes(name, size, node):
            text = f"{name} {format_bytes(size)} to {format_bytes(fewer)}"
            changed = replace(container, memory_bytes={**container.memory_bytes, name: fewer})
            found.append(((size - fewer) / size, text, changed))
    yield from sorted(found, key=lambda change: change[0])


def _more_cpus(cpus: int, node: Node) -> set[int]:
    """Up to whole cores, and to the fewest CPUs that need one, two, three nodes and so on."""
    per_core = node.cpus.cpus_per_core or 1
    sizes = sorted((len(node.cpus.cpus("node", n)) for n in node.cpus.nodes), reverse=True)
    found = {-(-cpus // per_core) * per_core}
    found |= {sum(sizes[: i + 1]) + per_core for i in range(len(sizes) - 1)}
    return {count for count in found if count > cpus}


def _sizes(name: str, size: int, node: Node) -> Iterator[int]:
    """What is free on each number of nodes, the most first."""
    free = sorted(
        (of.tables[name].free for of in node.memory.values() if name in of.tables), reverse=True
    )
    for count in range(len(free), 0, -1):
        fits = sum(free[:count])
        if 0 < fits < size:
            yield fits


def _smallest_setting(pod: Pod, node: Node) -> PodChange | None:
    """The setting of the kubelet that admits the pod, those that align more first."""
    policies = node.policies
    other = "container" if policies.scope == "pod" else "pod"
    stricter = POLICIES.index(policies.topology_policy)
    candidates: list[tuple[str, Mapping[str, object]]] = []
    if policies.topology_policy != "none":
        candidates.append((f"topologyManagerScope: {other}", {"scope": other}))
    candidates += [
        (f"topologyManagerPolicy: {name}", {"topology_policy": name})
        for name in reversed(POLICIES[:stricter])
    ]
    if policies.assignment.full_pcpus_only:
        loose = replace(policies.assignment, full_pcpus_only=False)
        candidates.append(('full-pcpus-only: "false"', {"assignment": loose}))
    for text, changes in candidates:
        changed = _with(node, **changes)
        if _is_admitted(pod, changed):
            return PodChange(text=text, pod=pod, node=changed)
    return None


# Findings


def fit_findings(found: Fit, host_name: str) -> Findings:
    """The `findings` of a fit."""
    policies = found.node.policies
    checked: tuple[str, ...] = (
        f"pod {found.pod.name}: {requests_text(found.pod)}",
        f"node {host_name}: {plural(len(found.node.numa_nodes), 'NUMA node')}, "
        f"{len(found.node.available_cpus)} CPUs free",
        f"kubelet: topologyManagerPolicy {policies.topology_policy} (scope {policies.scope}), "
        f"cpuManagerPolicy {policies.cpu_policy}, memoryManagerPolicy {policies.memory_policy}",
    )
    if found.pod.claimed:
        at = (f"{name} on node {'unknown' if n is None else n}" for name, n in found.pod.claimed)
        checked += (f"resource claims: {', '.join(at)}",)
    return Findings(checked=checked, findings=in_order(_findings(found)))


def kubelet_findings(policies: KubeletPolicies, nodes: int) -> Iterator[Finding]:
    """Settings with which the kubelet of a machine with so many NUMA nodes does not start."""
    if policies.cpu_policy == "static" and not (
        policies.reserved_cpus or policies.reserved_cpu_count
    ):
        yield finding(
            "no-cpu-reserved",
            "kubelet reservedSystemCPUs",
            expected="some CPU reserved next to the static policy",
            observed=f"none: {NOT_STARTED}",
            source=_CPU,
        )
    if policies.topology_policy == "none":
        return
    if policies.most_nodes < LEAST_OPTION:
        yield finding(
            "numa-nodes-many",
            "kubelet max-allowable-numa-nodes",
            expected=f"{LEAST_OPTION} or more",
            observed=f"{policies.most_nodes}: {NOT_STARTED}",
            source=_TOPOLOGY,
        )
    elif nodes > policies.most_nodes:
        yield finding(
            "numa-nodes-many",
            f"{nodes} NUMA nodes",
            expected=f"at most {policies.most_nodes} next to topologyManagerPolicy "
            f"{policies.topology_policy}",
            observed=f"{nodes}: {NOT_STARTED}",
            case="of the node",
            values={"nodes": nodes},
            source=_TOPOLOGY,
        )


def _findings(found: Fit) -> Iterator[Finding]:
    pod, own = found.pod, found.own
    subject = f"pod {pod.name}"
    fix = _fix(found)
    yield from kubelet_findings(found.node.policies, len(found.node.numa_nodes))
    if found.lacking:
        yield finding(
            "pod-pending",
            subject,
            expected="no more than the node has free",
            observed="; ".join(found.lacking),
            fix=fix,
            source="Kubernetes scheduler, NodeResourcesFit",
        )
    elif own.refusal is not None and own.refusal.reason == UNANSWERED:
        yield finding(
            "numa-nodes-unsearchable",
            subject,
            expected=f"at most {MOST_NODES} NUMA nodes of which every set is looked at",
            observed=f"{own.refusal.detail}: the kubelet goes through all of them for each pod, "
            "seconds at 2^20, hours at 2^36",
            source="Kubernetes, Memory and Topology Manager",
        )
    elif own.refusal is not None and own.refusal.reason != NOT_STARTED:
        refusal = own.refusal
        where = subject + ("" if refusal.container is None else f", container {refusal.container}")
        expected = {
            TOPOLOGY_AFFINITY: f"a set of NUMA nodes that every manager prefers, as "
            f"{found.policy} wants",
            SMT_ALIGNMENT: "whole cores, as full-pcpus-only wants",
        }.get(refusal.reason, "CPUs, memory and devices that can be allocated")
        why = refusal.detail or why_not(refusal.hints, found.policy)
        yield finding(
            "pod-refused",
            where,
            expected=expected,
            observed=f"{refusal.reason}: {why}",
            fix=fix,
            source=_TOPOLOGY,
        )
    yield from _unaligned(found)
    if pod.claims and not pod.claimed:
        yield finding(
            "pod-claims-not-judged",
            subject,
            expected="devices that its requests name",
            observed=f"resource claims {', '.join(pod.claims)}: which devices they get, and on "
            "which nodes, is the scheduler's to say and was not judged",
            source="Kubernetes, Dynamic Resource Allocation",
        )
    if not pod.is_guaranteed:
        yield finding(
            "pod-not-guaranteed",
            subject,
            expected="limits of CPU and memory that equal the requests, in every container",
            observed="quality of service below Guaranteed: CPUs are shared and memory is not "
            "aligned",
            source=_CPU,
        )
    elif any(c.cpu_milli and not pod.cpus_of(c) for c in pod.containers if c.devices):
        yield finding(
            "cpus-not-whole",
            subject,
            expected="a whole number of CPUs",
            observed="a fraction: the container shares CPUs of any node",
            source=_CPU,
        )
    if pod.pod_level:
        yield finding(
            "pod-level-resources",
            f"{subject}, spec.resources",
            expected="resources of containers",
            observed="resources of the pod as a whole: the managers of "
            "Kubernetes up to 1.35 align none of it, later ones do",
            source="KEP-5526",
        )
    for gap in found.gaps:
        yield finding(
            "pod-unknown",
            gap.subject,
            expected="known",
            observed=gap.reason,
            source="the host's source",
        )


def _fix(found: Fit) -> str | None:
    parts = [
        text
        for text in (
            None if found.change is None else f"smallest change of the pod: {found.change.text}",
            None if found.setting is None else f"of the kubelet: {found.setting.text}",
            f"or move pod {' and '.join(found.moves)}" if found.moves else None,
        )
        if text is not None
    ]
    return "; ".join(parts) or None


def _apart(admission: Admission) -> Iterator[tuple[str, set[int], set[int]]]:
    """Containers with devices of nodes that none of their CPUs is of: name, nodes of CPUs, nodes of
    devices."""
    node = admission.node
    for given in admission.given:
        of_cpus = {node.cpus.places[cpu].node for cpu in given.cpus}
        of_devices = {
            n
            for resource, names in given.devices.items()
            for name in names
            for n in node.devices[resource][name]
        }
        if of_devices and of_cpus and not of_devices <= of_cpus:
            yield given.name, of_cpus, of_devices


def _unaligned(found: Fit) -> Iterator[Finding]:
    """Admitted, and yet on several nodes where one would do."""
    apart = [(f"container {name}", cpus, devices) for name, cpus, devices in _apart(found.own)]
    places = found.own.node.cpus.places
    cpus = {places[cpu].node for given in found.own.given for cpu in given.cpus}
    claimed = {node for _, node in found.pod.claimed if node is not None}
    if cpus and not claimed <= cpus:
        apart.append(("resource claims", cpus, claimed))
    for what, of_cpus, of_devices in apart:
        yield finding(
            "pod-not-aligned",
            f"pod {found.pod.name}, {what}",
            expected="CPUs on the NUMA nodes of its devices",
            observed=f"CPUs on node {_listed(of_cpus)}, devices on node {_listed(of_devices)}",
            fix=_fix(found),
            source=_TOPOLOGY,
        )


def why_not(hints: Sequence[Hints], policy: str) -> str:
    """Of each resource: the sets of nodes that could serve it, and which of them it prefers."""
    parts = []
    for manager in hints:
        for resource, listed in manager.items():
            if listed is None:
                continue
            sets = [hint.mask for hint in listed if hint.mask is not None]
            preferred = [hint.mask for hint in listed if hint.preferred and hint.mask is not None]
            if not sets:
                parts.append(f"{resource}: no set of nodes has enough")
            elif not preferred:
                least = min(mask.bit_count() for mask in sets)
                narrow = [mask for mask in sets if mask.bit_count() == least]
                parts.append(
                    f"{resource}: fits on fewer nodes when they are empty, now needs {least}: "
                    f"{_sets(narrow)}"
                )
            else:
                parts.append(f"{resource}: {_sets(preferred)}")
    if policy == "single-numa-node":
        return "; ".join(parts) + "; expected one node for all"
    return "; ".join(parts) + "; expected one set of nodes for all"


def _sets(masks: Sequence[int]) -> str:
    texts = [_listed(bits(mask)) for mask in masks[:6]]
    more = f" and {len(masks) - 6} more" if len(masks) > 6 else ""
    return ("node " + " or ".join(texts) + more) if texts else "none"


def _listed(nodes: Sequence[int] | set[int]) -> str:
    return "+".join(map(str, sorted(nodes)))


def requests_text(pod: Pod) -> str:
    """What all containers that stay request together."""
    parts = [f"cpu {pod.cpu_milli / 1000:g}"]
    parts += [f"{name} {format_bytes(size)}" for name, size in pod.memory_bytes.items()]
    parts += [f"{name} {count}" for name, count in pod.devices.items()]
    return ", ".join(parts)


def given_text(admission: Admission, node: Node, cpus: Callable[[frozenset[int]], str]) -> str:
    """One line on what a policy answers. cpus: how CPUs are written."""
    if admission.refusal is not None:
        refusal = admission.refusal
        if refusal.reason in (NOT_STARTED, UNANSWERED):
            return f"{refusal.reason}: {refusal.detail}"
        where = "" if refusal.container is None else f" ({refusal.container})"
        return f"refused: {refusal.reason}{where}"
    parts = []
    for given in admission.given:
        nodes = {node.cpus.places[cpu].node for cpu in given.cpus}
        if given.cpus:
            parts.append(f"{given.name}: {cpus(given.cpus)} on node {_listed(nodes)}")
        for resource, names in given.devices.items():
            on = {n for name in names for n in node.devices[resource][name]}
            parts.append(f"{resource} on node {_listed(on) or 'unknown'}")
    return "admitted" + (f"; {', '.join(parts)}" if parts else "")


__all__ = ["MEMORY", "Fit", "KubeletAnswer", "fit", "fit_findings", "given_text"]
