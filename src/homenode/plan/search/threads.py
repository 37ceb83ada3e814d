"""Threads: CPUs for QEMU's own threads and the IOThreads, after the vCPUs are placed.

Order of places for the emulator: cores without vCPUs on the chosen nodes that the node's free GPUs
do not need, those nearest the devices first (on hybrid hosts efficiency cores first); cores there
that serve the emulators of other VMs; the host's own core, which is any other core without vCPUs,
first on nodes whose free GPUs do not need it, then on the VM's own; instead of a core of another
node, a core that serves other emulators; the host's housekeeping CPUs; free siblings of vCPU cores,
with a finding; the vCPUs' own CPUs, with a finding. Never isolated CPUs.
The emulator gets one core on each of at most EMULATOR_CORES chosen nodes: its main loop is one
thread, and a second node's core keeps its workers near that node's memory.

QEMU allocates the huge pages that are bound to a node on CPUs of that node, and does not start if
its own threads may not run on these (libvirt 9.0, thread-context): then the emulator has a CPU on
every node of the VM.

Each IOThread gets a core of its own after the emulator; where those run out a sibling there; then
it shares with the emulator.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from msgspec import Struct

from homenode.cpuset import CpuSet, list_members
from homenode.findings import Finding, finding
from homenode.machine.topology import CoreKind
from homenode.plan.search.supply import FreeCore, FreeCpus
from homenode.text import format_cpus, format_nodes

EMULATOR_CORES = 2


class ThreadCpus(Struct, frozen=True):
    """The CPUs of threads other than vCPUs."""

    emulator_pus: CpuSet | None  # None = not pinned
    iothread_pus: tuple[CpuSet, ...]  # per IOThread
    findings: tuple[Finding, ...] = ()


class ThreadRequest(Struct, frozen=True):
    """The threads to place, and the CPUs for them."""

    vcpu_pus: CpuSet
    iothreads: int
    emulator_pus: CpuSet | None
    # number of cores that an emulator may have alone on a node (position)
    own_cores: Callable[[int], int]
    service_cores: tuple[CpuSet, ...]  # CPUs of cores that serve other emulators, the nearest first
    housekeeping_pus: CpuSet
    housekeeping: bool  # the emulator uses `service_cores` or the host's core, on any node
    on_every_node: bool  # it needs a CPU on each of the VM's nodes


def place_on_vcpus(vcpu_pus: CpuSet, iothreads: int) -> ThreadCpus:
    """Place all threads on the vCPUs' own CPUs."""
    return ThreadCpus(vcpu_pus, (vcpu_pus,) * iothreads)


def place_threads(
    free: FreeCpus, node_order: Sequence[int], node_count: int, request: ThreadRequest
) -> ThreadCpus:
    """Return places next to the vCPUs. node_order: positions in free.nodes, the nearest to the
    devices first; the first `node_count` are the VM's nodes."""
    nodes = node_order[:node_count]
    spare_of_node = _own_spare_cores(free, nodes, request.vcpu_pus)
    far_nodes = node_order[node_count:]
    findings: tuple[Finding, ...] = ()
    emulator = request.emulator_pus
    if emulator is None and request.on_every_node and not request.housekeeping:
        emulator, findings = _reserve_on_every_node(free, request, spare_of_node)
    if emulator is None:
        emulator = (
            _choose_emulator_cores(free, request, spare_of_node, far_nodes)
            or request.housekeeping_pus
            or None
        )
        if emulator is None:
            emulator, findings = _choose_next_to_vcpus(free, nodes, request.vcpu_pus)
    if emulator is not None and request.on_every_node:
        findings = (*findings, *_report_off_nodes(free, emulator, nodes))
    if emulator is None or not request.iothreads:  # not pinned: no core is left for IOThreads
        return ThreadCpus(emulator, (), findings)
    spare = chain(*spare_of_node.values(), _list_far_cores(free, far_nodes, request.vcpu_pus))
    cores = list(islice((pus for pus in spare if not pus & emulator.bits), request.iothreads))
    # The first CPU of every core before the second of any.
    turns = range(max((pus.bit_count() for pus in cores), default=0))
    singles = (
        tuple(list_members(pus))[turn] for turn in turns for pus in cores if turn < pus.bit_count()
    )
    places = [CpuSet([pu]) for pu in islice(singles, request.iothreads)]
    places += [emulator] * (request.iothreads - len(places))
    return ThreadCpus(emulator, tuple(places), findings)


def _choose_emulator_cores(
    free: FreeCpus,
    request: ThreadRequest,
    spare_of_node: dict[int, list[int]],
    far_nodes: Sequence[int],
) -> CpuSet | None:
    """Return cores without vCPUs for the emulator, or None."""
    nodes = [node for node, cores in spare_of_node.items() if cores]
    if not request.housekeeping:
        chosen_nodes = list(islice((n for n in nodes if request.own_cores(n) > 0), EMULATOR_CORES))
        if chosen_nodes:
            return CpuSet.from_bits(sum(spare_of_node[node][0] for node in chosen_nodes))
    service = next(iter(request.service_cores), None)
    is_near = service and any(service <= free.nodes[node].pus for node in spare_of_node)
    if is_near or (service and request.housekeeping):
        return service
    spare = {node: spare_of_node[node] for node in nodes[:1]}
    spare |= {
        node: _list_spare_cores(free, node, request.vcpu_pus, frozenset()) for node in far_nodes
    }
    with_spare = (node for node, cores in spare.items() if cores)
    node = min(with_spare, key=lambda node: request.own_cores(node) <= 0, default=None)
    if node is None or (service and node in far_nodes):
        return service
    return CpuSet.from_bits(spare[node][0])


