"""Cost: the cost terms of a placement, and their order in each policy.

Terms are integers, smaller is better; they are compared one after the other, without weights. The
last terms are indices, so no two placements cost the same. Decision 0010.
"""

from typing import NamedTuple

from homenode.vm.plan import CostTerm
from homenode.vm.plan_options import Policy


class Cost(NamedTuple):
    """The terms of one placement. SLIT distances: 10 = local."""

    vcpus_beyond_cores: int  # vCPUs that get no whole core, if vCPUs share cores; else 0
    device_class: int  # worst package-level distance from a GPU or its NIC; 10 within a package
    packages_spanned: int
    gpus_away_from_home: int  # GPUs whose node is known and not chosen
    nodes_spanned: int
    node_distance: int  # of the worst pair of chosen nodes
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
    later: tuple[str, ...] = _REST[policy is Policy.ANY :]  # any: without device_distance
    if even_splits:
        # Splits come before devices: a GPU's node is already chosen, and moving vCPUs to it would
        # bring only some of the memory slightly nearer.
        later = ("unevenness", *(name for name in later if name != "unevenness"))
        later = ("guest_sockets", *later) if counts_sockets else later
    return tuple(first), later


def terms(cost: Cost, names: tuple[str, ...]) -> tuple[CostTerm, ...]:
    """Return the cost as a plan records it: named terms in this order."""
    values = cost._asdict()
    values["minus_nodes_spanned"] = -cost.nodes_spanned
    return tuple([CostTerm(name, values[name]) for name in names])
