"""Observation: what a guest's kernel reports of its vCPUs, nodes and devices."""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.pci import PciLink
from homenode.topology import Host, PagePool
from homenode.verify.guest.path import GuestPath, paths_of_guest


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A NUMA node of the guest. memory_bytes: what its kernel has, less than what it was given."""

    index: int
    vcpus: CpuSet
    memory_bytes: int | None
    page_pools: tuple[PagePool, ...]


@dataclass(frozen=True, slots=True)
class ObservedDevice:
    """A PCI function of the guest.

    address: as its kernel numbers it. path: None in another PCI segment than the first, such as
    VMD's. node: None where it says -1. link: as the function reports
    it; port_links: those of the ports above it, lowest first.
    """

    address: Bdf
    path: GuestPath | None
    node: int | None
    vendor_id: int | None
    device_id: int | None
    link: PciLink | None
    port_links: tuple[PciLink, ...]


_L3 = 3


@dataclass(frozen=True, slots=True)
class Observation:
    """What a guest reports. PU numbers of the guest are vCPU numbers: QEMU lists them in order.

    distances: [from][to] in the order of `nodes`, None where not given. packages, cores: the PUs
    of each, ascending by the lowest; () where the guest does not say. l3: those of each L3 cache;
    () where it has none, None where it gives no caches.
    """

    source: str
    vcpus: CpuSet
    nodes: tuple[ObservedNode, ...]
    distances: tuple[tuple[int, ...], ...] | None
    packages: tuple[CpuSet, ...]
    cores: tuple[CpuSet, ...]
    l3: tuple[CpuSet, ...] | None
    devices: tuple[ObservedDevice, ...]

    def device_at(self, path: GuestPath) -> ObservedDevice | None:
        """The function at a path, or None."""
        return next((device for device in self.devices if device.path == path), None)

    def node(self, index: int) -> ObservedNode | None:
        """The node of that number, or None."""
        return next((node for node in self.nodes if node.index == index), None)


def observation_of(guest: Host) -> Observation:
    """The observation in a guest's own discovery."""
    path_of = {bdf: path for path, bdf in paths_of_guest(guest).items()}
    devices = []
    for device in guest.pci_devices:
        bdf = device.bdf
        above = guest.bridges_above(bdf)
        devices.append(
            ObservedDevice(
                bdf,
                path_of.get(bdf),
                device.reported_node,
                device.vendor_id,
                device.device_id,
                device.link,
                tuple(bridge.link for bridge in above if bridge.link is not None),
            )
        )
    return Observation(
        source=guest.name,
        vcpus=CpuSet(pu.index for pu in guest.pus if pu.online),
        nodes=tuple(
            ObservedNode(node.index, node.pus, node.memory_bytes, node.page_pools)
            for node in guest.nodes
        ),
        distances=guest.distances,
        packages=tuple(package.pus for package in guest.packages),
        cores=tuple(core.pus for core in guest.cores),
        l3=tuple(llc.pus for llc in guest.llcs if llc.level == _L3) if guest.llcs else None,
        devices=tuple(devices),
    )
