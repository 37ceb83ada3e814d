"""Devices of a domain: whether functions exist, can be passed through and are on their node's cell;
VFIO's requirements; locked memory, IOMMU mappings and address space.

Source: qemuDomainGetMemLockLimitBytes of libvirt 9 (memory + 1 GiB, once for each device with a
vIOMMU); vfio_iommu_type1's dma_entry_limit; QEMU's default of 40 physical address bits.
"""

from collections.abc import Iterator

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.check.domain.pins import name_neighbour, rate_neighbour
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding, Severity, finding
from homenode.machine.pci import DeviceKind, PciDevice, is_viable_driver
from homenode.machine.topology import Host
from homenode.plan.devices.brought import list_nvswitch_gpus
from homenode.plan.shape.aperture import (
    DEFAULT_ADDRESS_BITS,
    DEFAULT_WINDOW_BYTES,
    compute_window_bytes,
)
from homenode.plan.shape.guest_numa import find_initiator_nodes, is_grace
from homenode.text import plural
from homenode.units import GIB, KIB, MIB, format_bytes, format_limit
from homenode.vm.domain.document import Document
from homenode.vm.domain.hostdevs import map_hostdevs, read_initiators
from homenode.vm.domain.iommu import has_iommufd
from homenode.vm.gpu_parts import (
    add_mediated,
    check_mediated,
    find_part_functions,
    list_parts,
)
from homenode.vm.model import EXPANDER, GuestHostdev, GuestPciController, Vm, find_hostdev_cell


def check_devices_alone(facts: Vm) -> Iterator[Finding]:
    """Check expander buses against the machine type, and ACPI, without a host."""
    expanders = [c for c in facts.controllers if c.model == EXPANDER]
    if expanders and not (facts.is_q35 or facts.is_virt):
        yield finding(
            "expander-on-other-machine",
            f"machine {facts.machine or 'none'}",
            expected="q35 or virt, the machines with PCIe expander buses",
            observed=f"{facts.machine or 'the default'} with {len(expanders)} of them",
            case=None if facts.architecture == "x86_64" else "other architecture",
        )
    yield from _check_acpi(facts, expanders)


def _check_acpi(facts: Vm, expanders: list[GuestPciController]) -> Iterator[Finding]:
    """Find cells and expander buses that the guest cannot see without ACPI."""
    # On aarch64 the device tree has the cells.
    has_cells = bool(facts.cells) and facts.architecture != "aarch64"
    acpi_uses = [*(["cells"] if has_cells else []), *(["expander buses"] if expanders else [])]
    if acpi_uses and not facts.has_acpi:
        yield finding(
            "acpi-missing",
            "<features>",
            expected=f"<acpi/>, by which the guest learns its {' and '.join(acpi_uses)}",
            observed="none",
        )


def list_passed_devices(facts: Vm, host: Host) -> list[PciDevice]:
    """Return the host's functions that the VM has, in the host's order."""
    passed_bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    return [device for device in host.pci_devices if device.bdf in passed_bdfs]


def check_devices_on_host(facts: Vm, host: Host) -> Iterator[Finding]:
    """Check the devices against this host's PCI tree and nodes."""
    if facts.hostdevs and not host.pci_devices:
        yield finding(
            "devices-unknown",
            "host devices",
            expected="the host's PCI functions",
            observed="no PCI functions in its source",
        )
        return
    shows_some = bool(find_part_functions(host))
    for uuid in check_mediated(facts, host):
        yield finding(
            "device-not-on-host" if shows_some else "devices-unknown",
            f"mediated device {uuid}",
            expected=f"a mediated device of {host.name}",
            observed="no mediated device with this UUID"
            if shows_some
            else "no PCI functions in its source",
            case="mediated device",
        )
    passed_bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    for hostdev in add_mediated(facts, host).hostdevs:
        device = host.find_device(hostdev.bdf)
        if device is None or device.kind is DeviceKind.BRIDGE:
            yield finding(
                "device-not-on-host",
                hostdev.bdf,
                expected=f"a device of {host.name}",
                observed="none there" if device is None else "a bridge",
            )
            continue
        yield from _check_use(facts, host, hostdev.uuid or hostdev.bdf)
        if hostdev.uuid is None:
            yield from _find_unbound(host, hostdev, device)
            yield from _group(host, device, passed_bdfs)
        yield from _place(facts, hostdev, device.node)
    yield from _find_split(facts, host)


