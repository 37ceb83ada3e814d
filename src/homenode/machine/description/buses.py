"""Make functions with addresses, and their links, from described root complexes.

A given address sets the bus of the port above it; later buses continue from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice, pairwise

from msgspec import Struct, field
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.machine.description.devices import (
    NVIDIA_DRIVER,
    ROOT_PORT,
    SWITCH_PORT,
    DeviceModel,
    Endpoint,
    Port,
    Root,
    Switch,
)
from homenode.machine.description.tables import HostDocument, LinkTable
from homenode.machine.pci import (
    AMD,
    NVIDIA,
    DeviceKind,
    DeviceLink,
    GpuPart,
    LinkKind,
    PartKind,
    PciBridge,
    PciDevice,
    PciLink,
    PortType,
    RootComplex,
    nominal_bytes,
    partition_count,
)


class PlacedFunction(Struct, frozen=True):
    """A function, its model ("" for bridges), and the name and group that the file gives it."""

    device: PciDevice
    model: str = ""
    name: str | None = None
    iommu_group: int | None = None


def _divide_gpu(
    numbering: "_BdfNumbering", endpoint: Endpoint, gpu: PciDevice, virtual: Sequence[Bdf]
) -> PciDevice:
    """Return the GPU with its parts; virtual: addresses of its virtual functions."""
    model = endpoint.model
    if gpu.kind is not DeviceKind.GPU:
        return gpu
    vendors = {PartKind.MIG: NVIDIA, PartKind.PARTITION: AMD}
    if vendors.get(model.divided_by or PartKind.MEDIATED, gpu.vendor_id) != gpu.vendor_id:
        raise numbering.make_error(
            f"{endpoint.location}.divided_by", "what GPUs of its vendor can", model.name
        )
    if model.divided_by is PartKind.MIG and gpu.driver not in (None, NVIDIA_DRIVER):
        expected = f"{NVIDIA_DRIVER!r} on a GPU with MIG instances"
        raise numbering.make_error(f"{endpoint.location}.driver", expected, repr(gpu.driver))
    mode = {PartKind.MIG: "mig", PartKind.PARTITION: "".join(model.parts)}
    return replace(
        gpu,
        parts=tuple(_list_parts(model, gpu, virtual)),
        partition_mode=None if model.divided_by is None else mode.get(model.divided_by),
        memory_partition_mode=model.memory_mode,
    )


def _list_parts(model: DeviceModel, gpu: PciDevice, virtual: Sequence[Bdf]) -> Iterator[GpuPart]:
    kind, bdf = model.divided_by, gpu.bdf
    if kind is PartKind.MEDIATED:
        for number, profile in enumerate(model.parts):
            uuid = f"{bdf.domain:08x}-{bdf.bus:02x}{bdf.device:02x}-4000-8000-{number:012x}"
            location = virtual[number] if virtual else bdf
            yield GpuPart(kind, profile, nominal_bytes(profile), location, uuid)
        return
    # Virtual functions without a vGPU type cannot be used, although others have a type.
    types = model.parts if kind is PartKind.VIRTUAL_FUNCTION else (None,) * len(virtual)
    for location, profile_name in zip(virtual, types, strict=False):
        yield GpuPart(
            PartKind.VIRTUAL_FUNCTION, profile_name, nominal_bytes(profile_name), location
        )
    if kind is PartKind.MIG:
        for number, profile in enumerate(model.parts, start=1):
            yield GpuPart(kind, profile, nominal_bytes(profile), number=number)
    elif kind is PartKind.PARTITION:
        count = partition_count(model.parts[0], gpu.device_id)
        for number in range(count if count > 1 else 0):
            yield GpuPart(kind, model.parts[0], number=number)


def link_ends(device: PciLink, port: PciLink | None, up: PciLink | None) -> tuple[PciLink, PciLink]:
    """Return the link as reported by a device and by the port above it. Both ends report the
    current rate: the lower capability of the two, unless `up` sets it."""
    ends = (device, port or device)
    if up is None:
        up = PciLink(
            min(end.max_gt_per_s or 0.0 for end in ends),
            min(end.max_width or 0 for end in ends),
            None,
            None,
        )
    device_end, port_end = (
        PciLink(up.current_gt_per_s, up.current_width, end.max_gt_per_s, end.max_width)
        for end in ends
    )
    return device_end, port_end


MAX_FUNCTIONS = 16_384
"""Most PCI functions, and links, of a described host: a short file could name millions."""

_LAST_BUS = 0xFF
_DEFAULT_UPLINK = PciLink(32.0, 16, 32.0, 16)


class DescribedPci(Struct, frozen=True, dict=True):
    """The tree with addresses; devices ascending. Names: a device's own, or MODEL.N."""

    root_complexes: tuple[RootComplex, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    bdf_of_name: Mapping[str, Bdf] = field(default_factory=dict)
    bdfs_of_model: Mapping[str, tuple[Bdf, ...]] = field(default_factory=dict)

    @cached_property
    def device_at(self) -> dict[Bdf, PciDevice]:
        return {device.bdf: device for device in self.devices}

    @cached_property
    def uuids(self) -> frozenset[str]:
        parts = (part for device in self.devices for part in device.parts)
        return frozenset(part.uuid for part in parts if part.uuid)


def number_devices(
    source: str,
    roots: Sequence[Root],
    models: Mapping[str, DeviceModel],
    pus_of_node: Mapping[int | None, CpuSet],
    *,
    iommu: bool,
) -> DescribedPci:
    """Return the PCI tree of described roots. pus_of_node: None = CPUs local to no known node.
    Raises InputError if windows of buses overlap, run out, or an address contradicts its place."""
    # Long because each root's buses depend on those of the roots before it.
    functions: list[PlacedFunction] = []
    complexes: list[RootComplex] = []
    windows: dict[int, list[tuple[int, int]]] = {}
    for root in roots:
        in_use = windows.setdefault(root.domain, [])
        bus = root.bus
        if bus is None:
            bus = max((last for _, last in in_use), default=-1) + 1
        name = f"pci{root.domain:04x}:{bus:02x}"
        node = None if root.node is None else NodeIndex(root.node)
        numbering = _BdfNumbering(
            source=source,
            root_complex=name,
            domain=root.domain,
            last=bus,
            node=node,
            pus_of_node=pus_of_node,
            models=models,
        )
        numbering.add_root(root)
        for first_used, last_used in in_use:
            if bus <= last_used and first_used <= numbering.last:
                raise numbering.make_error(
                    f"{root.location}.bus",
                    "buses free of the other root complexes",
                    f"{bus:#04x}-{numbering.last:#04x} over {first_used:#04x}-{last_used:#04x}",
                )
        in_use.append((bus, numbering.last))
        functions += numbering.placed
        if len(functions) > MAX_FUNCTIONS:
            raise numbering.make_error(root.location, f"at most {MAX_FUNCTIONS} functions", "more")
        complexes.append(RootComplex(name, root.domain, bus, _find_stated_node(numbering.placed)))
    functions.sort(key=lambda function: function.device.bdf)
    for lower, other in pairwise(functions):
        if lower.device.bdf == other.device.bdf:
            raise InputError(
                f"{source}: root: expected each address once, found {lower.device.bdf} twice"
            )
    bdfs_of_model: dict[str, tuple[Bdf, ...]] = {}
    for function in functions:
        if function.model:
            bdfs = bdfs_of_model.get(function.model, ())
            bdfs_of_model[function.model] = (*bdfs, function.device.bdf)
    return DescribedPci(
        tuple(sorted(complexes, key=lambda function: (function.domain, function.bus))),
        _assign_groups(functions) if iommu else tuple(function.device for function in functions),
        _list_names(source, functions, bdfs_of_model),
        bdfs_of_model,
    )


def _list_names(
    source: str, functions: Sequence[PlacedFunction], bdfs_of_model: Mapping[str, tuple[Bdf, ...]]
) -> dict[str, Bdf]:
    names = {
        f"{model}.{i}": bdf for model, bdfs in bdfs_of_model.items() for i, bdf in enumerate(bdfs)
    }
    bdf_of_own_name: dict[str, Bdf] = {}
    for function in functions:
        if function.name is not None:
            if function.name in bdf_of_own_name:
                raise InputError(
                    f"{source}: root: expected each name once, found {function.name!r} for "
                    f"{bdf_of_own_name[function.name]} and {function.device.bdf}"
                )
            bdf_of_own_name[function.name] = function.device.bdf
    return names | bdf_of_own_name


def _find_stated_node(placed: Sequence[PlacedFunction]) -> NodeIndex | None:
    """Return the node of a root complex, which only the functions on its own bus show."""
    nodes = {function.device.node for function in placed if function.device.parent is None} - {None}
    return nodes.pop() if len(nodes) == 1 else None


def _assign_groups(placed_functions: Sequence[PlacedFunction]) -> tuple[PciDevice, ...]:
    """Return the devices with IOMMU groups: one per slot and per virtual function, unless set."""
    used = {function.iommu_group for function in placed_functions}
    group_of_slot: dict[tuple[int, int, int], int] = {}
    grouped_devices: list[PciDevice] = []
    following = 0
    for function in placed_functions:
        device, bdf = function.device, function.device.bdf
        slot = (bdf.domain, bdf.bus, bdf.device)
        group = function.iommu_group
        if group is None and device.physical_function is None:
            group = group_of_slot.get(slot)
        if group is None:
            while following in used:
                following += 1
            group = following
            used.add(group)
        if device.physical_function is None:
            group_of_slot.setdefault(slot, group)
        grouped_devices.append(replace(device, iommu_group=group))
    return tuple(grouped_devices)


class _BdfNumbering(Struct):
    """The functions of one root complex, numbered depth first."""

    source: str
    root_complex: str
    domain: int
    last: int  # the highest bus in use
    node: NodeIndex | None
    pus_of_node: Mapping[int | None, CpuSet]  # None -> CPUs local to devices of unknown node
    models: Mapping[str, DeviceModel]  # for the bridges' ids
    placed: list[PlacedFunction] = field(default_factory=list)

    def make_error(self, location: str, expected: str, value: object) -> InputError:
        return InputError(f"{self.source}: {location}: expected {expected}, found {value}")

    def add_root(self, root: Root) -> None:
        bus, on_bus = self.last, len(root.ports) + len(root.integrated)
        if not 1 <= on_bus <= 31:
            # The kernel shows no root complex without functions.
            raise self.make_error(f"{root.location}.ports", "1 to 31 devices on its bus", on_bus)
        for i, port in enumerate(root.ports, 1):
            self._add_port(port, PortType.ROOT_PORT, Bdf(root.domain, bus, i, 0), None)
        for i, endpoint in enumerate(root.integrated, 1 + len(root.ports)):
            bdf = endpoint.bdf or Bdf(root.domain, bus, i, 0)
            if (bdf.domain, bdf.bus) != (root.domain, bus):
                location = f"{endpoint.location}.bdf"
                raise self.make_error(location, f"an address on bus {bus:#04x}", str(bdf))
            self._add_endpoint(endpoint, bdf, None, None)

    def _add_port(self, port: Port, kind: PortType, bdf: Bdf, parent: Bdf | None) -> None:
        child, link = port.child, port.link
        bus = self._next_bus(port.location)
        if isinstance(child, Switch):
            link = self._add_switch(child, bdf, bus, link)
        elif isinstance(child, Endpoint):
            at = self._endpoint_address(child, bus)
            bus = self.last = at.bus
            device_end = None
            if child.model.link is not None:
                device_end, link = link_ends(child.model.link, link, child.model.trained)
            self._add_endpoint(child, at, bdf, device_end)
        elif link is not None:  # nothing is up
            link = PciLink(None, None, link.max_gt_per_s, link.max_width)
        self._add_bridge(kind, bdf, parent, link, bus)

    def _add_switch(
        self, switch: Switch, parent: Bdf, bus: int, port_link: PciLink | None
    ) -> PciLink:
        """Add a switch, its upstream port on `bus`; return the link that the port above reports."""
        if len(switch.children) > 32:
            count = len(switch.children)
            raise self.make_error(switch.location, "at most 32 ports of a switch", count)
        upstream = Bdf(self.domain, bus, 0, 0)
        own_link = switch.link or port_link or _DEFAULT_UPLINK
        link, port_end = link_ends(own_link, port_link, switch.trained)
        inner = self._next_bus(switch.location)
        for i, child in enumerate(switch.children):
            bdf = Bdf(self.domain, inner, i, 0)
            self._add_port(child, PortType.SWITCH_DOWNSTREAM, bdf, upstream)
        self._add_bridge(PortType.SWITCH_UPSTREAM, upstream, parent, link, inner)
        return port_end

    def _add_bridge(
        self, kind: PortType, bdf: Bdf, parent: Bdf | None, link: PciLink | None, bus: int
    ) -> None:
        """Add a port after all buses below it are numbered. bus: the first below it."""
        model = self.models[ROOT_PORT if kind is PortType.ROOT_PORT else SWITCH_PORT]
        port = self._build_function(model, bdf, parent, self.node, link)
        bridge = PciBridge(kind, bus, self.last)
        self.placed.append(PlacedFunction(replace(port, bridge=bridge, driver="pcieport")))

    def _add_endpoint(
        self, endpoint: Endpoint, bdf: Bdf, parent: Bdf | None, link: PciLink | None
    ) -> None:
        """Add every function of a device, its virtual ones too. bdf: function 0."""
        if bdf.function:
            raise self.make_error(f"{endpoint.location}.bdf", "function 0 of the device", str(bdf))
        node = self.node
        if endpoint.node is not None:
            node = None if endpoint.node < 0 else NodeIndex(endpoint.node)
        models = (endpoint.model, *endpoint.functions)
        physical = [
            self._build_function(model, Bdf(bdf.domain, bdf.bus, bdf.device, i), parent, node, link)
            for i, model in enumerate(models)
        ]
        virtual = self._virtual_functions(endpoint, physical[0])
        addresses = [function.device.bdf for function in virtual]
        physical[0] = _divide_gpu(self, endpoint, physical[0], addresses)
        name, group = endpoint.name, endpoint.iommu_group
        self.placed.append(PlacedFunction(physical[0], endpoint.model.name, name, group))
        for function, model in zip(physical[1:], endpoint.functions, strict=True):
            self.placed.append(PlacedFunction(function, model.name))
        self.placed += virtual

    def _virtual_functions(
        self, endpoint: Endpoint, physical: PciDevice
    ) -> tuple[PlacedFunction, ...]:
        """VFs follow the last function on the same bus. Source: PCIe 6.0, 9.2.1.2 (stride 1)."""
        model, bdf = endpoint.model, physical.bdf
        first = (bdf.device << 3) + 1 + len(endpoint.functions)
        if first + model.vfs > 256:
            raise self.make_error(f"{endpoint.location}.vfs", f"at most {256 - first}", model.vfs)
        virtual = replace(
            model,
            device_id=model.vf_device_id or model.device_id,
            driver=model.vf_driver,
            total_vfs=None,
            bars=(),
        )
        parent, node = physical.parent, physical.node
        addresses = (
            Bdf(bdf.domain, bdf.bus, i >> 3, i & 7) for i in range(first, first + model.vfs)
        )
        functions = (self._build_function(virtual, at, parent, node, None) for at in addresses)
        return tuple(
            PlacedFunction(replace(function, physical_function=bdf), f"{model.name}-vf")
            for function in functions
        )

    def _build_function(
        self,
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
            root_complex=self.root_complex,
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
            name=model.label,
        )

    def _endpoint_address(self, endpoint: Endpoint, bus: int) -> Bdf:
        """Return a device's address below a port: as given, else the first of the next free bus."""
        bdf = endpoint.bdf or Bdf(self.domain, bus, 0, 0)
        if bdf.domain != self.domain or bdf.bus < bus or bdf.device:
            raise self.make_error(
                f"{endpoint.location}.bdf",
                f"device 0 of a bus from {self.domain:04x}:{bus:02x} on (buses are numbered depth "
                "first)",
                str(bdf),
            )
        return bdf

    def _next_bus(self, location: str) -> int:
        if self.last >= _LAST_BUS:
            raise self.make_error(location, f"buses up to {_LAST_BUS:#x}", hex(self.last + 1))
        self.last += 1
        return self.last


_VENDOR_OF_KIND = {LinkKind.NVLINK: NVIDIA, LinkKind.C2C: NVIDIA, LinkKind.XGMI: AMD}


def parse_links(file: HostDocument, tree: DescribedPci) -> tuple[DeviceLink, ...]:
    """Return every link of [[link]], each pair once, ascending by address.

    between: a model (each of its devices with each other) or names of devices; C2C joins each of
    them with the CPU of its own node. Only links that the vendor's tools show may be described:
    NVLinks have a count, others do not.
    """
    links: dict[tuple[LinkKind, Bdf, Bdf | None], DeviceLink] = {}
    for table in file.link:
        kind, count = table.kind, table.count
        if (count is None) is (kind is LinkKind.NVLINK):
            raise table.make_error("count", "a number, only with nvlink", count)
        devices = _find_devices(table, tree)
        for device in devices:
            _check(table, kind, device)
        if kind is LinkKind.C2C:
            device_links = [DeviceLink(kind, device.bdf, None, device.node) for device in devices]
        elif len(devices) < 2:
            raise table.make_error("between", "two devices or more", [str(d.bdf) for d in devices])
        else:
            device_links = [
                DeviceLink(kind, a.bdf, b.bdf, None, count)
                for a, b in islice(combinations(devices, 2), MAX_FUNCTIONS + 1)
            ]
        if len(links) + len(device_links) > MAX_FUNCTIONS:
            raise table.make_error("between", f"at most {MAX_FUNCTIONS} links in all", "more")
        for link in device_links:
            key = (kind, link.a, link.b)
            if key in links:
                raise table.make_error("between", "each pair once", f"{link.a} and {link.b} again")
            links[key] = link
    return tuple(sorted(links.values(), key=lambda link: (link.a, link.kind, link.b or link.a)))


def _check(table: LinkTable, kind: LinkKind, device: PciDevice) -> None:
    """Reject a device that cannot have such a link, or that the vendor's tools do not show."""
    vendor = _VENDOR_OF_KIND[kind]
    is_gpu = device.kind is DeviceKind.GPU and device.physical_function is None
    if not is_gpu or device.vendor_id != vendor:
        raise table.make_error(
            "between", f"GPUs of vendor {vendor:#06x} with {kind}", str(device.bdf)
        )
    if vendor == NVIDIA and device.driver not in (None, NVIDIA_DRIVER):
        expected = f"GPUs that the driver {NVIDIA_DRIVER} has: it shows their links"
        raise table.make_error("between", expected, f"{device.bdf} with {device.driver}")
    if kind is LinkKind.C2C and device.node is None:
        raise table.make_error("between", "GPUs with a node, whose CPU they join", str(device.bdf))


def _find_devices(table: LinkTable, tree: DescribedPci) -> tuple[PciDevice, ...]:
    value = table.between
    names = value if isinstance(value, tuple) else [value]
    bdfs: list[Bdf] = []
    for name in names:
        if name in tree.bdfs_of_model and name is value:
            bdfs += tree.bdfs_of_model[name]
        elif name in tree.bdf_of_name:
            bdfs.append(tree.bdf_of_name[name])
        else:
            choices = sorted(tree.bdfs_of_model.keys() | tree.bdf_of_name.keys())[:20]
            raise table.make_error(
                "between", f"a model or names of devices, of {', '.join(choices) or 'none'}", name
            )
    if len(set(bdfs)) != len(bdfs):
        raise table.make_error("between", "each device once", value)
    return tuple(tree.device_at[bdf] for bdf in sorted(bdfs))
