"""Log: what NCCL's own log says of the topology file and of its network, and how that differs from
what was computed.

RCCL's has the same words. What differs is an error of ours, another topology file, or another
machine: each is named.

Source: INFO and WARN messages in src/graph/{xml.cc,xml.h,topo.cc}.
"""

import re
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.cpuset import CpuSet
from homenode.findings import Finding, in_order
from homenode.nccl.explanation import Explanation, LibraryView, PairSeen, Processes
from homenode.nccl.graph import library_of
from homenode.nccl.log_facts import LogFacts
from homenode.nccl.log_network import (
    OF_RANKS,
    LogNetwork,
    Said,
    log_network_findings,
    network_of_log,
    network_stated,
)

_NCCL = re.compile(r"NCCL (INFO|WARN|TRACE) (.*)")
_INFO = "NCCL INFO "
_MANY = (*OF_RANKS, "GPU/", "comm ")  # of these none is about the file
_LOADED = "Loading topology file "
_WANTED = re.compile(r"NCCL_TOPO_FILE set by environment to (.*)")
_NOT_OPENED = re.compile(r"Could not open XML topology file (.*)")
_NO_PATH = re.compile(
    r"Could not find real path of \S*/([0-9a-fA-F]{4,8}(?::[0-9a-fA-F]{2}){2}\.\S)"
)
_NO_WORD = re.compile(r"KV Convert to int : could not find value of '([^']*)' in dictionary")
_BROKEN = re.compile(
    r"(XML Parse.*|XML Mismatch.*|XML Topology has wrong version.*"
    r"|Error : (?:XML parser|value|name|too many XML).*|Attribute \S+ of node \S+ not found.*)"
)
_IGNORED = re.compile(r"(Ignoring element .*|XML Parse : Ignoring extra attributes.*)")
_OF_GRAPH = re.compile(
    r"(=== System : maxBw|Pattern \d|Topology detection|Loading (?:un)?named topology|Trimming)"
)
_VIRTUAL = "ffff:ff:"
_MOST_SHOWN = 160


class LogVerdict(Struct, frozen=True, kw_only=True):
    """loaded: the files that NCCL read, each once. checked: what was looked at, for people."""

    loaded: tuple[str, ...]
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]


def read_log(text: str, source: str, *, expects_file: bool = False) -> LogVerdict:
    """What a log says. A log that says nothing either way is `inconclusive`.

    expects_file: NCCL was given a topology file; without one it is no fault to load none.
    """
    ends = [line[line.find("NCCL ") :] for line in text.split("\n")]
    first = dict(zip(reversed(ends), range(len(ends), 0, -1), strict=True))
    number_of: dict[str, int] = {}
    warned: list[Said] = []
    loaded: Counter[str] = Counter()
    lines = 0
    for end, count in Counter(ends).items():
        if end.startswith(_INFO):
            words = end[len(_INFO) :].strip()
        elif match := _NCCL.search(end):
            words = match[2].strip()
            if match[1] == "WARN":
                warned.append((first[end], words))
        else:
            continue
        lines += count
        number_of.setdefault(words, first[end])
        if words.startswith(_LOADED):
            loaded[words.removeprefix(_LOADED).strip()] += count
    said = [(number, words) for words, number in number_of.items()]
    network = network_of_log(said)
    said = [one for one in said if not one[1].startswith(_MANY)] or said[:1]
    about_file = _use(said, loaded, network, source, expects_file=expects_file)
    of_network = log_network_findings(network, source)
    findings = in_order([*about_file, *_troubles(said, warned, source), *of_network])
    files = loaded.total()
    stated = f"{source}: {lines} lines of NCCL's, topology files loaded {files} times"
    return LogVerdict(
        loaded=tuple(loaded),
        checked=(
            stated,
            *(f"loaded: {path}" for path in loaded),
            *(f"{source}: {one}" for one in network_stated(network)),
        ),
        findings=findings,
    )


