"""From described devices at known addresses to PCI functions, with links and virtual functions."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.machine.description.models import NVIDIA_DRIVER, ROOT_PORT, SWITCH_PORT, DeviceModel
from homenode.machine.description.tree import Endpoint
from homenode.machine.discover.device_kinds import AMD, NVIDIA
from homenode.machine.discover.gpu_parts import partition_count
from homenode.machine.pci import (
    DeviceKind,
    GpuPart,
    PartKind,
    PciBridge,
    PciDevice,
    PciLink,
    PortType,
    nominal_bytes,
)


class Place(Struct, frozen=True):
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


class Placed(Struct, frozen=True):
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
    virtual = _virtual_functions(place, endpoint, physical[0])
    physical[0] = _divided(place, endpoint, physical[0], [each.device.bdf for each in virtual])
    first = Placed(physical[0], endpoint.model.name, endpoint.name, endpoint.iommu_group)
    others = (Placed(f, m.name) for f, m in zip(physical[1:], endpoint.functions, strict=True))
    return (first, *others, *virtual)


def _divided(place: Place, endpoint: Endpoint, gpu: PciDevice, virtual: Sequence[Bdf]) -> PciDevice:
    """The GPU with its parts; virtual: addresses of its virtual functions."""
    model = endpoint.model
    if gpu.kind is not DeviceKind.GPU:
        return gpu
    vendors = {PartKind.MIG: NVIDIA, PartKind.PARTITION: AMD}
    if vendors.get(model.divided_by or PartKind.MEDIATED, gpu.vendor_id) != gpu.vendor_id:
        raise place.error(f"{endpoint.where}.divided_by", "what GPUs of its vendor can", model.name)
    if model.divided_by is PartKind.MIG and gpu.driver not in (None, NVIDIA_DRIVER):
        expected = f"{NVIDIA_DRIVER!r} on a GPU with MIG instances"
        raise place.error(f"{endpoint.where}.driver", expected, repr(gpu.driver))
    mode = {PartKind.MIG: "mig", PartKind.PARTITION: "".join(model.parts)}
    return replace(
        gpu,
        parts=tuple(_parts(model, gpu, virtual)),
        partition_mode=None if model.divided_by is None else mode.get(model.divided_by),
        memory_partition_mode=model.memory_mode,
    )


def _parts(model: DeviceModel, gpu: PciDevice, virtual: Sequence[Bdf]) -> Iterator[GpuPart]:
    kind, bdf = model.divided_by, gpu.bdf
    if kind is PartKind.MEDIATED:
        for number, profile in enumerate(model.parts):
            uuid = f"{bdf.domain:08x}-{bdf.bus:02x}{bdf.device:02x}-4000-8000-{number:012x}"
            where = virtual[number] if virtual else bdf
            yield GpuPart(kind, profile, nominal_bytes(profile), where, uuid)
        return
    # Virtual functions without a vGPU type, next to ones that have one, can carry nothing yet.
    types = model.parts if kind is PartKind.VIRTUAL_FUNCTION else (None,) * len(virtual)
    for where, one in zip(virtual, types, strict=False):
        yield GpuPart(PartKind.VIRTUAL_FUNCTION, one, nominal_bytes(one), where)
    if kind is PartKind.MIG:
        for number, profile in enumerate(model.parts, start=1):
            yield GpuPart(kind, profile, nominal_bytes(profile), number=number)
    elif kind is PartKind.PARTITION:
        count = partition_count(model.parts[0], gpu.device_id)
        for number in range(count if count > 1 else 0):
            yield GpuPart(kind, model.parts[0], number=number)


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
