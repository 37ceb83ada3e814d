"""Plan: the place of every vCPU, page and device of a VM, with the reasons."""

from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, LlcIndex, NodeIndex
from homenode.errors import HomenodeError
from homenode.findings import Finding, Gap, Rejection, Severity
from homenode.objective import Objective
from homenode.vm.layout import GuestCells, Layout
from homenode.vm.model import Vm, VmCell
from homenode.vm.plan_options import MemoryMode

LIBVIRT = "libvirt"
"""Target name for libvirt's domain XML."""

RECORDED_DIGITS = 16
"""Digits of the host's fingerprint in the record of a domain."""


class Aperture(Struct, frozen=True):
    """Sizes of the guest's address space for the devices' BARs and the memory."""

    pcihole64_bytes: int | None  # 64-bit hole of pcie-root
    physical_address_bits: int | None  # for <maxphysaddr>
    firmware_mmio64_mib: int | None  # OVMF's window. Each None if not needed.
    memlock_bytes: int  # locked memory that QEMU needs
    dma_map_entries: int  # entries in the IOMMU at the page size, per container


class PageReservation(NamedTuple):
    """Huge pages that must be free on a host node before the VM starts."""

    node: NodeIndex
    page_bytes: int
    pages: int
    free_pages: int | None


class CostTerm(Struct, frozen=True):
    """One term of a cost tuple, with its name, in the order of comparison."""

    name: str
    value: int | tuple[int, ...]  # an integer, or the tie-breaking indices


class RunnerUp(Struct, frozen=True):
    """A feasible placement that cost more."""

    nodes: tuple[NodeIndex, ...]
    cost: tuple[CostTerm, ...]
    decided_by: str  # name of the first term that differs
    devices: tuple[Bdf, ...] = ()  # the VM's functions there, if GPUs were chosen


class Relaxation(StrEnum):
    """A constraint that was relaxed on a fallback, in the words of its name."""

    HOST_MEMORY = "host's reserved memory"
    SHARED_CORES = "shared cores"
    MIXED_KINDS = "mixed core kinds"
    FEWER_SIBLINGS = "fewer siblings"
    SIBLINGS_NOT_EXPOSED = "siblings not exposed"
    HOST_CORE = "host's last core"
    EMULATOR_CORE = "core of another VM's emulator"
    UNEVEN_MEMORY = "uneven memory"
    MEMORY_ELSEWHERE = "memory from other nodes"
    UNEQUAL_CELLS = "unequal cells"


