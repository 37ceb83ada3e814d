"""Assemble: a guest's topology from the host's PCIe tree and the guest's addresses."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.errors import InputError
from homenode.findings import Finding, Gap, finding
from homenode.machine.pci import AMD, DeviceKind, PciDevice, PciLink, PortType
from homenode.machine.tools.nvidia_smi import NvidiaQuery
from homenode.machine.topology import Host, complete_nodes, reject_unshown
from homenode.nccl.guest_side import GuestSide, assign_numa_ids, find_nearest_vcpus, map_node_vcpus
from homenode.nccl.topology import (
    ADDED_FOR_GPU,
    ADDED_FOR_NIC,
    SWITCH_CLASS,
    NcclCpu,
    NcclPci,
    NcclTopology,
    NcclVariant,
)
from homenode.plan.devices.fabric import (
    Board,
    find_board,
    is_partition,
    map_modules,
    partitions_of_size,
    read_board,
)
from homenode.text import plural
from homenode.vm.model import LayoutRecord

_MAX_SHOWN = 4


def check_fabric(gpus: Iterable[Bdf], query: NvidiaQuery, source: str) -> Iterator[Finding]:
    """Yield a finding if the GPUs are not a partition, or if that is unknown.

    gpus: the guest's. query: the host's nvidia-smi -q -x, with the module ids. Boards without
    NVSwitches have no partitions, so no finding.
    """
    bdfs = tuple(sorted(gpus))
    board = find_board(gpu.name for gpu in query.gpus)
    if board is None or not bdfs:
        return
    modules = {gpu.bdf: gpu.module_id for gpu in query.gpus}
    known_modules = {bdf: module for bdf, module in modules.items() if module is not None}
    missing = [bdf for bdf in bdfs if bdf not in known_modules]
    if missing:
        yield finding(
            "nccl-partition-unknown",
            _format_bdfs(missing),
            expected="a module id in nvidia-smi -q -x",
            observed="none",
            source=source,
        )
        return
    yield from _check_partitions(bdfs, board, known_modules, source)


def check_fabric_of_host(gpus: Iterable[Bdf], host: Host) -> Iterator[Finding]:
    """Yield check_fabric's findings, if the host's source gives the module ids."""
    bdfs = tuple(sorted(gpus))
    board, known_modules = read_board(host), map_modules(host)
    if board is not None and bdfs and all(bdf in known_modules for bdf in bdfs):
        yield from _check_partitions(bdfs, board, known_modules, host.name)


def _check_partitions(
    bdfs: tuple[Bdf, ...], board: Board, modules: Mapping[Bdf, int], source: str
) -> Iterator[Finding]:
    if is_partition(board, (modules[bdf] for bdf in bdfs)):
        return
    allowed_partitions = partitions_of_size(board, len(bdfs), modules)
    shown_text = "; ".join(_format_bdfs(partition) for partition in allowed_partitions[:_MAX_SHOWN])
    module_list = ",".join(str(modules[bdf]) for bdf in bdfs)
    yield finding(
        "nccl-no-partition",
        _format_bdfs(bdfs),
        expected=f"a set of {plural(len(bdfs), 'GPU')} that is a partition of {board}"
        + (f": {shown_text}" if shown_text else ", which has none of that size"),
        observed=f"modules {module_list}, which are not a partition",
        source=source,
    )


def _format_bdfs(gpus: Iterable[Bdf]) -> str:
    return ", ".join(map(str, gpus))


_VENDOR = re.compile(r"[A-Za-z0-9 ]{1,12}\Z", re.ASCII)


def check_tuned_host(record: LayoutRecord | None, host: Host, source: str) -> Iterator[Finding]:
    """Yield a finding if the definition was tuned for another host: addresses may differ here."""
    fingerprint = host.fingerprint
    if record is not None and record.host is not None and not fingerprint.startswith(record.host):
        yield finding(
            "tuned-for-other-host",
            source,
            expected=f"a definition tuned for host {host.name!r} (topology {fingerprint[:12]})",
            observed=f"one tuned for another (topology {record.host[:12]})",
            case="of a topology file",
            source=source,
        )


def report_missing_node(device: PciDevice, host: Host) -> Finding:
    return finding(
        "nccl-device-without-node",
        str(device.bdf),
        expected="a NUMA node of the host",
        observed=f"none known on host {host.name!r}: it is omitted from the file",
        source="host",
    )


def report_unknown_link(device: PciDevice) -> Finding:
    return finding(
        "nccl-link-unknown",
        str(device.bdf),
        expected="its link's speed and width",
        observed="unknown to the host's source",
        source="host",
    )


def report_unknown_switch_link(switch: PciDevice, gt_per_s: float, width: int) -> Finding:
    return finding(
        "nccl-switch-link-unknown",
        f"switch {switch.bdf}",
        expected="the speed and width of its link to the root",
        observed=f"unknown: {gt_per_s:g} GT/s x{width} assumed",
        source="host",
    )


def check_floating(guest: GuestSide, used: Sequence[NodeIndex], source: str) -> Iterator[Finding]:
    """Yield a finding if vCPUs float over several nodes."""
    is_pinned = any(pin is not None for pin in guest.vcpu_pins)
    if is_pinned or any(cell.nodes for cell in guest.cells) or len(used) < 2:
        return
    yield finding(
        "nccl-vcpus-float",
        "vCPUs",
        expected="pins, or cells bound to host nodes",
        observed=f"neither: any vCPU may run on any of nodes {CpuSet(used)}",
        source=source,
    )


def find_vendor(host: Host) -> str | None:
    """Return the CPU's vendor if it is valid: 12 characters of CPUID, from an untrusted source."""
    vendor = host.cpu.vendor
    return vendor if vendor is not None and _VENDOR.match(vendor) else None


