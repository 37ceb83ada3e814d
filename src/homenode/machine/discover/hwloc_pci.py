"""hwloc PCI: root complexes, functions and links between devices from hwloc's XML.

Locality is that of the host bridge: the CPUs of the object to which it is attached.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import ParseError
from homenode.findings import Gap
from homenode.machine.discover.pci_nodes import format_functions, list_root_complexes
from homenode.machine.pci import (
    NVIDIA,
    PCI_BRIDGE_CLASS,
    DeviceKind,
    DeviceLink,
    LinkKind,
    PciBridge,
    PciDevice,
    PortType,
    RootComplex,
    classify_device,
    port_types_by_structure,
)
from homenode.machine.tools.hwloc_xml import HwlocDistances, HwlocObject, parse_pus
from homenode.machine.topology import NumaNode

_BUSES = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-([0-9a-f]{2})\]", re.ASCII)
# "0302 [10de:1db8] [10de:131d] a1 00": class, ids, subsystem, revision, (version 3) interface
_TYPE = re.compile(
    r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\] \[([0-9a-f]{4}):([0-9a-f]{4})\] "
    r"[0-9a-f]{2}(?: ([0-9a-f]{2}))?",
    re.ASCII,
)
_LINK_KINDS = {"NVLinkBandwidth": LinkKind.NVLINK, "XGMIBandwidth": LinkKind.XGMI}

Pci = tuple[tuple[RootComplex, ...], tuple[PciDevice, ...], tuple[DeviceLink, ...], tuple[Gap, ...]]


class _Function(Struct, frozen=True):
    """A function with the facts from its place in the document."""

    obj: HwlocObject
    root_complex: str
    parent: Bdf | None
    nearest_pus: CpuSet


def read_hwloc_pci(
    machine: HwlocObject,
    matrices: tuple[HwlocDistances, ...],
    nodes: tuple[NumaNode, ...],
    listed_cpus: CpuSet,
    source: str,
) -> Pci:
    """Return root complexes, functions, links and gaps of a document."""
    walk = _Walk(source)
    walk.read_children(machine, machine, None, None)
    functions = walk.functions
    if not functions:
        return (), (), (), (Gap("PCI functions", "not in the XML"),)
    classes = {bdf: _parse_type(f.obj, source) for bdf, f in functions.items()}
    bridges = {bdf: t[0] for bdf, t in classes.items() if t[0] >> 8 == PCI_BRIDGE_CLASS}
    port_types = port_types_by_structure(bridges, {b: f.parent for b, f in functions.items()})
    # A device may hang below a part of a node: on an MI250X host, each below its own L3.
    nodes_of_near = {
        nearest_pus: [node.index for node in nodes if nearest_pus and nearest_pus <= node.pus]
        for nearest_pus in {function.nearest_pus & listed_cpus for function in functions.values()}
    }
    node_of = {
        nearest_pus: indices[0]
        for nearest_pus, indices in nodes_of_near.items()
        if len(indices) == 1
    }
    devices = tuple(
        _build_device(
            bdf,
            functions[bdf],
            classes[bdf],
            _build_bridge(functions[bdf].obj, port_types.get(bdf), source),
            functions[bdf].nearest_pus & listed_cpus,
            node_of,
        )
        for bdf in sorted(functions)
    )
    roots, root_gaps = list_root_complexes(devices)
    gaps = [
        *root_gaps,
        Gap("PCI functions that hwloc omitted", "lstopo keeps only some without --filter io:all"),
        Gap("PCI link speeds and widths", "hwloc XML holds only the bandwidth of each link"),
        Gap("drivers, IOMMU groups, SR-IOV and BARs", "not in hwloc XML"),
    ]
    gaps += [
        Gap(f"PCI function {bdf}", "twice in the XML: the first counts, on no node if they differ")
        for bdf in sorted(walk.repeated)
    ]
    if bridges:
        gaps.append(Gap(f"port types of {len(bridges)} PCI bridges", "taken from the tree"))
    unplaced_bdfs = [device.bdf for device in devices if device.node is None]
    if unplaced_bdfs:
        reason = "hwloc attaches them to an object that is not one node"
        gaps.append(Gap(f"node of {format_functions(unplaced_bdfs)}", reason))
    return roots, devices, _list_links(matrices, walk.bdf_of_object), tuple(gaps)


class _Walk:
    """Functions in order, repeated ones, and each device's function, by type and gp_index."""

    def __init__(self, source: str) -> None:
        self.functions: dict[Bdf, _Function] = {}
        self.bdf_of_object: dict[str, Bdf] = {}
        self.repeated: set[Bdf] = set()
        self._source = source

    def read_children(
        self, obj: HwlocObject, place: HwlocObject, root_complex: str | None, parent: Bdf | None
    ) -> None:
        """place: the object with CPUs around `obj`. parent: the function directly above."""
        for child in obj.children:
            if child.type not in ("Bridge", "PCIDev", "OSDev"):
                self.read_children(child, child, None, None)
                continue
            gp_index = child.attributes.get("gp_index")
            busid = child.attributes.get("pci_busid")
            if child.type == "OSDev":
                if parent is not None and gp_index is not None:
                    self.bdf_of_object[f"OSDev:{gp_index}"] = parent
                continue
            if busid is None:  # a host bridge is no function of its own
                buses = _parse_buses(child, self._source)
                name = None if buses is None else f"pci{buses[0]}:{buses[1]:02x}"
                self.read_children(child, place, name, None)
                continue
            bdf = Bdf.parse(busid, self._source)
            root = root_complex or f"pci{bdf.domain:04x}:{bdf.bus:02x}"
            nearest_pus = parse_pus(place, "cpuset", self._source)
            function = self.functions.setdefault(bdf, _Function(child, root, parent, nearest_pus))
            if function.obj is not child:
                # An edited document may have one twice. Its first place counts, but not for its
                # node.
                self.repeated.add(bdf)
                nearest_pus = (
                    function.nearest_pus if function.nearest_pus == nearest_pus else CpuSet()
                )
                self.functions[bdf] = replace(function, nearest_pus=nearest_pus)
            if gp_index is not None:
                self.bdf_of_object[f"PCIDev:{gp_index}"] = bdf
            self.read_children(child, place, root, bdf)


