"""Node: what the kubelet may give to pods: CPUs, memory and devices by NUMA node, and what is left.

NUMA nodes are bits of a mask throughout, as in the kubelet's hints: node 2 is 1 << 2.
"""

from collections.abc import Mapping

from msgspec import Struct, field

from homenode.cluster.pods.cpu_assignment import AssignmentOptions, CpuTopology, assign


class KubeletPolicies(Struct, frozen=True, kw_only=True):
    """The settings that admission depends on, with the kubelet's own names for their values.

    most_nodes: NUMA nodes of a machine on which the Topology Manager agrees to work.
    reserved_cpus: None = so many of the lowest cores as reserved_cpu_count says.
    reserved_memory_bytes: node -> resource -> bytes.
    """

    topology_policy: str = "none"
    scope: str = "container"
    prefer_closest: bool = False
    most_nodes: int = 8
    cpu_policy: str = "none"
    assignment: AssignmentOptions = field(default_factory=AssignmentOptions)
    align_by_socket: bool = False
    reserved_cpus: frozenset[int] | None = None
    reserved_cpu_count: int = 0
    memory_policy: str = "None"
    reserved_memory_bytes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


class MemoryTable(Struct, frozen=True):
    """Memory of one kind on one node that pods may have."""

    allocatable: int
    free: int


class KubeletMemory(Struct, frozen=True, kw_only=True):
    """cells: the nodes that share their memory with this one. assignments: containers' blocks."""

    tables: Mapping[str, MemoryTable]
    cells: tuple[int, ...]
    assignments: int = 0


class Node(Struct, frozen=True, kw_only=True):
    """A node of the cluster and what its pods have left free.

    numa_nodes: every node, those without CPUs among them. distances: [from][to] by position.
    free_cpus: the shared pool. devices: resource -> device -> its NUMA nodes, () = it says none.
    used_devices: resource -> devices in use.
    """

    policies: KubeletPolicies
    numa_nodes: tuple[int, ...]
    distances: tuple[tuple[int, ...], ...]
    cpus: CpuTopology
    reserved_cpus: frozenset[int]
    free_cpus: frozenset[int]
    memory: Mapping[int, KubeletMemory]
    devices: Mapping[str, Mapping[str, tuple[int, ...]]]
    used_devices: Mapping[str, frozenset[str]]

    @property
    def every_node(self) -> int:
        """The mask of all nodes."""
        return sum(1 << node for node in self.numa_nodes)

    @property
    def available_cpus(self) -> frozenset[int]:
        return self.free_cpus - self.reserved_cpus

    def available_devices(self, resource: str) -> frozenset[str]:
        return frozenset(self.devices[resource]) - self.used_devices.get(resource, frozenset())


def empty_node(
    policies: KubeletPolicies,
    numa_nodes: tuple[int, ...],
    distances: tuple[tuple[int, ...], ...],
    cpus: CpuTopology,
    memory_bytes: Mapping[int, Mapping[str, int]],
    devices: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Node:
    """A node without pods. memory_bytes: node -> resource -> bytes; `memory` counts those in huge
    pages as well."""
    reserved = policies.reserved_cpus
    if reserved is None:
        everything = frozenset(cpus.places)
        reserved = assign(cpus, everything, policies.reserved_cpu_count, policies.assignment)
    memory: dict[int, KubeletMemory] = {}
    for node in numa_nodes:
        of_node = dict(memory_bytes.get(node, {}))
        in_pages = sum(size for name, size in of_node.items() if name != "memory")
        of_node["memory"] = of_node.get("memory", 0) - in_pages
        kept = policies.reserved_memory_bytes.get(node, {})
        tables = {
            name: MemoryTable(size - kept.get(name, 0), size - kept.get(name, 0))
            for name, size in of_node.items()
        }
        memory[node] = KubeletMemory(tables=tables, cells=(node,))
    return Node(
        policies=policies,
        numa_nodes=numa_nodes,
        distances=distances,
        cpus=cpus,
        reserved_cpus=reserved or frozenset(),
        free_cpus=frozenset(cpus.places),
        memory=memory,
        devices=devices,
        used_devices={},
    )