def check_cpu_model(host: Host) -> Iterator[Finding]:
    """Yield a finding if an x86 host does not report its CPU model."""
    identity = (find_vendor(host), host.cpu.family, host.cpu.model)
    if host.architecture == "x86_64" and None in identity:
        yield finding(
            "nccl-cpu-unknown",
            "CPU",
            expected="vendor, family and model of the host's CPU",
            observed="the host's source does not contain all three",
            source="host",
        )


def check_node_count(
    topology: NcclTopology, kinds: Sequence[DeviceKind], source: str
) -> Iterable[Finding]:
    """Yield a finding if the file exceeds the limit with the elements that NCCL adds."""
    after = topology.nodes + ADDED_FOR_GPU + ADDED_FOR_NIC * kinds.count(DeviceKind.NIC)
    limit = topology.flavour.most_nodes
    if after > limit:
        yield finding(
            "nccl-too-many-nodes",
            "file",
            expected=f"at most {limit} elements, including the elements that NCCL adds",
            observed=f"{topology.nodes}, and {after} with a <nic> and a <net> for each NIC",
            source=source,
        )


_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "arm64", "ppc64le": "ppc64", "ppc64": "ppc64"}
_MAX_SWITCHES = 255


class PlacedDevice(Struct, frozen=True, kw_only=True):
    """A device of the file. cpu: its host node."""

    bdf: Bdf
    kind: DeviceKind
    bus_id: str
    node: NodeIndex
    switch: str | None  # the lowest virtual switch above it


class TopologyFile(Struct, frozen=True, kw_only=True):
    """The topology, the place of each device, and findings."""

    topology: NcclTopology
    devices: tuple[PlacedDevice, ...]
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...] = ()  # unknown facts of the host


