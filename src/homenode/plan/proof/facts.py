"""Facts: what a proof states of its host, compared with the host itself."""

from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, MemoryKind, NumaNode, with_certain_nodes
from homenode.plan.proof.statement import Facts, Proof, Step

_LOCAL, _REMOTE = 10, 20


def wrong_facts(host: Host, proof: Proof) -> list[str]:
    """Facts that the host contradicts, a sentence each: expected against found."""
    host = with_certain_nodes(host)
    facts = proof.facts
    nodes = [node for node in host.nodes if node.pus]
    indices = [int(node.index) for node in nodes]
    if facts.nodes != indices:
        return [f"nodes: expected {indices}, found {facts.nodes}"]
    found = [*_places(host, facts, nodes), *_devices(host, facts, nodes)]
    for step in proof.steps:
        if step.supply:
            found += _supplies(host, facts, step, nodes)
    return found


def _far(host: Host, a: int, b: int) -> int:
    """Distance between two positions, the worse of both directions."""
    if host.distances is None:
        return _LOCAL if a == b else _REMOTE
    return max(host.distances[a][b], host.distances[b][a])


def _package(host: Host, position: int) -> int:
    package = host.nodes[position].package
    return -1 - position if package is None else int(package)


def _places(host: Host, facts: Facts, nodes: list[NumaNode]) -> Iterator[str]:
    at = [host.nodes.index(node) for node in nodes]
    for i, a in enumerate(at):
        expected = [_far(host, a, b) for b in at]
        if facts.distances[i] != expected:
            found = facts.distances[i]
            yield f"distances of node {facts.nodes[i]}: expected {expected}, found {found}"
        for j, b in enumerate(at[:i]):
            is_one = facts.packages[i] == facts.packages[j]
            if (_package(host, a) == _package(host, b)) != is_one:
                yield f"packages: nodes {facts.nodes[j]} and {facts.nodes[i]} differ from the host"
    position = {int(node.index): number for number, node in enumerate(host.nodes)}
    for home in facts.homes:
        own = position.get(home.host_node)
        if own is None:
            yield f"homes: expected a node of the host, found {home.host_node}"
            continue
        if home.distances != [_between(host, own, other) for other in at]:
            yield f"homes: expected package distances of node {home.host_node}, found others"


def _between(host: Host, a: int, b: int) -> int:
    """Least distance between the packages of two nodes; 10 for one package."""
    mine, its = (
        [i for i in range(len(host.nodes)) if _package(host, i) == _package(host, one)]
        for one in (a, b)
    )
    return _LOCAL if mine == its else min(_far(host, i, j) for i in mine for j in its)


def _devices(host: Host, facts: Facts, nodes: list[NumaNode]) -> Iterator[str]:
    every = host.devices_of_kind(DeviceKind.GPU)
    position = {int(node.index): number for number, node in enumerate(host.nodes)}
    at = [host.nodes.index(node) for node in nodes]
    for number, one in enumerate(facts.devices):
        name = one.bdf or f"device {number}"
        of_host = None
        if one.position is not None:
            of_host = every[one.position] if one.position < len(every) else None
            if of_host is None or str(of_host.bdf) != one.bdf:
                yield f"GPU {name}: expected GPU {one.position} of the host, found another"
                continue
        if number not in facts.given and of_host is not None and facts.gives_a_choice:
            is_known = of_host.node in position and facts.locality != "ignore"
            if one.host_node != (of_host.node if is_known else None):
                yield f"GPU {name}: expected node {of_host.node}, found {one.host_node}"
                continue
        far = [0] * len(nodes)
        if one.host_node is not None:
            if one.host_node not in position:
                yield f"{name}: expected a node of the host, found {one.host_node}"
                continue
            far = [_far(host, position[one.host_node], other) for other in at]
        functions = one.distances[0] // far[0] if far[0] else 0
        if one.distances != [functions * distance for distance in far]:
            yield f"{name}: expected distances in proportion to {far}, found {one.distances}"
        known = one.host_node in facts.nodes
        home = facts.nodes.index(one.host_node or 0) if known else len(nodes)
        is_gpu = one.node is not None or (of_host is not None and number not in facts.given)
        if is_gpu and one.node != (None if one.host_node is None else home):
            yield f"{name}: expected to be at home on {one.host_node}, found another node"


def _pus(text: str) -> int:
    try:
        return CpuSet.parse(text).bits
    except HomenodeError:
        return 0


def _in_use(host: Host) -> int:
    """PUs that a VM may be kept from: offline ones, and cores on which a domain has threads."""
    barred = sum(1 << pu.index for pu in host.pus if not (pu.online and pu.allowed))
    pinned = 0
    for domain in host.domains:
        pinned |= CpuSet.union(domain.pins).bits
    return barred | sum(core.pus.bits for core in host.cores if core.pus.bits & pinned)


def _supplies(host: Host, facts: Facts, step: Step, nodes: list[NumaNode]) -> Iterator[str]:
    """Each node gives what is not barred, and no more memory than it has."""
    without_pus = sum(
        node.memory_bytes or 0
        for node in host.nodes
        if not node.pus and node.memory_kind is not MemoryKind.GPU
    )
    barred = _pus(step.barred)
    bad = barred & ~_pus(facts.reserved) & ~_in_use(host)
    if bad:
        yield f"PUs {CpuSet.from_bits(bad)}: expected them free, found them barred"
    for number, node in enumerate(nodes):
        cores = [core for core in host.cores if core.pus <= node.pus]
        kinds = [core for core in cores if (core.kind and str(core.kind)) in step.kinds]
        free = [(core.pus.bits & ~barred).bit_count() for core in kinds]
        whole = sum(count == len(core.pus) for count, core in zip(free, kinds, strict=True))
        groups = sum(
            count // step.threads if step.counts_pus else count == len(core.pus) >= step.threads
            for count, core in zip(free, kinds, strict=True)
        )
        pages = step.free_pages[number]
        room = groups
        if pages is not None and step.memory == "follows":
            room = min(groups, pages * step.groups // step.pages)
        elif pages == 0 and step.memory == "together":
            room = 0
        for what, found, expected in (
            ("groups", step.supply[number], groups),
            ("room for groups", step.room[number], room),
            ("whole cores", step.cores[number], min(whole, room)),
        ):
            if found != expected:
                yield f"node {node.index}: expected {expected} {what}, found {found}"
        if step.outcome == "chosen":
            yield from _costs(facts, step, number, whole)
        if pages is None or node.memory_bytes is None:
            continue
        pools = sum(pool.page_bytes * pool.total_pages for pool in node.page_pools)
        most = node.memory_bytes + pools + without_pus
        if pages * facts.page_bytes > most:
            yield f"node {node.index}: expected at most {most} bytes, found {pages} pages"


def _costs(facts: Facts, step: Step, number: int, cores: int) -> Iterator[str]:
    """The costs of a node that are those of its whole cores and pages."""
    pages = step.free_pages[number] or 0
    for name, cost in (("balance_cores", cores), ("balance_memory", pages * facts.page_bytes)):
        row = step.costs.get(name, [[]] * len(facts.nodes))[number]
        if step.room[number] and {abs(one) for one in row} != {cost}:
            yield f"{name} of node {facts.nodes[number]}: expected {cost} or -{cost}, found {row}"
