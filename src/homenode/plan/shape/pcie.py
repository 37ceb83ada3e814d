"""Guest PCIe: an expander bus per cell and a port per device, added to the definition's.

The definition keeps addresses stable: a device on an expander bus of its cell stays, its port stays
when it is removed, and a new device takes an empty port before a new port is added. New controllers
have indices after the definition's last, without gaps, which libvirt would fill with root ports on
pcie.0. Root ports on an expander bus take slots 0 to 31, a port's own bus has slot 0 only. Source:
libvirt PCI topology documentation, and tried on libvirt 9.0.

An expander bus owns the bus numbers from its busNr up to the next expander's. libvirt silently
accepts a window that is too small, and the guest's enumeration then fails. Source: tried on libvirt
9.0 and QEMU 7.2; libvirt domain XML, <target busNr> is 1 to 254.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.findings import Finding
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import CoreKind, Host
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest
from homenode.plan.shape.pcie_cells import (
    NearestCell,
    check_cell_buses,
    check_empty_ports,
    check_switches,
    find_nearest_cells,
    find_placeless_devices,
    report_nearest_cells,
)
from homenode.vm.model import (
    EXPANDER,
    GuestAddress,
    GuestCellId,
    GuestPciController,
    PortModel,
    Vm,
    expander_above,
)
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import PciGranularity

SLOTS_PER_BUS = 32
"""Device numbers on an expander bus or below a switch's upstream port."""

MAX_INDEX = 255
"""libvirt writes a controller's index as `bus` of an address, which has 8 bits."""

BUS_COUNT = 256
ROOM = (8, 2)
"""Maximum of spare bus numbers of an expander bus; the second value if these are too many. One
number alone does not do: busNr is 254 at most."""

# Slots on pcie.0 for expander buses, the least used first. Omitted: 0 is the host bridge; libvirt
# gives 1 to the first video device and counts up from 2 with its own root ports; q35's chipset has
# 0x1a, 0x1d (USB), 0x1b (sound) and 0x1f (LPC, SATA, SMBus).
_EXPANDER_SLOTS = (*range(0x10, 0x19), *range(0x0F, 0x02, -1), 0x19, 0x1C, 0x1E)

_KINDS = (DeviceKind.GPU, DeviceKind.NVSWITCH, DeviceKind.NIC, DeviceKind.NVME)
"""The order of device kinds for new ports of a cell; other kinds come last."""


class MirroredPcie(Struct, frozen=True):
    """The guest's PCIe tree. address_of has only devices with a place; cell_of also has other
    devices on a cell's expander bus."""

    controllers: tuple[GuestPciController, ...]
    address_of: dict[Bdf, GuestAddress]
    cell_of: dict[Bdf, GuestCellId]
    group_of: dict[Bdf, Bdf]
    findings: tuple[Finding, ...]


def mirror_pcie(host: Host, request: GuestRequest, placement: Placement) -> MirroredPcie:
    """Assign the guest's PCI addresses for a layout that mirrors PCIe, and add the controllers.

    Raises InputError for a machine type without PCIe expander buses, for a device that the host
    does not have or that is a bridge; Unplannable where 256 buses are too few.
    """
    reject_machine(
        request.guest,
        f"layout {request.layout.name}",
        "choose pin-numa, which leaves the PCI tree as it was",
    )
    cell_of_node = {node: cell for cell, node in enumerate(placement.nodes)}
    if len(cell_of_node) < len(placement.nodes):
        cells = sorted(
            enumerate(placement.nodes), key=lambda it: _is_efficient(host, placement, it[0])
        )
        cell_of_node = {node: cell for cell, node in reversed(cells)}
    return mirror_cells(
        host,
        request,
        placement.devices,
        cell_of_node,
        len(placement.nodes),
        find_nearest_cells(host, placement.nodes),
    )