def assemble_topology(
    host: Host, guest: GuestSide, flavour: NcclVariant, source: str
) -> TopologyFile:
    """Return the topology of a guest on a host.

    It has a <cpu> for each host node that runs vCPUs or holds a device, a virtual switch for each
    host PCIe switch, and each GPU and NIC of the guest once. A device of unknown host node is
    omitted: NCCL then uses the guest's sysfs. source: the definition's name, for messages. Raises
    InputError if the host lacks a device, for a guest without a GPU or NIC, for GPUs of the other
    vendor, and for more elements than NCCL can read.
    """
    host = complete_nodes(host)
    devices = _list_devices(host, guest, source)
    _reject_other_flavour(devices, flavour, source)
    findings: list[Finding] = []
    nodes = {node.index for node in host.nodes}
    placed = [device for device in devices if device.node in nodes]
    findings += [report_missing_node(device, host) for device in devices if device not in placed]
    tree = _Tree(host=host, guest=guest, findings=findings)
    vcpus_of_node = map_node_vcpus(host, guest)
    used = sorted({node for node, vcpus in vcpus_of_node.items() if vcpus} | _list_nodes(placed))
    numbers = assign_numa_ids(used, guest)
    findings += check_floating(guest, used, source)
    cpus = []
    for node in used:
        below_node = [device for device in placed if device.node == node]
        affinity = vcpus_of_node.get(node) or find_nearest_vcpus(host, node, vcpus_of_node)
        cpus.append(
            _build_cpu(host, numbers[node], affinity, tree.child_elements(node, below_node))
        )
    topology = NcclTopology(flavour, tuple(cpus))
    findings += check_cpu_model(host)
    _reject_too_many(topology, source)
    findings += check_node_count(topology, [device.kind for device in placed], source)
    return TopologyFile(topology=topology, devices=tuple(tree.placed), findings=tuple(findings))


def _list_devices(host: Host, guest: GuestSide, source: str) -> list[PciDevice]:
    by_bdf = host.device_at
    if not by_bdf:
        reject_unshown(host, "PCI")
        raise InputError(
            f"host {host.name!r}: no PCI tree in its source",
            hint="--lspci FILE with the output of lspci -D -nn -vvv",
        )
    for bdf, _ in guest.bus_ids:
        if bdf not in by_bdf:
            raise InputError(
                f"{source}: no device {bdf} on host {host.name!r}",
                hint="name the host that the VM runs on with --host",
            )
    devices = [
        by_bdf[bdf]
        for bdf, _ in guest.bus_ids
        if by_bdf[bdf].kind in (DeviceKind.GPU, DeviceKind.NIC)
    ]
    if not devices:
        raise InputError(
            f"{source}: no passed-through GPU or NIC",
            hint="homenode plan VM --gpus N -o FILE adds GPUs; a guest without one needs no "
            "topology file; vGPUs (mdev) have no place of their own on the host's PCIe tree",
        )
    return devices


def _reject_other_flavour(devices: Iterable[PciDevice], flavour: NcclVariant, source: str) -> None:
    for device in devices:
        if device.kind is not DeviceKind.GPU or device.vendor_id is None:
            continue
        is_amd = device.vendor_id == AMD
        if is_amd and flavour is NcclVariant.NCCL:
            raise InputError(
                f"{source}: expected NVIDIA GPUs for NCCL, found AMD's {device.bdf}",
                hint="--rccl writes the version for RCCL, which rejects NCCL's",
            )
        if not is_amd and flavour is NcclVariant.RCCL:
            raise InputError(
                f"{source}: expected AMD GPUs for RCCL, found {device.bdf} of vendor "
                f"{device.vendor_id:04x}",
                hint="omit --rccl: NCCL rejects RCCL's version",
            )


def _list_nodes(devices: Iterable[PciDevice]) -> set[NodeIndex]:
    return {device.node for device in devices if device.node is not None}


def _build_cpu(
    host: Host, numa_id: int, affinity: CpuSet, children: tuple[NcclPci, ...]
) -> NcclCpu:
    is_x86 = host.architecture == "x86_64"
    return NcclCpu(
        numa_id=numa_id,
        affinity=affinity,
        architecture=_ARCHITECTURES.get(host.architecture or ""),
        vendor=find_vendor(host) if is_x86 else None,
        family=host.cpu.family if is_x86 else None,
        model=host.cpu.model if is_x86 else None,
        children=children,
    )


