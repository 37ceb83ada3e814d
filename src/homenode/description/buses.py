"""From described root complexes to functions with addresses: buses are numbered depth first.

A given address is honoured: the port above it takes that bus, and what follows is numbered on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.description.models import ROOT_PORT, SWITCH_PORT, DeviceModel
from homenode.description.tree import Endpoint, Port, Root, Switch
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.pci import PciBridge, PciDevice, PciLink, PortType, RootComplex

_LAST_BUS = 0xFF
_DEFAULT_UPLINK = PciLink(32.0, 16, 32.0, 16)


@dataclass(frozen=True, slots=True)
class PciTree:
    """The tree with addresses; devices ascending. names: a device's name, or MODEL.N -> address."""

    root_complexes: tuple[RootComplex, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    bdf_of_name: Mapping[str, Bdf] = field(default_factory=dict)
    bdfs_of_model: Mapping[str, tuple[Bdf, ...]] = field(default_factory=dict)


def address(
    source: str,
    roots: Sequence[Root],
    models: Mapping[str, DeviceModel],
    pus_of_node: Mapping[int | None, CpuSet],
    *,
    iommu: bool,
) -> PciTree:
    """The PCI tree of described roots. pus_of_node: of None is what is local to no known node.

    Raises InputError where windows of buses overlap, run out, or an address contradicts its place.
    """
    walk = _Walk(source, models, pus_of_node)
    complexes: list[RootComplex] = []
    windows: dict[int, list[tuple[int, int]]] = {}
    for root in roots:
        taken = windows.setdefault(root.domain, [])
        bus = root.bus
        if bus is None:
            bus = max((last for _, last in taken), default=-1) + 1
        name = f"pci{root.domain:04x}:{bus:02x}"
        node = None if root.node is None else NodeIndex(root.node)
        last = walk.root(root, name, node, bus)
        for first_taken, last_taken in taken:
            if bus <= last_taken and first_taken <= last:
                raise InputError(
                    f"{source}: {root.where}.bus: expected buses free of the other root complexes, "
                    f"found {bus:#04x}-{last:#04x} over {first_taken:#04x}-{last_taken:#04x}"
                )
        taken.append((bus, last))
        complexes.append(RootComplex(name, root.domain, bus, walk.node_of_root(name)))
    devices = sorted(walk.devices, key=lambda device: device.bdf)
    for one, other in pairwise(devices):
        if one.bdf == other.bdf:
            raise InputError(f"{source}: root: expected each address once, found {one.bdf} twice")
    by_model: dict[str, list[Bdf]] = {}
    for model, bdf in sorted(walk.of_model, key=lambda pair: pair[1]):
        by_model.setdefault(model, []).append(bdf)
    names = {f"{model}.{i}": b for model, bdfs in by_model.items() for i, b in enumerate(bdfs)}
    return PciTree(
        tuple(sorted(complexes, key=lambda each: (each.domain, each.bus))),
        tuple(_grouped(devices, walk.group_of) if iommu else devices),
        names | walk.bdf_of_name,
        {model: tuple(bdfs) for model, bdfs in by_model.items()},
    )


def _grouped(devices: Sequence[PciDevice], told: Mapping[Bdf, int]) -> list[PciDevice]:
    """The devices with IOMMU groups: one per slot and per virtual function, unless told."""
    used = set(told.values())
    group_of_slot: dict[tuple[int, int, int], int] = {}
    grouped = []
    following = 0
    for device in devices:
        bdf = device.bdf
        slot = (bdf.domain, bdf.bus, bdf.device)
        group = told.get(bdf)
        if group is None and device.physical_function is None:
            group = group_of_slot.get(slot)
        if group is None:
            while following in used:
                following += 1
            group = following
            used.add(group)
        if device.physical_function is None:
            group_of_slot.setdefault(slot, group)
        grouped.append(replace(device, iommu_group=group))
    return grouped


@dataclass(slots=True)
class _Walk:
    """What has been numbered so far: the devices, by whom they are named, and the groups told."""

    source: str
    models: Mapping[str, DeviceModel]
    pus_of_node: Mapping[int | None, CpuSet]
    devices: list[PciDevice] = field(default_factory=list)
    bdf_of_name: dict[str, Bdf] = field(default_factory=dict)
    of_model: list[tuple[str, Bdf]] = field(default_factory=list)
    group_of: dict[Bdf, int] = field(default_factory=dict)
    _root: str = ""
    _domain: int = 0
    _node: NodeIndex | None = None

    def root(self, root: Root, name: str, node: NodeIndex | None, bus: int) -> int:
        """Numbers one root complex; the last bus that it uses."""
        self._root, self._domain, self._node = name, root.domain, node
        on_bus = len(root.ports) + len(root.integrated)
        if not 1 <= on_bus <= 31:
            # The kernel shows no root complex without functions.
            raise self._error(f"{root.where}.ports", "1 to 31 devices on its bus", on_bus)
        last = bus
        for i, port in enumerate(root.ports, 1):
            last = self._port(port, ROOT_PORT, PortType.ROOT_PORT, bus, i, None, last)
        for i, endpoint in enumerate(root.integrated, 1 + len(root.ports)):
            bdf = endpoint.bdf or Bdf(root.domain, bus, i, 0)
            if (bdf.domain, bdf.bus) != (root.domain, bus):
                where = f"{endpoint.where}.bdf"
                raise self._error(where, f"an address on bus {bus:#04x}", str(bdf))
            self._endpoint(endpoint, bdf, None, None)
        return last

    def node_of_root(self, name: str) -> NodeIndex | None:
        """The node of a root complex, which only the functions on its own bus tell."""
        on_bus = [d for d in self.devices if d.root_complex == name and d.parent is None]
        nodes = {device.node for device in on_bus if device.node is not None}
        return nodes.pop() if len(nodes) == 1 else None

    def _port(
        self, port: Port, model: str, kind: PortType, bus: int, device: int,
        parent: Bdf | None, last: int,
    ) -> int:  # fmt: skip
        """Numbers a port on a bus and what is below it; the last bus used so far."""
        child = port.child
        secondary = last + 1
        if isinstance(child, Endpoint) and child.bdf is not None:
            given = child.bdf
            if given.domain != self._domain or given.bus < secondary or given.device:
                raise self._error(
                    f"{child.where}.bdf",
                    f"device 0 of a bus from {self._domain:04x}:{secondary:02x} on (buses are "
                    "numbered depth first)",
                    str(given),
                )
            secondary = given.bus
        if secondary > _LAST_BUS:
            raise self._error(port.where, f"buses up to {_LAST_BUS:#x}", hex(secondary))
        bdf = Bdf(self._domain, bus, device, 0)
        position = len(self.devices)
        subordinate = secondary
        link = None if port.link is None else replace(port.link, current_gt_per_s=None,
                                                      current_width=None)  # fmt: skip
        if isinstance(child, Endpoint):
            below = Bdf(self._domain, secondary, 0, child.bdf.function if child.bdf else 0)
            link = self._endpoint(child, below, bdf, port.link)
        elif isinstance(child, Switch):
            link, subordinate = self._switch(child, bdf, secondary, port.link)
        self.devices.insert(
            position, self._bridge(model, kind, bdf, parent, link, secondary, subordinate)
        )
        return subordinate

    def _switch(
        self, switch: Switch, parent: Bdf, bus: int, port_link: PciLink | None
    ) -> tuple[PciLink, int]:
        if len(switch.children) > 32:
            raise self._error(switch.where, "at most 32 ports of a switch", len(switch.children))
        upstream = Bdf(self._domain, bus, 0, 0)
        link, above = _trained(switch.uplink or port_link or _DEFAULT_UPLINK, port_link, None)
        last = bus + 1
        if last > _LAST_BUS:
            raise self._error(switch.where, f"buses up to {_LAST_BUS:#x}", hex(last))
        position = len(self.devices)
        for i, child in enumerate(switch.children):
            last = self._port(
                child, SWITCH_PORT, PortType.SWITCH_DOWNSTREAM, bus + 1, i, upstream, last
            )
        self.devices.insert(
            position,
            self._bridge(
                SWITCH_PORT, PortType.SWITCH_UPSTREAM, upstream, parent, link, bus + 1, last
            ),
        )
        return above, last

    def _endpoint(
        self, endpoint: Endpoint, bdf: Bdf, parent: Bdf | None, port_link: PciLink | None
    ) -> PciLink | None:
        """Adds a device with its functions; the link as the port above it has it."""
        if bdf.function:
            raise self._error(f"{endpoint.where}.bdf", "function 0 of the device", str(bdf))
        model = endpoint.model
        link = above = None
        if model.link is not None and parent is not None:
            link, above = _trained(model.link, port_link, model.trained)
        node = self._node
        if endpoint.node is not None:
            node = None if endpoint.node < 0 else NodeIndex(endpoint.node)
        for i, each in enumerate((model, *endpoint.functions)):
            function = Bdf(bdf.domain, bdf.bus, bdf.device, i)
            self._function(each, function, parent, node, link)
        if endpoint.iommu_group is not None:
            self.group_of[bdf] = endpoint.iommu_group
        if endpoint.name is not None:
            if endpoint.name in self.bdf_of_name:
                raise self._error(f"{endpoint.where}.name", "a name of one device", endpoint.name)
            self.bdf_of_name[endpoint.name] = bdf
        self._virtual_functions(endpoint, bdf, parent, node)
        return above

    def _function(
        self, model: DeviceModel, bdf: Bdf, parent: Bdf | None, node: NodeIndex | None,
        link: PciLink | None,
    ) -> None:  # fmt: skip
        self.of_model.append((model.name, bdf))
        self.devices.append(
            PciDevice(
                bdf=bdf,
                kind=model.kind,
                class_code=model.class_code,
                vendor_id=model.vendor_id,
                device_id=model.device_id,
                root_complex=self._root,
                parent=parent,
                node=node,
                local_pus=self.pus_of_node[node],
                subsystem_vendor_id=model.subsystem_vendor_id or model.vendor_id,
                subsystem_device_id=model.subsystem_device_id or 0,
                link=link,
                driver=model.driver,
                sriov_total_vfs=model.total_vfs,
                sriov_num_vfs=None if model.total_vfs is None else model.vfs,
                bars=model.bars,
            )
        )

    def _virtual_functions(
        self, endpoint: Endpoint, bdf: Bdf, parent: Bdf | None, node: NodeIndex | None
    ) -> None:
        """VFs follow the last function on the same bus. Source: PCIe 6.0, 9.2.1.2 (stride 1)."""
        model = endpoint.model
        first = (bdf.device << 3) + 1 + len(endpoint.functions)
        if first + model.vfs > 256:
            raise self._error(f"{endpoint.where}.vfs", f"at most {256 - first}", model.vfs)
        for i in range(first, first + model.vfs):
            function = Bdf(bdf.domain, bdf.bus, i >> 3, i & 7)
            vf = replace(
                model,
                name=f"{model.name}-vf",
                device_id=model.vf_device_id or model.device_id,
                driver=model.vf_driver,
                total_vfs=None,
                bars=(),
            )
            self._function(vf, function, parent, node, None)
            self.devices[-1] = replace(self.devices[-1], physical_function=bdf)

    def _bridge(
        self, model: str, kind: PortType, bdf: Bdf, parent: Bdf | None, link: PciLink | None,
        secondary: int, subordinate: int,
    ) -> PciDevice:  # fmt: skip
        ids = self.models[model]
        return PciDevice(
            bdf=bdf,
            kind=ids.kind,
            class_code=ids.class_code,
            vendor_id=ids.vendor_id,
            device_id=ids.device_id,
            root_complex=self._root,
            parent=parent,
            node=self._node,
            local_pus=self.pus_of_node[self._node],
            subsystem_vendor_id=ids.subsystem_vendor_id or ids.vendor_id,
            subsystem_device_id=ids.subsystem_device_id or 0,
            link=link,
            bridge=PciBridge(kind, secondary, subordinate),
            driver="pcieport",
        )

    def _error(self, where: str, expected: str, found: object) -> InputError:
        return InputError(f"{self.source}: {where}: expected {expected}, found {found}")


def _trained(
    device: PciLink, port: PciLink | None, trained: PciLink | None
) -> tuple[PciLink, PciLink]:
    """The link of a device as it and as the port above it report it.

    Both ends report what is up: the least of what both can do, unless `trained` says otherwise.
    """
    port = port or device
    speeds = [s for s in (device.max_gt_per_s, port.max_gt_per_s) if s is not None]
    widths = [w for w in (device.max_width, port.max_width) if w is not None]
    current = trained or PciLink(min(speeds), min(widths), None, None)
    return (
        PciLink(
            current.current_gt_per_s, current.current_width, device.max_gt_per_s, device.max_width
        ),
        PciLink(current.current_gt_per_s, current.current_width, port.max_gt_per_s, port.max_width),
    )
