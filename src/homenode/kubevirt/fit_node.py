"""Fit of CPUs and devices: what a node of the cluster has, node by NUMA node."""

from collections.abc import Iterable, Iterator

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.indices import NodeIndex
from homenode.kubevirt.demand import Demand
from homenode.pci import DeviceKind
from homenode.plan.devices.fabric import board_of_host
from homenode.plan.devices.partitions import partition_sizes
from homenode.pods.kubelet import Kubelet
from homenode.topology import Host

_CPU = "Kubernetes, CPU Manager"
_TOPOLOGY = "Kubernetes, Topology Manager"


def free_pus(kubelet: Kubelet | None, host: Host) -> dict[NodeIndex, int]:
    """PUs that kubelet may give away on each NUMA node, other pods not counted."""
    reserved = frozenset() if kubelet is None else frozenset(kubelet.reserved_pus)
    return {node.index: sum(pu not in reserved for pu in node.pus) for node in host.nodes}


def gpus_of_node(host: Host) -> dict[NodeIndex | None, int]:
    count: dict[NodeIndex | None, int] = {}
    for device in host.devices_of_kind(DeviceKind.GPU):
        if device.physical_function is None:
            count[device.node] = count.get(device.node, 0) + 1
    return count


def aligned_nodes(demand: Demand, kubelet: Kubelet | None, host: Host) -> int:
    """NUMA nodes that the VM takes at least: for its PUs, and for its GPUs."""
    by_pus = _fewest(free_pus(kubelet, host).values(), demand.pus)
    by_gpus = _fewest(gpus_of_node(host).values(), demand.gpus)
    return max(1, by_pus, by_gpus)


def node_findings(demand: Demand, kubelet: Kubelet | None, host: Host) -> Iterator[Finding]:
    """What does not come together, or comes together by luck."""
    pus = free_pus(kubelet, host)
    if demand.dedicated and demand.pus > sum(pus.values()):
        yield finding(
            "pus-short",
            f"{demand.pus} dedicated PUs",
            expected=f"at most {sum(pus.values())}, which kubelet can give",
            observed=f"{demand.vcpus} vCPUs, and {demand.pus - demand.vcpus} for QEMU's own "
            "threads",
            case="of PUs",
            values={"pus": sum(pus.values())},
            source=_CPU,
        )
    siblings = max((len(core.pus) for core in host.cores), default=1)
    full = kubelet is not None and kubelet.has_cpu_option("full-pcpus-only")
    if demand.dedicated and full and demand.pus % siblings:
        yield finding(
            "smt-alignment",
            f"{demand.pus} dedicated PUs",
            expected=f"a multiple of {siblings}, the PUs of a core, as full-pcpus-only wants",
            observed=f"{demand.pus}: kubelet refuses the pod (SMTAlignmentError)",
            source=_CPU,
        )
    if demand.dedicated and kubelet is not None and siblings > 1 and not full:
        yield finding(
            "cores-shared",
            "kubelet cpuManagerPolicyOptions",
            expected="full-pcpus-only",
            observed="not set: a core's siblings may go to two VMs",
            source=_CPU,
        )
    if demand.threads > siblings:
        yield finding(
            "threads-without-siblings",
            "spec.domain.cpu.threads",
            expected=f"at most {siblings}, as the node's cores have",
            observed=str(demand.threads),
            source="kubevirt#11749",
        )
    yield from _gpus(demand, kubelet, host)
    if kubelet is not None and kubelet.topology_policy != "none":
        yield from _topology(demand, kubelet, host)


def _gpus(demand: Demand, kubelet: Kubelet | None, host: Host) -> Iterator[Finding]:
    count = gpus_of_node(host)
    if not host.pci_devices:
        if demand.gpus:
            yield finding(
                "gpus-unknown",
                f"{demand.gpus} GPUs",
                expected="the node's PCI devices",
                observed="none in the source",
                source=host.name,
            )
        return
    if demand.gpus > sum(count.values()):
        yield finding(
            "gpus-short",
            f"{demand.gpus} GPUs",
            expected=f"at most {sum(count.values())} on the node",
            observed=str(demand.gpus),
            source=host.name,
        )
    elif demand.gpus and count.get(None):
        yield finding(
            "device-node-unknown",
            f"{count[None]} GPUs of the node",
            expected="a NUMA node",
            observed="none (numa_node is -1): neither kubelet nor the hook can place them",
            source=host.name,
        )
    board = board_of_host(host)
    sizes = () if board is None else partition_sizes(board)
    if board is not None and demand.gpus and demand.gpus not in sizes:
        yield finding(
            "gpus-no-partition",
            f"{demand.gpus} GPUs of an {board} board",
            expected=f"{', '.join(map(str, sizes))}: Fabric Manager's partitions",
            observed=f"{demand.gpus}: no partition, so that the GPUs have no NVLink among them",
            source="NVIDIA Fabric Manager user guide, shared NVSwitch virtualization",
        )
    may_spread = kubelet is None or kubelet.topology_policy != "single-numa-node"
    if may_spread and 1 < demand.gpus < sum(count.values()) and len(count) > 1:
        spread = ", ".join(f"{n} on node {node}" for node, n in sorted(count.items(), key=str))
        yield finding(
            "gpus-may-spread",
            f"{demand.gpus} GPUs",
            expected="all of as few nodes as hold them",
            observed=f"{spread}: Topology Manager's hints do not "
            "count devices, so that they may come from more",
            source="kubernetes#136431",
        )


def _topology(demand: Demand, kubelet: Kubelet, host: Host) -> Iterator[Finding]:
    nodes = len(host.nodes)
    needed = aligned_nodes(demand, kubelet, host)
    distant = 1 < needed < nodes and nodes > 2
    if distant and kubelet.topology_options.get("prefer-closest-numa-nodes") != "true":
        yield finding(
            "nodes-any-distance",
            "kubelet topologyManagerPolicyOptions",
            expected="prefer-closest-numa-nodes",
            observed=f"not set: {needed} of {nodes} nodes are chosen at any distance",
            source=_TOPOLOGY,
        )


def _fewest(sizes: Iterable[int], needed: int) -> int:
    """How many of the largest sizes make up what is needed; all of them where they do not."""
    left, count = needed, 0
    for size in sorted(sizes, reverse=True):
        if left <= 0:
            break
        left -= size
        count += 1
    return count
