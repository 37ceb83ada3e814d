"""Ladder: the steps from what was asked to what still works, each with a name that the plan bears.

The first rung that holds the VM is taken; the order of concerns (cost.py) decides within it. From
one rung to the next, the last of these gives way first: memory on the VM's own nodes (where the
layout lets memory lie elsewhere), all siblings of a core, one kind of core (where mixed kinds are
allowed). Over mixed kinds each vCPU gets a whole core, for no guest can be told that some cores
have siblings and others none; only where the vCPUs must be kept do all PUs count at last.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from homenode.errors import UsageError
from homenode.plan.layout import GuestCells, Layout, MemoryBinding, Pinning, Siblings
from homenode.plan.request import GuestRequest, Policy
from homenode.plan.search.supply import Usable, core_kinds, counts_pus
from homenode.topology import CoreKind


@dataclass(frozen=True, slots=True)
class Rung:
    """One step. threads: PUs that each sibling group has. groups: how many the VM needs.

    counts_pus: groups come from any free PUs rather than from free whole cores.
    memory_follows: each node holds its vCPUs' share of the memory.
    concession: what gave way, for the rung's name; "" on the first.
    """

    threads: int
    groups: int
    kinds: frozenset[CoreKind | None]
    mixed: bool
    counts_pus: bool
    memory_follows: bool
    equal: bool
    concession: str


def check_layout(layout: Layout, policy: Policy) -> None:
    """Raises UsageError where switches of the layout contradict each other, or the policy."""
    pins_all = layout.pinning is Pinning.ALL_PUS
    if layout.siblings is Siblings.EXPOSED and not pins_all:
        raise UsageError(
            f"layout {layout.name!r}: siblings are exposed, but pinning is {layout.pinning}",
            hint="pin all PUs, or hide the siblings",
        )
    if policy is Policy.MEMORY_FIRST and not pins_all and layout.pinning is not Pinning.NONE:
        raise UsageError(
            f"policy memory-first leaves cores uncounted, but layout {layout.name!r} needs a core "
            "for each vCPU",
            hint="take a layout that pins all PUs, such as pin-numa-smt with --keep-vcpus, or the "
            "policy cores-first",
        )
    bound = layout.memory is MemoryBinding.BOUND_PER_CELL
    if bound and layout.cells is GuestCells.FLAT:
        raise UsageError(
            f"layout {layout.name!r}: memory is bound per cell, but the guest is flat",
            hint="mirror the cells, or bind the memory as a whole",
        )


def rungs(request: GuestRequest, usable: Usable) -> Iterator[Rung]:
    """The rungs for this request, highest first. None where no sibling group can be made."""
    kinds = core_kinds(usable.nodes)
    performance = frozenset({CoreKind.PERFORMANCE})
    if CoreKind.EFFICIENCY not in kinds and CoreKind.PERFORMANCE not in kinds:
        yield from _of_kinds(request, usable, kinds, mixed=False)
        return
    yield from _of_kinds(request, usable, performance, mixed=False)
    if request.mixed_kinds:
        yield from _of_kinds(request, usable, kinds, mixed=True)


def _of_kinds(
    request: GuestRequest, usable: Usable, kinds: frozenset[CoreKind | None], *, mixed: bool
) -> Iterator[Rung]:
    layout = request.layout
    pins_all = layout.pinning is Pinning.ALL_PUS
    widest = max(
        (c.free.bit_count() for node in usable.nodes for c in node.cores if c.kind in kinds),
        default=1,
    )
    # Efficiency cores have no siblings: over both kinds every group is one PU.
    most = widest if pins_all and not mixed else 1
    equal = layout.cells is GuestCells.MIRRORED and not (request.unequal_cells or mixed)
    elsewhere = layout.memory is not MemoryBinding.BOUND_PER_CELL
    by_policy = counts_pus(request.policy, layout.pinning)
    packs = mixed and pins_all and request.keep_vcpus and not by_policy
    for threads, counted in (
        *((threads, by_policy) for threads in range(most, 0, -1)),
        *(((1, True),) if packs else ()),
    ):
        groups = request.vcpus
        if request.keep_vcpus and pins_all:
            if request.vcpus % threads:
                continue
            groups = request.vcpus // threads
        given = ["mixed core kinds"] if mixed else []
        if 1 < threads < most:
            given.append(f"{threads} of {most} siblings")
        elif threads < most or (mixed and pins_all and counted and widest > 1):
            given.append("siblings not exposed")
        for follows in (True, False) if elsewhere else (True,):
            more = [] if follows else ["memory from other nodes"]
            concession = ", ".join([*given, *more])
            yield Rung(threads, groups, kinds, mixed, counted, follows, equal, concession)


def rung_name(span: str, rung: Rung) -> str:
    """The name that a plan bears: how far it spans, and what gave way."""
    return span if not rung.concession else f"{span}, {rung.concession}"


def concessions(rung: str) -> int:
    """How many things gave way, from a rung's name.

    >>> concessions("one node"), concessions("one node, mixed core kinds")
    (0, 1)
    """
    return rung.count(", ")
