"""Place: from a host and a request to a placement, or to every reason why there is none.

Ladder (ladder.py), devices (gpus.py), supply of each node (supply.py, room.py), search (nodes.py),
then the PUs and QEMU's own threads. Same input, same placement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from homenode.cpuset import CpuSet
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.plan.layout import GuestCells, MemoryBinding, Pinning, Siblings
from homenode.plan.model import Rejection, RunnerUp
from homenode.plan.placement import Placement
from homenode.plan.request import EmulatorPolicy, GuestRequest
from homenode.plan.search.constraints import (
    Miss,
    headline,
    kept,
    most_vcpus,
    node_counts,
    refusal,
    single_nodes,
    unusable_nodes,
)
from homenode.plan.search.cost import sort_key, terms
from homenode.plan.search.findings import placement_findings
from homenode.plan.search.gpus import DeviceSet, device_sets
from homenode.plan.search.ladder import Rung, check_layout, rung_name, rungs
from homenode.plan.search.near import Near, near
from homenode.plan.search.nodes import Answer, answer
from homenode.plan.search.question import Question
from homenode.plan.search.room import Room, memory_text, rooms
from homenode.plan.search.supply import Group, Usable, usable
from homenode.plan.search.taken import Taken, taken_by_others
from homenode.plan.search.threads import ThreadPlaces, shared_places, thread_places
from homenode.plan.search.trial import Fits, memory_nodes, question_of, trial
from homenode.topology import CoreKind, Host

RUNNER_UP_BUDGET = 2_000
MOST_REFUSED_NODES = 16


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An answer with what it answers."""

    rung: Rung
    devices: DeviceSet
    question: Question
    answer: Answer


def place(host: Host, request: GuestRequest) -> Placement:
    """The placement of least cost on the highest rung that holds the VM.

    Raises Unplannable with every rejection; UsageError for layout and policy that clash;
    InputError for devices or nodes that the host has not.
    """
    layout = request.layout
    check_layout(layout, request.policy)
    taken = taken_by_others(host, request)
    devices = device_sets(host, request, taken)
    floats = layout.pinning is Pinning.NONE
    if floats and layout.cells is GuestCells.FLAT and layout.memory is MemoryBinding.AS_IT_WAS:
        return Placement(
            (), (), (), (), 1, None, (), devices[0].devices, "not placed",
            findings=tuple(placement_findings(host, request, devices[0].devices, taken)),
            gaps=(*taken.gaps, *devices[0].gaps),
        )  # fmt: skip
    free = usable(host, request, taken)
    room = rooms(host, request)
    distances = near(host)
    fits = trial(host, free, distances)
    rejections = list(unusable_nodes(host, request))
    misses: list[Miss] = []
    refused: set[tuple[object, ...]] = set()
    for rung in rungs(request, free):
        question = question_of(host, request, rung, free, room, distances, devices[0])
        if question.key() in refused:
            continue  # fewer siblings that free no more cores: nothing gave way
        refused.add(question.key())
        chosen = _on_rung(host, request, rung, free, room, distances, devices)
        if chosen is not None:
            return _placement(
                host, request, chosen, free, room, distances, taken, rejections, fits
            )  # fmt: skip
        nodes = tuple(single_nodes(host, request, question, rung, free, taken, fits))
        miss = node_counts(request, question, rung, fits)
        if miss is None and nodes:
            miss = Miss(nodes[-1], most_vcpus(request, question, rung))
        rejections += nodes
        if miss is not None:
            rejections.append(miss.rejection)
            misses.append(miss)
    if request.keep_vcpus:
        odd = _odd_vcpus(host, request, free, room, distances, devices[0], fits)
        if odd is not None:
            rejections.append(odd.rejection)
            misses.insert(0, odd)
    raise refusal(host, request, free, rejections, headline(misses), fits)


def _on_rung(
    host: Host,
    request: GuestRequest,
    rung: Rung,
    free: Usable,
    room: dict[NodeIndex, Room],
    distances: Near,
    devices: Sequence[DeviceSet],
) -> _Chosen | None:
    """The best answer on one rung, over the sets of GPUs that are worth a try."""
    best: _Chosen | None = None
    question: Question | None = None
    for device_set in devices:
        question = question_of(host, request, rung, free, room, distances, device_set, question)
        found = answer(question)
        if found is None:
            return None
        chosen = _Chosen(rung, device_set, question, found)
        if best is None or _gpu_rank(chosen, request) < _gpu_rank(best, request):
            best = chosen
    return best


