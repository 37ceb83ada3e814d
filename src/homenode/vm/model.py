"""Vm: one VM as described by a plan, a definition, a target's file, a process or a guest."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, NewType

from msgspec import Struct

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import CpuSet, NodeIndex
from homenode.objective import Objective
from homenode.vm.layout import Layout, MemoryBinding

GuestCellId = NewType("GuestCellId", int)
MAX_VCPUS = 4096
"""Limit of every machine type (QEMU 9: 4096 on q35), so that a hostile count costs nothing."""


class GuestTopology(NamedTuple):
    """sockets x dies x cores x threads; the product is the vCPU count."""

    sockets: int
    dies: int
    cores: int
    threads: int

    @property
    def vcpus(self) -> int:
        return self.sockets * self.dies * self.cores * self.threads


class GuestCache(StrEnum):
    """The caches that the guest is shown, in libvirt's modes."""

    PASSTHROUGH = "passthrough"  # the host's CPUID leaves, correct for this guest
    EMULATED = "emulate"  # one emulated L3 a die
    DISABLED = "disable"  # no L3


class PortModel(StrEnum):
    """Controllers that a plan adds, in libvirt's spelling."""

    EXPANDER_BUS = "pcie-expander-bus"
    ROOT_PORT = "pcie-root-port"
    SWITCH_UPSTREAM = "pcie-switch-upstream-port"
    SWITCH_DOWNSTREAM = "pcie-switch-downstream-port"


EXPANDER = PortModel.EXPANDER_BUS.value
PORTS = (PortModel.ROOT_PORT.value, PortModel.SWITCH_DOWNSTREAM.value)
"""Port models: they have one slot and a chassis number."""

QEMU_DEVICE: Mapping[str, str] = {
    "pcie-expander-bus": "pxb-pcie",
    "pcie-root-port": "pcie-root-port",
    "pcie-switch-upstream-port": "x3130-upstream",
    "pcie-switch-downstream-port": "xio3130-downstream",
    "pcie-to-pci-bridge": "pcie-pci-bridge",
    "dmi-to-pci-bridge": "i82801b11-bridge",
    "pci-bridge": "pci-bridge",
}
"""QEMU's devices for libvirt's models. Source: virDomainControllerPCIModelName, libvirt 9.0."""


class GuestAddress(PciAddress):
    """A PCI address in the guest. `bus` is the index of the PCI controller, as libvirt counts, and
    `device` is libvirt's `slot`.

    It is not the bus number that the guest's kernel prints: firmware gives those out at boot.
    """

    __slots__ = ()


class GuestPciController(Struct, frozen=True):
    """A <controller type='pci'>."""

    index: int  # libvirt's, which is also the `bus` of what is plugged into it
    model: str  # libvirt's ("pcie-root", "pcie-root-port", "pcie-expander-bus", "pcie-switch-...")
    # its address; None on pcie-root and if libvirt chooses it
    address: GuestAddress | None = None
    bus_nr: int | None = None  # <target busNr>, on expander buses only
    cell: int | None = None  # its <node>, likewise
    bus_count: int | None = None  # buses in its window, itself included, if set by a plan
    existing: bool = True  # the definition has it already, unchanged; False: a plan adds it


class GuestHostdev(Struct, frozen=True):
    """A passed-through PCI function: a <hostdev>, or an <interface type='hostdev'>."""

    bdf: Bdf
    address: GuestAddress | None  # its guest address; None if it is left to libvirt
    alias: str | None = None
    uuid: str | None = None  # the mediated device on that function
    # libvirt binds it to VFIO at the start; False of a vGPU, whose driver stays
    managed: bool = True
    # its guest cell, if the source has it explicitly rather than by bus
    cell: int | None = None
    host_node: NodeIndex | None = None  # node of the host function, if the source has it
    # empty cells for the memory of a Grace GPU, put online by the guest's driver
    initiator_cells: CpuSet = CpuSet()
    # functions of one device (a GPU and its audio) share the first function's address
    group: Bdf | None = None
    # share of the guest's memory on the function's own node, if known
    local_memory_ratio: float | None = None


class MediatedDevice(Struct, frozen=True):
    """A mediated device: <hostdev mode='subsystem' type='mdev' model='vfio-pci'>."""

    uuid: str
    address: GuestAddress | None
    cell: int | None = None


