"""GuestSide: a guest's facts for its topology file: vCPUs by host node, nodes, bus ids.

libvirt's `bus` is a controller's index. The number that the guest's kernel prints comes from
firmware, which walks the tree depth first, bridges in order of device and function, and gives each
bridge the next free number. The walk starts again at the busNr of each expander bus, so below those
the numbers follow from the expander's own bridges alone; on the root bus they follow from all
bridges there, those included that libvirt adds when it defines a document without addresses.

Source: pci_bios_init_bus_rec of SeaBIOS (src/fw/pciinit.c); PciScanBus of EDK II
(MdeModulePkg/Bus/Pci/PciBusDxe/PciLib.c).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex, PuIndex
from homenode.errors import InputError
from homenode.machine.topology import Host
from homenode.text import plural
from homenode.vm.domain.document import Document, Element, guest_address
from homenode.vm.guest_observation import GuestPath, find_guest_path, map_guest_paths
from homenode.vm.model import GuestAddress, GuestHostdev, GuestPciController, Vm, VmCell
from homenode.vm.plan import Plan

ROOT_MODELS = ("pcie-root", "pci-root")
EXPANDER_MODELS = ("pcie-expander-bus", "pci-expander-bus")
_MAX_BUSES = 256
_ON_PCI = frozenset({"interface", "video", "sound", "memballoon", "rng", "watchdog", "hostdev"})
_PCI_DISK_BUSES = ("virtio", "nvme")
_OTHER_CONTROLLERS = ("fdc", "ide", "sata", "ccid", "xenbus", "isa")
_NOT_PCI_TYPES = frozenset({"isa", "usb", "ccw", "drive", "unassigned", "spapr-vio", "virtio-mmio"})


def list_bus_numbers(controllers: Iterable[GuestPciController]) -> dict[int, int]:
    """Map each controller's index to the guest kernel's number of its bus.

    Controllers without address or busNr, or in a loop, and all devices below them have no number.
    The numbers on the root bus hold only for a document that leaves nothing to libvirt.

    >>> from homenode.vm.model import GuestAddress as At
    >>> pxb = GuestPciController(1, "pcie-expander-bus", At(0, 0, 2, 0), bus_nr=128)
    >>> ports = [GuestPciController(i, "pcie-root-port", At(0, 1, 9 - i, 0)) for i in (2, 3)]
    >>> list_bus_numbers([pxb, *ports])
    {0: 0, 1: 128, 3: 129, 2: 130}
    """
    bridges_of_bus: dict[int, list[GuestPciController]] = defaultdict(list)
    roots = {0: 0}
    for controller in controllers:
        if controller.model in EXPANDER_MODELS:
            if controller.bus_nr is not None:
                roots[controller.index] = controller.bus_nr
        elif controller.model not in ROOT_MODELS and controller.address is not None:
            bridges_of_bus[controller.address.bus].append(controller)
    numbers: dict[int, int] = {}

    def walk(index: int, number: int) -> int:
        """Number all buses below; return the last number used."""
        numbers[index] = number
        last = number
        for bridge in sorted(bridges_of_bus[index], key=_place):
            if bridge.index not in numbers and last + 1 < _MAX_BUSES:
                last = walk(bridge.index, last + 1)
        return last

    for index, number in sorted(roots.items(), key=lambda root: root[1]):
        walk(index, number)
    return numbers


def find_kernel_address(address: GuestAddress, buses: dict[int, int]) -> Bdf | None:
    """Return the address that the guest's kernel prints, or None if its bus has no number."""
    number = buses.get(address.bus)
    if number is None:
        return None
    return Bdf(address.domain, number, address.device, address.function)


class PendingDevice(Struct, frozen=True):
    """A device without an address, which the hypervisor will assign."""

    gap_text: str  # the reason, for a message
    line: int  # line in the definition


STARTED = PendingDevice("a file that more options may follow", 1)
"""Used for files of other hypervisors: devices added at the start are on the root bus."""


def make_pending(document: Document) -> PendingDevice | None:
    """Return the first device without an address, or the first that libvirt would add.

    None if the definition is complete, as from `virsh dumpxml`. Source: libvirt adds a memory
    balloon to every domain without one, and on x86 a USB controller
    (qemuDomainDefAddDefaultDevices).
    """
    devices = document.root.child("devices")
    if devices is None:
        return PendingDevice("no <devices>", document.root.line)
    for element in devices.children:
        if _is_on_pci(element) and guest_address(element) is None:
            return PendingDevice(f"<{element.tag}> without one", element.line)
    if devices.child("memballoon") is None:
        return PendingDevice("no <memballoon>", devices.line)
    machine = document.root.find("os/type")
    is_x86 = machine is None or machine.get("arch") in (None, "x86_64", "i686")
    if is_x86 and not any(e.get("type") == "usb" for e in devices.all("controller")):
        return PendingDevice("no USB controller", devices.line)
    return None


def _place(controller: GuestPciController) -> tuple[int, int, int]:
    address = controller.address
    assert address is not None, "only devices with an address are below a bridge"
    return address.device, address.function, controller.index