def _is_efficient(host: Host, placement: Placement, cell: int) -> bool:
    """Return whether a cell has efficiency cores: then the node's other cell gets the devices."""
    pins = zip(placement.vcpu_nodes, placement.vcpu_pins, strict=False)
    used = CpuSet(pu for at, pus in pins if at == cell for pu in pus)
    return any(
        core.kind is CoreKind.EFFICIENCY and not core.pus.isdisjoint(used) for core in host.cores
    )


def mirror_cells(
    host: Host,
    request: GuestRequest,
    devices: tuple[Bdf, ...],
    cell_of_node: dict[NodeIndex, int],
    cells: int,
    nearest: Mapping[NodeIndex, NearestCell] = MappingProxyType({}),
) -> MirroredPcie:
    """Return the mirror for existing cells: a cell may be on several nodes, or on no node.

    devices: those that get a place, host order. cells: number of cells. nearest: the nearest cells
    of nodes without a cell; devices of all other nodes do not move. Raises like mirror_pcie, except
    for the machine type.
    """
    # Long because devices that stay, move and are new share one numbering of buses.
    guest, options = request.guest, request.options
    _reject_unfit(host.device_at, devices)
    granularity = options.pci_granularity or PciGranularity.CELL
    groups = _group_devices(host, devices, cell_of_node, nearest, granularity)
    addresses = {hostdev.bdf: hostdev.address for hostdev in guest.hostdevs if hostdev.address}
    document = PcieDefinition(guest, cells, ())
    kept_addresses = _keep_addresses(document, groups, addresses, granularity)
    leaving = [
        addresses[bdf]
        for i, group in enumerate(groups)
        for bdf, function in group.function_of.items()
        if bdf in addresses and (i not in kept_addresses or addresses[bdf].function != function)
    ]
    build = _PcieBuild(PcieDefinition(guest, cells, leaving), options.spare_ports)
    with_bus: Sequence[int] = range(cells)
    if cells > len(document.expander_slots()) + len(document.cells_with_bus):
        with_bus = sorted({group.cell for group in groups})
    for i, group in enumerate(groups):
        if i in kept_addresses:
            build.claim(kept_addresses[i].bus, group)
    if granularity is not PciGranularity.ROOT_COMPLEX:
        for cell in with_bus:
            build.expander(cell, "")

    address_of: dict[Bdf, GuestAddress] = {}
    cell_of: dict[Bdf, GuestCellId] = {}
    group_of: dict[Bdf, Bdf] = {}
    for i, group in enumerate(groups):
        at = kept_addresses.get(i) or GuestAddress(0, build.port(group), 0, 0)
        for bdf, function in group.function_of.items():
            address_of[bdf] = GuestAddress(at.domain, at.bus, at.device, function)
            cell_of[bdf] = GuestCellId(group.cell)
            group_of[bdf] = next(iter(group.function_of))
    for bdf, address in addresses.items():
        expander = document.expander_above(address.bus)
        if bdf not in cell_of and expander is not None and expander.cell is not None:
            cell_of[bdf] = GuestCellId(expander.cell)
    build.add_spares()
    controllers = build.number_buses()
    nearest_devices = [
        (bdf, node)
        for bdf in devices
        if (node := host.device_at[bdf].node) is not None and node in nearest
    ]
    findings = (
        *find_placeless_devices(host.device_at, devices, cell_of_node, address_of, cell_of),
        *report_nearest_cells(nearest_devices, nearest),
        *check_switches(controllers),
        *check_cell_buses(cells, with_bus),
        *check_empty_ports(request, controllers, address_of),
    )
    return MirroredPcie(controllers, address_of, cell_of, group_of, findings)


class DeviceGroup(Struct, frozen=True, kw_only=True):
    """The functions behind one port: a GPU with its audio and USB functions, or one function."""

    function_of: dict[Bdf, int]  # guest function of each host function, ascending by address
    cell: int
    root: str  # host root complex of its expander bus; "" = any bus of the cell
    switch: Bdf | None  # upstream port of the mirrored host switch above it