class _Tree(Struct, kw_only=True):
    """A builder of each cpu's <pci>; virtual switches are numbered through the whole file."""

    host: Host
    guest: GuestSide
    findings: list[Finding]
    placed: list[PlacedDevice] = field(default_factory=list)
    switches: int = 0

    def child_elements(self, node: NodeIndex, devices: Sequence[PciDevice]) -> tuple[NcclPci, ...]:
        paths = [(_find_switches(self.host, device), device) for device in devices]
        return self._group(node, paths, 0, None)

    def _group(
        self,
        node: NodeIndex,
        paths: Sequence[tuple[tuple[PciDevice, ...], PciDevice]],
        depth: int,
        switch_id: str | None,
    ) -> tuple[NcclPci, ...]:
        """Group devices below a further common switch; otherwise keep host order."""
        done_bdfs: set[Bdf] = set()
        functions: list[NcclPci] = []
        for switches, device in paths:
            if len(switches) == depth:
                functions.append(self._build_device(node, device, switch_id))
                continue
            switch = switches[depth]
            if switch.bdf in done_bdfs:
                continue
            done_bdfs.add(switch.bdf)
            self.switches += 1
            bus_id = f"ffff:ff:{self.switches & 0xFF:02x}.0"
            lower_paths = [p for p in paths if len(p[0]) > depth and p[0][depth].bdf == switch.bdf]
            children = self._group(node, lower_paths, depth + 1, bus_id)
            speed, width = self._switch_link(switch, children)
            functions.append(
                NcclPci(
                    bus_id=bus_id,
                    class_code=SWITCH_CLASS,
                    gt_per_s=speed,
                    width=width,
                    children=children,
                )
            )
        return tuple(functions)

    def _build_device(self, node: NodeIndex, device: PciDevice, switch_id: str | None) -> NcclPci:
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
            self.findings.append(report_unknown_link(device))
        return NcclPci(bus_id=bus_id, class_code=device.class_code, gt_per_s=speed, width=width)

    def _switch_link(self, switch: PciDevice, children: tuple[NcclPci, ...]) -> tuple[float, int]:
        """Return a switch's link to the root; else the fastest device's, with a finding."""
        speed, width = _link(self.host, switch)
        if speed is not None and width is not None:
            return speed, width
        links = [
            (child.gt_per_s, child.width)
            for child in children
            if child.gt_per_s is not None and child.width is not None
        ]
        assumed_link = max(links, key=lambda link: link[0] * link[1], default=(16.0, 16))
        self.findings.append(report_unknown_switch_link(switch, *assumed_link))
        return assumed_link


def _find_switches(host: Host, device: PciDevice) -> tuple[PciDevice, ...]:
    """Return the upstream ports of the switches above a function, from the root down."""
    ports = host.ports_above(device)
    upstream = [p for p in ports if p.bridge and p.bridge.port_type is PortType.SWITCH_UPSTREAM]
    return tuple(reversed(upstream))


def _link(host: Host, device: PciDevice) -> tuple[float | None, int | None]:
    """Return the capability of a link: the lesser of its two ends. A virtual function uses its
    physical function's link.

    The current speed is unsuitable, as idle devices slow their links down.
    """
    if device.physical_function is not None:
        physical = host.find_device(device.physical_function)
        device = device if physical is None else physical
    port = None if device.parent is None else host.find_device(device.parent)
    ends: list[PciLink] = [device.link] if device.link is not None else []
    if ends and port is not None and port.link is not None:
        ends.append(port.link)
    speeds = [end.max_gt_per_s for end in ends if end.max_gt_per_s]
    widths = [end.max_width for end in ends if end.max_width]
    return min(speeds, default=None), min(widths, default=None)


def _reject_too_many(topology: NcclTopology, source: str) -> None:
    switches = sum(pci.is_virtual for pci in topology.list_pcis())
    limit = topology.flavour.most_nodes
    if topology.nodes > limit or switches > _MAX_SWITCHES:
        raise InputError(
            f"{source}: expected at most {limit} elements, which is what NCCL reads, found "
            f"{topology.nodes}",
            hint="pass fewer devices to this VM",
        )
