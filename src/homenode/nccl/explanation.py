"""Explanation: what NCCL will do in a machine, before it runs there: nodes, paths, P2P, threads,
buffers, and what memory allows.

Source of each statement: the file and line of NCCL 2.30.7 that does it, and of the version that
differs.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding
from homenode.gap import Gap
from homenode.nccl.graph import (
    NCCL_LIBRARIES,
    RCCL,
    BufferSource,
    CpuNode,
    Graph,
    Library,
    LinkSource,
    graph_of,
)
from homenode.nccl.guest_tree import GuestTree
from homenode.nccl.network import NetworkView, network_findings, network_of
from homenode.nccl.strict_reader import ReadTopology
from homenode.nccl.system import PathType
from homenode.wording import plural


class Processes(StrEnum):
    """Who drives the GPUs."""

    ONE = "one process with all GPUs"
    SEVERAL = "a process for each GPU"
    ONE_ON_FIRST = "one process bound to the first node"


class NodeSeen(Struct, frozen=True, kw_only=True):
    """A NUMA node to NCCL. numa_id: -1 where the kernel gives its GPUs none."""

    numa_id: int
    cpus: CpuSet
    gpus: tuple[Bdf, ...]
    from_file: bool


class PairSeen(Struct, frozen=True, kw_only=True):
    """Pairs of one path, in NCCL's words (NVL, PIX, PXB, PHB, SYS). path, gb_per_s: without P2P,
    through the host; direct: with it.

    peers: whether NCCL's own limit allows P2P; the driver must allow it as well.
    """

    path: str
    gb_per_s: float
    direct: str
    direct_gb_per_s: float
    peers: bool
    limit: str
    pairs: tuple[tuple[Bdf, Bdf], ...]


class ProcessBinding(Struct, frozen=True):
    """Where NCCL puts the threads of a GPU. cpus: None where it binds none."""

    gpu: Bdf
    cpus: CpuSet | None


class Buffers(Struct, frozen=True, kw_only=True):
    """Where the buffers that a GPU receives in are. nodes: one, or all that are possible."""

    processes: Processes
    gpu: Bdf
    nodes: tuple[int, ...]


class Ceiling(Struct, frozen=True, kw_only=True):
    """The most that memory allows of a ring, in bytes/s of bus bandwidth.

    Each rank's buffer is written once and read once: 2 x ranks x bus bandwidth. least: with all
    buffers that may be in one node there; most: spread as evenly as they can be.
    """

    processes: Processes
    least_bytes_per_s: float
    most_bytes_per_s: float


class Memory(Struct, frozen=True):
    """STREAM of each node, ascending by node. source: who measured it."""

    bytes_per_s: tuple[float, ...]
    source: str


class Statement(Struct, frozen=True, kw_only=True):
    """What is so, and which lines of NCCL make it so. libraries: that it is so of, of those of its
    view; () = of all."""

    subject: str
    text: str
    source: str
    libraries: tuple[str, ...] = ()


class LibraryView(Struct, frozen=True, kw_only=True):
    """What libraries that agree make of a machine. libraries: their names. ceilings: of data
    that goes through host memory, as without NVLink. network: None without NICs for verbs."""

    libraries: tuple[str, ...]
    nodes: tuple[NodeSeen, ...]
    pairs: tuple[PairSeen, ...]
    bindings: tuple[ProcessBinding, ...]
    buffers: tuple[Buffers, ...]
    ceilings: tuple[Ceiling, ...]
    statements: tuple[Statement, ...]
    network: NetworkView | None = None


class Explanation(Struct, frozen=True, kw_only=True):
    """The answer. views: for each set of libraries that agree. file: that NCCL is given."""

    machine: str
    file: str | None
    memory: Memory | None
    views: tuple[LibraryView, ...]
    findings: tuple[Finding, ...]
    gaps: tuple[Gap, ...]


def explain(
    tree: GuestTree, file: ReadTopology | None = None, memory: Memory | None = None
) -> Explanation:
    """What each library makes of a machine. memory: STREAM, of each of its nodes."""
    libraries = (RCCL,) if all(gpu.is_amd for gpu in tree.gpus) else NCCL_LIBRARIES
    alike: list[list[tuple[LibraryView, Graph]]] = []
    for library in libraries:
        graph = graph_of(tree, library, file)
        view = _view(graph, tree, memory)
        group = next((group for group in alike if _same(group[0][0], view)), None)
        if group is None:
            alike.append([(view, graph)])
        else:
            group.append((view, graph))
    graphs = [group[-1][1] for group in alike]
    return Explanation(
        machine=tree.source,
        file=None if file is None else file.source,
        memory=memory,
        views=tuple(_merged([view for view, _ in group]) for group in alike),
        findings=tuple(_findings(tree, graphs, file)),
        gaps=(*tree.gaps, *_port_gaps(tree)),
    )


def _port_gaps(tree: GuestTree) -> Iterator[Gap]:
    assumed = [nic for nic in tree.nics if nic.gb_per_s is not None and nic.name is not None]
    if assumed:
        reason = "taken for the most that the model can, and for up: --port-rate says it"
        yield Gap(f"speed of {plural(len(assumed), 'NIC port')}", reason)
    for nic in tree.nics:
        if nic.gb_per_s is None:
            reason = "its model is not known: its PCIe path alone counts; --port-rate says it"
            yield Gap(f"port of NIC {nic.address}", reason)


def named(library: str) -> str:
    """For people.

    >>> named("2.30"), named("RCCL")
    ('NCCL 2.30', 'RCCL')
    """
    return f"NCCL {library}" if library[:1].isdigit() else library


def statements_of(made: Explanation) -> tuple[str, ...]:
    """What the newest library does, a line each, with its source."""
    view = made.views[-1]
    name = named(view.libraries[-1])
    return tuple(f"{name}: {one.subject}: {one.text} [{one.source}]" for one in view.statements)


def _merged(views: Sequence[LibraryView]) -> LibraryView:
    """Views that agree, as one; statements that only some of them make say of which they are."""
    names = tuple(name for view in views for name in view.libraries)
    made: dict[Statement, list[str]] = {}
    for view in views:
        for statement in view.statements:
            made.setdefault(statement, []).extend(view.libraries)
    order = [statement.subject for view in views for statement in view.statements]
    statements = tuple(
        replace(statement, libraries=() if len(of) == len(names) else tuple(of))
        for statement, of in sorted(made.items(), key=lambda one: order.index(one[0].subject))
    )
    return replace(views[-1], libraries=names, statements=statements)


def _same(one: LibraryView, other: LibraryView) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("nodes", "pairs", "bindings", "buffers", "network")
    )


def _view(graph: Graph, tree: GuestTree, memory: Memory | None) -> LibraryView:
    library = graph.library
    nodes = tuple(
        NodeSeen(
            numa_id=cpu.numa_id,
            cpus=cpu.affinity,
            gpus=tuple(gpu.address for gpu in graph.gpus if gpu.cpu is cpu),
            from_file=cpu.from_file,
        )
        for cpu in graph.cpus
    )
    bindings = tuple(ProcessBinding(gpu.address, gpu.cpu.affinity or None) for gpu in graph.gpus)
    buffers = tuple(_buffers(graph, tree, bindings))
    return LibraryView(
        libraries=(library.name,),
        nodes=nodes,
        pairs=_pairs(graph),
        bindings=bindings,
        buffers=buffers,
        ceilings=() if memory is None else tuple(_ceilings(buffers, tree, memory)),
        statements=tuple(
            _cited(one, library) for one in _statements(graph, tree, nodes, bindings, buffers)
        ),
        network=None if graph.nets is None else network_of(graph.nets, tree),
    )


def _by_nvlink(graph: Graph) -> bool:
    """Whether NVLink carries every pair: host memory then limits nothing."""
    return bool(graph.pairs) and all(
        one.is_peer and one.path.type <= PathType.NVB for one in graph.pairs
    )


def _cited(statement: Statement, library: Library) -> Statement:
    """With RCCL's own source: its lines are others."""
    if library is not RCCL or statement.source.endswith("ROCm/rccl"):
        return statement
    words = statement.subject.partition(",")[0]
    return replace(statement, source=f"{_RCCL_SOURCES[words]} of ROCm/rccl")


