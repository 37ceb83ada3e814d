"""Ladder: the fallbacks from the full request to the most relaxed one, each with a name.

The first fallback that fits is used; within it the cost (placement.py) decides. Relaxed in this
order, the first last: the host's memory reserve; a whole core for each vCPU; one kind of core; the
number of siblings per core; the host's last core; memory local to its vCPUs.

More vCPUs never get fewer cores. So whole cores are relaxed last but for the host's memory, and of
the fallbacks with shared cores the one with the most cores is used, whatever else it relaxes: the
VM gets every core of its nodes, and shares as few as possible.

With mixed kinds of core each vCPU gets a whole core, as a guest cannot be shown siblings on only
some cores.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from homenode.errors import UsageError
from homenode.machine.topology import CoreKind
from homenode.plan.request import GuestRequest
from homenode.plan.search.supply import FreeCpus, Grouping
from homenode.vm.layout import GuestCells, Layout, MemoryBinding, Pinning, Siblings
from homenode.vm.plan import Relaxation
from homenode.vm.plan_options import Policy


class MemoryRule(StrEnum):
    """The relation of a VM's memory to the nodes of its vCPUs."""

    FOLLOWS = "follows"  # each node holds its vCPUs' share
    UNEVEN = "uneven"  # the nodes of the vCPUs hold it together
    ELSEWHERE = "elsewhere"  # further nodes give memory


class Fallback(Struct, frozen=True, kw_only=True):
    grouping: Grouping  # the kind of sibling group
    groups: int  # number of groups that the VM needs
    mixed: bool  # may mix several kinds of core
    shares: bool  # more vCPUs than whole cores, so some share a core
    memory: MemoryRule = MemoryRule.FOLLOWS
    equal: bool  # equal cells are preferred
    keeps_core: bool = True  # the host keeps its share
    keeps_memory: bool = True  # the host keeps its share
    relaxations: tuple[Relaxation, ...]

    def idle_siblings(self, request: GuestRequest) -> int:
        """Return the number of CPUs without a vCPU in the last sibling group."""
        return -request.vcpus % self.grouping.threads if request.keep_vcpus else 0

    def is_like(self, other: "Fallback") -> bool:
        """Return whether two fallbacks differ at most in the host's last core and the memory rule;
        if vCPUs share cores on both, also in the kinds of core."""
        if self.keeps_memory is not other.keeps_memory or self.shares is not other.shares:
            return False
        return self.shares or (self.grouping, self.groups) == (other.grouping, other.groups)


def check_layout(layout: Layout, policy: Policy) -> None:
    """Raise UsageError if switches of the layout contradict each other, or the policy."""
    pins_all = layout.pinning is Pinning.ALL_PUS
    if layout.siblings is Siblings.EXPOSED and not pins_all:
        raise UsageError(
            f"layout {layout.name!r}: siblings are exposed, but pinning is {layout.pinning}",
            hint="pin all CPUs, or hide the siblings",
        )
    if policy is Policy.MEMORY_FIRST and layout.pinning is Pinning.ONE_PER_CORE:
        raise UsageError(
            f"policy memory-first leaves cores uncounted, but layout {layout.name!r} needs a core "
            "for each vCPU",
            hint="use a layout that pins all CPUs, such as pin-numa-smt with --keep-vcpus, or the "
            "policy cores-first",
        )


def list_fallbacks(request: GuestRequest, free: FreeCpus) -> Iterator[Fallback]:
    """Yield the fallbacks for this request, highest first."""
    shapes = {shape for node in free.nodes for shape, _ in node.shapes}
    kinds = frozenset(shape.kind for shape in shapes)
    hybrid = CoreKind.EFFICIENCY in kinds and CoreKind.PERFORMANCE in kinds
    one_kind = frozenset({CoreKind.PERFORMANCE}) if hybrid else kinds
    whole_cores: list[Fallback] = []
    shared_cores: list[Fallback] = []
    for is_mixed in (False, True) if hybrid and not request.options.explicit_cells else (False,):
        of_kinds = kinds if is_mixed else one_kind
        widest = max((shape.pus for shape in shapes if shape.kind in of_kinds), default=1)
        whole_cores += _list_fallbacks(request, widest, of_kinds, is_mixed=is_mixed)
        shared_cores += _list_sharing_ways(request, of_kinds, is_mixed=is_mixed)
    ways = [*whole_cores, *shared_cores]
    # Without pins the host always keeps a core.
    keeps_core = (True,) if request.layout.pinning is Pinning.NONE else (True, False)
    rules = tuple(product(keeps_core, _list_memory_rules(request)))
    steps: Iterable[tuple[bool, Fallback]] = product((True, False), ways)
    if request.keeps_siblings:
        steps = ((keeps_memory, way) for way in ways for keeps_memory in (True, False))
    for (keeps_memory, way), (keeps, memory) in product(steps, rules):
        relaxations = (
            *(() if keeps_memory else (Relaxation.HOST_MEMORY,)),
            *way.relaxations,
            *(() if keeps else (Relaxation.HOST_CORE,)),
            *_OF_RULE[memory],
        )
        yield replace(
            way, keeps_memory=keeps_memory, keeps_core=keeps, memory=memory, relaxations=relaxations
        )


