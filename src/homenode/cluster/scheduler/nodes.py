"""Nodes: what the pods of a cluster leave free on each node, and what one more pod costs there.

The API server says which pods a node has, and, of kubelets with ResourceHealthStatus (on from
Kubernetes 1.36), which devices. CPUs and memory it does not say: they are those that the kubelet
gives next to these devices. A pod whose devices are not known is admitted as it arrives, and keeps
what it got there while others come and go; after a restart it is admitted again.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.kubevirt.object import down
from homenode.cluster.pods.admission import Admission, Held
from homenode.cluster.pods.checkpoints import Checkpoints
from homenode.cluster.pods.fit import answer, why_not
from homenode.cluster.pods.kubelet import Kubelet
from homenode.cluster.pods.machine import node_of_host
from homenode.cluster.pods.node import Node
from homenode.cluster.pods.pod import Pod, read_pod
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool, PoolHost
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.scheduler.claims import ClaimedDevice, bdfs_on, claim_names
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.machine.topology import Host, RunningDomain

_MOST_KEPT = 4096
"""States of nodes that are kept, with what was answered there."""

_ENDED = ("Succeeded", "Failed")


class BoundPod(Struct, frozen=True, kw_only=True):
    """A pod that counts. node: None = none has it yet. since: its order among those of the node.
    held: container -> resource -> devices, as its status says them. claims: NAMESPACE/NAME."""

    uid: str
    node: str | None
    since: tuple[str, str, str]
    pod: Pod
    held: Held
    claims: tuple[str, ...]
    is_refused: bool


def read_bound_pod(document: Mapping[str, Any]) -> BoundPod | None:
    """A pod of the API server; None once it has ended. Raises InputError."""
    if down(document, "status", "phase") in _ENDED:
        return None
    meta = document.get("metadata") or {}
    conditions = down(document, "status", "conditions") or ()
    by_type: dict[Any, Mapping[str, Any]] = {one.get("type"): one for one in conditions}
    scheduled = by_type.get("PodScheduled", {})
    node = down(document, "spec", "nodeName")
    held: dict[str, dict[str, frozenset[str]]] = {}
    for container in down(document, "status", "containerStatuses") or ():
        for one in container.get("allocatedResourcesStatus") or ():
            names = frozenset(str(dev.get("resourceID")) for dev in one.get("resources") or ())
            held.setdefault(str(container.get("name")), {})[str(one.get("name"))] = names
    namespace = meta.get("namespace", "default")
    return BoundPod(
        uid=str(meta.get("uid") or f"{namespace}/{meta.get('name')}"),
        node=node if isinstance(node, str) and node else None,
        since=(
            str(scheduled.get("lastTransitionTime", "")),
            str(meta.get("creationTimestamp", "")),
            str(meta.get("name", "")),
        ),
        pod=read_pod({"kind": "Pod", **document}, "pod"),
        held=held,
        claims=tuple(f"{namespace}/{name}" for name in claim_names(document)),
        is_refused=scheduled.get("status") == "False",
    )


class NodeState:
    """A node with its pods. estimated: pods of which the devices are not known. given: of each pod,
    the devices of its containers. answers: what was answered in this state, by what the pod asks
    for."""

    def __init__(self, node: Node, host: PoolHost, estimated: int, given: tuple[Held, ...]) -> None:
        self.node, self.host, self.estimated, self.given = node, host, estimated, given
        self.answers: dict[str, PodAnswer] = {}


class PodAnswer:
    """A pod that arrives in a state. refusal: None = the kubelet admits it."""

    def __init__(self, nodes: "ClusterNodes", state: NodeState, pod: Pod) -> None:
        self._nodes, self._state, self._pod = nodes, state, pod
        self._admission = found = answer(pod, state.node)
        self.refusal: str | None = None
        if found.refusal is not None:
            policy = state.node.policies.topology_policy
            why = found.refusal.detail or why_not(found.refusal.hints, policy)
            self.refusal = f"{found.refusal.reason}: {why}"

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The least is the best: the pod's own locality, then the order of `pool place`."""
        places, before = self._nodes.places, self._state.host
        vm = _domain_of("", self._pod, self._state.node, self._admission, ())
        after = replace(before, domains=(*before.domains, vm))
        shape = places.planner.pool.shapes[before.shape]
        cpus = {n.index for n in shape.nodes if any(p and p <= n.pus for p in vm.vcpu_pins)}
        homes = [gpu.node for bdf in vm.devices if (gpu := shape.device(bdf)) is not None]
        used = {*cpus, *(home for home in homes if home is not None)}
        packages = {pu.package for pu in shape.pus if pu.node in used}
        away = sum(home not in cpus for home in homes) if cpus else 0
        states = places.planner.state(before), places.planner.state(after)
        return (len(packages), away, len(used), *places.cost_of_change(*states))


