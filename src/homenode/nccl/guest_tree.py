"""GuestTree: what of a machine NCCL reads in /sys: GPUs, switches above them, nodes and CPUs.

From a capture made in the guest, or from the document that a guest is started with and its host.
NCCL goes up the PCI path two functions at a time, port and switch, and takes the NUMA node of the
last one before the root complex. Source: ncclTopoGetXmlFromSys in src/graph/xml.cc.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.gap import Gap
from homenode.machine.pci import DeviceKind, LinkKind, PciDevice, PciLink
from homenode.machine.topology import Host
from homenode.nccl.guest_side import bus_numbers, kernel_address, nodes_in_order
from homenode.vm.layout import GuestCells
from homenode.vm.model import GuestAddress, GuestPciController, Vm, cell_of_hostdev
from homenode.vm.plan_model import Plan

QEMU_PORT = PciLink(None, None, 16.0, 32)
"""A pcie-root-port as QEMU makes it. Source: hw/pci-bridge/gen_pcie_root_port.c."""

QEMU_SWITCH = PciLink(None, None, 2.5, 1)
"""A port of QEMU's switches (hw/pci-bridge/xio3130_*.c)."""

_AMD = 0x1002
_MELLANOX = 0x15B3
ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64", "ppc64": "ppc64"}


class TreeLink(Struct, frozen=True):
    """What sysfs gives of a function and of the port above it; None where it gives nothing."""

    own: PciLink | None
    port: PciLink | None


class TreeSwitch(Struct, frozen=True, kw_only=True):
    """A function that NCCL makes a PCI node of. key: equal for the same function.

    ids: vendor, device, subsystem's two, 16 bits each, in one number; 0 where unknown.
    """

    key: str
    link: TreeLink
    ids: int = 0


class TreeGpu(Struct, frozen=True, kw_only=True):
    """A GPU. node: the kernel's, None for -1. switches: from the CPU down.

    nvlinks: (address, links) of the GPUs that it has NVLink or xGMI to. link_gb_per_s: of one of
    these, as the library has it. has_c2c: its CPU is joined to it by NVLink-C2C.
    """

    address: Bdf
    node: int | None
    link: TreeLink
    switches: tuple[TreeSwitch, ...] = ()
    nvlinks: tuple[tuple[Bdf, int | None], ...] = ()
    link_gb_per_s: float = 20.0
    is_amd: bool = False
    has_c2c: bool = False


class TreeNic(Struct, frozen=True, kw_only=True):
    """A NIC that NCCL can use by verbs. node, switches: as of a GPU. gb_per_s: of its port, None
    where it is not known. name: the model."""

    address: Bdf
    node: int | None
    link: TreeLink
    switches: tuple[TreeSwitch, ...] = ()
    gb_per_s: float | None = None
    name: str | None = None


class GuestTree(Struct, frozen=True, kw_only=True):
    """A machine as NCCL sees it without a file. vcpus_of_node: of every node that has CPUs.

    gpus, nics: ascending by address. nic_nodes: nodes with NICs and without GPUs, -1 for none.
    Architecture, vendor, family and model: the CPU's, as NCCL has them; None where unknown.
    """

    source: str
    architecture: str | None
    vendor: str | None
    family: int | None
    model: int | None
    vcpus_of_node: tuple[tuple[int, CpuSet], ...]
    gpus: tuple[TreeGpu, ...]
    gaps: tuple[Gap, ...] = ()
    nic_nodes: tuple[int, ...] = ()
    nics: tuple[TreeNic, ...] = ()

    @property
    def vcpus(self) -> CpuSet:
        bits = 0
        for _, vcpus in self.vcpus_of_node:
            bits |= vcpus.bits
        return CpuSet.from_bits(bits)

    def nodes_of(self, vcpus: CpuSet) -> tuple[int, ...]:
        """Nodes that these vCPUs are of, ascending."""
        return tuple(node for node, own in self.vcpus_of_node if not own.isdisjoint(vcpus))


def tree_of_host(host: Host) -> GuestTree:
    """The tree of a machine's own discovery: a guest that was captured, or a bare machine.

    Raises InputError for a machine without a GPU.
    """
    gpus = [gpu for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.driver != "vfio-pci"]
    if not gpus:
        raise _no_gpu(host.name)
    online = CpuSet(pu.index for pu in host.pus if pu.online)
    own = tuple(_gpu_of_host(host, gpu) for gpu in sorted(gpus, key=lambda gpu: gpu.bdf))
    gaps = [
        Gap(f"link of {gpu.bdf}", "its source gives none: NCCL would read the machine's own")
        for gpu in gpus
        if gpu.link is None or gpu.link.max_gt_per_s is None
    ]
    return GuestTree(
        source=host.name,
        architecture=ARCHITECTURES.get(host.architecture or ""),
        vendor=host.cpu.vendor,
        family=host.cpu.family,
        model=host.cpu.model,
        vcpus_of_node=tuple(
            (int(node.index), node.pus & online) for node in host.nodes if node.pus
        ),
        gpus=own,
        gaps=(*gaps, *_cpu_gaps(host)),
        nic_nodes=_nic_nodes(
            (_place_of_host(host, nic)[0] for nic in host.devices_of_kind(DeviceKind.NIC)), own
        ),
        nics=tuple(_nic_of_host(host, nic) for nic in _verbs_nics(host)),
    )


