"""PCI nodes: the NUMA node of each PCI function, and gaps for unknown fields."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Gap
from homenode.machine.discover.readings import parse_address
from homenode.machine.pci import DeviceKind, PciDevice, RootComplex
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import MemoryKind, NumaNode, find_nearest_cpu_nodes
from homenode.units import parse_whole

_MAX_NUMBER = 20


class Locality(Struct, frozen=True):
    """Determines the node of a function, by the nodes of the host and its online CPUs."""

    # of each node, itself or the node of the CPUs next to it; None if several are
    cpu_node: dict[NodeIndex, NodeIndex | None]
    node_of_pus: dict[CpuSet, NodeIndex]
    online_pus: CpuSet

    @classmethod
    def from_nodes(
        cls,
        nodes: tuple[NumaNode, ...],
        online: CpuSet,
        distances: tuple[tuple[int, ...], ...] | None,
        gpu_memory: Collection[NodeIndex] = (),
    ) -> "Locality":
        """Firmware puts some GPUs on a separate node, that of their memory (GB200). Its CPUs are
        those of the nearest node, the lowest of equals in one package. A node of ordinary memory
        whose CPUs are offline does not count. gpu_memory: nodes of GPU memory according to a
        driver."""
        package_of = {node.index: node.package for node in nodes}
        cpu_node: dict[NodeIndex, NodeIndex | None] = {node.index: node.index for node in nodes}
        device_node_indexes = {node.index for node in nodes if _is_of_a_device(node)} | set(
            gpu_memory
        )
        for index, nearest in find_nearest_cpu_nodes(nodes, distances).items():
            if index not in device_node_indexes:
                continue
            packages = {package_of[node_index] for node_index in nearest}
            is_known = len(nearest) == 1 or (len(packages) == 1 and None not in packages)
            cpu_node[index] = nearest[0] if is_known else None
        return cls(cpu_node, {node.pus: node.index for node in nodes if node.pus}, online)

    def keep_online(self, pus: CpuSet) -> CpuSet:
        return pus & self.online_pus

    def find_node(self, numa_node: int | None, local_pus: CpuSet | None) -> NodeIndex | None:
        """Return the node of numa_node, or the nearest node with CPUs; else, on a host of several
        nodes with CPUs, the node that has all local CPUs (some firmware and old kernels report only
        these); else None."""
        named_node = None if numa_node is None else self.cpu_node.get(NodeIndex(numa_node))
        if named_node is not None:
            return named_node
        if local_pus is None or len(self.node_of_pus) < 2:
            return None
        local = local_pus & self.online_pus
        return next(
            (node for pus, node in self.node_of_pus.items() if local and local <= pus), None
        )

    def node_listed(self, nodes: Iterable[int], pus: CpuSet | None) -> NodeIndex | None:
        """Return the only node with CPUs among the nodes that a tool lists, such as "0,5-11" on
        GH200; without a list, the only node that has all these CPUs."""
        cpu_nodes = set(self.node_of_pus.values())
        matches = cpu_nodes.intersection(NodeIndex(node) for node in nodes)
        if not matches and pus and len(cpu_nodes) > 1:
            matches = {node for node_pus, node in self.node_of_pus.items() if pus <= node_pus}
        return matches.pop() if len(matches) == 1 else None

    def firmware_node(self, numa_node: int | None) -> NodeIndex | None:
        """Return the node of numa_node if it has no CPUs; else None."""
        if numa_node is None or self.cpu_node.get(NodeIndex(numa_node), numa_node) == numa_node:
            return None
        return NodeIndex(numa_node)

    def find_gaps(self, snapshot: Snapshot, devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
        """Return a gap for each function without a node that a VM may get, one for all others."""
        gaps: list[Gap] = []
        other_bdfs: list[Bdf] = []
        for device in devices:
            if device.node is None and device.kind in NAMED_KINDS:
                gaps.append(
                    Gap(f"node of {device.bdf}", self._explain_missing_node(snapshot, device.bdf))
                )
            elif device.node is None:
                other_bdfs.append(device.bdf)
        if other_bdfs:
            which = (
                str(other_bdfs[0])
                if len(other_bdfs) == 1
                else f"{len(other_bdfs)} other PCI functions"
            )
            reason = self._explain_missing_node(snapshot, other_bdfs[0])
            gaps.append(Gap(f"node of {which}", f"{reason} ({other_bdfs[0]})"))
        return tuple(gaps)

    def _explain_missing_node(self, snapshot: Snapshot, bdf: Bdf) -> str:
        content = snapshot.read_text(f"/sys/bus/pci/devices/{bdf}/numa_node")
        if content is None:
            return "no numa_node file, and its local CPUs are not the CPUs of one node"
        word = content.strip()[:_MAX_NUMBER]
        if word.startswith("-"):
            return f"the firmware reports no node: numa_node is {word}"
        if parse_whole(word) in self.cpu_node:
            return f"numa_node is {word}, a node without CPUs that is equally near to several"
        return f"numa_node is {word}, a node that is not online"


def _is_of_a_device(node: NumaNode) -> bool:
    is_gpu = node.memory_kind is MemoryKind.GPU
    return not node.pus and (node.generic_initiator or is_gpu or node.memory_bytes == 0)


class ReportedNode(Struct, frozen=True):
    """The node of a GPU according to its driver's tool."""

    node: NodeIndex
    tool: str


