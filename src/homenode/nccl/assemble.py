"""Assemble: a guest's topology from the host's PCIe tree and the guest's own addresses."""

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import Finding
from homenode.indices import NodeIndex
from homenode.machine.pci import DeviceKind, PciDevice, PciLink, PortType
from homenode.machine.topology import Host, with_certain_nodes
from homenode.nccl.doubts import (
    cpu_unknown,
    device_without_node,
    floating_vcpus,
    known_vendor,
    link_unknown,
    switch_link_unknown,
    too_many_nodes,
)
from homenode.nccl.guest_side import GuestSide, nearest_vcpus, numa_ids, vcpus_of_nodes
from homenode.nccl.topology import (
    SWITCH_CLASS,
    NcclCpu,
    NcclPci,
    NcclTopology,
    NcclVariant,
)

AMD_VENDOR = 0x1002
_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64", "ppc64": "ppc64"}
_MOST_SWITCHES = 255


class PlacedDevice(Struct, frozen=True, kw_only=True):
    """A device of the file. cpu: the host node that it hangs on. switch: the lowest virtual one."""

    bdf: Bdf
    kind: DeviceKind
    bus_id: str
    node: NodeIndex
    switch: str | None


class Assembled(Struct, frozen=True, kw_only=True):
    """The topology, where each device is in it, and what to know of it."""

    topology: NcclTopology
    devices: tuple[PlacedDevice, ...]
    findings: tuple[Finding, ...]


def assemble_topology(host: Host, guest: GuestSide, flavour: NcclVariant, source: str) -> Assembled:
    """The topology of a guest on a host.

    A cpu for each host node that runs vCPUs or holds a device; the host's PCIe switches as virtual
    ones; each GPU and NIC of the guest once. A device whose host node is unknown is left out:
    NCCL then goes by what the guest itself says of it. source: of the document, for messages.
    Raises InputError where the host lacks a device, for a guest with no GPU or NIC, for GPUs of
    the other flavour, and for more than NCCL can read.
    """
    host = with_certain_nodes(host)
    devices = _devices(host, guest, source)
    _refuse_other_flavour(devices, flavour, source)
    found: list[Finding] = []
    nodes = {node.index for node in host.nodes}
    placed = [device for device in devices if device.node in nodes]
    found += [device_without_node(device, host) for device in devices if device not in placed]
    tree = _Tree(host=host, guest=guest, findings=found)
    vcpus_of_node = vcpus_of_nodes(host, guest)
    used = sorted({node for node, vcpus in vcpus_of_node.items() if vcpus} | _nodes(placed))
    numbers = numa_ids(used, guest)
    found += floating_vcpus(guest, used, source)
    cpus = []
    for node in used:
        here = [device for device in placed if device.node == node]
        affinity = vcpus_of_node.get(node) or nearest_vcpus(host, node, vcpus_of_node)
        cpus.append(_cpu(host, numbers[node], affinity, tree.below(node, here)))
    topology = NcclTopology(flavour, tuple(cpus))
    found += cpu_unknown(host)
    _refuse_too_many(topology, source)
    found += too_many_nodes(topology, [device.kind for device in placed], source)
    return Assembled(topology=topology, devices=tuple(tree.placed), findings=tuple(found))


def _devices(host: Host, guest: GuestSide, source: str) -> list[PciDevice]:
    by_bdf = {device.bdf: device for device in host.pci_devices}
    if not by_bdf:
        raise InputError(
            f"host {host.name!r}: expected its PCI tree, found none in its source",
            hint="lay the output of lspci -D -nn -vvv over it with --lspci",
        )
    for bdf, _ in guest.bus_ids:
        if bdf not in by_bdf:
            raise InputError(
                f"{source}: expected device {bdf} on host {host.name!r}, found none there",
                hint="name the host that the VM runs on with --host",
            )
    kept = [
        by_bdf[bdf]
        for bdf, _ in guest.bus_ids
        if by_bdf[bdf].kind in (DeviceKind.GPU, DeviceKind.NIC)
    ]
    if not kept:
        raise InputError(
            f"{source}: expected a passed-through GPU or NIC, found none",
            hint="a guest without one needs no topology file; vGPUs (mdev) have no place of "
            "their own on the host's PCIe tree",
        )
    return kept


def _refuse_other_flavour(devices: Iterable[PciDevice], flavour: NcclVariant, source: str) -> None:
    for device in devices:
        if device.kind is not DeviceKind.GPU or device.vendor_id is None:
            continue
        is_amd = device.vendor_id == AMD_VENDOR
        if is_amd and flavour is NcclVariant.NCCL:
            raise InputError(
                f"{source}: expected NVIDIA GPUs for NCCL, found AMD's {device.bdf}",
                hint="--rccl writes the version that RCCL takes; it refuses NCCL's",
            )
        if not is_amd and flavour is NcclVariant.RCCL:
            raise InputError(
                f"{source}: expected AMD GPUs for RCCL, found {device.bdf} of vendor "
                f"{device.vendor_id:04x}",
                hint="leave out --rccl: NCCL refuses RCCL's version",
            )


