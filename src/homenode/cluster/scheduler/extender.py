"""Extender: what kube-scheduler's extender protocol asks, answered from the nodes' states.

Source: k8s.io/kube-scheduler/extender/v1 (ExtenderArgs, ExtenderFilterResult, HostPriorityList).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from homenode.cluster.kubevirt.object import read_object
from homenode.cluster.pods.pod import HUGE_PAGES, Pod
from homenode.cluster.pool.flavour import DEFAULT_LAYOUT, Flavour
from homenode.cluster.scheduler.claims import asked
from homenode.cluster.scheduler.nodes import BoundPod, ClusterNodes, read_bound_pod
from homenode.errors import InputError
from homenode.vm.plan_options import PlanOptions

BEST_SCORE = 10
"""MaxExtenderPriority."""

MOST_NODES = 10_000


class ExtenderRequest(Struct, frozen=True, kw_only=True):
    """ExtenderArgs. nodes: the candidates' names."""

    pod: BoundPod
    nodes: tuple[str, ...]


class FilterAnswer(Struct, frozen=True, kw_only=True):
    """nodes: those that take the pod. refused: the others, each with why. unknown: how many of the
    nodes have no capture; they are not refused."""

    nodes: tuple[str, ...]
    refused: Mapping[str, str]
    unknown: int

    def document(self) -> dict[str, Any]:
        return {"NodeNames": self.nodes, "FailedNodes": self.refused}


def read_request(content: bytes) -> ExtenderRequest:
    """Raises InputError for what is no ExtenderArgs with the names of nodes."""
    document = read_object(content, "request", "ExtenderArgs")
    pod, names = document.get("Pod"), document.get("NodeNames")
    if not isinstance(pod, dict):
        raise InputError("request: expected a Pod, found none")
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise InputError(
            "request: expected NodeNames, a list of names, found none",
            hint="nodeCacheCapable: true in the scheduler's configuration",
        )
    if len(names) > MOST_NODES:
        raise InputError(f"request: expected at most {MOST_NODES} nodes, found {len(names)}")
    try:
        found = read_bound_pod(pod)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"request: expected a Pod as core/v1 has it, found {error}") from None
    if found is None:
        raise InputError("request: expected a Pod to schedule, found one that has ended")
    return ExtenderRequest(pod=found, nodes=tuple(dict.fromkeys(names)))


def _is_name(value: object) -> bool:
    """Whether it may be the name of a node: what is answered has to be text."""
    return isinstance(value, str) and value.isascii()


def is_placed_by_node(pod: Pod) -> bool:
    """Whether the kubelet aligns something for the pod: else any node will do."""
    pages = any(name.startswith(HUGE_PAGES) for name in pod.memory_bytes)
    return bool(pod.devices) or bool(pod.cpus) or pages


def filter_nodes(nodes: ClusterNodes, request: ExtenderRequest) -> FilterAnswer:
    """The candidates whose kubelet admits the pod, and those of which there is no capture."""
    pod, refused, unknown = request.pod.pod, {}, 0
    if is_placed_by_node(pod):
        for name in request.nodes:
            found = nodes.answer(name, pod)
            unknown += found is None
            if found is not None and found.refusal is not None:
                refused[name] = found.refusal
    kept = tuple(name for name in request.nodes if name not in refused)
    return FilterAnswer(nodes=kept, refused=refused, unknown=unknown)


def prioritize(
    nodes: ClusterNodes, request: ExtenderRequest, claims: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """A score for each candidate: the policy of `pool place` says which is the best, and each that
    is worse has one point less. claims: those of the pod."""
    pod = request.pod.pod
    orders: dict[str, tuple[object, ...]] = {}
    if claims:
        orders = _by_planner(nodes, request, sum(map(asked, claims)))
    elif is_placed_by_node(pod):
        for name in request.nodes:
            found = nodes.answer(name, pod)
            if found is not None and found.refusal is None:
                orders[name] = found.order
    ranks = {order: rank for rank, order in enumerate(sorted(set(orders.values())))}
    return [
        {
            "Host": name,
            "Score": max(0, BEST_SCORE - ranks[orders[name]]) if name in orders else 0,
        }
        for name in request.nodes
    ]


def _by_planner(
    nodes: ClusterNodes, request: ExtenderRequest, gpus: int
) -> dict[str, tuple[object, ...]]:
    """Which devices a claim gets is not the kubelet's to say: the planner places the pod as a VM of
    its size."""
    pod = request.pod.pod
    memory = sum(pod.memory_bytes.values())
    flavour = Flavour(
        name="pod",
        options=PlanOptions(
            DEFAULT_LAYOUT,
            vcpus=-(-pod.cpu_milli // 1000) or None,
            memory_bytes=memory or None,
            gpu_count=gpus or None,
        ),
    )
    known = [name for name in request.nodes if name in nodes.pool]
    for name in known:
        nodes.places.put(nodes.host(name))
    found: dict[str, tuple[object, ...]] = {}
    orders: set[tuple[object, ...]] = set()
    for one in nodes.places.ranked(flavour, among=known):
        orders.add(one.order)
        if len(orders) > BEST_SCORE:  # this one, and all that are worse, have no point
            break
        found[one.host.name] = one.order
    return found
