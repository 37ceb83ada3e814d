"""Machine: a host as the kubelet's managers see it.

Source: google/cadvisor (machine information), pkg/kubelet/cm/cpumanager/topology of Kubernetes.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pods.checkpoints import Checkpoints, with_running_pods
from homenode.cluster.pods.cpu_assignment import CpuPlace, CpuTopology
from homenode.cluster.pods.kubelet import Kubelet
from homenode.cluster.pods.node import Node, empty_node
from homenode.cluster.pods.pod import HUGE_PAGES, Pod
from homenode.errors import InputError
from homenode.gap import Gap
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host

_VENDORS = {"nvidia.com/": 0x10DE, "amd.com/": 0x1002, "gpu.intel.com/": 0x8086}
"""Device plugins that announce the GPUs of their vendor."""
_LOCAL, _REMOTE = 10, 20


def node_of_host(
    host: Host,
    kubelet: Kubelet,
    resources: Iterable[str],
    named: Mapping[str, tuple[Bdf, ...]],
    checkpoints: Checkpoints,
) -> tuple[Node, tuple[Gap, ...]]:
    """The node, and what could not be known of it.

    resources: that a pod asks for. named: the devices of a resource, where the user says so;
    otherwise a GPU vendor's resource means its GPUs. Raises InputError for a host without PUs.
    """
    gaps: list[Gap] = []
    devices: dict[str, dict[str, tuple[int, ...]]] = {}
    for resource in sorted({*resources, *named}):
        found = _devices(host, resource, named.get(resource))
        if found is None:
            gaps.append(
                Gap(
                    f"resource {resource}",
                    "which devices of the host it stands for is not known: it is not counted",
                )
            )
        else:
            devices[resource] = found
    policies = kubelet.policies()
    if policies.memory_policy == "Static" and any(n.memory_bytes is None for n in host.nodes):
        policies = replace(policies, memory_policy="None")
        gaps.append(Gap("memory of the nodes", "not in the host's source: it is not counted"))
    node = empty_node(
        policies,
        tuple(int(node.index) for node in host.nodes),
        _distances(host),
        _cpus(host),
        _memory(host),
        devices,
    )
    return with_running_pods(node, checkpoints), tuple(gaps)


def with_known_memory(pod: Pod, host: Host) -> tuple[Pod, tuple[Gap, ...]]:
    """The pod without its memory, where it requests huge pages and the host's source says nothing
    of any: all kinds of memory are aligned together."""
    asked = {n for c in pod.containers for n in c.memory_bytes if n.startswith(HUGE_PAGES)}
    if not asked or any(node.page_pools for node in host.nodes):
        return pod, ()
    containers = tuple(replace(c, memory_bytes={}) for c in pod.containers)
    gaps = tuple(
        Gap(f"{name} of the nodes", "not in the host's source: memory is not counted")
        for name in sorted(asked)
    )
    return replace(pod, containers=containers), gaps


def _cpus(host: Host) -> CpuTopology:
    places: dict[int, CpuPlace] = {}
    cores = {pu: min(core.pus) for core in host.cores for pu in core.pus}
    for pu in host.pus:
        if pu.online and pu.node is not None:
            socket = 0 if pu.package is None else int(pu.package)
            cache = socket if pu.llc is None else int(pu.llc)
            core = int(cores.get(pu.index, pu.index))
            places[int(pu.index)] = CpuPlace(
                core=core, socket=socket, node=int(pu.node), uncore=cache
            )
    if not places:
        raise InputError(
            f"host {host.name!r}: expected PUs on NUMA nodes, found none in its source",
            hint="a capture has them: homenode capture",
        )
    return CpuTopology(places, len({place.socket for place in places.values()}))


def _distances(host: Host) -> tuple[tuple[int, ...], ...]:
    if host.distances is not None:
        return host.distances
    indices = range(len(host.nodes))
    return tuple(tuple(_LOCAL if a == b else _REMOTE for b in indices) for a in indices)


def _memory(host: Host) -> dict[int, dict[str, int]]:
    """Huge pages count with the rest, as in MemTotal."""
    found: dict[int, dict[str, int]] = {}
    sizes = {pool.page_bytes for node in host.nodes for pool in node.page_pools}
    for node in host.nodes:
        pools = {pool.page_bytes: pool.total_pages for pool in node.page_pools}
        pages = {f"hugepages-{_binary(size)}": pools.get(size, 0) * size for size in sorted(sizes)}
        found[int(node.index)] = {"memory": node.memory_bytes or 0, **pages}
    return found


def _binary(size: int) -> str:
    for unit, shift in (("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if size >> shift << shift == size and size >> shift:
            return f"{size >> shift}{unit}"
    return str(size)


def _devices(
    host: Host, resource: str, named: tuple[Bdf, ...] | None
) -> dict[str, tuple[int, ...]] | None:
    if named is not None:
        found = [host.device(bdf) for bdf in named]
        missing = [str(b) for b, device in zip(named, found, strict=True) if device is None]
        if missing:
            raise InputError(
                f"--device {resource}: expected devices of host {host.name!r}, found none at "
                f"{', '.join(missing)}"
            )
        chosen = [device for device in found if device is not None]
    else:
        vendor = next((v for prefix, v in _VENDORS.items() if resource.startswith(prefix)), None)
        if vendor is None or not host.pci_devices or "/mig-" in resource:
            return None
        chosen = [
            device
            for device in host.devices_of_kind(DeviceKind.GPU)
            if device.vendor_id == vendor and device.physical_function is None
        ]
    # Device plugins announce what numa_node says, also where that node has no CPUs.
    nodes = {d.bdf: d.reported_node for d in chosen}
    return {str(bdf): () if node is None else (int(node),) for bdf, node in nodes.items()}