def with_port_rate(tree: GuestTree, gbit_per_s: float) -> GuestTree:
    """With ports whose rate is known. Raises InputError for none that a port can have."""
    if not 0.1 <= gbit_per_s <= 10_000:
        raise InputError(f"--port-rate {gbit_per_s:g}: expected Gbit/s of a port, 0.1 to 10000")
    nics = (replace(nic, gb_per_s=gbit_per_s / 8, name=None) for nic in tree.nics)
    return replace(tree, nics=tuple(nics))


def _verbs_nics(host: Host) -> list[PciDevice]:
    """NICs that the machine itself may use by verbs, ascending by address."""
    nics = [nic for nic in host.devices_of_kind(DeviceKind.NIC) if has_verbs(nic)]
    own = [nic for nic in nics if nic.driver is None or "vfio" not in nic.driver]
    return sorted(own, key=lambda nic: nic.bdf)


def has_verbs(nic: PciDevice) -> bool:
    """NVIDIA's and InfiniBand's. Of others no table of ours says whether they have RDMA."""
    return nic.vendor_id == _MELLANOX or nic.class_code >> 8 in (0x0207, 0x0C06)


def _nic_of_host(host: Host, nic: PciDevice) -> TreeNic:
    node, switches = _place_of_host(host, nic)
    return TreeNic(
        address=nic.bdf,
        node=node,
        link=_link_of(host, nic),
        switches=switches,
        gb_per_s=port_gb_per_s(_model(host, nic)),
        name=_model(host, nic),
    )


def _model(host: Host, nic: PciDevice) -> str | None:
    """A virtual function is of its physical one's model."""
    whole = None if nic.physical_function is None else host.device(nic.physical_function)
    return (whole or nic).name


def _place_of_host(host: Host, device: PciDevice) -> tuple[int | None, tuple[TreeSwitch, ...]]:
    """The node and the switches of a function, which a virtual one has of its physical one. A node
    that a tool says is not in /sys: NCCL 2.28.9 takes such a GPU to be on none."""
    whole = None if device.physical_function is None else host.device(device.physical_function)
    nodes = [device, *host.bridges_above((whole or device).bdf)][::2]
    top = nodes[-1]
    return top.node if top.node_source is None else None, tuple(
        TreeSwitch(key=str(one.bdf), link=_link_of(host, one), ids=_ids(one))
        for one in reversed(nodes[1:])
    )


def _nic_nodes(nics: Iterable[int | None], gpus: Iterable[TreeGpu]) -> tuple[int, ...]:
    with_gpus = {gpu.node for gpu in gpus}
    return tuple(sorted({-1 if node is None else node for node in nics if node not in with_gpus}))


def _gpu_of_host(host: Host, gpu: PciDevice) -> TreeGpu:
    node, switches = _place_of_host(host, gpu)
    return TreeGpu(
        address=gpu.bdf,
        node=node,
        link=_link_of(host, gpu),
        switches=switches,
        nvlinks=_nvlinks(
            host, gpu.bdf, {gpu.bdf: gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU)}
        ),
        link_gb_per_s=peer_link_gb_per_s(gpu.name),
        is_amd=gpu.vendor_id == _AMD,
        has_c2c=_has_c2c(host, gpu.bdf),
    )


def _link_of(host: Host, device: PciDevice) -> TreeLink:
    port = None if device.parent is None else host.device(device.parent)
    return TreeLink(device.link, None if port is None else port.link)


def _ids(device: PciDevice) -> int:
    parts = (
        device.vendor_id,
        device.device_id,
        device.subsystem_vendor_id,
        device.subsystem_device_id,
    )
    number = 0
    for part in parts:
        number = number << 16 | (part or 0)
    return number


def _nvlinks(host: Host, gpu: Bdf, shown: dict[Bdf, Bdf]) -> tuple[tuple[Bdf, int | None], ...]:
    """shown: host address -> the address here, of the GPUs that are here."""
    found: dict[Bdf, int | None] = {}
    for link in host.links:
        if link.kind is LinkKind.C2C or link.b is None or gpu not in (link.a, link.b):
            continue
        other = link.b if link.a == gpu else link.a
        if other in shown and other != gpu:
            found[shown[other]] = link.count
    return tuple(sorted(found.items()))