def _use(
    said: list[Said], loaded: Counter[str], network: LogNetwork, source: str, *, expects_file: bool
) -> Iterator[Finding]:
    for number, path in _distinct(said, _NOT_OPENED):
        where = f"{source}:{number}"
        name = path.partition(" : ")[0]
        yield finding("nccl-log-not-opened", name, "a file that NCCL can open", path, where)
    for number, path in _distinct(said, _WANTED):
        if loaded and path not in loaded:
            observed, where = f"loaded {', '.join(loaded)}", f"{source}:{number}"
            yield finding("nccl-log-other-file", "NCCL_TOPO_FILE", path, observed, where)
    if loaded or any(_NOT_OPENED.match(line) for _, line in said):
        return
    has_graph = any(_OF_GRAPH.match(line) for _, line in said)
    if not expects_file and (has_graph or not network.is_silent):
        return
    if has_graph:
        found = "NCCL looked at its topology and loaded none"
        yield finding("nccl-log-not-used", "topology file", "one that NCCL loads", found, source)
        return
    found = "no line about the topology" if said else "no line of NCCL's at all"
    yield finding("nccl-log-silent", "topology file", "lines on NCCL's topology", found, source)


_TROUBLES = (
    ("nccl-log-broken", _BROKEN, "topology file", "a file that NCCL reads", None),
    ("nccl-log-no-device", _NO_PATH, "{}", "a device of the guest", "none at that bus id"),
    ("nccl-log-no-word", _NO_WORD, "{!r}", "a speed or class that NCCL knows", "one it does not"),
    ("nccl-log-ignored", _IGNORED, "topology file", "elements that NCCL reads", None),
)
"""Id, form, subject, expected and observed, which is None where it is what the line says."""


def _troubles(said: list[Said], warned: list[Said], source: str) -> Iterator[Finding]:
    for name, pattern, subject, expected, observed in _TROUBLES:
        # As INFO, NCCL says some of what is broken of attributes that it can do without.
        for number, words in _distinct(warned if pattern is _BROKEN else said, pattern):
            if pattern is _NO_PATH and words.lower().startswith(_VIRTUAL):
                continue  # no guest has a virtual switch
            where = f"{source}:{number}"
            yield finding(name, subject.format(words), expected, observed or words, where)


def _distinct(said: list[Said], pattern: re.Pattern[str]) -> tuple[Said, ...]:
    """What a pattern finds, each once: every rank says it."""
    found: dict[str, int] = {}
    for number, line in said:
        if match := pattern.match(line):
            found.setdefault(match[1].strip()[:_MOST_SHOWN], number)
    return tuple((number, words) for words, number in found.items())


def compare_log(
    explanation: Explanation, facts: LogFacts, source: str
) -> tuple[tuple[str, ...], tuple[Finding, ...]]:
    """What was compared, a line each, and what differs; the worst first."""
    view = view_for(explanation, facts)
    address = {number: rank.address for number, rank in facts.ranks.items()}
    gpu_of_device = {rank.device: rank.address for rank in facts.ranks.values()}
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
        (facts.buffers.total(), "buffers"),
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
    peers_off = facts.variables.get("NCCL_P2P_DISABLE") == "1"
    for path in facts.paths.values():
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
    logged = {gpu_of_device.get(device): cpus for device, cpus in facts.affinities.items()}
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
    for sender, receiver, transport, how in facts.transports:
        a, b = address.get(sender), address.get(receiver)
        pair = None if a is None or b is None else _pair(view, a, b)
        if pair is None or pair.peers or transport != "P2P":
            continue
        yield finding(
            "nccl-log-other-transport",
            f"{a} to {b}",
            expected=f"SHM: {pair.direct} is beyond the limit {pair.limit}",
            observed=f"{transport}/{how}",
            source=source,
        )


def _buffers(
    view: LibraryView, facts: LogFacts, gpu_of_device: dict[int, Bdf | None], source: str
) -> Iterator[Finding]:
    expected = {one.gpu: one.nodes for one in view.buffers if one.processes is Processes.SEVERAL}
    for (kind, node, device), count in facts.buffers.items():
        gpu = None if device is None else gpu_of_device.get(device)
        nodes = None if gpu is None else expected.get(gpu)
        if kind != "cumem" or nodes is None or node in nodes:
            continue
        yield finding(
            "nccl-log-other-buffers",
            str(gpu),
            expected=f"host buffers on node {', '.join(map(str, nodes))}",
            observed=f"{count} on node {node}",
            source=source,
        )


def ring_crossings(view: LibraryView, facts: LogFacts, source: str) -> Iterator[Finding]:
    """A ring that leaves a node at every hop although some nodes have several of its GPUs."""
    node_of = {gpu: node.numa_id for node in view.nodes for gpu in node.gpus}
    address = {number: rank.address for number, rank in facts.ranks.items()}
    seen = set()
    for ring in facts.rings.values():
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
