"""The memory part of a host.toml: NUMA nodes, their memory and huge pages, and distances."""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.machine.description.cpus import CoreSlot
from homenode.machine.description.document import (
    MAX_NODES,
    DistancesTable,
    HostDocument,
    NodeTable,
    PagesTable,
)
from homenode.machine.topology import LOCAL_DISTANCE, PagePool
from homenode.toml_text import Count, Size, decode_value, refusal


class NodeSlot(Struct, frozen=True):
    """One node. package: whose memory it is, None = unknown. gpu: a device's name.

    is_device_memory: CXL, persistent or high-bandwidth memory, online from a DAX device.
    """

    index: int
    package: int | None
    has_cores: bool
    memory_bytes: int
    free_bytes: int
    page_pools: tuple[PagePool, ...]
    is_device_memory: bool
    gpu: str | None
    generic_initiator: bool


def tables_of_nodes(file: HostDocument) -> dict[int, NodeTable]:
    """The [[node]] of each node number that one names."""
    tables: dict[int, NodeTable] = {}
    for table in file.node:
        index = table.index
        numbers: Sequence[int] = index if isinstance(index, tuple) else ()
        if isinstance(index, str):
            numbers = tuple(CpuSet.parse(index, f"{table.source}: {table.name_of('index')}"))
        elif isinstance(index, int):
            numbers = (index,)
        if not numbers or min(numbers) < 0 or max(numbers) >= MAX_NODES:
            raise table.refusal("index", f'node numbers below {MAX_NODES}, 4 or "5-11"', index)
        if tables.keys() & set(numbers):
            raise table.refusal("index", "each node once", index)
        tables |= dict.fromkeys(numbers, table)
    return tables


def parse_nodes(
    file: HostDocument, tables: Mapping[int, NodeTable], cores: Sequence[CoreSlot]
) -> tuple[NodeSlot, ...]:
    """Every node, ascending: those with cores, and those that only a [[node]] names."""
    packages: dict[int, set[int]] = {}
    for core in cores:
        packages.setdefault(core.node, set()).add(core.package)
    plain = NodeTable(index=())
    plain.locate(file.source, "node")
    return tuple(
        _node(file, tables.get(index, plain), index, packages.get(index, set()), cores)
        for index in sorted(packages.keys() | tables.keys())
    )


def _node(
    file: HostDocument,
    table: NodeTable,
    index: int,
    of_cores: Collection[int],
    cores: Sequence[CoreSlot],
) -> NodeSlot:
    package = next(iter(of_cores)) if len(of_cores) == 1 else None
    known = {core.package for core in cores}
    stated = table.package
    if stated is not None and (stated not in known or (of_cores and stated not in of_cores)):
        raise table.refusal("package", f"one of the packages {sorted(of_cores or known)}", stated)
    memory: int | None = table.memory
    if memory is None:
        memory = file.memory_per_node if of_cores else 0
    if memory is None:
        raise file.refusal("memory_per_node", f"the memory of each node, node {index} too", None)
    own_pools = table.hugepages is not None
    where = table.name_of("hugepages") if own_pools else "hugepages_per_node"
    given = table.hugepages if table.hugepages is not None else file.hugepages_per_node
    pools = _page_pools(file.source, where, given) if memory else ()
    reserved = sum(pool.page_bytes * pool.total_pages for pool in pools)
    if reserved > memory:
        expected = f"huge pages within {memory} bytes of node {index}"
        raise refusal(file.source, where, expected, reserved)
    free = table.memory_free
    if free is not None and free > memory - reserved:
        raise table.refusal("memory_free", f"at most {memory - reserved} bytes", int(free))
    if table.gpu is not None and of_cores:
        raise table.refusal("gpu", "a node without cores", f"node {index} with cores")
    # The kernel shows what memory is only of a DAX device's node ("other") and of a GPU's.
    if table.kind and table.gpu is not None:
        raise table.refusal("kind", "no kind next to gpu", table.kind)
    return NodeSlot(
        index=index,
        package=package if stated is None else stated,
        has_cores=bool(of_cores),
        memory_bytes=int(memory),
        free_bytes=memory - reserved if free is None else int(free),
        page_pools=pools,
        is_device_memory=bool(table.kind),
        gpu=table.gpu,
        generic_initiator=table.generic_initiator,
    )


def _page_pools(source: str, where: str, given: Mapping[str, object]) -> tuple[PagePool, ...]:
    """Pools of a table such as { "2MiB" = 512, "1GiB" = { total = 64, free = 8 } }."""
    pools = []
    for size, pages in given.items():
        key = f"{where}.{size}"
        page_bytes = int(decode_value(size, Size, source, key))
        if page_bytes < 4096 or page_bytes & (page_bytes - 1):
            raise refusal(source, key, "a page size, a power of two", size)
        if not isinstance(pages, Mapping):
            total = free = decode_value(pages, Count, source, key)
        else:
            counts = decode_value(pages, PagesTable, source, key)
            total = counts.total
            free = total if counts.free is None else counts.bounded("free", counts.free, 0, total)
        pools.append(PagePool(page_bytes, total, free))
    return tuple(sorted(pools))


def parse_distances(
    file: HostDocument, nodes: Sequence[NodeSlot]
) -> tuple[tuple[int, ...], ...] | None:
    """Shape (nodes, nodes), [from][to] ascending; None for a host that gives none ("none")."""
    given = file.distances
    if isinstance(given, DistancesTable):
        return tuple(tuple(_distance(a, b, given) for b in nodes) for a in nodes)
    if isinstance(given, str):
        return None
    for i, row in enumerate(given):
        if len(row) != len(nodes):
            expected = f"{len(nodes)} distances, one per node"
            raise file.refusal(f"distances[{i}]", expected, row)
        if row[i : i + 1] != (LOCAL_DISTANCE,):
            expected = f"{LOCAL_DISTANCE} from node to itself"
            raise file.refusal(f"distances[{i}]", expected, row[i] if i < len(row) else row)
    if len(given) != len(nodes):
        raise file.refusal("distances", f"{len(nodes)} rows, one per node", len(given))
    return given


def _distance(a: NodeSlot, b: NodeSlot, classes: DistancesTable) -> int:
    if a.index == b.index:
        return LOCAL_DISTANCE
    if not a.has_cores and not b.has_cores:
        return classes.between_memory
    same = a.package is not None and a.package == b.package
    if a.has_cores and b.has_cores:
        return classes.same_package if same else classes.other_package
    return classes.memory_same_package if same else classes.memory_other_package