def _gpu_rank(chosen: _Chosen, request: GuestRequest) -> tuple[object, ...]:
    """GPUs near free cores first, then GPUs that stay together, then the nodes' cost."""
    cost = chosen.answer.cost
    return cost.device_class, chosen.devices.spread, sort_key(cost, request.policy)


def _placement(
    host: Host,
    request: GuestRequest,
    chosen: _Chosen,
    free: Usable,
    room: dict[NodeIndex, Room],
    distances: Near,
    taken: Taken,
    rejections: list[Rejection],
    fits: Fits,
) -> Placement:
    question, found, rung = chosen.question, chosen.answer, chosen.rung
    layout = request.layout
    cells = tuple(_cells(question, found, rung))
    nodes = tuple(question.supplies[node].cores.index for node, _ in cells)
    pins, vcpu_nodes = _pins(cells)
    own = tuple(dict.fromkeys(nodes))
    memory = memory_nodes(host, request, rung, own, room, distances)
    if memory is None:
        too_little = _too_little_memory(request, own)
        raise refusal(host, request, free, [*rejections, too_little], too_little, fits)
    floats = layout.pinning is Pinning.NONE
    vcpu_pus = CpuSet.from_bits(sum(pin.bits for pin in pins))
    places = (
        ThreadPlaces(None, (), ()) if floats else _threads(request, question, found, free, vcpu_pus)
    )
    if len(found.split) > 1 and len(question.supplies) <= MOST_REFUSED_NODES:
        rejections += single_nodes(host, request, question, rung, free, taken, fits)
    findings = placement_findings(
        host, request, chosen.devices.devices, taken, rung=rung, own=own, memory=memory,
        vcpu_pus=vcpu_pus, isolated=free.isolated,
    )  # fmt: skip
    return Placement(
        nodes=nodes,
        vcpu_pins=() if floats else pins,
        vcpu_nodes=vcpu_nodes,
        memory_nodes=() if layout.memory is MemoryBinding.AS_IT_WAS else memory,
        threads_per_core=rung.threads if layout.siblings is Siblings.EXPOSED else 1,
        emulator_pus=places.emulator_pus,
        iothread_pus=places.iothread_pus,
        devices=chosen.devices.devices,
        rung=rung_name(_span(found), rung),
        cost=terms(found.cost, request.policy),
        optimal=found.optimal,
        runners_up=_runners_up(question, found),
        rejections=tuple(dict.fromkeys(rejections)),
        findings=(*findings, *places.findings),
        gaps=(*_host_gaps(host, free, room), *taken.gaps, *chosen.devices.gaps),
    )


def _cells(
    question: Question, found: Answer, rung: Rung
) -> Iterator[tuple[int, tuple[Group, ...]]]:
    """(position of the node, its groups) of each cell; mixed kinds make two cells of a node."""
    for node, number in found.split:
        groups = question.supplies[node].take(number)
        if not rung.mixed:
            yield node, groups
            continue
        strong = tuple(group for group in groups if group.kind is not CoreKind.EFFICIENCY)
        weak = tuple(group for group in groups if group.kind is CoreKind.EFFICIENCY)
        yield from ((node, part) for part in (strong, weak) if part)


def _pins(
    cells: Sequence[tuple[int, tuple[Group, ...]]],
) -> tuple[tuple[CpuSet, ...], tuple[int, ...]]:
    pins: list[CpuSet] = []
    cell_of: list[int] = []
    for cell, (_, groups) in enumerate(cells):
        for group in groups:
            bits = group.pus
            while bits:
                pins.append(CpuSet.from_bits(bits & -bits))
                cell_of.append(cell)
                bits &= bits - 1
    return tuple(pins), tuple(cell_of)