def _has_c2c(host: Host, gpu: Bdf) -> bool:
    return any(link.kind is LinkKind.C2C and link.a == gpu for link in host.links)


class _Passed(Struct, frozen=True, kw_only=True):
    """A GPU of the host in the guest. address: the guest kernel's. at: where it is plugged in."""

    bdf: Bdf
    address: Bdf
    at: GuestAddress | None
    node: int | None


def tree_of_document(facts: Vm, host: Host, addresses: Mapping[Bdf, Bdf]) -> GuestTree:
    """The tree that a document's guest will have, with the devices of its host.

    addresses: host function -> the guest kernel's address, where known; else a GPU is called by
    the host's. Raises InputError for a guest without a GPU.
    """
    node_of_cell = {
        cell.id: node for cell, node in zip(facts.cells, nodes_in_order(facts.cells), strict=True)
    }
    passed = []
    for hostdev in facts.hostdevs:
        cell = cell_of_hostdev(facts, hostdev)
        node = None if cell is None else node_of_cell.get(cell)
        address = addresses.get(hostdev.bdf, hostdev.bdf)
        passed.append(_Passed(bdf=hostdev.bdf, address=address, at=hostdev.address, node=node))
    vcpus = {node_of_cell[cell.id]: cell.vcpus for cell in facts.cells if cell.vcpus}
    everyone = {0: CpuSet(range(facts.vcpus))}
    return _tree(facts.source, vcpus or everyone, passed, facts.controllers, host)


def tree_of_plan(plan: Plan, host: Host) -> GuestTree:
    """The same from a plan alone. A GPU that the plan does not plug in keeps the host's address.

    Raises InputError for a plan without a GPU.
    """
    controllers = plan.vm.controllers
    numbers = bus_numbers(controllers)
    flat = plan.layout.cells is GuestCells.FLAT
    cells = [cell for cell in plan.cells if cell.vcpus]
    cells.sort(key=lambda cell: cell.vcpus.first() or 0)
    node_of_cell = {} if flat else {cell.id: node for node, cell in enumerate(cells)}
    passed = []
    for device in plan.vm.hostdevs:
        address = None if device.address is None else kernel_address(device.address, numbers)
        node = None if device.cell is None else node_of_cell.get(device.cell)
        passed.append(
            _Passed(bdf=device.bdf, address=address or device.bdf, at=device.address, node=node)
        )
    vcpus = {node_of_cell[cell.id]: cell.vcpus for cell in cells if cell.id in node_of_cell}
    everyone = {0: CpuSet(range(plan.vm.vcpus))}
    source = f"plan of layout {plan.layout.name}"
    return _tree(source, vcpus or everyone, passed, controllers, host)


def _tree(
    source: str,
    vcpus: dict[int, CpuSet],
    passed: list[_Passed],
    controllers: tuple[GuestPciController, ...],
    host: Host,
) -> GuestTree:
    shown = {one.bdf: one.address for one in passed}
    gpus: list[TreeGpu] = []
    nics: list[TreeNic] = []
    nic_nodes: list[int | None] = []
    for one in passed:
        device = host.device(one.bdf)
        if device is None or device.kind not in (DeviceKind.GPU, DeviceKind.NIC):
            continue
        link, switches = _place_of_guest(one.at, device, controllers)
        if device.kind is DeviceKind.NIC:
            nic_nodes.append(one.node)
            if has_verbs(device):
                name = _model(host, device)
                nics.append(
                    TreeNic(
                        address=one.address,
                        node=one.node,
                        link=link,
                        switches=switches,
                        gb_per_s=port_gb_per_s(name),
                        name=name,
                    )
                )
            continue
        gpus.append(
            TreeGpu(
                address=one.address,
                node=one.node,
                link=link,
                switches=switches,
                nvlinks=_nvlinks(host, one.bdf, shown),
                link_gb_per_s=peer_link_gb_per_s(device.name),
                is_amd=device.vendor_id == _AMD,
                has_c2c=_has_c2c(host, one.bdf),
            )
        )
    if not gpus:
        raise _no_gpu(source)
    return GuestTree(
        source=source,
        architecture=ARCHITECTURES.get(host.architecture or ""),
        vendor=host.cpu.vendor,
        family=host.cpu.family,
        model=host.cpu.model,
        vcpus_of_node=tuple(sorted(vcpus.items())),
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.address)),
        gaps=tuple(_cpu_gaps(host)),
        nic_nodes=_nic_nodes(nic_nodes, gpus),
        nics=tuple(sorted(nics, key=lambda nic: nic.address)),
    )