class ClusterNodes:
    """The nodes of which there are captures, with their pods.

    kubelets: by node. ids: the address of a device by the name that its plugin gives it. named: the
    devices of a resource, as for `pod fit`.
    """

    def __init__(
        self,
        pool: Pool,
        kubelets: Mapping[str, Kubelet],
        flavours: Iterable[Flavour],
        ids: Mapping[str, str],
        named: Mapping[str, tuple[Bdf, ...]],
    ) -> None:
        hosts = tuple(map(_emptied, pool.hosts))
        self.places = PoolPlaces(replace(pool, hosts=hosts), tuple(flavours))
        self.pool = {host.name: host for host in hosts}
        self.devices: dict[tuple[str, str, str], ClaimedDevice] = {}
        self.allocations: dict[str, tuple[tuple[str, str, str], ...]] = {}
        self.estimated: dict[str, int] = {}
        self._kubelets, self._ids, self._named = kubelets, ids, named
        self._resources: set[str] = set(named)
        self._pods: dict[str, BoundPod] = {}
        self._admitted: dict[str, Held] = {}
        self._on: dict[str, dict[str, BoundPod]] = {}
        self._now: dict[str, NodeState] = {}
        self._known: dict[tuple[object, ...], NodeState] = {}
        self._empty: dict[tuple[object, ...], Node] = {}

    @property
    def pods(self) -> int:
        """How many count."""
        return len(self._pods)

    def put(self, pod: BoundPod) -> None:
        """A pod has arrived, or says more of itself."""
        if self._pods.get(pod.uid) == pod:
            return
        admitted = self._admitted.get(pod.uid)
        self.remove(pod.uid)
        if admitted is not None:
            self._admitted[pod.uid] = admitted
        self._learn(pod.pod)
        self._pods[pod.uid] = pod
        if pod.node is not None:
            self._on.setdefault(pod.node, {})[pod.uid] = pod
            self._now.pop(pod.node, None)

    def remove(self, uid: str) -> None:
        gone = self._pods.pop(uid, None)
        self._admitted.pop(uid, None)
        if gone is not None and gone.node is not None:
            del self._on[gone.node][uid]
            self._now.pop(gone.node, None)

    def forget_states(self) -> None:
        """What claims have got has changed."""
        self._now.clear()

    def answer(self, name: str, pod: Pod) -> PodAnswer | None:
        """One more pod on a node; None where there is no capture of it."""
        self._learn(pod)
        if name not in self.pool:
            return None
        state = self.state(name)
        key = repr((pod.containers, pod.pod_level))
        if key not in state.answers:
            state.answers[key] = PodAnswer(self, state, pod)
        return state.answers[key]

    def _learn(self, pod: Pod) -> None:
        """Resources that no pod has asked for yet."""
        if not self._resources >= pod.devices.keys():
            self._resources |= pod.devices.keys()
            for kept in (self._now, self._known, self._empty):
                kept.clear()

    def state(self, name: str) -> NodeState:
        """A node of the pool with its pods."""
        found = self._now.get(name)
        if found is None:
            arrived = sorted(
                self._on.get(name, {}).values(),
                key=lambda one: (not one.held, one.uid not in self._admitted, one.since),
            )
            key = (self._template(name), *map(self._key, arrived))
            if len(self._known) > _MOST_KEPT:
                self._known.clear()
            if key not in self._known:
                self._known[key] = self._with_pods(name, arrived)
            found = self._now[name] = self._known[key]
            self.estimated[name] = found.estimated
            self._admitted.update(zip((one.uid for one in arrived), found.given, strict=True))
        return found

    def host(self, name: str) -> PoolHost:
        """A node of the pool, with its pods as VMs."""
        return replace(self.state(name).host, name=name)

    def _template(self, name: str) -> tuple[object, ...]:
        one = self.pool[name]
        return one.shape, repr(one.nodes), repr(self._kubelets.get(name))

    def _key(self, one: BoundPod) -> tuple[object, ...]:
        admitted = self._admitted.get(one.uid)
        return (repr(one.pod.containers), repr(self._held(one) or admitted), self._claimed(one))

    def _claimed(self, one: BoundPod) -> tuple[ClaimedDevice, ...]:
        keys = (key for claim in one.claims for key in self.allocations.get(claim, ()))
        return tuple(self.devices[key] for key in keys if key in self.devices)

    def _held(self, one: BoundPod) -> Held:
        """The devices of the pod by address; those of unknown names are left out."""
        return {
            container: {
                resource: frozenset(self._ids.get(name, name) for name in sorted(names))
                for resource, names in own.items()
            }
            for container, own in sorted(one.held.items())
        }

    def _empty_node(self, name: str) -> Node:
        key = self._template(name)
        if key not in self._empty:
            host: Host = self.places.planner.pool.host(self.pool[name])
            self._empty[key], _ = node_of_host(
                host, self._kubelets[name], self._resources, self._named, Checkpoints()
            )
        return self._empty[key]

    def _with_pods(self, name: str, arrived: Iterable[BoundPod]) -> NodeState:
        node, estimated = self._empty_node(name), 0
        host = self.pool[name]
        machine = self.places.planner.pool.shapes[host.shape]
        domains: list[RunningDomain] = []
        given: list[Held] = []
        for number, one in enumerate(arrived):
            before = node
            held = _of_node(self._held(one), node)
            asks = {r for c in one.pod.containers for r in c.devices if r in node.devices}
            estimated += bool(asks - {r for own in held.values() for r in own})
            held = held or _not_in_use(self._admitted.get(one.uid, {}), node)
            found = answer(one.pod, node, held)
            if found.refusal is not None:  # its neighbours are not where they were thought to be
                found = answer(one.pod, _without_policy(node), held)
                found = replace(found, node=replace(found.node, policies=node.policies))
            node = found.node
            given.append({container.name: container.devices for container in found.given})
            claimed = bdfs_on(machine, self._claimed(one))
            domains.append(_domain_of(f"pod-{number}", one.pod, before, found, claimed))
        return NodeState(node, replace(host, domains=tuple(domains)), estimated, tuple(given))