def _threads(
    request: GuestRequest, question: Question, found: Answer, free: Usable, vcpu_pus: CpuSet
) -> ThreadPlaces:
    iothreads = request.guest.iothreads
    if request.emulator_policy is EmulatorPolicy.SHARE and request.emulator_pus is None:
        return shared_places(vcpu_pus, iothreads)
    if request.emulator_policy is EmulatorPolicy.NONE and request.emulator_pus is None:
        return ThreadPlaces(None, (), ())
    own = [node for node, _ in found.split]
    rows = [pull.exact for pull in (*question.pulls, *question.others)]

    def to_devices(node: int) -> tuple[int, int]:
        return sum(row[node] for row in rows), node

    def to_own(node: int) -> tuple[int, int]:
        return min(question.between[node][o] for o in own), node

    others = [node for node in range(len(question.supplies)) if node not in own]
    order = [*sorted(own, key=to_devices), *sorted(others, key=to_own)]
    return thread_places(free, order, len(own), vcpu_pus, iothreads, request.emulator_pus)


def _span(found: Answer) -> str:
    cost = found.cost
    if cost.nodes_spanned > 1:
        return "one package" if cost.packages_spanned == 1 else "across packages"
    return "one LLC" if cost.llcs_spanned == 1 else "one node"


def _runners_up(question: Question, found: Answer) -> tuple[RunnerUp, ...]:
    """Up to three other sets of nodes: the best without the first, without the last chosen node,
    and without the first of either answer."""
    split = found.split
    first = 1 << split[0][0]
    tries = [first] if len(split) == 1 else [first, 1 << split[-1][0]]
    answers: list[Answer] = []
    for without in tries:
        other = answer(question, without=without, budget=RUNNER_UP_BUDGET)
        if other is not None:
            answers.append(other)
    if answers:
        without = first | 1 << answers[0].split[0][0]
        other = answer(question, without=without, budget=RUNNER_UP_BUDGET)
        if other is not None:
            answers.append(other)
    distinct = {
        other.cost.nodes: other for other in answers if other.cost.nodes != found.cost.nodes
    }
    ranked = sorted(distinct.values(), key=lambda other: sort_key(other.cost, question.policy))
    own = terms(found.cost, question.policy)
    result = []
    for other in ranked:
        theirs = terms(other.cost, question.policy)
        decided = next(a.name for a, b in zip(own, theirs, strict=True) if a != b)
        result.append(RunnerUp(tuple(NodeIndex(n) for n in other.cost.nodes), theirs, decided))
    return tuple(result)


def _host_gaps(host: Host, free: Usable, room: dict[NodeIndex, Room]) -> Iterator[Gap]:
    if host.distances is None and len(host.nodes) > 1:
        yield Gap("distances between nodes", "the host tells none: 10 and 20 were taken")
    if free.nodes and not host.llcs:
        yield Gap("LLCs", "the host tells none, so cores were not kept within one")
    for node, its in room.items():
        if its.pages is None:
            yield Gap(f"node {node} memory", "unknown, so it was taken to suffice")


def _too_little_memory(request: GuestRequest, own: tuple[NodeIndex, ...]) -> Rejection:
    where = ",".join(str(node) for node in own)
    return Rejection(
        "memory",
        own,
        f"the {memory_text(request)} of memory fit on no allowed nodes beside node {where}",
        "lower the memory, or allow more nodes",
    )


def _odd_vcpus(
    host: Host,
    request: GuestRequest,
    free: Usable,
    room: dict[NodeIndex, Room],
    distances: Near,
    devices: DeviceSet,
    fits: Fits,
) -> Miss | None:
    """vCPUs to be kept that are not whole cores, so that the rungs of whole cores were left out;
    None where they are, or where whole cores would not help."""
    widest = max((c.free.bit_count() for node in free.nodes for c in node.cores), default=1)
    over = request.vcpus % widest
    if not over:
        return None
    whole = request.vcpus - over
    offers = [count for count in (whole, whole + widest) if _takes(request, count, fits)]
    if whole and not offers:
        less = replace(request, vcpus=whole)
        rung = next(rungs(less, free))
        question = question_of(host, less, rung, free, room, distances, devices)
        most = most_vcpus(less, question, rung)
        offers = [most] if _takes(request, most, fits) else []
    if not offers:
        return None
    return Miss(
        Rejection(
            "siblings",
            (),
            f"{request.vcpus} vCPUs are not whole cores of {widest} siblings",
            f"ask for {' or '.join(map(str, offers))} vCPUs{kept(request)}",
        ),
        offers[0],
    )


def _takes(request: GuestRequest, vcpus: int, fits: Fits) -> bool:
    return vcpus > 0 and fits(replace(request, vcpus=vcpus))