def add_tool_nodes(
    devices: tuple[PciDevice, ...], node_of_bdf: Mapping[Bdf, ReportedNode]
) -> tuple[tuple[PciDevice, ...], tuple[Gap, ...]]:
    """Add nodes from tools to GPUs without a node, and to all functions of their root complex."""
    gaps: list[Gap] = []
    placed_devices = list(devices)
    tools: dict[str, str] = {}
    for i, device in enumerate(placed_devices):
        statement = node_of_bdf.get(device.bdf)
        if device.node is None and statement is not None:
            reason = f"firmware reports no node; {statement.tool} reports {statement.node}: used"
            gaps.append(Gap(f"node of {device.bdf}", reason))
            placed_devices[i] = replace(device, node=statement.node, node_source=statement.tool)
            tools[device.root_complex] = statement.tool
    of_root: dict[str, set[NodeIndex]] = {}
    for device in placed_devices:
        if device.root_complex in tools and device.node is not None:
            of_root.setdefault(device.root_complex, set()).add(device.node)
    node_of_root = {root: nodes.pop() for root, nodes in of_root.items() if len(nodes) == 1}
    bdfs_of_root: dict[str, list[Bdf]] = {}
    for i, device in enumerate(placed_devices):
        if device.node is None and device.root_complex in node_of_root:
            root = device.root_complex
            placed_devices[i] = replace(device, node=node_of_root[root], node_source=tools[root])
            bdfs_of_root.setdefault(root, []).append(device.bdf)
    for root, bdfs in bdfs_of_root.items():
        reason = (
            f"the firmware reports none; node {node_of_root[root]}, as the GPUs of {root}: used"
        )
        gaps.append(Gap(f"node of {format_functions(bdfs)}", reason))
    return tuple(placed_devices), tuple(gaps)


def nodes_of_root_complexes(
    devices: Iterable[PciDevice],
) -> tuple[dict[str, NodeIndex | None], tuple[Gap, ...]]:
    """Return the node of each root complex: that of the functions on its own bus, if they agree."""
    nodes_of: dict[str, set[NodeIndex | None]] = {}
    for device in devices:
        nodes = nodes_of.setdefault(device.root_complex, set())
        if device.parent is None and device.node is not None:
            nodes.add(device.node)
    gaps = tuple(
        Gap(f"node of root complex {name}", f"its functions are on nodes {sorted(map(str, nodes))}")
        for name, nodes in nodes_of.items()
        if len(nodes) > 1
    )
    return {
        n: next(iter(nodes)) if len(nodes) == 1 else None for n, nodes in nodes_of.items()
    }, gaps


def list_root_complexes(
    devices: Iterable[PciDevice],
) -> tuple[tuple[RootComplex, ...], tuple[Gap, ...]]:
    """Return the root complexes of functions, by domain and bus, with their nodes."""
    node_of_root, gaps = nodes_of_root_complexes(devices)
    roots: list[RootComplex] = []
    for name, node in node_of_root.items():
        domain, _, bus = name.removeprefix("pci").partition(":")
        roots.append(RootComplex(name, int(domain, 16), int(bus, 16), node))
    return tuple(sorted(roots, key=lambda root: (root.domain, root.bus))), gaps


NAMED_KINDS = frozenset({DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME})
"""Kinds of which each function is worth a gap of its own."""


def format_functions(bdfs: Sequence[Bdf]) -> str:
    """Return the subject of a gap on functions: "0000:03:00.0", or "4 PCI functions (0000:03:00.0,
    ...)"."""
    return str(bdfs[0]) if len(bdfs) == 1 else f"{len(bdfs)} PCI functions ({bdfs[0]}, ...)"


def find_unknown_fields(devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
    """Return gaps for fields that some functions lack. Links, BARs and IOMMU groups count only for
    kinds that a VM may get, and for physical functions: virtual ones have no link of their own."""
    physical = [d for d in devices if d.kind in NAMED_KINDS and d.physical_function is None]
    has_groups = any(device.iommu_group is not None for device in devices)
    missing = (
        ("vendor", "no vendor file", [d for d in devices if d.vendor_id is None]),
        ("device id", "no device file", [d for d in devices if d.device_id is None]),
        ("link", "no link files, as on conventional PCI", [d for d in physical if d.link is None]),
        ("BARs", "no resource file, or an empty one", [d for d in physical if not d.bars]),
        (
            "IOMMU group",
            "other functions have one" if has_groups else "no function has one: is the IOMMU off?",
            [d for d in physical if d.iommu_group is None],
        ),
    )
    return tuple(
        Gap(f"{field_name} of {format_functions([device.bdf for device in lacking])}", reason)
        for field_name, reason, lacking in missing
        if lacking
    )


def find_missing_functions(
    snapshot: Snapshot, directories: Sequence[str], listed_bdfs: frozenset[Bdf]
) -> tuple[Gap, ...]:
    """Return functions with a directory below a port that /sys/bus/pci does not list."""
    mismatched_functions: list[Bdf] = []
    for directory in directories:
        for name in snapshot.list(directory) or ():
            bdf = parse_address(name)
            if bdf is not None and bdf not in listed_bdfs:
                mismatched_functions.append(bdf)
    if not mismatched_functions:
        return ()
    reason = "has a directory in /sys/devices, but is not in /sys/bus/pci/devices: omitted"
    return (Gap(format_functions(sorted(mismatched_functions)), reason),)
