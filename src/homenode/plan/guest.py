"""Guest: what a domain document already says, as far as a plan depends on it."""

from dataclasses import dataclass

from homenode.bdf import Bdf, PciAddress
from homenode.cpuset import CpuSet
from homenode.plan.layout import Layout, MemoryBinding


class GuestAddress(PciAddress):
    """A PCI address in the guest. `bus` is the index of the PCI controller, as libvirt counts, and
    `device` is libvirt's `slot`.

    It is not the bus number that the guest's kernel prints: firmware gives those out at boot.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GuestPciController:
    """A <controller type='pci'>.

    model: libvirt's ("pcie-root", "pcie-root-port", "pcie-expander-bus", "pcie-switch-...").
    bus_nr, node: <target busNr> and its <node>, on expander buses only.
    address: where it is plugged in; None on pcie-root and where libvirt is to choose.
    """

    index: int
    model: str
    address: GuestAddress | None = None
    bus_nr: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class GuestHostdev:
    """A passed-through PCI function: <hostdev mode='subsystem' type='pci'>, or an
    <interface type='hostdev'> (is_interface). uuid: the mediated device on that function.
    is_managed: libvirt binds it to VFIO at the start."""

    source: Bdf
    address: GuestAddress | None
    alias: str | None = None
    is_interface: bool = False
    uuid: str | None = None
    is_managed: bool = True


@dataclass(frozen=True, slots=True)
class GuestMediated:
    """A mediated device: <hostdev mode='subsystem' type='mdev' model='vfio-pci'>."""

    uuid: str
    address: GuestAddress | None


@dataclass(frozen=True, slots=True)
class GuestMemoryDevice:
    """A <memory model=...> device: DIMM, NVDIMM, virtio-mem or virtio-pmem.

    cell: the guest cell that it is plugged into; 0 where the document names none. size_bytes: the
    most that it holds. follows_cell: its memory comes from where the cell's comes from; False with
    a file, host nodes or pages of its own. has_nodemask: host nodes alone are its own.
    """

    cell: int
    size_bytes: int
    follows_cell: bool = True
    has_nodemask: bool = False

    def lies_with_cell(self, layout: Layout) -> bool:
        """Whether a plan says where its memory lies: one that binds memory sets a node mask too."""
        bound = layout.memory is not MemoryBinding.AS_IT_WAS
        return self.follows_cell or (self.has_nodemask and bound)


@dataclass(frozen=True, slots=True)
class Guest:
    """What the planner needs of a domain document; domain/read.py makes it.

    name, uuid: as in the document; uuid None where it has none.
    domain_type: "kvm", "qemu", ...  architecture: "x86_64", "aarch64".
    machine: as written ("q35", "pc-q35-7.2", "pc", "virt-8.0"); None where absent.
    vcpus: the maximum; vcpus_online: the `current` attribute, equal where absent.
    memory_bytes: <memory> without the DIMMs plugged at boot. page_bytes: of <hugepages>; 0 = the
    default huge page size; None = ordinary pages.
    cpu_mode: of <cpu>, None where it names no CPU model.
    cpu_topology: (sockets, dies, cores, threads) or None.
    cell_vcpus: vCPUs of each guest cell in cell order, () for a flat guest.
    addresses: every guest PCI address that anything in the document occupies, controllers and
    hostdevs included, ascending.
    launch_security: type of <launchSecurity> ("sev", "sev-snp", "tdx", ...) or None.
    iommu_model: of the document's <iommu>: "intel", "amd", "smmuv3", "virtio".
    has_dimms: a <memory model=...> device exists. memory_devices: those that count as memory, so
    without enclaves'. max_memory_bytes: <maxMemory> or None.
    physical_address_bits: of <maxphysaddr bits=...> or None.
    pcihole64_bytes: of the pcie-root, None where not set.
    bound_nodes: host nodes of <numatune><memory nodeset> in mode strict or restrictive, with
    those of <memnode>; None where the document binds nothing so.
    mediated: mediated devices; plan/gpu_parts.py says which function of the host each is on.
    cpu_model: the name in <cpu><model>, or None. offline_vcpus: not there at the start.
    ballooned_bytes: what the guest may have given back by the balloon: <memory> less
    <currentMemory>. cpu_cache: mode of <cache> in <cpu>; None = there is none. topoext: whether the
    document asks for the feature or switches it off; None = it does not name it.
    """

    name: str
    uuid: str | None
    domain_type: str
    architecture: str
    machine: str | None
    vcpus: int
    vcpus_online: int
    memory_bytes: int
    page_bytes: int | None
    iothread_ids: tuple[int, ...]
    cpu_mode: str | None
    cpu_topology: tuple[int, int, int, int] | None
    cell_vcpus: tuple[CpuSet, ...]
    hostdevs: tuple[GuestHostdev, ...]
    controllers: tuple[GuestPciController, ...]
    addresses: tuple[GuestAddress, ...]
    has_iommu: bool = False
    iommu_model: str | None = None
    launch_security: str | None = None
    has_dimms: bool = False
    max_memory_bytes: int | None = None
    firmware: str | None = None
    physical_address_bits: int | None = None
    pcihole64_bytes: int | None = None
    has_qemu_commandline: bool = False
    memory_access_shared: bool = False
    bound_nodes: CpuSet | None = None
    memory_devices: tuple[GuestMemoryDevice, ...] = ()
    mediated: tuple[GuestMediated, ...] = ()
    cpu_model: str | None = None
    offline_vcpus: CpuSet = CpuSet()
    cpu_cache: str | None = None
    topoext: bool | None = None
    ballooned_bytes: int = 0

    @property
    def threads_per_core(self) -> int:
        """Siblings of a core as the document shows them, 1 = none."""
        return 1 if self.cpu_topology is None else self.cpu_topology[3]

    @property
    def memory_device_bytes(self) -> int:
        return sum(device.size_bytes for device in self.memory_devices)

    @property
    def is_q35(self) -> bool:
        return self.machine is not None and "q35" in self.machine

    @property
    def has_private_memory(self) -> bool:
        """Whether its pages come from guest_memfd rather than from QEMU's own memory."""
        return self.launch_security in ("sev-snp", "tdx")

    @property
    def is_virt(self) -> bool:
        return self.machine is not None and (
            self.machine == "virt" or self.machine.startswith("virt-")
        )