_RCCL_SOURCES = {
    "nodes that NCCL sees": "src/graph/xml.cc (ncclTopoGetXmlFromSys)",
    "links of GPUs": "src/graph/xml.cc (ncclTopoGetXmlFromSys)",
    "threads": "src/graph/topo.cc (ncclTopoGetCpuAffinity) and src/init.cc (initTransportsRank)",
    "buffers": "src/transport/shm.cc (shmSendSetup, shmRecvSetup)",
}


def _pairs(graph: Graph) -> tuple[PairSeen, ...]:
    found: dict[tuple[PathType, float, PathType, float, bool], list[tuple[Bdf, Bdf]]] = {}
    limit = PathType.PXB
    for one in graph.pairs:
        host, direct, limit = one.through_host, one.path, one.limit
        key = (host.type, host.gb_per_s, direct.type, direct.gb_per_s, one.is_peer)
        found.setdefault(key, []).append((one.a, one.b))
    return tuple(
        PairSeen(
            path=path.name,
            gb_per_s=rate,
            direct=direct.name,
            direct_gb_per_s=direct_rate,
            peers=peers,
            limit=limit.name,
            pairs=tuple(pairs),
        )
        for (path, rate, direct, direct_rate, peers), pairs in sorted(found.items())
    )


def _buffers(
    graph: Graph, tree: GuestTree, bindings: Sequence[ProcessBinding]
) -> Iterator[Buffers]:
    """One process takes /dev/shm in every version; several take cuMem where the library does."""
    everywhere = tuple(node for node, _ in tree.vcpus_of_node)
    first = everywhere[:1]
    node_of = {gpu.address: gpu.node for gpu in tree.gpus}
    by_thread = {
        one.gpu: everywhere if one.cpus is None else tree.nodes_of(one.cpus) or everywhere
        for one in bindings
    }
    for gpu, nodes in by_thread.items():
        yield Buffers(processes=Processes.ONE, gpu=gpu, nodes=nodes)
    for gpu, nodes in by_thread.items():
        own = node_of[gpu]
        if graph.library.buffers is BufferSource.HOST_NUMA_ID:
            nodes = (0,) if own is None else (own,)
        yield Buffers(processes=Processes.SEVERAL, gpu=gpu, nodes=nodes)
    if all(node is None for node in node_of.values()) and len(everywhere) > 1:
        for gpu in by_thread:
            yield Buffers(processes=Processes.ONE_ON_FIRST, gpu=gpu, nodes=first)


