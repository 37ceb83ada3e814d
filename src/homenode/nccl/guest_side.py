"""GuestSide: what of a guest its topology file needs: vCPUs by host node, nodes, bus ids."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PuIndex
from homenode.errors import InputError
from homenode.indices import NodeIndex
from homenode.machine.topology import Host
from homenode.nccl.bus_numbers import bus_numbers, kernel_address, left_to_libvirt
from homenode.vm.domain.document import Document
from homenode.vm.guest_observation import GuestPath, path_of_address, paths_of_guest
from homenode.vm.model import GuestHostdev, GuestPciController, Vm, VmCell
from homenode.vm.plan_model import Plan


class GuestSide(Struct, frozen=True, kw_only=True):
    """vcpu_pins: PUs of each vCPU in vCPU order, None where it floats. cells: () for a flat guest.

    node_of_cell: the guest kernel's node of each cell, in cell order. bus_ids: host function ->
    the guest kernel's address, for every passed-through PCI function.
    """

    vcpu_pins: tuple[CpuSet | None, ...]
    cells: tuple[VmCell, ...]
    node_of_cell: tuple[int, ...]
    bus_ids: tuple[tuple[Bdf, Bdf], ...]

    def bus_id(self, bdf: Bdf) -> Bdf | None:
        return dict(self.bus_ids).get(bdf)


def guest_side(
    document: Document, facts: Vm, *, plan: Plan | None = None, guest: Host | None = None
) -> GuestSide:
    """The guest's side of a document.

    plan: whose pins and cells count, where it is at hand. guest: the guest's own view, which says
    what its kernel really numbered. Raises InputError where a device's bus id cannot be determined,
    and where plan, guest and document are not of one VM; each names the device.
    """
    if plan is not None:
        _refuse_other_plan(plan, facts)
    vm = facts if plan is None else plan.vm
    if guest is None:
        nodes = nodes_in_order(vm.cells)
        bus_ids = _derived(document, facts)
    else:
        nodes = _nodes_of(vm.cells, guest, facts.source)
        bus_ids = _observed(facts, guest, facts.source)
    return GuestSide(
        vcpu_pins=vm.vcpu_pins,
        cells=vm.cells,
        node_of_cell=nodes,
        bus_ids=tuple(sorted(bus_ids.items())),
    )


def _refuse_other_plan(plan: Plan, facts: Vm) -> None:
    given = {hostdev.bdf: hostdev.address for hostdev in facts.hostdevs}
    for device in plan.devices:
        if device.bdf not in given:
            raise InputError(
                f"{facts.source}: expected device {device.bdf} of the plan in it, found none",
                hint="name the document that homenode plan wrote with this plan",
            )
        if device.address is not None and given[device.bdf] != device.address:
            raise InputError(
                f"{facts.source}: expected device {device.bdf} at {device.address} as in the plan, "
                f"found {given[device.bdf] or 'no address'}",
                hint="name the document that homenode plan wrote with this plan",
            )
    if plan.vcpus != facts.vcpus:
        raise InputError(
            f"{facts.source}: expected {plan.vcpus} vCPUs as in the plan, found {facts.vcpus}",
            hint="name the document that homenode plan wrote with this plan",
        )


def nodes_in_order(cells: Sequence[VmCell]) -> tuple[int, ...]:
    """The guest's node of each cell: Linux numbers nodes as it meets their vCPUs; cells without
    vCPUs come last."""
    order = sorted(
        range(len(cells)), key=lambda i: (not cells[i].vcpus, cells[i].vcpus.first() or 0, i)
    )
    return tuple(order.index(i) for i in range(len(cells)))


def _nodes_of(cells: tuple[VmCell, ...], guest: Host, source: str) -> tuple[int, ...]:
    found = []
    for cell in cells:
        shared = {node.index: len(node.pus & cell.vcpus) for node in guest.nodes}
        best = max(shared, key=lambda index: (shared[index], -index), default=None)
        if best is None or (cell.vcpus and not shared[best]):
            raise InputError(
                f"{source}: expected a node with vCPUs {cell.vcpus} in guest {guest.name!r}, "
                "found none",
                hint="the capture must be made inside this very guest: homenode capture",
            )
        found.append(int(best))
    return tuple(found)


def _observed(wanted: Vm, guest: Host, source: str) -> dict[Bdf, Bdf]:
    at = paths_of_guest(guest)
    found = {}
    for hostdev in wanted.hostdevs:
        path = _path(hostdev, wanted.controllers)
        if path is None:
            raise _not_plugged_in(hostdev.bdf, source)
        if path not in at:
            raise InputError(
                f"{source}: expected device {hostdev.bdf} at {path} in guest {guest.name!r}, "
                "found no function there",
                hint="the capture must be made inside this very guest, from the document it runs "
                "with: virsh dumpxml NAME",
            )
        found[hostdev.bdf] = at[path]
    return found


def _path(hostdev: GuestHostdev, controllers: Iterable[GuestPciController]) -> GuestPath | None:
    return None if hostdev.address is None else path_of_address(hostdev.address, controllers)


def _derived(document: Document, wanted: Vm) -> dict[Bdf, Bdf]:
    buses = bus_numbers(wanted.controllers)
    loose = left_to_libvirt(document)
    found = {}
    for hostdev in wanted.hostdevs:
        path = _path(hostdev, wanted.controllers)
        if path is None or hostdev.address is None:
            raise _not_plugged_in(hostdev.bdf, document.source)
        if path.root_bus == 0 and len(path.steps) > 1 and loose is not None:
            raise InputError(
                f"{document.source}:{loose.line}: expected an address on every device, so that "
                f"the bus number of {hostdev.bdf} on the root bus follows; found {loose.what}: "
                "libvirt will add ports, and the guest's firmware counts them",
                hint="virsh define it and give the document of virsh dumpxml NAME, or a capture "
                "made inside the guest with --guest",
            )
        address = kernel_address(hostdev.address, buses)
        if address is None:
            raise InputError(
                f"{document.source}: expected a bus number for device {hostdev.bdf} at {path}, "
                "found more bridges than 256 buses have space for",
                hint="give a capture made inside the guest with --guest",
            )
        found[hostdev.bdf] = address
    _refuse_twice(found, document.source)
    return found


def _refuse_twice(found: Mapping[Bdf, Bdf], source: str) -> None:
    seen: dict[Bdf, Bdf] = {}
    for bdf, address in found.items():
        if address in seen:
            raise InputError(
                f"{source}: expected a bus id of its own for each device, found {address} for "
                f"{seen[address]} and {bdf}",
                hint="bus windows collide: homenode verify VM.xml",
            )
        seen[address] = bdf


def _not_plugged_in(bdf: Bdf, source: str) -> InputError:
    return InputError(
        f"{source}: expected a guest address for device {bdf}, found none",
        hint="tune the document with --layout pin-numa-pci, or virsh define it and give the "
        "document of virsh dumpxml NAME",
    )


def vcpus_of_nodes(host: Host, guest: GuestSide) -> dict[NodeIndex, CpuSet]:
    """Host node -> the vCPUs that run there: by their pins, else by their cell's memory.

    vCPUs that float run on every node that has PUs.
    """
    bound = {
        vcpu: tuple(NodeIndex(int(node)) for node in cell.nodes)
        for cell in guest.cells
        for vcpu in cell.vcpus
        if cell.nodes
    }
    everywhere = tuple(node.index for node in host.nodes if node.pus)
    found: dict[NodeIndex, set[int]] = {}
    for vcpu, pin in enumerate(guest.vcpu_pins):
        if pin is not None:
            here = tuple(node.index for node in host.nodes if not node.pus.isdisjoint(pin))
        else:
            here = bound.get(PuIndex(vcpu), everywhere)
        for node in here:
            found.setdefault(node, set()).add(vcpu)
    return {node: CpuSet(vcpus) for node, vcpus in found.items()}


def nearest_vcpus(host: Host, node: NodeIndex, vcpus_of_node: dict[NodeIndex, CpuSet]) -> CpuSet:
    """vCPUs of the nodes nearest to one that runs none; all where the host gives no distances."""
    far = {other: host.distance(node, other) or 0 for other in vcpus_of_node}
    least = min(far.values(), default=0)
    bits = 0
    for other, vcpus in vcpus_of_node.items():
        if far[other] == least:
            bits |= vcpus.bits
    return CpuSet.from_bits(bits)


def numa_ids(used: Sequence[NodeIndex], guest: GuestSide) -> dict[NodeIndex, int]:
    """Host node -> the guest's node for it: the lowest one whose memory is there.

    A host node that the guest has no node for gets the next number that no node of the guest has:
    NCCL takes any, as long as the vCPUs are given with it.
    """
    found: dict[NodeIndex, int] = {}
    for cell, number in zip(guest.cells, guest.node_of_cell, strict=True):
        if cell.nodes:
            node = NodeIndex(next(iter(cell.nodes)))
            found[node] = min(number, found.get(node, number))
    spare = max(guest.node_of_cell, default=-1) + 1
    for node in used:
        if node not in found:
            found[node] = spare
            spare += 1
    return found
