"""The PCI tree of a host: root complexes, bridges, functions, and links that are not PCIe.

The kind of a function follows from its class code and ids, the type of a port from the structure.
Source: PCI Code and ID Assignment Specification 1.16; pci.ids for the exceptions.
"""

import re
from collections.abc import Hashable, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.units import GIB, MIB

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_NOMINAL_SIZE = re.compile(
    r"(?:-(\d{1,4})[ABCQ](?:ME|NOME|GFX)?|\.(\d{1,4})gb(?:[+-]\S{0,20})?)\Z", re.ASCII
)


class DeviceKind(StrEnum):
    """Kind of a PCI function, by class code and ids."""

    GPU = "gpu"
    NIC = "nic"
    NVSWITCH = "nvswitch"
    NVME = "nvme"
    AUDIO = "audio"
    BRIDGE = "bridge"  # host bridges, root ports and switch ports
    OTHER = "other"


KIND_NAMES = {
    DeviceKind.GPU: "GPU",
    DeviceKind.NIC: "NIC",
    DeviceKind.NVSWITCH: "NVSwitch",
    DeviceKind.NVME: "NVMe drive",
    DeviceKind.AUDIO: "audio function",
}


class PortType(StrEnum):
    """Type of a PCI bridge in the tree. Source: PCIe 6.0, 7.5.3.2 Device/Port Type."""

    ROOT_PORT = "root-port"
    SWITCH_UPSTREAM = "switch-upstream"
    SWITCH_DOWNSTREAM = "switch-downstream"
    PCI_BRIDGE = "pci-bridge"  # PCIe to PCI, or of an unknown type


class LinkKind(StrEnum):
    """Links between devices that are not PCIe."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"  # NVLink-C2C between a Grace CPU and its GPU


class PciLink(Struct, frozen=True):
    """The link of a device to the port above it, as the device reports it.

    Speeds in GT/s a lane (2.5, 5, 8, 16, 32, 64), widths in lanes. None if unknown. The current
    speed may be low only because the device is idle.
    """

    current_gt_per_s: float | None
    current_width: int | None
    max_gt_per_s: float | None
    max_width: int | None


class PciErrors(Struct, frozen=True):
    """Error counts of a function since the kernel started (AER), as (name, count)."""

    # retried in hardware, at the cost of time ("RxErr", "BadTLP", "Rollover", ...)
    correctable: tuple[tuple[str, int], ...]
    nonfatal: tuple[tuple[str, int], ...] = ()  # data or the link was lost
    fatal: tuple[tuple[str, int], ...] = ()  # data or the link was lost


class PciInterrupt(Struct, frozen=True):
    """An interrupt of a function: its number (/proc/irq/N) and the CPUs that handle it."""

    number: int
    pus: CpuSet


class PciBar(Struct, frozen=True):
    """A memory or I/O region of a function. index 0-5, 6 = expansion ROM, 7-12 = SR-IOV."""

    index: int
    size_bytes: int
    is_64bit: bool
    is_prefetchable: bool
    is_memory: bool = True


class PciBridge(Struct, frozen=True):
    """Bridge properties of a function: its port type and the buses below it (both inclusive)."""

    port_type: PortType
    secondary_bus: int
    subordinate_bus: int


class PciRegisters(Struct, frozen=True, kw_only=True):
    """Values of a function's configuration space; None if the source lacks them."""

    max_payload_bytes: int | None = None  # largest payload of its packets
    relaxed_ordering: bool | None = None
    unplaced_bars: tuple[int, ...] = ()  # memory BARs 0-5 without an address
    largest_bars: tuple[tuple[int, int], ...] = ()  # (index, most bytes) of resizable BARs


class PartKind(StrEnum):
    """The technique that divides a GPU."""

    VIRTUAL_FUNCTION = "virtual-function"  # SR-IOV; of NVIDIA's GPUs with a vGPU type set
    MEDIATED = "mediated"  # a mediated device (mdev)
    MIG = "mig"  # a MIG GPU instance
    PARTITION = "partition"  # an accelerator partition of an AMD GPU