def _ceilings(buffers: Sequence[Buffers], tree: GuestTree, memory: Memory) -> Iterator[Ceiling]:
    stream = dict(zip((node for node, _ in tree.vcpus_of_node), memory.bytes_per_s, strict=False))
    for processes in Processes:
        ours = [one for one in buffers if one.processes is processes]
        if not ours or any(node not in stream for one in ours for node in one.nodes):
            continue
        yield Ceiling(
            processes=processes,
            least_bytes_per_s=min(
                stream[node] / (2 * sum(node in one.nodes for one in ours))
                for node in {node for one in ours for node in one.nodes}
            ),
            most_bytes_per_s=_spread(ours, stream),
        )


def _spread(buffers: Sequence[Buffers], stream: dict[int, float]) -> float:
    """With those that may be anywhere put where they cost least, one after another."""
    counts = dict.fromkeys(stream, 0)
    for one in sorted(buffers, key=lambda one: len(one.nodes)):
        best = min(one.nodes, key=lambda node: ((counts[node] + 1) / stream[node], node))
        counts[best] += 1
    return min(stream[node] / (2 * count) for node, count in counts.items() if count)


def _statements(
    graph: Graph,
    tree: GuestTree,
    nodes: Sequence[NodeSeen],
    bindings: Sequence[ProcessBinding],
    buffers: Sequence[Buffers],
) -> Iterator[Statement]:
    library = graph.library
    without = [node for node in nodes if node.numa_id == -1]
    each = (f"node {node.numa_id} with {plural(len(node.gpus), 'GPU')}" for node in nodes)
    text = f"{len(nodes)}: {', '.join(each)}"
    if tree.nic_nodes:
        numbers = ", ".join(map(str, tree.nic_nodes))
        text += f"; and node {numbers} with NICs alone, where NCCL uses them"
    yield Statement(
        subject="nodes that NCCL sees", text=text, source="src/graph/xml.cc:754-775, 2.30.7"
    )
    if _by_nvlink(graph) and library is not RCCL:
        rates = sorted({one.path.gb_per_s for one in graph.pairs})
        yield Statement(
            subject="NVLink",
            text=f"carries every pair, {rates[0]:g} GB/s: rings and trees stay on it, where the "
            "driver allows P2P; with NVSwitches and Hopper or newer NVLS as well, where Fabric "
            "Manager runs. Without, data goes through host memory",
            source="src/graph/paths.cc (ncclTopoSetPaths), src/graph/search.cc (ncclTopoCompute), "
            "2.30.7",
        )
    if len(nodes) > 1:
        rate = library.gb_per_s_between_cpus(*_identity(graph.cpus[0]))
        yield Statement(
            subject="link between nodes",
            text=f"{rate:g} GB/s by the CPU's model",
            source=library.cpu_link_source,
        )
    link = (
        "src/graph/xml.cc:663-676, 2.30.7"
        if library.link_source is LinkSource.DRIVER
        else "src/graph/xml.cc (ncclTopoGetXmlFromSys), 2.20.5 and 2.26.2"
    )
    rates = sorted({gpu.link_gb_per_s for gpu in graph.gpus})
    stated = ", ".join(f"{rate:g} GB/s" for rate in rates)
    how = "the file" if all(gpu.from_file for gpu in graph.gpus) else str(library.link_source)
    yield Statement(subject="links of GPUs", text=f"{stated}, from {how}", source=link)
    yield from _peer_statements(graph)
    unbound = [one.gpu for one in bindings if one.cpus is None]
    if unbound:
        reason = (
            "the kernel gives no node, so the mask of CPUs is empty"
            if without
            else "their node has no CPUs"
        )
        yield Statement(
            subject="threads",
            text=f"bound for {len(bindings) - len(unbound)} of {len(bindings)} GPUs: "
            f"{reason}, and an empty mask skips binding",
            source="src/graph/xml.cc:482 and src/init.cc:1158-1161, 2.30.7",
        )
    else:
        yield Statement(
            subject="threads",
            text="bound to the CPUs of each GPU's node, before the proxy threads start, "
            "which inherit it",
            source="src/init.cc:1529, 2.30.7",
        )
    for processes in dict.fromkeys(one.processes for one in buffers):
        yield _buffer_statement(
            library, processes, [b for b in buffers if b.processes is processes]
        )