def _place_of_guest(
    at: GuestAddress | None, device: PciDevice, controllers: tuple[GuestPciController, ...]
) -> tuple[TreeLink, tuple[TreeSwitch, ...]]:
    bridges = () if at is None else _bridges(at.bus, controllers)
    port = _port_link(bridges[0]) if bridges else None
    if at is None:  # libvirt plugs it into a port
        port = QEMU_PORT
    return TreeLink(device.link, port), tuple(
        TreeSwitch(key=f"controller {switch.index}", link=TreeLink(_port_link(switch), above))
        for switch, above in reversed(_switches(bridges))
    )


def _bridges(
    bus: int, controllers: tuple[GuestPciController, ...]
) -> tuple[GuestPciController, ...]:
    """The bridges above a bus, the lowest first; neither the root nor an expander bus."""
    by_index = {controller.index: controller for controller in controllers}
    found: list[GuestPciController] = []
    while (one := by_index.get(bus)) is not None and one.address is not None and len(found) < 32:
        if one.model in ("pcie-expander-bus", "pci-expander-bus"):
            break
        found.append(one)
        bus = one.address.bus
    return tuple(found)


def _switches(
    bridges: tuple[GuestPciController, ...],
) -> list[tuple[GuestPciController, PciLink | None]]:
    """Every second bridge, each with the link of the port above it, the lowest first."""
    above = [*map(_port_link, bridges[1:]), None]
    return [(bridges[at], above[at]) for at in range(1, len(bridges), 2)]


def _port_link(controller: GuestPciController) -> PciLink | None:
    if controller.model == "pcie-root-port":
        return QEMU_PORT
    return QEMU_SWITCH if controller.model.startswith("pcie-switch") else None


def _cpu_gaps(host: Host) -> tuple[Gap, ...]:
    if host.architecture not in (None, "x86_64") or None not in (
        host.cpu.vendor,
        host.cpu.family,
        host.cpu.model,
    ):
        return ()
    return (Gap("CPU model", "its source does not give it: NCCL reads CPUID"),)


def _no_gpu(source: str) -> InputError:
    return InputError(
        f"{source}: expected a GPU, found none",
        hint="give a capture made in the guest with --guest, or the VM's document with --domain",
    )


_NVLINK4, _NVLINK5, _XGMI = 20.6, 40.1, 48.0
_LINKS = (
    ("B200", _NVLINK5),
    ("GB200", _NVLINK5),
    ("B300", _NVLINK5),
    ("GB300", _NVLINK5),
    ("H100", _NVLINK4),
    ("H200", _NVLINK4),
    ("GH200", _NVLINK4),
    ("H20", _NVLINK4),
    ("H800", _NVLINK4),
    ("A40", 12.0),
    ("MI300X", _XGMI),
    ("MI300A", _XGMI),
    ("MI308X", _XGMI),
    ("MI325X", _XGMI),
    ("MI350X", _XGMI),
    ("MI355X", _XGMI),
    ("MI210", 36.0),
    ("MI250", 36.0),
    ("MI250X", 36.0),
    ("MI100", 24.0),
    ("MI60", 24.0),
    ("MI50", 24.0),
)
"""GB/s of one link. Source: ncclTopoNVLinkBw in src/graph/topo.h of NVIDIA/nccl, and
ncclTopoXGMISpeed of ROCm/rccl."""


def peer_link_gb_per_s(name: str | None) -> float:
    """What the library takes one NVLink or xGMI of a GPU for; that of an A100 where its name is
    not known.

    >>> peer_link_gb_per_s("NVIDIA Corporation GH100 [H200 SXM 141GB]"), peer_link_gb_per_s(None)
    (20.6, 20.0)
    """
    words = (name or "").replace("[", " ").replace("]", " ").replace("-", " ").split()
    return next((rate for word, rate in _LINKS if word in words), 20.0)


_PORTS = (
    ("ConnectX-8", 800),
    ("ConnectX-7", 400),
    ("ConnectX-6 Lx", 50),
    ("ConnectX-6 Dx", 200),
    ("ConnectX-6", 200),
    ("ConnectX-5", 100),
    ("ConnectX-4 Lx", 50),
    ("ConnectX-4", 100),
    ("BlueField-3", 400),
    ("BlueField-2", 200),
)
"""Gbit/s, the most of a port of the model. Source: NVIDIA's product briefs; names of pci.ids."""


def port_gb_per_s(name: str | None) -> float | None:
    """GB/s that NCCL computes of a port, at the most that its model can; None of other models.

    >>> port_gb_per_s("MT2910 Family [ConnectX-7]"), port_gb_per_s("mlx5Gen Virtual Function")
    (50.0, None)
    """
    return next((gbit / 8 for word, gbit in _PORTS if word in (name or "")), None)
