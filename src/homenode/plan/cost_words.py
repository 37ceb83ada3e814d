"""CostWords: each term of a cost tuple as people say it."""

from collections.abc import Callable, Sequence

from homenode.cpuset import CpuSet
from homenode.plan.model import CostTerm
from homenode.topology import LOCAL_DISTANCE
from homenode.units import format_bytes


def _device_distance(value: int) -> str:
    if value <= LOCAL_DISTANCE:
        return "every GPU and its NIC is on a chosen node (or nothing pulls)"
    return f"the farthest GPU or NIC is at distance {value} from the chosen nodes"


def _device_class(value: int) -> str:
    if value <= LOCAL_DISTANCE:
        return "no GPU or NIC is in another package than the chosen nodes"
    return f"a GPU or NIC is in another package, at distance {value}"


def _other_devices(value: int) -> str:
    if value <= LOCAL_DISTANCE:
        return "every other device is on a chosen node (or there is none)"
    return f"the farthest other device is at distance {value}"


def _spanned(noun: str) -> Callable[[int], str]:
    return lambda value: f"{value} {noun}{'' if value == 1 else 's'} spanned"


def _node_distance(value: int) -> str:
    if value <= LOCAL_DISTANCE:
        return "one node, so no memory of the guest is remote to its vCPUs"
    return f"the chosen nodes are at most {value} apart"


def _free(kind: str) -> Callable[[int], str]:
    def say(value: int) -> str:
        amount = format_bytes(abs(value)) if kind == "memory" else f"{abs(value)} whole cores"
        rule = "the most, --balance spread" if value <= 0 else "the least, --balance pack"
        return f"{amount} free on the chosen nodes before this VM ({rule})"

    return say


# name: (what the term is, its value in words)
_WORDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "device_class": ("package distance to the devices", _device_class),
    "nodes_spanned": ("nodes spanned", _spanned("node")),
    "minus_nodes_spanned": (
        "nodes spanned, the more the better",
        lambda value: f"{-value} node{'' if value == -1 else 's'} spanned, as many as there are",
    ),
    "node_distance": ("distance between the chosen nodes", _node_distance),
    "packages_spanned": ("packages spanned", _spanned("package")),
    "device_distance": ("node distance to the devices", _device_distance),
    "other_device_distance": ("distance to devices that do not pull", _other_devices),
    "unevenness": (
        "evenness of the split over nodes",
        lambda value: (
            f"evenness of the split: {value}, the sum of its squared parts (least: equal)"
        ),
    ),
    "unisolated_cores": (
        "cores outside isolcpus and nohz_full",
        lambda value: (
            "no core outside isolcpus and nohz_full, or the host isolates none"
            if value == 0
            else f"{value} of the cores are not isolated"
        ),
    ),
    "llcs_spanned": (
        "LLCs spanned",
        lambda value: f"{value} LLC{'' if value == 1 else 's'} spanned, counted on each node",
    ),
    "pages_to_reserve": (
        "huge pages to reserve",
        lambda value: (
            "no huge pages to reserve"
            if value == 0
            else f"{value} huge pages are yet to be reserved"
        ),
    ),
    "balance_cores": ("whole cores left free", _free("cores")),
    "balance_memory": ("memory left free", _free("memory")),
}
_INDICES = {
    "nodes": ("node numbers, as a tie-break", "lowest node numbers among equals"),
    "split": ("split over nodes, as a tie-break", "larger parts on lower nodes among equals"),
}


def term_words(name: str) -> str:
    """What a term is called; an unknown one by its own name."""
    known = _WORDS.get(name) or _INDICES.get(name)
    return known[0] if known else name.replace("_", " ")


def term_value(name: str, value: int | tuple[int, ...] | None) -> str:
    """The value of one term, short, to be set against another's."""
    if value is None:
        return "nothing"
    if isinstance(value, tuple):
        return _indices(value)
    if name == "balance_memory":
        return format_bytes(abs(value))
    return str(abs(value) if name in ("balance_cores", "minus_nodes_spanned") else value)


def term_lines(cost: Sequence[CostTerm]) -> tuple[str, ...]:
    """One line for each term, numbered in the order of comparison: the first that differs decides.

    >>> term_lines([CostTerm("nodes_spanned", 1), CostTerm("nodes", (2,))])
    ('1. 1 node spanned', '2. lowest node numbers among equals: 2')
    """
    lines = []
    one_node = any(term.name == "nodes_spanned" and term.value == 1 for term in cost)
    for number, term in enumerate(cost, start=1):
        words = _WORDS.get(term.name)
        if isinstance(term.value, tuple):
            known = _INDICES.get(term.name, (term.name, term.name.replace("_", " ")))
            lines.append(f"{number}. {known[1]}: {_indices(term.value)}")
        elif term.name == "unevenness" and one_node:
            lines.append(f"{number}. evenness of the split: one node, nothing to split")
        elif words is not None:
            lines.append(f"{number}. {words[1](term.value)}")
        else:
            lines.append(f"{number}. {term_words(term.name)}: {term.value}")
    return tuple(lines)


def _indices(values: Sequence[int]) -> str:
    """Node numbers as ranges; a split, whose parts are negated, part by part."""
    if min(values, default=0) >= 0:
        return str(CpuSet(values)) or "none"
    return ", ".join(str(abs(value)) for value in values)
