"""Cost: what a placement costs, and the order of concerns of each policy, in one place.

Terms are whole numbers and smaller is better; they are compared one after the other, without
weights. The last ones are indices, so no two placements cost the same. docs/decisions/0010.
"""

from typing import NamedTuple

from homenode.plan.layout import GuestPcie
from homenode.plan.model import CostTerm
from homenode.plan.request import GuestRequest, Policy


class Cost(NamedTuple):
    """The terms of one placement.

    device_class: worst over GPUs and their NICs of the package-level SLIT distance to the nearest
    chosen node, 10 within one package; 0 without such devices. packages_spanned: count.
    gpus_away_from_home: GPUs whose own node is known and not chosen. nodes_spanned: count.
    node_distance: SLIT, 10 for one node; worst pair of chosen nodes.
    device_distance: over devices with a known node and chosen nodes, groups there times SLIT
    distance, in sum. gpu_link_groups: groups of GPUs joined by NVLink or xGMI that the VM's GPUs
    are of, a GPU without links counted as one; 0 where none is linked. gpu_sets_lost: sets of GPUs
    that were wholly free and of which the VM takes some, not all; of a VM without GPUs, the chosen
    nodes that have free GPUs.
    unisolated_cores: groups outside isolcpus and nohz_full, 0 where the host isolates none.
    llcs_spanned: count, per node. pages_to_reserve: huge pages not yet in the nodes' pools.
    balance_cores: free whole cores of the chosen nodes before the VM, negated to spread.
    balance_memory: bytes free there, likewise. unevenness: sum of the squares of the groups on
    each node. nodes: node indices, ascending. split: groups on each node, negated, so that the
    extra one goes to the lowest node. gpus: positions among the host's GPUs, ascending.
    """

    device_class: int
    packages_spanned: int
    gpus_away_from_home: int
    nodes_spanned: int
    node_distance: int
    device_distance: int
    gpu_link_groups: int
    gpu_sets_lost: int
    unisolated_cores: int
    llcs_spanned: int
    pages_to_reserve: int
    balance_cores: int
    balance_memory: int
    unevenness: int
    nodes: tuple[int, ...]
    split: tuple[int, ...]
    gpus: tuple[int, ...]


INDICES = ("unevenness", "nodes", "split", "gpus")
"""Terms that only break ties."""

_NEARNESS = {"device_class", "gpus_away_from_home", "node_distance", "device_distance"}
_REST = (
    "device_distance",
    "gpu_link_groups",
    "gpu_sets_lost",
    "unisolated_cores",
    "llcs_spanned",
    "pages_to_reserve",
    "balance_cores",
    "balance_memory",
    *INDICES,
)

# By policy: the first terms, which depend on the set of nodes alone. "home" is
# gpus_away_from_home, at its first place where the guest sees its PCIe tree, else at its second.
_FIRST: dict[Policy, tuple[str, ...]] = {
    Policy.CORES_FIRST: (
        "device_class",
        "packages_spanned",
        "home",
        "nodes_spanned",
        "node_distance",
        "home",
    ),
    Policy.MEMORY_FIRST: (
        "nodes_spanned",
        "device_class",
        "packages_spanned",
        "home",
        "node_distance",
        "home",
    ),
    # minus_nodes_spanned counts downwards: as many nodes as there are.
    Policy.SPREAD: (
        "minus_nodes_spanned",
        "device_class",
        "packages_spanned",
        "home",
        "node_distance",
        "home",
    ),
    # Where the nodes lie is no concern: distances and devices are not compared.
    Policy.ANY: ("nodes_spanned",),
}


def order(policy: Policy, *, shows_pcie: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the terms in the order of comparison: those that the set of nodes alone decides,
    and the rest.

    >>> order(Policy.CORES_FIRST, shows_pcie=True)[0]
    ('device_class', 'packages_spanned', 'gpus_away_from_home', 'nodes_spanned', 'node_distance')
    >>> order(Policy.CORES_FIRST, shows_pcie=False)[0][-1]
    'gpus_away_from_home'
    """
    first = list(_FIRST[policy])
    if "home" in first:
        place = first.index("home") if shows_pcie else len(first) - 1
        first = [
            "gpus_away_from_home" if i == place else name
            for i, name in enumerate(first)
            if name != "home" or i == place
        ]
    rest = _REST if policy is not Policy.ANY else tuple(n for n in _REST if n not in _NEARNESS)
    return tuple(first), rest


def request_order(request: GuestRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The order for a request."""
    return order(request.policy, shows_pcie=request.layout.pcie is GuestPcie.MIRRORED)


def terms(cost: Cost, names: tuple[str, ...]) -> tuple[CostTerm, ...]:
    """The cost as a plan records it: named terms in this order."""
    return tuple(
        CostTerm(
            name, -cost.nodes_spanned if name == "minus_nodes_spanned" else getattr(cost, name)
        )
        for name in names
    )
