"""CostWords: each term of a cost tuple as people say it."""

from collections.abc import Callable, Collection, Sequence

from homenode.cpuset import CpuSet
from homenode.machine.topology import LOCAL_DISTANCE
from homenode.text import plural
from homenode.units import format_bytes
from homenode.vm.plan import CostTerm


def _device_class(value: int) -> str:
    if value <= LOCAL_DISTANCE:
        return "no GPU or NIC is in another package than the chosen nodes"
    return f"a GPU or NIC is in another package, at distance {value}"


def _away_from_home(value: int) -> str:
    if value == 0:
        return "every GPU's own node is chosen"
    return f"{value} GPU{'s are' if value > 1 else ' is'} on no chosen node"


def _counted(one: str, many: str) -> Callable[[int], str]:
    return lambda value: f"{value} {one if value == 1 else many}"


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
    "vcpus_beyond_cores": (
        "vCPUs without a whole core",
        _counted(
            "vCPU gets no whole core of the chosen nodes",
            "vCPUs get no whole core of the chosen nodes",
        ),
    ),
    "device_class": ("package distance to the devices", _device_class),
    "nodes_spanned": ("nodes spanned", _spanned("node")),
    "minus_nodes_spanned": (
        "nodes spanned, the more the better",
        lambda value: f"{-value} node{'' if value == -1 else 's'} spanned, as many as there are",
    ),
    "node_distance": ("distance between the chosen nodes", _node_distance),
    "distance_sum": (
        "distances between the chosen nodes, in sum",
        lambda value: f"distances of the pairs of chosen nodes, in sum: {value}",
    ),
    "packages_spanned": ("packages spanned", _spanned("package")),
    "gpus_away_from_home": ("GPUs away from their own node", _away_from_home),
    "device_distance": (
        "distance from the devices to the VM's cores",
        lambda value: f"distance from the devices to the VM's cores, in sum: {value}",
    ),
    "gpu_sets_lost": (
        "GPU sets that later VMs lose",
        _counted(
            "set of free GPUs that later VMs can no longer get whole",
            "sets of free GPUs that later VMs can no longer get whole",
        ),
    ),
    "unevenness": (
        "evenness of the split over nodes",
        lambda value: (
            f"evenness of the split: {value}, the sum of its squared parts (least: equal)"
        ),
    ),
    "unisolated_cores": (
        "cores outside isolcpus and nohz_full",
        lambda value: f"{value} of the cores are not isolated",
    ),
    "llcs_spanned": (
        "LLCs spanned",
        lambda value: f"{value} LLC{'' if value == 1 else 's'} spanned, counted on each node",
    ),
    "pages_to_reserve": (
        "huge pages to reserve",
        lambda value: f"to do: reserve {value} huge page{'' if value == 1 else 's'}",
    ),
    "balance_cores": ("whole cores left free", _free("cores")),
    "balance_memory": ("memory left free", _free("memory")),
}
_SILENT_AT_0 = {
    "distance_sum",
    "device_class",
    "device_distance",
    "gpus_away_from_home",
    "gpu_sets_lost",
    "unisolated_cores",
    "pages_to_reserve",
}
_INDICES = {
    "nodes": ("node numbers, as a tie-break", "lowest node numbers among equals"),
    "split": ("split over nodes, as a tie-break", "larger parts on lower nodes among equals"),
    "gpus": ("GPU numbers, as a tie-break", "lowest GPU numbers among equals"),
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


def term_lines(
    cost: Sequence[CostTerm], decisive: Collection[str] = (), unknown: Collection[str] = ()
) -> tuple[str, ...]:
    """One line for each term that says something, in the order of comparison: the first that
    differs between two placements decides.

    Omitted are terms with nothing to say (no device counts, nothing to reserve, an even split) and
    tie-breaks, unless they were `decisive` for a runner-up, and terms that count what is `unknown`.

    >>> term_lines([CostTerm("device_class", 0), CostTerm("nodes_spanned", 1)])
    ('1. 1 node spanned',)
    """
    shown = [
        term
        for term in cost
        if term.name not in unknown and (term.name in decisive or not _is_silent(term, cost))
    ]
    has_gpus = any(term.name == "gpus" and term.value for term in cost)
    return tuple(
        f"{number}. {_line(term, has_gpus=has_gpus)}" for number, term in enumerate(shown, start=1)
    )


_SPANS = (
    "vcpus_beyond_cores",
    "device_class",
    "gpus_away_from_home",
    "packages_spanned",
    "nodes_spanned",
)


def span_lines(cost: Sequence[CostTerm]) -> tuple[str, ...]:
    """What people ask first: how far the VM is from its devices, and how many nodes it spans.

    >>> span_lines([CostTerm("packages_spanned", 1), CostTerm("llcs_spanned", 4)])
    ('1 package spanned.',)
    """
    has_gpus = any(term.name == "gpus" and term.value for term in cost)
    lines = (
        _line(term, has_gpus=has_gpus)
        for term in cost
        if term.name in _SPANS and not _is_silent(term, cost)
    )
    return tuple(f"{line[0].upper()}{line[1:]}." for line in lines)


def _line(term: CostTerm, *, has_gpus: bool) -> str:
    if isinstance(term.value, tuple):
        known = _INDICES.get(term.name, (term.name, term.name.replace("_", " ")))
        return f"{known[1]}: {_indices(term.value)}"
    if term.name == "gpu_sets_lost" and not has_gpus:
        return f"{plural(term.value, 'chosen node')} with free GPUs, for a VM without"
    words = _WORDS.get(term.name)
    return f"{term_words(term.name)}: {term.value}" if words is None else words[1](term.value)


def _is_silent(term: CostTerm, cost: Sequence[CostTerm]) -> bool:
    if term.name == "unevenness":
        parts = next((other.value for other in cost if other.name == "split"), ())
        return isinstance(parts, tuple) and len(set(parts)) <= 1
    return term.name in _INDICES or (term.name in _SILENT_AT_0 and term.value == 0)


def _indices(values: Sequence[int]) -> str:
    """Node numbers as ranges; a split, whose parts are negated, part by part."""
    if min(values, default=0) >= 0:
        return str(CpuSet(values)) or "none"
    return ", ".join(str(abs(value)) for value in values)