def _nodes(devices: Iterable[PciDevice]) -> set[NodeIndex]:
    return {device.node for device in devices if device.node is not None}


def _cpu(host: Host, numa_id: int, affinity: CpuSet, children: tuple[NcclPci, ...]) -> NcclCpu:
    is_x86 = host.architecture == "x86_64"
    return NcclCpu(
        numa_id=numa_id,
        affinity=affinity,
        architecture=_ARCHITECTURES.get(host.architecture or ""),
        vendor=known_vendor(host) if is_x86 else None,
        family=host.cpu.family if is_x86 else None,
        model=host.cpu.model if is_x86 else None,
        children=children,
    )


class _Tree(Struct, kw_only=True):
    """Builds the <pci> of each cpu, and numbers virtual switches through the whole file."""

    host: Host
    guest: GuestSide
    findings: list[Finding]
    placed: list[PlacedDevice] = field(default_factory=list)
    switches: int = 0

    def below(self, node: NodeIndex, devices: Sequence[PciDevice]) -> tuple[NcclPci, ...]:
        paths = [(_switches(self.host, device), device) for device in devices]
        return self._group(node, paths, 0, None)

    def _group(
        self,
        node: NodeIndex,
        paths: Sequence[tuple[tuple[PciDevice, ...], PciDevice]],
        depth: int,
        switch_id: str | None,
    ) -> tuple[NcclPci, ...]:
        """Devices in host order; those below one more switch together, at the first's place."""
        done: set[Bdf] = set()
        found: list[NcclPci] = []
        for switches, device in paths:
            if len(switches) == depth:
                found.append(self._device(node, device, switch_id))
                continue
            switch = switches[depth]
            if switch.bdf in done:
                continue
            done.add(switch.bdf)
            self.switches += 1
            bus_id = f"ffff:ff:{self.switches & 0xFF:02x}.0"
            inside = [p for p in paths if len(p[0]) > depth and p[0][depth].bdf == switch.bdf]
            children = self._group(node, inside, depth + 1, bus_id)
            speed, width = self._switch_link(switch, children)
            found.append(
                NcclPci(
                    bus_id=bus_id,
                    class_code=SWITCH_CLASS,
                    gt_per_s=speed,
                    width=width,
                    children=children,
                )
            )
        return tuple(found)

    def _device(self, node: NodeIndex, device: PciDevice, switch_id: str | None) -> NcclPci:
        address = self.guest.bus_id(device.bdf)
        assert address is not None, "devices come from the guest's own bus ids"
        bus_id = str(address)
        self.placed.append(
            PlacedDevice(
                bdf=device.bdf, kind=device.kind, bus_id=bus_id, node=node, switch=switch_id
            )
        )
        speed, width = _link(self.host, device)
        if speed is None or width is None:
            self.findings.append(link_unknown(device))
        return NcclPci(bus_id=bus_id, class_code=device.class_code, gt_per_s=speed, width=width)

    def _switch_link(self, switch: PciDevice, children: tuple[NcclPci, ...]) -> tuple[float, int]:
        """Its own, up to the root; else that of the fastest device below, and a finding."""
        speed, width = _link(self.host, switch)
        if speed is not None and width is not None:
            return speed, width
        known = [
            (child.gt_per_s, child.width)
            for child in children
            if child.gt_per_s is not None and child.width is not None
        ]
        assumed = max(known, key=lambda link: link[0] * link[1], default=(16.0, 16))
        self.findings.append(switch_link_unknown(switch, *assumed))
        return assumed


def _switches(host: Host, device: PciDevice) -> tuple[PciDevice, ...]:
    """The upstream ports of the switches above a function, from the root down."""
    whose = device.physical_function or device.bdf
    bridges = host.bridges_above(whose if host.device(whose) is not None else device.bdf)
    upstream = [b for b in bridges if b.bridge and b.bridge.port_type is PortType.SWITCH_UPSTREAM]
    return tuple(reversed(upstream))


def _link(host: Host, device: PciDevice) -> tuple[float | None, int | None]:
    """What a link can do: the lesser of both its ends. A virtual function has its physical one's.

    The current speed would not do: an idle device slows its link down.
    """
    if device.physical_function is not None:
        physical = host.device(device.physical_function)
        device = device if physical is None else physical
    port = None if device.parent is None else host.device(device.parent)
    ends: list[PciLink] = [device.link] if device.link is not None else []
    if ends and port is not None and port.link is not None:
        ends.append(port.link)
    speeds = [end.max_gt_per_s for end in ends if end.max_gt_per_s]
    widths = [end.max_width for end in ends if end.max_width]
    return min(speeds, default=None), min(widths, default=None)


def _refuse_too_many(topology: NcclTopology, source: str) -> None:
    switches = sum(pci.is_virtual for pci in topology.pcis())
    most = topology.flavour.most_nodes
    if topology.nodes > most or switches > _MOST_SWITCHES:
        raise InputError(
            f"{source}: expected at most {most} elements, which is what NCCL reads, found "
            f"{topology.nodes}",
            hint="pass fewer devices to this VM",
        )
