"""Cost: what a placement costs, and the order of concerns of each policy, in one place.

Terms are whole numbers and smaller is better; they are compared one after the other, without
weights. The last ones are indices, so no two placements cost the same. Decision 0010.
"""

from typing import NamedTuple

from homenode.vm.plan_model import CostTerm
from homenode.vm.plan_options import Policy


class Cost(NamedTuple):
    """The terms of one placement.

    vcpus_beyond_cores: vCPUs that get no whole core of the chosen nodes, where whole cores give
    way; else 0.
    device_class: worst over GPUs and their NICs of the package-level SLIT distance to the nearest
    chosen node, 10 within one package; 0 without such devices. packages_spanned: count.
    gpus_away_from_home: GPUs whose own node is known and not chosen. nodes_spanned: count.
    node_distance: SLIT, 10 for one node; worst pair of chosen nodes. lopsided_split: 1 where one
    node has more than twice the groups of another. guest_sockets: sockets of the
    guest where no cell may share one with another, else 0.
    device_distance: over devices with a known node and chosen nodes, groups there times SLIT
    distance, in sum. gpu_link_groups: groups of GPUs joined by NVLink or xGMI that the VM's GPUs
    are of, a GPU without links counted as one; 0 where none is linked. gpu_sets_lost: sets of GPUs
    that were wholly free and of which the VM takes some, not all; of a VM without GPUs, the chosen
    nodes that have free GPUs.
    unisolated_cores: groups outside isolcpus and nohz_full, 0 where the host isolates none.
    llcs_spanned: count, per node. unequal_llcs: 1 where not all of these have as many groups, so
    that the guest cannot be shown its L3. pages_to_reserve: huge pages not yet in the nodes' pools.
    balance_cores: free whole cores of the chosen nodes before the VM, negated to spread.
    balance_memory: bytes free there, likewise. gpus_without_nic: GPUs that none of the VM's NICs is
    paired with, 0 where none could be. unevenness: sum of the squares of the groups on each node.
    gpu_nodes_used: chosen nodes that have free GPUs. nodes: node indices, ascending. split: groups
    on each node, negated, so that the extra one goes to the lowest node. gpus: positions among the
    host's GPUs, ascending.
    """

    vcpus_beyond_cores: int
    device_class: int
    packages_spanned: int
    gpus_away_from_home: int
    nodes_spanned: int
    node_distance: int
    lopsided_split: int
    guest_sockets: int
    device_distance: int
    gpu_link_groups: int
    gpu_sets_lost: int
    unisolated_cores: int
    llcs_spanned: int
    unequal_llcs: int
    pages_to_reserve: int
    balance_cores: int
    balance_memory: int
    gpus_without_nic: int
    unevenness: int
    gpu_nodes_used: int
    nodes: tuple[int, ...]
    split: tuple[int, ...]
    gpus: tuple[int, ...]


INDICES = ("unevenness", "gpu_nodes_used", "nodes", "split", "gpus")
"""Terms that only break ties."""

_EVENNESS = ("lopsided_split", "guest_sockets", "unevenness")
"""How unlike the shares of the nodes are. Before the devices: a GPU's own node has been chosen by
now, and vCPUs moved to it from the others save a few steps of distance for some of the memory."""

_NEARNESS = {"device_class", "gpus_away_from_home", "node_distance", "device_distance"}
_REST = (
    "device_distance",
    "gpu_link_groups",
    "gpu_sets_lost",
    "unisolated_cores",
    "llcs_spanned",
    "unequal_llcs",
    "pages_to_reserve",
    "balance_cores",
    "balance_memory",
    "gpus_without_nic",
    *INDICES,
)

# By policy: the first terms, which depend on the set of nodes alone; but for gpus_away_from_home,
# which comes after the packages where the guest sees its PCIe tree, else last.
_FIRST: dict[Policy, tuple[str, ...]] = {
    Policy.CORES_FIRST: ("device_class", "packages_spanned", "nodes_spanned", "node_distance"),
    Policy.MEMORY_FIRST: ("nodes_spanned", "device_class", "packages_spanned", "node_distance"),
    # minus_nodes_spanned counts downwards: as many nodes as there are.
    Policy.SPREAD: ("minus_nodes_spanned", "device_class", "packages_spanned", "node_distance"),
    # Where the nodes lie is no concern: distances and devices are not compared.
    Policy.ANY: ("nodes_spanned",),
}


def order(
    policy: Policy, *, shows_pcie: bool, even_splits: bool, shares: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the terms in the order of comparison: those that the set of nodes alone decides,
    and the rest. even_splits: vCPUs are shared out evenly before they are put next to devices.
    shares: whole cores give way.

    >>> order(Policy.CORES_FIRST, shows_pcie=True, even_splits=True)[0]
    ('device_class', 'packages_spanned', 'gpus_away_from_home', 'nodes_spanned', 'node_distance')
    >>> order(Policy.CORES_FIRST, shows_pcie=False, even_splits=True)[0][-1]
    'gpus_away_from_home'
    >>> order(Policy.CORES_FIRST, shows_pcie=False, even_splits=True)[1][:3]
    ('lopsided_split', 'guest_sockets', 'unevenness')
    """
    first = list(_FIRST[policy])
    if policy is not Policy.ANY:
        place = first.index("packages_spanned") + 1 if shows_pcie else len(first)
        first.insert(place, "gpus_away_from_home")
    if shares:
        first.insert(0, "vcpus_beyond_cores")
    rest = _REST if policy is not Policy.ANY else tuple(n for n in _REST if n not in _NEARNESS)
    if even_splits:
        rest = (*_EVENNESS, *(name for name in rest if name not in _EVENNESS))
    return tuple(first), rest


def terms(cost: Cost, names: tuple[str, ...]) -> tuple[CostTerm, ...]:
    """The cost as a plan records it: named terms in this order."""
    return tuple(
        CostTerm(
            name, -cost.nodes_spanned if name == "minus_nodes_spanned" else getattr(cost, name)
        )
        for name in names
    )