def _is_on_pci(element: Element) -> bool:
    """Return whether libvirt would put a device on PCI, on machine types with expander buses."""
    address = element.child("address")
    if address is not None and address.get("type") in _NOT_PCI_TYPES:
        return False
    if element.name == "controller":
        kind = element.get("type")
        if kind == "pci":
            return element.get("model") not in ROOT_MODELS and element.get("index") != "0"
        # A USB controller without a model may be built into the chipset, but then has an address.
        return kind not in _OTHER_CONTROLLERS and element.get("model") != "none"
    if element.name == "hostdev":
        return element.get("type") in ("pci", "mdev")
    if element.name == "disk":
        target = element.child("target")
        return target is not None and target.get("bus") in _PCI_DISK_BUSES
    if element.name in ("memballoon", "video", "watchdog"):
        return "none" not in (element.get("model"), (_find_model_type(element))) and not (
            element.name == "watchdog" and element.get("model") in ("itco", "ib700")
        )
    if element.name == "sound":
        return element.get("model") not in ("pcspk", "sb16", "usb")
    return element.name in _ON_PCI


def _find_model_type(element: Element) -> str | None:
    model = element.child("model")
    return None if model is None else model.get("type")


class GuestSide(Struct, frozen=True, kw_only=True):
    """A guest's facts for its topology file."""

    vcpu_pins: tuple[CpuSet | None, ...]  # CPUs of each vCPU in vCPU order, None if it floats
    cells: tuple[VmCell, ...]  # () for a flat guest
    node_of_cell: tuple[int, ...]  # the guest kernel's node of each cell, in cell order
    # host function -> the guest kernel's address, for every passed-through PCI function
    bus_ids: tuple[tuple[Bdf, Bdf], ...]

    def bus_id(self, bdf: Bdf) -> Bdf | None:
        return dict(self.bus_ids).get(bdf)


def build_guest_side(
    facts: Vm, loose: PendingDevice | None, *, plan: Plan | None = None, guest: Host | None = None
) -> GuestSide:
    """Return the guest's facts of a VM whose file has the addresses of its devices.

    loose: a device without an address. plan: if given, its pins and cells count. guest: a capture
    from inside the guest, with the kernel's numbers. Raises InputError, which names the device, if
    a bus id cannot be determined, or if plan, guest and file are not of one VM.
    """
    if plan is not None:
        _reject_other_plan(plan, facts)
    vm = facts if plan is None else plan.vm
    if guest is None:
        nodes = order_nodes(vm.cells)
        bus_ids = _derive_bus_ids(facts, loose)
    else:
        nodes = _find_nodes(vm.cells, guest, facts.source)
        bus_ids = _observe_bus_ids(facts, guest, facts.source)
    return GuestSide(
        vcpu_pins=vm.vcpu_pins,
        cells=vm.cells,
        node_of_cell=nodes,
        bus_ids=tuple(sorted(bus_ids.items())),
    )


def _reject_other_plan(plan: Plan, facts: Vm) -> None:
    hostdevs = {hostdev.bdf: hostdev for hostdev in facts.hostdevs}
    for device in plan.vm.hostdevs:
        if device.bdf not in hostdevs:
            raise InputError(
                f"{facts.source}: no device {device.bdf}, though the plan has it",
                hint="use the definition that homenode plan wrote with this plan",
            )
        at = hostdevs[device.bdf].address
        planned_path = _find_path(device, plan.vm.controllers)
        moved = _find_path(hostdevs[device.bdf], facts.controllers) != planned_path
        if planned_path is not None and moved and not (at and at.domain):
            raise InputError(
                f"{facts.source}: expected device {device.bdf} at {device.address} as in the plan, "
                f"found {at or 'no address'}",
                hint="use the definition that homenode plan wrote with this plan",
            )
    if plan.vm.vcpus != facts.vcpus:
        raise InputError(
            f"{facts.source}: expected {plural(plan.vm.vcpus, 'vCPU')} as in the plan, "
            f"found {facts.vcpus}",
            hint="use the definition that homenode plan wrote with this plan",
        )


def order_nodes(cells: Sequence[VmCell]) -> tuple[int, ...]:
    """Return the guest's node of each cell: Linux numbers nodes by their vCPUs, then the others."""
    order = sorted(
        range(len(cells)), key=lambda i: (not cells[i].vcpus, cells[i].vcpus.first() or 0, i)
    )
    return tuple(order.index(i) for i in range(len(cells)))


def _find_nodes(cells: tuple[VmCell, ...], guest: Host, source: str) -> tuple[int, ...]:
    nodes = []
    for cell in cells:
        shared_counts = {node.index: len(node.pus & cell.vcpus) for node in guest.nodes}
        best = max(shared_counts, key=lambda index: (shared_counts[index], -index), default=None)
        if best is None or (cell.vcpus and not shared_counts[best]):
            raise InputError(
                f"{source}: no node with vCPUs {cell.vcpus} in guest {guest.name!r}",
                hint="the capture must be made inside this very guest: homenode capture",
            )
        nodes.append(int(best))
    return tuple(nodes)