def _emptied(host: PoolHost) -> PoolHost:
    """Without what the capture saw running: pods say that."""
    nodes = tuple(
        replace(
            node,
            memory_free_bytes=node.memory_bytes,
            page_pools=tuple(replace(p, free_pages=p.total_pages) for p in node.page_pools),
        )
        for node in host.nodes
    )
    return replace(host, nodes=nodes, domains=(), rules=())


def _of_node(held: Held, node: Node) -> Held:
    """Devices that the node has."""
    return {
        container: {
            resource: here
            for resource, names in own.items()
            if (here := names & node.devices.get(resource, {}).keys()) and here == names
        }
        for container, own in held.items()
    }


def _not_in_use(held: Held, node: Node) -> Held:
    """What a pod was given where no status says that another has it."""
    taken = (
        names & node.used_devices.get(resource, frozenset())
        for own in held.values()
        for resource, names in own.items()
    )
    return {} if any(taken) else held


def _without_policy(node: Node) -> Node:
    return replace(node, policies=replace(node.policies, topology_policy="none"))


def _domain_of(
    name: str, pod: Pod, before: Node, admission: Admission, claimed: tuple[Bdf, ...]
) -> RunningDomain:
    """What a pod has, as the VM that the pool counts."""
    after = admission.node
    cpus = sorted(before.free_cpus - after.free_cpus)
    memory = tuple(
        (NodeIndex(number), size)
        for number, own in before.memory.items()
        if (size := sum(t.free for t in own.tables.values()) - _free(after, number)) > 0
    )
    devices = {
        Bdf.parse(device)
        for resource, used in after.used_devices.items()
        for device in used - before.used_devices.get(resource, frozenset())
    }
    return RunningDomain(
        name=name,
        running=False,
        planned=True,
        vcpu_pins=tuple(CpuSet([cpu]) for cpu in cpus),
        emulator_pus=None,
        iothread_pus=(),
        memory_bytes=sum(size for _, size in memory) or sum(pod.memory_bytes.values()),
        memory_bound=bool(memory),
        memory_by_node=memory,
        page_bytes=None,
        devices=tuple(sorted({*devices, *claimed})),
    )


def _free(node: Node, number: int) -> int:
    return sum(table.free for table in node.memory[number].tables.values())