class GpuPart(Struct, frozen=True):
    """A part of a GPU: it shares the GPU's node, link and copy engines with the other parts."""

    kind: PartKind
    # "1g.10gb" (MIG), a vGPU type such as "NVIDIA H100-1-10C", "CPX" (AMD)
    profile: str | None = None
    memory_bytes: int | None = None  # GPU memory; nominal if only the profile names it
    # the virtual function that it is, or the function that a mediated device is on
    bdf: Bdf | None = None
    uuid: str | None = None  # UUID of a mediated device, or CUDA_VISIBLE_DEVICES' "MIG-..."
    number: int | None = None  # number of the GPU instance or partition in the vendor's tool

    @property
    def is_for_vms(self) -> bool:
        """Whether VFIO can assign the part to a VM. MIG instances and accelerator partitions serve
        the host's own processes and containers: a VM can use one only by a vGPU on it.

        Source: NVIDIA vGPU user guide, "MIG-backed vGPU"; amd/MxGPU-Virtualization issue 13.
        """
        return self.kind in (PartKind.VIRTUAL_FUNCTION, PartKind.MEDIATED)


class PciDevice(Struct, frozen=True):
    bdf: Bdf
    kind: DeviceKind
    class_code: int  # 24 bits, base class first (0x030200 = 3D controller)
    vendor_id: int | None
    device_id: int | None
    root_complex: str  # name of its RootComplex
    parent: Bdf | None  # the bridge function directly above, None at the root complex
    # the node of the CPUs that are near to it; None if the firmware reports no node (-1 in sysfs)
    # or the source has no value
    node: NodeIndex | None
    local_pus: CpuSet | None = None  # local_cpulist of sysfs; None if unknown
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    name: str | None = None
    link: PciLink | None = None
    bridge: PciBridge | None = None
    driver: str | None = None
    iommu_group: int | None = None
    # for an SR-IOV virtual function, the function that it belongs to
    physical_function: Bdf | None = None
    sriov_total_vfs: int | None = None  # None if the function has no SR-IOV capability
    sriov_num_vfs: int | None = None  # None if the function has no SR-IOV capability
    bars: tuple[PciBar, ...] = ()
    target_gt_per_s: float | None = None  # the target speed in Link Control 2 of a port
    # flags of the ACS control register that are on, as lspci names them, ascending
    acs: tuple[str, ...] | None = None
    ats_enabled: bool | None = None
    power_state: str | None = None  # "D0" to "D3cold", from the kernel
    performance_state: str | None = None  # "P0" (busy) to "P15", from NVIDIA's driver
    iommu_domain: str | None = None  # how the IOMMU treats the group: "identity", "DMA-FQ", ..
    errors: PciErrors | None = None
    link_replays: int | None = None  # packets that the link sent again, by the same driver
    # message-signalled ones that are set up; None if the source has none
    interrupts: tuple[PciInterrupt, ...] | None = None
    # of a GPU on a board with NVSwitches, 1-based: its slot there, which no address gives
    module_id: int | None = None
    parts: tuple[GpuPart, ...] = ()  # parts of a divided GPU
    partition_mode: str | None = None  # "mig" where MIG is on, or AMD's "SPX" to "CPX"
    memory_partition_mode: str | None = None  # AMD's "NPS1" to "NPS8"
    # the node without CPUs that the firmware names in place of that one, as for GPUs with memory of
    # their own; None if it names none
    firmware_node: NodeIndex | None = None
    # the tool that has the node instead of the firmware; then /sys has no node
    node_source: str | None = None
    registers: PciRegisters | None = None

    @property
    def device_control(self) -> PciRegisters | None:
        """The registers, if they include Device Control."""
        has_control = self.registers is not None and self.registers.max_payload_bytes is not None
        return self.registers if has_control else None

    @property
    def has_host_driver(self) -> bool:
        """Whether programs of the host may use it: functions of VFIO wait for a VM."""
        return self.driver is not None and not is_viable_driver(self.driver)

    @property
    def reported_node(self) -> NodeIndex | None:
        """The numa_node in sysfs, which other programs see."""
        return self.node if self.firmware_node is None else self.firmware_node


def make_model_key(device: PciDevice) -> tuple[Hashable, ...] | None:
    """Return the key of devices equal but for their boards. Listings without -n have names."""
    name = device.name if device.device_id is None else device.device_id
    is_known = device.vendor_id is not None and name is not None
    return (device.kind, device.vendor_id, name, device.bdf.function) if is_known else None


