"""The PCI tree of a host: root complexes, bridges, functions, and links that are not PCIe."""

from dataclasses import dataclass
from enum import StrEnum

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex


class DeviceKind(StrEnum):
    """What a PCI function is, by class code and ids."""

    GPU = "gpu"
    NIC = "nic"
    NVSWITCH = "nvswitch"
    NVME = "nvme"
    AUDIO = "audio"
    BRIDGE = "bridge"  # host bridges, root ports and switch ports
    OTHER = "other"


class PortType(StrEnum):
    """Where a PCI bridge stands in the tree. Source: PCIe 6.0, 7.5.3.2 Device/Port Type."""

    ROOT_PORT = "root-port"
    SWITCH_UPSTREAM = "switch-upstream"
    SWITCH_DOWNSTREAM = "switch-downstream"
    PCI_BRIDGE = "pci-bridge"  # PCIe to PCI, or of a type that the source does not say


class LinkKind(StrEnum):
    """Links between devices that are not PCIe."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    C2C = "c2c"  # NVLink-C2C between a Grace CPU and its GPU


@dataclass(frozen=True, slots=True)
class PciLink:
    """The link of a device to the port above it, as the device reports it.

    Speeds in GT/s a lane (2.5, 5, 8, 16, 32, 64), widths in lanes. None where unknown. The current
    speed may be low only because the device is idle.
    """

    current_gt_per_s: float | None
    current_width: int | None
    max_gt_per_s: float | None
    max_width: int | None


@dataclass(frozen=True, slots=True)
class PciErrors:
    """What a function has counted since the kernel started (AER). Each of (name, count).

    correctable: retried in hardware, at the cost of time ("RxErr", "BadTLP", "Rollover", ...).
    nonfatal, fatal: data or the link was lost.
    """

    correctable: tuple[tuple[str, int], ...]
    nonfatal: tuple[tuple[str, int], ...] = ()
    fatal: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PciInterrupt:
    """An interrupt of a function: its number (/proc/irq/N) and the PUs that handle it."""

    number: int
    pus: CpuSet


@dataclass(frozen=True, slots=True)
class PciBar:
    """One memory or I/O region of a function. index 0-5, 6 = expansion ROM, 7-12 = SR-IOV."""

    index: int
    size_bytes: int
    is_64bit: bool
    is_prefetchable: bool
    is_memory: bool = True


@dataclass(frozen=True, slots=True)
class PciBridge:
    """What makes a function a bridge: its port type and the buses below it (both inclusive)."""

    port_type: PortType
    secondary_bus: int
    subordinate_bus: int


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI function.

    class_code: 24 bits, base class first (0x030200 = 3D controller).
    root_complex: name of its RootComplex. parent: the bridge function directly above, None at the
    root complex. node: None where the firmware gives none (sysfs says -1) or the source is silent.
    local_pus: the PUs that the kernel calls local; None where unknown.
    physical_function: for an SR-IOV virtual function, the function that it belongs to.
    sriov_total_vfs, sriov_num_vfs: None where the function has no SR-IOV capability.
    target_gt_per_s: the speed that Link Control 2 asks a port to train to.
    acs: flags of the ACS control register that are on, as lspci names them, ascending.
    power_state: "D0" to "D3cold" as the kernel says. performance_state: "P0" (busy) to "P15" as
    NVIDIA's driver says; link_replays: packets that the link sent again, by the same driver.
    iommu_domain: how the IOMMU treats the group: "identity", "DMA-FQ", ...
    interrupts: message-signalled ones that are set up; None where the source gives none.
    module_id: of a GPU on a board with NVSwitches, 1-based: its slot there, which no address gives.
    """

    bdf: Bdf
    kind: DeviceKind
    class_code: int
    vendor_id: int | None
    device_id: int | None
    root_complex: str
    parent: Bdf | None
    node: NodeIndex | None
    local_pus: CpuSet | None = None
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    name: str | None = None
    link: PciLink | None = None
    bridge: PciBridge | None = None
    driver: str | None = None
    iommu_group: int | None = None
    physical_function: Bdf | None = None
    sriov_total_vfs: int | None = None
    sriov_num_vfs: int | None = None
    bars: tuple[PciBar, ...] = ()
    target_gt_per_s: float | None = None
    acs: tuple[str, ...] | None = None
    ats_enabled: bool | None = None
    power_state: str | None = None
    performance_state: str | None = None
    iommu_domain: str | None = None
    errors: PciErrors | None = None
    link_replays: int | None = None
    interrupts: tuple[PciInterrupt, ...] | None = None
    module_id: int | None = None


@dataclass(frozen=True, slots=True)
class RootComplex:
    """A host bridge: the root of one PCI tree. name as in sysfs: "pci0000:17"."""

    name: str
    domain: int
    bus: int
    node: NodeIndex | None


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link that is not PCIe, between two devices or (C2C) a device and a node's CPU.

    count: bonded links; None where unknown. Exactly one of b and b_node is given.
    """

    kind: LinkKind
    a: Bdf
    b: Bdf | None
    b_node: NodeIndex | None = None
    count: int | None = None


def is_viable_driver(driver: str) -> bool:
    """Whether VFIO may have an IOMMU group while this driver has one of its functions.

    >>> [is_viable_driver(name) for name in ("vfio-pci", "mlx5_vfio_pci", "pci-stub", "nvidia")]
    [True, True, True, False]

    VFIO's own may, also those of one vendor. Source: driver_managed_dma in struct pci_driver, Linux
    5.19; vfio_dev_viable before.
    """
    return "vfio" in driver or driver in ("pci-stub", "pcieport")
