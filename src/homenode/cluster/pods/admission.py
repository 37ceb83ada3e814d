"""Admission: what the kubelet answers to a pod, and what the node has left after it.

For each container (or for the pod, by scope) the device, CPU and memory managers name the sets of
NUMA nodes that can serve it, the Topology Manager chooses one and admits or refuses, and then each
manager allocates, which may fail as well.

Source: pkg/kubelet/cm/{topologymanager,devicemanager,cpumanager,memorymanager} of Kubernetes 1.36.
The tests compare with that code.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.cluster.pods.cpu_assignment import assign
from homenode.cluster.pods.hints import (
    ANY,
    Hint,
    Hints,
    MergedHints,
    bits,
    masks,
    mean_distance,
    merge,
)
from homenode.cluster.pods.node import KubeletMemory, MemoryTable, Node
from homenode.cluster.pods.pod import MEMORY, Container, Pod

TOPOLOGY_AFFINITY = "TopologyAffinityError"
SMT_ALIGNMENT = "SMTAlignmentError"
UNEXPECTED = "UnexpectedAdmissionError"


class Given(Struct, frozen=True, kw_only=True):
    """What a container gets. mask: the nodes of its hint, None where any node does."""

    name: str
    mask: int | None
    cpus: frozenset[int]
    devices: Mapping[str, frozenset[str]]


class AdmissionRefusal(Struct, frozen=True, kw_only=True):
    """reason: the pod's status.reason. container: None = the whole pod. hints: of each manager at
    that moment, for whoever explains it."""

    reason: str
    detail: str
    container: str | None
    hints: tuple[Hints, ...]


class Admission(Struct, frozen=True, kw_only=True):
    """refusal None: admitted. node: as it is with the pod, or as it was."""

    refusal: AdmissionRefusal | None
    given: tuple[Given, ...]
    node: Node


class _Reusable(Struct, kw_only=True):
    """What init containers leave to the containers after them."""

    cpus: frozenset[int] = frozenset()
    memory: dict[tuple[int, str], int] = field(default_factory=dict)
    devices: dict[str, frozenset[str]] = field(default_factory=dict)


class _CannotAllocate(Exception):
    """A manager refuses when it allocates."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


Held = Mapping[str, Mapping[str, frozenset[str]]]
"""Container -> resource -> devices that it is known to have."""


def admit(pod: Pod, node: Node, held: Held | None = None) -> Admission:
    """The kubelet's answer to a pod that arrives at a node. held: of a pod that the node has
    admitted: those are its devices, and its CPUs and memory are on their nodes."""
    policies = node.policies
    before, reusable = node, _Reusable()
    assigned: dict[str, frozenset[int]] = {}
    given: list[Given] = []
    merged = MergedHints(None, False)
    aligned = policies.topology_policy != "none"
    by_pod = aligned and policies.scope == "pod" and not held
    if by_pod:
        hints = pod_hints(pod, node)
        merged = _merge(hints, node)
        if not _admits(merged, policies.topology_policy):
            return _refused(TOPOLOGY_AFFINITY, "", None, hints, before)
    for container in pod.containers:
        own = {} if held is None else held.get(container.name, {})
        if aligned and own:
            merged = MergedHints(_nodes_of(own, node), True)
        elif aligned and not by_pod:
            hints = container_hints(pod, container, node, reusable)
            merged = _merge(hints, node)
            if not _admits(merged, policies.topology_policy):
                return _refused(TOPOLOGY_AFFINITY, "", container.name, hints, before)
        try:
            node, devices = _allocate_devices(container, node, merged, reusable, own)
            node, cpus = _allocate_cpus(pod, container, node, merged, reusable)
            node = _allocate_memory(pod, container, node, merged, reusable)
        except _CannotAllocate as error:
            return _refused(error.reason, error.detail, container.name, (), before)
        assigned[container.name] = cpus
        mask = merged.mask if aligned else None
        given.append(Given(name=container.name, mask=mask, cpus=cpus, devices=devices))
    return Admission(refusal=None, given=tuple(given), node=node)


def _refused(
    reason: str, detail: str, container: str | None, hints: tuple[Hints, ...], node: Node
) -> Admission:
    return Admission(
        refusal=AdmissionRefusal(reason=reason, detail=detail, container=container, hints=hints),
        given=(),
        node=node,
    )


def _admits(merged: MergedHints, policy: str) -> bool:
    return policy == "best-effort" or merged.preferred