def _group_devices(
    host: Host,
    devices: tuple[Bdf, ...],
    cell_of_node: Mapping[NodeIndex, int],
    nearest: Mapping[NodeIndex, NearestCell],
    granularity: PciGranularity,
) -> list[DeviceGroup]:
    """Group devices with a cell, cell by cell, in the order in which they get new ports; devices on
    a nearest cell come last and move no other device."""
    cell_of = {node: place.cell for node, place in nearest.items()} | dict(cell_of_node)
    slots: dict[Bdf, list[PciDevice]] = {}
    placeable = [host.device_at[bdf] for bdf in devices if host.device_at[bdf].node in cell_of]
    gpus = {_make_slot_key(gpu.bdf): gpu.bdf for gpu in placeable if gpu.kind is DeviceKind.GPU}
    for device in placeable:
        is_whole = device.physical_function is None
        owner = gpus.get(_make_slot_key(device.bdf), device.bdf) if is_whole else device.bdf
        slots.setdefault(owner, []).append(device)
    keyed_devices = []
    for members in slots.values():
        head = next((gpu for gpu in members if gpu.kind is DeviceKind.GPU), members[0])
        members.sort(key=lambda member: member.bdf)
        assert head.node is not None  # it has a cell
        # A guest probes function 0 first and skips the device without it: the lowest function gets
        # number 0. A virtual function's number on the host is irrelevant.
        numbers = {device.bdf: device.bdf.function for device in members}
        numbers[members[0].bdf] = 0
        is_virtual = head.physical_function is not None
        group = DeviceGroup(
            function_of=numbers,
            cell=cell_of[head.node],
            root=head.root_complex if granularity is PciGranularity.ROOT_COMPLEX else "",
            switch=host.switch_above(head.bdf) if granularity is PciGranularity.SWITCH else None,
        )
        kind = _KINDS.index(head.kind) if head.kind in _KINDS else len(_KINDS)
        is_far = head.node not in cell_of_node
        keyed_devices.append(((is_far, group.cell, is_virtual, kind, head.bdf), group))
    return [group for _, group in sorted(keyed_devices, key=lambda item: item[0])]


def _make_slot_key(bdf: Bdf) -> tuple[int, int, int]:
    return bdf.domain, bdf.bus, bdf.device


def _keep_addresses(
    document: "PcieDefinition",
    groups: Sequence[DeviceGroup],
    addresses: Mapping[Bdf, GuestAddress],
    granularity: PciGranularity,
) -> dict[int, GuestAddress]:
    """Return the definition's address of each group (by position) that is in the right place: on an
    expander bus of its cell without devices of another root complex, or below such a switch. One
    function in the right place keeps the port for its group."""
    addresses_kept: dict[int, GuestAddress] = {}
    owner: dict[int, object] = {}
    for i, group in enumerate(groups):
        for bdf, function in group.function_of.items():
            address = addresses.get(bdf)
            if address is None or address.function != function or address.device != 0:
                continue
            port = document.controllers.get(address.bus)
            expander = document.expander_above(address.bus)
            if port is None or port.model == EXPANDER or expander is None:
                continue
            is_right = expander.cell == group.cell
            if granularity is PciGranularity.ROOT_COMPLEX:
                is_right = is_right and owner.setdefault(expander.index, group.root) == group.root
            elif group.switch is not None:
                is_right = is_right and port.model == PortModel.SWITCH_DOWNSTREAM
                upstream = 0 if port.address is None else port.address.bus
                is_right = is_right and owner.setdefault(upstream, group.switch) == group.switch
            if is_right:
                addresses_kept[i] = address
                break
    return addresses_kept


