"""Expectation: what a guest must report if it is what was planned."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.plan.as_vm import vm_of_plan
from homenode.plan.model import GuestCache, GuestTopology, Plan
from homenode.plan.shape.caches import shared_llcs
from homenode.topology import Host
from homenode.verify.document.devices import cell_of_hostdev
from homenode.verify.guest.path import GuestPath, path_of_address
from homenode.vm.layout import GuestCells
from homenode.vm.model import Vm


@dataclass(frozen=True, slots=True)
class ExpectedCell:
    """A guest cell. A flat guest has one with every vCPU.

    memory_device_bytes: the most that memory devices may add to it.
    """

    id: int
    vcpus: CpuSet
    memory_bytes: int
    memory_device_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExpectedDevice:
    """A passed-through function. bdf: the host's. cell: None = the guest is to see no node for it.

    path: where it is in the guest, None = unknown. vendor_id, device_id: the host's
    device, None where the host is not known.
    """

    bdf: Bdf
    cell: int | None
    path: GuestPath | None
    vendor_id: int | None = None
    device_id: int | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What to look for. source: what says so ("plan of layout pin-numa-pci", "vm.xml").

    distances: [from][to] in cell order; None = the guest was shown none. topology: None = not
    stated. l3: vCPUs of each L3 cache, () = there is none; None = not stated. absent: vCPUs that
    are not there, by the document's numbers; vCPUs everywhere else here are then numbered without
    them, as Linux does it.
    """

    name: str
    source: str
    vcpus: int
    cells: tuple[ExpectedCell, ...]
    distances: tuple[tuple[int, ...], ...] | None
    topology: GuestTopology | None
    l3: tuple[CpuSet, ...] | None
    devices: tuple[ExpectedDevice, ...]
    absent: CpuSet = CpuSet()

    def runs_of(self, size: int) -> tuple[CpuSet, ...]:
        """vCPUs of each core, socket, ... that has `size` of them where none is absent."""
        everyone = groups_of(self.vcpus + len(self.absent), size)
        return _renumbered(everyone, self.absent)


def without_vcpus(expected: Expectation, absent: CpuSet) -> Expectation:
    """The same for a guest in which some vCPUs are offline from the start."""
    cells = tuple(
        replace(cell, vcpus=next(iter(_renumbered((cell.vcpus,), absent)), CpuSet()))
        for cell in expected.cells
    )
    l3 = None if expected.l3 is None else _renumbered(expected.l3, absent)
    left = expected.vcpus - len(absent)
    return replace(expected, vcpus=left, cells=cells, l3=l3, absent=absent)


def _renumbered(groups: Iterable[CpuSet], absent: CpuSet) -> tuple[CpuSet, ...]:
    """Each vCPU less the absent ones below it; groups of which nothing is left are left out."""
    found = (
        CpuSet(i - sum(gone < i for gone in absent) for i in group - absent) for group in groups
    )
    return tuple(group for group in found if group)


def expectation_of_plan(
    plan: Plan, *, document: Vm | None = None, host: Host | None = None
) -> Expectation:
    """What a plan promises its guest.

    document: where each device really is plugged in, where the domain's XML is at hand; without
    it the plan's own controllers and addresses say so. host: for the devices' ids and for LLCs
    that are passed through.
    """
    given = () if document is None else document.hostdevs
    address_of = {device.bdf: device.address for device in plan.devices}
    address_of |= {hostdev.source: hostdev.address for hostdev in given}
    controllers = vm_of_plan(plan).controllers if document is None else document.controllers
    devices = []
    for device in plan.devices:
        address = address_of[device.bdf]
        path = None if address is None else path_of_address(address, controllers)
        devices.append(ExpectedDevice(device.bdf, device.cell, path, *_ids(host, device.bdf)))
    flat = plan.layout.cells is GuestCells.FLAT
    # A node without vCPUs and memory is not online until a driver puts a GPU's memory there.
    cells = tuple(cell for cell in plan.cells if cell.vcpus or cell.memory_bytes)
    stated = tuple(tuple(cell.distances[: len(cells)]) for cell in cells)
    topology = plan.topology
    if topology is None and document is not None and document.cpu_topology is not None:
        topology = GuestTopology(*document.cpu_topology)
    return Expectation(
        name=plan.domain_name,
        source=f"plan of layout {plan.layout.name}",
        vcpus=plan.vcpus,
        cells=tuple(
            ExpectedCell(cell.id, cell.vcpus, cell.memory_bytes, _device_bytes(document, cell.id))
            for cell in cells
        ),
        distances=None if flat or not all(stated) else stated,
        topology=topology,
        l3=_l3(plan, host),
        devices=tuple(devices),
    )


def expectation_of_document(facts: Vm, host: Host | None = None) -> Expectation:
    """What a document promises its guest, where there is no plan.

    A device is expected on the cell whose expander bus it hangs on; whether that is the right one
    for its host node is the document check's to say.
    """
    guest = facts
    online = tuple(cell for cell in facts.cells if cell.vcpus or cell.memory_bytes)
    cells = tuple(
        ExpectedCell(c.id, c.vcpus, c.memory_bytes, _device_bytes(guest, c.id)) for c in online
    )
    if not cells:
        cells = (ExpectedCell(0, CpuSet(range(guest.vcpus)), guest.memory_bytes),)
    stated = tuple(cell.distances[: len(online)] for cell in online)
    return Expectation(
        name=guest.name,
        source=facts.source,
        vcpus=guest.vcpus,
        cells=cells,
        distances=stated if stated and all(stated) else None,
        topology=None if guest.cpu_topology is None else GuestTopology(*guest.cpu_topology),
        l3=None,
        devices=tuple(
            ExpectedDevice(
                hostdev.source,
                cell_of_hostdev(guest, hostdev),
                None
                if hostdev.address is None
                else path_of_address(hostdev.address, guest.controllers),
                *_ids(host, hostdev.source),
            )
            for hostdev in guest.hostdevs
        ),
    )


def _device_bytes(guest: Vm | None, cell: int) -> int:
    devices = () if guest is None else guest.memory_devices
    return sum(device.size_bytes for device in devices if device.cell == cell)


def groups_of(vcpus: int, size: int) -> tuple[CpuSet, ...]:
    """Runs of `size` neighbouring vCPUs: how QEMU deals vCPUs to threads, cores, dies, sockets.

    >>> groups_of(4, 2)
    (CpuSet('0-1'), CpuSet('2-3'))
    """
    return tuple(CpuSet(range(i, min(i + size, vcpus))) for i in range(0, vcpus, size))


def _ids(host: Host | None, bdf: Bdf) -> Iterator[int | None]:
    device = None if host is None else host.device(bdf)
    yield None if device is None else device.vendor_id
    yield None if device is None else device.device_id


def _l3(plan: Plan, host: Host | None) -> tuple[CpuSet, ...] | None:
    """As a plan shows them only where they are true: the host's LLCs under the vCPUs."""
    if plan.cache is GuestCache.DISABLED:
        return None if plan.topology is not None and plan.topology.threads > 1 else ()
    if plan.cache is GuestCache.EMULATED and plan.topology is not None:
        return groups_of(plan.vcpus, plan.topology.cores * plan.topology.threads)
    if plan.cache in (GuestCache.EMULATED, GuestCache.PASSTHROUGH):
        shared = shared_llcs(host, plan.vcpu_pins)
        return None if shared is None else shared.groups
    return None
