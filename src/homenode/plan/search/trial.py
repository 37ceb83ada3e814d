"""Trial: the question that a rung asks for a request, and whether a request fits at all."""

from collections.abc import Callable, Sequence

from homenode.indices import NodeIndex
from homenode.plan.layout import GuestCells
from homenode.plan.request import GuestRequest
from homenode.plan.search.gpus import DeviceSet
from homenode.plan.search.ladder import Rung, rungs
from homenode.plan.search.near import Near
from homenode.plan.search.nodes import answer
from homenode.plan.search.question import Pull, Question
from homenode.plan.search.room import (
    Room,
    cell_pages_wanted,
    device_pages,
    page_size_bytes,
    pages_wanted,
    rooms,
)
from homenode.plan.search.supply import Usable, supply
from homenode.topology import Host

Fits = Callable[[GuestRequest], bool]
"""Whether a request like the one at hand would be placed; its devices do not matter for that."""

_NO_DEVICES = DeviceSet((), (), (), ())


def trial(host: Host, free: Usable, distances: Near) -> Fits:
    """What tells of requests that differ from one another in counts and concessions only."""
    known: dict[tuple[object, ...], bool] = {}

    def fits(request: GuestRequest) -> bool:
        key = (
            request.vcpus, request.memory_bytes, request.max_nodes, request.unequal_cells,
            request.mixed_kinds,
        )  # fmt: skip
        if key not in known:
            known[key] = _fits(host, request, free, distances)
        return known[key]

    return fits


def _fits(host: Host, request: GuestRequest, free: Usable, distances: Near) -> bool:
    room = rooms(host, request)
    for rung in rungs(request, free):
        question = question_of(host, request, rung, free, room, distances, _NO_DEVICES)
        found = answer(question)
        if found is not None:
            own = tuple(question.supplies[node].cores.index for node, _ in found.split)
            return memory_nodes(host, request, rung, own, room, distances) is not None
    return False


def question_of(
    host: Host,
    request: GuestRequest,
    rung: Rung,
    free: Usable,
    room: dict[NodeIndex, Room],
    distances: Near,
    devices: DeviceSet,
    like: Question | None = None,
) -> Question:
    """The rung's question for one set of devices. like: the same rung's for another set."""
    page = page_size_bytes(host, request)
    supplies = (
        like.supplies
        if like is not None
        else tuple(
            supply(
                cores, room[cores.index], page, threads=rung.threads, kinds=rung.kinds,
                counts_pus=rung.counts_pus,
            )
            for cores in free.nodes
        )
    )  # fmt: skip
    positions = [cores.position for cores in free.nodes]
    at = {node.index: position for position, node in enumerate(host.nodes)}

    def pulls(nodes: tuple[int, ...]) -> tuple[Pull, ...]:
        return tuple(
            Pull(
                distances.classes_to(at[NodeIndex(node)], positions),
                tuple(distances.between[at[NodeIndex(node)]][p] for p in positions),
            )
            for node in nodes
        )

    count = len(supplies)
    return Question(
        policy=request.policy,
        balance=request.balance,
        supplies=supplies,
        groups=rung.groups,
        pages=_pages(host, request, rung),
        huge=request.page_bytes is not None,
        equal=rung.equal,
        most_nodes=count if request.max_nodes is None else min(count, request.max_nodes),
        between=tuple(tuple(distances.between[a][b] for b in positions) for a in positions),
        packages=tuple(distances.packages[p] for p in positions),
        pulls=pulls(devices.pulls),
        others=pulls(devices.others),
        hosts_isolation=bool(free.isolated),
        device_pages=device_pages(host, request) if _by_cell(request, rung) else (),
    )


def _by_cell(request: GuestRequest, rung: Rung) -> bool:
    """Whether a memory device lies on the node of its cell. In a flat guest, and where a node may
    be two cells, devices follow the vCPUs as other memory does."""
    mirrored = request.layout.cells is GuestCells.MIRRORED
    return rung.memory_follows and mirrored and not rung.mixed


def _pages(host: Host, request: GuestRequest, rung: Rung) -> int:
    if not rung.memory_follows:
        return 0
    if _by_cell(request, rung):
        return cell_pages_wanted(host, request)
    return pages_wanted(host, request)


def memory_nodes(
    host: Host,
    request: GuestRequest,
    rung: Rung,
    own: tuple[NodeIndex, ...],
    room: dict[NodeIndex, Room],
    distances: Near,
) -> tuple[NodeIndex, ...] | None:
    """Nodes that hold the memory: the VM's own, then as many of the nearest others as it takes.

    None where even all that are allowed hold too little.
    """
    chosen = list(own)
    if not rung.memory_follows:
        at = {node.index: position for position, node in enumerate(host.nodes)}
        others = sorted(
            (node for node in room if node not in own),
            key=lambda n: (min(distances.between[at[n]][at[o]] for o in own), n),
        )
        most = len(room) if request.max_nodes is None else request.max_nodes
        wanted = pages_wanted(host, request)
        while others and len(chosen) < most and not _holds(room, chosen, wanted):
            chosen.append(others.pop(0))
        if not _holds(room, chosen, wanted):
            return None
    return tuple(sorted(index for node in chosen for index in room[node].nodes))


def _holds(room: dict[NodeIndex, Room], nodes: Sequence[NodeIndex], wanted: int) -> bool:
    pages = [room[node].pages for node in nodes]
    known = [count for count in pages if count is not None]
    return len(known) < len(pages) or sum(known) >= wanted