class PcieDefinition:
    """The controllers and addresses of a definition, without the devices that a plan moves.

    cells: of the planned guest; an expander bus of another cell has no cell. leaving: addresses
    that become free.
    """

    def __init__(self, guest: Vm, cells: int, leaving: Iterable[GuestAddress]) -> None:
        self.controllers = {
            controller.index: controller
            if controller.cell is None or controller.cell < cells
            else replace(controller, cell=None)
            for controller in guest.controllers
        }
        gone_indices = set(leaving)
        staying = [address for address in guest.addresses if address not in gone_indices]
        plugged_addresses = [c.address for c in guest.controllers if c.address is not None]
        self.slots_of_bus: dict[int, set[int]] = {}
        for address in (*staying, *plugged_addresses):
            self.slots_of_bus.setdefault(address.bus, set()).add(address.device)
        self.last_index = max((*self.controllers, *self.slots_of_bus), default=0)

    def expander_above(self, bus: int) -> GuestPciController | None:
        """Return the expander bus above a controller's bus; None on pcie.0."""
        return expander_above(self.controllers, bus)

    def expander_slots(self) -> list[int]:
        """Return free slots on pcie.0, in the order of use by expander buses."""
        in_use = self.slots_of_bus.get(0, set())
        return [slot for slot in _EXPANDER_SLOTS if slot not in in_use]

    @property
    def cells_with_bus(self) -> frozenset[int]:
        """Return cells with an expander bus in the definition."""
        buses = (bus for bus in self.controllers.values() if bus.model == EXPANDER)
        return frozenset(bus.cell for bus in buses if bus.cell is not None)