class Plan(Struct, frozen=True):
    """The placement of one VM, used by every later step."""

    vm: Vm
    """The guest with the plan applied. Fields that the layout does not change are None or ():
    see `unsaid`."""
    host_name: str
    host_fingerprint: str
    """sha256 over the host's topology: a plan for another host is recognised by it."""
    policy: str
    nodes: tuple[NodeIndex, ...]
    """Chosen host nodes, ascending; () if nothing is pinned or bound."""
    llcs: tuple[LlcIndex, ...]  # Last-level caches that hold vCPUs, ascending
    aperture: Aperture | None
    """64-bit PCI window and address bits that the devices need; None = nothing to set."""
    page_reservations: tuple[PageReservation, ...]
    """Huge pages to reserve on host nodes before the VM starts."""
    fallback: str  # Name of the plan's fallback
    cost: tuple[CostTerm, ...]  # In the order in which placements are compared
    optimal: bool | None
    """True if no placement with the same fallback costs less; None = not all were compared."""
    runners_up: tuple[RunnerUp, ...]  # Feasible placements that cost more, the best first
    rejections: tuple[Rejection, ...]
    findings: tuple[Finding, ...]
    consequences: tuple[str, ...]  # What the guest's user will see change, one sentence each
    gaps: tuple[Gap, ...]  # Unknown facts of the host that could change the plan
    mediated_removed: tuple[str, ...] = ()
    """UUIDs of the definition's mediated devices that the plan replaces."""
    kept: tuple[str, ...] | None = None
    """A line for each other element in the sections that layouts change, on which the plan relies;
    None without a definition."""
    kept_of: str = LIBVIRT  # The target of these lines
    relaxations: tuple[Relaxation, ...] = ()  # As the fallback's name has them

    @property
    def layout(self) -> Layout:
        assert self.vm.record is not None, "a plan is of a layout"
        return self.vm.record.layout

    @property
    def objective(self) -> Objective | None:
        """The objective of `auto`, or None."""
        return None if self.vm.record is None else self.vm.record.objective

    @property
    def cells(self) -> tuple[VmCell, ...]:
        """The guest's NUMA cells; a flat guest has one cell, on all nodes."""
        if self.vm.cells:
            return self.vm.cells
        (cell,) = self.vm.cells_or_whole
        return (structs.replace(cell, host_nodes=self.memory_nodes or self.nodes),)

    @property
    def is_mirrored(self) -> bool:
        """Whether the guest's cells mirror the host's nodes."""
        return self.layout.cells is GuestCells.HOST

    @property
    def memory_mode(self) -> MemoryMode | None:
        """The mode of <numatune>; None = as in the definition."""
        return None if self.vm.binding is None else MemoryMode(self.vm.binding[0])

    @property
    def memory_nodes(self) -> tuple[NodeIndex, ...]:
        """The host nodes of the memory binding; () = not bound."""
        return () if self.vm.binding is None else tuple(map(NodeIndex, self.vm.binding[1]))

    @property
    def vcpu_pins(self) -> tuple[CpuSet, ...]:
        """The CPUs of each vCPU, in vCPU order; () = not pinned. A plan pins all or none."""
        return tuple(pin for pin in self.vm.vcpu_pins if pin is not None)

    @property
    def iothread_pus(self) -> tuple[CpuSet, ...]:
        """The CPUs of each IOThread, ascending by id; () = not pinned."""
        return tuple(pus for _, pus in self.vm.iothread_pins)

    @property
    def unsaid(self) -> frozenset[str]:
        """The ids of the facts that the plan does not change."""
        vm = self.vm
        unset = {
            "pages": vm.page_bytes is None,
            "cell-pages": vm.page_bytes is None,
            "topology": vm.cpu_topology is None,
            "binding": vm.binding is None,
            "cell-binding": vm.binding is None,
        }
        return frozenset(fact for fact, is_left in unset.items() if is_left) | (
            frozenset() if self.kept is not None else KEPT
        )


KEPT = frozenset(
    ("domain-type", "machine", "firmware", "program", "cpu", "vcpus-online", "current-memory")
)
"""Facts that no layout sets."""


def with_vm(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with changed fields of its guest."""
    return replace(plan, vm=structs.replace(plan.vm, **changes))


def vm_as_it_runs(plan: Plan, document: Vm | None) -> Vm:
    """Return the plan's guest with the definition's memory devices, offline vCPUs, balloon, and a
    topology that the plan keeps."""
    if document is None:
        return plan.vm
    return structs.replace(
        plan.vm,
        cpu_topology=plan.vm.cpu_topology or document.cpu_topology,
        memory_devices=document.memory_devices,
        offline_vcpus=document.offline_vcpus,
        ballooned_bytes=document.ballooned_bytes,
    )


def is_critical(plan: Plan) -> bool:
    return any(finding.severity is Severity.CRITICAL for finding in plan.findings)


class Unplannable(HomenodeError):
    """No placement fits. Has every rejection; the message has the nearest miss."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        rejections: tuple[Rejection, ...] = (),
        *,
        hint: str | None = None,
        nearest: Rejection | None = None,
        quotes_nearest: bool = True,
    ) -> None:
        super().__init__(message, hint=hint)
        self.rejections = rejections
        self.nearest = nearest or next(iter(rejections), None)
        self.quotes_nearest = quotes_nearest  # the message has its detail