def _identity(cpu: CpuNode) -> tuple[str | None, str | None, int | None, int | None]:
    return cpu.architecture, cpu.vendor, cpu.family, cpu.model


def _peer_statements(graph: Graph) -> Iterator[Statement]:
    if not graph.pairs:
        return
    limit = graph.pairs[0].limit
    peers = [one for one in graph.pairs if one.is_peer]
    far = [one for one in graph.pairs if not one.is_peer]
    text = f"{len(peers)} of {len(graph.pairs)} pairs are within NCCL's limit {limit.name}"
    if far:
        kinds = sorted({one.path.type for one in far})
        farther = " and ".join(kind.name for kind in kinds)
        text += f"; the others are {farther}, and go through host memory"
    if peers:
        text += "; the driver must allow them too, and NCCL_P2P_DISABLE must not be set"
    source = (
        "src/graph/paths.cc (ncclTopoCheckP2p) of ROCm/rccl"
        if graph.library.p2p_through_cpus
        else "src/graph/paths.cc:356, 2.30.7"
    )
    yield Statement(subject="P2P", text=text, source=source)


def _buffer_statement(
    library: Library, processes: Processes, buffers: Sequence[Buffers]
) -> Statement:
    places = {one.nodes for one in buffers}
    nodes = CpuSet(node for place in places for node in place)
    if all(len(place) == 1 for place in places):
        where = f"node {nodes}" if len(places) == 1 else f"each GPU's own, of nodes {nodes}"
    else:
        where = f"wherever its threads run then, of nodes {nodes}"
    if processes is Processes.SEVERAL and library.buffers is BufferSource.HOST_NUMA_ID:
        return Statement(
            subject=f"buffers, {processes}",
            text=f"{where}: cuMem at HOST_NUMA_ID, a negative one is node 0; where sysfs says -1, "
            "CUDA 13.0 returned 0 on one node; on several it is not known. Needs driver 12.6 or "
            "newer, and a node with CPUs; else /dev/shm as for one process. Since 2.26.3 each "
            "process tries it for itself: where it works for some alone, jobs fail "
            "(NCCL_CUMEM_HOST_ENABLE=0)",
            source="src/include/alloc.h:74-79, src/transport/shm.cc:394, "
            "src/misc/cudawrap.cc:56-70, 2.30.7; since 2.24; NVIDIA/nccl issue 2190",
        )
    source = "src/transport/shm.cc:56, 105, 134, 138, src/os/linux.cc:789, 2.30.7"
    if processes is Processes.ONE_ON_FIRST:
        return Statement(
            subject=f"buffers, {processes}",
            text=f"{where}: what the study's published script does where all GPUs show -1",
            source=f"{source}; run script of the study",
        )
    return Statement(
        subject=f"buffers, {processes}",
        text=f"{where}: a file in /dev/shm, allocated by the receiver's threads",
        source=source,
    )