def _merge(hints: Sequence[Hints], node: Node) -> MergedHints:
    policies = node.policies
    rows = {
        a: dict(zip(node.numa_nodes, row, strict=True))
        for a, row in zip(node.numa_nodes, node.distances, strict=False)
    }
    mean = (lambda mask: mean_distance(rows, mask)) if policies.prefer_closest else None
    return merge(hints, node.every_node, policies.topology_policy, mean)


def pod_hints(pod: Pod, node: Node) -> tuple[Hints, ...]:
    """Hints of the device, CPU and memory managers for the pod as a whole."""
    none = _Reusable()
    devices = {
        name: _device_hints(node, name, count, frozenset())
        for name, count in pod.devices.items()
        if name in node.devices
    }
    return (
        devices,
        _cpu_hints(pod, pod.cpus, node, none),
        _memory_hints_of(pod, pod.containers, pod.memory_bytes, node, none),
    )


def container_hints(
    pod: Pod, container: Container, node: Node, reusable: "_Reusable"
) -> tuple[Hints, ...]:
    """Hints of the device, CPU and memory managers for one container."""
    devices = {
        name: _device_hints(node, name, count, reusable.devices.get(name, frozenset()))
        for name, count in container.devices.items()
        if name in node.devices
    }
    return (
        devices,
        _cpu_hints(pod, pod.cpus_of(container), node, reusable),
        _memory_hints_of(pod, (container,), container.memory_bytes, node, reusable),
    )


# Devices


def _device_hints(
    node: Node, resource: str, count: int, reusable: frozenset[str]
) -> Sequence[Hint] | None:
    nodes_of = node.devices[resource]
    if not any(nodes_of.values()):
        return None
    available = node.available_devices(resource)
    if len(available | reusable) < count:
        return ()
    with_devices = sorted({n for nodes in nodes_of.values() for n in nodes} & {*node.numa_nodes})
    looked_at = with_devices or node.numa_nodes
    fewest = len(looked_at)
    found: list[int] = []
    device_masks = {name: sum(1 << n for n in nodes) for name, nodes in nodes_of.items()}
    for mask in masks(looked_at):
        here = {name for name, of in device_masks.items() if of & mask}
        if len(here) >= count:
            fewest = min(fewest, mask.bit_count())
        if any(nodes_of[name] and name not in here for name in reusable):
            continue
        if len(here & reusable) + len(here & available) >= count:
            found.append(mask)
    return [Hint(mask, mask.bit_count() == fewest) for mask in found]


def _nodes_of(own: Mapping[str, frozenset[str]], node: Node) -> int | None:
    """The nodes of devices, None where none is known."""
    mask = 0
    for resource, names in own.items():
        for name in names:
            for on in node.devices.get(resource, {}).get(name, ()):
                mask |= 1 << on
    return mask or None


def _allocate_devices(
    container: Container,
    node: Node,
    merged: MergedHints,
    reusable: _Reusable,
    own: Mapping[str, frozenset[str]],
) -> tuple[Node, dict[str, frozenset[str]]]:
    given: dict[str, frozenset[str]] = {}
    for resource, count in container.devices.items():
        if resource not in node.devices:
            continue
        in_use = own.get(resource) or _devices_for(
            node, resource, count, merged, reusable.devices.get(resource)
        )
        given[resource] = in_use
        used = node.used_devices.get(resource, frozenset()) | in_use
        node = replace(node, used_devices={**node.used_devices, resource: used})
    for resource, in_use in given.items():
        left = reusable.devices.get(resource, frozenset())
        stays = not container.is_init or container.restarts
        reusable.devices[resource] = left - in_use if stays else left | in_use
    return node, given


def _devices_for(
    node: Node, resource: str, count: int, merged: MergedHints, reusable: frozenset[str] | None
) -> frozenset[str]:
    """Those on the nodes of the hint first; of equals those that a plugin which prefers the lowest
    names would give."""
    nodes_of = node.devices[resource]
    if not nodes_of:
        raise _CannotAllocate(UNEXPECTED, f"no healthy devices present of {resource}")
    in_use = set(sorted(reusable or ())[:count])
    available = node.available_devices(resource) - in_use
    if len(available) < count - len(in_use):
        raise _CannotAllocate(
            UNEXPECTED, f"{resource}: requested {count - len(in_use)}, available {len(available)}"
        )
    mask = merged.mask
    aligned: set[str] = set()
    if mask is not None and any(nodes_of.values()):
        aligned = {name for name in available if any(mask >> n & 1 for n in nodes_of[name])}
    for group in (aligned, available):
        in_use |= set(sorted(group - in_use)[: count - len(in_use)])
    return frozenset(in_use)


