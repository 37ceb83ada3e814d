"""Placement: the CPUs, nodes and devices that the planner chose for a VM, before the guest's shape.

place.py and planner.py make placements; assemble.py turns one into a Plan.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, NodeIndex
from homenode.findings import Finding, Gap, Rejection
from homenode.vm.layout import Layout
from homenode.vm.plan import CostTerm, Relaxation, RunnerUp
from homenode.vm.plan_options import Policy


class Cost(NamedTuple):
    """The terms of one placement, integers; smaller is better. Decision 0010.

    They are compared one after the other, without weights. The last ones are indices, so no two
    placements cost the same. SLIT distances: 10 = local.
    """

    vcpus_beyond_cores: int  # vCPUs that get no whole core, if vCPUs share cores; else 0
    device_class: int  # worst package-level distance from a GPU or its NIC; 10 within a package
    packages_spanned: int
    gpus_away_from_home: int  # GPUs whose node is known and not chosen
    nodes_spanned: int
    node_distance: int  # distance of the worst pair of chosen nodes
    distance_sum: int  # over the pairs of chosen nodes, as a tie-break for node_distance
    guest_sockets: int  # counted if no two cells may share a socket
    unevenness: int  # sum of the squares of the groups on each node
    device_distance: int  # sum over devices and nodes: groups on the node times the distance
    gpu_sets_lost: int  # sets broken that were wholly free; without GPUs: nodes with free GPUs
    unisolated_cores: int  # groups outside isolcpus and nohz_full; 0 if the host isolates none
    llcs_spanned: int  # counted on each node
    pages_to_reserve: int  # huge pages that are not in the nodes' pools yet
    balance_cores: int  # free whole cores of the nodes before the VM, negated to spread
    balance_memory: int  # free bytes there, negated to spread
    nodes: tuple[int, ...]  # indices, ascending
    split: tuple[int, ...]  # groups on each node, negated: the extra one goes to the lowest node
    gpus: tuple[int, ...]  # positions among the host's GPUs, ascending


INDICES = ("unevenness", "nodes", "split", "gpus")
"""Terms that only break ties."""

_SPANS = ("device_class", "packages_spanned")
_NODES = ("node_distance", "distance_sum")
_REST = (
    "device_distance",
    "gpu_sets_lost",
    "unisolated_cores",
    "llcs_spanned",
    "pages_to_reserve",
    "balance_cores",
    "balance_memory",
    *INDICES,
)

# The first terms of each policy, which depend on the set of nodes alone. gpus_away_from_home
# follows the packages if the guest sees its PCIe tree; else it is last.
_FIRST: dict[Policy, tuple[str, ...]] = {
    Policy.CORES_FIRST: (*_SPANS, "nodes_spanned", *_NODES),
    Policy.MEMORY_FIRST: ("nodes_spanned", *_SPANS, *_NODES),
    # minus_nodes_spanned is negative: more nodes are better.
    Policy.SPREAD: ("minus_nodes_spanned", *_SPANS, *_NODES),
    # The policy ignores locality: distances and devices are not compared.
    Policy.ANY: ("nodes_spanned",),
}


def order(
    policy: Policy,
    *,
    shows_pcie: bool,
    even_splits: bool,
    counts_sockets: bool,
    shares: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the terms in the order of comparison: those that the set of nodes alone
    decides, and the rest. even_splits: even splits of vCPUs come before nearness to devices, with
    the fewest guest sockets if counts_sockets. shares: vCPUs may share cores.

    >>> order(Policy.CORES_FIRST, shows_pcie=True, even_splits=True, counts_sockets=True)[0][:4]
    ('device_class', 'packages_spanned', 'gpus_away_from_home', 'nodes_spanned')
    >>> order(Policy.CORES_FIRST, shows_pcie=False, even_splits=True, counts_sockets=True)[0][-1]
    'gpus_away_from_home'
    >>> order(Policy.CORES_FIRST, shows_pcie=False, even_splits=True, counts_sockets=True)[1][:2]
    ('guest_sockets', 'unevenness')
    """
    first = list(_FIRST[policy])
    if policy is not Policy.ANY:
        place = first.index("packages_spanned") + 1 if shows_pcie else len(first)
        first.insert(place, "gpus_away_from_home")
    if shares:
        first.insert(0, "vcpus_beyond_cores")
    terms: tuple[str, ...] = _REST[policy is Policy.ANY :]  # any: without device_distance
    if even_splits:
        # Splits come before devices: a GPU's node is already chosen, and moving vCPUs to it would
        # bring only some of the memory slightly nearer.
        terms = ("unevenness", *(name for name in terms if name != "unevenness"))
        terms = ("guest_sockets", *terms) if counts_sockets else terms
    return tuple(first), terms


def name_terms(cost: Cost, names: tuple[str, ...]) -> tuple[CostTerm, ...]:
    """Return the cost as a plan records it: named terms in this order."""
    values = cost._asdict()
    values["minus_nodes_spanned"] = -cost.nodes_spanned
    return tuple([CostTerm(name, values[name]) for name in names])


class Placement(Struct, frozen=True):
    """CPUs and nodes for every thread of a VM."""

    # chosen host nodes in cell order (ascending); cell i of a mirrored guest is on nodes[i]. ()
    # if nothing is pinned or bound.
    nodes: tuple[NodeIndex, ...]
    # the CPUs of each vCPU, in vCPU order: node by node, LLC by LLC, siblings adjacent; () = not
    # pinned
    vcpu_pins: tuple[CpuSet, ...]
    vcpu_nodes: tuple[int, ...]  # index into `nodes` per vCPU
    memory_nodes: tuple[NodeIndex, ...]  # nodes that provide memory; () = not bound
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
            ("given_up", _weigh_relaxations(name for name in self.given_up if name in first)),
            *terms[:at],
            (
                "given_up_for_nearness",
                _weigh_relaxations(n for n in self.given_up if n not in first),
            ),
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
_SEVEREST_FIRST = (
    *_GIVEN_FIRST,
    Relaxation.HOST_CORE,
    Relaxation.EMULATOR_CORE,
    Relaxation.UNEVEN_MEMORY,
)


def _weigh_relaxations(names: Iterable[str]) -> int:
    """Return a bit for each relaxation, the severest first; equal cells have none."""
    given_up = set(names)
    return sum(1 << i for i, name in enumerate(reversed(_SEVEREST_FIRST)) if name in given_up)