def are_models_known(devices: Iterable[PciDevice]) -> bool:
    """Return whether each function but bridges has a known model: else peers may be missed."""
    return all(
        make_model_key(device) is not None or device.kind is DeviceKind.BRIDGE for device in devices
    )


def get_board_ids(device: PciDevice) -> tuple[int, int] | None:
    """Return a device's subsystem ids."""
    vendor, number = device.subsystem_vendor_id, device.subsystem_device_id
    return None if vendor is None or number is None else (vendor, number)


class RootComplex(Struct, frozen=True):
    """A host bridge: the root of one PCI tree. name as in sysfs: "pci0000:17"."""

    name: str
    domain: int
    bus: int
    node: NodeIndex | None


class DeviceLink(Struct, frozen=True):
    """A link that is not PCIe, between two devices or (C2C) a device and a node's CPU."""

    kind: LinkKind
    a: Bdf
    b: Bdf | None
    b_node: NodeIndex | None = None
    # bonded links; None if unknown. Exactly one of b and b_node is given.
    count: int | None = None


def is_uuid(text: str) -> bool:
    """Return whether a text names a mediated device as sysfs does: a UUID, in lower case."""
    return _UUID.fullmatch(text) is not None


def normalize_uuid(text: str) -> str | None:
    """Return a mediated device's name in sysfs from its UUID in any spelling; None if invalid.

    >>> normalize_uuid(" 83B8F4F2509F382F3C1EE6BFE0FA1001"), normalize_uuid("0000:3b:00.0")
    ('83b8f4f2-509f-382f-3c1e-e6bfe0fa1001', None)
    """
    digits = text.strip().replace("-", "").lower()
    if len(digits) != 32 or not digits.isascii():
        return None
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return uuid if is_uuid(uuid) else None


def nominal_bytes(profile: str | None) -> int | None:
    """Return the memory in the name of a MIG profile or a vGPU type; None without a size.

    >>> [(nominal_bytes(name) or 0) // MIB for name in ("1g.10gb+me", "GRID T4-0B", "CPX")]
    [10240, 512, 0]

    Source: NVIDIA vGPU user guide, "Virtual GPU Types"; MIG user guide, "MIG Device Names".
    """
    match = _NOMINAL_SIZE.search(profile or "")
    if match is None:
        return None
    return int(match[1] or match[2]) * GIB or 512 * MIB


def is_viable_driver(driver: str) -> bool:
    """Return whether VFIO may have an IOMMU group while this driver has one of its functions.

    >>> [is_viable_driver(name) for name in ("vfio-pci", "mlx5_vfio_pci", "pci-stub", "nvidia")]
    [True, True, True, False]

    VFIO's own drivers are viable, including vendors' variants. Source: driver_managed_dma in struct
    pci_driver, Linux 5.19; vfio_dev_viable before.
    """
    return "vfio" in driver or driver in ("pci-stub", "pcieport")


NVIDIA = 0x10DE
AMD = 0x1002
INTEL = 0x8086
MELLANOX = 0x15B3
_QEMU = 0x1B36
_QEMU_SWITCH = (0x104C, (0x8232, 0x8233))
"""Texas Instruments' XIO3130, as QEMU's switch ports call themselves (hw/pci-bridge/xio3130_*.c);
no GPU is below a real one, of one lane."""


def is_emulated(port: PciDevice) -> bool:
    """Return whether QEMU emulates the port."""
    vendor, devices = _QEMU_SWITCH
    is_switch = port.vendor_id == vendor and port.device_id in devices
    return port.vendor_id == _QEMU or is_switch


def has_verbs(nic: PciDevice) -> bool:
    """Return whether a NIC has RDMA: known for NVIDIA's and InfiniBand's NICs."""
    return nic.vendor_id == MELLANOX or nic.class_code >> 8 in (0x0207, 0x0C06)


PCI_BRIDGE_CLASS = 0x0604
UNASSIGNED_CLASS = 0xFF0000  # "does not fit any class"