def _find_split(facts: Vm, host: Host) -> Iterator[Finding]:
    """Find GPUs of several nodes where one node has the VM's cores, memory and as many GPUs."""
    used = {bdf for vm in host.domains if vm.name != facts.name for bdf in vm.devices}
    bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    gpus = [gpu for gpu in host.whole_gpus if gpu.bdf in bdfs]
    homes = {gpu.node for gpu in gpus}
    for node in host.nodes if len(homes) > 1 and None not in homes else ():
        free = sum(gpu.node == node.index and gpu.bdf not in used for gpu in host.whole_gpus)
        cores = sum(core.pus <= node.pus for core in host.cores)
        has_room = cores >= facts.vcpus and (node.memory_bytes or 0) >= facts.memory_bytes
        if has_room and free >= len(gpus):
            yield finding(
                "gpus-split",
                f"{len(gpus)} GPUs",
                expected=f"GPUs of one node, as node {node.index} has {free} that no other VM has",
                observed=f"GPUs of nodes {CpuSet(home for home in homes if home is not None)}",
                values={"count": len(gpus)},
            )
            return


def _check_use(facts: Vm, host: Host, device: Bdf | str) -> Iterator[Finding]:
    for domain in host.domains:
        has_it = device in domain.devices or device in domain.mediated
        if domain.running and domain.name != facts.name and has_it:
            yield finding(
                "device-in-use",
                device,
                expected="a device that no other VM has",
                observed=f"{name_neighbour(domain)} has it",
                severity=rate_neighbour(domain),
            )


def _find_unbound(host: Host, hostdev: GuestHostdev, device: PciDevice) -> Iterator[Finding]:
    is_vgpu = any(part.profile for part in list_parts(host.device_at, device.bdf))
    if hostdev.managed or is_vgpu or "vfio" in (device.driver or ""):
        return
    yield finding(
        "not-bound-to-vfio",
        device.bdf,
        expected="driver vfio-pci: without managed='yes' libvirt does not bind the device",
        observed=f"driver {device.driver}" if device.driver else "no driver that is known",
        severity=None if device.driver else Severity.INCONCLUSIVE,
    )


def _group(host: Host, device: PciDevice, passed_bdfs: set[Bdf]) -> Iterator[Finding]:
    """Check the IOMMU group, which VFIO assigns as a whole: no function may have a host driver."""
    if device.iommu_group is None:
        return
    drivers = [
        other
        for other in host.pci_devices
        if other.iommu_group == device.iommu_group
        and other.kind is not DeviceKind.BRIDGE
        and other.bdf not in passed_bdfs
        and not (other.driver is None or is_viable_driver(other.driver))
    ]
    if drivers:
        text = ", ".join(f"{other.bdf} ({other.driver})" for other in drivers[:4])
        yield finding(
            "iommu-group-shared",
            device.bdf,
            expected=f"IOMMU group {device.iommu_group} with no host driver in it",
            observed=text,
        )


def _place(facts: Vm, hostdev: GuestHostdev, node: NodeIndex | None) -> Iterator[Finding]:
    if node is None or len(facts.cells) < 2:
        return
    homes = [cell.id for cell in facts.cells if node in cell.nodes]
    if not homes:
        return  # the guest has no memory there: no cell is the device's
    cell = find_hostdev_cell(facts, hostdev)
    expected = (
        f"the expander bus of cell {CpuSet(homes)}, whose memory is on the device's node {node}"
    )
    if cell is None:
        observed = f"at {hostdev.address or 'no address'}, on the root bus"
        yield finding("device-without-cell", hostdev.bdf, expected, observed)
    elif cell not in homes:
        observed = f"at {hostdev.address}, on that of cell {cell}"
        yield finding("device-on-other-cell", hostdev.bdf, expected, observed)


