"""LiveExpectation: where the threads and pages of a running VM must be."""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.plan.model import Plan
from homenode.vm.layout import MemoryBinding
from homenode.vm.model import Vm


@dataclass(frozen=True, slots=True)
class LiveCell:
    """Memory of a guest cell; a flat guest has one. Or of a memory device next to the cell's own.

    nodes: empty where nothing binds it. mode: numatune's word. page_bytes: None = ordinary pages,
    0 = huge pages of the host's default size. device: libvirt's alias of a memory device ("dimm0"),
    None for the cell's own.
    """

    id: int
    memory_bytes: int
    nodes: CpuSet
    mode: str | None
    page_bytes: int | None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class LiveExpectation:
    """What to look for. source: what says so.

    vcpu_pins: in vCPU order, None = it may run anywhere. emulator_pus likewise.
    iothread_pins: (IOThread, PUs), those that are pinned. devices: (function, its host node).
    cells: memory devices come after the cells. offline_vcpus: those that may have no thread.
    """

    source: str
    vcpu_pins: tuple[CpuSet | None, ...]
    emulator_pus: CpuSet | None
    iothread_pins: tuple[tuple[int, CpuSet], ...]
    cells: tuple[LiveCell, ...]
    devices: tuple[tuple[Bdf, NodeIndex | None], ...]
    offline_vcpus: CpuSet = CpuSet()

    @property
    def vcpu_pus(self) -> CpuSet:
        """Every PU that a vCPU is pinned to."""
        return CpuSet.union(self.vcpu_pins)


def live_expectation_of_plan(
    plan: Plan, iothread_ids: tuple[int, ...], facts: Vm | None = None
) -> LiveExpectation:
    """What a plan promises. iothread_ids: of the domain, ascending: the plan counts from 1.

    facts: of the running domain's document: the plan counts on memory devices and on vCPUs that
    are offline, and leaves both as they are.
    """
    per_cell = plan.layout.memory is MemoryBinding.BOUND_PER_CELL
    everywhere = CpuSet(plan.memory_nodes)
    bound = plan.memory_mode is not None
    return LiveExpectation(
        source=f"plan of layout {plan.layout.name}",
        vcpu_pins=plan.vcpu_pins or (None,) * plan.vcpus,
        emulator_pus=plan.emulator_pus,
        iothread_pins=tuple(zip(iothread_ids, plan.iothread_pus, strict=False)),
        cells=tuple(
            LiveCell(
                cell.id,
                cell.memory_bytes,
                (CpuSet(cell.host_nodes) if per_cell else everywhere) if bound else CpuSet(),
                None if plan.memory_mode is None else str(plan.memory_mode),
                plan.page_bytes,
            )
            for cell in plan.cells
        )
        + (() if facts is None else _memory_devices(facts)),
        devices=tuple((device.bdf, device.host_node) for device in plan.devices),
        offline_vcpus=CpuSet() if facts is None else facts.offline_vcpus,
    )


def live_expectation_of_document(facts: Vm) -> LiveExpectation:
    """What a domain's own document promises."""
    mode, nodes = facts.binding or (None, CpuSet())
    cells = tuple(
        LiveCell(cell.id, cell.memory_bytes, cell.nodes, cell.mode, cell.page_bytes)
        for cell in facts.cells
    )
    whole = LiveCell(0, facts.memory_bytes, nodes, mode, facts.page_bytes)
    return LiveExpectation(
        source=facts.source,
        vcpu_pins=facts.vcpu_pins,
        emulator_pus=facts.emulator_pus,
        iothread_pins=facts.iothread_pins,
        cells=(cells or (whole,)) + _memory_devices(facts),
        devices=tuple((hostdev.source, None) for hostdev in facts.hostdevs),
        offline_vcpus=facts.offline_vcpus,
    )


def _memory_devices(facts: Vm) -> tuple[LiveCell, ...]:
    """Only a running domain's document has the aliases that QEMU's backends are named by."""
    return tuple(
        LiveCell(
            device.cell,
            device.size_bytes,
            device.nodes,
            device.mode,
            device.page_bytes,
            device.alias,
        )
        for device in facts.memory_devices
        if device.is_host_memory and device.alias is not None
    )