class _PcieBuild:
    """The definition's controllers and new controllers; none is renumbered or moved."""

    def __init__(self, document: PcieDefinition, spare_ports: int) -> None:
        self.document, self.spare_ports = document, spare_ports
        self.controllers = dict(document.controllers)
        self._slots = {bus: set(slots) for bus, slots in document.slots_of_bus.items()}
        self._roots: dict[int, str] = {}  # host root complex of an expander bus
        self._switches: dict[int, Bdf] = {}  # host switch of an upstream port
        self._root_slots = document.expander_slots()
        for index, controller in sorted(self.controllers.items()):
            if (
                controller.cell is not None and controller.address is None
            ):  # without an address from libvirt
                at = GuestAddress(0, 0, self._root_slot(), 0)
                self.controllers[index] = replace(controller, address=at)

    def claim(self, bus: int, group: DeviceGroup) -> None:
        """Record the root complex and switch of a device that stays."""
        expander = self.document.expander_above(bus)
        assert expander is not None, "a device that stays is on an expander bus"
        self._roots[expander.index] = group.root
        address = self.controllers[bus].address
        if group.switch is not None and address is not None:
            self._switches[address.bus] = group.switch

    def expander(self, cell: int, root: str) -> int:
        """Return the index of an expander bus of the cell and root complex with a free slot."""
        limit = SLOTS_PER_BUS - self.spare_ports
        for index in self._list_expanders(cell, root):
            if len(self._slots.get(index, ())) < limit:
                return index
        return self._add(PortModel.EXPANDER_BUS, 0, self._root_slot(), cell=cell)

    def port(self, group: DeviceGroup) -> int:
        """Return the index of an empty port for a group, existing or new."""
        if group.switch is None:
            return self._take_port(self._root_port(group))
        for upstream, switch in sorted(self._switches.items()):
            root = expander_above(self.controllers, upstream)
            is_ours = root is not None and root.cell == group.cell and switch == group.switch
            if is_ours and len(self._slots.get(upstream, ())) < SLOTS_PER_BUS:
                break
        else:
            upstream = self._add(PortModel.SWITCH_UPSTREAM, self._root_port(group), 0)
            self._switches[upstream] = group.switch
        empty = self._empty_ports(upstream)
        model = PortModel.SWITCH_DOWNSTREAM
        return self._take_port(empty[0] if empty else self._add_below(upstream, model))

    def add_spares(self) -> None:
        """Add ports until each expander bus has the requested number of empty ports."""
        for index, controller in sorted(self.controllers.items()):
            if controller.model == EXPANDER and controller.cell is not None:
                missing = self.spare_ports - len(self._empty_ports(index))
                free = SLOTS_PER_BUS - len(self._slots.get(index, ()))
                for _ in range(min(missing, free)):
                    self._add_below(index)

    def number_buses(self) -> tuple[GuestPciController, ...]:
        """Return the expander buses of cells and all ports below them, by index, with bus windows.
        Raises Unplannable if bus numbers run out."""
        buses = (i for i, bus in self.controllers.items() if bus.model == EXPANDER)
        trees: dict[int, list[int]] = {index: [] for index in buses}
        for index, controller in self.controllers.items():
            bus = None if controller.address is None else controller.address.bus
            expander = None if bus is None else expander_above(self.controllers, bus)
            if expander is not None and index not in trees:
                trees[expander.index].append(index)
        cell_buses = [i for i in trees if self.controllers[i].cell is not None]
        cell_buses.sort(key=lambda i: (self.controllers[i].cell, i))
        # libvirt adds a port on pcie.0 for each missing index below the highest.
        last = max((self.document.last_index, *self.controllers))
        root_buses = last + 1 - sum(1 + len(ports) for ports in trees.values())
        needs = {i: 1 + len(trees[i]) for i in cell_buses}
        bus_nrs = {i: nr for i in trees if (nr := self.controllers[i].bus_nr) is not None}
        foreign = [range(nr, nr + 1 + len(trees[i])) for i, nr in bus_nrs.items() if i not in needs]
        own_numbers = {i: bus_nrs[i] for i in cell_buses if i in bus_nrs}
        for fixed_numbers, room in product((own_numbers, {}), ROOM):
            numbers = _assign_bus_numbers(needs, fixed_numbers, foreign, room)
            lowest = min(numbers.values(), default=BUS_COUNT)
            if lowest >= root_buses:
                break
        else:
            count_text = ", ".join(f"controller {i}: {count}" for i, count in needs.items())
            raise Unplannable(
                f"PCI bus numbers: expected {BUS_COUNT} to suffice, of which pcie.0 has "
                f"{root_buses}; found a need for {root_buses - lowest} more ({count_text})",
                hint="pass fewer devices, reduce --spare-ports, or use --pci-granularity cell",
            )
        starts = sorted([*numbers.values(), *(span.start for span in foreign), BUS_COUNT])
        result = []
        models = set(PortModel)
        for index in sorted({*cell_buses, *(port for i in cell_buses for port in trees[i])}):
            controller, number = self.controllers[index], numbers.get(index)
            if controller.model not in models:
                continue
            before = self.document.controllers.get(index)
            result.append(
                replace(
                    controller,
                    model=PortModel(controller.model),
                    bus_nr=number,
                    bus_count=number and next(start for start in starts if start > number) - number,
                    existing=before is not None
                    and before.address is not None
                    and before.bus_nr == number,
                )
            )
        return tuple(result)

    def _empty_ports(self, parent: int) -> list[int]:
        """Return the root or downstream ports on this bus with nothing behind them."""
        return [
            index
            for index, controller in sorted(self.controllers.items())
            if controller.model in (PortModel.ROOT_PORT, PortModel.SWITCH_DOWNSTREAM)
            and controller.address is not None
            and controller.address.bus == parent
            and not self._slots.get(index)
        ]

    def _list_expanders(self, cell: int, root: str) -> list[int]:
        return [
            index
            for index, controller in sorted(self.controllers.items())
            if controller.model == EXPANDER
            and controller.cell == cell
            and self._roots.get(index, root) == root
        ]

    def _root_port(self, group: DeviceGroup) -> int:
        expanders = self._list_expanders(group.cell, group.root)
        empty = sorted(port for expander in expanders for port in self._empty_ports(expander))
        port = empty[0] if empty else self._add_below(self.expander(group.cell, group.root))
        expander = expander_above(self.controllers, port)
        assert expander is not None
        self._roots[expander.index] = group.root
        return port

    def _take_port(self, port: int) -> int:
        self._slots.setdefault(port, set()).add(0)
        return port

    def _add_below(self, parent: int, model: PortModel = PortModel.ROOT_PORT) -> int:
        slot = min(set(range(SLOTS_PER_BUS)) - self._slots.get(parent, set()))
        return self._add(model, parent, slot)

    def _root_slot(self) -> int:
        if not self._root_slots:
            raise Unplannable(
                "pcie.0: no free slot for an expander bus",
                hint="move devices of the definition behind root ports, pass fewer devices, allow "
                "fewer nodes with --max-nodes, or use --layout pin-numa",
            )
        return self._root_slots.pop(0)

    def _add(self, model: PortModel, parent: int, slot: int, cell: int | None = None) -> int:
        index = max((self.document.last_index, *self.controllers)) + 1
        if index > MAX_INDEX:
            documented_count = len(self.document.controllers)
            added_count = len(self.controllers) - documented_count + 1
            raise Unplannable(
                f"PCI controllers: expected indices up to {MAX_INDEX}, found a need for "
                f"{index} ({documented_count} in the definition, {added_count} to add)",
                hint="pass fewer devices, reduce --spare-ports, or start from a definition "
                "with fewer PCI controllers",
            )
        at = GuestAddress(0, parent, slot, 0)
        self.controllers[index] = GuestPciController(index, model, at, cell=cell, existing=False)
        self._slots.setdefault(parent, set()).add(slot)
        return index