def check_passthrough(facts: Vm, document: Document | None, host: Host) -> Iterator[Finding]:
    """Check the IOMMU, companions in a group, and requirements of boards and Grace GPUs."""
    devices = list_passed_devices(facts, host)
    if not devices:
        return
    passed_bdfs = {hostdev.bdf for hostdev in facts.hostdevs}
    if host.settings.iommus == () and all(d.iommu_group is None for d in devices):
        yield finding(
            "iommu-off",
            f"{len(devices)} passed-through devices",
            expected="an enabled IOMMU",
            observed="no IOMMU in /sys/class/iommu, no IOMMU groups",
            source="/sys/class/iommu; Documentation/driver-api/vfio.rst",
        )
    yield from _check_companions(host, devices, passed_bdfs)
    yield from _check_nvswitches(facts, host, passed_bdfs)
    if document is not None:
        yield from _check_initiators(facts, document, host, devices)


def _check_initiators(
    facts: Vm, document: Document, host: Host, devices: list[PciDevice]
) -> Iterator[Finding]:
    """Find Grace GPUs without guest NUMA nodes for their memory."""
    if not facts.is_virt:
        return
    elements = map_hostdevs(document)
    nodes_of = find_initiator_nodes(host, [device for device in devices if is_grace(device)])
    short = {
        bdf: (count, len(nodes))
        for bdf, nodes in nodes_of.items()
        if (count := len(read_initiators(document, elements[bdf]))) < len(nodes)
    }
    if short:
        present, needed = map(sum, zip(*short.values(), strict=True))
        yield finding(
            "initiators-missing",
            ", ".join(map(str, short)),
            devices=tuple(short),
            expected=f"{plural(needed, 'cell')} without vCPUs and memory, as many as the host "
            "has nodes for these GPUs, in their <acpi nodeset=>",
            observed=str(present or "none"),
        )


def _check_nvswitches(facts: Vm, host: Host, passed_bdfs: set[Bdf]) -> Iterator[Finding]:
    """Find VMs with all GPUs of a board but without its NVSwitches, unless another VM has these."""
    taken_bdfs = {
        bdf
        for domain in host.domains
        if domain.name != facts.name and (domain.running or domain.planned)
        for bdf in domain.devices
    }
    for board in list_nvswitch_gpus(host):
        missing = board.left_out(passed_bdfs)
        if missing and taken_bdfs.isdisjoint(board.switches):
            yield finding(
                "nvswitches-omitted",
                ", ".join(map(str, missing)),
                expected=f"passed to the VM with all {len(board.gpus)} GPUs that they join",
                observed="the GPUs alone",
            )


def _check_companions(host: Host, devices: list[PciDevice], bdfs: set[Bdf]) -> Iterator[Finding]:
    """Find devices that neither the host nor another VM can use while this VM runs."""
    groups = {device.iommu_group for device in devices} - {None}
    slots = {(bdf.domain, bdf.bus, bdf.device) for bdf in bdfs}
    companions = [
        other
        for other in host.pci_devices
        if other.iommu_group in groups
        and other.bdf not in bdfs
        and other.kind is not DeviceKind.BRIDGE
        and other.class_code >> 16 != 0x06
        and (other.driver is None or is_viable_driver(other.driver))
        and (other.bdf.domain, other.bdf.bus, other.bdf.device) not in slots
    ]
    if companions:
        yield finding(
            "iommu-group-companions",
            ", ".join(str(d.bdf) for d in companions[:16]),
            expected="IOMMU groups that hold the VM's devices only",
            observed="in one group with a device of the VM, and not passed",
        )


DMA_ENTRY_LIMIT = 65535
"""Default of vfio_iommu_type1.dma_entry_limit."""

_OWN_BARS = 6
_CONFIDENTIAL_PAGE_BYTES = 2 * MIB
_LOW_WINDOW_BYTES = 4 * GIB


class DeviceLimits(Struct, frozen=True, kw_only=True):
    """Limits that a VM of this size with these devices needs."""

    memlock_bytes: int  # RLIMIT_MEMLOCK of QEMU
    iommu_pages: int  # entries in the IOMMU's tables at the page size
    # mappings that VFIO counts against its limit: one a region, or one a page for guests with
    # private memory
    dma_entries: int
    window_bytes: int  # 64-bit window for the BARs, a power of two
    address_bits: int  # to address all that