def _findings(
    tree: GuestTree, graphs: Sequence[Graph], file: ReadTopology | None
) -> Iterator[Finding]:
    newest = graphs[-1]
    without = [gpu.address for gpu in newest.gpus if not gpu.cpu.affinity]
    if without and len(tree.vcpus_of_node) > 1:
        yield finding(
            "nccl-gpus-without-node",
            f"{len(without)} of {len(tree.gpus)} GPUs",
            expected="a node for each GPU, in sysfs or in a topology file",
            observed=f"numa_node -1 in a machine of {len(tree.vcpus_of_node)} nodes",
            source=tree.source,
        )
    if file is not None and not any(gpu.from_file for gpu in newest.gpus):
        yield finding(
            "nccl-file-not-used",
            file.source,
            expected="bus ids of this machine's GPUs",
            observed="none of them",
            source=tree.source,
        )
    yield from network_findings(newest.nets, tree, has_file=file is not None)
    for graph in graphs:
        if _near_is_no_faster(graph):
            yield finding(
                "nccl-ring-crosses-nodes",
                f"ring of {named(graph.library.name)}",
                expected="paths within a node that are faster than those between nodes",
                observed=f"{graph.pairs[0].through_host.gb_per_s:g} GB/s for both",
                source=tree.source,
            )


def _near_is_no_faster(graph: Graph) -> bool:
    """Several nodes with several GPUs, no P2P, and one bandwidth for all pairs.

    Seen with ports of the 4th generation on four nodes: order 0 2 4 6 1 5 3.
    """
    rates = {one.through_host.gb_per_s for one in graph.pairs}
    kinds = {one.through_host.type for one in graph.pairs}
    return (
        len(rates) == 1
        and {PathType.PHB, PathType.SYS} <= kinds
        and not any(one.is_peer for one in graph.pairs)
    )
