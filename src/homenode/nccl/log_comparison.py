"""LogComparison: NCCL's own log against what was computed of the machine before.

What differs is an error of ours, another topology file, or another machine: each is named.
"""

from collections.abc import Iterator

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding, in_order
from homenode.nccl.explanation import Explanation, LibraryView, PairSeen, Processes
from homenode.nccl.library import library_of
from homenode.nccl.log_facts import LogFacts


def compare_log(
    explanation: Explanation, facts: LogFacts, source: str
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """What was compared, a line each, and what differs; the worst first."""
    view = view_for(explanation, facts)
    address = {rank.rank: rank.address for rank in facts.ranks}
    gpu_of_device = {rank.device: rank.address for rank in facts.ranks}
    checked = [
        f"{source}: NCCL {facts.version or 'of unknown version'}, compared with what "
        f"{' and '.join(view.libraries)} computes of {explanation.machine}"
    ]
    found = [
        *_nodes(view, facts, source),
        *_paths(view, facts, source),
        *_affinities(view, facts, gpu_of_device, source),
        *_transports(view, facts, address, source),
        *_buffers(view, facts, gpu_of_device, source),
        *ring_crossings(view, facts, source),
    ]
    counts = (
        (len(facts.cpu_nodes), "nodes"),
        (len(facts.paths), "paths"),
        (len(facts.affinities), "affinities"),
        (len(facts.transports), "transports"),
        (sum(one.count for one in facts.buffers), "buffers"),
        (len(facts.rings), "rings"),
    )
    checked.append(f"{source}: " + ", ".join(f"{count} {what}" for count, what in counts))
    checked += [f"{source}: {gap}" for gap in facts.gaps]
    return tuple(checked), in_order(found)


def view_for(explanation: Explanation, facts: LogFacts) -> LibraryView:
    """What the log's version computes; the newest where the log does not name it."""
    library = None if facts.version is None else library_of(facts.version)
    for view in explanation.views:
        if library is not None and library.name in view.libraries:
            return view
    return explanation.views[-1]


def _nodes(view: LibraryView, facts: LogFacts, source: str) -> Iterator[Finding]:
    expected = {node.numa_id for node in view.nodes}
    # A node with a NIC alone is one as well; what has no GPU is not computed.
    if facts.cpu_nodes and not expected <= set(facts.cpu_nodes):
        yield finding(
            "nccl-log-other-nodes",
            "NUMA nodes",
            expected=", ".join(map(str, sorted(expected))),
            observed=", ".join(map(str, sorted(facts.cpu_nodes))),
            source=source,
        )


def _pair(view: LibraryView, a: Bdf, b: Bdf) -> PairSeen | None:
    return next((one for one in view.pairs if (a, b) in one.pairs or (b, a) in one.pairs), None)


def _paths(view: LibraryView, facts: LogFacts, source: str) -> Iterator[Finding]:
    peers_off = dict(facts.variables).get("NCCL_P2P_DISABLE") == "1"
    for path in facts.paths:
        pair = _pair(view, path.a, path.b)
        if pair is None:
            continue
        # The table is printed after paths without P2P have been diverted through the CPU.
        allowed = {pair.path} if peers_off or not pair.peers else {pair.direct}
        allowed |= {pair.path}
        if path.type not in allowed:
            yield finding(
                "nccl-log-other-path",
                f"{path.a} to {path.b}",
                expected=" or ".join(sorted(allowed)),
                observed=path.type,
                source=source,
            )


def _affinities(
    view: LibraryView, facts: LogFacts, gpu_of_device: dict[int, Bdf | None], source: str
) -> Iterator[Finding]:
    expected = {one.gpu: one.cpus or CpuSet() for one in view.bindings}
    logged = {gpu_of_device.get(device): cpus for device, cpus in facts.affinities}
    for gpu, cpus in expected.items():
        # Up to 2.27 NCCL says nothing where it binds nothing.
        there = logged.get(gpu, CpuSet() if facts.affinities or facts.has_graph else None)
        if there is None or gpu not in gpu_of_device.values():
            continue
        # A process that may use fewer CPUs leaves fewer.
        if bool(there) != bool(cpus) or not there <= cpus:
            yield finding(
                "nccl-log-other-affinity",
                str(gpu),
                expected=f"threads on CPUs {cpus}" if cpus else "threads that are not bound",
                observed=f"threads on CPUs {there}" if there else "threads that are not bound",
                source=source,
            )


def _transports(
    view: LibraryView, facts: LogFacts, address: dict[int, Bdf | None], source: str
) -> Iterator[Finding]:
    for way in facts.transports:
        a, b = address.get(way.sender), address.get(way.receiver)
        pair = None if a is None or b is None else _pair(view, a, b)
        if pair is None or pair.peers or way.transport != "P2P":
            continue
        yield finding(
            "nccl-log-other-transport",
            f"{a} to {b}",
            expected=f"SHM: {pair.direct} is beyond the limit {pair.limit}",
            observed=f"{way.transport}/{way.how}",
            source=source,
        )


def _buffers(
    view: LibraryView, facts: LogFacts, gpu_of_device: dict[int, Bdf | None], source: str
) -> Iterator[Finding]:
    expected = {one.gpu: one.nodes for one in view.buffers if one.processes is Processes.SEVERAL}
    for buffers in facts.buffers:
        gpu = None if buffers.device is None else gpu_of_device.get(buffers.device)
        nodes = None if gpu is None else expected.get(gpu)
        if buffers.kind != "cumem" or nodes is None or buffers.node in nodes:
            continue
        yield finding(
            "nccl-log-other-buffers",
            str(gpu),
            expected=f"host buffers on node {', '.join(map(str, nodes))}",
            observed=f"{buffers.count} on node {buffers.node}",
            source=source,
        )


def ring_crossings(view: LibraryView, facts: LogFacts, source: str) -> Iterator[Finding]:
    """A ring that leaves a node at every hop although some nodes have several of its GPUs."""
    node_of = {gpu: node.numa_id for node in view.nodes for gpu in node.gpus}
    address = {rank.rank: rank.address for rank in facts.ranks}
    seen = set()
    for ring in facts.rings:
        gpus = [address.get(rank) for rank in ring]
        nodes = [node_of[gpu] for gpu in gpus if gpu is not None and gpu in node_of]
        if len(nodes) != len(ring) or len(set(nodes)) in (1, len(nodes)):
            continue
        hops = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
        if all(a != b for a, b in hops):
            seen.add(ring)
    if seen:
        order = " ".join(map(str, min(seen)))
        yield finding(
            "nccl-ring-crosses-nodes",
            f"{len(seen)} of {len(facts.rings)} rings",
            expected=f"{len(view.nodes)} hops between nodes, one for each node",
            observed=f"every hop: {order}",
            source=source,
        )