def _reserve_on_every_node(
    free: FreeCpus, request: ThreadRequest, spare_of_node: dict[int, list[int]]
) -> tuple[CpuSet | None, tuple[Finding, ...]]:
    """Return a core or idle siblings for the emulator on each node; None if a node has neither."""
    bits, siblings = 0, 0
    for node, spare in spare_of_node.items():
        serving = [core.bits for core in request.service_cores if core <= free.nodes[node].pus]
        cores = [*spare, *serving] if request.own_cores(node) > 0 else [*serving, *spare]
        idle = _free_siblings(free, (node,), request.vcpu_pus)
        if not cores and not idle:
            return None, ()
        bits |= cores[0] if cores else idle[0]
        siblings |= 0 if cores else idle[0]
    where = " on a node whose huge pages QEMU allocates"
    findings = (_report_siblings(CpuSet.from_bits(siblings), where),) if siblings else ()
    return CpuSet.from_bits(bits), findings


def _report_off_nodes(
    free: FreeCpus, emulator: CpuSet, nodes: Sequence[int]
) -> tuple[Finding, ...]:
    far_nodes = [
        free.nodes[node].index for node in nodes if emulator.isdisjoint(free.nodes[node].pus)
    ]
    if not far_nodes:
        return ()
    return (
        finding(
            "emulator-off-memory-node",
            format_nodes(far_nodes),
            observed="QEMU's own threads have no CPU there, but allocate that node's huge "
            "pages: libvirt 9.0 and newer may fail to start the VM "
            '("Setting CPU affinity failed")',
        ),
    )


def _choose_next_to_vcpus(
    free: FreeCpus, nodes: Sequence[int], vcpu_pus: CpuSet
) -> tuple[CpuSet | None, tuple[Finding, ...]]:
    siblings = _free_siblings(free, nodes, vcpu_pus)
    if siblings:
        pus = CpuSet.from_bits(siblings[0])
        return pus, (_report_siblings(pus),)
    if not vcpu_pus.bits & free.isolated.bits:
        shares = "no CPU remains for QEMU's own threads, so they run on CPUs of vCPUs"
        return vcpu_pus, (finding("emulator-shares-vcpus", format_cpus(vcpu_pus), observed=shares),)
    unpinned_text = "all remaining CPUs are isolated, so QEMU's own threads are not pinned"
    return None, (finding("emulator-not-pinned", "emulator", observed=unpinned_text),)


def _own_spare_cores(
    free: FreeCpus, nodes: Sequence[int], vcpu_pus: CpuSet
) -> dict[int, list[int]]:
    """Return spare cores of each of the VM's nodes, cores of its own LLCs first."""
    own_llcs = frozenset(
        shape.llc for node in nodes for pus, shape in free.nodes[node].cores if pus & vcpu_pus.bits
    )
    return {node: _list_spare_cores(free, node, vcpu_pus, own_llcs) for node in nodes}


def _list_far_cores(free: FreeCpus, nodes: Sequence[int], vcpu_pus: CpuSet) -> Iterator[int]:
    """Yield spare cores of other nodes."""
    for node in nodes:
        yield from _list_spare_cores(free, node, vcpu_pus, frozenset())


def _list_spare_cores(
    free: FreeCpus, node: int, vcpu_pus: CpuSet, llcs: frozenset[int]
) -> list[int]:
    """Return a node's whole cores without vCPUs and isolated CPUs, in order of preference:
    efficiency cores, then these LLCs, then the fullest LLCs, so that free LLCs stay whole."""
    bits = vcpu_pus.bits | free.isolated.bits
    cores = [(p, shape) for p, shape in free.nodes[node].cores if shape.is_whole and not p & bits]
    spare = Counter([shape.llc for _, shape in cores])

    def rank(core: FreeCore) -> tuple[bool, bool, int, int]:
        pus, shape = core
        strong = shape.kind is not CoreKind.EFFICIENCY
        return strong, shape.llc not in llcs, spare[shape.llc], pus & -pus

    return [pus for pus, _ in sorted(cores, key=rank)]


def _free_siblings(free: FreeCpus, nodes: Sequence[int], vcpu_pus: CpuSet) -> list[int]:
    """Return free CPUs on the cores of vCPUs, core by core."""
    return [
        idle
        for node in nodes
        for pus, _ in free.nodes[node].cores
        if pus & vcpu_pus.bits and (idle := pus & ~(vcpu_pus.bits | free.isolated.bits))
    ]


def _report_siblings(pus: CpuSet, where: str = "") -> Finding:
    return finding(
        "emulator-on-siblings",
        format_cpus(pus),
        observed=f"no core without vCPUs is free{where}, so QEMU's own threads share a core with a "
        "vCPU",
    )