class MemoryDevice(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A <memory model=...> device that counts as memory: DIMM, NVDIMM, virtio-mem, virtio-pmem."""

    model: str = "dimm"
    alias: str | None = None  # libvirt's, None if missing
    cell: int  # its guest cell; 0 if the definition has no cells
    size_bytes: int  # maximum size
    plugged_bytes: int  # size that the guest gets at the start
    # its memory comes from the nodes of the cell's memory; False with a file, host nodes or pages
    # of its own
    follows_cell: bool = True
    has_nodemask: bool = False  # only its host nodes differ from the cell's
    # mode, nodes, page_bytes, bytes_by_node: as VmCell has them; libvirt uses the cell's values if
    # the device has no own values
    mode: str | None = None
    nodes: CpuSet = CpuSet()
    page_bytes: int | None = None
    bytes_by_node: tuple[tuple[NodeIndex, int], ...] | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes that QEMU maps."""
        return self.size_bytes

    @property
    def is_host_memory(self) -> bool:
        """Whether it uses host memory rather than a file."""
        return self.model in ("dimm", "virtio-mem")

    def lies_with_cell(self, layout: Layout) -> bool:
        """Whether a plan determines the memory's nodes; if it binds memory, it sets a node mask."""
        bound = layout.memory is not MemoryBinding.KEEP
        return self.follows_cell or (self.has_nodemask and bound)


class VmCell(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A guest NUMA cell."""

    id: int
    vcpus: CpuSet
    memory_bytes: int = 0
    # host nodes of its memory binding; empty if not bound
    nodes: CpuSet = CpuSet()
    host_nodes: tuple[NodeIndex, ...] = ()  # host nodes chosen by a plan, bound or not
    mode: str | None = None  # libvirt's mode of the binding; None = not set
    page_bytes: int | None = None  # None = ordinary pages, 0 = the default huge page size
    distances: tuple[int, ...] = ()  # to every cell, in cell order; SLIT; () = none given
    # (node, bytes) of its allocated pages, the most first; None = unknown
    bytes_by_node: tuple[tuple[NodeIndex, int], ...] | None = None


def complete_distances(
    values: Mapping[tuple[int, int], int], cells: int
) -> tuple[tuple[int, ...], ...]:
    """Return the distances between cells, [from][to]; () for each if none is given.

    A missing distance is that of the other direction, else 10 or 20. Source: libvirt's
    virDomainNumaDefNodeDistanceParseXML; complete_init_numa_distance of QEMU's hw/core/numa.c.

    >>> complete_distances({(0, 1): 21}, 2)
    ((10, 21), (21, 10))
    """
    if not values:
        return ((),) * cells
    return tuple(
        tuple(values.get((i, j), values.get((j, i), 10 if i == j else 20)) for j in range(cells))
        for i in range(cells)
    )


class LayoutRecord(Struct, frozen=True, kw_only=True):
    """The layout of a tuned definition, by the record in it. objective None: chosen by the user."""

    layout: Layout
    host: str | None  # start of the planned host's fingerprint
    objective: Objective | None = None  # what `auto` chose the layout for
    multiplied: bool | None = None  # False: siblings for twice the vCPUs did not fit


class Vm(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A VM. None = unknown in this source, or absent if the field's comment says so. Defaults are
    for sources without the field."""

    name: str
    uuid: str | None = None
    source: str = ""
    """The source of all fields: a file, or "plan of layout pin"."""
    domain_type: str = "kvm"
    """"kvm", "qemu", ..."""
    architecture: str = "x86_64"
    machine: str | None = None
    """Machine type as written ("q35", "pc-q35-7.2", "pc", "virt-8.0"); None = the default."""
    firmware: str | None = None
    loader: str | None = None  # Path of the firmware, if given
    emulator: str | None = None  # Path of QEMU, if given
    launch_security: str | None = None
    """Type of <launchSecurity> ("sev", "sev-snp", "tdx", ...)."""

    vcpus: int  # Maximum number
    offline_vcpus: CpuSet = CpuSet()  # Offline at the start
    cpu_mode: str | None = None  # None if no CPU model is named
    cpu_model: str | None = None
    cpu_topology: GuestTopology | None = None
    cpu_cache: str | None = None  # Mode of <cache>; None = no <cache>
    topoext: bool | None = None
    """Whether the feature is requested or switched off; None = it is not named."""
    physical_address_bits: int | None = None

    vcpu_pins: tuple[CpuSet | None, ...] = ()  # CPUs of each vCPU, None if it floats
    emulator_pus: CpuSet | None = None  # None = not pinned
    emulator_threads: tuple[tuple[str, tuple[CpuSet, ...]], ...] = ()
    """(name, CPUs) of QEMU's other threads, from a process."""
    iothread_ids: tuple[int, ...] = ()
    iothread_pins: tuple[tuple[int, CpuSet], ...] = ()
    """(IOThread, its CPUs) of pinned IOThreads, ascending."""

    memory_bytes: int  # Without the memory devices
    page_bytes: int | None = None  # Of the huge pages; 0 = the default size; None = ordinary pages
    ballooned_bytes: int = 0  # Balloon size at the start
    max_memory_bytes: int | None = None
    hard_limit_bytes: int | None = None
    memory_access_shared: bool = False
    binding: tuple[str, CpuSet] | None = None
    """Mode and host nodes that all memory is bound to; None = not bound."""
    bound_nodes: CpuSet | None = None
    """Host nodes of strict and restrictive bindings, also of single cells; None = no such."""
    has_dimms: bool = False  # Has memory devices, of any kind
    memory_devices: tuple[MemoryDevice, ...] = ()
    cells: tuple[VmCell, ...] = ()  # () = a flat guest

    hostdevs: tuple[GuestHostdev, ...] = ()
    mediated: tuple[MediatedDevice, ...] = ()
    """vm/gpu_parts.py finds the host's function of each."""
    controllers: tuple[GuestPciController, ...] = ()
    addresses: tuple[GuestAddress, ...] = ()
    """Every guest PCI address that anything occupies, controllers and hostdevs too, ascending."""
    pcihole64_bytes: int | None = None  # Of the pcie-root, None if not set
    has_acpi: bool = True
    has_iommu: bool = False
    iommu_model: str | None = None
    """"intel", "amd", "smmuv3", "virtio"."""
    has_qemu_commandline: bool = False
    record: LayoutRecord | None = None

    @property
    def vcpus_online(self) -> int:
        """The number of vCPUs at the start."""
        return self.vcpus - len(self.offline_vcpus)

    @property
    def cell_vcpus(self) -> tuple[CpuSet, ...]:
        """The vCPUs of each guest cell in cell order, () for a flat guest."""
        return tuple(cell.vcpus for cell in self.cells)

    @property
    def cells_or_whole(self) -> tuple[VmCell, ...]:
        """The cells; for a flat guest one cell with every vCPU and all memory."""
        if self.cells:
            return self.cells
        mode, nodes = self.binding or (None, CpuSet())
        cell = VmCell(
            id=0,
            vcpus=CpuSet(range(self.vcpus)),
            memory_bytes=self.memory_bytes,
            nodes=nodes,
            mode=mode,
            page_bytes=self.page_bytes,
        )
        return (cell,)

    @property
    def memory_pieces(self) -> dict[str, VmCell | MemoryDevice]:
        """Return the sizes of QEMU's mappings, by name: the memory of each cell (or of all), and of
        memory devices with an alias."""
        cells = {f"memory of cell {c.id}": c for c in self.cells_or_whole if c.memory_bytes}
        return cells | {
            f"memory device {device.alias} (cell {device.cell})": device
            for device in self.memory_devices
            if device.is_host_memory and device.alias is not None
        }

    @property
    def memory_nodes(self) -> CpuSet:
        """The host nodes of all memory bindings."""
        vm_nodes = CpuSet() if self.binding is None else self.binding[1]
        return CpuSet.union((vm_nodes, *(cell.nodes for cell in self.cells)))

    @property
    def pinned_pus(self) -> CpuSet:
        """The CPUs of all vCPU pins."""
        return CpuSet.union(self.vcpu_pins)

    @property
    def is_pinned(self) -> bool:
        return any(pin is not None for pin in self.vcpu_pins)

    @property
    def threads_per_core(self) -> int:
        """The siblings per core in the definition, 1 = none."""
        return 1 if self.cpu_topology is None else self.cpu_topology.threads

    @property
    def memory_device_bytes(self) -> int:
        return sum(device.size_bytes for device in self.memory_devices)

    @property
    def is_q35(self) -> bool:
        return self.machine is not None and "q35" in self.machine

    def expander_above(self, bus: int) -> GuestPciController | None:
        """Return the expander bus at or above a controller's bus; None if it hangs on pcie.0."""
        return expander_above(
            {controller.index: controller for controller in self.controllers}, bus
        )

    @property
    def has_private_memory(self) -> bool:
        """Whether its pages are in guest_memfd rather than in QEMU's memory."""
        return self.launch_security in ("sev-snp", "tdx")

    @property
    def is_pv(self) -> bool:
        """Whether it is a PV guest of Xen, by libvirt's name of its machine."""
        return self.machine == "xenpv"

    @property
    def is_virt(self) -> bool:
        return self.machine is not None and (
            self.machine == "virt" or self.machine.startswith("virt-")
        )


def format_vcpus(vcpus: CpuSet) -> str:
    """ "vCPU 3" or "vCPUs 0-3"."""
    return f"vCPU{'s' if len(vcpus) > 1 else ''} {vcpus}"


def expander_above(
    controllers: dict[int, GuestPciController], bus: int
) -> GuestPciController | None:
    """Return the expander bus at or above a controller's bus; None if it hangs on pcie.0."""
    for _ in range(32):
        controller = controllers.get(bus)
        if controller is None or controller.model == EXPANDER:
            return controller
        if controller.address is None:
            return None
        bus = controller.address.bus
    return None


def find_hostdev_cell(guest: Vm, hostdev: GuestHostdev) -> int | None:
    """Return the guest cell of a device, or of its expander bus; None on pcie.0."""
    if hostdev.cell is not None:
        return hostdev.cell
    expander = None if hostdev.address is None else guest.expander_above(hostdev.address.bus)
    return None if expander is None else expander.cell