def _parse_buses(obj: HwlocObject, source: str) -> tuple[str, int, int] | None:
    text = obj.attributes.get("bridge_pci")
    if text is None:
        return None
    match = _BUSES.fullmatch(text)
    if match is None:
        raise ParseError(source, "buses such as 0000:[2b-3b]", text)
    return match[1], int(match[2], 16), int(match[3], 16)


def _parse_type(obj: HwlocObject, source: str) -> tuple[int, int | None, int | None, int, int]:
    """Return (class code, vendor, device, subsystem vendor and device) of pci_type.

    Only version 3 has the interface (last byte of the class code); otherwise it is 0.
    hwloc writes 0000:0000 for ids that it could not read.
    """
    text = obj.attributes.get("pci_type", "")
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ParseError(source, "a pci_type such as 0302 [10de:1db8] [10de:131d] a1", text)
    vendor, device = int(match[2], 16), int(match[3], 16)
    return (
        int(match[1], 16) << 8 | int(match[6] or "0", 16),
        vendor or None,
        device if vendor else None,
        int(match[4], 16),
        int(match[5], 16),
    )


def _build_bridge(obj: HwlocObject, port_type: PortType | None, source: str) -> PciBridge | None:
    buses = _parse_buses(obj, source)
    if port_type is None:
        return None
    return PciBridge(port_type, *(buses[1:] if buses else (0, 0)))


def _build_device(
    bdf: Bdf,
    function: _Function,
    type_fields: tuple[int, int | None, int | None, int, int],
    bridge: PciBridge | None,
    nearest_pus: CpuSet,
    node_of: dict[CpuSet, NodeIndex],
) -> PciDevice:
    class_code, vendor, device, subsystem_vendor, subsystem_device = type_fields
    # What NVIDIA's library gave hwloc, also of one that had no class to read (seen on a DGX-2).
    is_nvswitch = function.obj.attributes.get("subtype") == "NVSwitch"
    return PciDevice(
        bdf=bdf,
        kind=DeviceKind.NVSWITCH if is_nvswitch else classify_device(class_code, vendor, device),
        class_code=class_code,
        vendor_id=NVIDIA if is_nvswitch else vendor,
        device_id=device,
        root_complex=function.root_complex,
        parent=function.parent,
        node=node_of.get(nearest_pus),
        local_pus=nearest_pus,
        subsystem_vendor_id=subsystem_vendor or None,
        subsystem_device_id=subsystem_device if subsystem_vendor else None,
        name=function.obj.infos.get("PCIDevice") or function.obj.attributes.get("name"),
        bridge=bridge,
    )


def _list_links(
    matrices: tuple[HwlocDistances, ...], bdf_of_object: dict[str, Bdf]
) -> tuple[DeviceLink, ...]:
    """Return links by matrices of bandwidth; 0 is not a link. XGMI gives every pair of a hive a
    bandwidth, so that only pairs one hop apart count if hops are given."""
    hops = {
        frozenset((a, b)): matrix.values[i][j]
        for matrix in matrices
        if matrix.name == "XGMIHops"
        for i, a in enumerate(matrix.objects)
        for j, b in enumerate(matrix.objects)
    }
    links: list[DeviceLink] = []
    for matrix in matrices:
        kind = _LINK_KINDS.get(matrix.name)
        if kind is None:
            continue
        for i, a in enumerate(matrix.objects):
            for j in range(i + 1, len(matrix.objects)):
                b = matrix.objects[j]
                first, second = bdf_of_object.get(a), bdf_of_object.get(b)
                if first is None or second is None or first == second or not matrix.values[i][j]:
                    continue
                if kind is LinkKind.XGMI and hops.get(frozenset((a, b)), 1) != 1:
                    continue
                links.append(DeviceLink(kind, min(first, second), max(first, second)))
    return tuple(sorted(links, key=lambda link: (link.a, link.b or link.a)))