def _assign_bus_numbers(
    needs: Mapping[int, int], fixed_numbers: Mapping[int, int], foreign: Sequence[range], room: int
) -> dict[int, int]:
    """Return the busNr of each expander bus: the highest free numbers, the last bus's the highest;
    some may be too low. needs: count of numbers of each. fixed_numbers: those to keep; all 0 =
    not possible. foreign: numbers of other expander buses. room: maximum of spare numbers of each,
    so that later devices do not change numbers, on which names of a guest's NICs depend.

    >>> _assign_bus_numbers({2: 5, 3: 1}, {}, [range(200, 256)], 8)
    {3: 192, 2: 184}
    """
    size = {index: count + room - count % room for index, count in needs.items()}
    ranges = [*foreign, *(range(nr, nr + needs[index]) for index, nr in fixed_numbers.items())]
    ranges.sort(key=lambda span: span.start)
    end_of_all = range(BUS_COUNT, BUS_COUNT)
    if any(span.stop > following.start for span, following in pairwise([*ranges, end_of_all])):
        return dict.fromkeys(needs, 0)
    numbers = dict(fixed_numbers)
    for index in reversed([index for index in needs if index not in fixed_numbers]):
        end = BUS_COUNT
        for span in reversed(ranges):
            if end - size[index] < span.stop:
                end = min(end, span.start)
        numbers[index] = end - size[index]
        ranges = sorted([*ranges, range(numbers[index], end)], key=lambda span: span.start)
    return numbers


def reject_machine(guest: Vm, subject: str, hint: str) -> None:
    """Raise InputError unless the machine type has PCIe expander buses. hint: another way out."""
    if guest.architecture == "x86_64" and (guest.is_q35 or guest.is_pv):  # a target rejects PV
        return
    if guest.architecture == "aarch64" and guest.is_virt:
        return
    name = guest.machine
    if name is None:
        name = "no machine type, which libvirt treats as i440fx on x86_64"
    elif guest.architecture == "x86_64" and not guest.is_q35:
        name = f"{name} (i440fx)" if name == "pc" or "i440fx" in name else name
    machine = {"x86_64": "q35", "aarch64": "virt"}.get(guest.architecture)
    other = f"change the machine type to {machine} in a new guest, or " if machine else ""
    raise InputError(
        f"{subject}: expected machine q35 (x86_64) or virt (aarch64), the only ones with "
        f"PCIe expander buses; found {name} on {guest.architecture}",
        hint=f"{other}{hint}",
    )


def _reject_unfit(by_bdf: dict[Bdf, PciDevice], devices: tuple[Bdf, ...]) -> None:
    for bdf in devices:
        device = by_bdf.get(bdf)
        if device is None:
            raise InputError(
                f"device {bdf}: no such PCI function on the host",
                hint="homenode show --host SOURCE lists the host's devices",
            )
        if device.kind is DeviceKind.BRIDGE:
            raise InputError(f"device {bdf}: expected a device, found a bridge")
