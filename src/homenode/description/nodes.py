"""The memory part of a host.toml: NUMA nodes, their memory and huge pages, and distances."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.description.cpus import MAX_NODES, CoreSlot
from homenode.description.table import Table
from homenode.topology import LOCAL_DISTANCE, MemoryKind, PagePool

NODE_KEYS = ("memory_per_node", "hugepages_per_node", "node", "distances")
NODE_TABLE_KEYS = tuple(
    """
    index package cores memory memory_free hugepages kind gpu generic_initiator
""".split()
)
_DISTANCES = {
    # Source of the first two: most two-package x86 hosts (Intel 10/12/21); the others are guesses.
    "same_package": 12,
    "other_package": 21,
    "memory_same_package": 20,
    "memory_other_package": 30,
    "between_memory": 40,
}
_DEVICE_MEMORY = MemoryKind.OTHER.value
_MAX_DISTANCE = 255  # ACPI 6.5, 5.2.17: 255 = unreachable


@dataclass(frozen=True, slots=True)
class NodeSlot:
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


def parse_node_tables(file: Table) -> tuple[Table, ...]:
    """The [[node]] tables, each with the `index` (a number or a list) that it needs."""
    tables = []
    seen: set[int] = set()
    for table in file.tables("node", NODE_TABLE_KEYS):
        index = table.values.get("index")
        if isinstance(index, str):
            numbers: tuple[int, ...] = tuple(
                CpuSet.parse(index, f"{table.source}: {table.key('index')}")
            )
        else:
            numbers = table.integers("index", most=MAX_NODES - 1) or ()
        if not numbers or max(numbers) >= MAX_NODES:
            raise table.refusal("index", f'node numbers below {MAX_NODES}, 4 or "5-11"', index)
        if seen & set(numbers):
            raise table.refusal("index", "each node once", index)
        seen |= set(numbers)
        tables.append(Table(table.source, table.where, {**table.values, "index": list(numbers)}))
    return tuple(tables)


def parse_nodes(
    file: Table, tables: Sequence[Table], cores: Sequence[CoreSlot]
) -> tuple[NodeSlot, ...]:
    """Every node, ascending: those with cores, and those that only a [[node]] names."""
    packages: dict[int, set[int]] = {}
    for core in cores:
        packages.setdefault(core.node, set()).add(core.package)
    table_of = {index: table for table in tables for index in table.integers("index") or ()}
    nodes = []
    for index in sorted(packages.keys() | table_of.keys()):
        table = table_of.get(index, Table(file.source, f"node {index}", {}))
        nodes.append(_node(file, table, index, packages.get(index, set()), cores))
    return tuple(nodes)


def _node(
    file: Table, table: Table, index: int, of_cores: Collection[int], cores: Sequence[CoreSlot]
) -> NodeSlot:
    package = next(iter(of_cores)) if len(of_cores) == 1 else None
    known = {core.package for core in cores}
    stated = table.optional_integer("package")
    if stated is not None and (stated not in known or (of_cores and stated not in of_cores)):
        raise table.refusal("package", f"one of the packages {sorted(of_cores or known)}", stated)
    memory = table.size("memory")
    if memory is None:
        memory = file.size("memory_per_node") if of_cores else 0
    if memory is None:
        raise file.refusal("memory_per_node", f"the memory of each node, node {index} too", None)
    pools_of = table if "hugepages" in table else file
    key = "hugepages" if pools_of is table else "hugepages_per_node"
    pools = _page_pools(pools_of, key) if memory else ()
    reserved = sum(pool.page_bytes * pool.total_pages for pool in pools)
    if reserved > memory:
        raise pools_of.refusal(key, f"huge pages within {memory} bytes of node {index}", reserved)
    free = table.size("memory_free")
    if free is not None and free > memory - reserved:
        raise table.refusal("memory_free", f"at most {memory - reserved} bytes", free)
    gpu = table.optional_text("gpu")
    if gpu is not None and of_cores:
        raise table.refusal("gpu", "a node without cores", f"node {index} with cores")
    # The kernel shows what memory is only of a DAX device's node ("other") and of a GPU's.
    kind = table.choice("kind", (_DEVICE_MEMORY, ""), "")
    if kind and gpu is not None:
        raise table.refusal("kind", "no kind next to gpu", kind)
    return NodeSlot(
        index=index,
        package=package if stated is None else stated,
        has_cores=bool(of_cores),
        memory_bytes=memory,
        free_bytes=memory - reserved if free is None else free,
        page_pools=pools,
        is_device_memory=bool(kind),
        gpu=gpu,
        generic_initiator=table.truth("generic_initiator", False),
    )


def _page_pools(table: Table, key: str) -> tuple[PagePool, ...]:
    """Pools of a table such as { "2MiB" = 512, "1GiB" = { total = 64, free = 8 } }."""
    value = table.values.get(key, {})
    if not isinstance(value, Mapping):
        raise table.refusal(key, 'a table such as { "1GiB" = 64 }', value)
    pools = []
    entries = Table(table.source, table.key(key), value)
    for size in value:
        page_bytes = Table(table.source, table.key(key), {size: size}).size(size) or 0
        if page_bytes < 4096 or page_bytes & (page_bytes - 1):
            raise entries.refusal(size, "a page size, a power of two", size)
        if isinstance(value[size], Mapping):
            counts = entries.table(size, ("total", "free"))
            total = counts.integer("total", 0)
            free = counts.integer("free", total, most=total)
        else:
            total = free = entries.integer(size, 0)
        pools.append(PagePool(page_bytes, total, free))
    return tuple(sorted(pools))


def parse_distances(file: Table, nodes: Sequence[NodeSlot]) -> tuple[tuple[int, ...], ...] | None:
    """Shape (nodes, nodes), [from][to] ascending; None for a host that gives none ("none")."""
    value = file.values.get("distances", {})
    if value == "none":
        return None
    if isinstance(value, list):
        return _matrix(file, value, len(nodes))
    table = file.table("distances", tuple(_DISTANCES))
    classes = {
        name: table.integer(name, default, least=LOCAL_DISTANCE + 1, most=_MAX_DISTANCE)
        for name, default in _DISTANCES.items()
    }
    return tuple(tuple(_distance(a, b, classes) for b in nodes) for a in nodes)


def _distance(a: NodeSlot, b: NodeSlot, classes: Mapping[str, int]) -> int:
    if a.index == b.index:
        return LOCAL_DISTANCE
    if not a.has_cores and not b.has_cores:
        return classes["between_memory"]
    near = "same_package" if a.package is not None and a.package == b.package else "other_package"
    return classes[near if a.has_cores and b.has_cores else f"memory_{near}"]


def _matrix(file: Table, rows: Sequence[object], count: int) -> tuple[tuple[int, ...], ...]:
    matrix = []
    for i, row in enumerate(rows):
        line = Table(file.source, "distances", {str(i): row})
        numbers = line.integers(str(i), least=LOCAL_DISTANCE, most=_MAX_DISTANCE) or ()
        if len(numbers) != count:
            raise line.refusal(str(i), f"{count} distances, one per node", row)
        if numbers[i] != LOCAL_DISTANCE:
            raise line.refusal(str(i), f"{LOCAL_DISTANCE} from node to itself", numbers[i])
        matrix.append(numbers)
    if len(matrix) != count:
        raise file.refusal("distances", f"{count} rows, one per node", len(matrix))
    return tuple(matrix)
