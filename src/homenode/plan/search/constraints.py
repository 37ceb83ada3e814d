"""Constraints: why nodes cannot hold a VM, by name, with what was needed and what was found."""

from collections.abc import Iterator, Sequence

from homenode.cpuset import CpuSet
from homenode.indices import NodeIndex
from homenode.plan.layout import Pinning
from homenode.plan.model import Rejection, Unplannable
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Rung
from homenode.plan.search.near import members
from homenode.plan.search.nodes import feasible_counts
from homenode.plan.search.question import Question
from homenode.plan.search.room import page_size_bytes
from homenode.plan.search.supply import Supply, Usable
from homenode.plan.search.taken import Taken
from homenode.topology import CoreKind, Host, MemoryKind
from homenode.units import format_bytes


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
    host: Host, request: GuestRequest, question: Question, rung: Rung, usable: Usable, taken: Taken
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
                _hint(request, question, rung, supply.groups),
            )
        elif question.pages and question.capacity(node) < need:
            page = page_size_bytes(host, request)
            free = (supply.room.pages or 0) * page
            rejection = "memory" if request.page_bytes is None else "pages"
            kind = "" if request.page_bytes is None else f" in pages of {format_bytes(page)}"
            yield Rejection(
                rejection,
                indices,
                f"{where}: needs {format_bytes(question.pages * page)}{kind}, "
                f"{format_bytes(free)} free",
                f"lower the memory to {format_bytes(free)}, or allow more nodes" if free else None,
            )


def node_counts(request: GuestRequest, question: Question, rung: Rung) -> Iterator[Rejection]:
    """Why no number of nodes does: too little in all, shares that are not equal, too few nodes."""
    everything = (1 << len(question.supplies)) - 1
    indices = tuple(supply.cores.index for supply in question.supplies)
    total = sum(supply.groups for supply in question.supplies)
    need = question.groups
    if total < need:
        if len(indices) == 1:
            return  # said of the node already
        yield Rejection(
            "pus" if rung.counts_pus else "cores",
            indices,
            f"{_together(indices)}: need {_groups_text(request, rung, need)}, {total} free",
            f"lower vcpus to {_vcpus(request, rung, total)}" if total else None,
        )
        return
    if feasible_counts(question, everything):
        far = "the nodes with room cannot reach each other (distance 255)"
        yield Rejection("distance", indices, far)
        return
    free_to_split = _changed(question, equal=False)
    counts = feasible_counts(free_to_split, everything)
    if counts and question.equal:
        yield _unequal(request, question, rung, counts[0])
        return
    if not counts:
        roomy = _changed(free_to_split, most_nodes=len(question.supplies))
        enough = feasible_counts(roomy, everything)
        if enough and question.most_nodes < enough[0]:
            yield Rejection(
                "max-nodes",
                indices,
                f"at most {_count(question.most_nodes)} allowed, {enough[0]} needed",
                f"--max-nodes {enough[0]}",
            )
        elif not enough:
            held = sum(question.capacity(node) for node in members(everything))
            free = sum(supply.memory_free_bytes for supply in question.supplies)
            yield Rejection(
                "memory" if request.page_bytes is None else "pages",
                indices,
                f"{_together(indices)}: need {format_bytes(request.memory_bytes)}, "
                f"{format_bytes(free)} free; {held} of {need} cores have their share beside them",
                "lower the memory, or allow memory from nodes without PUs",
            )


def _unequal(request: GuestRequest, question: Question, rung: Rung, number: int) -> Rejection:
    """No equal shares: the nearest counts that would be, where they fit."""
    step = number * (rung.threads if request.keep_vcpus else 1)
    below = request.vcpus // step * step
    offers = [
        count
        for count in (below, below + step)
        if count and count != request.vcpus and _fits(question, request, rung, count, number)
    ]
    shares = f"{request.vcpus} vCPUs are not equal shares on {number} nodes"
    if below == request.vcpus:
        shares = f"{request.vcpus} vCPUs: no {number} nodes have room for equal shares"
    offer = " or ".join(str(count) for count in offers)
    return Rejection(
        "equal-cells",
        tuple(supply.cores.index for supply in question.supplies),
        shares + (f"; the nearest equal counts are {offer}" if offer else ""),
        (f"ask for {offer} vCPUs, or " if offer else "") + "allow cells of unequal size with "
        "--unequal-cells",
    )


def _fits(question: Question, request: GuestRequest, rung: Rung, vcpus: int, number: int) -> bool:
    groups = vcpus // rung.threads if request.keep_vcpus else vcpus
    asked = _changed(question, groups=groups)
    return number in feasible_counts(asked, (1 << len(question.supplies)) - 1)


def _changed(
    question: Question,
    *,
    equal: bool | None = None,
    most_nodes: int | None = None,
    groups: int | None = None,
) -> Question:
    return Question(
        question.policy, question.balance, question.supplies,
        question.groups if groups is None else groups, question.pages, question.huge,
        question.equal if equal is None else equal,
        question.most_nodes if most_nodes is None else most_nodes,
        question.between, question.packages, question.pulls, question.others,
        question.hosts_isolation,
    )  # fmt: skip


def refusal(
    host: Host, request: GuestRequest, usable: Usable, rejections: Sequence[Rejection]
) -> Unplannable:
    """What to raise: the nearest miss in the message, every rejection in the value."""
    kinds = [core.kind for core in host.cores]
    strong, weak = kinds.count(CoreKind.PERFORMANCE), kinds.count(CoreKind.EFFICIENCY)
    of_kinds = f" ({strong} performance, {weak} efficiency)" if weak else ""
    pus = sum(pu.online for pu in host.pus)
    summary = f"the host has {pus} PUs on {len(kinds)} cores{of_kinds}, {len(usable.pus)} PUs free"
    kept = tuple(dict.fromkeys(rejections))
    wide = [r for r in kept if r.constraint not in ("no-node", "no-pus", "gpu-memory")]
    # What concerns all nodes comes last and says most; else the roomiest single node.
    told = wide[-1:] if wide else list(kept[:1])
    reason = "; ".join(r.detail for r in told) or "no core is free"
    hint = next((r.hint for r in reversed(wide) if r.hint), None)
    of_both = pus if request.layout.pinning is Pinning.ALL_PUS else len(kinds)
    if weak and not request.mixed_kinds and request.vcpus <= of_both:
        mixed = "--mixed-kinds adds the efficiency cores"
        hint = mixed if hint is None else f"{hint}; {mixed}"
    return Unplannable(
        f"no placement for {request.vcpus} vCPUs and {format_bytes(request.memory_bytes)} on host "
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


def _hint(request: GuestRequest, question: Question, rung: Rung, free: int) -> str | None:
    offers = []
    if free:
        offers.append(f"lower vcpus to {_vcpus(request, rung, free)}")
    if question.most_nodes == 1 and len(question.supplies) > 1:
        offers.append("allow two nodes with --max-nodes 2")
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