def find_limits(facts: Vm, devices: list[PciDevice]) -> DeviceLimits:
    """Return the needs of a domain with these devices."""
    factor = len(devices) if facts.has_iommu and devices else 1
    bars = sum(
        bar.size_bytes
        for device in devices
        for bar in device.bars
        if bar.is_memory and bar.index < _OWN_BARS
    )
    total_bytes = facts.memory_bytes + facts.memory_device_bytes
    page = facts.page_bytes or 4 * KIB
    window = compute_window_bytes(devices)
    regions = len(devices) * _OWN_BARS + 8
    entries = regions
    if facts.launch_security is not None:
        entries += -(-total_bytes // _CONFIDENTIAL_PAGE_BYTES)
    return DeviceLimits(
        memlock_bytes=factor * (total_bytes + GIB),
        iommu_pages=-(-(total_bytes + bars) // page),
        dma_entries=entries,
        window_bytes=window,
        address_bits=_compute_address_bits(max(total_bytes, facts.max_memory_bytes or 0), window),
    )


def _compute_address_bits(memory_bytes: int, window: int) -> int:
    """Firmware puts the window at a multiple of its own size above the memory."""
    if not window:
        return (memory_bytes + _LOW_WINDOW_BYTES - 1).bit_length()
    start = -(-(memory_bytes + _LOW_WINDOW_BYTES) // window)
    return ((start + 1) * window - 1).bit_length()


def describe_limits(needs: DeviceLimits, devices: int) -> str:
    """Return one line. Locked memory is rounded up to GiB: a limit must not be too small."""
    return (
        f"with {plural(devices, 'device')}: {format_limit(needs.memlock_bytes)} locked, "
        f"{needs.iommu_pages} pages in the IOMMU, {needs.dma_entries} DMA mappings, "
        f"{format_bytes(needs.window_bytes)} of 64-bit window, {needs.address_bits} address bits"
    )


def check_limits(facts: Vm, document: Document | None, host: Host) -> Iterator[Finding]:
    """Find exceeded limits: DMA mappings, address bits, the window for BARs."""
    devices = list_passed_devices(facts, host)
    if not devices:
        return
    needs = find_limits(facts, devices)
    limit = host.settings.dma_entry_limit or DMA_ENTRY_LIMIT
    if needs.dma_entries > limit and (document is None or not has_iommufd(document)):
        yield finding(
            "dma-map-limit",
            f"{facts.launch_security} guest of {format_bytes(facts.memory_bytes)}",
            expected=f"at most {limit} mappings (vfio_iommu_type1.dma_entry_limit)",
            observed=f"about {needs.dma_entries}: private memory is mapped in pieces of 2 MiB",
            values={"entries": 1 << (needs.dma_entries - 1).bit_length()},
        )
    yield from check_addresses(facts, needs)


def check_addresses(facts: Vm, needs: DeviceLimits) -> Iterator[Finding]:
    """Check the address space for BARs. SeaBIOS 1.16.2 places them beyond the guest's bits."""
    if facts.architecture != "x86_64" or needs.window_bytes <= DEFAULT_WINDOW_BYTES:
        return
    bits = facts.physical_address_bits
    shows_host = facts.domain_type == "kvm" and facts.cpu_mode in ("host-passthrough", "maximum")
    if bits is None and not shows_host:
        bits = DEFAULT_ADDRESS_BITS
    if bits is not None and bits < needs.address_bits:
        yield finding(
            "address-bits-small",
            "<cpu>",
            expected=f"{needs.address_bits} physical address bits for "
            f"{format_bytes(needs.window_bytes)} of BARs above the memory",
            observed=str(bits),
            values={"bits": needs.address_bits},
        )
    elif (
        not shows_host
        and (facts.firmware or "bios").lower() != "bios"
        and not facts.has_qemu_commandline
        and max(DEFAULT_WINDOW_BYTES, facts.pcihole64_bytes or 0) < needs.window_bytes
    ):
        yield finding(
            "pci-window-small",
            "pcie-root",
            expected=f"a 64-bit window of {format_bytes(needs.window_bytes)} for the BARs",
            observed=format_bytes(max(DEFAULT_WINDOW_BYTES, facts.pcihole64_bytes or 0)),
            values={"kibibytes": needs.window_bytes // KIB},
        )
