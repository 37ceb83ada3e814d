"""Observation: the facts that a guest's kernel reports, and its functions' PCI paths."""

from collections.abc import Iterable
from functools import cached_property

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.pci import PciDevice, PciLink
from homenode.machine.topology import Host, NumaNode
from homenode.vm.model import EXPANDER, GuestAddress, GuestPciController

_ROOTS = ("pcie-root", "pci-root")
_MAX_DEPTH = 32


class GuestPath(Struct, frozen=True):
    """A root bus, and (device, function) on each bus from there down to the function.

    Bus numbers in between are assigned by firmware, so they are omitted. The root's own number is
    exact: 0, or the busNr of the expander bus.

    >>> str(GuestPath(0x80, ((1, 0), (0, 1))))
    'pci0000:80/01.0/00.1'
    """

    root_bus: int
    steps: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        steps = "/".join(f"{device:02x}.{function:x}" for device, function in self.steps)
        return f"pci0000:{self.root_bus:02x}/{steps}"


def find_guest_path(
    address: GuestAddress, controllers: Iterable[GuestPciController]
) -> GuestPath | None:
    """Return the path of a libvirt address among a definition's controllers; pcie.0 is index 0.
    None if a controller on the way is missing, or has no address or busNr."""
    by_index = {controller.index: controller for controller in controllers}
    steps = [(address.device, address.function)]
    bus = address.bus
    for _ in range(_MAX_DEPTH):
        controller = by_index.get(bus)
        if bus == 0 and (controller is None or controller.model in _ROOTS):
            return GuestPath(0, tuple(reversed(steps)))
        if controller is None:
            return None
        if controller.model == EXPANDER:
            if controller.bus_nr is None:
                return None
            return GuestPath(controller.bus_nr, tuple(reversed(steps)))
        if controller.address is None:
            return None
        steps.append((controller.address.device, controller.address.function))
        bus = controller.address.bus
    return None


def map_guest_paths(guest: Host) -> dict[GuestPath, Bdf]:
    """Map the path of every function in a guest's kernel to its address there."""
    by_bdf = guest.device_at
    root_bus = {root.name: root.bus for root in guest.root_complexes}
    function_of_path: dict[GuestPath, Bdf] = {}
    for device in guest.pci_devices:
        if device.bdf.domain or device.root_complex not in root_bus:
            continue  # another segment, such as VMD's
        steps = [(device.bdf.device, device.bdf.function)]
        parent = device.parent
        while parent is not None and parent in by_bdf and len(steps) < _MAX_DEPTH:
            steps.append((parent.device, parent.function))
            parent = by_bdf[parent].parent
        path = GuestPath(root_bus[device.root_complex], tuple(reversed(steps)))
        function_of_path[path] = device.bdf
    return function_of_path


_L3 = 3


class Observation(Struct, frozen=True, dict=True):
    """A guest's own discovery, as facts of its VM. The guest's CPU numbers are vCPU numbers: QEMU
    lists them in order."""

    guest: Host

    @cached_property
    def function_of_path(self) -> dict[GuestPath, Bdf]:
        return map_guest_paths(self.guest)

    @property
    def source(self) -> str:
        return self.guest.name

    @property
    def vcpus(self) -> CpuSet:
        return self.guest.online_pus

    @property
    def nodes(self) -> tuple[NumaNode, ...]:
        return self.guest.nodes

    @property
    def l3(self) -> tuple[CpuSet, ...] | None:
        """The vCPUs of each L3 cache; () without L3, None if caches are unknown."""
        llcs = self.guest.llcs
        return tuple(llc.pus for llc in llcs if llc.level == _L3) if llcs else None

    def find_device(self, path: GuestPath) -> PciDevice | None:
        bdf = self.function_of_path.get(path)
        return None if bdf is None else self.guest.find_device(bdf)

    def port_links(self, device: PciDevice) -> tuple[PciLink, ...]:
        """Return the links of the ports above a function, the lowest first."""
        bridges = self.guest.bridges_above(device.bdf)
        return tuple(bridge.link for bridge in bridges if bridge.link is not None)
