"""Placement: which PUs of which nodes one VM gets. The planner's choice, before the guest's shape.

place.py and manual.py make placements; assemble.py turns one into a Plan.
"""

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.vm.layout import Layout
from homenode.vm.plan_model import CostTerm, PlanFinding, Rejection, RunnerUp


class Placement(Struct, frozen=True):
    """PUs and nodes for every thread of a VM.

    nodes: chosen host nodes in cell order (ascending); cell i of a mirrored guest lies on nodes[i].
    () where nothing is pinned or bound. vcpu_pins: the PUs of each vCPU, in vCPU order: node by
    node, LLC by LLC, siblings adjacent; () = not pinned. vcpu_nodes: index into `nodes` per vCPU.
    memory_nodes: nodes that give memory, () = not bound. threads_per_core: siblings shown to the
    guest, 1 = hidden. devices: functions that the VM gets, chosen GPUs included, host order.
    optimal: None where the search ended before all were compared. cell_memory_bytes: memory of each
    cell, () = as its vCPUs. concessions: what gave way, as in the fallback's name. layout: what
    the VM gets where that is not the layout asked for, as siblings have to share cores.
    takes_siblings: vCPUs run on siblings as the document shows them, for want of whole cores.
    """

    nodes: tuple[NodeIndex, ...]
    vcpu_pins: tuple[CpuSet, ...]
    vcpu_nodes: tuple[int, ...]
    memory_nodes: tuple[NodeIndex, ...]
    threads_per_core: int
    emulator_pus: CpuSet | None
    iothread_pus: tuple[CpuSet, ...]
    devices: tuple[Bdf, ...]
    fallback: str
    cost: tuple[CostTerm, ...] = ()
    optimal: bool | None = True
    runners_up: tuple[RunnerUp, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    findings: tuple[PlanFinding, ...] = ()
    gaps: tuple[Gap, ...] = ()
    cell_memory_bytes: tuple[int, ...] = ()
    concessions: tuple[str, ...] = ()
    layout: Layout | None = None
    takes_siblings: bool = False

    @property
    def given_up(self) -> tuple[str, ...]:
        """The concessions, and whole cores where siblings were taken: a host that has whole cores
        is better, however near the siblings of another are."""
        return (*self.concessions, "whole cores") if self.takes_siblings else self.concessions
