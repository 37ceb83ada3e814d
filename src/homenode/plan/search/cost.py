"""Cost: what a placement costs, and the order of concerns of each policy, in one place.

Terms are whole numbers and smaller is better; they are compared one after the other, without
weights. The last two are the indices, so no two placements cost the same.
"""

from typing import NamedTuple

from homenode.plan.model import CostTerm
from homenode.plan.request import Policy


class Cost(NamedTuple):
    """The concerns, in the order of cores-first.

    device_class: a pulled device's distance to the nearest chosen node, by package: 10 within one
    package, else the least distance between the two packages; SLIT, the worst device.
    nodes_spanned: count. node_distance: SLIT, 10 for one node; worst pair of chosen nodes.
    packages_spanned: count. device_distance: as device_class, but exact, node to node.
    other_device_distance: the same for devices that do not pull.
    unevenness: sum of the squares of the groups on each node, least where they are equal.
    unisolated_cores: groups outside isolcpus and nohz_full, 0 where the host isolates none.
    llcs_spanned: count, per node. pages_to_reserve: huge pages not yet in the nodes' pools.
    balance_cores: free whole cores of the chosen nodes before the VM, negated to spread.
    balance_memory: bytes free there, likewise.
    nodes: node indices, ascending. split: groups on each node, negated, so that the extra one goes
    to the lowest node.
    """

    device_class: int
    nodes_spanned: int
    node_distance: int
    packages_spanned: int
    device_distance: int
    other_device_distance: int
    unevenness: int
    unisolated_cores: int
    llcs_spanned: int
    pages_to_reserve: int
    balance_cores: int
    balance_memory: int
    nodes: tuple[int, ...]
    split: tuple[int, ...]


ORDER: dict[Policy, tuple[str, ...]] = {
    Policy.CORES_FIRST: Cost._fields,
    Policy.MEMORY_FIRST: (
        "nodes_spanned", "device_class", "node_distance", "packages_spanned", "device_distance",
        "other_device_distance", "unevenness", "unisolated_cores", "llcs_spanned",
        "pages_to_reserve", "balance_cores", "balance_memory", "nodes", "split",
    ),
    # nodes_spanned counts downwards here: see sort_key.
    Policy.SPREAD: (
        "nodes_spanned", "device_class", "node_distance", "packages_spanned", "device_distance",
        "other_device_distance", "unevenness", "unisolated_cores", "llcs_spanned",
        "pages_to_reserve", "balance_cores", "balance_memory", "nodes", "split",
    ),
    # Where the nodes lie is no concern: distances and devices are reported, not compared.
    Policy.ANY: (
        "nodes_spanned", "unevenness", "unisolated_cores", "balance_cores", "balance_memory",
        "llcs_spanned", "pages_to_reserve", "nodes", "split",
    ),
}  # fmt: skip
"""Names of the terms in the order of comparison."""

ADDITIVE = {
    "unisolated_cores", "llcs_spanned", "pages_to_reserve", "balance_cores", "balance_memory",
}  # fmt: skip
"""Terms that are sums over the chosen nodes; in every order they follow each other, right before
the indices."""

_ADDITIVE_BITS = 72
"""Room for one summed term, sign included: bytes of 2^16 nodes of 2^54 bytes."""


def terms(cost: Cost, policy: Policy) -> tuple[CostTerm, ...]:
    """The cost as a plan records it: named terms in the policy's order."""
    return tuple(
        CostTerm("minus_nodes_spanned", -cost.nodes_spanned)
        if policy is Policy.SPREAD and name == "nodes_spanned"
        else CostTerm(name, getattr(cost, name))
        for name in ORDER[policy]
    )


def sort_key(cost: Cost, policy: Policy) -> tuple[int | tuple[int, ...], ...]:
    """What to compare costs by under a policy; spread wants as many nodes as it can get."""
    return tuple(term.value for term in terms(cost, policy))


def packed(values: dict[str, int], policy: Policy) -> int:
    """The summed terms of one node as one integer, so that sums of them compare as the tuples do.

    >>> a = packed(dict.fromkeys(ADDITIVE, 0) | {"llcs_spanned": 2}, Policy.CORES_FIRST)
    >>> b = packed(dict.fromkeys(ADDITIVE, 0) | {"balance_memory": -9}, Policy.CORES_FIRST)
    >>> b < 0 < a and a + b > a + b + b
    True
    """
    total = 0
    for name in ORDER[policy]:
        if name in ADDITIVE:
            total = (total << _ADDITIVE_BITS) + values[name]
    return total
