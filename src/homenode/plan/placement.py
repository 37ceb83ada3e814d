"""Placement: the CPUs, nodes and devices that the planner chose for a VM, before the guest's shape.

place.py and manual.py make placements; assemble.py turns one into a Plan.
"""

from collections.abc import Iterable

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.findings import Finding, Gap, Rejection
from homenode.indices import NodeIndex
from homenode.plan.search.cost import INDICES
from homenode.vm.layout import Layout
from homenode.vm.plan import CostTerm, Relaxation, RunnerUp


class Placement(Struct, frozen=True):
    """CPUs and nodes for every thread of a VM."""

    # chosen host nodes in cell order (ascending); cell i of a mirrored guest lies on nodes[i]. ()
    # if nothing is pinned or bound.
    nodes: tuple[NodeIndex, ...]
    # the CPUs of each vCPU, in vCPU order: node by node, LLC by LLC, siblings adjacent; () = not
    # pinned
    vcpu_pins: tuple[CpuSet, ...]
    vcpu_nodes: tuple[int, ...]  # index into `nodes` per vCPU
    memory_nodes: tuple[NodeIndex, ...]  # nodes that give memory, () = not bound
    threads_per_core: int  # siblings exposed to the guest, 1 = hidden
    emulator_pus: CpuSet | None
    iothread_pus: tuple[CpuSet, ...]
    devices: tuple[Bdf, ...]  # functions that the VM gets, chosen GPUs included, host order
    fallback: str
    cost: tuple[CostTerm, ...] = ()
    optimal: bool | None = True  # None if the search ended before all placements were compared
    runners_up: tuple[RunnerUp, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = ()
    cell_memory_bytes: tuple[int, ...] = ()  # memory of each cell, () = as its vCPUs
    relaxations: tuple[Relaxation, ...] = ()  # as in the fallback's name
    # the layout that the VM gets instead of the requested one, as vCPUs have to share cores
    layout: Layout | None = None
    # vCPUs run on siblings as the definition shows them, as whole cores are lacking
    takes_siblings: bool = False
    lacks_siblings: bool = False  # siblings do not fit either, so the host's last core is used

    @property
    def given_up(self) -> tuple[str, ...]:
        """Return the relaxations, and whole cores if siblings were used."""
        siblings = ("whole cores",) * self.takes_siblings + (_CORE_OF_HOST,) * self.lacks_siblings
        return (*self.relaxations, *siblings)

    @property
    def concerns(self) -> list[tuple[str, int]]:
        """Return the criteria that decide between hosts, by name, as between fallbacks on one host.
        Relaxations come first, the severest first, and whole cores, even if siblings on another
        host are nearer. The host's last core and even memory follow the criteria that they are
        relaxed for; equal cells follow the nodes. The other cost terms are last."""
        terms = [
            (term.name, term.value)
            for term in self.cost
            if term.name not in INDICES[1:] and isinstance(term.value, int)
        ]
        names = [name for name, _ in terms]
        at = next((names.index(name) for name in _OF_NODES if name in names), 0)
        # With shared cores only what is as severe comes before nearness.
        first = _GIVEN_FIRST[: 2 if Relaxation.SHARED_CORES in self.relaxations else None]
        return [
            ("given_up", _severity(name for name in self.given_up if name in first)),
            *terms[:at],
            ("given_up_for_nearness", _severity(n for n in self.given_up if n not in first)),
            *terms[at : at + 1],
            ("unequal_cells", int(Relaxation.UNEQUAL_CELLS in self.relaxations)),
            *terms[at + 1 :],
        ]


_CORE_OF_HOST = "host's last core, as siblings are lacking"
_OF_NODES = ("nodes_spanned", "minus_nodes_spanned")
_GIVEN_FIRST: tuple[str, ...] = (
    Relaxation.HOST_MEMORY,
    Relaxation.SHARED_CORES,
    Relaxation.MIXED_KINDS,
    Relaxation.SIBLINGS_NOT_EXPOSED,
    Relaxation.FEWER_SIBLINGS,
    _CORE_OF_HOST,
    "whole cores",
    Relaxation.MEMORY_ELSEWHERE,
)
_SEVEREST_FIRST = (*_GIVEN_FIRST, Relaxation.HOST_CORE, Relaxation.UNEVEN_MEMORY)


def _severity(names: Iterable[str]) -> int:
    """Return a bit for each relaxation, the severest first; equal cells have none."""
    given_up = set(names)
    return sum(1 << i for i, name in enumerate(reversed(_SEVEREST_FIRST)) if name in given_up)
