"""From described devices at known addresses to PCI functions, with links and virtual functions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.description.models import ROOT_PORT, SWITCH_PORT, DeviceModel
from homenode.description.tree import Endpoint
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.pci import PciBridge, PciDevice, PciLink, PortType


@dataclass(frozen=True, slots=True)
class Place:
    """Where functions are: their root complex with its node, and what is local to which node.

    pus_of_node: of None is what is local to no known node. models: for the bridges' ids.
    """

    source: str
    root_complex: str
    domain: int
    node: NodeIndex | None
    pus_of_node: Mapping[int | None, CpuSet]
    models: Mapping[str, DeviceModel]

    def error(self, where: str, expected: str, found: object) -> InputError:
        return InputError(f"{self.source}: {where}: expected {expected}, found {found}")


@dataclass(frozen=True, slots=True)
class Placed:
    """A function, its model ("" for bridges), and the name and group that the file gives it."""

    device: PciDevice
    model: str = ""
    name: str | None = None
    iommu_group: int | None = None


def endpoint_functions(
    place: Place, endpoint: Endpoint, bdf: Bdf, parent: Bdf | None, link: PciLink | None
) -> tuple[Placed, ...]:
    """Every function of a device, its virtual ones too. bdf: function 0. Raises InputError."""
    if bdf.function:
        raise place.error(f"{endpoint.where}.bdf", "function 0 of the device", str(bdf))
    node = place.node
    if endpoint.node is not None:
        node = None if endpoint.node < 0 else NodeIndex(endpoint.node)
    models = (endpoint.model, *endpoint.functions)
    physical = [
        _function(place, model, Bdf(bdf.domain, bdf.bus, bdf.device, i), parent, node, link)
        for i, model in enumerate(models)
    ]
    first = Placed(physical[0], endpoint.model.name, endpoint.name, endpoint.iommu_group)
    others = (Placed(f, m.name) for f, m in zip(physical[1:], endpoint.functions, strict=True))
    return (first, *others, *_virtual_functions(place, endpoint, physical[0]))


def bridge(
    place: Place,
    kind: PortType,
    bdf: Bdf,
    parent: Bdf | None,
    link: PciLink | None,
    buses: tuple[int, int],
) -> Placed:
    """A port with the buses below it, (secondary, subordinate)."""
    model = place.models[ROOT_PORT if kind is PortType.ROOT_PORT else SWITCH_PORT]
    function = _function(place, model, bdf, parent, place.node, link)
    return Placed(replace(function, bridge=PciBridge(kind, *buses), driver="pcieport"))


def trained(device: PciLink, port: PciLink | None, up: PciLink | None) -> tuple[PciLink, PciLink]:
    """The link of a device as it and as the port above it report it.

    Both ends report what is up: the least of what both can do, unless `up` says otherwise.
    """
    ends = (device, port or device)
    if up is None:
        up = PciLink(
            min(end.max_gt_per_s or 0.0 for end in ends),
            min(end.max_width or 0 for end in ends),
            None,
            None,
        )
    below, above = (
        PciLink(up.current_gt_per_s, up.current_width, end.max_gt_per_s, end.max_width)
        for end in ends
    )
    return below, above


def _virtual_functions(place: Place, endpoint: Endpoint, physical: PciDevice) -> tuple[Placed, ...]:
    """VFs follow the last function on the same bus. Source: PCIe 6.0, 9.2.1.2 (stride 1)."""
    model, bdf = endpoint.model, physical.bdf
    first = (bdf.device << 3) + 1 + len(endpoint.functions)
    if first + model.vfs > 256:
        raise place.error(f"{endpoint.where}.vfs", f"at most {256 - first}", model.vfs)
    virtual = replace(
        model,
        device_id=model.vf_device_id or model.device_id,
        driver=model.vf_driver,
        total_vfs=None,
        bars=(),
    )
    functions = (
        _function(
            place,
            virtual,
            Bdf(bdf.domain, bdf.bus, i >> 3, i & 7),
            physical.parent,
            physical.node,
            None,
        )
        for i in range(first, first + model.vfs)
    )
    return tuple(
        Placed(replace(function, physical_function=bdf), f"{model.name}-vf")
        for function in functions
    )


def _function(
    place: Place,
    model: DeviceModel,
    bdf: Bdf,
    parent: Bdf | None,
    node: NodeIndex | None,
    link: PciLink | None,
) -> PciDevice:
    return PciDevice(
        bdf=bdf,
        kind=model.kind,
        class_code=model.class_code,
        vendor_id=model.vendor_id,
        device_id=model.device_id,
        root_complex=place.root_complex,
        parent=parent,
        node=node,
        local_pus=place.pus_of_node[node],
        subsystem_vendor_id=model.subsystem_vendor_id or model.vendor_id,
        subsystem_device_id=model.subsystem_device_id or 0,
        link=link,
        driver=model.driver,
        sriov_total_vfs=model.total_vfs,
        sriov_num_vfs=None if model.total_vfs is None else model.vfs,
        bars=model.bars,
        name=model.label,
    )