# CPUs


def _cpu_hints(pod: Pod, count: int, node: Node, reusable: _Reusable) -> Hints:
    if node.policies.cpu_policy != "static" or count == 0 or pod.pod_level:
        return {}
    topology, available = node.cpus, node.available_cpus
    nodes = topology.nodes
    total = {n: len(topology.cpus("node", n)) for n in nodes}
    free = {n: len(topology.cpus("node", n) & available) for n in nodes}
    kept = {topology.places[cpu].node for cpu in reusable.cpus}
    fewest = len(nodes)
    found: list[int] = []
    for mask in masks(nodes):
        chosen = bits(mask)
        if sum(total[n] for n in chosen) >= count:
            fewest = min(fewest, len(chosen))
        if all(mask >> n & 1 for n in kept) and (
            len(reusable.cpus) + sum(free[n] for n in chosen) >= count
        ):
            found.append(mask)
    return {
        "cpu": [
            Hint(mask, mask.bit_count() == fewest or _fills_sockets(node, mask, fewest))
            for mask in found
        ]
    }


def _fills_sockets(node: Node, mask: int, fewest: int) -> bool:
    """align-by-socket: as few sockets as the request needs are as good as few nodes."""
    topology = node.cpus
    if not node.policies.align_by_socket:
        return False
    per_socket = len(topology.nodes) // topology.sockets
    sockets = {place.socket for place in topology.places.values() if mask >> place.node & 1}
    return per_socket > 0 and len(sockets) == -(-fewest // per_socket)


def _allocate_cpus(
    pod: Pod, container: Container, node: Node, merged: MergedHints, reusable: _Reusable
) -> tuple[Node, frozenset[int]]:
    count = pod.cpus_of(container)
    if node.policies.cpu_policy != "static" or count == 0 or pod.pod_level:
        return node, frozenset()
    topology, options = node.cpus, node.policies.assignment
    if options.full_pcpus_only:
        per_core = topology.cpus_per_core
        if count % per_core:
            raise _CannotAllocate(
                SMT_ALIGNMENT, f"{count} CPUs requested, not a multiple of {per_core} per core"
            )
        cores = {topology.places[cpu].core for cpu in node.reserved_cpus}
        kept = frozenset(cpu for core in cores for cpu in topology.cpus("core", core))
        whole = len(node.free_cpus - kept)
        if count > whole:
            raise _CannotAllocate(
                SMT_ALIGNMENT, f"{count} CPUs requested, {whole} available on whole cores"
            )
    usable = node.available_cpus | reusable.cpus
    in_use: frozenset[int] = frozenset()
    if merged.mask is not None:
        aligned = _aligned(node, merged.mask, usable)
        first = assign(topology, aligned, min(count, len(aligned)), options)
        if first is None:
            raise _CannotAllocate(UNEXPECTED, "not enough cpus available to satisfy request")
        in_use = first
    rest = assign(topology, usable - in_use, count - len(in_use), options)
    if rest is None:
        raise _CannotAllocate(
            UNEXPECTED,
            f"not enough cpus available to satisfy request: {count} requested, {len(usable)} free",
        )
    in_use |= rest
    stays = not container.is_init or container.restarts
    reusable.cpus = reusable.cpus - in_use if stays else reusable.cpus | in_use
    return replace(node, free_cpus=node.free_cpus - in_use), in_use


def _aligned(node: Node, mask: int, usable: frozenset[int]) -> frozenset[int]:
    places = node.cpus.places
    if not node.policies.align_by_socket:
        return frozenset(cpu for cpu in usable if mask >> places[cpu].node & 1)
    sockets = {place.socket for place in places.values() if mask >> place.node & 1}
    return frozenset(cpu for cpu in usable if places[cpu].socket in sockets)


# Memory


def _memory_hints_of(
    pod: Pod,
    containers: Sequence[Container],
    requested: Mapping[str, int],
    node: Node,
    reusable: _Reusable,
) -> Hints:
    if node.policies.memory_policy != "Static" or not pod.is_guaranteed or pod.pod_level:
        return {}
    if not all(container.has_whole_bytes for container in containers):
        return {}
    found = _memory_hints(requested, node, reusable)
    return dict.fromkeys(requested, found) if found else {}


def _memory_hints(requested: Mapping[str, int], node: Node, reusable: _Reusable) -> list[Hint]:
    """For every kind of memory the same."""
    fewest = len(node.numa_nodes)
    found: list[int] = []
    for mask in masks(node.numa_nodes):
        chosen = bits(mask)
        if any(_sum(node, chosen, name).allocatable < size for name, size in requested.items()):
            continue
        fewest = min(fewest, len(chosen))
        if len(chosen) == 1:
            if len(node.memory[chosen[0]].cells) > 1:
                continue
        elif _is_in_other_cells(node, chosen):
            continue
        if all(
            _sum(node, chosen, name).free + reusable.memory.get((mask, name), 0) >= size
            for name, size in requested.items()
        ):
            found.append(mask)
    return [Hint(mask, mask.bit_count() == fewest) for mask in found]


def _sum(node: Node, nodes: Iterable[int], name: str) -> MemoryTable:
    tables = [node.memory[n].tables.get(name, MemoryTable(0, 0)) for n in nodes]
    return MemoryTable(sum(t.allocatable for t in tables), sum(t.free for t in tables))


def _is_in_other_cells(node: Node, nodes: Sequence[int]) -> bool:
    """A node with memory given out by itself, or in a group with others, joins no other group."""
    return any(
        node.memory[n].assignments > 0
        and (len(node.memory[n].cells) == 1 or sorted(node.memory[n].cells) != list(nodes))
        for n in nodes
    )


def _allocate_memory(
    pod: Pod, container: Container, node: Node, merged: MergedHints, reusable: _Reusable
) -> Node:
    if node.policies.memory_policy != "Static" or not pod.is_guaranteed or pod.pod_level:
        return node
    if not container.has_whole_bytes:
        raise _CannotAllocate(UNEXPECTED, "memory with a fraction of a byte")
    requested = container.memory_bytes
    best = Hint(merged.mask, merged.preferred)
    if best.mask is None:
        hints = _memory_hints(requested, node, reusable)
        if not hints:
            raise _CannotAllocate(UNEXPECTED, "no NUMA nodes with enough memory")
        default = _narrowest(hints)
        if best.preferred and not default.preferred:
            raise _CannotAllocate(UNEXPECTED, "failed to find the default preferred hint")
        best = default
    assert best.mask is not None, "hints have nodes"
    nodes = bits(best.mask)
    if any(_sum(node, nodes, name).free < size for name, size in requested.items()):
        mask = best.mask
        wider = [
            hint
            for hint in _memory_hints(requested, node, reusable)
            if hint.mask is not None and hint.mask & mask == mask
        ]
        if not wider:
            raise _CannotAllocate(UNEXPECTED, "failed to find NUMA nodes to extend the hint")
        extended = _narrowest(wider)
        if best.preferred and not extended.preferred:
            raise _CannotAllocate(UNEXPECTED, "failed to find the extended preferred hint")
        best = extended
        nodes = bits(best.mask or 0)
    if len(nodes) > 1 and _is_in_other_cells(node, nodes):
        raise _CannotAllocate(UNEXPECTED, "preferred hint violates NUMA node allocation")
    assert best.mask is not None
    memory = dict(node.memory)
    for name, size in requested.items():
        left = max(0, size - reusable.memory.get((best.mask, name), 0))
        _take_memory(memory, nodes, name, left)
    _keep_reusable(container, best.mask, requested, reusable)
    return replace(node, memory=memory)


def _narrowest(hints: Sequence[Hint]) -> Hint:
    """The preferred hint of fewest nodes, the lowest of equals; else the narrowest."""
    return min(hints, key=lambda h: (not h.preferred, (h.mask or 0).bit_count(), h.mask or 0))


def _take_memory(
    memory: dict[int, KubeletMemory], nodes: Sequence[int], name: str, size: int
) -> None:
    for n in nodes:
        of_node = memory[n]
        tables = dict(of_node.tables)
        table = tables.get(name, MemoryTable(0, 0))
        in_use = min(table.free, size)
        size -= in_use
        tables[name] = MemoryTable(table.allocatable, table.free - in_use)
        memory[n] = KubeletMemory(
            tables=tables, cells=tuple(nodes), assignments=of_node.assignments + 1
        )


def _keep_reusable(
    container: Container, mask: int, requested: Mapping[str, int], reusable: _Reusable
) -> None:
    kept = reusable.memory
    for name, size in requested.items():
        before = kept.get((mask, name), 0)
        if container.is_init and not container.restarts:
            kept[mask, name] = max(before, size)
        elif before:
            kept[mask, name] = max(0, before - size)


__all__ = ["ANY", "MEMORY", "Admission", "AdmissionRefusal", "Given", "Held", "admit"]
