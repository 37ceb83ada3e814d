"""Plan: where every vCPU, page and device of one VM goes, and why."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.gap import Gap
from homenode.indices import LlcIndex, NodeIndex
from homenode.plan.guest import GuestAddress
from homenode.plan.layout import Layout
from homenode.plan.request import MemoryMode

VcpuId = NewType("VcpuId", int)
GuestCellId = NewType("GuestCellId", int)


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
    """What the guest is shown of its caches."""

    AS_IT_WAS = "as-it-was"
    PASSTHROUGH = "passthrough"  # guest threads and LLC membership equal the host's
    EMULATED = "emulate"  # one emulated L3 a die


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A guest NUMA cell. A flat guest has exactly one.

    vcpus: vCPU numbers. memory_bytes: whole pages. host_nodes: where its memory is bound (or, flat
    and unbound, where its vCPUs are). distances: to every cell, in cell order; SLIT; ()() =
    unknown.
    """

    id: GuestCellId
    vcpus: CpuSet
    memory_bytes: int
    host_nodes: tuple[NodeIndex, ...]
    distances: tuple[int, ...]


class PortModel(StrEnum):
    """Controllers that a plan adds, in libvirt's spelling."""

    EXPANDER_BUS = "pcie-expander-bus"
    ROOT_PORT = "pcie-root-port"
    SWITCH_UPSTREAM = "pcie-switch-upstream-port"
    SWITCH_DOWNSTREAM = "pcie-switch-downstream-port"


@dataclass(frozen=True, slots=True)
class PlannedController:
    """A PCI controller of the guest's mirrored tree.

    index: libvirt's controller index, which is also the `bus` of what is plugged into it.
    address: where it is plugged in. existing: the document has it already, exactly so.
    bus_nr, cell: of an expander bus. bus_count: buses in its window, itself included.
    """

    index: int
    model: PortModel
    address: GuestAddress
    existing: bool
    bus_nr: int | None = None
    bus_count: int | None = None
    cell: GuestCellId | None = None


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A passed-through function.

    host_node: None where unknown. cell: the guest cell that it hangs on, None on pcie.0.
    address: its guest address, None where the layout leaves it as it was and it had none.
    group: functions that must stay together (a GPU and its audio) share the first one's Bdf.
    local_memory_ratio: share of the guest's memory on the device's own node; None where unknown.
    initiator_cells: the cells without PUs or memory where the guest's driver puts a Grace GPU's own
    memory online. uuid: of the mediated device that it is. managed: False where its driver on the
    host stays: a vGPU, which libvirt must not bind to vfio-pci.
    """

    bdf: Bdf
    host_node: NodeIndex | None
    cell: GuestCellId | None
    address: GuestAddress | None
    group: Bdf
    local_memory_ratio: float | None
    initiator_cells: tuple[GuestCellId, ...] = ()
    uuid: str | None = None
    managed: bool = True


@dataclass(frozen=True, slots=True)
class Aperture:
    """Sizes that the devices' BARs and the memory ask of the guest's address space.

    pcihole64_bytes: of pcie-root. physical_address_bits: for <maxphysaddr>. firmware_mmio64_mib:
    OVMF's window. Each None where nothing need be set. memlock_bytes: locked memory that QEMU
    will need. dma_map_entries: entries in the IOMMU at the page size, per container.
    """

    pcihole64_bytes: int | None
    physical_address_bits: int | None
    firmware_mmio64_mib: int | None
    memlock_bytes: int
    dma_map_entries: int


class PageReservation(NamedTuple):
    """Huge pages that must be free on a host node before the VM starts."""

    node: NodeIndex
    page_bytes: int
    pages: int
    free_pages: int | None


@dataclass(frozen=True, slots=True)
class Rejection:
    """A placement that was considered and refused, by the name of the constraint.

    nodes: the host nodes of the candidate. detail: expected against found, with numbers.
    hint: what would make it fit, where there is something.
    """

    constraint: str
    nodes: tuple[NodeIndex, ...]
    detail: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One term of a cost tuple, with its name, in the order of comparison.

    value: an integer, or the tie-breaking indices.
    """

    name: str
    value: int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A feasible placement that cost more. decided_by: name of the first term that differs.

    devices: the functions of the VM there, where GPUs were to choose.
    """

    nodes: tuple[NodeIndex, ...]
    cost: tuple[CostTerm, ...]
    decided_by: str
    devices: tuple[Bdf, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """Something that the user should know of a plan that works.

    severity: "critical" (the VM or the host may fail: `homenode plan` exits with 1), "warning" or
    "info". id is stable, for tests and documentation.
    """

    id: str
    severity: str
    subject: str
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of one VM; the value that every later step reads.

    domain_name, host_name: whose. host_fingerprint: sha256 over the host's topology, so that a plan
    for another host is recognised. vcpu_pins: PUs of each vCPU in vCPU order; () = not pinned.
    emulator_pus: None = not pinned. iothread_pus: per IOThread, 1 first; () = not pinned.
    nodes: chosen host nodes, ascending. llcs: LLCs that hold vCPUs, ascending.
    memory_mode, memory_nodes: how numatune binds; (None, ()) = as it was.
    topology: None = as it was. topoext: AMD needs the CPU feature for the topology to be given.
    fallback: name of the step of the ladder of fallbacks. optimal: None = not all were compared.
    consequences: what the guest's user will see change, one sentence each.
    memory_device_bytes: of the document's memory devices, next to memory_bytes.
    mediated_removed: UUIDs of the document's mediated devices that others take the place of.
    """

    domain_name: str
    host_name: str
    host_fingerprint: str
    layout: Layout
    policy: str
    vcpus: int
    memory_bytes: int
    page_bytes: int | None
    nodes: tuple[NodeIndex, ...]
    llcs: tuple[LlcIndex, ...]
    vcpu_pins: tuple[CpuSet, ...]
    emulator_pus: CpuSet | None
    iothread_pus: tuple[CpuSet, ...]
    cells: tuple[PlannedCell, ...]
    topology: GuestTopology | None
    cache: GuestCache
    topoext: bool
    memory_mode: MemoryMode | None
    memory_nodes: tuple[NodeIndex, ...]
    devices: tuple[PlannedDevice, ...]
    controllers: tuple[PlannedController, ...]
    aperture: Aperture | None
    iommu_needed: bool
    page_reservations: tuple[PageReservation, ...]
    rung: str
    cost: tuple[CostTerm, ...]
    optimal: bool | None
    runners_up: tuple[RunnerUp, ...]
    rejections: tuple[Rejection, ...]
    findings: tuple[PlanFinding, ...]
    consequences: tuple[str, ...]
    gaps: tuple[Gap, ...]
    memory_device_bytes: int = 0
    mediated_removed: tuple[str, ...] = ()


def is_critical(plan: Plan) -> bool:
    """A finding of the plan is critical."""
    return any(finding.severity == "critical" for finding in plan.findings)


class Unplannable(HomenodeError):
    """No placement fits. Holds every rejection; the message shows the nearest misses."""

    exit_code = 4

    def __init__(
        self, message: str, rejections: tuple[Rejection, ...] = (), *, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.rejections = rejections