_OF_RULE = {
    MemoryRule.FOLLOWS: (),
    MemoryRule.UNEVEN: (Relaxation.UNEVEN_MEMORY,),
    MemoryRule.ELSEWHERE: (Relaxation.MEMORY_ELSEWHERE,),
}


def _counts_pus(request: GuestRequest) -> bool:
    """Return whether CPUs are counted instead of cores, by the policy and the layout."""
    counts = request.options.policy in (Policy.MEMORY_FIRST, Policy.ANY)
    return counts and request.layout.pinning is not Pinning.ONE_PER_CORE


def _list_fallbacks(
    request: GuestRequest, widest: int, kinds: frozenset[CoreKind | None], *, is_mixed: bool
) -> Iterator[Fallback]:
    """Yield the layout's sibling groups, then groups of fewer siblings. If they do not divide the
    vCPUs, the last group has idle siblings, and the guest is shown no siblings."""
    counts_pus, keeps = _counts_pus(request), request.keep_vcpus
    pins_all = request.layout.pinning is Pinning.ALL_PUS
    widest = min(widest, request.most_threads or widest)
    for threads in range(widest if pins_all and not is_mixed else 1, 0, -1):
        if keeps and any(len(cell.vcpus) % threads for cell in request.options.explicit_cells):
            continue  # a cell would get half a group
        groups = -(-request.vcpus // threads) if keeps else request.vcpus
        idle = keeps and request.vcpus % threads > 0
        fewer: tuple[Relaxation, ...] = ()
        if pins_all and (is_mixed or idle or threads < widest):
            hides = idle or threads == 1
            fewer = (Relaxation.SIBLINGS_NOT_EXPOSED if hides else Relaxation.FEWER_SIBLINGS,)
        yield _make_fallback(
            request, Grouping(threads, kinds, counts_pus), groups, fewer, is_mixed=is_mixed
        )


def _list_sharing_ways(
    request: GuestRequest, kinds: frozenset[CoreKind | None], *, is_mixed: bool
) -> Iterator[Fallback]:
    """Yield groups for more vCPUs than cores; if CPUs are counted anyway, none are left to try."""
    if request.layout.pinning is not Pinning.NONE and not _counts_pus(request):
        grouping, relaxations = Grouping(1, kinds, counts_pus=True), (Relaxation.SHARED_CORES,)
        yield _make_fallback(request, grouping, request.vcpus, relaxations, is_mixed=is_mixed)


def _make_fallback(
    request: GuestRequest,
    grouping: Grouping,
    groups: int,
    relaxations: tuple[Relaxation, ...],
    *,
    is_mixed: bool,
) -> Fallback:
    """Return a fallback that relaxes nothing else."""
    options, cells = request.options, request.layout.cells
    return Fallback(
        grouping=grouping,
        groups=groups,
        mixed=is_mixed,
        shares=Relaxation.SHARED_CORES in relaxations,
        equal=cells is GuestCells.HOST
        and not (is_mixed or options.unequal_cells or options.explicit_cells),
        relaxations=(Relaxation.MIXED_KINDS, *relaxations) if is_mixed else relaxations,
    )


def _list_memory_rules(request: GuestRequest) -> tuple[MemoryRule, ...]:
    if request.options.explicit_cells:
        return (MemoryRule.FOLLOWS,)
    layout = request.layout
    if layout.cells is GuestCells.HOST and layout.memory is MemoryBinding.BOUND_PER_CELL:
        return MemoryRule.FOLLOWS, MemoryRule.UNEVEN
    return MemoryRule.FOLLOWS, MemoryRule.UNEVEN, MemoryRule.ELSEWHERE


def name_fallback(span: str, relaxations: tuple[Relaxation, ...]) -> str:
    """Return the fallback's name in a plan: the span, then the relaxations.

    >>> name_fallback("one node", (Relaxation.MIXED_KINDS, Relaxation.HOST_CORE))
    "one node, mixed core kinds, host's last core"
    """
    return ", ".join((span, *relaxations))
