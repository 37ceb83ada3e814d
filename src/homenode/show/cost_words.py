"""CostWords: each term of a cost tuple in words, and its value."""

from homenode.cpuset import CpuSet
from homenode.units import format_bytes

_WORDS = {
    "vcpus_beyond_cores": "vCPUs without a whole core",
    "device_class": "distance from the VM's packages to its GPUs and NICs",
    "nodes_spanned": "nodes",
    "minus_nodes_spanned": "nodes, the more the better",
    "node_distance": "distance between the chosen nodes",
    "distance_sum": "sum of the distances between the chosen nodes",
    "packages_spanned": "packages",
    "gpus_away_from_home": "GPUs away from their own node",
    "device_distance": "sum of the distances from the devices to the VM's cores",
    "gpu_sets_lost": "GPU sets that later VMs lose; without GPUs: nodes with GPUs",
    "unevenness": "evenness of the split over nodes, a sum of squares",
    "unisolated_cores": "cores outside isolcpus and nohz_full",
    "llcs_spanned": "LLCs",
    "pages_to_reserve": "huge pages to reserve",
    "guest_sockets": "sockets of the guest",
    "balance_cores": "free whole cores before this VM",
    "balance_memory": "free memory before this VM",
    "nodes": "node numbers, as a tie-break",
    "split": "cores on each node, as a tie-break",
    "gpus": "GPU numbers, as a tie-break",
}


def term_words(name: str) -> str:
    """What a term counts; an unknown one by its own name."""
    return _WORDS.get(name) or name.replace("_", " ")


def term_value(name: str, value: int | tuple[int, ...] | None) -> str:
    """The value of a term; node numbers as ranges, a split, whose parts are negated, in parts.

    >>> term_value("balance_memory", -(1 << 30)), term_value("split", (-4, -2)), term_value("x", 3)
    ('1 GiB', '4, 2', '3')
    """
    if value is None:
        return "-"
    if isinstance(value, tuple):
        if min(value, default=0) >= 0:
            return str(CpuSet(value)) or "none"
        return ", ".join(str(abs(part)) for part in value)
    if name == "balance_memory":
        return format_bytes(abs(value))
    return str(abs(value) if name in ("balance_cores", "minus_nodes_spanned") else value)
