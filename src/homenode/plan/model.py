"""Plan: where every vCPU, page and device of one VM goes, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

from msgspec import UNSET, UnsetType

from homenode.bdf import Bdf
from homenode.catalogue import entry_of
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.gap import Gap
from homenode.indices import LlcIndex, NodeIndex
from homenode.objective import Objective
from homenode.plan.options import MemoryMode
from homenode.vm.layout import Layout
from homenode.vm.model import GuestAddress

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
    PASSTHROUGH = "passthrough"  # the host's leaves, which say what is true of the guest
    EMULATED = "emulate"  # one emulated L3 a die
    DISABLED = "disable"  # no L3


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


def plan_finding(
    id: str,
    subject: str,
    detail: str,
    *,
    severity: str | None = None,
    case: str | None = None,
    values: Mapping[str, object] | None = None,
    fix: str | UnsetType | None = UNSET,
) -> PlanFinding:
    """A finding with the severity and fix of its page, as catalogue.finding makes one."""
    entry = entry_of(id)
    return PlanFinding(
        id=id,
        severity=severity or str(entry.severities[0]),
        subject=subject,
        detail=detail,
        fix=entry.printed("Fix", case, values) if fix is UNSET else fix,
    )


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """What a plan leaves as the document has it, and relies on.

    machine: as written; None = the default. firmware: "efi" or "bios". cpu_mode, cpu_model: None =
    not named. offline_vcpus: not there at the start. ballooned_bytes: <memory> less
    <currentMemory>. settings: a line for each other element that layouts share their sections with.
    """

    domain_type: str
    machine: str | None
    firmware: str
    cpu_mode: str | None
    cpu_model: str | None
    offline_vcpus: CpuSet
    ballooned_bytes: int
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of one VM; the value that every later step reads."""

    domain_name: str
    host_name: str
    host_fingerprint: str
    """sha256 over the host's topology: a plan for another host is recognised by it."""
    layout: Layout
    policy: str
    vcpus: int
    memory_bytes: int
    """Without memory devices."""
    page_bytes: int | None
    """Of the huge pages that back the guest; None = ordinary pages."""
    nodes: tuple[NodeIndex, ...]
    """Chosen host nodes, ascending; () where nothing is pinned or bound."""
    llcs: tuple[LlcIndex, ...]
    """Last-level caches that hold vCPUs, ascending."""
    vcpu_pins: tuple[CpuSet, ...]
    """PUs of each vCPU, in vCPU order; () = not pinned."""
    emulator_pus: CpuSet | None
    """PUs of QEMU's own threads; None = not pinned."""
    iothread_pus: tuple[CpuSet, ...]
    """PUs of each IOThread, ascending by its id; () = not pinned."""
    cells: tuple[PlannedCell, ...]
    """NUMA cells that the guest is shown; () = a flat guest."""
    topology: GuestTopology | None
    """Sockets, dies, cores and threads of the guest; None = as the document has them."""
    cache: GuestCache
    topoext: bool | None
    """The CPU feature by which AMD's CPUs show siblings: True = the guest gets it; False = it must
    not have it, where an L3 would be shown with it; None = as it was."""
    memory_mode: MemoryMode | None
    """Mode of numatune; None = as the document has it."""
    memory_nodes: tuple[NodeIndex, ...]
    """Host nodes that memory is bound to; () = not bound."""
    devices: tuple[PlannedDevice, ...]
    controllers: tuple[PlannedController, ...]
    """PCI controllers of the guest that the layout adds or keeps."""
    aperture: Aperture | None
    """64-bit PCI window and address bits that the devices need; None = nothing to set."""
    iommu_needed: bool
    """The guest needs a virtual IOMMU: it has more than 255 vCPUs."""
    page_reservations: tuple[PageReservation, ...]
    """Huge pages to reserve on host nodes before the VM starts."""
    fallback: str = field(metadata={"name": "rung"})
    """Name of the fallback that the plan is on; stored as "rung"."""
    cost: tuple[CostTerm, ...]
    """In the order in which placements are compared."""
    optimal: bool | None
    """No placement costs less; None = not all were compared."""
    runners_up: tuple[RunnerUp, ...]
    """Feasible placements that cost more, the best first."""
    rejections: tuple[Rejection, ...]
    findings: tuple[PlanFinding, ...]
    consequences: tuple[str, ...]
    """What the guest's user will see change, one sentence each."""
    gaps: tuple[Gap, ...]
    """What is not known of the host, and could have changed the plan."""
    memory_device_bytes: int = 0
    """Of the document's memory devices, in addition to memory_bytes."""
    mediated_removed: tuple[str, ...] = ()
    """UUIDs of the document's mediated devices that others replace."""
    kept: KeptSettings | None = None
    """None in plans of earlier versions, and where there is no document."""
    objective: Objective | None = None
    """What the evidence chose the layout for; None: the user named it."""
    iothread_ids: tuple[int, ...] = ()
    """The document's ids of the IOThreads; () in plans of earlier versions, which have the PUs
    alone."""

    @property
    def pus_of_iothreads(self) -> dict[int, CpuSet]:
        """PUs of each IOThread by its id; numbered from 1 where a stored plan has no ids."""
        ids = self.iothread_ids or range(1, len(self.iothread_pus) + 1)
        return dict(zip(ids, self.iothread_pus, strict=False))

    @property
    def forbids_topoext(self) -> bool:
        """Earlier versions say False where they leave the feature as it was, but show an L3."""
        return self.topoext is False and self.cache is GuestCache.DISABLED


def is_critical(plan: Plan) -> bool:
    """A finding of the plan is critical."""
    return any(finding.severity == "critical" for finding in plan.findings)


class Unplannable(HomenodeError):
    """No placement fits. Holds every rejection; the message shows the nearest miss."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        rejections: tuple[Rejection, ...] = (),
        *,
        hint: str | None = None,
        nearest: Rejection | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.rejections = rejections
        self.nearest = nearest or next(iter(rejections), None)
