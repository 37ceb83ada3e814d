"""Expectation: the report that a guest must give if it matches the plan."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.machine.topology import Host
from homenode.plan.shape.caches import find_shared_llcs
from homenode.vm.guest_observation import GuestPath, find_guest_path
from homenode.vm.model import GuestHostdev, Vm, VmCell, find_hostdev_cell


class ExpectedDevice(Struct, frozen=True):
    """A passed-through function."""

    bdf: Bdf  # the host's
    cell: int | None  # None = the guest is to see no node for it
    path: GuestPath | None  # its path in the guest, None = unknown
    vendor_id: int | None = None  # the host's device, None if the host is not known
    device_id: int | None = None  # the host's device, None if the host is not known


class Expectation(Struct, frozen=True):
    """A VM, and the facts that its guest sees by other means or only on a host."""

    vm: Vm
    devices: tuple[ExpectedDevice, ...]
    l3: tuple[CpuSet, ...] | None  # vCPUs of each L3 cache, () = no L3; None = unknown
    # vCPUs that are not there, by the document's numbers; vCPUs everywhere else here, of the VM
    # too, are then numbered without them, as Linux does it
    absent: CpuSet = CpuSet()
    # False if the hypervisor chooses the slots and cannot show cells: then only the devices'
    # presence is expected
    has_device_cells: bool = True

    @property
    def cells(self) -> tuple[VmCell, ...]:
        """The cells that are online nodes of the guest; a GPU's memory node is not."""
        cells = self.vm.cells_or_whole
        return tuple(cell for cell in cells if cell.vcpus or cell.memory_bytes)

    @property
    def distances(self) -> tuple[tuple[int, ...], ...] | None:
        """[from][to] in the order of `cells`; None = the guest was shown none."""
        if not all(cell.distances for cell in self.cells):
            return None
        return tuple(tuple(cell.distances[o.id] for o in self.cells) for cell in self.cells)

    def group_vcpus(self, size: int) -> tuple[CpuSet, ...]:
        """Return the vCPUs of each core, socket, ... that has `size` of them if none is absent."""
        everyone = group_neighbours(self.vm.vcpus + len(self.absent), size)
        return _renumber(everyone, self.absent)


def remove_vcpus(expectation: Expectation, absent: CpuSet) -> Expectation:
    """Return the expectation for a guest with vCPUs offline from the start."""
    cells = tuple(
        replace(cell, vcpus=next(iter(_renumber((cell.vcpus,), absent)), CpuSet()))
        for cell in expectation.vm.cells
    )
    l3 = None if expectation.l3 is None else _renumber(expectation.l3, absent)
    count = expectation.vm.vcpus - len(absent)
    vm = replace(expectation.vm, vcpus=count, cells=cells)
    return replace(expectation, vm=vm, l3=l3, absent=absent)


def _renumber(groups: Iterable[CpuSet], absent: CpuSet) -> tuple[CpuSet, ...]:
    """Renumber vCPUs without the absent ones; empty groups are omitted."""
    new_groups = (
        CpuSet(i - sum(vcpu < i for vcpu in absent) for i in group - absent) for group in groups
    )
    return tuple(group for group in new_groups if group)


def build_expectation(
    vm: Vm, *, host: Host | None = None, document: Vm | None = None
) -> Expectation:
    """Return the expected state of the guest of a plan's or definition's VM. A definition expects a
    device on the cell of its expander bus; the check of the definition judges whether this cell
    matches its host node. document: of a plan's VM, where each device really is plugged in. host:
    for the devices' ids and for LLCs that are passed through."""
    really = vm if document is None else document
    address_of = {hostdev.bdf: hostdev.address for hostdev in (*vm.hostdevs, *really.hostdevs)}

    def device(hostdev: GuestHostdev) -> ExpectedDevice:
        address = address_of[hostdev.bdf]
        path = None if address is None else find_guest_path(address, really.controllers)
        cell = find_hostdev_cell(vm, hostdev)
        real = None if host is None else host.find_device(hostdev.bdf)
        ids = (None, None) if real is None else (real.vendor_id, real.device_id)
        return ExpectedDevice(hostdev.bdf, cell, path, *ids)

    return Expectation(vm, tuple(map(device, vm.hostdevs)), _find_l3_groups(vm, host))


def group_neighbours(vcpus: int, size: int) -> tuple[CpuSet, ...]:
    """Runs of `size` neighbouring vCPUs: how QEMU deals vCPUs to threads, cores, dies, sockets.

    >>> group_neighbours(4, 2)
    (CpuSet('0-1'), CpuSet('2-3'))
    """
    return tuple(CpuSet(range(i, min(i + size, vcpus))) for i in range(0, vcpus, size))


def _find_l3_groups(vm: Vm, host: Host | None) -> tuple[CpuSet, ...] | None:
    """Return the host's LLCs under the vCPUs: layouts show LLCs only if they match the host."""
    if vm.record is None:
        return None
    topology, mode = vm.cpu_topology, vm.cpu_cache
    if mode == "disable":
        return None if topology is not None and topology[3] > 1 else ()
    if mode == "emulate" and topology is not None:
        return group_neighbours(vm.vcpus, topology[2] * topology[3])
    if mode in ("emulate", "passthrough"):
        shared_llcs = find_shared_llcs(host, vm.vcpu_pins)
        return None if shared_llcs is None else shared_llcs.groups
    return None
