"""A described machine as a QEMU command line: its nodes, cores, distances, memory and PCIe tree.

What QEMU cannot be is refused by name; what it cannot show is replaced: a GPU by an emulated ATI
card, a NIC by an e1000e, an NVMe drive by one without a disk, anything else by QEMU's teaching
device. CPUs are numbered as QEMU does it, siblings side by side, whatever the description says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.machine.pci import DeviceKind, PciDevice, PortType
from homenode.machine.topology import Host

_STAND_INS = {
    DeviceKind.GPU: "ati-vga,model=rv100,romfile=",
    DeviceKind.NIC: "e1000e,romfile=",
    DeviceKind.NVME: "nvme",
}
_CPU = "Nehalem"  # siblings and caches as told; without AVX, which TCG emulates slowly
_LAST_BUS = 250


class Unbuildable(Exception):
    """A machine that QEMU cannot be."""


@dataclass(frozen=True, slots=True)
class VirtualHost:
    """A VM that stands for a host."""

    arguments: tuple[str, ...]  # of qemu-system-x86_64, without kernel and disks
    # QEMU's id of each stand-in -> the node that its root complex is on
    node_of_device: dict[str, int]


def virtual_host(host: Host, *, node_mib: int, iommu: bool = False) -> VirtualHost:
    """The machine of a host. node_mib: memory of each node that has some.

    iommu: with an Intel IOMMU, so that devices can be passed on. Raises Unbuildable.
    """
    return VirtualHost(
        (
            "-machine",
            "q35,kernel-irqchip=split" if iommu else "q35",
            "-cpu",
            _CPU,
            *_cpus(host),
            *_memory(host, node_mib),
            *(("-device", "intel-iommu,intremap=on,caching-mode=on") if iommu else ()),
            *_tree(host),
        ),
        {
            _id(device): device.node
            for device in host.pci_devices
            if _is_stand_in(device) and device.node is not None
        },
    )


def _cpus(host: Host) -> Iterator[str]:
    threads = {len(core.pus) for core in host.cores}
    per_package = {len([c for c in host.cores if c.pus <= p.pus]) for p in host.packages}
    if len(threads) != 1 or len(per_package) != 1:
        raise Unbuildable(f"{host.name}: expected packages and cores alike")
    shape = f"sockets={len(host.packages)},cores={per_package.pop()},threads={threads.pop()}"
    count = sum(pu.online for pu in host.pus)
    yield from ("-smp", f"{count},{shape}")


def _memory(host: Host, node_mib: int) -> Iterator[str]:
    with_memory = [node for node in host.nodes if node.memory_bytes]
    yield from ("-m", f"{node_mib * len(with_memory)}M")
    first = 0
    for i, node in enumerate(host.nodes):
        if node.index != i:
            raise Unbuildable(f"{host.name}: expected nodes without gaps, found node {node.index}")
        cpus = f",cpus={first}-{first + len(node.pus) - 1}" if node.pus else ""
        first += len(node.pus)
        memory = ""
        if node.memory_bytes:
            memory = f",memdev=m{i}"
            yield from ("-object", f"memory-backend-ram,id=m{i},size={node_mib}M")
        yield from ("-numa", f"node,nodeid={i}{cpus}{memory}")
    for i, row in enumerate(host.distances or ()):
        for j, distance in enumerate(row):
            yield from ("-numa", f"dist,src={i},dst={j},val={distance}")


def _tree(host: Host) -> Iterator[str]:
    """An expander bus for each root complex with a node, and what hangs on it."""
    rooted = [c for c in host.root_complexes if c.node is not None]
    step = _LAST_BUS // max(1, len(rooted) + 1)
    chassis = iter(range(1, 256))
    for number, complex_ in enumerate(rooted, 1):
        bus = f"pxb{number}"
        yield from (
            "-device",
            f"pxb-pcie,id={bus},bus=pcie.0,bus_nr={number * step},numa_node={complex_.node}",
        )
        ports = [
            device
            for device in host.pci_devices
            if device.root_complex == complex_.name and device.parent is None and device.bridge
        ]
        for slot, port in enumerate(ports):
            yield from (
                "-device",
                f"pcie-root-port,id={_id(port)},bus={bus},addr={slot:#x},chassis={next(chassis)},"
                "io-reserve=0",
            )
            yield from _below(host, port, chassis)


def _below(host: Host, port: PciDevice, chassis: Iterator[int]) -> Iterator[str]:
    for slot, device in enumerate(d for d in host.pci_devices if d.parent == port.bdf):
        place = f"id={_id(device)},bus={_id(port)}"
        kind = device.bridge.port_type if device.bridge is not None else None
        if kind is PortType.SWITCH_UPSTREAM:
            yield from ("-device", f"x3130-upstream,{place}")
        elif kind is PortType.SWITCH_DOWNSTREAM:
            yield from (
                "-device",
                f"xio3130-downstream,{place},addr={slot:#x},chassis={next(chassis)}",
            )
        elif _is_stand_in(device):
            serial = f",serial={_id(device)}" if device.kind is DeviceKind.NVME else ""
            yield from ("-device", f"{_STAND_INS.get(device.kind, 'edu')},{place}{serial}")
            continue
        else:
            continue
        yield from _below(host, device, chassis)


def _is_stand_in(device: PciDevice) -> bool:
    """Virtual functions and further functions of a device are omitted."""
    first = device.bdf.function == 0 and device.physical_function is None
    return device.bridge is None and device.parent is not None and first


def _id(device: PciDevice) -> str:
    return device_id(device.bdf)


def device_id(bdf: Bdf) -> str:
    """QEMU's id of the stand-in for a function of the description."""
    return "d" + str(bdf).replace(":", "_").replace(".", "_")
