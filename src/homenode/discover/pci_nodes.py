"""PCI nodes: on which NUMA node a PCI function is, and what a tree does not give of functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.pci import DeviceKind, PciDevice
from homenode.snapshot.protocol import Snapshot
from homenode.topology import NumaNode


@dataclass(frozen=True, slots=True)
class Locality:
    """Says which node a function is on, by the nodes of the host and its online PUs."""

    nodes: frozenset[NodeIndex]
    node_of_pus: dict[CpuSet, NodeIndex]
    online_pus: CpuSet

    @classmethod
    def of(cls, nodes: tuple[NumaNode, ...], online: CpuSet) -> "Locality":
        node_of_pus = {node.pus: node.index for node in nodes if node.pus}
        return cls(frozenset(node.index for node in nodes), node_of_pus, online)

    def online(self, pus: CpuSet) -> CpuSet:
        return pus & self.online_pus

    def node_of(self, numa_node: int | None, local_pus: CpuSet | None) -> NodeIndex | None:
        """The node that numa_node names; else, on a host of several nodes with PUs, the one whose
        PUs are just the local ones (old kernels give only these); else None."""
        if numa_node is not None and numa_node in self.nodes:
            return NodeIndex(numa_node)
        if local_pus is None or len(self.node_of_pus) < 2:
            return None
        return self.node_of_pus.get(local_pus & self.online_pus)

    def gaps(self, snapshot: Snapshot, devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
        """A gap for each function without a node that a VM may get, and one for all others."""
        gaps: list[Gap] = []
        others: list[Bdf] = []
        for device in devices:
            if device.node is None and device.kind in NAMED_KINDS:
                gaps.append(Gap(f"node of {device.bdf}", self._reason(snapshot, device.bdf)))
            elif device.node is None:
                others.append(device.bdf)
        if others:
            which = str(others[0]) if len(others) == 1 else f"{len(others)} other PCI functions"
            reason = self._reason(snapshot, others[0])
            gaps.append(Gap(f"node of {which}", f"{reason} ({others[0]})"))
        return tuple(gaps)

    def _reason(self, snapshot: Snapshot, bdf: Bdf) -> str:
        said = snapshot.read_text(f"/sys/bus/pci/devices/{bdf}/numa_node")
        if said is None:
            return "no numa_node file, and its local PUs are not those of one node"
        if said.strip().startswith("-"):
            return f"the firmware gives none: numa_node says {said.strip()}"
        return f"numa_node says {said.strip()}, a node that is not online"


def nodes_of_root_complexes(
    devices: Iterable[PciDevice],
) -> tuple[dict[str, NodeIndex | None], tuple[Gap, ...]]:
    """The node of each root complex: that of the functions on its own bus, where they agree."""
    seen: dict[str, set[NodeIndex | None]] = {}
    for device in devices:
        nodes = seen.setdefault(device.root_complex, set())
        if device.parent is None and device.node is not None:
            nodes.add(device.node)
    gaps = tuple(
        Gap(f"node of root complex {name}", f"its functions are on nodes {sorted(map(str, nodes))}")
        for name, nodes in seen.items()
        if len(nodes) > 1
    )
    return {n: next(iter(nodes)) if len(nodes) == 1 else None for n, nodes in seen.items()}, gaps


NAMED_KINDS = frozenset({DeviceKind.GPU, DeviceKind.NIC, DeviceKind.NVSWITCH, DeviceKind.NVME})
"""Kinds of which each function is worth a gap of its own."""


def several(bdfs: Sequence[Bdf]) -> str:
    """How gaps name functions: "0000:03:00.0", or "4 PCI functions (0000:03:00.0, ...)"."""
    return str(bdfs[0]) if len(bdfs) == 1 else f"{len(bdfs)} PCI functions ({bdfs[0]}, ...)"


def unknown_fields(devices: tuple[PciDevice, ...]) -> tuple[Gap, ...]:
    """A gap for each field that some functions lack. Links, BARs and IOMMU groups count only for
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
            "other functions have one" if has_groups else "none has one: is the IOMMU off?",
            [d for d in physical if d.iommu_group is None],
        ),
    )
    return tuple(
        Gap(f"{what} of {several([device.bdf for device in found])}", reason)
        for what, reason, found in missing
        if found
    )


def functions_off_the_bus(
    snapshot: Snapshot, folders: Sequence[str], known: frozenset[Bdf]
) -> tuple[Gap, ...]:
    """Functions with a folder below a root complex or bridge that /sys/bus/pci does not list."""
    stray: list[Bdf] = []
    for folder in folders:
        for name in snapshot.list(folder) or ():
            try:
                bdf = Bdf.parse(name)
            except ParseError:
                continue
            if bdf not in known:
                stray.append(bdf)
    if not stray:
        return ()
    reason = "has a folder in /sys/devices, but is not in /sys/bus/pci/devices: left out"
    return (Gap(several(sorted(stray)), reason),)