_GPU_VENDORS = {NVIDIA, AMD, INTEL}
_GPU_CLASSES = {
    0x0300,  # VGA: management controllers and emulated adapters too
    0x0302,  # 3D controller: most data-centre GPUs
    0x0380,  # other display: MI210 and MI250X
    0x1200,  # processing accelerator: MI300X, MI350X
}
# AMD's vendor id on graphics that servers carried for their console only.
_CONSOLE_GRAPHICS = {
    (AMD, 0x4752),  # Rage XL
    (AMD, 0x515E),  # ES1000
}
_NIC_CLASSES = {
    0x0200,  # Ethernet, and Slingshot
    0x0207,  # InfiniBand
    0x0208,  # host fabric: Omni-Path
    0x0C06,  # InfiniBand adapters before the class 0x0207
}


def classify_device(class_code: int, vendor_id: int | None, device_id: int | None) -> DeviceKind:
    """Return the kind of a function; class_code has 24 bits.

    >>> classify_device(0x030200, 0x10DE, 0x2330), classify_device(0x030000, 0x1A03, 0x2000)
    (<DeviceKind.GPU: 'gpu'>, <DeviceKind.OTHER: 'other'>)
    """
    kind = class_code >> 8
    if kind in _GPU_CLASSES and vendor_id in _GPU_VENDORS:
        is_console = (vendor_id, device_id) in _CONSOLE_GRAPHICS
        return DeviceKind.OTHER if is_console else DeviceKind.GPU
    if kind in _NIC_CLASSES:
        return DeviceKind.NIC
    if kind == 0x0680:  # "other bridge": NVSwitches, and DMA engines of switches
        return DeviceKind.NVSWITCH if vendor_id == NVIDIA else DeviceKind.OTHER
    if kind == 0x0108:
        return DeviceKind.NVME
    if kind in (0x0401, 0x0403):
        return DeviceKind.AUDIO
    return DeviceKind.BRIDGE if kind >> 8 == 0x06 else DeviceKind.OTHER


def port_types_by_structure(
    bridges: Mapping[Bdf, int], parent_of: Mapping[Bdf, Bdf | None]
) -> dict[Bdf, PortType]:
    """Return port types of PCI bridges from their place in the tree, if nothing better is known.

    bridges: class code of each bridge. parent_of: bridge above each function, all functions.
    PCIe alternates: root port, then a switch's upstream port, its downstream ports, perhaps the
    upstream port of another switch. An upstream port has only bridges below it; a bridge in its
    place with other functions leads to a PCI bus, as on an AST2600.
    """
    children: dict[Bdf, list[Bdf]] = {}
    for bdf, parent in parent_of.items():
        if parent is not None:
            children.setdefault(parent, []).append(bdf)
    types: dict[Bdf, PortType] = {}
    level: Iterable[Bdf] = [bdf for bdf in bridges if parent_of.get(bdf) is None]
    expected = PortType.ROOT_PORT
    while level:
        next_level: list[Bdf] = []
        for bdf in level:
            group = children.get(bdf, [])
            is_upstream = bool(group) and all(child in bridges for child in group)
            is_subtractive = bridges[bdf] & 0xFF == 0x01
            if is_subtractive or (expected is PortType.SWITCH_UPSTREAM and not is_upstream):
                types[bdf] = PortType.PCI_BRIDGE
            else:
                types[bdf] = expected
                next_level += [child for child in group if child in bridges and child not in types]
        level = next_level
        expected = (
            PortType.SWITCH_DOWNSTREAM
            if expected is PortType.SWITCH_UPSTREAM
            else PortType.SWITCH_UPSTREAM
        )
    return {bdf: types.get(bdf, PortType.PCI_BRIDGE) for bdf in bridges}


_PARTITIONS_OF_MODE = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4, "CPX": 8}
_MI300A = 0x74A0
"""Six compute dies; every other GPU with partitions has eight."""


def partition_count(mode: str, device_id: int | None) -> int:
    """Return accelerator partitions of an AMD GPU in a mode; 0 for a mode that is not known.
    Source: ROCm documentation, "GPU partitioning".

    >>> [partition_count(mode, _MI300A) for mode in ("SPX", "DPX", "TPX", "QPX", "CPX", "NPS1")]
    [1, 2, 3, 4, 6, 0]
    """
    return 6 if (mode, device_id) == ("CPX", _MI300A) else _PARTITIONS_OF_MODE.get(mode, 0)
