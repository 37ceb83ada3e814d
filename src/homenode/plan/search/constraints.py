"""Constraints: why nodes cannot hold a VM, by name, with what was needed and what was found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.plan.model import Rejection, Unplannable
from homenode.plan.request import GuestRequest
from homenode.plan.search.counts import changed, every_node, groups_above, groups_below
from homenode.plan.search.ladder import Rung
from homenode.plan.search.near import members
from homenode.plan.search.nodes import answer, feasible_counts
from homenode.plan.search.question import Question
from homenode.plan.search.room import memory_text, page_size_bytes
from homenode.plan.search.supply import Supply, Usable
from homenode.plan.search.taken import Taken
from homenode.plan.search.trial import Fits
from homenode.topology import CoreKind, Host, MemoryKind
from homenode.units import GIB, MIB, format_bytes


@dataclass(frozen=True, slots=True)
class Miss:
    """Why one rung of the ladder failed. most_vcpus: fewer than were asked for, that it has room
    for; 0 = none."""

    rejection: Rejection
    most_vcpus: int


def unusable_nodes(host: Host, request: GuestRequest) -> Iterator[Rejection]:
    """Nodes and PUs that can take no vCPU, whatever is free: one rejection per reason."""
    homeless = CpuSet(pu.index for pu in host.pus if pu.online and pu.node is None)
    if homeless:
        yield Rejection("no-node", (), f"PUs {homeless}: on no node that the host tells of")
    without_pus = tuple(node for node in host.nodes if not node.pus)
    of_gpus = tuple(node.index for node in without_pus if node.memory_kind is MemoryKind.GPU)
    plain = tuple(node.index for node in without_pus if node.memory_kind is not MemoryKind.GPU)
    if of_gpus:
        yield Rejection(
            "gpu-memory", of_gpus, f"{_named(of_gpus)}: memory of GPUs, no PUs; never for a guest"
        )
    if plain:
        unasked = tuple(
            node.index
            for node in without_pus
            if node.index in plain
            and node.memory_bytes != 0
            and node.index not in request.memory_nodes_allowed
        )
        yield Rejection(
            "no-pus",
            plain,
            f"{_named(plain)}: no PUs, so no vCPU",
            f"--allow-memory-node {unasked[0]} lets its memory serve" if unasked else None,
        )


def single_nodes(
    host: Host,
    request: GuestRequest,
    question: Question,
    rung: Rung,
    usable: Usable,
    taken: Taken,
    fits: Fits,
) -> Iterator[Rejection]:
    """Why one node does not do, for each node of the question that does not."""
    for node, supply in enumerate(question.supplies):
        need = question.groups
        where = f"node {supply.cores.index} (PUs {supply.cores.pus})"
        indices = (supply.cores.index,)
        if supply.groups < need:
            detail = f"{where}: needs {_groups_text(request, rung, need)}, {supply.groups} free"
            held = _held(request, supply, usable, taken)
            yield Rejection(
                "pus" if rung.counts_pus else "cores",
                indices,
                f"{detail}; {held}" if held else detail,
                _hint(request, question, rung, supply.groups, fits),
            )
        elif question.pages and question.capacity(node) < need:
            page = page_size_bytes(host, request)
            free = (supply.room.pages or 0) * page
            rejection = "memory" if request.page_bytes is None else "pages"
            kind = "" if request.page_bytes is None else f" in pages of {format_bytes(page)}"
            yield Rejection(
                rejection,
                indices,
                f"{where}: needs {format_bytes(question.pages_of(need) * page)}{kind}, "
                f"{format_bytes(free)} free",
                _less_memory(request, free, question.most_nodes < len(question.supplies), fits),
            )


def node_counts(request: GuestRequest, question: Question, rung: Rung, fits: Fits) -> Miss | None:
    """Why no number of nodes does: too little in all, shares that are not equal, too few nodes.

    None where that was said of the only node already.
    """
    indices = tuple(supply.cores.index for supply in question.supplies)
    total = sum(supply.groups for supply in question.supplies)
    most = most_vcpus(request, question, rung)
    if total < question.groups:
        if len(indices) < 2:
            return None
        need = _groups_text(request, rung, question.groups)
        rejection = Rejection(
            "pus" if rung.counts_pus else "cores",
            indices,
            f"{_together(indices)}: need {need}, {total} free",
            _lower(request, question, rung, most, total, fits),
        )
    elif feasible_counts(question, every_node(question)):
        if question.device_pages and answer(changed(question, device_pages=())) is not None:
            rejection = _devices_too_large(request, indices)
        else:
            far = "the nodes with room cannot reach each other (distance 255)"
            rejection = Rejection("distance", indices, far)
    else:
        rejection = _unspread(request, question, rung, fits)
    return Miss(rejection, most)


def _devices_too_large(request: GuestRequest, indices: tuple[NodeIndex, ...]) -> Rejection:
    return Rejection(
        "memory" if request.page_bytes is None else "pages",
        indices,
        f"{_together(indices)}: need {memory_text(request)}, and the memory devices of some cell "
        "find no node with room for them beside the cell's share",
        "spread the memory devices over the cells, or make them smaller",
    )


def _unspread(request: GuestRequest, question: Question, rung: Rung, fits: Fits) -> Rejection:
    """Why cores that suffice in all do not: equal shares, the number of nodes, or memory."""
    indices = tuple(supply.cores.index for supply in question.supplies)
    everything = every_node(question)
    uneven = changed(question, equal=False)
    counts = feasible_counts(uneven, everything)
    if counts:
        return _unequal(request, question, rung, counts[0], fits)
    enough = feasible_counts(changed(uneven, most_nodes=len(indices)), everything)
    if enough:
        return Rejection(
            "max-nodes",
            indices,
            f"at most {_count(question.most_nodes)} allowed, {enough[0]} needed",
            _more_nodes(request, question, fits),
        )
    held = sum(question.capacity(node) for node in members(everything))
    free = sum(supply.memory_free_bytes for supply in question.supplies)
    return Rejection(
        "memory" if request.page_bytes is None else "pages",
        indices,
        f"{_together(indices)}: need {memory_text(request)}, "
        f"{format_bytes(free)} free; {held} of {question.groups} cores have their share beside "
        "them",
        "lower the memory, or allow memory from nodes without PUs",
    )


def _unequal(
    request: GuestRequest, question: Question, rung: Rung, number: int, fits: Fits
) -> Rejection:
    """No equal shares: the nearest counts that would be, where they fit."""
    above = groups_above(question)
    near = (groups_below(question), 0 if above is None else above)
    offers = [
        str(count)
        for count in (_vcpus(request, rung, groups) for groups in near)
        if count and fits(replace(request, vcpus=count))
    ]
    shares = f"{request.vcpus} vCPUs are not equal shares on {number} nodes"
    if question.groups % number == 0:
        shares = f"{request.vcpus} vCPUs: no {number} nodes have room for equal shares"
    offer = " or ".join(offers)
    nearest = "counts are" if len(offers) > 1 else "count is"
    hints = [f"ask for {offer} vCPUs{kept(request)}"] if offer else []
    if fits(replace(request, unequal_cells=True)):
        hints.append("allow cells of unequal size with --unequal-cells")
    return Rejection(
        "equal-cells",
        tuple(supply.cores.index for supply in question.supplies),
        shares + (f"; the nearest equal {nearest} {offer}" if offer else ""),
        ", or ".join(hints) or None,
    )


def most_vcpus(request: GuestRequest, question: Question, rung: Rung) -> int:
    """The most vCPUs, fewer than were asked for, that the rung has room for; 0 = none."""
    return _vcpus(request, rung, groups_below(question))


def headline(misses: Sequence[Miss]) -> Rejection | None:
    """What a refusal says first: what more cores would not cure, of the highest rung where that
    is; else the rung whose cores come nearest."""
    for miss in misses:
        if miss.rejection.constraint not in ("cores", "pus"):
            return miss.rejection
    nearest = max(misses, key=lambda miss: miss.most_vcpus, default=None)
    return None if nearest is None else nearest.rejection


def refusal(
    host: Host,
    request: GuestRequest,
    usable: Usable,
    rejections: Sequence[Rejection],
    first: Rejection | None,
    fits: Fits,
) -> Unplannable:
    """What to raise: the nearest miss in the message, every rejection in the value."""
    kinds = [core.kind for core in host.cores]
    strong, weak = kinds.count(CoreKind.PERFORMANCE), kinds.count(CoreKind.EFFICIENCY)
    of_kinds = f" ({strong} performance, {weak} efficiency)" if weak else ""
    pus = sum(pu.online for pu in host.pus)
    summary = f"the host has {pus} PUs on {len(kinds)} cores{of_kinds}, {len(usable.pus)} PUs free"
    kept = tuple(dict.fromkeys(rejections))
    told = first if first is not None else next(iter(kept), None)
    reason = "no core is free" if told is None else told.detail
    hint = None if told is None else told.hint
    if weak and not request.mixed_kinds and fits(replace(request, mixed_kinds=True)):
        mixed = "--mixed-kinds adds the efficiency cores"
        hint = mixed if hint is None else f"{hint}; {mixed}"
    return Unplannable(
        f"no placement for {request.vcpus} vCPUs and {memory_text(request)} on host "
        f"{host.name!r}: {reason}; {summary}",
        kept,
        hint=hint,
    )


def _groups_text(request: GuestRequest, rung: Rung, groups: int) -> str:
    kind = " performance" if rung.kinds == {CoreKind.PERFORMANCE} else ""
    if rung.counts_pus:
        if rung.threads == 1:
            return f"{groups} free{kind} PUs"
        return f"{groups} groups of {rung.threads} free siblings ({groups * rung.threads} PUs)"
    siblings = f" of {rung.threads} PUs" if rung.threads > 1 else ""
    return f"{groups} free whole{kind} cores{siblings}"


def _vcpus(request: GuestRequest, rung: Rung, groups: int) -> int:
    return groups * rung.threads if request.keep_vcpus else groups


def kept(request: GuestRequest) -> str:
    """What to add to a count of vCPUs: a document that shows siblings keeps its own count by
    itself, but not another."""
    return " with --keep-vcpus" if request.keep_vcpus else ""


def _hint(
    request: GuestRequest, question: Question, rung: Rung, free: int, fits: Fits
) -> str | None:
    count = _vcpus(request, rung, free)
    lower = count and fits(replace(request, vcpus=count))
    more = _more_nodes(request, question, fits) if question.most_nodes == 1 else None
    offers = ([f"lower vcpus to {count}{kept(request)}"] if lower else []) + (
        [more] if more else []
    )
    return ", or ".join(offers) or None


def _lower(
    request: GuestRequest, question: Question, rung: Rung, most: int, total: int, fits: Fits
) -> str | None:
    """Fewer vCPUs than all nodes together have room for, as equal shares and otherwise."""
    offers = []
    if most and fits(replace(request, vcpus=most)):
        offers.append(f"lower vcpus to {most}{kept(request)}")
    count = _vcpus(request, rung, total)
    if count > most and fits(replace(request, vcpus=count, unequal_cells=True)):
        offers.append(f"lower vcpus to {count}{kept(request)} with --unequal-cells")
    return ", or ".join(offers) or None


def _more_nodes(request: GuestRequest, question: Question, fits: Fits) -> str | None:
    """How many nodes would do, where the number of nodes is limited."""
    if question.most_nodes == len(question.supplies):
        return None
    roomy = changed(question, most_nodes=len(question.supplies))
    for asked, also in ((roomy, ""), (changed(roomy, equal=False), " and --unequal-cells")):
        for number in feasible_counts(asked, every_node(question))[:1]:
            wished = replace(
                request, max_nodes=number, unequal_cells=request.unequal_cells or bool(also)
            )
            if fits(wished):
                return f"allow {_count(number)} with --max-nodes {number}{also}"
    return None


def _less_memory(request: GuestRequest, free: int, more: bool, fits: Fits) -> str | None:
    """Memory that fits on one node, as whole GiB (MiB below one), or more nodes."""
    unit = GIB if free >= GIB else MIB
    size = free // unit * unit
    offers = []
    pages = size % (request.page_bytes or 1) == 0
    if size and pages and fits(replace(request, memory_bytes=size)):
        offers.append(f"lower the memory to {size // unit} {'GiB' if unit == GIB else 'MiB'}")
    if more:
        offers.append("allow more nodes")
    return ", or ".join(offers) or None


def _held(request: GuestRequest, supply: Supply, usable: Usable, taken: Taken) -> str:
    """Who has the node's other PUs."""
    pus = supply.cores.pus
    parts = []
    reserved = request.reserved_pus & pus
    if reserved:
        parts.append(f"{len(reserved)} PUs reserved for the host ({reserved})")
    for holding in taken.holdings:
        held = holding.pus & pus
        if held:
            parts.append(f"{len(held)} PUs held by {holding.domain!r} ({held})")
    rest = pus - usable.pus - reserved - taken.pus
    if request.emulator_pus is not None:
        rest -= request.emulator_pus
    if rest:
        parts.append(f"{len(rest)} PUs not allowed ({rest})")
    broken = CpuSet.from_bits(sum(core.free for core in supply.cores.cores if not core.whole))
    if broken:
        parts.append(f"{len(broken)} PUs on cores that are not free as a whole ({broken})")
    return "; ".join(parts)


def _named(indices: tuple[NodeIndex, ...]) -> str:
    text = str(CpuSet(indices))
    return f"node {text}" if len(indices) == 1 else f"nodes {text}"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _together(indices: Sequence[NodeIndex]) -> str:
    return "the only node" if len(indices) == 1 else f"all {len(indices)} nodes together"