def _observe_bus_ids(vm: Vm, guest: Host, source: str) -> dict[Bdf, Bdf]:
    at = map_guest_paths(guest)
    addresses = {}
    for hostdev in vm.hostdevs:
        path = _find_path(hostdev, vm.controllers)
        if path is None:
            raise _make_unplugged_error(hostdev.bdf, source)
        if path not in at:
            raise InputError(
                f"{source}: expected device {hostdev.bdf} at {path} in guest {guest.name!r}, "
                "found no function there",
                hint="the capture must be made inside this very guest, from the definition it runs "
                "with: virsh dumpxml NAME",
            )
        addresses[hostdev.bdf] = at[path]
    return addresses


def _find_path(
    hostdev: GuestHostdev, controllers: Iterable[GuestPciController]
) -> GuestPath | None:
    return None if hostdev.address is None else find_guest_path(hostdev.address, controllers)


def _derive_bus_ids(vm: Vm, loose: PendingDevice | None) -> dict[Bdf, Bdf]:
    buses = list_bus_numbers(vm.controllers)
    addresses = {}
    for hostdev in vm.hostdevs:
        path = _find_path(hostdev, vm.controllers)
        if path is None or hostdev.address is None:
            raise _make_unplugged_error(hostdev.bdf, vm.source)
        if path.root_bus == 0 and len(path.steps) > 1 and loose is not None:
            raise InputError(
                f"{vm.source}:{loose.line}: expected an address on every device, so that "
                f"the bus number of {hostdev.bdf} on the root bus follows; found {loose.gap_text}: "
                "the hypervisor may add ports, and the guest's firmware counts them",
                hint="virsh define it and give the definition of virsh dumpxml NAME, or a capture "
                "made inside the guest with --guest",
            )
        address = find_kernel_address(hostdev.address, buses)
        if address is None:
            raise InputError(
                f"{vm.source}: expected a bus number for device {hostdev.bdf} at {path}, "
                "found more bridges than 256 buses have space for",
                hint="use a capture made inside the guest with --guest",
            )
        addresses[hostdev.bdf] = address
    _reject_twice(addresses, vm.source)
    return addresses


def _reject_twice(addresses: Mapping[Bdf, Bdf], source: str) -> None:
    seen_bdfs: dict[Bdf, Bdf] = {}
    for bdf, address in addresses.items():
        if address in seen_bdfs:
            raise InputError(
                f"{source}: expected a different bus id for each device, found {address} for "
                f"{seen_bdfs[address]} and {bdf}",
                hint="bus windows collide: homenode verify VM.xml",
            )
        seen_bdfs[address] = bdf


def _make_unplugged_error(bdf: Bdf, source: str) -> InputError:
    return InputError(
        f"{source}: no guest address for device {bdf}",
        hint="homenode plan --layout pin-numa-pci, or virsh define it and use the definition of "
        "virsh dumpxml NAME",
    )


def map_node_vcpus(host: Host, guest: GuestSide) -> dict[NodeIndex, CpuSet]:
    """Map each host node to the vCPUs that run there, by their pins, else by their cell's memory.
    vCPUs that float run on every node that has CPUs."""
    bound = {
        vcpu: tuple(NodeIndex(int(node)) for node in cell.nodes)
        for cell in guest.cells
        for vcpu in cell.vcpus
        if cell.nodes
    }
    everywhere = tuple(node.index for node in host.nodes if node.pus)
    vcpus_of: dict[NodeIndex, set[int]] = {}
    for vcpu, pin in enumerate(guest.vcpu_pins):
        if pin is not None:
            near_nodes = tuple(node.index for node in host.nodes if not node.pus.isdisjoint(pin))
        else:
            near_nodes = bound.get(PuIndex(vcpu), everywhere)
        for node in near_nodes:
            vcpus_of.setdefault(node, set()).add(vcpu)
    return {node: CpuSet(vcpus) for node, vcpus in vcpus_of.items()}


def find_nearest_vcpus(
    host: Host, node: NodeIndex, vcpus_of_node: dict[NodeIndex, CpuSet]
) -> CpuSet:
    """Return vCPUs of the nodes nearest to a node without vCPUs; all vCPUs without distances."""
    distance_of_node = {other: host.find_distance(node, other) or 0 for other in vcpus_of_node}
    least = min(distance_of_node.values(), default=0)
    bits = 0
    for other, vcpus in vcpus_of_node.items():
        if distance_of_node[other] == least:
            bits |= vcpus.bits
    return CpuSet.from_bits(bits)


def assign_numa_ids(used: Sequence[NodeIndex], guest: GuestSide) -> dict[NodeIndex, int]:
    """Map each host node to the lowest guest node whose memory is on it. A host node without a
    guest node gets the next unused number: NCCL accepts any number that comes with its vCPUs."""
    numbers: dict[NodeIndex, int] = {}
    for cell, number in zip(guest.cells, guest.node_of_cell, strict=True):
        if cell.nodes:
            node = NodeIndex(next(iter(cell.nodes)))
            numbers[node] = min(number, numbers.get(node, number))
    spare = max(guest.node_of_cell, default=-1) + 1
    for node in used:
        if node not in numbers:
            numbers[node] = spare
            spare += 1
    return numbers
